"""Partners of the loop that write down what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from llama_c4.data.batch import Batch
from llama_c4.trainer.engine import Engine, Progress, Record, StepOutcome
from llama_c4.trainer.plan import Update
from tests.tiny_training import TinyStream


class Recorder:
    """Stream, checkpoints, logger and stop request in one; `stop_at` says at which event somebody asks to stop."""

    def __init__(self, engine: Engine, *, stop_at: Callable[[str], bool] = lambda event: False) -> None:
        self.engine, self.stop_at, self._stream = engine, stop_at, TinyStream()
        self.events: list[str] = []
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.saved: list[tuple[Progress, dict[str, Any]]] = []
        self.requested = False

    def batch(self, first: int, count: int) -> Batch:
        self._happened(f"blocks {first}+{count}")
        return self._stream.batch(first, count)

    def _happened(self, event: str) -> None:
        self.events.append(event)
        self.requested = self.requested or self.stop_at(event)

    def _keep(self, kind: str, progress: Progress) -> None:
        self.saved.append((replace(progress), deepcopy(self.engine.state_dict())))
        self._happened(f"{kind} {progress.update}.{progress.micro_step}")

    def rescue(self, progress: Progress) -> None:
        self._keep("rescue", progress)

    def rescue_if_due(self, progress: Progress) -> None:
        self._happened("rescue?")

    def save_if_due(self, progress: Progress, update: Update) -> None:
        self._happened(f"save? {progress.update}")

    def save_final(self, progress: Progress) -> None:
        self._keep("final", progress)

    def log_update(self, progress: Progress, update: Update, outcome: StepOutcome, lr: float) -> None:
        self.lrs.append(lr)
        self.losses.append(float(outcome.loss))
        self._happened(f"update {progress.update}")

    def log_record(self, record: Record) -> None:
        self._happened(f"record {record['update']}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._happened(f"begin {name}")
        try:
            yield
        finally:
            self._happened(f"end {name}")


class EpochProbe:
    """Due at epoch ends; measures nothing but where it is."""

    def due(self, update: Update) -> bool:
        return update.ends_epoch

    def measure(self, engine: Engine, progress: Progress) -> Record:
        return {"kind": "validation", "update": progress.update}
