"""torch.compile for one shape; every other shape runs eagerly.

A compiled graph is good for one shape. Compiling each shortened batch as well costs tens of seconds a shape, and a
graph for many shapes is slower in the one that matters. So the full shape alone is compiled, and the number of
recompilations after warm-up is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llama_c4.config.errors import ConfigError

LossFunction = Callable[[Tensor, Tensor], Tensor]


def compile_for_shape(function: LossFunction, *, shape: tuple[int, ...], mode: str | None) -> LossFunction:
    """Compile a function of (tokens, targets) for one shape of tokens.

    The function is compiled, not the module it belongs to, so names in the state never gain a prefix.

    Args:
        function: (tokens, targets) → tensor, both [..., B, T].
        shape: The shape of tokens that gets the compiled function.
        mode: A mode of torch.compile; None compiles nothing.
    Returns:
        A function that chooses by the shape of its tokens.
    Raises:
        ConfigError: at the first call, where this machine cannot compile.
    """
    if mode is None:
        return function
    compiled = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
    full = torch.Size(shape)
    ready = False

    def dispatch(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal ready
        if tokens.shape != full:
            return function(tokens, targets)
        if ready:
            return compiled(tokens, targets)
        result = _first_call(compiled, tokens, targets)
        ready = True
        return result

    return dispatch


def _first_call(compiled: LossFunction, tokens: Tensor, targets: Tensor) -> Tensor:
    """The call that compiles: a missing compiler is the user's to put right."""
    try:
        return compiled(tokens, targets)
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"runtime.compile=true: torch.compile failed on this machine ({type(error).__name__}: {reason}); "
            "install a C++ compiler (CPU) or Triton (CUDA), or set runtime.compile=false"
        ) from error
