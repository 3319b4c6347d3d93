"""Run folders as rows: what each run is, how far it came, what it measured.

Only files are read, so this works while the run goes on, on a machine without torch, and for runs of older versions: a
setting is a dotted key and a value, whatever the schema of today says. What a crash may leave (a torn last line) is no
fault; any other damage is one, is kept with its file and line, and hides neither the rest of the run nor other runs.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from llama_c4.config.errors import CheckpointError
from llama_c4.metrics.records import Record
from llama_c4.report.lock import is_locked
from llama_c4.report.reading import read_json, read_lines, read_settings

LIVE_STATES = ("starting", "training", "evaluating")
_OLD_RUN = re.compile(r"\.old-\d+$")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run folder as it was at the moment of reading.

    Attributes:
        path: The folder.
        settings: Dotted key → value of config.yaml, in the file's order.
        status: status.json; empty when there is none.
        result: result.json; empty until the run has ended.
        environment: environment.json.
        lineage: Lines of lineage.jsonl, one a start of the run.
        records: Lines of metrics.jsonl; a number written as null with "<field>_nonfinite" is that nan or inf again.
        faults: Damage found, one message each with file and line.
        has_process: Whether a process holds the folder; None where that cannot be seen from this machine.
        seen_at: Last sign of life, seconds since the epoch.
    """

    path: Path
    settings: Mapping[str, Any]
    status: Record
    result: Record
    environment: Record
    lineage: tuple[Record, ...]
    records: tuple[Record, ...]
    faults: tuple[str, ...]
    has_process: bool | None
    seen_at: float

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> str:
        """The state to show: what status.json says, corrected where the process is gone or a number is not finite."""
        said = str(self.status.get("state", "no status"))
        if self.is_diverged:
            return "diverged"
        if said not in LIVE_STATES or self.has_process:
            return said
        return "interrupted (no process)" if self.has_process is False else f"{said}?"

    @property
    def is_diverged(self) -> bool:
        """Whether the run says so, or any of its losses or gradient norms is not a finite number."""
        said = "diverged" in (self.status.get("state"), self.result.get("status"))
        return said or any(not math.isfinite(value) for value in self._watched_numbers())

    @property
    def final_loss(self) -> float | None:
        """Loss over the whole validation split after the last update, nats per target."""
        loss = self.result.get("loss")
        return loss if loss is not None else self._last("final_validation", "loss")

    @property
    def headline(self) -> Record:
        """The measurement that stands for the run: the final one, else the latest subset validation."""
        measured = self.of_kind("final_validation") or self.of_kind("validation") or [{}]
        return self.result if self.result.get("loss") is not None else measured[-1]

    @property
    def num_parameters(self) -> int | None:
        """Unique parameters, the embedding counted once."""
        return self._first_of(self.result.get("num_parameters"), self.environment.get("parameters"))

    @property
    def subset_loss(self) -> float | None:
        """Loss of the latest subset validation, nats per target."""
        return self._last("validation", "loss")

    @property
    def best_subset_loss(self) -> float | None:
        """Smallest finite loss of the subset validations."""
        losses = [r["loss"] for r in self.of_kind("validation") if _is_finite(r.get("loss"))]
        return min(losses, default=None)

    @property
    def lr(self) -> float | None:
        """Peak learning rate."""
        return self.settings.get("optim.lr")

    @property
    def seed(self) -> int | None:
        return self.settings.get("runtime.seed")

    @property
    def update(self) -> int | None:
        return self._first_of(self.status.get("update"), self._last("train", "update"))

    @property
    def targets(self) -> int | None:
        """Prediction targets consumed."""
        return self._first_of(self.status.get("targets"), self._last("train", "targets"))

    @property
    def total_targets(self) -> int | None:
        """Prediction targets of the whole budget."""
        return self._first_of(self.status.get("total_targets"), self.result.get("total_targets"))

    @property
    def rate(self) -> float | None:
        """Targets per second of training alone: the median over the windows, so that a warm-up weighs nothing."""
        rates = [r["targets_per_second"] for r in self.of_kind("train") if _is_finite(r.get("targets_per_second"))]
        return median(rates) if rates else None

    @property
    def peak_memory_bytes(self) -> int | None:
        peaks = [r["peak_memory_bytes"] for r in self.of_kind("train") if _is_finite(r.get("peak_memory_bytes"))]
        return max(peaks, default=None)

    def seconds(self, field: str) -> float | None:
        """`training_seconds` or `elapsed_seconds`, of the result or of the latest window."""
        return self._first_of(self.result.get(field), self._last("train", field))

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.get("kind") == kind]

    def _last(self, kind: str, field: str) -> Any:
        return next((r[field] for r in reversed(self.of_kind(kind)) if r.get(field) is not None), None)

    def _first_of(self, *values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    def _watched_numbers(self) -> Iterator[float]:
        for record in (*self.records, self.result):
            fields = (record.get("loss"), record.get("grad_norm"))
            yield from (value for value in fields if isinstance(value, (int, float)))


def read_run(run_dir: Path) -> RunSummary:
    """Read a run folder, finished or not.

    Raises:
        CheckpointError: There is no config.yaml in it, so it is no run folder.
    """
    if not (run_dir / "config.yaml").is_file():
        raise CheckpointError(f"{run_dir} is not a run folder: it has no config.yaml; name one that a run has made")
    faults: list[str] = []
    status = read_json(run_dir / "status.json", faults)
    return RunSummary(
        path=run_dir.resolve(),
        settings=read_settings(run_dir / "config.yaml", faults),
        status=status,
        result=read_json(run_dir / "result.json", faults),
        environment=read_json(run_dir / "environment.json", faults),
        lineage=read_lines(run_dir / "lineage.jsonl", faults),
        records=read_lines(run_dir / "metrics.jsonl", faults),
        faults=tuple(faults),
        has_process=_has_process(run_dir, status),
        seen_at=_last_sign(run_dir),
    )


def scan(folder: Path, *, include_old: bool = False) -> list[RunSummary]:
    """Every run folder at or below a folder, by path.

    What lies inside a run folder, token caches and hidden folders are not looked into; runs set aside by a restart
    (NAME.old-N) are left out unless asked for.

    Raises:
        CheckpointError: There is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; name the folder that holds run folders (run.output_dir)")
    return [read_run(place) for place in _run_folders(folder, include_old=include_old)]


def _run_folders(folder: Path, *, include_old: bool) -> Iterator[Path]:
    if (folder / "config.yaml").is_file():
        yield folder
        return
    for child in sorted(folder.iterdir()):
        is_old = _OLD_RUN.search(child.name) is not None and not include_old
        if child.is_dir() and not child.is_symlink() and not is_old and child.name != "caches" and child.name[0] != ".":
            yield from _run_folders(child, include_old=include_old)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _has_process(run_dir: Path, status: Record) -> bool | None:
    if is_locked(run_dir / ".lock"):
        return True
    # A lock held on another machine may not be visible through a network file system.
    is_ours = status.get("host") in (None, socket.gethostname())
    return False if is_ours else None


def _last_sign(run_dir: Path) -> float:
    places = (run_dir / name for name in ("config.yaml", "status.json", "metrics.jsonl", "result.json"))
    return max(place.stat().st_mtime for place in places if place.exists())
