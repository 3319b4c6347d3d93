"""From records to curves: what can be drawn, where a curve has a gap, and a small set of points that looks the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_c4.report.ledger import RunSummary

Points = NDArray[np.float64]

MAX_POINTS = 1000


@dataclass(frozen=True)
class Curve:
    """A measured quantity over the targets consumed.

    Attributes:
        x: Targets consumed, ascending, [n].
        y: Values, [n]; nan and inf as they were measured.
    """

    x: Points
    y: Points

    def drawable(self, *, log: bool) -> Curve:
        """The curve with a break (nan) where the axis cannot show a value: not finite, on a log axis not above 0."""
        shown = np.isfinite(self.y) & ((self.y > 0) | (not log))
        return Curve(self.x, np.where(shown, self.y, np.nan))

    def gaps(self) -> list[tuple[float, float]]:
        """First and last x of each stretch of values that are not finite."""
        return self._stretches(~np.isfinite(self.y))

    def below_log_axis(self) -> list[tuple[float, float]]:
        """First and last x of each stretch of finite values that a log axis cannot show."""
        return self._stretches(np.isfinite(self.y) & (self.y <= 0))

    def _stretches(self, chosen: NDArray[np.bool_]) -> list[tuple[float, float]]:
        edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False])).astype(np.int8)))
        return [(float(self.x[first]), float(self.x[end - 1])) for first, end in edges.reshape(-1, 2)]

    def thinned(self, max_points: int = MAX_POINTS) -> Curve:
        """At most about `max_points` of the points: of each bucket its smallest, its largest and one break, so that no
        peak and no gap is lost."""
        if len(self.x) <= max_points:
            return self
        buckets = np.array_split(np.arange(len(self.x)), max_points // 3)
        kept = np.unique(np.concatenate([self._extremes(bucket) for bucket in buckets]))
        return Curve(self.x[kept], self.y[kept])

    def _extremes(self, bucket: NDArray[np.intp]) -> NDArray[np.intp]:
        is_break = np.isnan(self.y[bucket])
        solid = bucket[~is_break]
        ends = [solid[self.y[solid].argmin()], solid[self.y[solid].argmax()]] if len(solid) else []
        return np.array([*ends, *bucket[is_break][:1]], dtype=np.intp)


def curve(run: RunSummary, kind: str, field: str) -> Curve:
    """The values of one field over all records of a kind that have it."""
    records = [r for r in run.of_kind(kind) if r.get(field) is not None and r.get("targets") is not None]
    x = np.array([record["targets"] for record in records], dtype=np.float64)
    return Curve(x, np.array([record[field] for record in records], dtype=np.float64))


def since(curve: Curve, start: float) -> Curve:
    """The part of a curve from a number of targets on."""
    return Curve(curve.x[curve.x >= start], curve.y[curve.x >= start])
