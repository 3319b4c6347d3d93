"""Counts of a model before it exists: parameters, arithmetic, memory. No torch.

Letters: B micro-batch, T tokens, C hidden size, F intermediate size, L layers, H heads, V vocabulary, P parameters.
"""

from __future__ import annotations

from typing import Literal

from llama_c4.config.schema import LlamaConfig

CHUNK_ROWS = {"cpu": 512, "cuda": 8192}
"""Rows whose logits exist at once in the chunked loss, for each kind of device."""
LOGITS_THAT_FIT = 2**30
"""CUDA: bytes of whole float32 logits up to which the plain loss is taken."""
SAVED_BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 3.2}
"""Mean bytes of an activation kept for backward; under bfloat16 the residual stream stays float32."""


def num_parameters(config: LlamaConfig) -> int:
    """P = V·C + L·(4C² + 3·C·F + 2C) + C: the embedding, which is the output head too, counts once."""
    size, inner = config.hidden_size, config.intermediate_size
    layer = 4 * size**2 + 3 * size * inner + 2 * size
    return config.vocab_size * size + config.num_layers * layer + size


def num_non_embedding(config: LlamaConfig) -> int:
    """P without the embedding, as some papers count sizes."""
    return num_parameters(config) - config.vocab_size * config.hidden_size


def flops_per_target(config: LlamaConfig) -> int:
    """Floating-point operations of forward and backward for one target: 6P + 12·L·T·C.

    Two for a multiply and add, three products for each of the forward's. The second term is attention over all T
    positions, not the causal half, as is usual for utilization figures. 154 million for the 20m preset.
    """
    attention = 12 * config.num_layers * config.context_length * config.hidden_size
    return 6 * num_parameters(config) + attention


def choose_loss(
    *, device_type: str, micro_batch_size: int, context_length: int, vocab_size: int
) -> Literal["plain", "chunked"]:
    """The form of the cross-entropy that `runtime.loss=auto` stands for; docs/numerics.md has the measurement.

    CPU: chunked wherever there is more than one slice of rows: as fast as plain with an allocator that keeps pages, at
    half the peak memory of a 20m update. With one slice there is nothing to save: plain. Elsewhere: plain while the
    whole logits fit into 1 GiB; a rule about memory, the speed there is not measured.

    Args:
        device_type: cpu or cuda.
        micro_batch_size: B.
        context_length: T.
        vocab_size: V.
    """
    rows = micro_batch_size * context_length
    if device_type == "cpu":
        return "chunked" if rows > CHUNK_ROWS["cpu"] else "plain"
    return "chunked" if rows * vocab_size * 4 > LOGITS_THAT_FIT else "plain"


def estimate_memory_bytes(
    config: LlamaConfig,
    *,
    micro_batch_size: int,
    precision: Literal["float32", "bfloat16", "float64"],
    loss: Literal["plain", "chunked"],
    device_type: str = "cpu",
) -> int:
    """Tensors of training at their peak, without the interpreter and libraries; within a third of what is measured.

    Weights, gradients and two moments; what the layers keep for backward, (10C + 3F) values a token and layer with
    fused attention; and the logits: whole, their log-probabilities and gradient (plain), or one slice (chunked).

    Args:
        config: Sizes.
        micro_batch_size: B.
        precision: Of the run.
        loss: Form of the cross-entropy.
        device_type: cpu or cuda; decides the rows of a slice.
    """
    width = 8 if precision == "float64" else 4
    size, tokens = config.hidden_size, micro_batch_size * config.context_length
    states = 4 * width * num_parameters(config)
    kept = config.num_layers * (10 * size + 3 * config.intermediate_size) + 3 * size
    rows = tokens if loss == "plain" else min(tokens, CHUNK_ROWS[device_type])
    copies = 3 if loss == "plain" else 1
    if precision == "bfloat16":
        copies += 1  # the narrow logits, or their gradient
    return states + int(tokens * kept * SAVED_BYTES[precision]) + rows * config.vocab_size * width * copies
