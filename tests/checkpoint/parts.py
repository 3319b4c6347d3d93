"""A run in miniature for the tests of states: parts that can be saved, a header, a training branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llama_c4.checkpoint.header import StateHeader
from llama_c4.checkpoint.store import CheckpointStore
from llama_c4.config.schema import RescueConfig, TrainingConfig
from llama_c4.trainer.plan import Progress, Update

HEADER = StateHeader(
    recipe_identity="ab" * 32,
    recipe={"optim.lr": 0.001, "training.total_tokens": 1000, "data.loader": "v2", "model.vocab_size": 64},
    machine={"runtime.threads": 2},
    config="optim:\n  lr: 0.001\n",
    cache_identity="cache-a",
    loader="v2, groups of 2 shards",
    precision="float32",
    total_targets=1000,
    code_version="0.1.0",
)


def training(**changes: Any) -> TrainingConfig:
    """The training branch of a small run, with changes."""
    fields: dict[str, Any] = {
        "tokens_per_parameter": None,
        "total_tokens": 1000,
        "epoch_tokens_per_parameter": None,
        "epoch_tokens": 250,
        "epoch_boundary": "exact",
        "batch_tokens": 50,
        "micro_batch_size": 5,
        "checkpoint_policy": "final",
        "checkpoint_every_epochs": None,
        "checkpoint_epochs": None,
        "rescue": RescueConfig(every_minutes=10.0),
        "extend": False,
        "stop_after_minutes": None,
    }
    return TrainingConfig(**(fields | changes))


def header(**changes: Any) -> StateHeader:
    """The header of the small run, with changes; `recipe` and `machine` are merged."""
    for name in ("recipe", "machine"):
        if name in changes:
            changes[name] = {**getattr(HEADER, name), **changes[name]}
    return replace(HEADER, **changes)


class Weights:
    """A part that holds tensors."""

    def __init__(self, value: float = 0.0, size: int = 8) -> None:
        self.tensors = {"w": torch.full((size,), value), "step": torch.tensor(0)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = dict(state)


class MiniRun:
    """A store with its parts and a progress of 20 updates in 4 epochs of 5, one sequence an update."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = lambda: 0.0, **changes: Any) -> None:
        run_dir.mkdir(exist_ok=True)
        self.dir = run_dir
        self.progress = Progress()
        self.weights = Weights()
        self.messages: list[str] = []
        of_store = {name: changes.pop(name) for name in ("cache_ancestors", "refuse_extension") if name in changes}
        self.store = CheckpointStore(
            run_dir,
            training=changes.pop("training", training()),
            num_epochs=4,
            header=changes.pop("header", HEADER),
            parts={"engine": self.weights, "progress": self.progress} | changes.pop("parts", {}),
            weights=lambda: {"embedding.weight": self.weights.tensors["w"]},
            message=self.messages.append,
            clock=clock,
            **of_store,
        )

    def train_to(self, update: int) -> None:
        """Finish updates; after each the weights hold its number."""
        while self.progress.update < update:
            index = self.progress.update
            step = Update(index, index, 1, epoch=index // 5 + 1, ends_epoch=index % 5 == 4, context_length=50)
            self.progress.finish(step)
            self.weights.tensors = {"w": torch.full((8,), float(step.number)), "step": torch.tensor(step.number)}
            self.store.save_if_due(self.progress, step)

    @property
    def value(self) -> float:
        return self.weights.tensors["w"][0].item()


def files_of(folder: Path) -> set[str]:
    """Relative paths of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
