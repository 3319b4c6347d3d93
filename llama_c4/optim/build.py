"""From configuration to optimizer: the table, and the choice of a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from llama_c4.config.errors import ConfigError
from llama_c4.config.schema import AccumAdamWConfig, AdamWConfig, OptimConfig
from llama_c4.optim.accum_adamw import AccumAdamW
from llama_c4.optim.param_groups import param_groups


def build_optimizer(optim: OptimConfig, model: nn.Module, *, kernel: str) -> torch.optim.Optimizer:
    """Make the optimizer over a decayed and an undecayed group of the model's parameters.

    Args:
        optim: Hyperparameters; the learning rate in the groups is the peak until `set_lr` changes it.
        model: Parameters in float32 or float64. In bfloat16 an update smaller than half an ulp would be lost: refused.
        kernel: `auto` (the fastest that there is), `fused`, `foreach` or `plain`.
    Raises:
        ConfigError: the kernel does not exist for this optimizer, or the parameters are rounded too coarsely.
    """
    for name, p in model.named_parameters():
        if p.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"parameter {name} is {p.dtype}: small updates would be lost; keep parameters in float32 and "
                "set runtime.precision=bfloat16 for bfloat16 arithmetic"
            )
    return OPTIMIZERS[type(optim)](optim, model, kernel)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group; a plain float, read anew by each step, so nothing is compiled again."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def build_adamw(optim: AdamWConfig, model: nn.Module, kernel: str) -> torch.optim.Optimizer:
    """torch's AdamW. Its fused kernel passes over parameters, gradients and moments once; it exists on CPU and CUDA."""
    kernel = "fused" if kernel == "auto" else kernel
    return torch.optim.AdamW(
        param_groups(model, weight_decay=optim.weight_decay),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=kernel == "fused",
        foreach=kernel == "foreach",
    )


def build_accum_adamw(optim: AccumAdamWConfig, model: nn.Module, kernel: str) -> torch.optim.Optimizer:
    """Lists of tensors on CUDA, where launches cost; one tensor at a time on CPU, where temporaries do."""
    if kernel == "fused":
        raise ConfigError("runtime.optimizer_kernel=fused: optim=accum_adamw has none; set auto, foreach or plain")
    on_cuda = any(p.is_cuda for p in model.parameters())
    return AccumAdamW(
        param_groups(model, weight_decay=optim.weight_decay),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        window=optim.window,
        foreach=kernel == "foreach" or (kernel == "auto" and on_cuda),
    )


OPTIMIZERS: dict[type, Callable[..., torch.optim.Optimizer]] = {
    AdamWConfig: build_adamw,
    AccumAdamWConfig: build_accum_adamw,
}
