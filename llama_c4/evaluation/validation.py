"""Validation of weights: the mean loss over blocks of a split, with nothing about the model or the process changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from llama_c4.config.errors import DataError, DivergedError
from llama_c4.data.batch import Batch
from llama_c4.data.blocks import read_blocks
from llama_c4.data.cache import TokenSplit
from llama_c4.evaluation.floor import check_entropy_floor
from llama_c4.runtime.compilation import LossFunction
from llama_c4.runtime.context import Runtime
from llama_c4.runtime.seeding import restore_rng_state, rng_state
from llama_c4.runtime.stop import Stopped

Batches = Callable[[int], Iterable[Batch]]
"""Batch size → the blocks to evaluate, from the start."""


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """Attributes:
    loss: Mean over all targets, nats per target.
    num_targets: Targets that counted.
    num_blocks: Blocks, a padded rest included.
    perplexity: exp(loss); infinity where that is beyond float64.
    bits_per_byte: See `bits_per_byte`; None where the source has no text.
    """

    loss: float
    num_targets: int
    num_blocks: int
    perplexity: float
    bits_per_byte: float | None


def choose_subset(num_full_blocks: int, *, subset_blocks: int, seed: int) -> np.ndarray:
    """Choose min(subset_blocks, num_full_blocks) different blocks by `default_rng(seed)`: ascending int64."""
    chosen = np.random.default_rng(seed).choice(num_full_blocks, min(subset_blocks, num_full_blocks), replace=False)
    return np.sort(chosen)


def evaluate_blocks(
    model: nn.Module,
    split: TokenSplit,
    indices: Sequence[int] | np.ndarray,
    *,
    context_length: int,
    batch_size: int,
    runtime: Runtime,
    loss_fn: LossFunction | None = None,
    entropy_floor: float | None = None,
    update: int | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> ValidationResult:
    """Evaluate blocks of a split; see `evaluate_batches` for the arithmetic and the errors.

    Args:
        model: Has `loss_sum(tokens, targets) -> []`, the sum of target losses.
        split: Where the tokens lie.
        indices: Blocks, in reading order; the index behind the last full one is the padded rest.
        context_length: L, targets of a block.
        batch_size: Blocks of one forward pass; the last may be smaller.
        runtime: Device and precision.
        loss_fn: Takes the place of `model.loss_sum` for full batches: a compiled form of it.
        entropy_floor: Nats per token of the source, if known.
        update: Named in errors.
    """

    def batches(size: int) -> Iterator[Batch]:
        for at in range(0, len(indices), size):
            yield read_blocks(split, indices[at : at + size], context_length=context_length, device=runtime.device)

    return evaluate_batches(
        model,
        split,
        batches,
        batch_size=batch_size,
        runtime=runtime,
        loss_fn=loss_fn,
        entropy_floor=entropy_floor,
        update=update,
        stop_requested=stop_requested,
    )


def evaluate_batches(
    model: nn.Module,
    split: TokenSplit,
    batches: Batches,
    *,
    batch_size: int,
    runtime: Runtime,
    loss_fn: LossFunction | None,
    entropy_floor: float | None,
    update: int | None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> ValidationResult:
    """Sum the losses of all targets in float64 and divide once by their number, whatever the batches.

    The device is asked for the sum once, at the end. Modes, random numbers, weights and gradients are left as they
    were, also when it is interrupted.

    Args:
        stop_requested: Asked before every batch.
    Raises:
        Stopped: A stop was requested.
        DataError: There is no block, or no target, to evaluate.
        TrainingError: The loss is not finite, or so far below the entropy floor that the model must have seen the
            answers (see `check_entropy_floor`).
    """
    with undisturbed(model), runtime.autocast():
        total = torch.zeros((), dtype=torch.float64, device=runtime.device)
        num_targets = num_blocks = 0
        for batch in batches(batch_size):
            if stop_requested():
                raise Stopped
            loss_of = loss_fn if loss_fn and len(batch.tokens) == batch_size else model.loss_sum
            total += loss_of(batch.tokens, batch.targets)  # type: ignore[operator]
            num_targets += batch.num_targets
            num_blocks += len(batch.tokens)
        if not num_targets:
            raise DataError(f"the {split.name} split has no block to evaluate ({split.num_tokens} tokens)")
        loss = float(total) / num_targets
        if not math.isfinite(loss):
            raise DivergedError(f"the {split.name} loss{_after(update)} is not finite ({loss:g})")
        if entropy_floor is not None and loss < entropy_floor:
            check_entropy_floor(model, batches(1), loss=loss, floor=entropy_floor, where=_after(update))
    return ValidationResult(
        loss=loss,
        num_targets=num_targets,
        num_blocks=num_blocks,
        perplexity=math.exp(loss) if loss < MAX_EXPONENT else math.inf,
        bits_per_byte=bits_per_byte(loss, split),
    )


MAX_EXPONENT = math.log(torch.finfo(torch.float64).max)


def bits_per_byte(loss: float, split: TokenSplit) -> float | None:
    """Bits of loss per byte of UTF-8 text: loss · n / (ln 2 · bytes), with n targets in `bytes` bytes.

    The bytes of a part are not known, only those of the split: n targets are taken to stand for n · text_bytes /
    num_tokens bytes, so n cancels: loss · num_tokens / (ln 2 · text_bytes). The EOS of every document counts as a token
    without bytes.

    Returns:
        None where the source has no text, or its bytes are not known.
    """
    if not split.text_bytes:
        return None
    return loss * split.num_tokens / (math.log(2) * split.text_bytes)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate inside: no gradients, evaluation mode; each module's mode and all random numbers are put back."""
    modes = [(module, module.training) for module in model.modules()]
    state = rng_state()
    try:
        model.eval()
        # Not inference mode: a table that a model caches during it could not take part in training afterwards.
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        restore_rng_state(state)


def _after(update: int | None) -> str:
    return "" if update is None else f" after update {update}"
