"""Numbers as people read them: each function gives a number its unit, and a dash when there is no number."""

from __future__ import annotations

import math
from datetime import timedelta

from llama_c4.checkpoint.atomic import format_bytes

MISSING = "–"

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(value: float | None) -> str:
    """Targets, parameters, rates: a few digits and k, M, B or T, as in 408.1M; small whole numbers as they are."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None else f"{value:g}"
    for scale, letter in _SCALES:
        # 999.95k would print as 1000.0k: it belongs to the next letter.
        if abs(value) >= scale * 0.99995:
            return f"{value / scale:.1f}".removesuffix(".0") + letter
    return f"{value:.4g}"


def tick(value: float) -> str:
    """A round number at an axis, with its letter and all of its digits: 1.25k."""
    scale, letter = next(((s, c) for s, c in _SCALES if abs(value) >= s), (1.0, ""))
    return f"{value / scale:.6g}{letter}"


def whole(value: float | None) -> str:
    """An exact whole number with thousands separated."""
    return MISSING if value is None else f"{value:,.0f}"


def loss(value: float | None) -> str:
    """Nats per target to four decimals; "nan" and "inf" are said, never hidden."""
    return MISSING if value is None else f"{value:.4f}"


def setting(value: object) -> str:
    """A value of a configuration as one would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(setting(item) for item in value) + "]"
    return printable(str(value))


def duration(value: float | None) -> str:
    """Seconds in their two largest units: 6 min 50 s."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 59.5:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    days, rest = divmod(round(value), 86_400)
    hours, rest = divmod(rest, 3_600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def age(value: float | None) -> str:
    """Seconds since something in their largest unit: 3 h."""
    if value is None:
        return MISSING
    since = timedelta(seconds=max(value, 0.0))
    if since < timedelta(minutes=1):
        return f"{since.seconds} s"
    if since < timedelta(hours=1):
        return f"{since.seconds // 60} min"
    return f"{since.seconds // 3_600} h" if since < timedelta(days=1) else f"{since.days} d"


def memory(value: float | None) -> str:
    """Bytes in powers of 1024."""
    return MISSING if value is None else format_bytes(int(value))


def percent(part: float | None, total: float | None) -> str:
    """A share in whole percent, rounded down: 100% means done."""
    return f"{math.floor(100 * part / total)}%" if part is not None and total else MISSING


def printable(text: str) -> str:
    r"""Text with control characters spelled out (\x1b), so that a name cannot steer the terminal or break a row."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
