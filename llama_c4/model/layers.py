"""RMSNorm, SwiGLU and the pre-norm block of Llama.

Letters: T tokens, C hidden size, F intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llama_c4.config.schema import LlamaConfig
from llama_c4.model.attention import SelfAttention
from llama_c4.model.forms import Forms
from llama_c4.model.products import Projection


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · scale, with statistics in float32, or float64 for float64 inputs."""

    def __init__(self, size: int, *, eps: float, forms: Forms, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self.normalize = eps, forms.normalize
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] → [..., C] in the dtype of the statistics."""
        return self.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), self.weight, self.eps)


class SwiGLU(nn.Module):
    """(silu(x W_gateᵀ) · x W_upᵀ) W_downᵀ."""

    def __init__(self, size: int, inner: int, *, forms: Forms, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = forms.gate
        self.w_gate = Projection(size, inner, device=device, dtype=dtype)
        self.w_up = Projection(size, inner, device=device, dtype=dtype)
        self.w_down = Projection(inner, size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] → [..., C]."""
        return self.w_down(self.gate(self.w_gate(x), self.w_up(x)))  # [..., F] inside


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: LlamaConfig, *, forms: Forms, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.attention_norm = RMSNorm(size, eps=eps, forms=forms, device=device, dtype=dtype)
        self.attention = SelfAttention(size, config.num_heads, attend=forms.attend, device=device, dtype=dtype)
        self.ffn_norm = RMSNorm(size, eps=eps, forms=forms, device=device, dtype=dtype)
        self.ffn = SwiGLU(size, inner, forms=forms, device=device, dtype=dtype)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[..., T, C] → [..., T, C], with the rotary table of T positions."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.ffn(self.ffn_norm(x))
