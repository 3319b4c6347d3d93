"""RMSNorm and the SwiGLU gate with hand-written first derivatives, for eager training on a CPU.

There an element-wise operation costs its passes over memory. Autograd's derivative of the norm takes twice the passes
of the one written here, and keeps an intermediate of the size of its input; the gate keeps two of its three.

Letters: C hidden size, F intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_c4.model.first_order import refuse_second_derivative


def rms_norm_lean(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · scale over the last dimension.

    With r = 1 / sqrt(mean(x²) + eps) and u = r x, the gradient g of the output gives
    dx = r (g · scale - u mean(g · scale · u)) and dscale = sum over rows of g · u.

    Args:
        x: [..., C], of the dtype of the statistics.
        scale: [C].
        eps: Added to the mean square.
    """
    return _RMSNorm.apply(x, scale, eps)


def gate_lean(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [..., F]; silu(gate) is computed again in backward instead of kept."""
    return _Gate.apply(gate, up)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, scale)
        return torch.mul(x, r).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative("the RMSNorm of the fast path")
        x, r, scale = ctx.saved_tensors
        u = x * r
        buffer = grad * u
        grad_scale = buffer.flatten(0, -2).sum(dim=0)
        mean = torch.matmul(buffer, scale).div_(x.shape[-1]).unsqueeze(-1)
        torch.mul(grad, scale, out=buffer)
        return buffer.addcmul_(u, mean, value=-1).mul_(r), grad_scale, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative("the SwiGLU gate of the fast path")
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad_up
