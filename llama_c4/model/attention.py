"""Causal self-attention: fused kernels for training, an explicit form for derivatives of any order.

softmax(Q Kᵀ / sqrt(K) + causal mask) V for every head. The fused form is torch's scaled dot product attention, which
picks its kernel itself or is held to one; the reference form writes the four operations out and can be differentiated
twice. Both use the same weights.

Letters: B micro-batch, T tokens, C hidden size, H heads, K head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama_c4.config.errors import ConfigError
from llama_c4.model.products import Projection, emulates_bfloat16, linear
from llama_c4.model.rotary import interleave_halves, rotate

CausalAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values) → outputs, all [..., H, T, K]."""

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Kernels that `runtime.attention` can force."""


class SelfAttention(nn.Module):
    """Projections, rotation and causal attention of one layer.

    Args:
        hidden_size: C.
        num_heads: H; divides C into heads of even size.
        attend: The form of attention between the projections.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, *, attend: CausalAttention, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.head_size, self.attend = hidden_size // num_heads, attend
        self.wq, self.wk, self.wv, self.wo = (
            Projection(hidden_size, hidden_size, device=device, dtype=dtype) for _ in range(4)
        )

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """[..., T, C] → [..., T, C], with the rotary table of T positions."""
        K = self.head_size
        weights = (interleave_halves(self.wq.weight, K), interleave_halves(self.wk.weight, K), self.wv.weight)
        # One product for all three is a fifth faster on a CPU than three of a third of its width.
        rotated, v = linear(x, torch.cat(weights, dim=-2)).split((2 * x.shape[-1], x.shape[-1]), dim=-1)
        heads = rotate(rotated.unflatten(-1, (-1, K)).to(table.dtype), table).to(v.dtype)  # [..., T, 2H, K]
        q, k = heads.chunk(2, dim=-2)  # [..., T, H, K]
        v = v.unflatten(-1, (-1, K))
        mixed = self.attend(q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2))  # [..., H, T, K]
        return self.wo(mixed.transpose(-3, -2).flatten(-2))


def build_attention(name: str, *, device: torch.device, dtype: torch.dtype, head_size: int) -> CausalAttention:
    """Choose the form of attention that `runtime.attention` names.

    Args:
        name: auto, reference, or one of BACKENDS.
        device: Where the model will run.
        dtype: Of its products.
        head_size: K.
    Raises:
        ConfigError: the forced kernel cannot run forward and backward here; found by a call on eight tokens.
    """
    if name == "reference":
        return reference_attention
    if name == "auto":
        return fused_attention
    backend = BACKENDS[name]

    def forced_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return fused_attention(q, k, v)

    _probe(forced_attention, name, device=device, dtype=dtype, head_size=head_size)
    return forced_attention


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's scaled dot product attention with a causal mask."""
    if emulates_bfloat16(q.device):  # operands are rounded already; its bfloat16 kernel is slow here
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition in float32, or float64 for float64 operands, outside autocast; twice differentiable."""
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # [..., H, T, T]
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v


def _probe(attend: CausalAttention, name: str, *, device: torch.device, dtype: torch.dtype, head_size: int) -> None:
    if device.type == "meta":
        return
    q, k, v = (torch.zeros(1, 1, 8, head_size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    try:
        attend(q, k, v).sum().backward()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        precision = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"runtime.attention={name} cannot run on {device.type} in {precision} with heads of {head_size} "
            f"({reason}); set runtime.attention=auto, or another of {', '.join(BACKENDS)}, reference"
        ) from error
