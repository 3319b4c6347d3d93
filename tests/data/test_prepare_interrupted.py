"""An interrupted preparation: never taken for complete, no process left, and the same bytes in the end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from llama_c4.config.errors import DataError
from llama_c4.config.schema import C4FilesConfig
from llama_c4.data import encode_pool, shards
from llama_c4.data.cache import TokenCache, partial_path
from llama_c4.data.shards import SplitWriter
from tests.data.small_corpus import run, shard_bytes, text, write_corpus, write_rows
from tests.data.test_encode_pool import children, gone

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data(tmp_path: Path) -> C4FilesConfig:
    return write_corpus(tmp_path)


class Stopped(Exception):
    """Ends a preparation from the inside."""


def stop_before_shard(number: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the preparation fail when it closes its n-th full shard from now on."""
    true_close, left = shards._OpenShard.close, [number]

    def close(self: Any, name: str) -> dict[str, Any]:
        if left[0] == 0:
            raise error
        left[0] -= 1
        return true_close(self, name)

    monkeypatch.setattr(shards._OpenShard, "close", close)


def expected_bytes(data: C4FilesConfig) -> dict[str, bytes]:
    return shard_bytes(run(data, cache_dir=f"{data.cache_dir}-uninterrupted"))


def test_a_preparation_stopped_at_any_shard_continues_behind_the_last_complete_one(data: C4FilesConfig) -> None:
    expected = expected_bytes(data)
    for number in range(len(expected)):
        with pytest.MonkeyPatch.context() as patch:
            stop_before_shard(number, patch, Stopped())
            with pytest.raises(Stopped):
                run(data)
        with pytest.raises(DataError, match="its preparation is incomplete"):
            TokenCache.open(data.cache_dir)
        kept = {p.name: p.stat().st_mtime_ns for p in partial_path(Path(data.cache_dir)).glob("*.bin")}
        assert len(kept) == number
        cache = run(data)
        assert shard_bytes(cache) == expected
        assert all((cache.path / name).stat().st_mtime_ns == written for name, written in kept.items())
        cache.path.rename(f"{data.cache_dir}-{number}")


def test_an_extension_stopped_anywhere_leaves_the_old_cache_and_continues(data: C4FilesConfig) -> None:
    expected = expected_bytes(data)
    old = run(data, train_tokens=1100)
    for number in range(3):
        with pytest.MonkeyPatch.context() as patch:
            stop_before_shard(number, patch, Stopped())
            with pytest.raises(Stopped):
                run(data)
        assert TokenCache.open(data.cache_dir, verify=True).identity == old.identity
    assert shard_bytes(run(data)) == expected
    assert not partial_path(Path(data.cache_dir)).exists()


def test_other_settings_start_anew_and_take_nothing_of_the_interrupted_work(
    data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_before_shard(3, patch, Stopped())
        with pytest.raises(Stopped):
            run(data)
    cache = run(data, shuffle_seed=7)
    assert shard_bytes(cache) == shard_bytes(run(data, shuffle_seed=7, cache_dir=f"{data.cache_dir}-fresh"))


def test_a_damaged_shard_of_the_interrupted_work_is_found_out(
    data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_before_shard(3, patch, Stopped())
        with pytest.raises(Stopped):
            run(data)
    shard = min(partial_path(Path(data.cache_dir)).glob("*.bin"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    assert shard_bytes(run(data)) == expected_bytes(data)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_archive_leaves_no_cache_and_after_its_repair_the_work_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(encode_pool, "BATCH_DOCUMENTS", 4)
    data = replace(write_corpus(tmp_path), shuffle_documents=5)
    expected = expected_bytes(data)
    archive = tmp_path / "en" / "c4-train.00001-of-01024.json.gz"
    good = archive.read_bytes()
    bad = bytearray(good)
    if damage == "truncated":
        del bad[len(bad) * 9 // 10 :]
    else:
        bad[-6] ^= 1  # the checksum: every row before it looks good
    archive.write_bytes(bad)
    with pytest.raises(DataError, match=rf"{archive.name}: the archive is truncated or corrupt"):
        run(data)
    assert not Path(data.cache_dir).exists()
    assert list(partial_path(Path(data.cache_dir)).glob("train-*.bin"))
    with pytest.raises(DataError, match=archive.name):
        run(data)
    archive.write_bytes(good)
    assert shard_bytes(run(data)) == expected


def test_rows_of_an_archive_that_was_replaced_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_corpus(tmp_path, files=1)
    with monkeypatch.context() as patch:
        stop_before_shard(3, patch, Stopped())
        with pytest.raises(Stopped):
            run(data)
    write_rows(tmp_path / "en" / "c4-train.00000-of-01024.json.gz", [text(seed) for seed in range(7, 67)])
    assert shard_bytes(run(data)) == expected_bytes(data)


def test_a_full_disk_is_a_clear_error_and_the_file_is_closed(
    data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_bytes(data)
    opened: list[Any] = []
    true_fsync, true_init = os.fsync, shards._OpenShard.__init__

    def remember(self: Any, path: Path) -> None:
        true_init(self, path)
        opened.append(self.file)

    def full(descriptor: int) -> None:
        if len(opened) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(shards._OpenShard, "__init__", remember)
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"no space left on the device; free some, .*run the same command again"):
            run(data)
    assert all(file.closed for file in opened)
    assert not Path(data.cache_dir).exists()
    assert shard_bytes(run(data)) == expected


def test_a_really_full_device_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "train-00000.writing").symlink_to("/dev/full")
    writer = SplitWriter(
        tmp_path, "train", shard_tokens=100_000, start=shards.FullShards(), on_full_shard=lambda _: None
    )
    with pytest.raises(DataError, match=r"train-00000\.writing: no space left"):
        for seed in range(100):
            writer.add(next(batches(text(seed, words=2000))))
    writer.abort()


def batches(document: str) -> Any:
    from tests.data.test_encode_pool import SerialEncoder, batch, tokenizer

    return SerialEncoder(tokenizer()).encode_in_order(iter([batch(document)]))


def test_one_cache_is_prepared_by_one_process_at_a_time(data: C4FilesConfig) -> None:
    partial = partial_path(Path(data.cache_dir))
    partial.mkdir()
    with (partial / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711 on elsewhere")
        lock.flush()
        with pytest.raises(DataError, match="being prepared by process 4711 on elsewhere; wait for it"):
            run(data)
    assert run(data).train.num_documents == 60


def test_a_lock_that_was_renamed_away_with_its_folder_is_not_the_lock(data: C4FilesConfig) -> None:
    from llama_c4.data.working_folder import claim_working_folder

    path = Path(data.cache_dir)
    with claim_working_folder(path) as work:
        work.path.rename(path)
        with claim_working_folder(path) as other:  # a new folder with a lock of its own
            assert other.path.exists()


SCRIPT = """
import json, sys
from llama_c4.config.schema import C4FilesConfig
from llama_c4.data.prepare import prepare
data = C4FilesConfig(**json.loads(sys.argv[1]))
print("started", flush=True)
prepare(data, vocab_size=320, context_length=8, train_tokens_needed=None, progress=False)
"""


def start(data: C4FilesConfig) -> subprocess.Popen[str]:
    """The preparation in a process of its own, two processes beneath it."""
    settings = json.dumps({**asdict(data), "prepare_processes": 2})
    # A shell starts its background jobs with SIGINT ignored, and what a test runner has is inherited.
    script = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{SCRIPT}"
    return subprocess.Popen(
        [sys.executable, "-c", script, settings], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[C4FilesConfig, dict[str, bytes]]:
    """A corpus that takes some batches, and the bytes of its cache."""
    data = replace(write_corpus(tmp_path_factory.mktemp("large"), documents=2000, words=200), shard_tokens=50_000)
    return data, expected_bytes(data)


@pytest.mark.parametrize(
    ("number", "after_shards", "status"),
    [
        (signal.SIGTERM, 3, 75),
        (signal.SIGINT, 3, -signal.SIGINT),
        (signal.SIGKILL, 3, -signal.SIGKILL),
        (signal.SIGKILL, 0, -signal.SIGKILL),
    ],
)
def test_a_signal_leaves_the_partial_folder_and_no_process_and_the_next_run_ends_in_the_same_bytes(
    large: tuple[C4FilesConfig, dict[str, bytes]], tmp_path: Path, number: int, after_shards: int, status: int
) -> None:
    data = replace(large[0], cache_dir=str(tmp_path / "cache"))
    partial = partial_path(Path(data.cache_dir))
    process = start(data)
    wait_for(
        lambda: (partial / "progress.json").exists() and len(list(partial.glob("t*.bin"))) >= after_shards, process
    )
    pids = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    assert gone(pids)
    assert partial.exists()
    assert not Path(data.cache_dir).exists()
    assert shard_bytes(run(data)) == large[1]


def test_a_second_sigterm_does_no_harm(large: tuple[C4FilesConfig, dict[str, bytes]], tmp_path: Path) -> None:
    data = replace(large[0], cache_dir=str(tmp_path / "cache"))
    process = start(data)
    wait_for((partial_path(Path(data.cache_dir)) / "progress.json").exists, process)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_the_callers_handler_of_sigterm_is_put_back(data: C4FilesConfig) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(data)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_in_the_middle_leaves_no_process(data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_before_shard(2, monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(data, prepare_processes=2)
    assert children() == []
