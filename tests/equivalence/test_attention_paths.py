"""The fused and the reference path: equal values and first derivatives; second derivatives of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from llama_c4.config.errors import ConfigError
from llama_c4.model.attention import build_attention, reference_attention
from llama_c4.model.llama import Llama, build_model
from tests.tiny_llama import llama_config, tiny_llama

CPU = torch.device("cpu")


def batch(*shape: int, vocabulary: int = 17, ignored: bool = True) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, vocabulary, shape, generator=random) for _ in range(2))
    if ignored:
        targets[0, :2] = -100
    return tokens, targets


def gradients(model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
    parameters = list(model.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(model.loss_sum(tokens, targets), parameters)])


def hessian_vector_product(model: Llama, tokens: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
    parameters = list(model.parameters())
    first = torch.autograd.grad(model.loss_sum(tokens, targets), parameters, create_graph=True)
    dot = torch.cat([g.flatten() for g in first]) @ direction
    return torch.cat([g.flatten() for g in torch.autograd.grad(dot, parameters)])


def random_direction(model: Llama) -> Tensor:
    size = sum(p.numel() for p in model.parameters())
    return torch.randn(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def moved(model: Llama, direction: Tensor, step: float) -> None:
    with torch.no_grad():
        parts = direction.split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts, strict=True):
            p.add_(part.view_as(p), alpha=step)


@pytest.mark.parametrize("attention", ["auto", "flash", "math"])
def test_fused_attention_equals_the_reference_in_float64(attention: str) -> None:
    config = llama_config(context_length=37, num_layers=2, hidden_size=24, num_heads=3)
    fused, reference = (
        build_model(config, seed=1, device="cpu", dtype=torch.float64, attention=name, loss="plain")
        for name in (attention, "reference")
    )
    tokens, targets = batch(3, 37)
    torch.testing.assert_close(fused(tokens), reference(tokens), rtol=0, atol=1e-10)
    torch.testing.assert_close(fused.loss_sum(tokens, targets), reference.loss_sum(tokens, targets), rtol=1e-10, atol=0)
    torch.testing.assert_close(
        gradients(fused, tokens, targets), gradients(reference, tokens, targets), rtol=0, atol=1e-10
    )


def test_reference_attention_is_its_definition() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = reference_attention(q, k, v)
    for head in range(2):
        for t in range(5):
            scores = torch.stack([q[head, t] @ k[head, s] / math.sqrt(4) for s in range(t + 1)])
            expected = (scores.exp() / scores.exp().sum()) @ v[head, : t + 1]
            torch.testing.assert_close(out[head, t], expected, rtol=1e-12, atol=1e-13)


def test_reference_attention_computes_in_float32_under_autocast() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = reference_attention(q, k, v)
    assert torch.equal(out, reference_attention(q.float(), k.float(), v.float()))


def test_weights_load_strictly_from_one_path_into_the_other() -> None:
    fused, reference = tiny_llama(attention="auto"), tiny_llama(attention="reference")
    moved(fused, random_direction(fused), 0.1)
    reference.load_state_dict(fused.state_dict(), strict=True)
    tokens, _ = batch(2, 4)
    torch.testing.assert_close(reference(tokens), fused(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_reference_path_passes_gradcheck_of_both_orders(order: int) -> None:
    config = llama_config(vocab_size=5, hidden_size=4, intermediate_size=6, context_length=3)
    model = build_model(config, seed=1, device="cpu", dtype=torch.float64, attention="reference", loss="plain")
    tokens, targets = batch(1, 3, vocabulary=5, ignored=False)
    names = [name for name, _ in model.named_parameters()]

    def loss(*parameters: Tensor) -> Tensor:
        hidden = functional_call(
            _Hidden(model), dict(zip((f"model.{n}" for n in names), parameters, strict=True)), (tokens,)
        )
        return torch.nn.functional.cross_entropy(hidden.flatten(0, 1), targets.flatten(), reduction="sum")

    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(loss, tuple(p.detach().requires_grad_() for p in model.parameters()), fast_mode=True)


class _Hidden(torch.nn.Module):
    """The logits of a model as a module of its own, so that functional_call reaches the parameters."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def test_hessian_vector_product_equals_finite_differences_of_gradients() -> None:
    model = tiny_llama()
    tokens, targets = batch(2, 4)
    direction = random_direction(model)
    exact = hessian_vector_product(model, tokens, targets, direction)
    step = 1e-5
    moved(model, direction, step)
    ahead = gradients(model, tokens, targets)
    moved(model, direction, -2 * step)
    behind = gradients(model, tokens, targets)
    difference = (ahead - behind) / (2 * step)
    assert (difference - exact).norm() < 1e-6 * exact.norm()


def test_curvature_of_a_model_trained_with_fused_attention_equals_its_dense_hessian() -> None:
    trained = tiny_llama(attention="auto", loss="chunked")
    tokens, targets = batch(2, 4)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    for _ in range(3):
        trained.loss_sum(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = tiny_llama(attention="reference")
    twin.load_state_dict(trained.state_dict(), strict=True)
    name, weight = "layers.0.attention.wq.weight", twin.layers[0].attention.wq.weight
    direction = torch.randn(weight.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(flat: Tensor) -> Tensor:
        logits = functional_call(twin, {name: flat.view_as(weight)}, (tokens,))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    dense = torch.autograd.functional.hessian(loss, weight.detach().flatten())
    (first,) = torch.autograd.grad(twin.loss_sum(tokens, targets), weight, create_graph=True)
    (product,) = torch.autograd.grad(first.flatten() @ direction, weight)
    torch.testing.assert_close(product.flatten(), dense @ direction, rtol=1e-8, atol=1e-10)


def test_a_second_derivative_through_the_fast_path_is_refused_with_the_way_out() -> None:
    model = tiny_llama(attention="auto", loss="plain")
    tokens, targets = batch(2, 4)
    with pytest.raises(RuntimeError, match=r"first derivative only; .* attention=reference and loss=plain"):
        hessian_vector_product(model, tokens, targets, random_direction(model))


def test_curvature_leaves_gradients_and_generators_untouched() -> None:
    model = tiny_llama()
    tokens, targets = batch(2, 4)
    before = torch.get_rng_state()
    hessian_vector_product(model, tokens, targets, random_direction(model))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("attention", ["efficient", "cudnn"])
def test_a_forced_kernel_that_cannot_run_here_is_an_error_at_build(attention: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"runtime\.attention={attention} cannot run on cpu .*runtime\.attention=auto"
    ):
        build_attention(attention, device=CPU, dtype=torch.float32, head_size=4)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_bfloat16_stays_within_the_usual_error_of_float32(attention: str) -> None:
    config = llama_config(vocab_size=200, context_length=32, num_layers=2, hidden_size=64, intermediate_size=176)
    model = build_model(config, seed=1, device="cpu", dtype=torch.float32, attention=attention, loss="plain")
    tokens, targets = batch(4, 32, vocabulary=200)
    wide = model(tokens).detach(), gradients(model, tokens, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = model(tokens).detach().float(), gradients(model, tokens, targets)
    assert 1e-5 < (narrow[0] - wide[0]).norm() / wide[0].norm() < 0.02
    assert 1e-5 < (narrow[1] - wide[1]).norm() / wide[1].norm() < 0.05


def test_the_fast_path_in_bfloat16_errs_no_more_than_the_reference_in_bfloat16() -> None:
    config = llama_config(vocab_size=200, context_length=32, num_layers=2, hidden_size=64, intermediate_size=176)
    tokens, targets = batch(4, 32, vocabulary=200)
    errors = {}
    for attention, loss in (("reference", "plain"), ("auto", "chunked")):
        exact = build_model(config, seed=1, device="cpu", dtype=torch.float64, attention="reference", loss="plain")
        truth = gradients(exact, tokens, targets)
        model = build_model(config, seed=1, device="cpu", dtype=torch.float32, attention=attention, loss=loss)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = gradients(model, tokens, targets)
        errors[attention] = ((found.double() - truth).norm() / truth.norm()).item()
    assert errors["auto"] < 1.25 * errors["reference"]


def test_gradients_are_equal_bit_for_bit_in_every_repeat() -> None:
    torch.use_deterministic_algorithms(True)
    config = llama_config(vocab_size=64, context_length=128, num_layers=2, hidden_size=32, intermediate_size=96)
    model = build_model(config, seed=1, device="cpu", dtype=torch.float32, attention="reference", loss="chunked")
    tokens, targets = batch(8, 128, vocabulary=64)
    first = gradients(model, tokens, targets)
    assert all(torch.equal(gradients(model, tokens, targets), first) for _ in range(4))
