"""A tiny model with the interface that validation needs, and the runtime to evaluate it in."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llama_c4.runtime.context import Precision, Runtime
from tests.data.small_cache import VOCAB_SIZE


class TinyModel(nn.Module):
    """Logits of the next token from this token alone; dropout, so that training mode would show in the loss."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(vocab_size, 8, dtype=dtype)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, vocab_size, dtype=dtype)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(self.embedding(tokens)))  # [B, T, V]

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self(tokens).flatten(0, 1)
        return cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)


def runtime(precision: Precision = "float32", *, compile_mode: str | None = None) -> Runtime:
    return Runtime(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        precision=precision,
        deterministic=False,
        threads=1,
        compile_mode=compile_mode,
        optimizer_kernel="auto",
        allocator="default",
        run_dir=Path("unused"),
    )
