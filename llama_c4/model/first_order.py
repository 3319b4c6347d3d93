"""The refusal of second derivatives by hand-written gradients."""

from __future__ import annotations

import torch


def refuse_second_derivative(what: str) -> None:
    """To be called in a hand-written backward that autograd must not differentiate again.

    Autograd walks backward with gradients enabled only when a graph of it is asked for. torch's own
    `once_differentiable` is not enough: its error is raised only where the second walk meets that node, and a walk to
    chosen inputs goes around it and leaves the term out.

    Args:
        what: The operation, for the message.
    Raises:
        RuntimeError: a graph of the backward pass is asked for.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} has a first derivative only; for second derivatives build the model with attention=reference and "
            "loss=plain (runtime.attention, runtime.loss) and load the same weights"
        )
