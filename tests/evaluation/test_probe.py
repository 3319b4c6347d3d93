"""The validator and the probe: what is read, what is compiled, what is recorded, and that training does not notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_c4.config.errors import DataError, TrainingError
from llama_c4.config.schema import EvaluationConfig
from llama_c4.data.cache import TokenCache, TokenSplit
from llama_c4.evaluation.probe import SubsetProbe, full_record
from llama_c4.evaluation.validation import evaluate_blocks
from llama_c4.evaluation.validator import Validator
from llama_c4.trainer.plan import Progress, TrainingPlan
from tests.data.small_cache import CONTEXT_LENGTH, small_tokens, write_cache
from tests.evaluation.tiny import TinyModel, runtime

PLAN = TrainingPlan(context_length=CONTEXT_LENGTH, batch_blocks=4, boundaries=(6, 12, 17))


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return write_cache(tmp_path / "cache", text_bytes=100)


def validator(
    cache: TokenCache, *, subset_blocks: int = 1024, batch_size: int = 3, compile_mode: str | None = None
) -> Validator:
    config = EvaluationConfig(subset_blocks=subset_blocks, subset_seed=12345, batch_size=batch_size, full_at_end=True)
    return Validator(cache, config, context_length=CONTEXT_LENGTH, runtime=runtime(compile_mode=compile_mode))


@dataclass
class Engine:
    """As much of an engine as a probe may use."""

    model: TinyModel

    def evaluation_model(self) -> TinyModel:
        return self.model


def test_subset_has_the_whole_blocks_and_full_the_rest_too(cache: TokenCache) -> None:
    model = TinyModel()
    subset, full = validator(cache).subset(model), validator(cache).full(model)
    assert (subset.num_blocks, subset.num_targets) == (7, 28)
    assert (full.num_blocks, full.num_targets) == (8, 29)


def test_subset_equals_the_direct_loss_of_its_blocks(cache: TokenCache) -> None:
    model, some = TinyModel(), validator(cache, subset_blocks=4)
    indices = some.subset_indices.tolist()
    assert len(set(indices)) == 4
    direct = evaluate_blocks(
        model, cache.validation, indices, context_length=CONTEXT_LENGTH, batch_size=3, runtime=runtime()
    )
    assert some.subset(model) == direct


def test_subset_is_read_once_and_kept(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    read, starts = TokenSplit.read, []

    def recording(split: TokenSplit, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        starts.append(start)
        return read(split, start, count, out)

    monkeypatch.setattr(TokenSplit, "read", recording)
    kept = validator(cache, subset_blocks=4)
    first = kept.subset(TinyModel())
    scan = list(starts)
    assert scan == sorted(scan)
    assert kept.subset(TinyModel()) == first
    assert starts == scan


def test_validation_split_without_a_whole_block_is_refused_at_once(tmp_path: Path) -> None:
    short = write_cache(tmp_path / "short", validation=small_tokens(CONTEXT_LENGTH))
    with pytest.raises(DataError, match=r"validation split has 4 tokens, less than one block .*validation_tokens"):
        validator(short)


def test_only_batches_of_the_full_size_run_compiled(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, shapes = [], []

    def counting(function: Callable[[Tensor, Tensor], Tensor], *, mode: str, **_: object) -> object:
        modes.append(mode)

        def compiled(tokens: Tensor, targets: Tensor) -> Tensor:
            shapes.append(tuple(tokens.shape))
            return function(tokens, targets)

        return compiled

    monkeypatch.setattr(torch, "compile", counting)
    model, both = TinyModel(), validator(cache, compile_mode="default")
    both.subset(model)  # 3 + 3 + 1 blocks
    both.full(model)  # 3 + 3 + 2 blocks
    both.subset(model)
    assert modes == ["default"]
    assert shapes == [(3, 4)] * 6


def test_probe_is_due_at_epoch_ends_and_records_where_it_was(cache: TokenCache) -> None:
    model, probe = TinyModel(), SubsetProbe(validator(cache), PLAN)
    assert [probe.due(PLAN.update(i)) for i in range(6)] == [False, True, False, True, False, True]
    record = probe.measure(Engine(model), Progress(update=4, sequences=12))
    expected = validator(cache).subset(model)
    assert record.pop("seconds") > 0
    assert record == {
        "kind": "validation",
        "scope": "subset",
        "update": 4,
        "epoch": 2,
        "targets": 48,
        "loss": expected.loss,
        "perplexity": expected.perplexity,
        "bits_per_byte": expected.bits_per_byte,
        "num_targets": 28,
        "num_blocks": 7,
    }


def test_final_record_is_of_the_whole_split(cache: TokenCache) -> None:
    record = full_record(validator(cache), Engine(TinyModel()), PLAN, Progress(update=6, sequences=17))
    found = {key: record[key] for key in ("kind", "scope", "update", "epoch", "targets", "num_targets")}
    assert found == {
        "kind": "final_validation",
        "scope": "full",
        "update": 6,
        "epoch": 3,
        "targets": 68,
        "num_targets": 29,
    }


def test_probe_names_the_update_of_a_loss_that_is_not_finite(cache: TokenCache) -> None:
    model = TinyModel()
    model.head.bias.data[0] = float("nan")
    with pytest.raises(TrainingError, match="after update 2 is not finite"):
        SubsetProbe(validator(cache), PLAN).measure(Engine(model), Progress(update=2, sequences=6))


def test_floor_of_the_cache_is_checked(tmp_path: Path) -> None:
    high = write_cache(tmp_path / "high", entropy_floor=1e6)
    for evaluate in (validator(high).subset, validator(high).full):
        with pytest.raises(TrainingError, match="leak"):
            evaluate(TinyModel(), update=1)


def train(cache: TokenCache, *, probing: bool) -> tuple[list[Tensor], Tensor]:
    """Three updates of AdamW with dropout, from one random stream; the probe looks between forward passes too."""
    torch.manual_seed(4)
    model = TinyModel().train()
    optimizer, probe = torch.optim.AdamW(model.parameters(), lr=0.01), SubsetProbe(validator(cache), PLAN)
    tokens = torch.from_numpy(small_tokens(9).astype(np.int64))
    for update in range(1, 4):
        optimizer.zero_grad()
        for _ in range(2):
            model.loss_sum(tokens[None, :-1], tokens[None, 1:]).backward()
            if probing:
                probe.measure(Engine(model), Progress(update=update))
        optimizer.step()
    return [p.detach() for p in model.parameters()], torch.rand(3)


def test_training_is_bitwise_the_same_with_and_without_the_probe(cache: TokenCache) -> None:
    (weights, numbers), (probed_weights, probed_numbers) = train(cache, probing=False), train(cache, probing=True)
    assert all(torch.equal(a, b) for a, b in zip(weights, probed_weights, strict=True))
    assert torch.equal(numbers, probed_numbers)
