"""AdamW as built from the configuration, against a float64 reference written from the equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import AccumAdamWConfig, AdamWConfig
from llama_c4.optim.build import OPTIMIZERS, build_optimizer, set_lr
from llama_c4.optim.param_groups import param_groups
from llama_c4.optim.state import load_optimizer_state, optimizer_state
from tests.tiny_training import TinyModel, accum_adamw, adamw, tiny_runtime

KERNELS = ["auto", "fused", "foreach", "plain"]
LRS = [0.001, 0.01, 0.0, 0.02, 0.005]


def gradients_at(update: int, model: TinyModel) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(100 + update)
    return {n: torch.randn(p.shape, generator=random, dtype=p.dtype) for n, p in model.named_parameters()}


def step(optimizer: torch.optim.Optimizer, model: TinyModel, update: int) -> None:
    for name, g in gradients_at(update, model).items():
        model.get_parameter(name).grad = g
    set_lr(optimizer, LRS[update % len(LRS)])
    optimizer.step()


def reference(model: TinyModel, updates: int) -> dict[str, Tensor]:
    """Loshchilov and Hutter's AdamW from the whole history of gradients, element by element in python floats."""
    result = {}
    for name, p in model.named_parameters():
        decay = 0.1 if p.dim() >= 2 else 0.0
        values = []
        for index, x in enumerate(p.detach().double().flatten().tolist()):
            m = v = 0.0
            for t in range(updates):
                g = float(gradients_at(t, model)[name].flatten()[index])
                lr = LRS[t % len(LRS)]
                m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
                u = (m / (1 - 0.9 ** (t + 1))) / (math.sqrt(v / (1 - 0.98 ** (t + 1))) + 1e-8)
                x = x - lr * decay * x - lr * u
            values.append(x)
        result[name] = torch.tensor(values, dtype=torch.float64).view_as(p)
    return result


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_equals_the_equations(kernel: str) -> None:
    model = TinyModel()
    expected = reference(model, updates=3)
    optimizer = build_optimizer(adamw(), model, kernel=kernel)
    for update in range(3):
        step(optimizer, model, update)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_matrices_decay_once_and_norm_scales_do_not() -> None:
    model = TinyModel()
    decayed, others = param_groups(model, weight_decay=0.1)
    assert [p.shape for p in decayed["params"]] == [(17, 8), (8, 8)] and decayed["weight_decay"] == 0.1
    assert [p.shape for p in others["params"]] == [(8,)] and others["weight_decay"] == 0.0


def test_auto_is_fused_and_plain_is_neither_fused_nor_foreach() -> None:
    flags = {k: build_optimizer(adamw(), TinyModel(), kernel=k).param_groups[0] for k in KERNELS}
    assert [(flags[k]["fused"], flags[k]["foreach"]) for k in KERNELS] == [
        (True, False), (True, False), (False, True), (False, False),
    ]  # fmt: skip


def test_weight_decay_acts_alone_where_the_gradient_is_zero() -> None:
    model = TinyModel()
    before = model.layer.detach().clone()
    optimizer = build_optimizer(adamw(lr=0.01), model, kernel="fused")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.layer.detach(), before * (1 - 0.01 * 0.1), rtol=1e-15, atol=0)
    assert torch.equal(model.norm.detach(), torch.ones(8, dtype=torch.float64))


def test_step_at_another_learning_rate_scales_the_change() -> None:
    changes = []
    for lr in (0.001, 0.003):
        model = TinyModel()
        before = model.layer.detach().clone()
        optimizer = build_optimizer(adamw(weight_decay=0.0), model, kernel="fused")
        model.layer.grad = torch.ones_like(model.layer)
        set_lr(optimizer, lr)
        optimizer.step()
        changes.append(model.layer.detach() - before)
    torch.testing.assert_close(changes[1], 3 * changes[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optim", [adamw(), accum_adamw()])
def test_coarsely_rounded_parameters_are_refused(optim: object, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="keep parameters in float32"):
        build_optimizer(optim, TinyModel(dtype=dtype), kernel="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("saver", KERNELS)
@pytest.mark.parametrize("loader", KERNELS)
def test_state_of_any_kernel_continues_in_any_other(saver: str, loader: str) -> None:
    model, whole = TinyModel(), TinyModel()
    uninterrupted = build_optimizer(adamw(), whole, kernel=saver)
    first = build_optimizer(adamw(), model, kernel=saver)
    for update in range(2):
        step(uninterrupted, whole, update)
        step(first, model, update)
    saved = optimizer_state(first, model)
    second = build_optimizer(adamw(), model, kernel=loader)
    load_optimizer_state(second, model, saved)
    assert second.param_groups[0]["fused"] == (loader in ("auto", "fused"))
    step(uninterrupted, whole, 2)
    step(second, model, 2)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, whole.get_parameter(name), rtol=1e-13, atol=1e-15)


def test_loaded_moments_are_copies() -> None:
    model = TinyModel()
    first, second = (build_optimizer(adamw(), model, kernel="fused") for _ in range(2))
    step(first, model, 0)
    saved = optimizer_state(first, model)
    load_optimizer_state(second, model, saved)
    kept = saved["parameters"]["layer"]["exp_avg"].clone()
    step(second, model, 1)
    assert torch.equal(saved["parameters"]["layer"]["exp_avg"], kept)


def test_table_has_every_optimizer_of_the_configuration_and_each_trains() -> None:
    assert set(OPTIMIZERS) == {AdamWConfig, AccumAdamWConfig}
    for optim in (adamw(), accum_adamw()):
        model = TinyModel()
        optimizer = build_optimizer(optim, model, kernel=tiny_runtime().optimizer_kernel)
        step(optimizer, model, 0)
        assert not torch.equal(model.norm.detach(), torch.ones(8, dtype=torch.float64))


def test_accum_adamw_has_no_fused_kernel_and_says_so() -> None:
    with pytest.raises(ConfigError, match="optimizer_kernel=fused"):
        build_optimizer(accum_adamw(), TinyModel(), kernel="fused")
