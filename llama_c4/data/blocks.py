"""Blocks of a split by their index, as validation takes them: in file order, the padded rest included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from llama_c4.data.batch import Batch, BatchBuffer
from llama_c4.data.cache import TokenSplit


def num_blocks_with_rest(split: TokenSplit, context_length: int) -> int:
    """Blocks of a split when the rest behind the last full one counts as a block: ceil((T - 1) / L)."""
    return -(-max(split.num_tokens - 1, 0) // context_length)


def read_blocks(
    split: TokenSplit, indices: Sequence[int] | np.ndarray, *, context_length: int, device: torch.device
) -> Batch:
    """Read blocks of a split; runs of neighbours are read in one piece.

    Block i is tokens [iL, iL + L]: the inputs are the first L, the targets the same shifted by one. The index behind
    the last full block is the rest, if there is one, padded with input 0 and target -100.

    Args:
        split: Where the tokens lie.
        indices: Which blocks, in the order of the batch's rows.
        context_length: L.
        device: Where the batch is wanted.
    Raises:
        IndexError: A block that the split does not have.
        DataError: A file that is shorter than it should be.
    """
    rows, num_targets = _read_rows(split, indices, context_length)
    return _to_batch(rows, num_targets, device)


class KeptBlocks:
    """Blocks that were read once, in one pass over the split, and are kept as uint16 in memory.

    Args:
        split: Where the tokens lie.
        indices: Which blocks, ascending.
        context_length: L.
    """

    def __init__(self, split: TokenSplit, indices: Sequence[int] | np.ndarray, *, context_length: int) -> None:
        self._rows, self._num_targets = _read_rows(split, indices, context_length)

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, batch_size: int, *, device: torch.device) -> Iterator[Batch]:
        """All kept blocks in their order; the last batch may be smaller."""
        for at in range(0, len(self), batch_size):
            part = slice(at, at + batch_size)
            yield _to_batch(self._rows[part], self._num_targets[part], device)


def _read_rows(
    split: TokenSplit, indices: Sequence[int] | np.ndarray, context_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of L + 1 tokens, uint16 [B, L + 1], zeros behind a rest; and the targets of each, int64 [B]."""
    blocks = np.asarray(indices, dtype=np.int64)
    available = num_blocks_with_rest(split, context_length)
    if blocks.size and (blocks.min() < 0 or blocks.max() >= available):
        raise IndexError(
            f"blocks {blocks.min()} to {blocks.max()} are not all among the {available} of the {split.name} split "
            f"({split.num_tokens} tokens, context_length {context_length})"
        )
    rows = np.zeros((len(blocks), context_length + 1), dtype=np.uint16)
    num_targets = np.minimum(context_length, split.num_tokens - 1 - blocks * context_length)
    run_starts = np.flatnonzero(np.diff(blocks, prepend=blocks[:1] - 2) != 1)
    for first, end in zip(run_starts, np.append(run_starts[1:], len(blocks)), strict=True):
        tokens = split.read(int(blocks[first]) * context_length, int(num_targets[first:end].sum()) + 1)
        _cut(tokens, rows[first:end], num_targets[first:end])
    return rows, num_targets


def _cut(tokens: np.ndarray, rows: np.ndarray, num_targets: np.ndarray) -> None:
    """Lay a run of neighbouring blocks, which share their look-ahead tokens, into rows."""
    starts = np.cumsum(num_targets) - num_targets
    for row, start, count in zip(rows, starts, num_targets, strict=True):
        row[: count + 1] = tokens[start : start + count + 1]


def _to_batch(rows: np.ndarray, num_targets: np.ndarray, device: torch.device) -> Batch:
    context_length = rows.shape[1] - 1
    buffer = BatchBuffer(len(rows), context_length=context_length, device=device)
    buffer.put(0, rows)
    for place in np.flatnonzero(num_targets < context_length):
        buffer.pad(int(place), int(num_targets[place]))
    return buffer.to_batch()
