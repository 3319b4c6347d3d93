"""Loader v2, the default: groups of shards in file order, each shuffled as a whole, one group read ahead."""

from __future__ import annotations

import torch

from llama_c4.data.cache import TokenCache
from llama_c4.data.order import GroupOrder
from llama_c4.data.reader import ShuffledReader
from llama_c4.data.stream import Identity, ShuffledStream

VERSION = 2


def open_group_stream(
    cache: TokenCache,
    *,
    context_length: int,
    group_size: int,
    seed: int | None,
    total_blocks: int,
    device: torch.device,
    prefetch: bool,
) -> ShuffledStream:
    """Open the training split of a cache in the order of `GroupOrder`.

    Args:
        cache: The token cache.
        context_length: L, targets of a block.
        group_size: Consecutive shards that are shuffled together.
        seed: Seed of the order; None keeps the order of the files.
        total_blocks: Blocks that training will use; the stream does not depend on it, only how far is read ahead.
        device: Where batches are wanted.
        prefetch: Read the next group in a background thread; does not change the stream.
    """
    split = cache.train
    order = GroupOrder(
        [shard.num_tokens for shard in split.shards],
        group_size=group_size,
        context_length=context_length,
        seed=seed,
        complete=split.complete,
    )
    reader = ShuffledReader(
        split,
        order,
        context_length=context_length,
        device=device,
        prefetch=prefetch,
        num_positions=min(total_blocks, order.capacity),
    )
    identity: Identity = {
        "version": VERSION,
        "cache_identity": cache.identity,
        "context_length": context_length,
        "shuffle_group_size": group_size,
        "seed": seed,
    }
    return ShuffledStream(reader, identity=identity, ancestors=cache.ancestors)
