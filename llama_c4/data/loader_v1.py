"""Loader v1, of the archived campaign: ranges of the selected prefix, shuffled globally and then each inside.

Its order depends on the budget, so a run cannot be extended with it; loader v2 is the default.
"""

from __future__ import annotations

import torch

from llama_c4.data.cache import TokenCache
from llama_c4.data.order import RangeOrder
from llama_c4.data.reader import ShuffledReader
from llama_c4.data.stream import Identity, ShuffledStream

VERSION = 1


def open_range_stream(
    cache: TokenCache,
    *,
    context_length: int,
    buffer_size_mib: int,
    seed: int | None,
    total_blocks: int,
    device: torch.device,
    prefetch: bool,
) -> ShuffledStream:
    """Open the training split of a cache in the order of `RangeOrder`.

    Args:
        cache: The token cache; it must hold the prefix.
        context_length: L, targets of a block.
        buffer_size_mib: Size of a range in MiB.
        seed: Seed of the order; None keeps the order of the files.
        total_blocks: Blocks of the prefix: all that training will use, and the whole capacity of the stream.
        device: Where batches are wanted.
        prefetch: Read the next range in a background thread; does not change the stream.
    """
    order = RangeOrder(total_blocks, buffer_size_mib=buffer_size_mib, context_length=context_length, seed=seed)
    reader = ShuffledReader(
        cache.train,
        order,
        context_length=context_length,
        device=device,
        prefetch=prefetch,
        num_positions=total_blocks,
    )
    identity: Identity = {
        "version": VERSION,
        "cache_identity": cache.identity,
        "context_length": context_length,
        "buffer_size_mib": buffer_size_mib,
        "total_blocks": total_blocks,
        "seed": seed,
    }
    return ShuffledStream(reader, identity=identity, ancestors=cache.ancestors)
