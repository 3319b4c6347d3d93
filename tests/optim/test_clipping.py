"""Norm and clip factor against plain arithmetic in float64."""

from __future__ import annotations

import math

import pytest
import torch

from llama_c4.optim.clipping import clip_scale, gradient_norm


def test_norm_is_over_all_tensors_together() -> None:
    gradients = [torch.tensor([[3.0], [0.0]]), torch.tensor([4.0, 12.0])]
    assert float(gradient_norm(gradients)) == pytest.approx(13.0, rel=1e-7)


def test_norm_of_ten_million_float32_elements_is_right_to_1e_6() -> None:
    gradients = [
        torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((32_000, 320), (320,), (7, 9))
    ]
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert float(gradient_norm(gradients)) == pytest.approx(exact, rel=1e-6)
    plain = float(torch.nn.utils.get_total_norm(gradients))
    assert abs(plain / exact - 1) > 1e-6  # why there is a norm of our own


def test_norm_does_not_depend_on_how_the_elements_are_cut_into_tensors() -> None:
    flat = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert float(gradient_norm([flat])) == pytest.approx(float(gradient_norm(list(flat.split(777)))), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_the_norm_not_finite(bad: float) -> None:
    g = torch.zeros(100_000)
    g[77_777] = bad
    assert not math.isfinite(float(gradient_norm([torch.ones(3), g])))


def test_scale_is_1_inside_the_threshold_and_threshold_over_norm_outside() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(1.0 - 1e-6, 1.0) == 1.0
    assert clip_scale(10.0, 1.0) == 1.0 / 10.000001
    assert clip_scale(0.0, 1e-3) == 1.0
    assert clip_scale(1e9, None) == 1.0


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan])
def test_a_threshold_that_is_not_positive_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        clip_scale(1.0, threshold)
