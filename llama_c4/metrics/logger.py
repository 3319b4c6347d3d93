"""From updates to records: window sums, rates, phases, and everybody who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

from llama_c4.metrics.best import BestTracker
from llama_c4.metrics.records import Record, check_record, to_strict
from llama_c4.metrics.sinks import TRAINING, Display, JsonlSink, Sink
from llama_c4.metrics.throughput import PeakMemory, TrainingClock
from llama_c4.metrics.window import Outcome, Window


class Update(Protocol):
    """What the logger has to know of an update."""

    @property
    def epoch(self) -> int: ...

    @property
    def targets(self) -> int: ...

    @property
    def end_targets(self) -> int: ...


class Progress(Protocol):
    """What the logger has to know of the progress."""

    @property
    def update(self) -> int: ...


@final
class RunLogger:
    """Turns updates into records and hands every record to the journal, the sinks and the displays.

    A training record is due after each update whose number is a multiple of `log_every`, and after the last one of the
    run; it covers the updates since the record before. Seconds inside `phase` are elapsed but not training.
    """

    def __init__(
        self,
        journal: JsonlSink,
        *,
        sinks: Sequence[Sink] = (),
        displays: Sequence[Display] = (),
        log_every: int,
        num_updates: int,
        clock: TrainingClock,
        memory: PeakMemory,
        synchronize: Callable[[], object] = lambda: None,
        on_best: Callable[[dict[str, Any] | None], None] = lambda record: None,
    ) -> None:
        """
        Args:
            journal: metrics.jsonl.
            sinks: Take records too.
            displays: Take records, messages, the position after each update, and phases.
            log_every: Updates of a training record.
            num_updates: Updates of the plan.
            clock, memory: Started with the process, so that start-up counts as elapsed.
            synchronize: Wait for the device; called where a phase begins or ends, so that queued work is not counted
                on the wrong side.
            on_best: Called with the best subset validation (strict JSON values) when there is a new one, and once at
                `begin` with what the restored state knows, None included.
        """
        self._journal = journal
        self._sinks = [journal, *sinks]
        self._displays = list(displays)
        self._log_every = log_every
        self._num_updates = num_updates
        self._clock = clock
        self._memory = memory
        self._synchronize = synchronize
        self._on_best = on_best
        self._best = BestTracker()
        self._window = Window()
        self._last_training = 0.0
        self._last_elapsed = 0.0
        self._rows = 0
        self._phases: list[str] = []
        self._has_begun = False

    @property
    def best(self) -> dict[str, Any] | None:
        """The best subset validation so far, with values fit for JSON."""
        return None if self._best.record is None else to_strict(self._best.record)

    @property
    def training_seconds(self) -> float:
        """Seconds of training alone, over all starts."""
        return self._clock.training_seconds

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of all starts, each up to its last state."""
        return self._clock.elapsed_seconds

    def begin(self, *, update: int = 0, targets: int = 0) -> None:
        """Once, after a state was restored or none was found: cut the records that the state does not know.

        Args:
            update, targets: Where training goes on, for the displays.
        Raises:
            CheckpointError: The journal has fewer records than the state.
        """
        self._journal.rewind(self._rows)
        self._on_best(self.best)
        if not self._phases:
            self._memory.resume()
        self._has_begun = True
        for display in self._displays:
            display.advance(update, targets)

    def log_update(self, progress: Progress, update: Update, outcome: Outcome, lr: float) -> None:
        """After an update: add it to the window, and write the training record if it is due.

        Raises:
            TrainingError: The journal cannot be written.
        """
        self._window.add(outcome, targets=update.targets)
        for display in self._displays:
            display.advance(progress.update, update.end_targets)
        if progress.update % self._log_every == 0 or progress.update == self._num_updates:
            self.log_record(self._train_record(progress, update, outcome, lr))
            self._window = Window()

    def _train_record(self, progress: Progress, update: Update, outcome: Outcome, lr: float) -> Record:
        loss, grad_norm, clipped_updates = self._window.fetch(outcome)  # waits for the device, so the clock is right
        training, elapsed = self._clock.training_seconds, self._clock.elapsed_seconds
        record = {
            "kind": "train",
            "update": progress.update,
            "epoch": update.epoch,
            "targets": update.end_targets,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "clipped_updates": clipped_updates,
            "window_updates": self._window.updates,
            "targets_per_second": _rate(self._window.targets, training - self._last_training),
            "elapsed_targets_per_second": _rate(self._window.targets, elapsed - self._last_elapsed),
            "training_seconds": training,
            "elapsed_seconds": elapsed,
            "peak_memory_bytes": self._memory.peak_bytes,
        }
        self._last_training, self._last_elapsed = training, elapsed
        return record

    def log_record(self, record: Record) -> None:
        """Hand on a record of any kind; a subset validation may become the best.

        Raises:
            ValueError: It is no record.
            TrainingError: The journal cannot be written.
        """
        if not self._has_begun:
            raise RuntimeError("a record before begin(): the journal does not know yet which of its rows stand")
        check_record(record)
        for sink in (*self._sinks, *self._displays):
            sink.write(record)
        self._rows = self._journal.rows
        if record["kind"] == "validation" and record["scope"] == "subset" and self._best.offer(record):
            self._on_best(self.best)

    def message(self, text: str) -> None:
        """Tell people something; no record is made of it."""
        for display in self._displays:
            display.message(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside is not training. A phase inside another changes nothing but the display.

        Args:
            name: startup, evaluation or saving.
        """
        if not self._phases:
            self._synchronize()
            self._clock.pause()
            self._memory.pause()
        self._enter(name)
        try:
            yield
        finally:
            self._leave()
            if not self._phases:
                self._synchronize()
                self._memory.resume()
                self._clock.resume()

    def _enter(self, name: str) -> None:
        self._phases.append(name)
        for display in self._displays:
            display.phase(name)

    def _leave(self) -> None:
        self._phases.pop()
        for display in self._displays:
            display.phase(self._phases[-1] if self._phases else TRAINING)

    def close(self, exit_code: int = 0) -> None:
        """Close everything; a second time does nothing. Displays come last, since a sink may have something to tell."""
        for sink in (*self._sinks, *self._displays):
            sink.close(exit_code)
        self._displays, self._sinks = [], []

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next records depend on, for a checkpoint; the rows it counts are on the disk then.

        Raises:
            TrainingError: The journal cannot be written.
        """
        self._journal.sync()
        return {
            "rows": self._rows,
            "window": self._window.state_dict(),
            "clock": self._clock.state_dict(),
            "last_training_seconds": self._last_training,
            "last_elapsed_seconds": self._last_elapsed,
            "best": self._best.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; before `begin`."""
        self._rows = state["rows"]
        self._window.load_state_dict(state["window"])
        self._clock.load_state_dict(state["clock"])
        self._last_training = state["last_training_seconds"]
        self._last_elapsed = state["last_elapsed_seconds"]
        self._best.load_state_dict(state["best"])


def _rate(targets: int, seconds: float) -> float | None:
    return targets / seconds if seconds > 0 else None
