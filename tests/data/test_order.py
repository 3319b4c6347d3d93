"""The orders of the two loaders against their definitions, written out anew with plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_c4.data.order import GroupOrder, RangeOrder, group_tokens_needed
from tests.data.small_cache import CONTEXT_LENGTH, SHARD_TOKENS, TRAIN_TOKENS


def shards(num_tokens: int, shard_tokens: int) -> list[int]:
    full, rest = divmod(num_tokens, shard_tokens)
    return [shard_tokens] * full + ([rest] if rest else [])


def group_order(
    num_tokens: int = TRAIN_TOKENS,
    *,
    shard_tokens: int = SHARD_TOKENS,
    group_size: int = 2,
    context_length: int = CONTEXT_LENGTH,
    seed: int | None = 5,
    complete: bool = False,
) -> GroupOrder:
    return GroupOrder(
        shards(num_tokens, shard_tokens),
        group_size=group_size,
        context_length=context_length,
        seed=seed,
        complete=complete,
    )


def stream(order: GroupOrder | RangeOrder) -> list[int]:
    """Block at every position, by asking for each position alone."""
    blocks = []
    for position in range(order.capacity):
        span = order.span(order.place_of(position))
        blocks.append(span.first_block + int(order.rows(span)[position - span.first_position]))
    return blocks


def expected_groups(num_tokens: int, shard_tokens: int, group_size: int, context_length: int) -> dict[int, list[int]]:
    """Group → blocks, from the definition: group of the first token, and the aligned look-ahead must exist."""
    groups: dict[int, list[int]] = {}
    for block in range(num_tokens // context_length + 1):
        groups.setdefault(block * context_length // (group_size * shard_tokens), []).append(block)
    usable = {}
    for group in sorted(groups):
        lookahead = math.ceil((group + 1) * group_size * shard_tokens / context_length) * context_length
        if lookahead < num_tokens:
            usable[group] = groups[group]
    return usable


sizes = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, 300),
        "shard_tokens": st.integers(2, 40),
        "group_size": st.integers(1, 4),
        "context_length": st.integers(1, 12),
    }
)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 2**32))
def test_v2_stream_is_the_seeded_permutation_of_each_group_in_file_order(sizes: dict[str, int], seed: int) -> None:
    order = group_order(**sizes, seed=seed)
    expected = []
    for group, blocks in expected_groups(**sizes).items():
        permutation = np.random.default_rng(np.random.SeedSequence([seed, 1, group])).permutation(len(blocks))
        expected += [blocks[row] for row in permutation]
    assert stream(order) == expected


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_v2_uses_every_full_block_once_when_the_source_has_ended(sizes: dict[str, int]) -> None:
    order = group_order(**sizes, complete=True)
    assert sorted(stream(order)) == list(range(max(sizes["num_tokens"] - 1, 0) // sizes["context_length"]))
    unfinished = group_order(**sizes)
    assert stream(order)[: unfinished.capacity] == stream(unfinished)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 200))
def test_v2_stream_of_a_cache_is_a_prefix_of_the_stream_of_its_extension(sizes: dict[str, int], more: int) -> None:
    short = stream(group_order(**sizes))
    longer = stream(group_order(**{**sizes, "num_tokens": sizes["num_tokens"] + more}))
    assert longer[: len(short)] == short


def test_v2_rejects_an_incomplete_last_group_and_keeps_the_earlier_ones() -> None:
    order = group_order()  # 6 groups of 22 tokens, of which the last has 19
    assert order.num_spans == 5
    assert order.capacity == 28
    assert [order.span(place).num_blocks for place in range(5)] == [6, 5, 6, 5, 6]


@pytest.mark.parametrize(("num_tokens", "capacity"), [(24, 0), (25, 6), (44, 6), (45, 11)])
def test_v2_group_needs_its_aligned_look_ahead_token(num_tokens: int, capacity: int) -> None:
    # Group 0 is tokens 0 to 21: its last block starts at 20 and looks ahead to token 24. Group 1 looks ahead to 44.
    assert group_order(num_tokens).capacity == capacity


def test_v2_without_seed_keeps_the_order_of_the_files() -> None:
    assert stream(group_order(seed=None)) == list(range(28))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(2, 40),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_tokens_needed_by_v2_are_the_fewest(
    total: int, shard_tokens: int, group_size: int, context_length: int
) -> None:
    needed = group_tokens_needed(total, shard_tokens=shard_tokens, group_size=group_size, context_length=context_length)
    sizes = {"shard_tokens": shard_tokens, "group_size": group_size, "context_length": context_length}
    assert group_order(needed, **sizes).capacity >= total
    assert group_order(needed - 1, **sizes).capacity < total


@pytest.mark.parametrize("group_size", [0, -1, True, 1.0, "2"])
def test_group_size_must_be_a_positive_integer(group_size: object) -> None:
    with pytest.raises(ValueError, match=r"group_size=.* is not a positive integer"):
        group_order(group_size=group_size)  # type: ignore[arg-type]


def range_order(total_blocks: int, *, context_length: int, seed: int | None = 5) -> RangeOrder:
    return RangeOrder(total_blocks, buffer_size_mib=1, context_length=context_length, seed=seed)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(0, 2**32))
def test_v1_shuffles_ranges_globally_and_rows_inside(total_blocks: int, seed: int) -> None:
    context_length = 65_536  # 1 MiB is 8 blocks of 65,536 uint16 tokens
    ranges = [list(range(at, min(at + 8, total_blocks))) for at in range(0, total_blocks, 8)]
    expected = []
    for r in np.random.default_rng(np.random.SeedSequence([seed, 0])).permutation(len(ranges)):
        rows = np.random.default_rng(np.random.SeedSequence([seed, 1, int(r)])).permutation(len(ranges[r]))
        expected += [ranges[r][row] for row in rows]
    order = range_order(total_blocks, context_length=context_length, seed=seed)
    assert stream(order) == expected
    assert sorted(expected) == list(range(total_blocks))


def test_v1_range_of_64_mib_is_32768_blocks_of_1024() -> None:
    order = RangeOrder(100_000, buffer_size_mib=64, context_length=1024, seed=0)
    assert order.range_blocks == 32_768
    assert sorted(order.span(place).num_blocks for place in range(order.num_spans)) == [1696, 32_768, 32_768, 32_768]


def test_v1_range_holds_at_least_one_block() -> None:
    assert range_order(3, context_length=1 << 20).range_blocks == 1


def test_v1_order_depends_on_the_budget() -> None:
    assert stream(range_order(24, context_length=65_536))[:16] != stream(range_order(16, context_length=65_536))


def test_v1_without_seed_keeps_the_order_of_the_files() -> None:
    assert stream(range_order(20, context_length=65_536, seed=None)) == list(range(20))


@pytest.mark.parametrize("order", [group_order, lambda seed: range_order(28, context_length=65_536, seed=seed)])
def test_different_seeds_give_different_streams(order: object) -> None:
    streams = [tuple(stream(order(seed=seed))) for seed in range(6)]  # type: ignore[operator]
    assert len(set(streams)) == 6
