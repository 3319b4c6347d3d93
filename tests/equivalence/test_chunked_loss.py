"""The chunked cross-entropy against the plain one and against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_c4.model import loss as losses
from llama_c4.model import products
from llama_c4.model.loss import chunked_cross_entropy_sum, cross_entropy_sum
from tests.tiny_llama import tiny_llama

ROWS, C, V = 23, 12, 50


def case(dtype: torch.dtype = torch.float64, *, scale: float = 1.0, ignored: float = 0.3) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, C, generator=random, dtype=dtype) * scale
    weight = torch.randn(V, C, generator=random, dtype=dtype)
    labels = torch.randint(0, V, (ROWS,), generator=random)
    labels[torch.rand(ROWS, generator=random) < ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def definition(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """sum of logsumexp(W h) - (W h)_y, row by row."""
    total = hidden.new_zeros(())
    for h, y in zip(hidden, labels.tolist(), strict=True):
        total = total + ((weight @ h).logsumexp(0) - weight[y] @ h if y != -100 else 0.0)
    return total


def with_gradients(total: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return total.detach(), *torch.autograd.grad(total / 7, inputs)


@pytest.mark.parametrize("chunk_rows", [1, 4, 23, 100])
def test_chunked_equals_the_definition_in_float64(chunk_rows: int) -> None:
    hidden, weight, labels = case()
    chunked = with_gradients(chunked_cross_entropy_sum(hidden, weight, labels, chunk_rows=chunk_rows), hidden, weight)
    expected = with_gradients(definition(hidden, weight, labels), hidden, weight)
    torch.testing.assert_close(chunked, expected, rtol=1e-12, atol=1e-13)


def test_plain_equals_the_definition_in_float64() -> None:
    hidden, weight, labels = case()
    plain = with_gradients(cross_entropy_sum(hidden, weight, labels, form="plain"), hidden, weight)
    torch.testing.assert_close(
        plain, with_gradients(definition(hidden, weight, labels), hidden, weight), rtol=1e-12, atol=1e-13
    )


def test_both_forms_agree_to_1e_6_in_float32() -> None:
    hidden, weight, labels = case(torch.float32)
    plain, chunked = (
        with_gradients(cross_entropy_sum(hidden, weight, labels, form=form), hidden, weight)
        for form in ("plain", "chunked")
    )
    for a, b in zip(chunked, plain, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


def test_whole_models_agree_to_1e_12_in_float64() -> None:
    random = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, 17, (3, 4), generator=random) for _ in range(2))
    targets[0, :3] = -100
    results = []
    for form in ("plain", "chunked"):
        model = tiny_llama(loss=form, attention="auto")
        total = model.loss_sum(tokens, targets)
        total.backward()
        results.append([total.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-13)


def test_a_hopeless_prediction_has_its_finite_loss() -> None:
    hidden, weight, labels = case(torch.float32, scale=100.0, ignored=0.0)  # probabilities underflow to 0
    plain, chunked = (cross_entropy_sum(hidden, weight, labels, form=form) for form in ("plain", "chunked"))
    assert (hidden @ weight.mT).log_softmax(-1).min() < -200
    torch.testing.assert_close(chunked, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["plain", "chunked"])
def test_ignored_rows_neither_give_nor_take(form: str) -> None:
    hidden, weight, labels = case()
    counted = labels != -100
    whole = with_gradients(cross_entropy_sum(hidden, weight, labels, form=form), hidden, weight)
    part = with_gradients(cross_entropy_sum(hidden[counted], weight, labels[counted], form=form), hidden, weight)
    torch.testing.assert_close(whole, part, rtol=1e-12, atol=1e-14)
    assert torch.all(whole[1][~counted] == 0)


@pytest.mark.parametrize("form", ["plain", "chunked"])
def test_all_rows_ignored_is_zero_with_zero_gradients(form: str) -> None:
    hidden, weight, _ = case()
    total, *gradients = with_gradients(
        cross_entropy_sum(hidden, weight, torch.full((ROWS,), -100), form=form), hidden, weight
    )
    assert total == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_without_gradients_the_sum_is_the_same_and_nothing_is_kept() -> None:
    hidden, weight, labels = case()
    total = cross_entropy_sum(hidden, weight, labels, form="chunked")
    with torch.no_grad():
        alone = cross_entropy_sum(hidden, weight, labels, form="chunked")
    torch.testing.assert_close(alone, total.detach(), rtol=1e-14, atol=0)
    assert not alone.requires_grad


def test_gradients_of_one_input_alone() -> None:
    hidden, weight, labels = case()
    expected = with_gradients(definition(hidden, weight, labels), hidden, weight)
    only_hidden = with_gradients(cross_entropy_sum(hidden, weight.detach(), labels, form="chunked"), hidden)
    only_weight = with_gradients(cross_entropy_sum(hidden.detach(), weight, labels, form="chunked"), weight)
    torch.testing.assert_close((only_hidden[1], only_weight[1]), expected[1:], rtol=1e-12, atol=1e-13)


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() == 2 and V in out.shape:
                largest = max(largest, out.numel())
            return out

    hidden, weight, labels = case()
    with Watch():
        chunked_cross_entropy_sum(hidden, weight, labels, chunk_rows=5).backward()
    assert largest == V * C  # the weight and its gradient; a slice of logits is V · 5, whole ones are V · 23


def test_a_second_derivative_is_refused_with_the_way_out() -> None:
    hidden, weight, labels = case()
    total = cross_entropy_sum(hidden, weight, labels, form="chunked")
    with pytest.raises(RuntimeError, match=r"chunked cross-entropy has a first derivative only.*loss=plain"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_a_second_backward_through_the_same_graph_is_refused() -> None:
    hidden, weight, labels = case()
    total = cross_entropy_sum(hidden, weight, labels, form="chunked")
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="keeps its gradients for one backward"):
        total.backward()


@pytest.mark.parametrize("native", [True, False])
def test_under_bfloat16_autocast_the_error_is_no_larger_than_that_of_the_plain_form(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (products, losses):
        monkeypatch.setattr(module, "cpu_multiplies_bfloat16", lambda: native)
    hidden, weight, labels = case(torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = with_gradients(definition(*wide, labels), *wide)
    errors = {}
    for form in ("plain", "chunked"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = cross_entropy_sum(hidden, weight, labels, form=form)
        assert total.dtype == torch.float32
        found = with_gradients(total, hidden, weight)
        errors[form] = [((a - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)]
    assert all(chunked < 1.25 * plain + 1e-4 for chunked, plain in zip(errors["chunked"], errors["plain"], strict=True))


def test_the_sum_of_a_batch_is_the_sum_over_its_rows() -> None:
    hidden, weight, labels = case(ignored=0.0)
    rows = F.cross_entropy(hidden @ weight.mT, labels, reduction="none")
    batch = cross_entropy_sum(hidden[:20].view(4, 5, C), weight, labels[:20].view(4, 5), form="chunked")
    torch.testing.assert_close(batch, rows[:20].sum(), rtol=1e-12, atol=0)
