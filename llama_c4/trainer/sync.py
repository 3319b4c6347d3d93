"""The synchronous engine: one model, gradients of micro-batches summed, one clipped optimizer step.

Gradients are accumulated as plain sums over targets and divided once, in the pass that clips them, by the number of
targets that really counted. So an update depends neither on how its sequences are split into micro-batches nor on how
ignored targets are spread over them.

With several ranks the all-reduce of gradients, loss sum and target count belongs in front of the check in `apply`, once
an update; the count and the finite check are then the same on every rank. A worker axis gets an engine of its own.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor, nn

from llama_c4.config.errors import CheckpointError, DivergedError, TrainingError
from llama_c4.data.batch import Batch
from llama_c4.optim.build import set_lr
from llama_c4.optim.clipping import CLIP_EPS, clip_scale, gradient_norm
from llama_c4.optim.state import load_optimizer_state, optimizer_state
from llama_c4.runtime.compilation import LossFunction, compile_for_shape
from llama_c4.runtime.context import Runtime
from llama_c4.trainer.engine import StepOutcome
from llama_c4.trainer.plan import Update

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile whose outputs lie in memory that the next replay overwrites: gradients add up outside it."""


@final
class SyncEngine:
    """Trains one model; implements `Engine`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        *,
        grad_clip: float | None,
        micro_batch_shape: tuple[int, int],
    ) -> None:
        """
        Args:
            model: Has `loss_sum(tokens, targets) -> []`, the sum of target losses.
            optimizer: Over the model's parameters.
            runtime: Device, precision, compilation.
            grad_clip: Largest gradient norm of an update; None measures it and clips nothing.
            micro_batch_shape: [B, T] of a full micro-batch, the one shape that is compiled where the runtime compiles.
        """
        self._model, self._optimizer, self._runtime = model, optimizer, runtime
        self._grad_clip = grad_clip
        loss_sum: LossFunction = model.loss_sum  # type: ignore[assignment]
        self._loss_of = compile_for_shape(loss_sum, shape=micro_batch_shape, mode=runtime.compile_mode)
        self._clear()

    def accumulate(self, batch: Batch, update: Update) -> None:
        """Add the gradient of the sum of this micro-batch's target losses."""
        with self._runtime.autocast():
            loss_sum = self._loss_of(batch.tokens, batch.targets)
        loss_sum.backward()
        self._loss_sum += loss_sum.detach()
        self._num_targets += batch.num_targets

    def apply(self, lr: float, update: Update) -> StepOutcome:
        """Divide by the update's targets, check, clip, step, clear.

        With G the summed gradient over n targets and norm = |G|/n, the optimizer sees G/n · min(1, c/(norm + 1e-6)).

        Raises:
            TrainingError: loss or norm are not finite, or no target counted; parameters and optimizer are as before.
        """
        if self._num_targets == 0:
            raise TrainingError(f"update {update.number} has no target that counts: every label is ignored")
        gradients = self._gradients()
        loss = self._loss_sum / self._num_targets
        norm = gradient_norm(gradients) / self._num_targets
        loss_value, norm_value = torch.stack((loss, norm)).tolist()  # the one host sync of an update
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise DivergedError(_not_finite(update, loss_value, norm_value, lr))
        torch._foreach_mul_(gradients, clip_scale(norm_value, self._grad_clip) / self._num_targets)
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._clear()
        return StepOutcome(loss=loss, grad_norm=norm, clipped=_clipped(norm, self._grad_clip))

    def evaluation_model(self) -> nn.Module:
        """The trained model itself."""
        return self._model

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer; inside an update also the summed gradients, the loss sum and the target count."""
        accumulated = None
        if self._num_targets:
            gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
            accumulated = {"gradients": gradients, "loss_sum": self._loss_sum, "num_targets": self._num_targets}
        return {
            "model": self._model.state_dict(),
            "optimizer": optimizer_state(self._optimizer, self._model),
            "accumulated": accumulated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; names, shapes and dtypes must be those of this model, and tensors are copied.

        Raises:
            CheckpointError: something is missing, unknown or of another shape. The model is unchanged then.
        """
        accumulated = state["accumulated"]
        _check_tensors("model", state["model"], self._model.state_dict())
        if accumulated is not None:
            _check_tensors("accumulated gradient", accumulated["gradients"], dict(self._model.named_parameters()))
        load_optimizer_state(self._optimizer, self._model, state["optimizer"])
        self._model.load_state_dict(state["model"], strict=True)
        self._clear()
        if accumulated is not None:
            for name, p in self._model.named_parameters():
                p.grad = torch.empty_like(p).copy_(accumulated["gradients"][name])
            self._loss_sum.copy_(accumulated["loss_sum"])
            self._num_targets = accumulated["num_targets"]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def _clear(self) -> None:
        """Start a new update. Gradients are let go: the first micro-step hands its own over instead of adding to 0."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._runtime.compile_mode in CUDA_GRAPH_MODES:
            for p in self._model.parameters():
                p.grad = torch.zeros_like(p)
        # float64: sums of thousands of float32 losses keep their digits.
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._runtime.device)
        self._num_targets = 0


def _clipped(norm: Tensor, grad_clip: float | None) -> Tensor:
    return torch.zeros_like(norm, dtype=torch.bool) if grad_clip is None else norm + CLIP_EPS > grad_clip


def _not_finite(update: Update, loss: float, norm: float, lr: float) -> str:
    what = "loss" if not math.isfinite(loss) else "gradient norm"
    return (
        f"the {what} of update {update.number} is not finite (worker 0, loss {loss:g}, gradient norm {norm:g}, "
        f"lr {lr:g}); the parameters are those after update {update.index}. A smaller optim.lr, a longer warm-up or "
        "runtime.precision=float32 may help"
    )


def _check_tensors(what: str, saved: dict[str, Tensor], live: dict[str, Tensor]) -> None:
    """Same names, shapes and dtypes."""
    if odd := sorted(saved.keys() ^ live.keys()):
        raise CheckpointError(f"{what} of the checkpoint: odd or missing tensors {', '.join(odd)}")
    for name, tensor in saved.items():
        found, wanted = (tuple(tensor.shape), tensor.dtype), (tuple(live[name].shape), live[name].dtype)
        if found != wanted:
            raise CheckpointError(f"{what} of the checkpoint: {name} is {found}, this model's is {wanted}")
