"""Figures of runs: loss, its last half, learning rate, gradient norm, rate.

A figure is drawn as PNG for slides, and as SVG for a page: there its texts stay text, and its colours are variables of
the page (`var(--ink)`), so that one drawing serves light and dark. Nothing of matplotlib's global state is kept.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from llama_c4.checkpoint.atomic import replace_file
from llama_c4.report import units
from llama_c4.report.curves import Curve, Points
from llama_c4.report.inline_svg import inline_svg
from llama_c4.report.ledger import RunSummary
from llama_c4.report.markup import Markup
from llama_c4.report.palette import LIGHT, NUM_HUES, Stroke, stroke
from llama_c4.report.plots import NARROW, PLOTS, WIDE, Layer, Layout, Plot

POINTS_PER_INCH = 72
"""Sizes below are in points, which are the units of an SVG and, on a page that shows it unscaled, CSS pixels."""
PNG_DPI = 2 * POINTS_PER_INCH
_NONFINITE_HEIGHT, _ZERO_HEIGHT, _MARK_STEP = 0.96, 0.03, 0.05


class _Pen:
    """The axes of one figure, and how the run at hand is drawn on them."""

    def __init__(self, axes: Axes, colours: Mapping[str, str], *, log: bool) -> None:
        self.axes = axes
        self.colours = colours
        self.log = log
        self.index = 0
        self.levels: set[float] = set()

    @property
    def look(self) -> Stroke:
        return stroke(self.index)

    @property
    def colour(self) -> str:
        return self.colours[self.look.colour]

    def draw(self, layer: Layer, measured: Curve) -> None:
        """Draw what can be drawn of a curve, and marks where it cannot."""
        shown = measured.drawable(log=self.log).thinned()
        if layer.marker_size:
            self._points(shown, layer.marker_size)
        else:
            self._line(shown, layer)
        self._mark(measured, shaded=not layer.marker_size)

    def level(self, height: float, label: str) -> None:
        """A horizontal line with its name at the right end, once for all runs that share it."""
        if height in self.levels:
            return
        self.levels.add(height)
        self.axes.axhline(height, color=self.colours["muted"], linewidth=1, linestyle=(0, (4, 3)))
        self.axes.annotate(
            label,
            xy=(0.99, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            horizontalalignment="right",
            color=self.colours["muted"],
            fontsize="small",
        )

    def _line(self, shown: Curve, layer: Layer) -> None:
        dashes = (0, self.look.dashes) if self.look.dashes else "solid"
        (line,) = self.axes.plot(shown.x, shown.y, color=self.colour, linestyle=dashes)
        line.set(linewidth=layer.width, alpha=layer.alpha)
        # A value between two breaks would be a line of no length.
        lone = _isolated(shown.y)
        self.axes.plot(shown.x[lone], shown.y[lone], color=self.colour, linestyle="none", marker=".", markersize=4)

    def _points(self, shown: Curve, size: float) -> None:
        (points,) = self.axes.plot(shown.x, shown.y, color=self.colour, linestyle="none", marker=self.look.marker)
        points.set(markersize=size, markeredgecolor=self.colours["page"], markeredgewidth=0.6, zorder=4)

    def _mark(self, measured: Curve, *, shaded: bool) -> None:
        step = _MARK_STEP * (self.index % NUM_HUES)
        for first, last in measured.gaps():
            if shaded:
                self.axes.axvspan(first, last, color=self.colour, alpha=0.15, linewidth=0)
            self._mark_at([first, last], _NONFINITE_HEIGHT - step, "x")
        for first, last in measured.below_log_axis() if self.log else ():
            self._mark_at([first, last], _ZERO_HEIGHT + step, "v")

    def _mark_at(self, x: list[float], height: float, marker: str) -> None:
        across = self.axes.get_xaxis_transform()
        (mark,) = self.axes.plot(x, [height] * len(x), color=self.colour, linestyle="none", transform=across)
        mark.set(marker=marker, markersize=8, markeredgewidth=2, clip_on=False, zorder=5)


def write_figures(runs: Sequence[RunSummary], folder: Path) -> list[Path]:
    """Draw every figure of the runs as PNG, 1200 pixels wide, on a white page.

    Args:
        runs: One or more runs, in the order of their colours.
        folder: Made if missing; files of the same names are replaced, each at once.
    Returns:
        The files: loss.png, loss_last_half.png, lr.png, grad_norm.png, rate.png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_write_png(plot, runs, folder / f"{plot.name}.png") for plot in PLOTS]


def _write_png(plot: Plot, runs: Sequence[RunSummary], path: Path) -> Path:
    with style.context(["default", _settings(WIDE, LIGHT)]), replace_file(path, durable=False) as file:
        figure = _draw(plot, runs, WIDE, LIGHT)
        figure.suptitle(plot.title, fontsize=WIDE.font + 1)
        _set_margins(figure, WIDE, above=2.4 * WIDE.font, below=_add_legend(figure, plot, runs))
        figure.savefig(file, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return path


def svg(plot: Plot, runs: Sequence[RunSummary], layout: Layout) -> Markup:
    """A figure as an SVG element for a page, without a legend. The same runs give the same text.

    Its colours are variables of the page: --ink, --muted, --grid, --page, and --s0 to --s5 for the runs.
    """
    stand_ins = {name: f"#fe{index:04x}" for index, name in enumerate(LIGHT)}
    settings = _settings(layout, stand_ins) | {"svg.fonttype": "none", "svg.hashsalt": "fixed"}
    text = io.StringIO()
    with style.context(["default", settings]):
        figure = _draw(plot, runs, layout, stand_ins)
        _set_margins(figure, layout, above=0.5 * layout.font, below=0)
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    return inline_svg(text.getvalue(), colours=stand_ins, prefix=f"{plot.name}-{layout.name}-")


def _settings(layout: Layout, colours: Mapping[str, str]) -> dict[str, object]:
    ink, muted = colours["ink"], colours["muted"]
    return {
        "figure.figsize": (layout.width / POINTS_PER_INCH, layout.height / POINTS_PER_INCH),
        "figure.facecolor": colours["page"],
        "axes.facecolor": colours["page"],
        "font.family": "sans-serif",
        "font.size": layout.font,
        "axes.labelsize": layout.font,
        "xtick.labelsize": layout.font - 1,
        "ytick.labelsize": layout.font - 1,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": muted,
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": colours["grid"],
        "grid.linewidth": 0.8,
    }


def _draw(plot: Plot, runs: Sequence[RunSummary], layout: Layout, colours: Mapping[str, str]) -> Figure:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if plot.log:
        axes.set_yscale("log")
    pen = _Pen(axes, colours, log=plot.log)
    for pen.index, run in enumerate(runs):
        for layer, measured in plot.curves(run):
            pen.draw(layer, measured)
        if (level := plot.level(run)) is not None:
            pen.level(*level)
    axes.set(xlabel="prediction targets consumed", ylabel=plot.y_label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    axes.xaxis.set_major_locator(MaxNLocator(5 if layout is NARROW else 7))
    if plot.from_zero:
        axes.set_ylim(bottom=0)
    _label_y(axes, log=plot.log)
    return figure


def _label_y(axes: Axes, *, log: bool) -> None:
    """Plain numbers at the ticks; a log axis over less than a decade gets evenly spaced ones, or it would have none."""
    low, high = axes.get_ylim()
    if not log or high < 8 * low:
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_minor_locator(NullLocator())
    elif high < 1000 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _isolated(y: Points) -> NDArray[np.bool_]:
    """Which values have a break on both sides."""
    is_break = np.concatenate(([True], np.isnan(y), [True]))
    return ~is_break[1:-1] & is_break[:-2] & is_break[2:]


def _add_legend(figure: Figure, plot: Plot, runs: Sequence[RunSummary]) -> float:
    """Put the names of the runs at the foot, in a figure made higher by as much; returns the height in points."""
    looks = [stroke(index) for index in range(len(runs))]
    handles = [
        Line2D([], [], color=LIGHT[look.colour], marker=look.marker, linestyle=(0, look.dashes) if look.dashes else "-")
        for look in looks
    ]
    labels = [units.printable(run.name) for run in runs]
    for marker, meaning in plot.marks(runs):
        handles.append(Line2D([], [], color=LIGHT["ink"], marker=marker, markersize=8, linestyle="none"))
        labels.append(meaning)
    legend = figure.legend(handles, labels, loc="lower center", ncols=2, fontsize="small", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may hold dollar signs
    height = 1.35 * WIDE.font * math.ceil(len(labels) / 2) + WIDE.font
    figure.set_figheight(figure.get_figheight() + height / POINTS_PER_INCH)
    return height


def _set_margins(figure: Figure, layout: Layout, *, above: float, below: float) -> None:
    """Leave room for ticks and labels, above the axes and below them, in points.

    By arithmetic: matplotlib's layout engine would draw every figure twice, and make the axes of each another width.
    """
    axes = figure.axes[0]
    tick_letters = max(5, *(len(units.tick(value)) for value in axes.get_yticks()))
    width, height = (size * POINTS_PER_INCH for size in figure.get_size_inches())
    left = (0.64 * tick_letters + 2.4) * layout.font  # a digit of the font is 0.64 of its size wide
    figure.subplots_adjust(
        left=left / width,
        right=1 - 1.2 * layout.font / width,
        top=1 - above / height,
        bottom=(3.3 * layout.font + below) / height,
    )
    axes.yaxis.set_label_coords(-(left - 1.5 * layout.font) / (width - left - 1.2 * layout.font), 0.5)
