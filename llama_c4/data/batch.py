"""A batch of blocks, and the host memory in which it is put together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""Label of a position that does not count in the loss."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B blocks of T targets.

    Attributes:
        tokens: Inputs, int64 [B, T]; 0 where a block is padded.
        targets: The next token of every input, int64 [B, T]; -100 where a block is padded.
        num_targets: Positions with a target that counts.
    """

    tokens: Tensor
    targets: Tensor
    num_targets: int


def for_workers(batch: Batch, num_workers: int) -> Batch:
    """The same blocks with a leading worker axis: worker i takes rows i, i + N, i + 2N, … of the stream.

    Args:
        batch: [N·b, T], as consecutive positions of the stream.
        num_workers: N.
    Returns:
        Views [N, b, T]; `num_targets` still counts all workers together.
    Raises:
        ValueError: The rows do not divide among the workers.
    """
    rows = batch.tokens.shape[0]
    if num_workers < 1 or rows % num_workers:
        raise ValueError(f"{rows} rows do not divide among {num_workers} workers")

    def split(values: Tensor) -> Tensor:
        return values.unflatten(0, (rows // num_workers, num_workers)).transpose(0, 1)  # [N·b, T] → [N, b, T]

    return Batch(split(batch.tokens), split(batch.targets), batch.num_targets)


class BatchBuffer:
    """Collects uint16 rows of T + 1 tokens and widens them once, straight into what the device gets.

    For a CUDA device, inputs and targets share one pinned array [2, B, T] that a single copy takes over without
    blocking: torch's pinned allocator records the copying stream and hands the memory out again only when that copy has
    been done, so the buffer may be dropped at once. On the CPU they are two numpy arrays: making and splitting tensors
    would cost as much again as filling them.
    """

    def __init__(self, num_rows: int, *, context_length: int, device: torch.device) -> None:
        self._device = device
        self._num_targets = num_rows * context_length
        if device.type == "cuda":
            self._pinned = torch.empty((2, num_rows, context_length), dtype=torch.int64, pin_memory=True)
            self._tokens, self._targets = self._pinned.numpy()
        else:
            self._tokens = np.empty((num_rows, context_length), dtype=np.int64)
            self._targets = np.empty_like(self._tokens)

    def put(self, at: int, rows: np.ndarray) -> None:
        """Widen rows, uint16 [n, T + 1], into the places at, at + 1, …; neighbours in a row are input and target."""
        places = slice(at, at + len(rows))
        np.copyto(self._tokens[places], rows[:, :-1])
        np.copyto(self._targets[places], rows[:, 1:])

    def pad(self, at: int, num_targets: int) -> None:
        """Let a row hold only so many targets: input 0 and target -100 behind them."""
        self._tokens[at, num_targets:] = 0
        self._targets[at, num_targets:] = IGNORED
        self._num_targets -= self._tokens.shape[1] - num_targets

    def to_batch(self) -> Batch:
        """The batch on its device; on CUDA the copy is queued on the current stream."""
        if self._device.type == "cuda":
            tokens, targets = self._pinned.to(self._device, non_blocking=True)
        else:
            tokens, targets = torch.from_numpy(self._tokens), torch.from_numpy(self._targets)
        return Batch(tokens, targets, self._num_targets)
