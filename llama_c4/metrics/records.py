"""Records: flat dicts of plain numbers and words, with a `kind`. What each kind holds, and how it becomes strict JSON.

`docs/formats.md` is normative for fields and units. Non-finite numbers have no place in JSON: they are written as null
with a sibling "<field>_nonfinite" that says "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

NONFINITE_SUFFIX = "_nonfinite"

TRAIN_FIELDS = (
    "kind",
    "update",
    "epoch",
    "targets",
    "loss",
    "lr",
    "grad_norm",
    "clipped_updates",
    "window_updates",
    "targets_per_second",
    "elapsed_targets_per_second",
    "training_seconds",
    "elapsed_seconds",
    "peak_memory_bytes",
)
VALIDATION_FIELDS = (
    "kind",
    "scope",
    "update",
    "epoch",
    "targets",
    "loss",
    "perplexity",
    "bits_per_byte",
    "num_targets",
    "num_blocks",
    "seconds",
)
FIELDS = {"train": TRAIN_FIELDS, "validation": VALIDATION_FIELDS, "final_validation": VALIDATION_FIELDS}
"""Kind → the fields that every record of it has. Records may have more, and there may be more kinds."""


def check_record(record: Record) -> None:
    """Check that a record is one.

    Raises:
        ValueError: No kind, a missing field of its kind, or a value that is neither number, word nor None.
    """
    missing = [field for field in FIELDS.get(record.get("kind", ""), ("kind",)) if field not in record]
    if missing:
        raise ValueError(f"a record of kind {record.get('kind')!r} lacks {', '.join(missing)}")
    odd = {key: type(value).__qualname__ for key, value in record.items() if type(value) not in _PLAIN}
    if odd:
        raise ValueError(f"a record of kind {record['kind']!r} holds more than plain numbers and words: {odd}")


_PLAIN = (bool, int, float, str, type(None))


def to_strict(record: Record) -> dict[str, Any]:
    """The record with every non-finite number as null and a sibling that says which one it was."""
    strict: dict[str, Any] = {}
    for key, value in record.items():
        is_number = not isinstance(value, float) or math.isfinite(value)
        strict[key] = value if is_number else None
        if not is_number:
            strict[key + NONFINITE_SUFFIX] = str(float(value))
    return strict


def from_strict(strict: Record) -> dict[str, Any]:
    """The inverse of `to_strict`."""
    words = {
        key.removesuffix(NONFINITE_SUFFIX): value for key, value in strict.items() if key.endswith(NONFINITE_SUFFIX)
    }
    plain = {key: value for key, value in strict.items() if not key.endswith(NONFINITE_SUFFIX)}
    return plain | {key: float(word) for key, word in words.items()}


def to_line(record: Record) -> bytes:
    """One line of JSONL, with its line break."""
    return json.dumps(to_strict(record), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Read a line strictly.

    Raises:
        ValueError: It is not one JSON object, or holds a bare NaN or Infinity.
    """
    value = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError(f"is no JSON object but {type(value).__name__}")
    return from_strict(value)


def _refuse_constant(word: str) -> float:
    raise ValueError(f"holds a bare {word}, which is not JSON")
