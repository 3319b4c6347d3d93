"""Which block stands where in the training stream: pure functions of sizes and a seed, numpy only.

A *block* is L targets: block i of a stream of tokens is tokens [iL, iL + L], so neighbours share one look-ahead
token, and T tokens hold floor((T - 1) / L) of them. Both orders visit every block of their range exactly once, and
what stands at a position can be computed without the positions before it. A seed of None keeps the order of the
files.

The generators are numpy's PCG64, seeded with `SeedSequence([seed, purpose, counter])`, which numpy keeps stable
across releases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llama_c4.config.schema import DataConfig

BYTES_PER_TOKEN = 2
MIB = 1 << 20


def group_tokens_needed(total_blocks: int, *, shard_tokens: int, group_size: int, context_length: int) -> int:
    """Tokens that loader v2 needs for a number of blocks: whole groups and the look-ahead token of the last."""
    group_tokens = group_size * shard_tokens
    groups = (total_blocks - 1) * context_length // group_tokens + 1  # the last block needed starts in the last of them
    blocks = -(-groups * group_tokens // context_length)
    return blocks * context_length + 1


def tokens_needed(data: DataConfig, *, total_blocks: int, context_length: int) -> int:
    """Training tokens that a cache must hold before the chosen loader can deliver a number of blocks.

    v1 needs the blocks and one look-ahead token; v2 needs whole groups of shards and the look-ahead of the last. (A
    source that comes to its end before that still gives its last group.)
    """
    if data.loader == "v1":
        return total_blocks * context_length + 1
    assert data.shuffle_group_size is not None
    return group_tokens_needed(
        total_blocks,
        shard_tokens=data.shard_tokens,
        group_size=data.shuffle_group_size,
        context_length=context_length,
    )


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a positive integer")


def _permutation(length: int, entropy: Sequence[int] | None) -> np.ndarray:
    if entropy is None:
        return np.arange(length)
    return np.random.default_rng(np.random.SeedSequence(list(entropy))).permutation(length)


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of the token stream that lie in memory together, shuffled among themselves.

    Attributes:
        index: Which group (v2) or range (v1), counted in file order.
        first_block: The first block, in file order.
        num_blocks: How many blocks.
        first_position: Where in the training stream its first row stands.
    """

    index: int
    first_block: int
    num_blocks: int
    first_position: int

    @property
    def end_position(self) -> int:
        return self.first_position + self.num_blocks


class GroupOrder:
    """Loader v2: groups of consecutive shards in file order, the blocks of a group shuffled together.

    A block belongs to the group of its first token. With b_g the end of group g in tokens, its blocks are
    [ceil(b_{g-1} / L), ceil(b_g / L)), and it is usable if its aligned look-ahead token, number ceil(b_g / L) * L,
    exists. An incomplete last group is left out by that rule: shuffling what there is of it would give another order
    once the cache is extended. Only where the source has come to its end, so that the cache can never be extended, is
    the last group whole as it is, and its full blocks are used. Group g is permuted by SeedSequence([seed, 1, g])
    over the whole group, even if training stops inside it; hence the stream does not depend on the budget.

    Args:
        shard_tokens: Tokens of every shard, in file order.
        group_size: Consecutive shards of one group.
        context_length: L, targets of a block.
        seed: Seed of the order; None keeps the order of the files.
        complete: Whether the source has come to its end.
    """

    def __init__(
        self, shard_tokens: Sequence[int], *, group_size: int, context_length: int, seed: int | None, complete: bool
    ) -> None:
        _check_positive(group_size=group_size, context_length=context_length)
        self.seed = seed
        token_ends = [0, *np.cumsum(np.asarray(shard_tokens, dtype=np.int64)).tolist()]
        num_tokens = token_ends[-1]
        group_ends = [
            token_ends[min(i, len(shard_tokens))] for i in range(group_size, len(shard_tokens) + group_size, group_size)
        ]
        block_ends = [-(-end // context_length) for end in group_ends]
        self._ends = [end for end in block_ends if end * context_length < num_tokens]
        full_blocks = max(num_tokens - 1, 0) // context_length
        if complete and full_blocks > self.capacity:
            self._ends.append(full_blocks)

    @property
    def num_spans(self) -> int:
        """Usable groups."""
        return len(self._ends)

    @property
    def capacity(self) -> int:
        """Blocks of all usable groups."""
        return self._ends[-1] if self._ends else 0

    def span(self, place: int) -> Span:
        """The group at a place of the stream; v2 visits them in file order."""
        first = self._ends[place - 1] if place else 0
        return Span(index=place, first_block=first, num_blocks=self._ends[place] - first, first_position=first)

    def place_of(self, position: int) -> int:
        """The group that holds a position of the stream."""
        return bisect_right(self._ends, position)

    def rows(self, span: Span) -> np.ndarray:
        """Row of the group, counted from its first block, at each of its positions: int64 [num_blocks]."""
        return _permutation(span.num_blocks, None if self.seed is None else (self.seed, 1, span.index))


class RangeOrder:
    """Loader v1: sequence-aligned ranges over a selected prefix, shuffled globally and then each inside.

    A range is floor(buffer bytes / (2 L)) blocks, the last one the rest of the prefix. The ranges are ordered by
    SeedSequence([seed, 0]) over all of them, the rows of range r (counted in file order) by SeedSequence([seed, 1, r]).
    The order depends on the prefix, and so on the budget.

    Args:
        total_blocks: Blocks of the selected prefix.
        buffer_size_mib: Size of a range in MiB of uint16 tokens.
        context_length: L, targets of a block.
        seed: Seed of the order; None keeps the order of the files.
    """

    def __init__(self, total_blocks: int, *, buffer_size_mib: int, context_length: int, seed: int | None) -> None:
        _check_positive(buffer_size_mib=buffer_size_mib, context_length=context_length)
        self.seed = seed
        self.capacity = total_blocks
        self.range_blocks = max(buffer_size_mib * MIB // (BYTES_PER_TOKEN * context_length), 1)
        self.num_spans = -(-total_blocks // self.range_blocks)
        self._order = _permutation(self.num_spans, None if seed is None else (seed, 0))
        lengths = np.minimum(self.range_blocks, total_blocks - self._order * self.range_blocks)
        self._ends = np.cumsum(lengths).tolist()

    def span(self, place: int) -> Span:
        """The range at a place of the stream."""
        index, first = int(self._order[place]), self._ends[place - 1] if place else 0
        return Span(
            index=index,
            first_block=index * self.range_blocks,
            num_blocks=self._ends[place] - first,
            first_position=first,
        )

    def place_of(self, position: int) -> int:
        """The place in the order of ranges that holds a position of the stream."""
        return bisect_right(self._ends, position)

    def rows(self, span: Span) -> np.ndarray:
        """Row of the range, counted from its first block, at each of its positions: int64 [num_blocks]."""
        return _permutation(span.num_blocks, None if self.seed is None else (self.seed, 1, span.index))


Order = GroupOrder | RangeOrder
