"""RMSNorm, SwiGLU and the pre-norm block of Llama.

Letters: T tokens, C hidden size, F intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_c4.config.schema import LlamaConfig
from llama_c4.model.attention import CausalAttention, SelfAttention
from llama_c4.model.products import Projection


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · scale, with statistics in float32, or float64 for float64 inputs."""

    def __init__(self, size: int, *, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] → [..., C] in the dtype of the statistics."""
        return rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), self.weight, self.eps)


class SwiGLU(nn.Module):
    """(silu(x W_gateᵀ) · x W_upᵀ) W_downᵀ."""

    def __init__(self, size: int, inner: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.w_gate = Projection(size, inner, device=device, dtype=dtype)
        self.w_up = Projection(size, inner, device=device, dtype=dtype)
        self.w_down = Projection(inner, size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] → [..., C]."""
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))  # [..., F] inside


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, config: LlamaConfig, *, attend: CausalAttention, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(size, eps=eps, device=device, dtype=dtype)
        self.attention = SelfAttention(size, config.num_heads, attend=attend, device=device, dtype=dtype)
        self.ffn_norm = RMSNorm(size, eps=eps, device=device, dtype=dtype)
        self.ffn = SwiGLU(size, config.intermediate_size, device=device, dtype=dtype)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[..., T, C] → [..., T, C], with the rotary table of T positions."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.ffn(self.ffn_norm(x))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · scale over the last dimension, twice differentiable."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * scale
