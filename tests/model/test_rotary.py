"""Rotary embedding: the half-split formula, and tables that no conversion rounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llama_c4.model.rotary import RotaryTable, interleave_halves, rotary_table, rotate
from tests.tiny_llama import tiny_llama

T, H, K = 6, 3, 8


def half_split(x: Tensor, theta: float) -> Tensor:
    """Llama's published layout, one element at a time: feature i turns with feature i + K/2."""
    out = torch.empty_like(x)
    for t in range(x.shape[-3]):
        for i in range(K // 2):
            angle = t * theta ** (-2 * i / K)
            a, b = x[..., t, :, i], x[..., t, :, i + K // 2]
            out[..., t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[..., t, :, i + K // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def interleaved(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, K // 2)).transpose(-1, -2).flatten(-2)


def test_rotation_is_the_half_split_formula_with_pairs_side_by_side() -> None:
    x = torch.randn(2, T, H, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = rotary_table(T, K, 500.0, dtype=torch.float64)
    torch.testing.assert_close(rotate(interleaved(x), table), interleaved(half_split(x, 500.0)), rtol=0, atol=1e-13)


def test_reordered_projections_give_the_reordered_heads() -> None:
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*shape, dtype=torch.float64, generator=random) for shape in ((H * K, 5), (T, 5)))
    heads = (x @ weight.mT).unflatten(-1, (H, K))
    reordered = (x @ interleave_halves(weight, K).mT).unflatten(-1, (H, K))
    torch.testing.assert_close(reordered, interleaved(heads), rtol=0, atol=1e-14)


def test_scores_depend_on_distances_alone() -> None:
    q, k = (torch.randn(1, 1, K, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    table = rotary_table(T, K, 10_000.0, dtype=torch.float64)
    rotated_q, rotated_k = (rotate(x.expand(T, 1, K), table)[:, 0] for x in (q, k))
    scores = rotated_q @ rotated_k.mT
    for distance in range(1 - T, T):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_real_form_for_compilers_equals_the_complex_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, T, H, K, dtype=dtype, generator=torch.Generator().manual_seed(0))
    table = rotary_table(T, K, 100.0, dtype=dtype)
    eager = rotate(x, table)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(rotate(x, table), eager, rtol=1e-6, atol=1e-6)


def test_angles_are_computed_in_the_dtype_of_the_table() -> None:
    positions = torch.arange(2048, dtype=torch.float64)
    exact = positions * 10_000.0 ** (-2 / 64)
    wide = rotary_table(2048, 64, 10_000.0, dtype=torch.float64)[:, 1, 0]
    narrow = rotary_table(2048, 64, 10_000.0, dtype=torch.float32)[:, 1, 0]
    assert (wide - exact.cos()).abs().max() < 1e-11
    assert 1e-6 < (narrow.double() - exact.cos()).abs().max() < 1e-3


@pytest.mark.parametrize("convert", ["half", "bfloat16", "float", "double", "cpu"])
def test_tables_survive_conversions_unrounded(convert: str) -> None:
    model = tiny_llama(dtype=torch.float32)
    before = model.rotary.table.clone()
    moved = getattr(model, convert)()
    if convert == "double":
        assert torch.equal(moved.rotary.table, tiny_llama(dtype=torch.float64).rotary.table)
    else:
        assert moved.rotary.table.dtype == torch.float32
        assert torch.equal(moved.rotary.table, before)


def test_there_and_back_again_is_the_same_table() -> None:
    model = tiny_llama(dtype=torch.float64)
    before = model.rotary.table.clone()
    assert torch.equal(model.to(torch.bfloat16).to(torch.float64).rotary.table, before)


def test_a_table_of_the_meta_device_becomes_real_on_to_empty() -> None:
    table = RotaryTable(length=T, head_size=K, theta=100.0, device=torch.device("meta"), dtype=torch.float32)
    assert table.table.is_meta
    assert torch.equal(table.to_empty(device="cpu").table, rotary_table(T, K, 100.0, dtype=torch.float32))


def test_tables_never_enter_the_state() -> None:
    assert not [name for name in tiny_llama().state_dict() if "rotary" in name or "table" in name]


def test_all_layers_share_one_table() -> None:
    assert [name for name, _ in tiny_llama().named_buffers()] == ["rotary.table"]
