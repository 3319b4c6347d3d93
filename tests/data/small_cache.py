"""Small token caches, written as real files: the fixture of the data and evaluation tests."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import numpy as np

from llama_c4.config.schema import MarkovConfig
from llama_c4.data.cache import DTYPE, FORMAT, MANIFEST, VERSION, TokenCache, manifest_identity

VOCAB_SIZE = 17
CONTEXT_LENGTH = 4
SHARD_TOKENS = 11
TRAIN_TOKENS = 129
VALIDATION_TOKENS = 30


def small_tokens(count: int, seed: int = 0) -> np.ndarray:
    """Random ids of the small vocabulary, uint16 [count]."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, size=count, dtype=np.uint16)


def write_cache(
    path: Path,
    *,
    train: np.ndarray | None = None,
    validation: np.ndarray | None = None,
    shard_tokens: int = SHARD_TOKENS,
    complete: bool = False,
    text_bytes: int | None = None,
    entropy_floor: float | None = None,
    vocab_size: int = VOCAB_SIZE,
    ancestors: tuple[tuple[str, int], ...] = (),
) -> TokenCache:
    """Write a cache and open it; by default 129 training and 30 validation tokens in shards of 11."""
    path.mkdir(parents=True)
    splits = {
        "train": small_tokens(TRAIN_TOKENS, seed=1) if train is None else train,
        "validation": small_tokens(VALIDATION_TOKENS, seed=2) if validation is None else validation,
    }
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": DTYPE,
        "ancestors": [{"identity": identity, "train_tokens": tokens} for identity, tokens in ancestors],
        "vocab_size": vocab_size,
        "eos_id": None,
        "entropy_floor": entropy_floor,
        "shard_tokens": shard_tokens,
        "splits": {
            name: {
                "tokens": len(tokens),
                "documents": 0,
                "text_bytes": text_bytes,
                "complete": complete,
                "shards": _write_shards(path, name, tokens, shard_tokens),
            }
            for name, tokens in splits.items()
        },
    }
    manifest["identity"] = manifest_identity(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    return TokenCache.open(path)


def _write_shards(path: Path, name: str, tokens: np.ndarray, shard_tokens: int) -> list[dict[str, object]]:
    shards: list[dict[str, object]] = []
    for at in range(0, len(tokens), shard_tokens):
        part = tokens[at : at + shard_tokens].astype("<u2").tobytes()
        file = f"{name}-{len(shards):05d}.bin"
        (path / file).write_bytes(part)
        shards.append({"file": file, "tokens": len(part) // 2, "sha256": hashlib.sha256(part).hexdigest()})
    return shards


def markov(cache: TokenCache, **changes: object) -> MarkovConfig:
    """Configuration of a small cache, as far as the loaders read it."""
    settings: dict[str, object] = {
        "name": "markov",
        "cache_dir": str(cache.path),
        "loader": "v2",
        "shuffle_group_size": 2,
        "buffer_size_mib": None,
        "prefetch": True,
        "shard_tokens": SHARD_TOKENS,
        "prepare_processes": None,
        "successors": 2,
        "chain_seed": 0,
        "train_tokens": TRAIN_TOKENS,
        "validation_tokens": 30,
    }
    return MarkovConfig(**{**settings, **changes})  # type: ignore[arg-type]


def reader_threads() -> list[threading.Thread]:
    """Background readers that still run."""
    return [thread for thread in threading.enumerate() if thread.name == "block-prefetch"]
