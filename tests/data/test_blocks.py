"""Validation blocks: 30 tokens are 7 whole blocks of 4 targets and a rest of one target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_c4.data.batch import IGNORED
from llama_c4.data.blocks import KeptBlocks, num_blocks_with_rest, read_blocks
from llama_c4.data.cache import TokenCache, TokenSplit
from tests.data.small_cache import CONTEXT_LENGTH, VALIDATION_TOKENS, small_tokens, write_cache

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> TokenSplit:
    return write_cache(tmp_path_factory.mktemp("blocks") / "cache").validation


def by_hand(tokens: np.ndarray, block: int, context_length: int) -> tuple[list[int], list[int]]:
    """Inputs and targets of a block, position by position."""
    inputs, targets = [0] * context_length, [IGNORED] * context_length
    for place in range(context_length):
        at = block * context_length + place
        if at + 1 < len(tokens):
            inputs[place], targets[place] = int(tokens[at]), int(tokens[at + 1])
    return inputs, targets


def test_all_blocks_in_order_have_the_exact_targets_and_count(split: TokenSplit) -> None:
    tokens = small_tokens(VALIDATION_TOKENS, seed=2)
    assert num_blocks_with_rest(split, CONTEXT_LENGTH) == 8
    batch = read_blocks(split, range(8), context_length=CONTEXT_LENGTH, device=CPU)
    expected = [by_hand(tokens, block, CONTEXT_LENGTH) for block in range(8)]
    assert batch.tokens.tolist() == [inputs for inputs, _ in expected]
    assert batch.targets.tolist() == [targets for _, targets in expected]
    assert batch.num_targets == int((batch.targets != IGNORED).sum()) == 29


def test_whole_blocks_alone_have_28_targets(split: TokenSplit) -> None:
    batch = read_blocks(split, range(7), context_length=CONTEXT_LENGTH, device=CPU)
    assert batch.num_targets == 28
    assert bool((batch.targets != IGNORED).all())


def test_padded_last_block_has_input_0_and_target_minus_100(split: TokenSplit) -> None:
    last = int(small_tokens(VALIDATION_TOKENS, seed=2)[29])
    batch = read_blocks(split, [7], context_length=CONTEXT_LENGTH, device=CPU)
    assert batch.targets.tolist() == [[last, -100, -100, -100]]
    assert batch.tokens[0, 1:].tolist() == [0, 0, 0]
    assert batch.num_targets == 1


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 40), st.integers(1, 7))
def test_any_choice_of_blocks_equals_the_definition(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, num_tokens: int, context_length: int
) -> None:
    tokens = small_tokens(num_tokens, seed=num_tokens)
    folder = tmp_path_factory.mktemp("blocks") / "cache"
    split = write_cache(folder, validation=tokens, train=tokens[:0]).validation
    last = num_blocks_with_rest(split, context_length) - 1
    indices = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=12))
    batch = read_blocks(split, indices, context_length=context_length, device=CPU)
    expected = [by_hand(tokens, block, context_length) for block in indices]
    assert batch.tokens.tolist() == [inputs for inputs, _ in expected]
    assert batch.targets.tolist() == [targets for _, targets in expected]
    assert batch.num_targets == sum(target != IGNORED for _, targets in expected for target in targets)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 0), (2, 1), (5, 1), (6, 2), (9, 2)])
def test_number_of_blocks_with_rest(tmp_path: Path, num_tokens: int, blocks: int) -> None:
    cache = write_cache(tmp_path / "cache", validation=small_tokens(num_tokens))
    assert num_blocks_with_rest(cache.validation, CONTEXT_LENGTH) == blocks


@pytest.mark.parametrize("indices", [[8], [-1], [0, 9]])
def test_a_block_that_does_not_exist_is_refused(split: TokenSplit, indices: list[int]) -> None:
    with pytest.raises(IndexError, match="not all among the 8 of the validation split"):
        read_blocks(split, indices, context_length=CONTEXT_LENGTH, device=CPU)


def test_kept_blocks_are_read_once_in_one_ascending_scan(split: TokenSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    read, ranges = TokenSplit.read, []

    def recording(split: TokenSplit, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        ranges.append((start, start + count))
        return read(split, start, count, out)

    monkeypatch.setattr(TokenSplit, "read", recording)
    kept = KeptBlocks(split, [0, 1, 2, 4, 7], context_length=CONTEXT_LENGTH)
    for batch_size in (1, 2, 5):
        list(kept.batches(batch_size, device=CPU))
    assert ranges == [(0, 13), (16, 21), (28, 30)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 128])
def test_kept_blocks_equal_those_that_are_read(split: TokenSplit, batch_size: int) -> None:
    indices = [0, 3, 4, 6, 7]
    direct = read_blocks(split, indices, context_length=CONTEXT_LENGTH, device=CPU)
    batches = list(KeptBlocks(split, indices, context_length=CONTEXT_LENGTH).batches(batch_size, device=CPU))
    assert [len(batch.tokens) for batch in batches] == [min(batch_size, 5 - at) for at in range(0, 5, batch_size)]
    assert torch.equal(torch.cat([batch.tokens for batch in batches]), direct.tokens)
    assert torch.equal(torch.cat([batch.targets for batch in batches]), direct.targets)
    assert sum(batch.num_targets for batch in batches) == direct.num_targets == 17


def test_writing_into_a_batch_does_not_change_the_kept_blocks(split: TokenSplit) -> None:
    kept = KeptBlocks(split, [0, 1], context_length=CONTEXT_LENGTH)
    (first,) = kept.batches(2, device=CPU)
    before = first.tokens.clone()
    first.tokens.zero_()
    (again,) = kept.batches(2, device=CPU)
    assert torch.equal(again.tokens, before)


def test_largest_id_of_uint16_survives_widening(tmp_path: Path) -> None:
    tokens = np.array([65_535, 32_768, 0, 65_535, 1], dtype=np.uint16)
    cache: TokenCache = write_cache(tmp_path / "cache", validation=tokens, vocab_size=65_536)
    batch = read_blocks(cache.validation, [0], context_length=CONTEXT_LENGTH, device=CPU)
    assert batch.tokens.tolist() == [[65_535, 32_768, 0, 65_535]]
    assert batch.targets.tolist() == [[32_768, 0, 65_535, 1]]
