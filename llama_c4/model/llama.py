"""Llama: token embedding, pre-norm blocks with rotary attention and SwiGLU, final norm, tied output head.

Functions of this package act on leading axes [..., T, C]. Names in the state:
embedding.weight, layers.{i}.attention_norm.weight, layers.{i}.attention.{wq,wk,wv,wo}.weight,
layers.{i}.ffn_norm.weight, layers.{i}.ffn.{w_gate,w_up,w_down}.weight, norm.weight.

Letters: B micro-batch, T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_c4.config.schema import LlamaConfig
from llama_c4.model.forms import build_forms
from llama_c4.model.layers import Block, RMSNorm
from llama_c4.model.loss import LossForm, cross_entropy_sum
from llama_c4.model.products import linear
from llama_c4.model.rotary import RotaryTable
from llama_c4.runtime.seeding import generator

RESIDUAL_PROJECTIONS = ("attention.wo.weight", "ffn.w_down.weight")
"""Matrices whose output is added to the residual stream; initialized smaller by sqrt(2 num_layers)."""


class Llama(nn.Module):
    """The model; parameters are left uninitialized (see `build_model`).

    Args:
        config: Sizes and constants.
        attention: What `runtime.attention` may be: auto, flash, cudnn, efficient, math, reference.
        loss: Form of the cross-entropy of `loss_sum`.
        device: Of the parameters.
        dtype: Of the parameters, float32 or float64.
        products: What autocast will round operands to; a forced attention kernel is tried in it. None is `dtype`.
    Raises:
        ConfigError: a forced attention kernel that cannot run here.
        ValueError: parameters in half precision, or heads that do not divide the hidden size into even parts.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention: str,
        loss: LossForm,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        products: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        _check(config, dtype)
        self.config, self.loss_form = config, loss
        head_size = config.hidden_size // config.num_heads
        forms = build_forms(attention, device=device, dtype=products or dtype, head_size=head_size)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            Block(config, forms=forms, device=device, dtype=dtype) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, forms=forms, device=device, dtype=dtype)
        self.rotary = RotaryTable(
            length=config.context_length, head_size=head_size, theta=config.rope_theta, device=device, dtype=dtype
        )

    def hidden(self, tokens: Tensor) -> Tensor:
        """Normalized final hidden states: [..., T] → [..., T, C]."""
        table = self.rotary(tokens.shape[-1])
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, table)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits: [..., T] → [..., T, V]."""
        return linear(self.hidden(tokens), self.embedding.weight)

    def loss_sum(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross-entropy over the targets that are not -100, in float32 (float64 in float64 models).

        Args:
            tokens: [..., T].
            targets: [..., T].
        Returns:
            Scalar; 0 with zero gradients where no target counts.
        """
        return cross_entropy_sum(self.hidden(tokens), self.embedding.weight, targets, form=self.loss_form)


class Embedding(nn.Module):
    """Rows of a matrix [V, C], which is the output head as well."""

    def __init__(self, entries: int, size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, size, device=device, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., T] → [..., T, C]."""
        return F.embedding(tokens, self.weight)


def build_model(
    config: LlamaConfig,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    attention: str,
    loss: LossForm,
    products: torch.dtype | None = None,
) -> Llama:
    """Make a model with the initial weights of a seed; the global generators are not touched.

    Every matrix is normal with standard deviation init_std, the two residual projections of a layer with
    init_std / sqrt(2 num_layers); norm scales are 1. Weights are drawn in float32 on the CPU, one parameter after
    another, so all devices and dtypes start equal.

    Raises:
        ConfigError: a forced attention kernel that cannot run here.
        ValueError: as for `Llama`.
    """
    model = Llama(config, attention=attention, loss=loss, device=device, dtype=dtype, products=products)
    initialize(model, seed=seed)
    return model


@torch.no_grad()
def initialize(model: Llama, *, seed: int) -> None:
    """Set all parameters to the initial weights of a seed, in place."""
    random = generator(seed, "initial weights")
    config = model.config
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        shrink = math.sqrt(2 * config.num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else 1.0
        draw = torch.empty(parameter.shape, dtype=torch.float32).normal_(
            0.0, config.init_std / shrink, generator=random
        )
        parameter.copy_(draw)


def _check(config: LlamaConfig, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"parameters in {str(dtype).removeprefix('torch.')} lose small updates; they are float32 (or float64), "
            "and runtime.precision=bfloat16 computes their products in bfloat16"
        )
    if config.hidden_size % (2 * config.num_heads):
        raise ValueError(
            f"model.num_heads={config.num_heads} does not divide model.hidden_size={config.hidden_size} into even heads"
        )
