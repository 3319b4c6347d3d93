"""A loss below the entropy of its source is a leak: no model can honestly predict better than the source itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from llama_c4.config.errors import TrainingError
from llama_c4.data.batch import IGNORED, Batch

STANDARD_ERRORS = 5
"""One honest evaluation in three million is this far below by chance."""
ROUNDING = 1e-6
"""Nats per target, for the arithmetic."""


def check_entropy_floor(model: nn.Module, batches: Iterable[Batch], *, loss: float, floor: float, where: str) -> None:
    """Raise TrainingError if a mean loss is below the floor by more than its statistical noise.

    A finite set can be easier than its source by chance. The noise is measured: with s the sample standard deviation
    of the losses of the n targets, the loss may lie below the floor by 5 s / sqrt(n) + 1e-6 nats. It takes a second
    pass over the blocks, which only a loss below the floor has to pay. One target alone has no measurable noise and
    passes.

    Args:
        model: Tokens → logits [B, T, V].
        batches: The blocks that the loss is the mean of; small batches, since logits are held whole.
        loss: Mean loss, nats per target.
        floor: Entropy rate of the source, nats per token.
        where: Put after "loss" in the message.
    """
    losses = torch.cat([_target_losses(model, batch) for batch in batches])
    if len(losses) < 2:
        return
    standard_error = float(losses.std()) / math.sqrt(len(losses))
    if floor - loss > STANDARD_ERRORS * standard_error + ROUNDING:
        raise TrainingError(
            f"the validation loss{where} is {loss:.6f} nats per target, below the entropy {floor:.6f} of the source by "
            f"more than {STANDARD_ERRORS} standard errors ({standard_error:.6f}): the model sees its answers; look for "
            "a leak (attention to later tokens, targets not shifted, validation text in the training data)"
        )


def _target_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Loss of every target that counts, float64 [n], on the CPU."""
    logits = model(batch.tokens).flatten(0, 1)  # [B, T, V] → [B·T, V]
    targets = batch.targets.flatten()
    losses = cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")
    return losses[targets != IGNORED].double().cpu()
