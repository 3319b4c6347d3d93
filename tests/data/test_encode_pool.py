"""The pool: order, bounds, ends. Real processes, so each test starts few."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llama_c4.config.errors import DataError
from llama_c4.data.documents import Document, Seen
from llama_c4.data.encode_pool import (
    BATCH_BYTES,
    BATCHES_PER_PROCESS,
    EncoderPool,
    SerialEncoder,
    batches_of,
    build_encoder,
)
from tests.data.small_corpus import text, tokenizer


def batch(*texts: str) -> list[Document]:
    return [Document(text.encode(), Seen()) for text in texts]


def children() -> list[int]:
    """Process ids of this process's children."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether all processes end within some seconds; a zombie has ended."""

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_batches_come_in_order_even_if_a_later_one_is_done_first() -> None:
    batches = [batch(text(0, words=60_000)), *(batch(text(seed)) for seed in range(1, 12))]
    serial = list(SerialEncoder(tokenizer()).encode_in_order(iter(batches)))
    with EncoderPool(tokenizer(), processes=2) as pool:
        parallel = list(pool.encode_in_order(iter(batches)))
    assert [b.tokens.tolist() for b in parallel] == [b.tokens.tolist() for b in serial]
    assert [b.ends.tolist() for b in parallel] == [b.ends.tolist() for b in serial]
    assert children() == []


def test_at_most_two_batches_of_a_process_are_on_their_way_and_an_early_end_leaves_nothing() -> None:
    drawn = 0

    def endless() -> Iterator[list[Document]]:
        nonlocal drawn
        while True:
            drawn += 1
            yield batch(text(drawn))

    with EncoderPool(tokenizer(), processes=2) as pool:
        assert len(children()) == 2
        with closing(pool.encode_in_order(endless())) as encoded:
            for given in range(1, 30):
                next(encoded)
                assert drawn - given < 2 * BATCHES_PER_PROCESS
        assert len(list(pool.encode_in_order(iter([batch("again")])))) == 1
    assert children() == []


def test_a_fault_in_a_process_reaches_the_caller_and_ends_the_pool() -> None:
    forged = Document(b"\xff", Seen())  # not UTF-8: no source gives such a text
    with (
        pytest.raises(DataError, match="a tokenizing process ended with status 1"),
        EncoderPool(tokenizer(), processes=1) as pool,
    ):
        list(pool.encode_in_order(iter([batch("a"), [forged], batch("b")])))
    assert children() == []


def test_a_killed_process_is_a_clear_error() -> None:
    with (
        pytest.raises(DataError, match=r"ended with status -9 .*fewer data.prepare_processes"),
        EncoderPool(tokenizer(), processes=1) as pool,
    ):
        next(pool.encode_in_order(iter([batch("a")])))
        os.kill(children()[0], signal.SIGKILL)
        list(pool.encode_in_order(iter([batch("a")] * 5)))
    assert children() == []


def test_an_exception_in_the_parent_ends_the_processes_at_once() -> None:
    started = 0.0
    with pytest.raises(KeyboardInterrupt), EncoderPool(tokenizer(), processes=2) as pool:
        next(pool.encode_in_order(iter([batch("a"), batch(text(0, words=3_000_000))] * 2)))
        started = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - started < 3
    assert children() == []


def test_no_process_outlives_a_killed_parent() -> None:
    code = (
        "import sys, time; from tests.data.small_corpus import tokenizer;"
        "from llama_c4.data.encode_pool import EncoderPool\n"
        "with EncoderPool(tokenizer(), processes=2) as pool:\n"
        "    print(*[w._process.pid for w in pool._workers], flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pids)


def test_the_pool_works_after_the_library_has_used_its_threads_here() -> None:
    code = (
        "import tokenizers; from tests.data.small_corpus import *; from tests.data.test_encode_pool import batch\n"
        "tokenizers.Tokenizer.from_str(byte_level_json().decode()).encode_batch(['a b'] * 100)\n"
        "from llama_c4.data.encode_pool import EncoderPool\n"
        "with EncoderPool(tokenizer(), processes=2) as pool:\n"
        "    print(len(list(pool.encode_in_order(iter([batch('a')] * 8)))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "8", done.stderr


def test_documents_are_grouped_by_bytes_and_a_huge_one_is_a_batch_of_its_own() -> None:
    sizes = [10, BATCH_BYTES - 10, 3 * BATCH_BYTES, 1, 2]
    groups = list(batches_of(Document(b"x" * size, Seen()) for size in sizes))
    assert [[len(document.text) for document in group] for group in groups] == [sizes[:2], sizes[2:3], sizes[3:]]


def test_one_process_encodes_here() -> None:
    assert isinstance(build_encoder(tokenizer(), processes=1), SerialEncoder)
