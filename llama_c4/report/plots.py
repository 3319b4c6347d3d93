"""What is drawn of runs: one entry a figure. How it is drawn stands in figures.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llama_c4.report import units
from llama_c4.report.curves import Curve, curve, since
from llama_c4.report.ledger import RunSummary


@dataclass(frozen=True)
class Layout:
    """Size of a figure and of its letters, in points."""

    name: str
    width: float
    height: float
    font: float


WIDE = Layout("wide", 600, 350, 13)
NARROW = Layout("narrow", 350, 270, 12)
LAYOUTS = (WIDE, NARROW)


@dataclass(frozen=True)
class Layer:
    """One field of one kind of record, as a line or as the run's markers.

    Attributes:
        kind: Kind of the records.
        field: Their field on the y axis.
        marker_size: Size of the markers in points; 0 draws a line.
        width: Width of the line in points.
        alpha: Opacity of the line.
    """

    kind: str
    field: str
    marker_size: float = 0.0
    width: float = 1.2
    alpha: float = 0.85


LOSSES = (
    Layer("train", "loss", width=1.1, alpha=0.7),
    Layer("validation", "loss", marker_size=6),
    Layer("final_validation", "loss", marker_size=10),
)


@dataclass(frozen=True)
class Plot:
    """What a figure shows.

    Attributes:
        name: Name of its file.
        title: What it is, for a heading.
        y_label: Quantity and unit.
        caption: What the marks mean and how the numbers were taken.
        layers: What is drawn of each run.
        log: Whether the y axis is logarithmic.
        from_zero: Whether the y axis starts at 0.
        from_share: Part of a run's budget that is left out at the beginning.
        level: Height and name of a horizontal line that belongs to a run; None where it has none.
    """

    name: str
    title: str
    y_label: str
    caption: str
    layers: tuple[Layer, ...]
    log: bool = False
    from_zero: bool = False
    from_share: float = 0.0
    level: Callable[[RunSummary], tuple[float, str] | None] = lambda run: None

    def curves(self, run: RunSummary) -> list[tuple[Layer, Curve]]:
        """What of a run is drawn; layers without a point are left out."""
        start = self.from_share * (run.total_targets or 0)
        measured = ((layer, since(curve(run, layer.kind, layer.field), start)) for layer in self.layers)
        return [(layer, points) for layer, points in measured if len(points.x)]

    def marks(self, runs: Sequence[RunSummary]) -> list[tuple[str, str]]:
        """Marks for values that the axis cannot show, if these runs have any: matplotlib's marker and its meaning."""
        measured = [points for run in runs for _, points in self.curves(run)]
        marks = [("x", "not a finite number")] if any(points.gaps() for points in measured) else []
        has_zero = self.log and any(points.below_log_axis() for points in measured)
        return marks + ([("v", "not above zero")] if has_zero else [])


def _clip(run: RunSummary) -> tuple[float, str] | None:
    clip = run.settings.get("optim.grad_clip")
    return (float(clip), f"optim.grad_clip {units.setting(clip)}") if isinstance(clip, (int, float)) else None


def _entropy_floor(run: RunSummary) -> tuple[float, str] | None:
    """The least loss that any model can have, where the source of the data knows it."""
    floor = run.result.get("entropy_floor")
    return (floor, f"entropy floor {units.loss(floor)}") if isinstance(floor, (int, float)) else None


PLOTS = (
    Plot(
        "loss",
        "Loss",
        "loss (nats per target)",
        "Lines: mean over the targets of each training window. Small marks: a subset of the validation split, at epoch "
        "ends. Large marks: the whole validation split, after the last update. Log axis.",
        LOSSES,
        log=True,
        level=_entropy_floor,
    ),
    Plot(
        "loss_last_half",
        "Loss, second half of the budget",
        "loss (nats per target)",
        "The same from half of the budget on, on a linear axis.",
        LOSSES,
        from_share=0.5,
        level=_entropy_floor,
    ),
    Plot(
        "lr",
        "Learning rate",
        "learning rate",
        "The rate of the last update of each window.",
        (Layer("train", "lr", width=1.8, alpha=1.0),),
        from_zero=True,
    ),
    Plot(
        "grad_norm",
        "Gradient norm",
        "gradient norm",
        "Global norm over all parameters at the last update of each window, before clipping. Log axis.",
        (Layer("train", "grad_norm"),),
        log=True,
        level=_clip,
    ),
    Plot(
        "rate",
        "Rate of training",
        "targets per second",
        "Training alone: start-up, evaluation and saving are not counted.",
        (Layer("train", "targets_per_second"),),
        from_zero=True,
    ),
)
