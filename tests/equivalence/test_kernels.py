"""Ways to compute the same run: optimizer kernels, compilation, repetition, and a loop written from scratch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_c4.trainer.plan import Progress
from tests.tiny_llama import llama_engine, run_plan, tiny_llama
from tests.tiny_training import TinyStream, accum_adamw, adamw, bitwise_equal, tiny_plan, weights

PLAN = tiny_plan(total_tokens=280, epoch_tokens=40)  # 21 updates


def from_scratch(optim: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The same run by whole batches, torch.autograd.grad and AdamW written out."""
    model, losses = tiny_llama(), []
    params = dict(model.named_parameters())
    m, v = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
    for update in PLAN.remaining(Progress()):
        batch = TinyStream().batch(update.first_block, update.num_blocks)
        logits = model(batch.tokens).flatten(0, 1)
        loss = (logits.logsumexp(-1) - logits.gather(1, batch.targets.flatten()[:, None])[:, 0]).mean()
        gradients = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        lr, t = 0.01 * (1 - update.index / PLAN.num_updates), update.number
        for name, p in params.items():
            g = gradients[name] * min(1.0, optim.grad_clip / (norm + 1e-6))
            m[name] = optim.beta1 * m[name] + (1 - optim.beta1) * g
            v[name] = optim.beta2 * v[name] + (1 - optim.beta2) * g * g
            u = m[name] / (1 - optim.beta1**t) / ((v[name] / (1 - optim.beta2**t)).sqrt() + optim.eps)
            p.data = (1 - lr * (optim.weight_decay if p.dim() > 1 else 0)) * p.data - lr * u
        losses.append(float(loss.detach()))
    return losses, weights(model)


@pytest.mark.parametrize("kernel", ["auto", "foreach", "plain"])
def test_every_kernel_trains_as_the_loop_written_from_scratch(kernel: str) -> None:
    optim = adamw(grad_clip=0.5)
    expected_losses, expected = from_scratch(optim)
    engine = llama_engine(tiny_llama(), optim, kernel=kernel)
    outcomes = run_plan(engine, PLAN)
    assert [float(o.loss) for o in outcomes] == pytest.approx(expected_losses, rel=1e-11)
    for name, p in weights(engine.evaluation_model()).items():
        torch.testing.assert_close(p, expected[name], rtol=1e-9, atol=1e-10)


def test_window_1_of_accum_adamw_trains_as_the_loop_written_from_scratch() -> None:
    expected_losses, _ = from_scratch(optim := accum_adamw(window=1))
    outcomes = run_plan(llama_engine(tiny_llama(), optim), PLAN)
    assert [float(o.loss) for o in outcomes] == pytest.approx(expected_losses, rel=1e-11)


def test_a_second_run_in_the_same_process_is_bitwise_the_first() -> None:
    states = []
    for _ in range(2):
        engine = llama_engine(tiny_llama(dtype=torch.float32), adamw(), kernel="auto", precision="float32")
        run_plan(engine, PLAN)
        states.append(engine.state_dict())
    assert bitwise_equal(*states)


def test_deterministic_gradients_are_bitwise_equal_over_5_repeats() -> None:
    torch.use_deterministic_algorithms(True)
    results = []
    for _ in range(5):
        engine = llama_engine(tiny_llama(dtype=torch.float32), adamw(), deterministic=True, precision="float32")
        engine.accumulate(TinyStream().batch(0, 64), PLAN.update(0))
        results.append(engine.state_dict()["accumulated"]["gradients"])
    assert all(bitwise_equal(r, results[0]) for r in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "mode", "precision", "tolerance"),
    [("plain", "default", "float64", 1e-10), ("chunked", "reduce-overhead", "bfloat16", 0.03)],
)
def test_compiled_model_trains_as_the_eager_one(loss: Any, mode: str, precision: str, tolerance: float) -> None:
    torch._dynamo.reset()
    losses = []
    for compile_mode in (None, mode):
        model = tiny_llama(loss=loss, dtype=torch.float64 if precision == "float64" else torch.float32)
        engine = llama_engine(model, adamw(), compile_mode=compile_mode, precision=precision)
        losses.append([float(o.loss) for o in run_plan(engine, PLAN)])
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)  # bfloat16: fused kernels round less often
