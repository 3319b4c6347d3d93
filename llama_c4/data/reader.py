"""Batches out of shuffled spans of a split: whole spans are read in one piece, rows are widened as they are asked
for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from llama_c4.data.batch import Batch, BatchBuffer
from llama_c4.data.cache import TokenSplit
from llama_c4.data.order import Order, Span

# Small enough that a reader which is told to stop does so within milliseconds.
READ_TOKENS = 1 << 22


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A span in memory: its blocks as windows over the buffer, uint16 [num_blocks, L + 1], and the order of its
    rows."""

    place: int
    span: Span
    buffer: np.ndarray
    blocks: np.ndarray
    rows: np.ndarray


class ShuffledReader:
    """Random access to the blocks of a stream by position, fast where positions follow one another.

    One span is active; with `prefetch` a background thread reads the one behind it. There are at most two buffers,
    and they are used again in turn. A span is read from its first token to its look-ahead token, and no other one is.

    Args:
        split: Where the tokens lie.
        order: Which block stands at which position.
        context_length: L, targets of a block.
        device: Where batches are wanted.
        prefetch: Read ahead in a background thread.
        num_positions: Positions that will be used; nothing behind their last span is read ahead.
    """

    def __init__(
        self,
        split: TokenSplit,
        order: Order,
        *,
        context_length: int,
        device: torch.device,
        prefetch: bool,
        num_positions: int,
    ) -> None:
        self._split, self._order, self._context_length, self._device = split, order, context_length, device
        self._last_ahead = order.place_of(num_positions - 1) if prefetch else -1
        self._active: _Loaded | None = None
        self._ahead: _Prefetch | None = None
        self._free: list[np.ndarray] = []
        self._closed = False

    @property
    def capacity(self) -> int:
        """Positions that can be read."""
        return self._order.capacity

    def batch(self, first: int, count: int) -> Batch:
        """The blocks at positions [first, first + count), in that order.

        Raises:
            ValueError: Positions outside the stream, or a closed reader.
            DataError: The tokens cannot be read; the reader is closed then.
        """
        if self._closed:
            raise ValueError("the block stream is closed")
        if first < 0 or count < 1 or first + count > self.capacity:
            raise ValueError(f"blocks [{first}, {first + count}) are not in a stream of {self.capacity}")
        try:
            return self._gather(first, count)
        except BaseException:
            # An interrupted read leaves a half-filled buffer and maybe a thread; neither may outlive the failure.
            self.close()
            raise

    def close(self) -> None:
        """End the background thread and let the buffers go; harmless when repeated."""
        self._closed = True
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()
        self._active = None
        self._free.clear()

    def _gather(self, first: int, count: int) -> Batch:
        buffer = BatchBuffer(count, context_length=self._context_length, device=self._device)
        done = 0
        while done < count:
            loaded = self._load(self._order.place_of(first + done))
            at = first + done - loaded.span.first_position
            rows = loaded.rows[at : at + count - done]
            buffer.put(done, loaded.blocks[rows])
            done += len(rows)
        return buffer.to_batch()

    def _load(self, place: int) -> _Loaded:
        """Make the span at a place the active one, and start reading the next."""
        if self._active is None or self._active.place != place:
            if self._active is not None:
                self._free.append(self._active.buffer)
                self._active = None
            self._active = self._take_ahead(place) or self._read(place, self._buffer(), threading.Event())
            if place < self._last_ahead:
                self._ahead = _Prefetch(self._read, place + 1, self._buffer())
        return self._active

    def _take_ahead(self, place: int) -> _Loaded | None:
        """What was read ahead, if it is the span at this place; another one is given up and its buffer used again."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead.place == place:
            return ahead.wait()
        self._free.append(ahead.cancel())
        return None

    def _buffer(self) -> np.ndarray:
        if self._free:
            return self._free.pop()
        longest = max(self._order.span(place).num_blocks for place in range(self._order.num_spans))
        return np.empty(longest * self._context_length + 1, dtype=np.uint16)

    def _read(self, place: int, buffer: np.ndarray, cancelled: threading.Event) -> _Loaded:
        span = self._order.span(place)
        tokens = buffer[: span.num_blocks * self._context_length + 1]
        start = span.first_block * self._context_length
        for at in range(0, len(tokens), READ_TOKENS):
            if cancelled.is_set():
                break
            part = tokens[at : at + READ_TOKENS]
            self._split.read(start + at, len(part), out=part)
        blocks = sliding_window_view(tokens, self._context_length + 1)[:: self._context_length]  # [num_blocks, L + 1]
        return _Loaded(place, span, buffer, blocks, self._order.rows(span))


class _Prefetch:
    """One span being read in a thread of its own, which ends with it."""

    def __init__(
        self, read: Callable[[int, np.ndarray, threading.Event], _Loaded], place: int, buffer: np.ndarray
    ) -> None:
        self.place = place
        self._buffer = buffer
        self._cancelled = threading.Event()
        self._loaded: _Loaded | None = None
        self._error: BaseException | None = None
        self._read = read
        # A daemon, so that a process that dies without closing its stream does not wait for the disk.
        self._thread = threading.Thread(target=self._run, name="block-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loaded = self._read(self.place, self._buffer, self._cancelled)
        except BaseException as error:  # it is raised again where the span is asked for
            self._error = error

    def wait(self) -> _Loaded:
        """The span, once it has been read; a failure of the thread is raised here."""
        try:
            self._thread.join()
        except BaseException:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        assert self._loaded is not None
        return self._loaded

    def cancel(self) -> np.ndarray:
        """Stop reading, wait for the thread, and return the buffer."""
        self._cancelled.set()
        self._thread.join()
        return self._buffer
