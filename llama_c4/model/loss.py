"""Cross-entropy of the tied output head, summed over the targets that count.

sum over targets y ≠ -100 of (logsumexp(z) - z_y) with logits z = W h, in float32 (float64 for float64 models).

Two forms with equal values and gradients. *plain* computes the logits of all rows, [rows, V], and lets autograd
differentiate: any order of derivative. *chunked* walks over slices of rows with one buffer, and computes the gradients
of hidden states and weight in the same walk, so the whole logits never exist and backward only scales what is there:

    dz = softmax(z) - onehot(y),   dh = dz W,   dW = sum over slices of dzᵀ h.

It has a first derivative only.

Letters: T tokens, C hidden size, V vocabulary, R rows of a slice.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_c4.model.accounting import CHUNK_ROWS
from llama_c4.model.first_order import refuse_second_derivative
from llama_c4.model.products import cpu_multiplies_bfloat16, linear, product_dtype

IGNORED = -100
"""Label of a position that does not count."""

LossForm = Literal["plain", "chunked"]


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, *, form: LossForm) -> Tensor:
    """Sum of the cross-entropy over all targets that count.

    Args:
        hidden: Final hidden states, [..., T, C].
        weight: Output head, [V, C].
        targets: Labels in [0, V) or -100, [..., T].
        form: plain or chunked.
    Returns:
        Scalar, float32 (float64 for float64 operands); 0 with zero gradients where no target counts.
    """
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    if form == "chunked":
        return chunked_cross_entropy_sum(rows, weight, labels, chunk_rows=CHUNK_ROWS[hidden.device.type])
    logits = linear(rows, weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")


def chunked_cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_rows: int) -> Tensor:
    """The chunked form, with R = chunk_rows.

    Args:
        hidden: [rows, C].
        weight: [V, C].
        labels: [rows].
        chunk_rows: Rows whose logits exist at once.
    Raises:
        RuntimeError: in backward, when a second derivative is asked for or the graph is walked twice.
    """
    dtype = product_dtype(hidden.device, weight.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk_rows, dtype)
        return _sum_alone(hidden, weight, labels, chunk_rows, dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum and gradients in one walk; backward scales the gradients in place and hands them over."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_rows: int, dtype: torch.dtype
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        total, *ctx.gradients = _sum_and_gradients(hidden, weight, labels, chunk_rows, dtype, wanted=wanted)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the chunked cross-entropy")
        if ctx.gradients is None:
            raise RuntimeError("the chunked cross-entropy keeps its gradients for one backward; it was called twice")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(grad) for g in gradients), None, None, None


def _sum_alone(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_rows: int, dtype: torch.dtype) -> Tensor:
    """The sum without gradients, for evaluation."""
    states, head = _operands(hidden, weight, dtype)
    logits = states.new_empty(min(chunk_rows, len(states)), len(head))
    total = states.new_zeros((), dtype=weight.dtype)
    for rows, targets in zip(states.split(chunk_rows), labels.split(chunk_rows), strict=True):
        z = torch.mm(rows, head.mT, out=logits[: len(rows)]).to(weight.dtype)
        total += F.cross_entropy(z, targets, ignore_index=IGNORED, reduction="sum")
    return total


def _sum_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_rows: int, dtype: torch.dtype, *, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sum, gradient of hidden, gradient of weight; a gradient is None where not wanted."""
    states, head = _operands(hidden, weight, dtype)
    logits = states.new_empty(min(chunk_rows, len(states)), len(head))
    total = states.new_zeros((), dtype=weight.dtype)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.empty_like(weight) if wanted[1] else None
    for start in range(0, len(hidden), chunk_rows):
        rows = slice(start, start + chunk_rows)
        count = labels[rows] != IGNORED
        z = torch.mm(states[rows], head.mT, out=logits[: len(count)])
        probabilities = z.to(weight.dtype)  # z itself unless the products are bfloat16
        total += _softmax_in_place(probabilities, labels[rows], count)
        dz = probabilities.to(head.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = torch.mm(dz, head).masked_fill_(~count.unsqueeze(1), 0)
        if grad_weight is not None:
            counted = states[rows] * count.unsqueeze(1)
            _add_product(grad_weight, dz.mT, counted, first=start == 0)
    return total, grad_hidden, grad_weight


def _operands(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states and head as the products take them; emulated bfloat16 is rounded and widened again."""
    states, head = hidden.to(dtype), weight.to(dtype)
    if dtype == torch.bfloat16 and hidden.device.type == "cpu" and not cpu_multiplies_bfloat16():
        return states.float(), head.float()
    return states, head


def _softmax_in_place(z: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """Replace logits [R, V] by softmax - onehot; return the summed loss of the rows that count.

    logsumexp(z) = max(z) - log(max(softmax(z))), and the largest probability never underflows.
    """
    label = labels.clamp_min(0).unsqueeze(1)
    of_label, largest = z.gather(1, label), z.amax(dim=1, keepdim=True)
    torch.softmax(z, dim=1, out=z)
    loss = largest - z.amax(dim=1, keepdim=True).log_() - of_label
    z.scatter_add_(1, label, torch.full_like(of_label, -1.0))
    return loss.masked_fill_(~count.unsqueeze(1), 0).sum()


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a b, or total = a b for the first; one kernel where the dtypes agree, else a b is widened and added."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0.0 if first else 1.0, out=total)
    elif first:
        total.copy_(torch.mm(a, b))
    else:
        total.add_(torch.mm(a, b))
