"""The synchronous engine: denominators, clipping, refusal of bad numbers, state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_c4.config.errors import CheckpointError, TrainingError
from llama_c4.data.batch import IGNORED, Batch
from llama_c4.optim.build import build_optimizer, set_lr
from llama_c4.trainer.engine import Engine, StepOutcome
from llama_c4.trainer.sync import SyncEngine
from tests.tiny_training import (
    TinyModel,
    TinyStream,
    accum_adamw,
    adamw,
    bitwise_equal,
    tiny_engine,
    tiny_plan,
    weights,
)  # fmt: skip

PLAN = tiny_plan()  # 6 updates of 4, 4, 2 | 4, 4, 2 blocks


def one_update(
    engine: SyncEngine, *, split: int, index: int = 0, ignored: float = 0.0, lr: float = 0.01
) -> StepOutcome:
    """One update of the plan in micro-batches of `split` blocks."""
    update, stream = PLAN.update(index), TinyStream(ignored=ignored)
    for first in range(update.first_block, update.end_block, split):
        engine.accumulate(stream.batch(first, min(split, update.end_block - first)), update)
    return engine.apply(lr, update)


def exact_gradient(model: TinyModel, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and its gradient over the whole batch in one pass, by autograd on log-softmax."""
    log_p = model(batch.tokens).log_softmax(-1)
    counted = batch.targets != IGNORED
    picked = log_p.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    loss = -(picked * counted).sum() / counted.sum()
    names, params = zip(*model.named_parameters(), strict=True)
    return float(loss.detach()), dict(zip(names, torch.autograd.grad(loss, params), strict=True))


def test_it_is_an_engine() -> None:
    engine: Engine = tiny_engine()
    assert isinstance(engine.evaluation_model(), TinyModel)


@pytest.mark.parametrize("split", [1, 2, 3, 4])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
def test_update_of_any_split_is_the_step_along_the_whole_batchs_mean_gradient(split: int, ignored: float) -> None:
    expected = TinyModel()
    loss, gradient = exact_gradient(expected, TinyStream(ignored=ignored).batch(0, 4))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    for name, p in expected.named_parameters():
        p.grad = gradient[name] * min(1, 0.5 / (norm + 1e-6))
    build_optimizer(adamw(), expected, kernel="plain").step()

    engine = tiny_engine(optim=adamw(grad_clip=0.5))
    outcome = one_update(engine, split=split, ignored=ignored)
    assert float(outcome.loss) == pytest.approx(loss, rel=1e-13)
    assert float(outcome.grad_norm) == pytest.approx(norm, rel=1e-12) and bool(outcome.clipped)
    for name, p in engine.evaluation_model().named_parameters():
        torch.testing.assert_close(p, expected.get_parameter(name), rtol=1e-12, atol=1e-13)


def test_a_micro_batch_without_targets_adds_nothing_and_an_update_without_any_is_an_error() -> None:
    engine, update = tiny_engine(), PLAN.update(2)
    tokens, nothing = torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), IGNORED)
    engine.accumulate(Batch(tokens, nothing, 0), update)
    with pytest.raises(TrainingError, match="update 3 has no target that counts"):
        engine.apply(0.01, update)
    engine.accumulate(batch := TinyStream().batch(8, 2), update)
    loss = exact_gradient(TinyModel(), batch)[0]
    assert float(engine.apply(0.01, update).loss) == pytest.approx(loss, rel=1e-13)


@pytest.mark.parametrize("split", [1, 4])
def test_clipping_comes_after_accumulation_and_the_norm_is_of_the_whole_batch_before_it(split: int) -> None:
    def norm(**clip: Any) -> StepOutcome:
        return one_update(tiny_engine(optim=adamw(**clip)), split=split)

    free, loose, tight = norm(grad_clip=None), norm(grad_clip=1e3), norm(grad_clip=1e-3)
    assert float(free.grad_norm) == float(loose.grad_norm) == float(tight.grad_norm) > 0.1
    assert [bool(o.clipped) for o in (free, loose, tight)] == [False, False, True]


def test_without_clipping_or_inside_the_threshold_the_update_is_the_same() -> None:
    results = []
    for clip in (None, 1e3):
        engine = tiny_engine(optim=adamw(grad_clip=clip))
        one_update(engine, split=2)
        results.append(weights(engine.evaluation_model()))
    assert bitwise_equal(*results)


def test_each_gradient_of_an_accumulation_window_is_clipped_by_itself() -> None:
    clip, model, n = 0.05, TinyModel(), 3
    engine = tiny_engine(model=model, optim=accum_adamw(grad_clip=clip, window=n + 1))
    expected, of_mean = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)
    for index in range(n):
        update = PLAN.update(index)
        _, gradient = exact_gradient(model, TinyStream().batch(update.first_block, update.num_blocks))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        expected += gradient["layer"] * min(1, clip / (norm + 1e-6)) / (n + 1)
        of_mean += gradient["layer"] / (n + 1)
        one_update(engine, split=2, index=index)
    buffer = engine.state_dict()["optimizer"]["parameters"]["layer"]["window_mean"]
    torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-15)
    assert float((buffer / of_mean).std()) > 1e-3  # clipping the mean would give a multiple of it


def _poison_loss(model: TinyModel) -> None:
    model.norm.data[3] = math.inf


def _poison_gradient(model: TinyModel) -> None:
    model.layer.register_hook(lambda g: g * math.nan)


@pytest.mark.parametrize("poison", [_poison_loss, _poison_gradient])
@pytest.mark.parametrize("optim", [adamw(), adamw(grad_clip=None), accum_adamw()])
def test_a_non_finite_loss_or_norm_stops_before_the_update_and_changes_no_bit(
    poison: Callable[[TinyModel], None], optim: Any
) -> None:
    model = TinyModel()
    engine = tiny_engine(model=model, optim=optim, kernel="auto")
    one_update(engine, split=2)
    poison(model)
    before, moments = weights(model), _copied(engine.state_dict()["optimizer"])
    with pytest.raises(TrainingError, match=r"update 2 is not finite \(worker 0, .*lr 0.003\)"):
        one_update(engine, split=2, index=1, lr=0.003)
    assert bitwise_equal(weights(model), before)
    assert bitwise_equal(engine.state_dict()["optimizer"], moments)


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else tree


@pytest.mark.parametrize("kernel", ["fused", "foreach", "plain"])
def test_norm_scales_move_at_a_small_learning_rate_in_float32(kernel: str) -> None:
    engine = tiny_engine(model=TinyModel(dtype=torch.float32), kernel=kernel, precision="float32")
    for _ in range(100):
        one_update(engine, split=4, lr=1e-4)
    moved = (weights(engine.evaluation_model())["norm"] - 1).abs()
    assert float(moved.min()) > 1e-4


def test_bfloat16_autocast_keeps_parameters_gradients_and_moments_in_float32() -> None:
    engine = tiny_engine(model=TinyModel(dtype=torch.float32), precision="bfloat16")
    engine.accumulate(TinyStream().batch(0, 2), PLAN.update(0))
    accumulated = engine.state_dict()["accumulated"]
    assert {g.dtype for g in accumulated["gradients"].values()} == {torch.float32}
    engine.apply(0.01, PLAN.update(0))
    state = engine.state_dict()
    moments = [m for s in state["optimizer"]["parameters"].values() for k, m in s.items() if k != "step"]
    assert {t.dtype for t in [*state["model"].values(), *moments]} == {torch.float32}


def test_learning_rate_reaches_every_group() -> None:
    before = weights(TinyModel())
    changes = []
    for lr in (0.001, 0.004):
        engine = tiny_engine(optim=adamw(weight_decay=0.0))
        one_update(engine, split=4, lr=lr)
        changes.append({n: p - before[n] for n, p in weights(engine.evaluation_model()).items()})
    for name in before:
        torch.testing.assert_close(changes[1][name], 4 * changes[0][name], rtol=1e-10, atol=1e-16)


def test_state_inside_an_update_holds_the_accumulated_sums_and_between_updates_none() -> None:
    engine, stream = tiny_engine(), TinyStream()
    assert engine.state_dict()["accumulated"] is None
    engine.accumulate(batch := stream.batch(0, 2), PLAN.update(0))
    accumulated = engine.state_dict()["accumulated"]
    loss, gradient = exact_gradient(TinyModel(), batch)
    assert accumulated["num_targets"] == 8 and float(accumulated["loss_sum"]) == pytest.approx(8 * loss)
    torch.testing.assert_close(accumulated["gradients"]["layer"], 8 * gradient["layer"], rtol=1e-12, atol=1e-14)
    engine.accumulate(stream.batch(2, 2), PLAN.update(0))
    engine.apply(0.01, PLAN.update(0))
    assert engine.state_dict()["accumulated"] is None


def _state(**changes: Any) -> dict[str, Any]:
    engine = tiny_engine(model=TinyModel(seed=3))
    one_update(engine, split=2)
    engine.accumulate(TinyStream().batch(4, 2), PLAN.update(1))
    return _copied(engine.state_dict()) | changes


def _without(tree: dict[str, Any], *path: str) -> dict[str, Any]:
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1])
    return tree


@pytest.mark.parametrize(
    ("reason", "damage"),
    [
        ("odd or missing tensors layer", lambda: _without(_state(), "model", "layer")),
        ("odd or missing tensors more", lambda: _state(model=_state()["model"] | {"more": torch.ones(1)})),
        ("norm is", lambda: _state(model=_state()["model"] | {"norm": torch.ones(9, dtype=torch.float64)})),
        ("float32", lambda: _state(model=_state()["model"] | {"norm": torch.ones(8)})),
        ("accumulated gradient", lambda: _without(_state(), "accumulated", "gradients", "norm")),
        (
            "optimizer is AccumAdamW",
            lambda: _state(optimizer=tiny_engine(optim=accum_adamw()).state_dict()["optimizer"]),
        ),
        ("'window': 5", lambda: _state(optimizer={"name": "AdamW", "rule": {"window": 5}, "parameters": {}})),
        ("state of other", lambda: _state(optimizer={"name": "AdamW", "rule": {}, "parameters": {"other": {}}})),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    reason: str, damage: Callable[[], dict[str, Any]]
) -> None:
    engine = tiny_engine()
    one_update(engine, split=2)
    before = _copied(engine.state_dict())
    with pytest.raises(CheckpointError, match=reason):
        engine.load_state_dict(damage())
    assert bitwise_equal(engine.state_dict(), before)


def test_loading_copies_so_the_saved_state_stays_what_it_was() -> None:
    engine, saved = tiny_engine(), _state()
    kept = _copied(saved)
    engine.load_state_dict(saved)
    engine.accumulate(TinyStream().batch(6, 2), PLAN.update(1))
    engine.apply(0.01, PLAN.update(1))
    assert bitwise_equal(saved, kept)


def test_a_learning_rate_of_another_kernel_is_not_brought_back_by_a_state() -> None:
    model = TinyModel()
    first = build_optimizer(adamw(lr=0.5), model, kernel="fused")
    set_lr(first, 0.125)
    engine = tiny_engine(model=model, kernel="foreach")
    engine.load_state_dict(_state())
    assert engine._optimizer.param_groups[0]["foreach"] is True
    assert engine._optimizer.param_groups[0]["lr"] == 0.01
