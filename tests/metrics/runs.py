"""Updates, outcomes and clocks for the tests of records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_c4.metrics.logger import RunLogger
from llama_c4.metrics.sinks import JsonlSink
from llama_c4.metrics.throughput import PeakMemory, TrainingClock
from llama_c4.trainer.plan import Progress, Update

CONTEXT_LENGTH = 16


@dataclass
class Outcome:
    loss: Tensor
    grad_norm: Tensor
    clipped: Tensor


def outcome(loss: float, grad_norm: float = 1.0, *, clipped: bool = False) -> Outcome:
    return Outcome(
        torch.tensor(loss, dtype=torch.float64), torch.tensor(grad_norm, dtype=torch.float64), torch.tensor(clipped)
    )


def update_at(index: int, *, num_blocks: int = 4) -> Update:
    return Update(index, 4 * index, num_blocks, epoch=index // 10 + 1, ends_epoch=index % 10 == 9, context_length=16)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Listener:
    """A display that remembers everything."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.events: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(dict(record))

    def message(self, text: str) -> None:
        self.events.append(("message", text))

    def advance(self, update: int, targets: int) -> None:
        self.events.append(("advance", update, targets))

    def phase(self, name: str) -> None:
        self.events.append(("phase", name))

    def close(self, exit_code: int) -> None:
        self.events.append(("close", exit_code))


class MiniLogger:
    """A logger on a file with a hand-driven clock."""

    def __init__(
        self, path: Path, *, log_every: int = 5, num_updates: int = 23, begin: bool = True, **more: Any
    ) -> None:
        self.path, self.clock, self.listener = path, Clock(), Listener()
        self.best: list[Any] = []
        self.memory = [0]
        self.logger = RunLogger(
            JsonlSink(path),
            displays=[self.listener],
            log_every=log_every,
            num_updates=num_updates,
            clock=TrainingClock(self.clock),
            memory=PeakMemory(lambda: self.memory[0], self._reset_memory),
            on_best=self.best.append,
            **more,
        )
        self.progress = Progress()
        if begin:
            self.logger.begin()

    def _reset_memory(self) -> bool:
        self.memory[0] = 0
        return True

    def train_to(
        self, number: int, *, seconds: float = 1.0, outcome_of: Callable[[int], Outcome] | None = None
    ) -> None:
        while self.progress.update < number:
            update = update_at(self.progress.update)
            self.clock.now += seconds
            self.progress.finish(update)
            measured = (outcome_of or numbered_outcome)(update.index)
            self.logger.log_update(self.progress, update, measured, lr=0.1 * update.number)


def numbered_outcome(index: int) -> Outcome:
    """Losses that no two windows share."""
    return outcome(5.0 - 0.1 * index + 0.01 * (index % 3), 1.0 + index / 7, clipped=index % 4 == 1)


def validation(update: int, loss: float, **changes: Any) -> dict[str, Any]:
    fields = {
        "kind": "validation",
        "scope": "subset",
        "update": update,
        "epoch": 1,
        "targets": update * 64,
        "loss": loss,
        "perplexity": 10.0,
        "bits_per_byte": None,
        "num_targets": 256,
        "num_blocks": 16,
        "seconds": 0.5,
    }
    return fields | changes
