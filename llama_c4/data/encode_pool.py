"""Documents to tokens, in order, over a bounded number of processes.

The processes are started as fresh interpreters with a pipe each, not forked: a fork after the tokenizer library has
used its threads would hang, and a pool that shares its pipes among its members would outlive a killed parent.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llama_c4.config.errors import DataError
from llama_c4.data.cache import Tokens
from llama_c4.data.documents import Document
from llama_c4.data.shards import EncodedBatch
from llama_c4.data.tokenizer import Tokenizer

BATCH_BYTES = 1 << 19
BATCH_DOCUMENTS = 1024
BATCHES_PER_PROCESS = 2
"""At most so many batches of every process are on their way; it bounds the memory and keeps the processes busy."""

Encoding = tuple[Tokens, NDArray[np.int64]]


class Encoder(Protocol):
    """Something that encodes batches: one process or many."""

    def encode_in_order(self, batches: Iterator[list[Document]]) -> Generator[EncodedBatch, None, None]:
        """Encoded batches in the order of the batches. Close the generator to stop early."""
        ...


class SerialEncoder:
    """Encodes in this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_in_order(self, batches: Iterator[list[Document]]) -> Generator[EncodedBatch, None, None]:
        for batch in batches:
            yield _encoded(batch, self._tokenizer.encoder.encode([document.text for document in batch]))

    def __enter__(self) -> SerialEncoder:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class EncoderPool:
    """Encodes in `processes` processes; use as a context manager.

    On a clean exit the processes end by themselves; on an exception they are killed. Either way none is left.
    """

    def __init__(self, tokenizer: Tokenizer, *, processes: int) -> None:
        self._processes = processes
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        try:
            for _ in range(processes):
                self._workers.append(_Worker(tokenizer))
        except BaseException:
            for worker in self._workers:
                worker.kill()
                worker.close()
            raise
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="encode")

    def encode_in_order(self, batches: Iterator[list[Document]]) -> Generator[EncodedBatch, None, None]:
        """See `Encoder`; a slow batch holds up the later ones, which wait encoded.

        Raises:
            DataError: A document cannot be encoded, or a process was killed.
        """
        pending: deque[tuple[list[Document], Future[Encoding]]] = deque()
        try:
            for batch in batches:
                pending.append((batch, self._threads.submit(self._encode, [document.text for document in batch])))
                if len(pending) == BATCHES_PER_PROCESS * self._processes:
                    yield _finished(pending)
            while pending:
                yield _finished(pending)
        finally:
            for _, future in pending:
                future.cancel()

    def _encode(self, texts: Sequence[bytes]) -> Encoding:
        worker = self._idle.get()
        try:
            return worker.encode(texts)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # The threads wait for answers; the death of their processes wakes them up.
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process and its pipe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Its own process group, so that Ctrl-C reaches the parent alone, which then ends the pool in order.
        code = f"import sys; sys.path[:] = {sys.path!r}; from llama_c4.data.encode_worker import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        self._send(tokenizer.encoder_settings)

    def encode(self, texts: Sequence[bytes]) -> Encoding:
        """Send one batch and wait for its tokens."""
        assert self._process.stdout is not None
        self._send(texts)
        try:
            kind, value = pickle.load(self._process.stdout)
        except EOFError:
            raise DataError(self._death()) from None
        if kind == "fault":
            raise DataError(value)
        return value

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(value, self._process.stdin, protocol=5)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise DataError(self._death()) from None

    def _death(self) -> str:
        return (
            f"a tokenizing process ended with status {self._process.wait()} (-9: killed, often for want of memory); "
            "run the same command again, perhaps with fewer data.prepare_processes"
        )

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Close the pipe, which ends the process, and wait for that."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def build_encoder(tokenizer: Tokenizer, *, processes: int) -> SerialEncoder | EncoderPool:
    """One process encodes here; a pool is started for more."""
    return SerialEncoder(tokenizer) if processes == 1 else EncoderPool(tokenizer, processes=processes)


def _encoded(batch: list[Document], encoding: Encoding) -> EncodedBatch:
    tokens, ends = encoding
    return EncodedBatch(tokens=tokens, documents=batch, ends=ends)


def _finished(pending: deque[tuple[list[Document], Future[Encoding]]]) -> EncodedBatch:
    batch, future = pending.popleft()
    return _encoded(batch, future.result())


def batches_of(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about `BATCH_BYTES`; a larger document is a batch of its own."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
