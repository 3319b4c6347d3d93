"""The command `export`: weights of any state to a folder that Hugging Face's transformers reads."""

from __future__ import annotations

from pathlib import Path

from llama_c4.checkpoint.convert import export_hugging_face
from llama_c4.checkpoint.weights import load_weights
from llama_c4.config.compose import parse_config
from llama_c4.config.errors import DataError
from llama_c4.data.cache import TokenCache


def run_export(path: Path, to: Path, *, tokenizer: bool) -> int:
    """Write config.json, model.safetensors and, if asked for, the tokenizer of the run's cache.

    Args:
        path: A run folder, an export of an epoch, or a state file.
        to: The folder to make.
        tokenizer: The tokenizer too, so that the folder generates text by itself.
    Raises:
        CheckpointError: No such state, or the folder exists.
        DataError: The tokenizer is wanted and the cache is gone, is another one, or has none.
    """
    stored = load_weights(path)
    config = parse_config(stored.header.config, source=stored.path)
    tokenizer_json, eos_token, eos_id = None, None, None
    if tokenizer:
        cache = TokenCache.open(Path(config.data.cache_dir))
        tokenizer_json = cache.path / "tokenizer.json"
        if not tokenizer_json.exists():
            raise DataError(f"{cache.path}: has no tokenizer (data={config.data.name}); leave --tokenizer out")
        eos_token, eos_id = getattr(config.data, "eos_token", None), cache.eos_id
    export_hugging_face(
        dict(stored.weights), config.model, to, tokenizer_json=tokenizer_json, eos_token=eos_token, eos_id=eos_id
    )
    print(f"wrote {to}: the weights of {stored.path} ({stored.position})")
    return 0
