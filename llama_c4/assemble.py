"""From configuration to parts: the wiring that training, evaluation and benchmarks share."""

from __future__ import annotations

from pathlib import Path

import torch

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import RunConfig
from llama_c4.data.cache import TokenCache
from llama_c4.data.cache_match import check_cache
from llama_c4.model.accounting import choose_loss, estimate_memory_bytes, num_parameters
from llama_c4.model.llama import Llama, build_model
from llama_c4.model.loss import LossForm
from llama_c4.optim.build import build_optimizer
from llama_c4.runtime.context import Runtime
from llama_c4.runtime.memory import total_memory_bytes
from llama_c4.trainer.plan import TrainingPlan, build_plan
from llama_c4.trainer.sync import SyncEngine


def plan_of(config: RunConfig) -> TrainingPlan:
    """Every update of the run. Raises ConfigError where budget, epochs and batch do not fit."""
    return build_plan(
        config.training,
        num_parameters=num_parameters(config.model),
        context_length=config.model.context_length,
    )


def cache_of(config: RunConfig) -> TokenCache:
    """The prepared cache, checked to be the one that the configuration describes.

    Raises:
        DataError: It is missing, incomplete, damaged, or of another source, tokenizer or vocabulary.
    """
    cache = TokenCache.open(Path(config.data.cache_dir))
    check_cache(cache, config.data, vocab_size=config.model.vocab_size)
    return cache


def model_of(config: RunConfig, runtime: Runtime) -> Llama:
    """The model with the initial weights of the run's seed. Raises ConfigError for attention that cannot run here."""
    return build_model(
        config.model,
        seed=config.runtime.seed,
        device=runtime.device,
        dtype=runtime.param_dtype,
        attention=attention_of(config),
        loss=loss_form_of(config, runtime),
        products=torch.bfloat16 if runtime.precision == "bfloat16" else None,
    )


def attention_of(config: RunConfig) -> str:
    """`auto` is the reference path in a deterministic run: not every fused kernel has a deterministic backward."""
    is_open = config.runtime.attention == "auto"
    return "reference" if is_open and config.runtime.deterministic else config.runtime.attention


def loss_form_of(config: RunConfig, runtime: Runtime) -> LossForm:
    """The form of the cross-entropy, chosen by measurement where the configuration leaves it open."""
    if config.runtime.loss != "auto":
        return config.runtime.loss
    return choose_loss(
        device_type=runtime.device.type,
        micro_batch_size=config.training.micro_batch_size,
        context_length=config.model.context_length,
        vocab_size=config.model.vocab_size,
    )


def engine_of(config: RunConfig, runtime: Runtime) -> SyncEngine:
    """Model, optimizer and engine, before the first update."""
    model = model_of(config, runtime)
    return SyncEngine(
        model,
        build_optimizer(config.optim, model, kernel=runtime.optimizer_kernel),
        runtime,
        grad_clip=config.optim.grad_clip,
        micro_batch_shape=(config.training.micro_batch_size, config.model.context_length),
    )


def check_memory(config: RunConfig, runtime: Runtime) -> None:
    """Refuse a micro-batch that cannot fit, before anything is built.

    Raises:
        ConfigError: The estimate is beyond the memory of the device.
    """
    available = total_memory_bytes(runtime.device)
    needed = _estimate(config, runtime, config.training.micro_batch_size)
    if available is None or needed <= available:
        return
    fitting = next((b for b in (64, 32, 16, 8, 4, 2, 1) if _estimate(config, runtime, b) <= 0.8 * available), None)
    way_out = "choose a smaller model" if fitting is None else f"set training.micro_batch_size={fitting}"
    if runtime.device.type == "cpu" and fitting is not None:
        way_out += " (runtime=cpu sets 4, the fastest on most CPUs)"
    raise ConfigError(
        f"training.micro_batch_size={config.training.micro_batch_size} needs about {needed / 2**30:.1f} GiB on "
        f"{runtime.device.type}, which has {available / 2**30:.1f} GiB; {way_out}"
    )


def _estimate(config: RunConfig, runtime: Runtime, micro_batch_size: int) -> int:
    return estimate_memory_bytes(
        config.model,
        micro_batch_size=micro_batch_size,
        precision=runtime.precision,
        loss=loss_form_of(config, runtime),
        device_type=runtime.device.type,
    )
