"""What two runs are compared by: every record but its times, and every tensor of the final state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TIMES = ("seconds", "targets_per_second", "elapsed_targets_per_second", "training_seconds", "elapsed_seconds")
MEMORY = ("peak_memory_bytes",)


class StopAt:
    """A request to stop that comes at the k-th time somebody asks: at every moment of a run, one after another."""

    exit_code = 75
    reason = "a test"

    def __init__(self, k: int | None) -> None:
        self.k, self.asked = k, 0

    @property
    def requested(self) -> bool:
        self.asked += 1
        return self.k is not None and self.asked > self.k


def records(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES + MEMORY} for row in rows]


def final_parts(run_dir: Path) -> dict[str, Any]:
    """The parts of final.pt that must not depend on how often the run was stopped."""
    parts = torch.load(run_dir / "final.pt", weights_only=True)["parts"]
    return {name: parts[name] for name in ("engine", "progress", "loader", "rng")}


def assert_same(a: Any, b: Any, place: str = "state") -> None:
    """Bitwise equality of nested states."""
    assert type(a) is type(b), place
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), place
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for key in a:
            assert_same(a[key], b[key], f"{place}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), place
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{place}[{i}]")
    else:
        assert a == b, place
