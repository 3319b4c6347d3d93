"""Validation against a plain loop over targets: 30 tokens, 7 whole blocks of 4 targets and a rest of one."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llama_c4.config.errors import DataError, TrainingError
from llama_c4.data.cache import TokenSplit
from llama_c4.evaluation.validation import ValidationResult, choose_subset, evaluate_blocks
from tests.data.small_cache import CONTEXT_LENGTH, VALIDATION_TOKENS, small_tokens, write_cache
from tests.evaluation.tiny import TinyModel, runtime

ALL = range(8)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> TokenSplit:
    return write_cache(tmp_path_factory.mktemp("validation") / "cache", text_bytes=77).validation


def evaluate(model: nn.Module, split: TokenSplit, *, batch_size: int = 3, **options: object) -> ValidationResult:
    settings = {"indices": ALL, "runtime": runtime(), "context_length": CONTEXT_LENGTH, **options}
    return evaluate_blocks(model, split, batch_size=batch_size, **settings)  # type: ignore[arg-type]


def target_losses(model: TinyModel, tokens: np.ndarray) -> np.ndarray:
    """-log softmax of every next token, one after another, in float64 numpy; the model knows no context."""
    weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    losses = []
    for token, target in itertools.pairwise(tokens):
        logits = weights["head.weight"] @ weights["embedding.weight"][token] + weights["head.bias"]
        losses.append(math.log(sum(math.exp(x) for x in logits)) - logits[target])
    return np.array(losses)


# --- the number -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 8, 128])
def test_loss_is_the_mean_over_all_targets_whatever_the_batch_size(split: TokenSplit, batch_size: int) -> None:
    model = TinyModel(dtype=torch.float64)
    result = evaluate(model, split, batch_size=batch_size, runtime=runtime("float64"))
    losses = target_losses(model, small_tokens(VALIDATION_TOKENS, seed=2))
    assert result.num_targets == len(losses) == 29
    assert result.num_blocks == 8
    assert result.loss == pytest.approx(losses.mean(), rel=1e-13)


def test_batch_sizes_agree_in_float32(tmp_path: Path) -> None:
    split = write_cache(tmp_path / "cache", validation=small_tokens(4003), shard_tokens=1000).validation
    losses = [evaluate(TinyModel(), split, indices=range(1001), batch_size=size).loss for size in (1, 7, 128)]
    assert max(losses) - min(losses) < 1e-6


def test_a_short_last_batch_and_padding_do_not_weigh_more(split: TokenSplit) -> None:
    model = TinyModel()
    mean_of_batches = np.mean([evaluate(model, split, indices=part).loss for part in (range(6), [6], [7])])
    assert abs(evaluate(model, split).loss - mean_of_batches) > 1e-3


def test_whole_blocks_alone_have_28_targets(split: TokenSplit) -> None:
    model = TinyModel(dtype=torch.float64)
    result = evaluate(model, split, indices=range(7), runtime=runtime("float64"))
    losses = target_losses(model, small_tokens(VALIDATION_TOKENS, seed=2))[:28]
    assert (result.num_targets, result.num_blocks) == (28, 7)
    assert result.loss == pytest.approx(losses.mean(), rel=1e-13)


def test_perplexity_and_bits_per_byte_follow_from_the_loss(split: TokenSplit, tmp_path: Path) -> None:
    result = evaluate(TinyModel(), split)
    assert result.perplexity == pytest.approx(math.exp(result.loss), rel=1e-15)
    bits = result.loss * result.num_targets / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / (77 * result.num_targets / VALIDATION_TOKENS), rel=1e-14)
    without_text = write_cache(tmp_path / "cache").validation
    assert evaluate(TinyModel(), without_text).bits_per_byte is None


def test_perplexity_beyond_float64_is_infinite(split: TokenSplit) -> None:
    model = TinyModel()
    model.head.weight.data *= 1e5
    result = evaluate(model, split)
    assert result.loss > 1000
    assert result.perplexity == math.inf


def test_subset_is_a_sorted_choice_without_replacement() -> None:
    chosen = choose_subset(10_000, subset_blocks=1024, seed=12345)
    again = np.random.default_rng(12345).choice(10_000, 1024, replace=False)
    assert chosen.tolist() == sorted(again.tolist())
    assert len(set(chosen.tolist())) == 1024
    assert chosen.tolist() != choose_subset(10_000, subset_blocks=1024, seed=1).tolist()
    assert choose_subset(7, subset_blocks=1024, seed=12345).tolist() == list(range(7))


def test_subset_of_c4_validation_stays_the_same_for_ever() -> None:
    # 192,784 whole blocks of 1,024 targets; a change here would make old and new subset losses incomparable.
    chosen = choose_subset(192_784, subset_blocks=1024, seed=12345)
    assert chosen[:4].tolist() == [84, 291, 592, 624]
    assert int(chosen.sum()) == 97_186_568


def test_compiled_loss_takes_full_batches_only(split: TokenSplit) -> None:
    model, shapes = TinyModel(), []

    def compiled(tokens: Tensor, targets: Tensor) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return model.loss_sum(tokens, targets)

    with_compiled = evaluate(model, split, loss_fn=compiled)
    assert shapes == [(3, 4), (3, 4)]  # of 3 + 3 + 2 blocks
    assert with_compiled == evaluate(model, split)


def test_evaluates_under_the_autocast_of_the_runtime(split: TokenSplit) -> None:
    seen = []

    class Watching(TinyModel):
        def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().loss_sum(tokens, targets)

    evaluate(Watching(), split, runtime=runtime("bfloat16"))
    evaluate(Watching(), split, runtime=runtime("float32"))
    assert seen == [True] * 3 + [False] * 3


# --- nothing is disturbed ---------------------------------------------------------------------------------------------


class Drawing(TinyModel):
    """Draws from every global generator, and may fail in a batch."""

    def __init__(self, fail: BaseException | None = None) -> None:
        super().__init__()
        self.fail = fail

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        assert not self.training
        assert not self.dropout.training
        assert not torch.is_grad_enabled()
        random.random()
        np.random.rand()  # noqa: NPY002
        torch.rand(1)
        if self.fail is not None and len(tokens) == 2:
            raise self.fail
        return super().loss_sum(tokens, targets)


def random_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def seed_everything() -> None:
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt(), RuntimeError("out of memory")])
def test_modes_random_numbers_weights_and_gradients_stay(split: TokenSplit, failure: BaseException | None) -> None:
    model = Drawing(failure).train()
    model.head.eval()
    TinyModel.loss_sum(model, torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)).backward()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    seed_everything()
    expected = random_numbers()
    seed_everything()
    try:
        evaluate(model, split)
    except BaseException as error:
        assert error is failure
    assert random_numbers() == expected
    assert (model.training, model.dropout.training, model.head.training) == (True, True, False)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert len(gradients) == 3
    assert torch.is_grad_enabled()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_empty_set_is_refused(split: TokenSplit) -> None:
    with pytest.raises(DataError, match="validation split has no block to evaluate"):
        evaluate(TinyModel(), split, indices=[])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_update(split: TokenSplit, value: float) -> None:
    model = TinyModel()
    model.head.bias.data[0] = value
    with pytest.raises(TrainingError, match=r"validation loss after update 12 is not finite \((nan|inf)\)"):
        evaluate(model, split, update=12)


# --- the entropy floor ------------------------------------------------------------------------------------------------

SUCCESSORS = 2


def chain(length: int, seed: int, probabilities: tuple[float, ...] = (0.5, 0.5)) -> np.ndarray:
    """A Markov chain: after token x comes 2x or 2x + 1, mod 17, with these probabilities."""
    draws = np.random.default_rng(seed).choice(SUCCESSORS, size=length, p=probabilities)
    tokens = [0]
    for draw in draws[1:]:
        tokens.append((2 * tokens[-1] + int(draw)) % 17)
    return np.array(tokens, dtype=np.uint16)


class Chain(TinyModel):
    """The true probabilities of the chain; a leaky one sees the next token where there is one."""

    def __init__(self, probabilities: tuple[float, ...] = (0.5, 0.5), *, leaky: bool = False) -> None:
        super().__init__()
        self.leaky, self.passes = leaky, 0
        table = torch.full((17, 17), -50.0)
        for token in range(17):
            for draw, probability in enumerate(probabilities):
                table[token, (2 * token + draw) % 17] = math.log(probability)
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += 1
        logits = self.table[tokens]
        if self.leaky:
            logits[:, :-1].scatter_(2, tokens[:, 1:, None], 9.0)
        return logits


def entropy(probabilities: tuple[float, ...]) -> float:
    return -sum(p * math.log(p) for p in probabilities)


def chain_split(folder: Path, length: int, seed: int, probabilities: tuple[float, ...] = (0.5, 0.5)) -> TokenSplit:
    tokens = chain(length, seed, probabilities)
    return write_cache(folder / f"cache-{seed}", validation=tokens, shard_tokens=1000).validation


def test_the_true_model_of_a_uniform_chain_reaches_the_floor_and_passes(tmp_path: Path) -> None:
    split = chain_split(tmp_path, 401, seed=0)
    result = evaluate(Chain(), split, indices=range(100), entropy_floor=math.log(2))
    assert result.loss == pytest.approx(math.log(2), abs=1e-6)


def test_a_model_that_sees_later_tokens_is_called_a_leak(tmp_path: Path) -> None:
    split = chain_split(tmp_path, 401, seed=0)
    with pytest.raises(TrainingError, match=r"after update 5 is 0\.\d+ .*below the entropy 0\.693147 .*leak"):
        evaluate(Chain(leaky=True), split, indices=range(100), entropy_floor=math.log(2), update=5)
    assert evaluate(Chain(leaky=True), split, indices=range(100)).loss < 0.5


def test_luck_of_a_finite_set_is_no_leak(tmp_path: Path) -> None:
    probabilities = (0.8, 0.2)
    below = 0
    for seed in range(20):
        split = chain_split(tmp_path, 101, seed, probabilities)
        loss = evaluate(Chain(probabilities), split, indices=range(25), entropy_floor=entropy(probabilities)).loss
        below += loss < entropy(probabilities) - 1e-3
    assert below >= 5


@pytest.mark.parametrize(("beyond", "raises"), [(-1e-6, False), (1e-6, True)])
def test_the_bound_is_five_standard_errors_of_the_target_losses(split: TokenSplit, beyond: float, raises: bool) -> None:
    model = TinyModel(dtype=torch.float64)
    losses = target_losses(model, small_tokens(VALIDATION_TOKENS, seed=2))
    bound = 5 * losses.std(ddof=1) / math.sqrt(len(losses)) + 1e-6

    def measure() -> ValidationResult:
        return evaluate(model, split, runtime=runtime("float64"), entropy_floor=losses.mean() + bound + beyond)

    if raises:
        with pytest.raises(TrainingError, match="leak"):
            measure()
    else:
        measure()


def test_noise_is_measured_only_where_the_loss_is_below_the_floor(tmp_path: Path) -> None:
    split = chain_split(tmp_path, 401, seed=0)
    assert passes(split, floor=0.5) == 34  # 100 blocks in batches of 3
    assert passes(split, floor=math.log(2) + 9e-7) == 34 + 100


def passes(split: TokenSplit, *, floor: float) -> int:
    model = Chain()
    evaluate(model, split, indices=range(100), entropy_floor=floor)
    return model.passes
