"""What a run is validated on: the fixed subset, read once and kept, and the whole split."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import nn

from llama_c4.config.errors import DataError
from llama_c4.config.schema import EvaluationConfig
from llama_c4.data.blocks import KeptBlocks, num_blocks_with_rest
from llama_c4.data.cache import TokenCache
from llama_c4.evaluation.validation import ValidationResult, choose_subset, evaluate_batches, evaluate_blocks
from llama_c4.runtime.compilation import LossFunction, compile_for_shape
from llama_c4.runtime.context import Runtime


@final
class Validator:
    """Validates weights on one cache.

    The subset is min(subset_blocks, full blocks) whole blocks, chosen once (see `choose_subset`), read in one ascending
    scan at its first use and kept as uint16. The whole split is read in order at every use, its padded rest included.
    Where the runtime compiles, batches of the full size run compiled, all others eagerly.

    Args:
        cache: Its validation split is read, its entropy floor checked against.
        config: Subset and batch size.
        context_length: L, targets of a block.
        runtime: Device, precision, compilation.
        stop_requested: Asked before every batch; where it says yes, Stopped is raised.
    Raises:
        DataError: The split has not one whole block.
    """

    def __init__(
        self,
        cache: TokenCache,
        config: EvaluationConfig,
        *,
        context_length: int,
        runtime: Runtime,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        split = cache.validation
        full_blocks = split.num_blocks(context_length)
        if not full_blocks:
            raise DataError(
                f"{cache.path}: its validation split has {split.num_tokens} tokens, less than one block of "
                f"model.context_length={context_length} and a token; prepare more data.validation_tokens"
            )
        self._cache, self._config, self._context_length, self._runtime = cache, config, context_length, runtime
        self.subset_indices = choose_subset(full_blocks, subset_blocks=config.subset_blocks, seed=config.subset_seed)
        self._stop_requested = stop_requested
        self._kept: KeptBlocks | None = None
        self._compiled: tuple[nn.Module, LossFunction] | None = None

    def subset(self, model: nn.Module, *, update: int | None = None) -> ValidationResult:
        """Evaluate the subset; errors as in `evaluate_batches`, naming the update."""
        if self._kept is None:
            self._kept = KeptBlocks(self._cache.validation, self.subset_indices, context_length=self._context_length)
        kept = self._kept
        return evaluate_batches(
            model,
            self._cache.validation,
            lambda size: kept.batches(size, device=self._runtime.device),
            batch_size=self._config.batch_size,
            runtime=self._runtime,
            loss_fn=self._loss_of(model),
            entropy_floor=self._cache.entropy_floor,
            update=update,
            stop_requested=self._stop_requested,
        )

    def full(self, model: nn.Module, *, update: int | None = None) -> ValidationResult:
        """Evaluate the whole split in order; errors as in `evaluate_batches`, naming the update."""
        split = self._cache.validation
        return evaluate_blocks(
            model,
            split,
            range(num_blocks_with_rest(split, self._context_length)),
            context_length=self._context_length,
            batch_size=self._config.batch_size,
            runtime=self._runtime,
            loss_fn=self._loss_of(model),
            entropy_floor=self._cache.entropy_floor,
            update=update,
            stop_requested=self._stop_requested,
        )

    def _loss_of(self, model: nn.Module) -> LossFunction:
        """The model's loss, compiled for full batches; made once, as long as it is the same model."""
        if self._compiled is None or self._compiled[0] is not model:
            shape = (self._config.batch_size, self._context_length)
            loss_sum: LossFunction = model.loss_sum  # type: ignore[assignment]
            self._compiled = model, compile_for_shape(loss_sum, shape=shape, mode=self._runtime.compile_mode)
        return self._compiled[1]
