"""The one loop: the only place where training time passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from llama_c4.data.batch import Batch
from llama_c4.runtime.stop import Stopped
from llama_c4.trainer.engine import Engine, Probe, Record, StepOutcome
from llama_c4.trainer.plan import Progress, TrainingPlan, Update


class Stream(Protocol):
    def batch(self, first: int, count: int) -> Batch:
        """The blocks at positions [first, first + count)."""


class Checkpoints(Protocol):
    """Where states go; it tells the logger by itself how long saving took."""

    def save_if_due(self, progress: Progress, update: Update) -> None:
        """What the policy wants after this update."""

    def rescue(self, progress: Progress) -> object:
        """A state from which the run continues, now."""

    def rescue_if_due(self, progress: Progress) -> None:
        """The same, if the last one is old enough."""

    def save_final(self, progress: Progress) -> None:
        """What the policy wants at the end."""


class Logger(Protocol):
    def log_update(self, progress: Progress, update: Update, outcome: StepOutcome, lr: float) -> None: ...
    def log_record(self, record: Record) -> None: ...
    def phase(self, name: str) -> AbstractContextManager[object]:
        """Time spent inside does not count as training."""


class Stop(Protocol):
    @property
    def requested(self) -> bool: ...


def train(
    engine: Engine,
    stream: Stream,
    plan: TrainingPlan,
    progress: Progress,
    *,
    micro_batch_size: int,
    peak_lr: float,
    schedule: Callable[[int], float],
    checkpoints: Checkpoints,
    logger: Logger,
    probes: Sequence[Probe],
    stop: Stop,
) -> bool:
    """Train from `progress` to the end of the plan, or to a request to stop.

    The position is `progress.sequences`, inside an update too, so a run may be resumed with another micro-batch size. A
    request to stop is looked at after every micro-step and every update; probes look by themselves and are cut short by
    it. The rescue state then falls between two micro-steps, between an update and its probes, or between two updates,
    and the run that continues from it does what is left.

    Args:
        micro_batch_size: Sequences of a micro-step; the last one of an update takes what is left.
        peak_lr: Learning rate that the schedule multiplies.
        schedule: Targets consumed after the update → multiplier.
    Returns:
        Whether the plan is done; False when stopped, with a rescue state written.
    Raises:
        TrainingError: the run cannot go on; nothing has been saved over a good state.
    """

    def observe(update: Update) -> None:
        if due := [probe for probe in probes if probe.due(update)]:
            with logger.phase("evaluation"):
                found = [probe.measure(engine, progress) for probe in due]
            for record in found:  # all of them or none: what was cut short is measured anew
                logger.log_record(record)
        progress.observed = update.number
        checkpoints.save_if_due(progress, update)

    try:
        if progress.observed < progress.update:
            observe(plan.update(progress.update - 1))
        for update in plan.remaining(progress):
            while progress.sequences < update.end_block:
                count = min(micro_batch_size, update.end_block - progress.sequences)
                engine.accumulate(stream.batch(progress.sequences, count), update)
                progress.advance(count)
                if stop.requested:
                    raise Stopped
                checkpoints.rescue_if_due(progress)

            lr = peak_lr * schedule(update.end_targets)
            outcome = engine.apply(lr, update)
            progress.finish(update)
            logger.log_update(progress, update, outcome, lr)
            observe(update)
            if stop.requested:
                raise Stopped
    except Stopped:
        checkpoints.rescue(progress)
        return False

    checkpoints.save_final(progress)
    return True
