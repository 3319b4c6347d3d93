"""AccumAdamW: AdamW whose persistent moments move once in a window of s updates.

Persistent moments M, V and a buffer b start at 0. Update t (from 0), with k = floor(t/s) + 1 and gradient g:

    m = β1 M + (1−β1) g          v = β2 V + (1−β2) g²
    u = (m / (1−β1^k)) / (sqrt(v / (1−β2^k)) + eps)
    x ← (1 − lr·wd) x − lr·u     b ← b + g/s

and at the window's end M ← β1 M + (1−β1) b, V ← β2 V + (1−β2) b², b ← 0. s = 1 is AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor

from llama_c4.config.errors import CheckpointError

SEMANTICS = "accum_adamw/1"
"""Name and version of the rule above; a state saved under another one is refused."""
STATE_KEYS = {"step", "exp_avg", "exp_avg_sq", "window_mean"}


class AccumAdamW(torch.optim.Optimizer):
    """The optimizer of the module's text.

    State of a parameter: `step` (int, updates done; parameters without a gradient are skipped and keep their own
    count), `exp_avg` (M), `exp_avg_sq` (V), `window_mean` (b).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        window: int,
        foreach: bool = False,
    ) -> None:
        """
        Args:
            params: Parameters or groups, as torch takes them.
            lr: Learning rate, a float; changed in the groups before a step.
            betas: β1, β2 in [0, 1).
            eps: Added outside of the root, after bias correction.
            weight_decay: Decoupled decay.
            window: s.
            foreach: Work on lists of tensors (fewer launches, more temporaries) instead of one tensor at a time.
        Raises:
            ValueError: a setting is out of its range.
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "window": window}
        super().__init__(params, defaults | {"foreach": foreach, "semantics": SEMANTICS})
        for group in self.param_groups:
            _check_settings(group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply one update to every parameter that has a gradient.

        Raises:
            ValueError: a gradient is sparse; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad.is_sparse for group in self.param_groups for p in group["params"] if p.grad is not None):
            raise ValueError("AccumAdamW takes no sparse gradients")
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for together in _batches(with_gradient, self.state, foreach=group["foreach"]):
                self._update(together, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One update of parameters that share device, dtype and count; operations in the order of torch's AdamW."""
        states = [self.state[p] for p in params]
        means, squares, buffers = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "window_mean"))
        grads = [p.grad for p in params if p.grad is not None]
        (beta1, beta2), window, step = group["betas"], group["window"], states[0]["step"]
        k = step // window + 1

        m = torch._foreach_lerp(means, grads, 1 - beta1)
        denominators = torch._foreach_mul(squares, beta2)
        torch._foreach_addcmul_(denominators, grads, grads, value=1 - beta2)
        torch._foreach_sqrt_(denominators)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**k))
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(params, m, denominators, value=-group["lr"] / (1 - beta1**k))

        torch._foreach_add_(buffers, grads, alpha=1 / window)
        if (step + 1) % window == 0:
            torch._foreach_lerp_(means, buffers, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, buffers, buffers, value=1 - beta2)
            torch._foreach_zero_(buffers)
        for state in states:
            state["step"] = step + 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, after it has been checked whole; a refused one changes nothing.

        Raises:
            CheckpointError: another optimizer, rule, window or shape; a count, moment or buffer that cannot be.
        """
        _check_saved(state_dict, self.param_groups)
        super().load_state_dict(state_dict)


def _check_settings(group: dict[str, Any]) -> None:
    lr, (beta1, beta2), window = group["lr"], group["betas"], group["window"]
    if not (isinstance(lr, float | int) and math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr={lr!r} must be a finite number from 0 on")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas={group['betas']} must lie in [0, 1)")
    if not (math.isfinite(group["eps"]) and group["eps"] > 0):
        raise ValueError(f"eps={group['eps']} must be positive")
    if not (math.isfinite(group["weight_decay"]) and group["weight_decay"] >= 0):
        raise ValueError(f"weight_decay={group['weight_decay']} must not be negative")
    if type(window) is not int or window < 1:
        raise ValueError(f"window={window!r} must be a whole number of updates, at least 1")


def _batches(params: list[Tensor], state: dict[Tensor, dict[str, Any]], *, foreach: bool) -> Iterator[list[Tensor]]:
    """Parameters to be updated in one go: singly, or all that share device, dtype and count."""
    alike: dict[Any, list[Tensor]] = {}
    for index, p in enumerate(params):
        if not state[p]:
            state[p] = {"step": 0} | {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq", "window_mean")}
        alike.setdefault((p.device, p.dtype, state[p]["step"]) if foreach else index, []).append(p)
    yield from alike.values()


def _check_saved(saved: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Every reason to refuse a saved state, before anything is touched."""
    found_sizes = [len(group["params"]) for group in saved["param_groups"]]
    if found_sizes != (sizes := [len(group["params"]) for group in groups]):
        raise CheckpointError(f"the saved optimizer has groups of {found_sizes} parameters, and this run of {sizes}")
    live: dict[int, tuple[Tensor, int]] = {}
    for found, group in zip(saved["param_groups"], groups, strict=True):
        for key in ("semantics", "window"):
            if type(found.get(key)) is not type(group[key]) or found[key] != group[key]:
                raise CheckpointError(f"the saved optimizer has {key}={found.get(key)!r}, and this run {group[key]!r}")
        live |= {index: (p, group["window"]) for index, p in zip(found["params"], group["params"], strict=True)}
    if unknown := set(saved["state"]) - set(live):
        raise CheckpointError(f"the saved optimizer has states of unknown parameters {sorted(unknown)}")
    for index, state in saved["state"].items():
        _check_saved_parameter(index, state, *live[index])


def _check_saved_parameter(index: int, state: dict[str, Any], p: Tensor, window: int) -> None:
    where = f"optimizer state of parameter {index}"
    if set(state) != STATE_KEYS:
        raise CheckpointError(f"{where}: keys {sorted(state)} are not {sorted(STATE_KEYS)}")
    if type(state["step"]) is not int or state["step"] < 0:
        raise CheckpointError(f"{where}: step={state['step']!r} is no count of updates")
    for key in ("exp_avg", "exp_avg_sq", "window_mean"):
        value = state[key]
        if not isinstance(value, Tensor) or value.shape != p.shape or not value.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {key} is not of the parameter's shape {tuple(p.shape)}")
        if not torch.isfinite(value).all():
            raise CheckpointError(f"{where}: {key} is not finite")
    if (state["exp_avg_sq"] < 0).any():
        raise CheckpointError(f"{where}: exp_avg_sq is negative")
    if state["step"] % window == 0 and state["window_mean"].any():
        raise CheckpointError(f"{where}: window_mean is not empty at a window's end (step {state['step']})")
