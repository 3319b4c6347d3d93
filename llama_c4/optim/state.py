"""The optimizer's state by parameter name: what a checkpoint keeps, whichever kernel wrote it and whichever reads it.

Hyperparameters are not in it. They come from the configuration, whose identity the checkpoint carries, and the learning
rate from the position; torch's own `load_state_dict` would bring back the kernel flags of the machine that saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llama_c4.config.errors import CheckpointError

RULE_KEYS = ("semantics", "window")
"""Settings in the groups that give the state its meaning, where an optimizer has them."""


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Name, rule and the state of every parameter that has one; tensors are the live ones, step counts on the CPU."""
    parameters = {
        name: {key: _on_cpu(value) if key == "step" else value for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if optimizer.state.get(p)
    }
    return {"name": type(optimizer).__name__, "rule": _rule(optimizer), "parameters": parameters}


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Take over a saved state into an optimizer of the same kind; its own kernel, device and settings stay.

    Raises:
        CheckpointError: another optimizer or rule, unknown parameters, other shapes. Nothing has changed then.
    """
    found, live = (saved["name"], saved["rule"]), (type(optimizer).__name__, _rule(optimizer))
    if found != live:
        raise CheckpointError(
            f"the checkpoint's optimizer is {found[0]} {found[1]}, and this run's {live[0]} {live[1]}"
        )
    named = dict(model.named_parameters())
    for name, state in saved["parameters"].items():
        _check(name, state, named.get(name))
    current = optimizer.state_dict()
    indices = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    states = {indices[named[name]]: _copies(state) for name, state in saved["parameters"].items()}
    optimizer.load_state_dict({"state": states, "param_groups": current["param_groups"]})


def _check(name: str, state: dict[str, Any], p: Tensor | None) -> None:
    if p is None:
        raise CheckpointError(f"the checkpoint has optimizer state of {name}, which this model does not have")
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.shape != p.shape:
            raise CheckpointError(
                f"optimizer state {key} of {name} has shape {tuple(value.shape)}, the parameter {tuple(p.shape)}"
            )


def _rule(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: optimizer.param_groups[0][key] for key in RULE_KEYS if key in optimizer.param_groups[0]}


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    """Copies, since torch keeps the tensors that it is given, and these may lie in a mapped file."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
