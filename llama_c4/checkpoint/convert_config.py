"""config.json of Hugging Face's Llama: written from our configuration, and read where ours can represent the model.

transformers 4 reads `rope_theta`, transformers 5 reads `rope_parameters`; both are written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llama_c4.config.errors import CheckpointError
from llama_c4.config.schema import LlamaConfig


def their_config(config: LlamaConfig, *, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The content of config.json, every field that changes a logit written out.

    Args:
        config: Ours.
        dtype: Of the weights, as torch spells it.
        eos_id: Id of the end token, which is the beginning token too; None where there is none.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "initializer_range": config.init_std,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def our_config(theirs: dict[str, Any], *, source: Path) -> LlamaConfig:
    """Our configuration of a model that config.json describes.

    Args:
        theirs: The content of config.json.
        source: The file, for messages.
    Raises:
        CheckpointError: the model has something that ours lacks (each named), or a size is missing or out of bounds.
    """
    rope = _rope(theirs)
    faults = _unrepresentable(theirs, rope)
    if faults:
        raise CheckpointError(f"{source}: this architecture cannot represent the model: {'; '.join(faults)}")
    try:
        values = {
            "name": "llama",
            "vocab_size": theirs["vocab_size"],
            "context_length": theirs.get("max_position_embeddings", 2048),
            "num_layers": theirs["num_hidden_layers"],
            "hidden_size": theirs["hidden_size"],
            "num_heads": theirs["num_attention_heads"],
            "intermediate_size": theirs["intermediate_size"],
            "rope_theta": float(rope.get("rope_theta", 10_000.0)),
            "norm_eps": float(theirs.get("rms_norm_eps", 1e-6)),
            "init_std": float(theirs.get("initializer_range", 0.02)),
        }
        return LlamaConfig(**values)
    except KeyError as error:
        raise CheckpointError(f"{source}: lacks {error.args[0]}") from error
    except (ValidationError, TypeError, ValueError) as error:
        details = error.errors()[0] if isinstance(error, ValidationError) else {"loc": ("",), "msg": str(error)}
        raise CheckpointError(f"{source}: model.{details['loc'][-1]}: {details['msg']}") from error


def _rope(theirs: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of either generation of the format in one dict."""
    old = {"rope_theta": theirs["rope_theta"]} if theirs.get("rope_theta") is not None else {}
    return {**old, **(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}


def _unrepresentable(theirs: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """What the model has that ours lacks; the defaults are those of the format."""
    heads, size = theirs.get("num_attention_heads", 1), theirs.get("hidden_size", 0)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    checks = (
        (theirs.get("model_type") == "llama", f"model_type is {theirs.get('model_type')!r}, not 'llama'"),
        (
            theirs.get("num_key_value_heads") in (None, heads),
            f"num_key_value_heads={theirs.get('num_key_value_heads')} is fewer than num_attention_heads={heads}",
        ),
        (
            theirs.get("head_dim") is None or theirs["head_dim"] * heads == size,
            f"head_dim={theirs.get('head_dim')} times {heads} heads is not hidden_size={size}",
        ),
        (size % (2 * heads) == 0, f"num_attention_heads={heads} does not divide hidden_size={size} into even heads"),
        (not theirs.get("attention_bias", False), "attention_bias=true: its projections have biases"),
        (not theirs.get("mlp_bias", False), "mlp_bias=true: its projections have biases"),
        (theirs.get("tie_word_embeddings", False), "tie_word_embeddings=false: its output head is a matrix of its own"),
        (theirs.get("hidden_act", "silu") in ("silu", "swish"), f"hidden_act={theirs.get('hidden_act')}, not silu"),
        (rope_type == "default", f"rope scaling of type {rope_type!r}"),
        (rope.get("partial_rotary_factor", 1.0) == 1.0, "rotation of a part of each head (partial_rotary_factor)"),
        (not theirs.get("attention_dropout"), f"attention_dropout={theirs.get('attention_dropout')}"),
        (not theirs.get("quantization_config"), "quantized weights (quantization_config)"),
    )
    return [fault for holds, fault in checks if not holds]
