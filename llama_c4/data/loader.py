"""The training stream: its interface, and the choice between the loaders.

Worker processes are not used. Each batch would be copied through shared memory, which costs more than putting it
together: a plain gather out of a group in memory delivers hundreds of millions of targets per second, far more than
any model of this size consumes.

With N workers a global batch of N·b blocks is one call of `batch`; worker i owns rows i, i + N, i + 2N, … of the
stream, also across groups and epochs (`for_workers` gives that view), so the workers' blocks are disjoint and their
union is the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from llama_c4.config.errors import DataError
from llama_c4.config.schema import DataConfig
from llama_c4.data.batch import IGNORED, Batch, for_workers
from llama_c4.data.blocks import KeptBlocks, num_blocks_with_rest, read_blocks
from llama_c4.data.cache import TokenCache
from llama_c4.data.cache_match import capacity_fault
from llama_c4.data.loader_v1 import open_range_stream
from llama_c4.data.loader_v2 import open_group_stream

__all__ = [
    "IGNORED",
    "Batch",
    "BlockStream",
    "KeptBlocks",
    "build_stream",
    "for_workers",
    "num_blocks_with_rest",
    "read_blocks",
]


class BlockStream(Protocol):
    """The training blocks in their order: a pure function of cache, seed and position, with nothing to remember but
    buffers."""

    @property
    def capacity(self) -> int:
        """Blocks of the stream: all that the cache can give with v2, the selected prefix with v1."""

    def batch(self, first: int, count: int) -> Batch:
        """The blocks at positions [first, first + count); any position may be asked for, neighbours are fast.

        Raises:
            ValueError: Positions outside the stream, or a closed stream.
            DataError: The tokens cannot be read; the stream is closed then.
        """

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """What a checkpoint keeps: the loader's version, what its order depends on, and the committed cursor; all
        scalars."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError, naming both sides, unless this stream continues the one that was saved."""

    def close(self) -> None:
        """End the background thread and free the buffers; harmless when repeated."""


def build_stream(
    data: DataConfig,
    cache: TokenCache,
    *,
    context_length: int,
    seed: int | None,
    total_blocks: int,
    device: torch.device,
) -> BlockStream:
    """Open the training stream that `data.loader` names.

    Args:
        data: The configuration of the data.
        cache: The prepared cache.
        context_length: L, targets of a block.
        seed: Seed of the order; None keeps the order of the files.
        total_blocks: Blocks that training will use.
        device: Where batches are wanted.
    Raises:
        DataError: The cache cannot give that many blocks; says what would be enough.
    """
    fault = capacity_fault(cache, data, needed_blocks=total_blocks, context_length=context_length)
    if fault is not None:
        raise DataError(fault)
    if data.loader == "v1":
        assert data.buffer_size_mib is not None
        return open_range_stream(
            cache,
            context_length=context_length,
            buffer_size_mib=data.buffer_size_mib,
            seed=seed,
            total_blocks=total_blocks,
            device=device,
            prefetch=data.prefetch,
        )
    assert data.shuffle_group_size is not None
    return open_group_stream(
        cache,
        context_length=context_length,
        group_size=data.shuffle_group_size,
        seed=seed,
        total_blocks=total_blocks,
        device=device,
        prefetch=data.prefetch,
    )
