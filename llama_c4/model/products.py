"""Matrix products of the model in the precision of the surrounding autocast.

Under bfloat16 autocast a product has both operands rounded to bfloat16, sums in float32 and rounds its result to
bfloat16. A CPU with bfloat16 instructions does that in its kernels. On a CPU without them torch falls back to loops
that are 10 to 70 times slower than its float32 product, so the same arithmetic is done by the float32 kernel here:
operands are rounded, widened and multiplied, and the result is rounded. See docs/numerics.md.

Letters: n inputs, m outputs of a projection.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_c4.model.first_order import refuse_second_derivative

_VERY_NARROW = "float16 is not a precision of this project: its range needs a loss scaler; use bfloat16 or float32"


# Asked once, at import: a compiler takes it for the constant that it is.
_CPU_MULTIPLIES_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Projection(nn.Module):
    """x ↦ x Wᵀ without a bias; the weight [m, n] is left uninitialized."""

    def __init__(self, inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., n] → [..., m]."""
        return linear(x, self.weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ, in the precision of the surrounding autocast.

    Args:
        x: [..., n].
        weight: [m, n].
    Returns:
        [..., m].
    """
    if emulates_bfloat16(x.device):
        return _RoundedLinear.apply(x, weight)
    return F.linear(x, weight)


def product_dtype(device: torch.device, parameters: torch.dtype) -> torch.dtype:
    """What the operands of a product are rounded to here: autocast's dtype, else that of the parameters."""
    if not torch.is_autocast_enabled(device.type) or parameters == torch.float64:
        return parameters
    dtype = torch.get_autocast_dtype(device.type)
    if dtype == torch.float16:
        raise ValueError(_VERY_NARROW)
    return dtype


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether autocast asks for bfloat16 products on a CPU that has no instructions for them."""
    return (
        device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and not cpu_multiplies_bfloat16()
    )


def cpu_multiplies_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 products on this CPU (AVX-512 with bfloat16, AMX, or their like elsewhere)."""
    return _CPU_MULTIPLIES_BFLOAT16


class _RoundedLinear(torch.autograd.Function):
    """A bfloat16 product by float32 kernels; keeps its input in bfloat16. Gradients of weights stay float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        narrow = x.bfloat16()
        ctx.save_for_backward(narrow, weight)
        ctx.input_dtype = x.dtype
        return F.linear(narrow.float(), weight.bfloat16().float()).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        refuse_second_derivative("a product in emulated bfloat16")
        narrow, weight = ctx.saved_tensors
        wide = grad.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (wide @ weight.bfloat16().float()).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = wide.flatten(0, -2).mT @ narrow.float().flatten(0, -2)
        return grad_x, grad_weight
