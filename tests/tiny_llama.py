"""The real model at the smallest shape, and its training without a checkpoint or a log."""

from __future__ import annotations

from typing import Any

import torch

from llama_c4.config.schema import LlamaConfig
from llama_c4.model.llama import Llama, build_model
from llama_c4.model.loss import LossForm
from llama_c4.optim.build import build_optimizer
from llama_c4.trainer.engine import StepOutcome
from llama_c4.trainer.plan import Progress, TrainingPlan, Update
from llama_c4.trainer.sync import SyncEngine
from tests.tiny_training import TinyStream, tiny_runtime


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 17, "context_length": 4, "num_layers": 1, "hidden_size": 8, "num_heads": 2,
        "intermediate_size": 16, "rope_theta": 10_000.0, "norm_eps": 1e-5, "init_std": 0.2,
    }  # fmt: skip
    return LlamaConfig(name="llama", **(values | changes))


def tiny_llama(*, dtype: torch.dtype = torch.float64, loss: LossForm = "plain", attention: str = "reference") -> Llama:
    return build_model(llama_config(), seed=42, device="cpu", dtype=dtype, attention=attention, loss=loss)


def llama_engine(
    model: Llama, optim: Any, *, kernel: str = "plain", micro_batch_size: int = 2, **runtime: Any
) -> SyncEngine:
    return SyncEngine(
        model,
        build_optimizer(optim, model, kernel=kernel),
        tiny_runtime(**runtime),
        grad_clip=optim.grad_clip,
        micro_batch_shape=(micro_batch_size, model.config.context_length),
    )


def accumulate(engine: SyncEngine, update: Update, *, split: int, stream: TinyStream) -> None:
    """The micro-steps of one update, `split` blocks each."""
    for first in range(update.first_block, update.end_block, split):
        engine.accumulate(stream.batch(first, min(split, update.end_block - first)), update)


def run_plan(
    engine: SyncEngine, plan: TrainingPlan, *, split: int = 2, lr: float = 0.01, ignored: float = 0.0
) -> list[StepOutcome]:
    """All updates of a plan at a linearly falling learning rate."""
    outcomes, stream = [], TinyStream(ignored=ignored)
    for update in plan.remaining(Progress()):
        accumulate(engine, update, split=split, stream=stream)
        outcomes.append(engine.apply(lr * (1 - update.index / plan.num_updates), update))
    return outcomes
