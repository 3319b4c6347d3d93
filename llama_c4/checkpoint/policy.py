"""Which epochs are exported under a checkpoint policy. Pure: no torch, no files."""

from __future__ import annotations

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import TrainingConfig


def export_epochs(training: TrainingConfig, *, num_epochs: int) -> tuple[int, ...]:
    """Epochs (1-based) whose end is exported.

    interval: every K-th epoch and the last one. explicit: those listed. final, none: no epoch.

    Raises:
        ConfigError: An epoch is listed that the run does not have.
    """
    if training.checkpoint_policy == "interval":
        every = training.checkpoint_every_epochs
        if every is None:
            raise ConfigError("training.checkpoint_every_epochs is null; checkpoint_policy=interval needs a number")
        return tuple(sorted({*range(every, num_epochs + 1, every), num_epochs}))
    if training.checkpoint_policy == "explicit":
        epochs = tuple(sorted(set(training.checkpoint_epochs or ())))
        if not epochs or epochs[-1] > num_epochs:
            raise ConfigError(
                f"training.checkpoint_epochs={list(epochs)} must name at least one epoch and none beyond {num_epochs}, "
                f"the number of epochs of this run"
            )
        return epochs
    return ()
