"""One update, however it is split: the same gradient, loss and step, with the real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llama_c4.data.batch import IGNORED
from tests.tiny_llama import accumulate, llama_engine, run_plan, tiny_llama
from tests.tiny_training import TinyStream, adamw, tiny_plan, weights

PLAN = tiny_plan(total_tokens=16, epoch_tokens=16)  # one update of 4 blocks
STREAM = TinyStream(ignored=0.4)
FORMS: list[Any] = ["plain", "chunked"]


def accumulated(split: int, *, loss: Any) -> dict[str, Any]:
    engine = llama_engine(tiny_llama(loss=loss), adamw())
    accumulate(engine, PLAN.update(0), split=split, stream=STREAM)
    return engine.state_dict()["accumulated"]


@pytest.mark.parametrize("loss", FORMS)
def test_gradients_of_1x4_2x2_and_4x1_with_unequal_targets_agree_with_autograd_of_the_mean(loss: Any) -> None:
    model, batch = tiny_llama(), STREAM.batch(0, 4)
    per_block = [int((row != IGNORED).sum()) for row in batch.targets]
    assert len(set(per_block)) > 1 and sum(per_block) == batch.num_targets < 16
    log_p = model(batch.tokens).log_softmax(-1).flatten(0, 1)
    picked = log_p[torch.arange(16), batch.targets.clamp(min=0).flatten()][batch.targets.flatten() != IGNORED]
    mean = -picked.mean()
    mean.backward()
    for split in (1, 2, 3, 4):
        state = accumulated(split, loss=loss)
        assert state["num_targets"] == batch.num_targets
        assert float(state["loss_sum"]) / batch.num_targets == pytest.approx(float(mean.detach()), rel=1e-13)
        for name, p in model.named_parameters():
            gradient = state["gradients"][name] / state["num_targets"]
            torch.testing.assert_close(gradient, p.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", FORMS)
def test_trained_weights_do_not_depend_on_the_split(loss: Any) -> None:
    plan = tiny_plan(total_tokens=400, epoch_tokens=40)  # 30 updates, a third of them shortened
    results = []
    for split in (1, 2, 4):
        engine = llama_engine(tiny_llama(loss=loss), adamw())
        run_plan(engine, plan, split=split, ignored=0.2)
        results.append(weights(engine.evaluation_model()))
    for other in results[1:]:
        for name, p in results[0].items():
            torch.testing.assert_close(other[name], p, rtol=1e-10, atol=1e-10)  # 30 Adam steps amplify 1e-16


def _gradient(model: Any, counts: list[int]) -> Tensor:
    """The flat accumulated gradient of 1,000 blocks in micro-batches of these sizes."""
    plan = tiny_plan(total_tokens=4_000, epoch_tokens=4_000, batch_tokens=4_000)
    engine, first = llama_engine(model, adamw(), precision="float32"), 0
    stream = TinyStream()
    for count in counts:
        engine.accumulate(stream.batch(first, count), plan.update(0))
        first += count
    gradients = engine.state_dict()["accumulated"]["gradients"]
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def test_1000_micro_batches_in_float32_agree_with_the_float64_sum() -> None:
    exact = _gradient(tiny_llama(dtype=torch.float64), [1] * 1_000)
    singly = _gradient(tiny_llama(dtype=torch.float32), [1] * 1_000)
    by_tens = _gradient(tiny_llama(dtype=torch.float32), [10] * 100)
    assert float((singly - exact).norm() / exact.norm()) < 1e-6
    assert float((by_tens - exact).norm() / exact.norm()) < 1e-6
    assert abs(float(singly.norm() / exact.norm()) - 1) < 1e-6
