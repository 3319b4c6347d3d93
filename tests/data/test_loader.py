"""Loader v2 on real files: 28 blocks of 4 targets in 5 groups of two shards of 11 tokens."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_c4.config.errors import CheckpointError, DataError
from llama_c4.config.schema import MarkovConfig
from llama_c4.data import reader
from llama_c4.data.cache import TokenCache, TokenSplit
from llama_c4.data.loader import BlockStream, build_stream, for_workers
from llama_c4.data.loader_v2 import open_group_stream
from llama_c4.data.stream import ShuffledStream
from tests.data.small_cache import (
    CONTEXT_LENGTH,
    SHARD_TOKENS,
    TRAIN_TOKENS,
    markov,
    reader_threads,
    small_tokens,
    write_cache,
)

CPU = torch.device("cpu")
BLOCKS = 28


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    """Every training token another id, so that a block names its place."""
    tokens = np.arange(TRAIN_TOKENS, dtype=np.uint16)
    return write_cache(tmp_path_factory.mktemp("data") / "cache", train=tokens, vocab_size=TRAIN_TOKENS)


def open_stream(
    cache: TokenCache, *, prefetch: bool = True, seed: int | None = 3, group_size: int = 2, total_blocks: int = BLOCKS
) -> ShuffledStream:
    return open_group_stream(
        cache,
        context_length=CONTEXT_LENGTH,
        group_size=group_size,
        seed=seed,
        total_blocks=total_blocks,
        device=CPU,
        prefetch=prefetch,
    )


@pytest.fixture
def stream(cache: TokenCache) -> Iterator[ShuffledStream]:
    stream = open_stream(cache)
    yield stream
    stream.close()


def blocks_of(stream: BlockStream, first: int, count: int) -> list[int]:
    """Which blocks stand at these positions; the whole rows are checked on the way."""
    batch = stream.batch(first, count)
    starts = batch.tokens[:, 0]
    expected = starts[:, None] + torch.arange(CONTEXT_LENGTH)
    assert torch.equal(batch.tokens, expected)
    assert torch.equal(batch.targets, expected + 1)
    assert batch.num_targets == count * CONTEXT_LENGTH
    return (starts // CONTEXT_LENGTH).tolist()


def in_batches(stream: BlockStream, sizes: Iterator[int], *, start: int = 0, end: int = BLOCKS) -> list[int]:
    blocks = []
    while start < end:
        count = min(next(sizes), end - start)
        blocks += blocks_of(stream, start, count)
        start += count
    return blocks


def test_every_block_of_the_usable_groups_comes_exactly_once(stream: ShuffledStream) -> None:
    assert stream.capacity == BLOCKS
    assert sorted(in_batches(stream, itertools.repeat(3))) == list(range(BLOCKS))


def test_batches_are_contiguous_int64(stream: ShuffledStream) -> None:
    batch = stream.batch(4, 3)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.is_contiguous()
    assert batch.targets.is_contiguous()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, BLOCKS), min_size=1), st.booleans(), st.integers(0, 3))
def test_stream_is_the_same_with_prefetch_on_or_off_and_for_all_batch_sizes(
    cache: TokenCache, sizes: list[int], prefetch: bool, seed: int
) -> None:
    whole, parts = open_stream(cache, prefetch=False, seed=seed), open_stream(cache, prefetch=prefetch, seed=seed)
    assert in_batches(parts, itertools.cycle(sizes)) == blocks_of(whole, 0, BLOCKS)
    parts.close()


def test_groups_advance_in_file_order_and_are_shuffled_inside(stream: ShuffledStream) -> None:
    blocks = blocks_of(stream, 0, BLOCKS)
    groups = [block * CONTEXT_LENGTH // (2 * SHARD_TOKENS) for block in blocks]
    assert groups == sorted(groups)
    assert blocks != sorted(blocks)


def test_shorter_budget_gives_a_prefix_of_a_longer_one(cache: TokenCache) -> None:
    longest = blocks_of(open_stream(cache, prefetch=False), 0, BLOCKS)
    for total in range(1, BLOCKS):
        shorter = open_stream(cache, total_blocks=total)
        assert in_batches(shorter, itertools.repeat(5), end=total) == longest[:total]
        shorter.close()


def test_seeds_differ_and_no_seed_is_file_order(cache: TokenCache) -> None:
    streams = [blocks_of(open_stream(cache, seed=seed), 0, BLOCKS) for seed in (None, 0, 1, 2)]
    assert streams[0] == list(range(BLOCKS))
    assert len(set(map(tuple, streams))) == 4


@pytest.mark.parametrize("prefetch", [True, False])
def test_resume_from_every_cursor_gives_the_rest(cache: TokenCache, prefetch: bool) -> None:
    whole = blocks_of(open_stream(cache, prefetch=not prefetch), 0, BLOCKS)
    for cursor in range(BLOCKS):
        resumed = open_stream(cache, prefetch=prefetch)
        assert in_batches(resumed, itertools.repeat(4), start=cursor) == whole[cursor:]
        resumed.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, BLOCKS - 1), max_size=12), st.booleans())
def test_positions_may_be_asked_for_in_any_order(cache: TokenCache, positions: list[int], prefetch: bool) -> None:
    whole, jumping = blocks_of(open_stream(cache, prefetch=False), 0, BLOCKS), open_stream(cache, prefetch=prefetch)
    for position in positions:
        count = min(3, BLOCKS - position)
        assert blocks_of(jumping, position, count) == whole[position : position + count]
    jumping.close()


def test_batches_of_a_run_that_was_resumed_three_times_are_all_distinct(cache: TokenCache) -> None:
    seen, cursor = [], 0
    for stop in (5, 13, 14, BLOCKS):
        resumed = open_stream(cache)
        resumed.check_state(open_stream(cache).state_dict(cursor))
        while cursor < stop:
            count = min(3, stop - cursor)
            seen.append(resumed.batch(cursor, count).tokens.numpy().tobytes())
            cursor += count
        resumed.close()
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("num_workers", [4, 8])
def test_workers_rows_are_disjoint_and_their_union_is_the_stream(cache: TokenCache, num_workers: int) -> None:
    owned: list[list[int]] = [[] for _ in range(num_workers)]
    stream, sizes = open_stream(cache), itertools.cycle([num_workers, 2 * num_workers])
    cursor = 0
    while cursor + (count := next(sizes)) <= BLOCKS:
        tokens = for_workers(stream.batch(cursor, count), num_workers).tokens  # [N, b, T]
        for worker in range(num_workers):
            owned[worker] += (tokens[worker, :, 0] // CONTEXT_LENGTH).tolist()
        cursor += count
    assert cursor >= BLOCKS - 2 * num_workers
    order = blocks_of(stream, 0, cursor)
    assert owned == [order[worker::num_workers] for worker in range(num_workers)]
    assert len(set(itertools.chain(*owned))) == cursor
    stream.close()


def test_worker_view_keeps_input_and_target_together_and_refuses_uneven_rows(stream: ShuffledStream) -> None:
    view = for_workers(stream.batch(0, 6), 3)
    assert view.tokens.shape == view.targets.shape == (3, 2, CONTEXT_LENGTH)
    assert torch.equal(view.targets, view.tokens + 1)
    assert view.num_targets == 24
    with pytest.raises(ValueError, match="6 rows do not divide among 4 workers"):
        for_workers(stream.batch(0, 6), 4)


# --- state ------------------------------------------------------------------------------------------------------------


def test_state_is_small_and_scalar_and_prefetch_is_not_in_it(cache: TokenCache) -> None:
    state = open_stream(cache).state_dict(7)
    assert state == {
        "version": 2,
        "cache_identity": cache.identity,
        "context_length": 4,
        "shuffle_group_size": 2,
        "seed": 3,
        "cursor": 7,
    }
    assert len(json.dumps(state)) < 250
    open_stream(cache, prefetch=False).check_state(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, r"data\.loader: .*v1, this run uses v2.*loader=v1"),
        ({"version": True}, "vTrue"),
        ({"cache_identity": "ab12"}, r"token cache .* is '[0-9a-f]{64}' in this run and 'ab12' in the checkpoint"),
        ({"context_length": 8}, r"model\.context_length is 4 in this run and 8"),
        ({"shuffle_group_size": 3}, r"data\.shuffle_group_size is 2 in this run and 3"),
        ({"shuffle_group_size": 2.0}, r"data\.shuffle_group_size is 2 in this run and 2\.0"),
        ({"seed": 4}, r"runtime\.seed is 3 in this run and 4"),
        ({"seed": None}, r"runtime\.seed is 3 in this run and None"),
        ({"cursor": 29}, "cursor 29 is not among the 28 blocks"),
        ({"cursor": -1}, "cursor -1"),
        ({"cursor": True}, "cursor True"),
        ({"prefetch": True}, "odd or missing prefetch"),
    ],
)
def test_another_stream_is_refused_naming_both_sides(
    stream: ShuffledStream, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        stream.check_state({**stream.state_dict(0), **changes})


@pytest.mark.parametrize("key", ["version", "cache_identity", "shuffle_group_size", "seed", "cursor"])
def test_state_without_one_of_its_fields_is_refused(stream: ShuffledStream, key: str) -> None:
    state = stream.state_dict(0)
    del state[key]
    with pytest.raises(CheckpointError):
        stream.check_state(state)


def test_state_of_the_cache_that_this_one_extends_is_continued(cache: TokenCache, tmp_path: Path) -> None:
    tokens = np.arange(2 * TRAIN_TOKENS, dtype=np.uint16)
    extended = write_cache(
        tmp_path / "cache", train=tokens, vocab_size=300, ancestors=((cache.identity, TRAIN_TOKENS),)
    )
    continued = open_stream(extended, prefetch=False)
    continued.check_state(open_stream(cache).state_dict(BLOCKS))
    assert blocks_of(continued, 0, BLOCKS) == blocks_of(open_stream(cache), 0, BLOCKS)
    with pytest.raises(CheckpointError, match="token cache"):
        open_stream(cache).check_state(continued.state_dict(0))


# --- capacity ---------------------------------------------------------------------------------------------------------


def build(cache: TokenCache, data: MarkovConfig, total_blocks: int) -> BlockStream:
    return build_stream(data, cache, context_length=CONTEXT_LENGTH, seed=3, total_blocks=total_blocks, device=CPU)


def test_budget_beyond_the_usable_groups_is_refused_with_what_would_be_enough(cache: TokenCache) -> None:
    build(cache, markov(cache), BLOCKS).close()
    with pytest.raises(DataError) as caught:
        build(cache, markov(cache), BLOCKS + 1)
    assert "takes 29 blocks of 4 targets, but its 129 training tokens give 28" in str(caught.value)
    assert "data.train_tokens=133" in str(caught.value)  # group 5 ends at token 131, its look-ahead is token 132
    assert "training.total_tokens=112" in str(caught.value)


def test_a_source_that_has_ended_gives_its_last_group_too(tmp_path: Path) -> None:
    ended = write_cache(tmp_path / "cache", complete=True)
    build(ended, markov(ended), 32).close()
    with pytest.raises(DataError, match="takes 33 blocks of 4 targets, but its 129 training tokens give 32"):
        build(ended, markov(ended), 33)


# --- reading ----------------------------------------------------------------------------------------------------------


class Reads:
    """Records the reads of a split, and the buffers they went to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.buffers: dict[int, weakref.ref[np.ndarray]] = {}
        self.most_alive = 0
        read = TokenSplit.read

        def recording(split: TokenSplit, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
            assert out is not None
            owner = out if out.base is None else out.base
            self.buffers[id(owner)] = weakref.ref(owner)
            self.ranges.append((start, start + count))
            self.most_alive = max(self.most_alive, self.alive)
            return read(split, start, count, out)

        monkeypatch.setattr(TokenSplit, "read", recording)

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.buffers.values())


GROUP_RANGES = [(0, 25), (24, 45), (44, 69), (68, 89), (88, 113)]


@pytest.mark.parametrize("prefetch", [True, False])
def test_each_group_is_read_once_in_one_piece(
    cache: TokenCache, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, stream = Reads(monkeypatch), open_stream(cache, prefetch=prefetch)
    in_batches(stream, itertools.repeat(1))
    assert reads.ranges == GROUP_RANGES
    stream.close()


@pytest.mark.parametrize("prefetch", [True, False])
def test_resume_reads_only_the_groups_still_needed(
    cache: TokenCache, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    resumed = open_stream(cache, prefetch=prefetch, total_blocks=22)  # groups 0 to 3
    in_batches(resumed, itertools.repeat(2), start=12, end=22)
    resumed.close()
    assert reads.ranges == GROUP_RANGES[2:4]


@pytest.mark.parametrize(("prefetch", "most"), [(True, 2), (False, 1)])
def test_never_more_than_two_buffers_are_alive_and_none_after_close(
    cache: TokenCache, prefetch: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, stream = Reads(monkeypatch), open_stream(cache, prefetch=prefetch)
    in_batches(stream, itertools.repeat(3))
    for position in (20, 0, 27, 13, 6, 1):
        stream.batch(position, 1)
    assert reads.most_alive == most
    stream.close()
    assert reads.alive == 0


@pytest.mark.parametrize("end", [1, 20, BLOCKS])
def test_close_frees_all_buffers_wherever_the_stream_stands(
    cache: TokenCache, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, stream = Reads(monkeypatch), open_stream(cache)
    in_batches(stream, itertools.repeat(1), end=end)
    stream.close()
    assert reads.alive == 0


def test_batches_outlive_the_stream(cache: TokenCache) -> None:
    stream = open_stream(cache)
    batch = stream.batch(0, 6)
    before = batch.tokens.clone()
    in_batches(stream, itertools.repeat(1))
    stream.close()
    assert torch.equal(batch.tokens, before)


def test_next_group_is_read_while_the_active_one_is_used(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, stream = Reads(monkeypatch), open_stream(cache)
    stream.batch(0, 1)
    wait_until(lambda: len(reads.ranges) == 2)
    assert reads.ranges == GROUP_RANGES[:2]
    stream.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_close_ends_the_thread_and_may_be_repeated(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    read, entered, release = TokenSplit.read, threading.Event(), threading.Event()

    def slow(split: TokenSplit, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        if start:  # not the first group, which the caller reads itself
            entered.set()
            release.wait(10)
        return read(split, start, count, out)

    monkeypatch.setattr(TokenSplit, "read", slow)
    stream = open_stream(cache)
    stream.batch(0, 1)
    assert entered.wait(10)
    assert len(reader_threads()) == 1
    threading.Timer(0.05, release.set).start()
    stream.close()
    assert reader_threads() == []
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.batch(0, 1)


def test_close_does_not_wait_for_the_rest_of_a_large_group(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    read, join, told_to_stop, ranges = TokenSplit.read, threading.Thread.join, threading.Event(), []

    def waiting(split: TokenSplit, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        if threading.current_thread() is not threading.main_thread():
            ranges.append((start, start + count))
            assert told_to_stop.wait(10)
        return read(split, start, count, out)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        told_to_stop.set()
        join(thread, timeout)

    monkeypatch.setattr(reader, "READ_TOKENS", 2)
    monkeypatch.setattr(TokenSplit, "read", waiting)
    monkeypatch.setattr(threading.Thread, "join", joined)
    stream = open_stream(cache)
    stream.batch(0, 1)
    stream.close()
    assert ranges in ([], [(24, 26)])  # of 11 pieces


def test_a_stream_that_was_never_used_has_no_thread(cache: TokenCache) -> None:
    stream = open_stream(cache)
    assert reader_threads() == []
    stream.close()


def test_error_of_the_background_reader_reaches_the_caller(tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "cache")
    cache.train.shards[3].path.unlink()  # group 1
    stream = open_stream(cache)
    stream.batch(0, 6)
    with pytest.raises(DataError, match=r"train-00003\.bin"):
        stream.batch(6, 1)
    assert reader_threads() == []
    with pytest.raises(ValueError, match="closed"):
        stream.batch(0, 1)


@pytest.mark.parametrize("prefetch", [True, False])
def test_file_that_ends_early_is_an_error_and_no_short_batch(tmp_path: Path, prefetch: bool) -> None:
    cache = write_cache(tmp_path / "cache")
    cache.train.shards[4].path.write_bytes(b"\0" * 4)
    stream = open_stream(cache, prefetch=prefetch)
    stream.batch(0, 11)
    with pytest.raises(DataError, match=r"train-00004\.bin"):
        stream.batch(11, 2)


def test_reads_are_complete_where_the_system_returns_short_ones(
    cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ShortReads(io.FileIO):
        def readinto(self, place: memoryview) -> int:  # type: ignore[override]
            return super().readinto(place[: min(len(place), 3)])

    expected = blocks_of(open_stream(cache, prefetch=False), 0, BLOCKS)
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering: ShortReads(path, mode))
    stream = open_stream(cache)
    assert blocks_of(stream, 0, BLOCKS) == expected
    stream.close()


@pytest.mark.parametrize("where", ["caller", "background"])
def test_interruption_cleans_up(cache: TokenCache, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = TokenSplit.read

    def interrupted(split: TokenSplit, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        if start and (threading.current_thread() is threading.main_thread()) == (where == "caller"):
            raise KeyboardInterrupt
        return read(split, start, count, out)

    monkeypatch.setattr(TokenSplit, "read", interrupted)
    stream = open_stream(cache)
    stream.batch(0, 1)
    with pytest.raises(KeyboardInterrupt):
        stream.batch(20 if where == "caller" else 6, 1)
    assert reader_threads() == []


def test_interruption_while_waiting_for_the_next_group_ends_the_thread(
    cache: TokenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, join, joins = TokenSplit.read, threading.Thread.join, itertools.count()

    def slow(split: TokenSplit, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        time.sleep(0.05 if start else 0)
        return read(split, start, count, out)

    def interrupted_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "block-prefetch" and next(joins) == 0:
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(TokenSplit, "read", slow)
    monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    stream = open_stream(cache)
    stream.batch(0, 6)
    with pytest.raises(KeyboardInterrupt):
        stream.batch(6, 1)
    assert reader_threads() == []


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 29), (28, 1), (3, -2)])
def test_positions_outside_the_stream_are_refused_and_harm_nothing(
    stream: ShuffledStream, first: int, count: int
) -> None:
    with pytest.raises(ValueError, match="not in a stream of 28"):
        stream.batch(first, count)
    assert stream.batch(27, 1).num_targets == 4


def test_default_group_of_random_tokens_crosses_shard_borders_exactly(tmp_path: Path) -> None:
    tokens = small_tokens(TRAIN_TOKENS, seed=9)
    stream = open_stream(write_cache(tmp_path / "cache", train=tokens), seed=None)
    batch = stream.batch(0, BLOCKS)
    stream.close()
    assert batch.tokens.flatten().tolist() == tokens[: BLOCKS * 4].tolist()
    assert batch.targets.flatten().tolist() == tokens[1 : BLOCKS * 4 + 1].tolist()


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_another_cuda_stream_stay_right_after_their_host_buffers_are_gone(cache: TokenCache) -> None:
    expected = open_stream(cache, prefetch=False).batch(0, BLOCKS)
    stream = open_group_stream(
        cache, context_length=4, group_size=2, seed=3, total_blocks=BLOCKS, device=torch.device("cuda"), prefetch=True
    )
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # the copies are queued behind it, long after the host buffers were dropped
        batches = [stream.batch(position, 1) for position in range(BLOCKS)]
    stream.close()
    side.synchronize()
    assert torch.equal(torch.cat([batch.tokens for batch in batches]).cpu(), expected.tokens)
    assert torch.equal(torch.cat([batch.targets for batch in batches]).cpu(), expected.targets)
