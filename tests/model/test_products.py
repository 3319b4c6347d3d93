"""Products under bfloat16 autocast: the emulated ones against exact arithmetic on rounded operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_c4.model import products
from llama_c4.model.products import linear

EMULATED = pytest.mark.skipif(products.cpu_multiplies_bfloat16(), reason="this CPU multiplies bfloat16 itself")


def operands() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, weight, upstream = (torch.randn(*shape, generator=random) for shape in ((2, 9, 70), (30, 70), (2, 9, 30)))
    return x.requires_grad_(), weight.requires_grad_(), upstream.bfloat16()


def rounded(tensor: Tensor) -> Tensor:
    return tensor.detach().bfloat16().double()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@EMULATED
def test_an_emulated_product_is_the_rounded_exact_product_of_rounded_operands() -> None:
    x, weight, _ = operands()
    with autocast():
        result = linear(x, weight)
    exact = rounded(x) @ rounded(weight).mT
    assert result.dtype == torch.bfloat16
    assert torch.all((result.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5)
    assert (result == exact.bfloat16()).float().mean() > 0.99


@EMULATED
def test_emulated_gradients_are_no_further_from_the_truth_than_those_of_torch() -> None:
    x, weight, upstream = operands()
    with autocast():
        ours, theirs = linear(x, weight), F.linear(x, weight)
    truth = upstream.double() @ weight.double(), upstream.double().flatten(0, 1).mT @ x.double().flatten(0, 1)
    our_gradients = torch.autograd.grad(ours, (x, weight), upstream)
    their_gradients = torch.autograd.grad(theirs, (x, weight), upstream)
    for our, their, exact in zip(our_gradients, their_gradients, truth, strict=True):
        assert our.dtype == torch.float32
        assert distance(our, exact) < 1.05 * distance(their, exact) + 1e-6


@EMULATED
def test_an_emulated_product_keeps_half_the_bytes_for_backward() -> None:
    x, weight, _ = operands()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t), autocast():
        linear(x, weight)
    assert sorted(t.dtype for t in kept if t.shape != weight.shape) == [torch.bfloat16]


def test_without_autocast_a_product_is_the_plain_one() -> None:
    x, weight, _ = operands()
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_a_cpu_with_bfloat16_instructions_takes_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = operands()
    monkeypatch.setattr(products, "cpu_multiplies_bfloat16", lambda: True)
    with autocast():
        assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_float64_operands_are_refused_by_nobody_and_stay_float64_outside_autocast() -> None:
    x, weight, _ = operands()
    assert linear(x.double(), weight.double()).dtype == torch.float64


def test_float16_autocast_is_refused() -> None:
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ValueError, match="float16 is not a precision"):
        products.product_dtype(torch.device("cpu"), torch.float32)
