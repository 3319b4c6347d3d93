"""Nested settings by dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key → value of a nested mapping, in its order; an empty mapping is a value."""
    pairs: dict[str, Any] = {}
    for key, value in tree.items():
        is_branch = isinstance(value, Mapping) and bool(value)
        pairs |= flat(value, f"{prefix}{key}.") if is_branch else {f"{prefix}{key}": value}
    return pairs
