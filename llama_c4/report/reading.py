"""The files of a run folder as plain values, with every damage named by file and line instead of raised.

What a crash may leave (a torn last line of a JSONL file) is no damage. Each reader appends to a list of faults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llama_c4.config.dotted import flat
from llama_c4.config.errors import ConfigError
from llama_c4.config.yaml_text import read_tree
from llama_c4.metrics.records import Record, from_line

_FAULTS_OF_A_FILE = 5
# Fields that tables and figures reckon with, whatever file they stand in.
_NUMBERS = (
    *("update", "epoch", "targets", "total_targets", "num_targets", "loss", "perplexity", "bits_per_byte"),
    *("lr", "grad_norm", "targets_per_second", "training_seconds", "elapsed_seconds", "peak_memory_bytes"),
    *("num_parameters", "parameters", "non_embedding_parameters"),
)


def read_settings(path: Path, faults: list[str]) -> dict[str, Any]:
    """Dotted key → value of a config.yaml, in its order; empty when it is damaged."""
    try:
        return flat(read_tree(path))
    except ConfigError as error:
        faults += error.faults
        return {}


def read_json(path: Path, faults: list[str]) -> Record:
    """The object of a JSON file; empty when there is none or it is damaged."""
    if not path.exists():
        return {}
    try:
        return _record(path.read_bytes())
    except ValueError as error:
        faults.append(f"{path}: {error}")
        return {}


def read_lines(path: Path, faults: list[str]) -> tuple[Record, ...]:
    """The records of a JSONL file; a last line without its line break is still being written and no fault."""
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    records, damaged = [], []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(_record(line))
        except ValueError as error:
            damaged.append(f"{path}, line {number}: {error}")
    faults += damaged[:_FAULTS_OF_A_FILE]
    if len(damaged) > _FAULTS_OF_A_FILE:
        faults.append(f"{path}: {len(damaged) - _FAULTS_OF_A_FILE} more damaged lines")
    return tuple(records)


def _record(text: bytes) -> Record:
    """One strict JSON object with its non-finite numbers put back; ValueError says what else it is."""
    try:
        record = from_line(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno})") from error
    for key in _NUMBERS:
        if not isinstance(record.get(key), (int, float, type(None))):
            raise ValueError(f"{key} is {record[key]!r}, not a number")
    return record
