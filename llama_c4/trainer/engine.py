"""What passes between the loop and its parts: the protocols of an engine and a probe, and the outcome of an update.

An engine is a final class that shares functions (loss, clipping, autocast) with the others and inherits nothing. Every
tensor of an outcome has the shape [] for one model and [N] for N workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from llama_c4.data.batch import Batch
from llama_c4.trainer.plan import Progress, Update

__all__ = ["Engine", "Probe", "Progress", "Record", "StepOutcome"]

Record = dict[str, Any]
"""Plain numbers and words, with a `kind`."""


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What one update measured; tensors stay on the device."""

    loss: Tensor
    """Sum of target losses / targets of the update, before the step; float64 [] or [N]."""
    grad_norm: Tensor
    """Norm of the whole update's mean gradient before clipping; float64 [] or [N]."""
    clipped: Tensor
    """Whether the gradient was scaled down; bool [] or [N]."""


class Engine(Protocol):
    """One way to train: micro-steps that add into a gradient, and one apply that uses it up."""

    def accumulate(self, batch: Batch, update: Update) -> None:
        """Add the gradient of one micro-batch of this update."""

    def apply(self, lr: float, update: Update) -> StepOutcome:
        """Check, clip, step and clear.

        Raises:
            TrainingError: the loss or the norm is not finite; parameters and optimizer are as before.
        """

    def evaluation_model(self) -> nn.Module:
        """The ordinary model whose loss is reported; between two updates, and not to be changed."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that training on needs, the accumulated gradient too when inside an update; live tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, or refuse it with CheckpointError."""


class Probe(Protocol):
    """An observation between two updates: weights in, a record out, nothing changed.

    It leaves weights, gradients, mode and random numbers bitwise as they were.
    """

    def due(self, update: Update) -> bool:
        """Whether to measure after this update."""

    def measure(self, engine: Engine, progress: Progress) -> Record:
        """Measure the model as it is now."""
