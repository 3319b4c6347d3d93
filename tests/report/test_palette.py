from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from llama_c4.report.palette import DARK, LIGHT, NUM_HUES, stroke

Vector = NDArray[np.float64]
PAGES = {"light": LIGHT, "dark": DARK}

# Severity 1.0 of Machado, Oliveira and Fernandes (2009), on linear RGB.
VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])


def linear(colour: str) -> Vector:
    """sRGB hex to linear RGB."""
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """Contrast ratio of WCAG 2."""
    low, high = sorted(float(linear(colour) @ XYZ[1]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: Vector) -> Vector:
    """CIELAB (D65) of linear RGB."""
    xyz = XYZ @ np.clip(rgb, 0, 1) / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("page", PAGES)
def test_texts_and_curves_stand_out_from_their_page(page: str) -> None:
    colours = PAGES[page]
    assert min(contrast(colours[text], colours["page"]) for text in ("ink", "muted", "alarm")) >= 4.5
    assert min(contrast(colours[f"s{hue}"], colours["page"]) for hue in range(NUM_HUES)) >= 3.0


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("page", PAGES)
def test_the_colours_of_runs_are_told_apart_with_every_kind_of_colour_vision(page: str, vision: str) -> None:
    seen = [lab(VISION[vision] @ linear(PAGES[page][f"s{hue}"])) for hue in range(NUM_HUES)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) >= 25


def test_the_first_24_runs_look_different() -> None:
    assert len({stroke(index) for index in range(24)}) == 24
