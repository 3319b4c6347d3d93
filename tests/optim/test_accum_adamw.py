"""AccumAdamW against a reference that knows nothing but the history of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_c4.config.errors import CheckpointError
from llama_c4.optim.accum_adamw import AccumAdamW
from tests.tiny_training import bitwise_equal

SHAPES = [(3, 2), (4,), (2, 2, 2)]
LRS = [0.01, 0.003, 0.0, 0.02, 0.007, 0.011, 0.001, 0.05]
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.6, 0.85), "eps": 1e-8, "weight_decay": 0.1, "window": 3}


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(s, generator=random, dtype=torch.float64).to(dtype)) for s in SHAPES]


def gradient(update: int, p: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(31 * update + p.numel())
    return torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)


def build(params: list[nn.Parameter], **changes: Any) -> AccumAdamW:
    return AccumAdamW(params, **(SETTINGS | changes))


def train(optimizer: AccumAdamW, params: list[nn.Parameter], updates: range, *, scale: float = 1.0) -> None:
    for update in updates:
        for p in params:
            p.grad = scale * gradient(update, p)
        optimizer.param_groups[0]["lr"] = LRS[update % len(LRS)]
        optimizer.step()


def reference(x: Tensor, history: list[Tensor], *, betas: tuple[float, float], window: int) -> dict[str, Tensor]:
    """The rule by explicit sums over whole windows of the history; nothing is carried from update to update but x."""
    (b1, b2), windows = betas, [history[i : i + window] for i in range(0, len(history), window)]
    means = [torch.stack(w).sum(0) / window for w in windows]

    def persistent(n: int, power: int, beta: float) -> Tensor:
        terms = [(1 - beta) * beta ** (n - 1 - i) * means[i] ** power for i in range(n)]
        return torch.stack(terms).sum(0) if terms else torch.zeros_like(x)

    for t, g in enumerate(history):
        k, lr = t // window + 1, LRS[t % len(LRS)]
        m = b1 * persistent(k - 1, 1, b1) + (1 - b1) * g
        v = b2 * persistent(k - 1, 2, b2) + (1 - b2) * g**2
        u = (m / (1 - b1**k)) / (torch.sqrt(v / (1 - b2**k)) + 1e-8)
        x = (1 - lr * 0.1) * x - lr * u
    whole = len(history) // window
    part = torch.stack(history[whole * window :]).sum(0) / window if len(history) % window else torch.zeros_like(x)
    return {"x": x, "exp_avg": persistent(whole, 1, b1), "exp_avg_sq": persistent(whole, 2, b2), "window_mean": part}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("betas", [(0.6, 0.85), (0.0, 0.0)])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("updates", [1, 4, 7, 8])
def test_equals_the_rule_on_the_explicit_history(
    window: int, betas: tuple[float, float], updates: int, foreach: bool
) -> None:
    params = parameters()
    expected = [
        reference(p.detach(), [gradient(t, p) for t in range(updates)], betas=betas, window=window) for p in params
    ]
    optimizer = build(params, betas=betas, window=window, foreach=foreach)
    train(optimizer, params, range(updates))
    for p, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), wanted["x"], rtol=1e-13, atol=1e-13)
        for key in ("exp_avg", "exp_avg_sq", "window_mean"):
            torch.testing.assert_close(optimizer.state[p][key], wanted[key], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("foreach", [False, True])
def test_window_1_is_the_frameworks_adamw_with_groups_and_missing_gradients(foreach: bool) -> None:
    ours, theirs = parameters(), parameters()
    groups = [[{"params": p[:1], "weight_decay": 0.3}, {"params": p[1:]}] for p in (ours, theirs)]
    mine = AccumAdamW(groups[0], **(SETTINGS | {"window": 1}), foreach=foreach)
    other = torch.optim.AdamW(groups[1], lr=0.01, betas=(0.6, 0.85), eps=1e-8, weight_decay=0.1, foreach=False)
    for update in range(7):
        for p, q in zip(ours, theirs, strict=True):
            missing = p.numel() == 4 and update in (0, 3)
            p.grad, q.grad = (None, None) if missing else (gradient(update, p), gradient(update, q))
        mine.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=1e-15)


def test_a_parameter_without_gradient_keeps_value_and_state_and_counts_for_itself() -> None:
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    before, state = params[0].detach().clone(), {k: _copy(v) for k, v in optimizer.state[params[0]].items()}
    params[0].grad = None
    optimizer.step()
    assert torch.equal(params[0].detach(), before) and bitwise_equal(state, optimizer.state[params[0]])
    assert [optimizer.state[p]["step"] for p in params] == [2, 3, 3]


def test_list_kernel_equals_single_kernel_with_unequal_counters_and_mixed_dtypes() -> None:
    results = []
    for foreach in (False, True):
        params = [*parameters(), *parameters(torch.float32)]
        optimizer = build(params, foreach=foreach)
        for update in range(5):
            for i, p in enumerate(params):
                p.grad = None if (update + i) % 3 == 0 else gradient(update, p)
            optimizer.step()
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_that_cancel_within_a_window_leave_no_second_moment() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = build([p], window=2)
    for sign in (1.0, -1.0):
        p.grad = torch.full((2,), sign, dtype=torch.float64)
        optimizer.step()
    assert not optimizer.state[p]["exp_avg_sq"].any() and not optimizer.state[p]["exp_avg"].any()


def test_epsilon_stands_outside_of_the_root_and_after_bias_correction() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.full((1,), 1e-8, dtype=torch.float64)
    build([p], lr=1.0, weight_decay=0.0).step()
    assert float(p.detach()) == pytest.approx(-1e-8 / (1e-8 + 1e-8), rel=1e-12)


@pytest.mark.parametrize("cut", range(1, 8))
def test_resume_anywhere_in_a_window_is_exact(cut: int) -> None:
    whole, params = parameters(), parameters()
    train(uninterrupted := build(whole), whole, range(8))
    first = build(params)
    train(first, params, range(cut))
    second = build(params)
    second.load_state_dict(first.state_dict())
    train(second, params, range(cut, 8))
    assert all(torch.equal(p, q) for p, q in zip(params, whole, strict=True))
    assert bitwise_equal(second.state_dict()["state"], uninterrupted.state_dict()["state"])


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


DAMAGES: list[Any] = [
    ("semantics", lambda s: s["param_groups"][0].update(semantics="accum_adamw/2")),
    ("semantics=None", lambda s: s["param_groups"][0].pop("semantics")),
    ("window=2", lambda s: s["param_groups"][0].update(window=2)),
    ("window=True", lambda s: s["param_groups"][0].update(window=True)),
    ("groups of", lambda s: s["param_groups"][0]["params"].pop()),
    ("unknown parameters", lambda s: s["state"].update({9: s["state"][0]})),
    ("keys", lambda s: s["state"][0].pop("window_mean")),
    ("shape", lambda s: s["state"][0].update(window_mean=torch.zeros(5))),
    ("no count", lambda s: s["state"][1].update(step=1.5)),
    ("no count", lambda s: s["state"][1].update(step=-1)),
    ("negative", lambda s: s["state"][2]["exp_avg_sq"].neg_()),
    ("not empty at a window's end", lambda s: s["state"][0].update(step=3)),
    ("not finite", lambda s: s["state"][2]["exp_avg"].fill_(math.nan)),
]


@pytest.mark.parametrize(("reason", "damage"), DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(reason: str, damage: Any) -> None:
    params = parameters()
    train(optimizer := build(params), params, range(4))
    saved, before = (
        {
            "state": {i: {k: _copy(v) for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()},
            "param_groups": [dict(g) for g in optimizer.state_dict()["param_groups"]],
        }
        for _ in range(2)
    )
    damage(saved)
    with pytest.raises(CheckpointError, match=reason):
        optimizer.load_state_dict(saved)
    assert bitwise_equal(optimizer.state_dict()["state"], before["state"])


@pytest.mark.parametrize(
    "setting",
    [
        {"window": 0}, {"window": -1}, {"window": True}, {"window": 2.0},
        {"lr": -1.0}, {"lr": math.nan}, {"lr": math.inf},
        {"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"eps": 0.0}, {"eps": math.nan},
        {"weight_decay": -0.1}, {"weight_decay": math.inf},
    ],
)  # fmt: skip
def test_a_setting_out_of_its_range_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        build(parameters(), **setting)


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = gradient(0, p)
    params[2].grad = params[2].grad.to_sparse()  # type: ignore[union-attr]
    optimizer = build(params)
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True)) and not optimizer.state


def test_a_closure_is_evaluated_with_gradients() -> None:
    p = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = build([p], lr=0.5, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert float(p.detach()) == pytest.approx(1.5, abs=1e-7)
