"""The smallest training run there is, for tests: model, stream, plan and engine in a few lines each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from llama_c4.config.schema import AccumAdamWConfig, AdamWConfig
from llama_c4.data.batch import IGNORED, Batch
from llama_c4.optim.build import build_optimizer
from llama_c4.runtime.context import Runtime
from llama_c4.trainer.plan import TrainingPlan, build_plan
from llama_c4.trainer.sync import SyncEngine

V, C, T = 17, 8, 4  # vocabulary, width, context


class TinyModel(nn.Module):
    """Tied embedding, a norm scale, one residual layer: every kind of parameter of the real model."""

    def __init__(self, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(V, C, generator=random, dtype=dtype) * 0.3)
        self.layer = nn.Parameter(torch.randn(C, C, generator=random, dtype=dtype) * 0.3)
        self.norm = nn.Parameter(torch.ones(C, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        x = x + torch.tanh(x @ self.layer)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.norm
        return x @ self.embedding.T  # [B, T, V]

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self(tokens).flatten(0, -2)
        return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


class TinyStream:
    """Random blocks, each a function of its position; `ignored` in [0, 1] is the share of labels that do not count."""

    def __init__(self, *, ignored: float = 0.0) -> None:
        self.ignored = ignored
        self.asked: list[tuple[int, int]] = []

    def batch(self, first: int, count: int) -> Batch:
        self.asked.append((first, count))
        rows = torch.stack([self._block(i) for i in range(first, first + count)])
        tokens, targets = rows[:, 0].contiguous(), rows[:, 1].contiguous()
        return Batch(tokens, targets, int((targets != IGNORED).sum()))

    def _block(self, index: int) -> Tensor:
        random = torch.Generator().manual_seed(1000 + index)
        text = torch.randint(0, V, (T + 1,), generator=random)
        targets = torch.where(torch.rand(T, generator=random) < self.ignored, IGNORED, text[1:])
        return torch.stack((text[:-1], targets))


def tiny_runtime(**changes: Any) -> Runtime:
    runtime = Runtime(
        rank=0, world_size=1, device=torch.device("cpu"), precision="float64", deterministic=False, threads=1,
        compile_mode=None, optimizer_kernel="auto", allocator="default", run_dir=Path("unused"),
    )  # fmt: skip
    return replace(runtime, **changes)


def adamw(**changes: Any) -> AdamWConfig:
    values = {"lr": 0.01, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}
    return AdamWConfig(name="adamw", **(values | changes))


def accum_adamw(**changes: Any) -> AccumAdamWConfig:
    values = {"lr": 0.01, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0, "window": 3}
    return AccumAdamWConfig(name="accum_adamw", **(values | changes))


def tiny_engine(
    *,
    model: nn.Module | None = None,
    optim: Any = None,
    kernel: str = "plain",
    micro_batch_size: int = 2,
    **runtime: Any,
) -> SyncEngine:
    model, optim = model or TinyModel(), optim or adamw()
    optimizer = build_optimizer(optim, model, kernel=kernel)
    return SyncEngine(
        model,
        optimizer,
        tiny_runtime(**runtime),
        grad_clip=optim.grad_clip,
        micro_batch_shape=(micro_batch_size, T),
    )


def training(**changes: Any) -> SimpleNamespace:
    """What `build_plan` reads of a TrainingConfig; no budget until one is given."""
    values = {
        "tokens_per_parameter": None,
        "total_tokens": None,
        "epoch_tokens_per_parameter": None,
        "epoch_tokens": None,
        "epoch_boundary": "exact",
        "batch_tokens": 16,
    }
    return SimpleNamespace(**(values | changes))


def tiny_plan(*, total_tokens: int = 80, epoch_tokens: int = 40, batch_tokens: int = 16) -> TrainingPlan:
    """Five updates in two epochs by default: 4, 4 and 2 blocks, twice."""
    config = training(total_tokens=total_tokens, epoch_tokens=epoch_tokens, batch_tokens=batch_tokens)
    return build_plan(config, num_parameters=1, context_length=T)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def bitwise_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Nested mappings of tensors and values, equal in every bit."""
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Mapping):
        return isinstance(y, Mapping) and bitwise_equal(x, y)
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    return bool(x == y)
