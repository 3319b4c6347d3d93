"""Records and progress as people read them: lines of text, and numbers that fit into them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from llama_c4.metrics.records import Record

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much there is to do: updates, virtual epochs and prediction targets of the plan."""

    num_updates: int
    num_epochs: int
    total_targets: int


def number(value: float | None, form: str) -> str:
    """A number in a format such as ".4f"; a dash where there is none. "nan" and "inf" are said."""
    return "–" if value is None else format(value, form)


def short_count(value: float | None) -> str:
    """Targets and rates with three to four digits and k, M, B or T, as in 408.1M."""
    if value is None:
        return "–"
    for scale, letter in _SCALES:
        # 999.95k would print as 1000.0k: it belongs to the next letter.
        if math.isfinite(value) and abs(value) >= scale * 0.99995:
            return f"{value / scale:.1f}{letter}"
    return f"{value:.4g}"


def short_duration(seconds: float | None) -> str:
    """Hours, minutes and seconds as in 1:02:03 or 2:03; days in front where there are any; a dash where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–:––"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@final
class Pace:
    """Estimates the seconds left from the elapsed rate since the first record, evaluation and saving included."""

    def __init__(self, total_targets: int) -> None:
        self._total = total_targets
        self._first: tuple[int, float] | None = None
        self._rate: float | None = None

    def add(self, record: Record) -> None:
        """Take a training record in."""
        targets, elapsed = record["targets"], record["elapsed_seconds"]
        if self._first is None:
            self._first = targets, elapsed
            self._rate = record["targets_per_second"]
        elif elapsed > self._first[1]:
            self._rate = (targets - self._first[0]) / (elapsed - self._first[1])

    def seconds_left(self, targets: int) -> float | None:
        """Seconds from this position to the end of the budget; None before the first record."""
        return (self._total - targets) / self._rate if self._rate else None


def line_of(record: Record, *, extent: Extent, seconds_left: float | None = None) -> str:
    """A record in one line."""
    if record["kind"] == "train":
        return _train_line(record, extent, seconds_left)
    if record["kind"] in ("validation", "final_validation"):
        return _validation_line(record)
    fields = "  ".join(f"{key}={_plain(value)}" for key, value in record.items() if key != "kind")
    return f"{record['kind']}  {fields}"


def _train_line(record: Record, extent: Extent, seconds_left: float | None) -> str:
    parts = (
        f"update {record['update']}/{extent.num_updates}",
        f"epoch {record['epoch']}/{extent.num_epochs}",
        f"{short_count(record['targets'])}/{short_count(extent.total_targets)} targets",
        f"loss {number(record['loss'], '.4f')}",
        f"lr {number(record['lr'], '.2e')}",
        f"grad norm {number(record['grad_norm'], '.3g')}",
        f"{short_count(record['targets_per_second'])} targets/s",
        f"{short_duration(seconds_left)} left",
    )
    return "  ".join(parts)


def _validation_line(record: Mapping[str, Any]) -> str:
    bits = record["bits_per_byte"]
    what = "full validation" if record["scope"] == "full" else "validation"
    parts = [f"loss {number(record['loss'], '.4f')}", f"perplexity {number(record['perplexity'], '.4g')}"]
    parts += [] if bits is None else [f"{bits:.4f} bits per byte"]
    parts += [f"{short_count(record['num_targets'])} targets in {short_duration(record['seconds'])}"]
    return f"{what} after update {record['update']}, epoch {record['epoch']}: {', '.join(parts)}"


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
