"""Loader v1 on real files. A range has at least 1 MiB, so blocks are long: 8 ranges of 4 blocks of 131,072 targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llama_c4.config.errors import CheckpointError, DataError
from llama_c4.data.cache import TokenCache
from llama_c4.data.loader import build_stream
from llama_c4.data.loader_v1 import open_range_stream
from llama_c4.data.loader_v2 import open_group_stream
from llama_c4.data.stream import ShuffledStream
from tests.data.small_cache import markov, reader_threads, write_cache

CPU = torch.device("cpu")
CONTEXT_LENGTH = 131_072
BLOCKS = 30


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """Block i holds the id i everywhere; one token more than 30 blocks."""
    tokens = np.append(np.repeat(np.arange(BLOCKS, dtype=np.uint16), CONTEXT_LENGTH), np.uint16(BLOCKS))
    return write_cache(tmp_path_factory.mktemp("v1") / "cache", train=tokens, shard_tokens=700_001, vocab_size=99)


def open_stream(
    cache: TokenCache, *, total_blocks: int = BLOCKS, prefetch: bool = False, seed: int | None = 3, mib: int = 1
) -> ShuffledStream:
    return open_range_stream(
        cache,
        context_length=CONTEXT_LENGTH,
        buffer_size_mib=mib,
        seed=seed,
        total_blocks=total_blocks,
        device=CPU,
        prefetch=prefetch,
    )


def blocks_of(stream: ShuffledStream, first: int, count: int) -> list[int]:
    batch = stream.batch(first, count)
    blocks = batch.tokens[:, 0]
    assert bool((batch.tokens == blocks[:, None]).all())
    assert torch.equal(batch.targets[:, -1], blocks + 1)
    return blocks.tolist()


@pytest.mark.parametrize("prefetch", [False, True])
def test_every_block_of_the_prefix_comes_once_in_the_defined_order(cache: TokenCache, prefetch: bool) -> None:
    stream = open_stream(cache, prefetch=prefetch)
    expected = []
    for r in np.random.default_rng(np.random.SeedSequence([3, 0])).permutation(8):
        rows = np.random.default_rng(np.random.SeedSequence([3, 1, int(r)])).permutation(min(4, BLOCKS - 4 * r))
        expected += [4 * int(r) + int(row) for row in rows]
    found = [block for first in range(0, BLOCKS, 7) for block in blocks_of(stream, first, min(7, BLOCKS - first))]
    assert found == expected
    assert sorted(found) == list(range(BLOCKS))
    stream.close()
    assert reader_threads() == []


def test_resume_from_every_cursor_gives_the_rest(cache: TokenCache) -> None:
    whole = blocks_of(open_stream(cache), 0, BLOCKS)
    for cursor in range(BLOCKS):
        assert blocks_of(open_stream(cache), cursor, min(3, BLOCKS - cursor)) == whole[cursor : cursor + 3]


def test_seeds_differ_and_no_seed_is_file_order(cache: TokenCache) -> None:
    streams = [blocks_of(open_stream(cache, seed=seed), 0, BLOCKS) for seed in (None, 0, 1)]
    assert streams[0] == list(range(BLOCKS))
    assert len(set(map(tuple, streams))) == 3


def test_order_depends_on_the_budget_and_another_budget_is_refused(cache: TokenCache) -> None:
    long, short = open_stream(cache), open_stream(cache, total_blocks=20)
    assert short.capacity == 20
    assert sorted(blocks_of(short, 0, 20)) == list(range(20))
    assert blocks_of(long, 0, 20) != blocks_of(short, 0, 20)
    with pytest.raises(CheckpointError, match=r"budget in blocks.* is 30 in this run and 20 in the checkpoint"):
        long.check_state(short.state_dict(4))


def test_buffer_size_is_part_of_the_state(cache: TokenCache) -> None:
    state = open_stream(cache).state_dict(5)
    open_stream(cache, prefetch=True).check_state(state)
    with pytest.raises(CheckpointError, match=r"data\.buffer_size_mib is 2 in this run and 1 in the checkpoint"):
        open_stream(cache, mib=2).check_state(state)


def test_the_loaders_refuse_each_others_states(cache: TokenCache) -> None:
    v1 = open_stream(cache)
    v2 = open_group_stream(
        cache,
        context_length=CONTEXT_LENGTH,
        group_size=2,
        seed=3,
        total_blocks=1,
        device=CPU,
        prefetch=False,
    )
    with pytest.raises(CheckpointError, match="written with loader v1, this run uses v2"):
        v2.check_state(v1.state_dict(0))
    with pytest.raises(CheckpointError, match="written with loader v2, this run uses v1"):
        v1.check_state(v2.state_dict(0))


def test_budget_beyond_the_cache_is_refused_with_what_would_be_enough(cache: TokenCache) -> None:
    data = markov(cache, loader="v1", shuffle_group_size=None, buffer_size_mib=1, prefetch=False)
    build_stream(data, cache, context_length=CONTEXT_LENGTH, seed=3, total_blocks=BLOCKS, device=CPU).close()
    with pytest.raises(DataError, match=r"takes 31 blocks .* give 30; .*data\.train_tokens=4063233"):
        build_stream(data, cache, context_length=CONTEXT_LENGTH, seed=3, total_blocks=31, device=CPU)
