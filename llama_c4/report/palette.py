"""Colours, dashes and markers of the runs in a figure, for light and dark pages.

The hues keep apart for the forms of colour blindness; since no palette does so in every print and for every eye, each
run differs in its marker as well, and in its dashes once the colours are used up.
"""

from __future__ import annotations

from dataclasses import dataclass

# Name of a colour → on a light page, on a dark one. The series began as the hues of Okabe and Ito and were then moved,
# as little as served, until each stands out from its page at 3:1 or better and any two are at least 25 apart in CIELAB,
# for full colour vision and for simulated protanopia, deuteranopia and tritanopia.
LIGHT = {
    "page": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#57606a",
    "grid": "#d9dee3",
    "alarm": "#b3261e",
    "s0": "#1b51d3",
    "s1": "#e66b0a",
    "s2": "#00a578",
    "s3": "#8768a6",
    "s4": "#7f4c21",
    "s5": "#2e3934",
}
DARK = {
    "page": "#14181d",
    "ink": "#e8eaed",
    "muted": "#9aa4af",
    "grid": "#333b44",
    "alarm": "#ff8a80",
    "s0": "#5693ff",
    "s1": "#ee6b21",
    "s2": "#27e87b",
    "s3": "#c67bb3",
    "s4": "#fee30c",
    "s5": "#beedd8",
}
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2))
NUM_HUES = len(MARKERS)


@dataclass(frozen=True)
class Stroke:
    """How one run is drawn: the name of its colour, its marker, its dashes in units of the line width."""

    colour: str
    marker: str
    dashes: tuple[float, ...]


def stroke(index: int) -> Stroke:
    """The look of the run at an index; after 24 runs the looks repeat."""
    hue, round_ = index % NUM_HUES, index // NUM_HUES
    return Stroke(f"s{hue}", MARKERS[hue], DASHES[round_ % len(DASHES)])
