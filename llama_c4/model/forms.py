"""The forms in which a model computes: what differs between training on a CPU, on an accelerator, and derivatives.

A form changes speed and memory, never values beyond rounding, and never the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_c4.model.attention import CausalAttention, build_attention
from llama_c4.model.lean import gate_lean, rms_norm_lean


class Forms(NamedTuple):
    """The three operations of a block that have more than one form."""

    attend: CausalAttention
    """(queries, keys, values) → outputs, all [..., H, T, K]."""
    normalize: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., C], scale [C], eps) → [..., C]."""
    gate: Callable[[Tensor, Tensor], Tensor]
    """(gate, up) → silu(gate) · up, [..., F]."""


def build_forms(attention: str, *, device: torch.device, dtype: torch.dtype, head_size: int) -> Forms:
    """Choose the forms for an attention path and a device.

    The reference path is written in differentiable operations throughout. A CPU takes hand-written first derivatives,
    which need fewer passes over memory; an accelerator leaves the fusing to the compiler.

    Raises:
        ConfigError: the forced attention kernel cannot run here.
    """
    attend = build_attention(attention, device=device, dtype=dtype, head_size=head_size)
    if attention == "reference" or device.type != "cpu":
        return Forms(attend, rms_norm, gate)
    return Forms(attend, _eager(rms_norm_lean, rms_norm), _eager(gate_lean, gate))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · scale over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * scale


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate) * up


def _eager(lean: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The lean form when run eagerly; the plain one under a compiler, which fuses it better than it is written."""

    def choose(*operands: Tensor | float) -> Tensor:
        return plain(*operands) if torch.compiler.is_compiling() else lean(*operands)

    return choose
