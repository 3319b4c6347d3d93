"""Weights to and from the folder format of Hugging Face's Llama, without importing transformers.

Both sides use the half-split rotary layout, so every matrix is copied as it is and comes back bit for bit. A folder
holds config.json, model.safetensors (or shards with an index), generation_config.json and, when given, the tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llama_c4.checkpoint.atomic import new_folder, sync_file
from llama_c4.checkpoint.convert_config import our_config, their_config
from llama_c4.config.errors import CheckpointError
from llama_c4.config.schema import LlamaConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING_NAME = {"embedding.weight": "model.embed_tokens.weight"}
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.w_gate.weight": "mlp.gate_proj.weight",
    "ffn.w_up.weight": "mlp.up_proj.weight",
    "ffn.w_down.weight": "mlp.down_proj.weight",
}
NORM_NAME = {"norm.weight": "model.norm.weight"}
HEAD = "lm_head.weight"


def export_hugging_face(
    state: Mapping[str, Tensor],
    config: LlamaConfig,
    folder: Path,
    *,
    tokenizer_json: Path | None = None,
    eos_token: str | None = None,
    eos_id: int | None = None,
) -> None:
    """Write a folder that `LlamaForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` read.

    The folder appears whole or not at all. A document begins after the end token of the one before it, so that token
    is the beginning token as well.

    Args:
        state: Weights by our names, of one ordinary model.
        config: Its sizes.
        folder: To be made.
        tokenizer_json: Tokenizer to put beside the weights.
        eos_token: Its end token.
        eos_id: Id of the end token.
    Raises:
        CheckpointError: the folder exists, cannot be written, or the state is not that of the configuration.
    """
    names = _names(config)
    _check_state(state, config, names, source="the state to export")
    dtype = str(state["embedding.weight"].dtype).removeprefix("torch.")
    tensors = {theirs: state[ours].detach().cpu().contiguous() for ours, theirs in names.items()}
    try:
        with new_folder(Path(folder)) as side:
            save_file(tensors, side / WEIGHTS, metadata={"format": "pt"})
            _write_json(side / "config.json", their_config(config, dtype=dtype, eos_id=eos_id))
            generation = {"bos_token_id": eos_id, "eos_token_id": eos_id, "max_length": config.context_length}
            _write_json(side / "generation_config.json", generation)
            if tokenizer_json is not None:
                shutil.copyfile(tokenizer_json, side / "tokenizer.json")
                _write_json(side / "tokenizer_config.json", _tokenizer_config(config, eos_token))
            for file in side.iterdir():
                sync_file(file)
    except FileExistsError as error:
        raise CheckpointError(f"{folder}: exists already and is not overwritten; choose another folder") from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{folder}: cannot be written ({reason})") from error


def import_hugging_face(folder: Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Read the weights of a Hugging Face Llama that this architecture can represent.

    Args:
        folder: With config.json and safetensors.
    Returns:
        Configuration, and weights by our names; half-precision weights are widened to float32, others keep their dtype.
    Raises:
        CheckpointError: files are missing or damaged, or the model has something that ours lacks (named).
    """
    folder = Path(folder)
    source = folder / "config.json"
    theirs = _read_json(source)
    config = our_config(theirs, source=source)
    tensors = _read_tensors(folder)
    head = tensors.pop(HEAD, None)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    names = _names(config)
    unknown = sorted(set(tensors) - set(names.values()))
    if unknown:
        raise CheckpointError(f"{folder}: has tensors that this architecture lacks: {', '.join(unknown[:4])}")
    state = {ours: tensors[name] for ours, name in names.items() if name in tensors}
    _check_state(state, config, names, source=str(folder))
    if head is not None and not torch.equal(head, state["embedding.weight"]):
        raise CheckpointError(f"{folder}: {HEAD} differs from the embedding; this architecture has one for both")
    return config, {name: _widen(tensor) for name, tensor in state.items()}


def _names(config: LlamaConfig) -> dict[str, str]:
    """Our name of every tensor → theirs, in the order of our state."""
    layers = {
        f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}"
        for i in range(config.num_layers)
        for ours, theirs in LAYER_NAMES.items()
    }
    return {**EMBEDDING_NAME, **layers, **NORM_NAME}


def _shape(name: str, config: LlamaConfig) -> tuple[int, ...]:
    size, inner = config.hidden_size, config.intermediate_size
    if name.endswith("norm.weight"):
        return (size,)
    if name == "embedding.weight":
        return (config.vocab_size, size)
    if name.endswith(("w_gate.weight", "w_up.weight")):
        return (inner, size)
    return (size, inner) if name.endswith("w_down.weight") else (size, size)


def _check_state(state: Mapping[str, Tensor], config: LlamaConfig, names: dict[str, str], *, source: str) -> None:
    missing, surplus = sorted(set(names) - set(state)), sorted(set(state) - set(names))
    if missing or surplus:
        faults = [f"lacks {name} ({names[name]})" for name in missing[:3]] + [f"has {name}" for name in surplus[:3]]
        raise CheckpointError(f"{source}: {len(missing)} tensors missing, {len(surplus)} unknown: {'; '.join(faults)}")
    for name, tensor in state.items():
        if tuple(tensor.shape) != _shape(name, config):
            raise CheckpointError(
                f"{source}: {name} has shape {list(tensor.shape)}, the configuration says {list(_shape(name, config))}"
            )


def _tokenizer_config(config: LlamaConfig, eos_token: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "bos_token": eos_token,
        "model_max_length": config.context_length,
        "clean_up_tokenization_spaces": False,
    }


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        files = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
    else:
        files = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = folder / Path(name).name  # never outside the folder
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (not a dict)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: is missing; only safetensors are read") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is damaged ({error})") from error
    return tensors


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
