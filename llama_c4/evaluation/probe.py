"""Validation as the training loop sees it: a probe at every epoch end, and the record of the end."""

from __future__ import annotations

import time
from typing import Any, Protocol, final

from torch import nn

from llama_c4.evaluation.validation import ValidationResult
from llama_c4.evaluation.validator import Validator

Record = dict[str, Any]


class _Update(Protocol):
    @property
    def epoch(self) -> int: ...
    @property
    def ends_epoch(self) -> bool: ...
    @property
    def end_targets(self) -> int: ...


class _Plan(Protocol):
    def update(self, index: int) -> _Update:
        """The update with this zero-based index."""


class _Progress(Protocol):
    update: int
    """Updates completed."""


class _Engine(Protocol):
    def evaluation_model(self) -> nn.Module:
        """The ordinary model whose loss is reported."""


@final
class SubsetProbe:
    """Validates the fixed subset at every epoch end; implements the loop's `Probe`.

    Args:
        validator: Knows the subset.
        plan: Where the updates lie; tells the epoch and the targets of an update.
    """

    def __init__(self, validator: Validator, plan: _Plan) -> None:
        self._validator, self._plan = validator, plan

    def due(self, update: _Update) -> bool:
        """Whether the update ends a virtual epoch."""
        return update.ends_epoch

    def measure(self, engine: _Engine, progress: _Progress) -> Record:
        """Validate the weights as they are after the last completed update.

        Returns:
            A record of kind `validation` and scope `subset`.
        Raises:
            TrainingError: The loss is not finite, or below the entropy floor.
        """
        return _measure(self._validator.subset, engine, self._plan, progress, kind="validation", scope="subset")


def full_record(
    validator: Validator, engine: _Engine, plan: _Plan, progress: _Progress, *, kind: str = "final_validation"
) -> Record:
    """Validate the whole split after the last completed update.

    Returns:
        A record of scope `full`.
    Raises:
        TrainingError: The loss is not finite, or below the entropy floor.
    """
    return _measure(validator.full, engine, plan, progress, kind=kind, scope="full")


class _Evaluate(Protocol):
    def __call__(self, model: nn.Module, *, update: int | None) -> ValidationResult: ...


def _measure(
    evaluate: _Evaluate, engine: _Engine, plan: _Plan, progress: _Progress, *, kind: str, scope: str
) -> Record:
    start = time.perf_counter()
    result = evaluate(engine.evaluation_model(), update=progress.update)
    update = plan.update(progress.update - 1)
    return {
        "kind": kind,
        "scope": scope,
        "update": progress.update,
        "epoch": update.epoch,
        "targets": update.end_targets,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "num_targets": result.num_targets,
        "num_blocks": result.num_blocks,
        "seconds": time.perf_counter() - start,
    }
