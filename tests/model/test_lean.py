"""The hand-written gradients against autograd's, and the norm against its formula."""

from __future__ import annotations

import pytest
import torch

from llama_c4.model import forms
from llama_c4.model.layers import RMSNorm
from llama_c4.model.lean import gate_lean, rms_norm_lean


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def test_lean_norm_equals_the_plain_one_in_value_and_gradients() -> None:
    x, scale, upstream = normal(3, 5, 16), normal(16, seed=1), normal(3, 5, 16, seed=2).detach()
    plain, lean = forms.rms_norm(x, scale, 1e-3), rms_norm_lean(x, scale, 1e-3)
    torch.testing.assert_close(lean, plain, rtol=1e-13, atol=1e-13)
    expected = torch.autograd.grad(plain, (x, scale), upstream)
    torch.testing.assert_close(torch.autograd.grad(lean, (x, scale), upstream), expected, rtol=1e-12, atol=1e-12)


def test_lean_gate_equals_the_plain_one_in_value_and_gradients() -> None:
    gate, up, upstream = normal(3, 5, 16), normal(3, 5, 16, seed=1), normal(3, 5, 16, seed=2).detach()
    plain, lean = forms.gate(gate, up), gate_lean(gate, up)
    torch.testing.assert_close(lean, plain, rtol=1e-13, atol=1e-13)
    expected = torch.autograd.grad(plain, (gate, up), upstream)
    torch.testing.assert_close(torch.autograd.grad(lean, (gate, up), upstream), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [forms.rms_norm, rms_norm_lean])
def test_both_norms_pass_gradcheck(form: object) -> None:
    assert torch.autograd.gradcheck(lambda x, scale: form(x, scale, 0.1), (normal(2, 3, 4), normal(4, seed=1)))


@pytest.mark.parametrize("form", [forms.gate, gate_lean])
def test_both_gates_pass_gradcheck(form: object) -> None:
    assert torch.autograd.gradcheck(form, (normal(2, 3, 4), normal(2, 3, 4, seed=1)))


@pytest.mark.parametrize("form", [lambda x: rms_norm_lean(x, x.new_ones(4), 0.1), lambda x: gate_lean(x, x)])
def test_a_second_derivative_of_a_lean_form_is_an_error_and_not_a_wrong_number(form: object) -> None:
    x = normal(2, 4)
    with pytest.raises(RuntimeError, match=r"first derivative only.*attention=reference and loss=plain"):
        torch.autograd.grad((form(x) + x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_norm_statistics_of_half_precision_inputs_are_float32(attention: str) -> None:
    cpu = torch.device("cpu")
    chosen = forms.build_forms(attention, device=cpu, dtype=torch.float32, head_size=4)
    norm = RMSNorm(512, eps=1e-5, forms=chosen, device=cpu, dtype=torch.float32)
    torch.nn.init.ones_(norm.weight)
    x = (normal(2, 512).detach() * 300).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert norm(x).dtype == torch.float32
    assert (norm(x).double() - exact).abs().max() < 1e-6


def test_the_epsilon_is_inside_the_root() -> None:
    x, scale = torch.full((1, 4), 1e-3, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    expected = torch.full((1, 4), 1e-3 / (1e-6 + 3e-6) ** 0.5, dtype=torch.float64)
    for form in (forms.rms_norm, rms_norm_lean):
        torch.testing.assert_close(form(x, scale, 3e-6), expected, rtol=1e-12, atol=0)
