"""Which parameters decay: tensors with two or more dimensions do, norm scales do not."""

from __future__ import annotations

from typing import Any

from torch import nn


def param_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters into a decayed and an undecayed group, in the model's order.

    A tied tensor is one parameter and decays once. With a worker axis every shape has one dimension more: the rule then
    asks for three.

    Returns:
        Groups for a torch optimizer; a group without parameters is left out.
    """
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
