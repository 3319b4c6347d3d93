"""Rotary position embedding in Llama's half-split layout, by one complex product.

Feature i of a head (i < K/2) is paired with feature i + K/2, and the pair at position t is turned by the angle
t · theta^(-2i/K). A pair is a complex number here: when the rows of the query and key projections are taken in
the order 0, K/2, 1, K/2 + 1, … the pairs lie side by side, and the rotation is one product with cos + i sin.
Queries and keys are reordered alike, so their inner products are those of the half-split layout.

Letters: T tokens, K head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """cos and sin of every position and pair; one for all layers, computed once.

    The table is float32, or float64 in a float64 model, whatever the model is moved to later: a conversion recomputes
    it instead of rounding it. It is not part of the state.
    """

    table: Tensor

    def __init__(self, *, length: int, head_size: int, theta: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.length, self.head_size, self.theta = length, head_size, theta
        self.register_buffer("table", self._compute(device, dtype), persistent=False)

    def forward(self, length: int) -> Tensor:
        """The first positions, [length, K/2, 2] (cos, sin).

        Raises:
            ValueError: more positions than the context has.
        """
        if length > self.length:
            raise ValueError(f"{length} tokens are more than the context length of the model, {self.length}")
        return self.table[:length]

    def _compute(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return rotary_table(self.length, self.head_size, self.theta, dtype=wide).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        # Module.to, .half, .bfloat16, .double, .cuda and .to_empty all come here with a function of one tensor.
        moved = fn(torch.empty(0, dtype=self.table.dtype, device=self.table.device))
        self.table = self._compute(moved.device, moved.dtype)
        return self


def rotary_table(length: int, head_size: int, theta: float, *, dtype: torch.dtype) -> Tensor:
    """Angles t · theta^(-2i/K) for t < length and i < K/2, computed in `dtype`, as (cos, sin), [length, K/2, 2]."""
    exponents = torch.arange(0, head_size, 2, dtype=dtype) / head_size
    angles = torch.outer(torch.arange(length, dtype=dtype), 1.0 / theta**exponents)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def interleave_halves(weight: Tensor, head_size: int) -> Tensor:
    """Take the rows [H·K, C] of a projection in the order that puts the two members of a pair side by side."""
    halves = weight.unflatten(-2, (-1, 2, head_size // 2))  # [H, 2, K/2, C]
    return halves.transpose(-3, -2).flatten(-4, -2)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Turn every pair by the angle of its position.

    Args:
        heads: Interleaved queries or keys, [..., T, H, K], float32 or float64.
        table: (cos, sin), [T, K/2, 2], of the same dtype.
    """
    pairs = heads.unflatten(-1, (-1, 2))  # [..., T, H, K/2, 2]
    angles = table.unsqueeze(-3)  # [T, 1, K/2, 2]
    if torch.compiler.is_compiling():  # the compiler fuses real arithmetic and has no code for complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), angles.unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    turned = torch.view_as_complex(pairs) * torch.view_as_complex(angles)
    return torch.view_as_real(turned).flatten(-2)
