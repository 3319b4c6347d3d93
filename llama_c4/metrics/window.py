"""Sums over the updates of one training record. They stay on the device until the record is due."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor


class Outcome(Protocol):
    """What an update measured, scalar tensors on the device."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def grad_norm(self) -> Tensor: ...

    @property
    def clipped(self) -> Tensor: ...


@final
class Window:
    """Losses weighted by their targets, and how many gradients were clipped, since the last record.

    Attributes:
        updates: Updates in the window.
        targets: Their prediction targets.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.targets = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._clipped = torch.zeros((), dtype=torch.int64)

    def add(self, outcome: Outcome, *, targets: int) -> None:
        """Add an update; the host does not wait for the device."""
        loss = outcome.loss.detach()
        self._loss_sum = self._loss_sum.to(loss.device) + loss.double() * targets
        self._clipped = self._clipped.to(loss.device) + outcome.clipped
        self.updates += 1
        self.targets += targets

    def fetch(self, outcome: Outcome) -> tuple[float, float, int]:
        """Bring the sums to the host, all at once.

        Args:
            outcome: The window's last update.
        Returns:
            Mean loss over the window's targets, gradient norm of the last update, number of clipped updates.
        """
        numbers = torch.stack((self._loss_sum, outcome.grad_norm.detach().double(), self._clipped.double())).tolist()
        return numbers[0] / self.targets, numbers[1], int(numbers[2])

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint."""
        return {
            "updates": self.updates,
            "targets": self.targets,
            "loss_sum": self._loss_sum,
            "clipped": self._clipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.updates, self.targets = state["updates"], state["targets"]
        self._loss_sum, self._clipped = state["loss_sum"], state["clipped"]
