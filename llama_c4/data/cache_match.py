"""Whether a cache is the one that a configuration asks for: corpus, tokenizer, vocabulary, amount."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_c4.config.errors import DataError
from llama_c4.config.schema import C4Config, C4FilesConfig, DataConfig, MarkovConfig
from llama_c4.data.c4_files import C4Files
from llama_c4.data.cache import TokenCache, TokenSplit
from llama_c4.data.documents import DocumentSource
from llama_c4.data.hub import download_tokenizer
from llama_c4.data.order import GroupOrder, tokens_needed
from llama_c4.data.sources import TextConfig, build_source, markov_settings, text_settings, tokenizer_origin
from llama_c4.data.tokenizer import file_fingerprint


def check_cache(cache: TokenCache, data: DataConfig, *, vocab_size: int) -> None:
    """Check that a cache is the one that a configuration describes.

    Needs neither the network nor the corpus, so it runs before every training. A tokenizer that is named by a path
    which does not exist here cannot be compared and is taken on trust of the recipe.

    Raises:
        DataError: It is of another corpus, tokenizer or vocabulary; lists the differences.
    """
    if isinstance(data, MarkovConfig):
        differences = setting_differences(cache.manifest, markov_settings(data, vocab_size=vocab_size))
    else:
        local = isinstance(data, C4FilesConfig)
        source = C4Files(train=[], validation=[]) if local else build_source(data, working=Path())
        differences = setting_differences(cache.manifest, text_settings(data, source, vocab_size=vocab_size))
        differences += tokenizer_differences(cache.manifest, data, fetch=False)
    refuse(cache, differences)


def refuse(cache: TokenCache, differences: list[str]) -> None:
    """Raise DataError if there are differences."""
    if differences:
        raise DataError(
            f"data.cache_dir={cache.path}: was prepared with other settings:\n  "
            + "\n  ".join(differences)
            + "\nname another data.cache_dir, or remove that folder to prepare it anew"
        )


def setting_differences(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """One line for every setting that the manifest has otherwise: `shuffle.seed: 42 in the cache, 7 asked for`."""
    have = _dotted(manifest)
    return [
        f"{key}: {have.get(key)} in the cache, {value} asked for"
        for key, value in _dotted(settings).items()
        if have.get(key) != value
    ]


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _dotted(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def tokenizer_differences(manifest: Mapping[str, Any], data: TextConfig, *, fetch: bool) -> list[str]:
    """What tells the cache's tokenizer from the configured one; the fingerprint decides, never the size.

    Args:
        manifest: Of the cache.
        data: The configuration.
        fetch: Whether a tokenizer of the hub may be downloaded to be compared.
    """
    have = manifest["tokenizer"]
    if have is None:
        return ["tokenizer: none in the cache, which is of a synthetic source"]
    differences = setting_differences({"tokenizer": have}, {"tokenizer": {"eos_token": data.eos_token}})
    origin, revision = tokenizer_origin(data)
    if origin == "train":
        return differences + setting_differences({"tokenizer": have}, {"tokenizer": {"origin": "train"}})
    if origin == "file":
        fingerprint = file_fingerprint(data.tokenizer)
    elif origin == have["origin"] and revision in (None, have["revision"]):
        fingerprint = have["fingerprint"]
    elif fetch:
        fingerprint = hashlib.sha256(download_tokenizer(origin, revision)[0]).hexdigest()
    else:
        wanted = {"origin": origin, "revision": revision}
        return differences + setting_differences({"tokenizer": have}, {"tokenizer": wanted})
    if fingerprint is None:
        return differences
    return differences + setting_differences({"tokenizer": have}, {"tokenizer": {"fingerprint": fingerprint}})


def file_differences(manifest: Mapping[str, Any], source: DocumentSource) -> list[str]:
    """What tells the files that a cache was made of from those that the source finds now, by name and size.

    A cache of a part of its corpus may be followed by more files; in one of the whole corpus more files would have
    taken part in the shuffle.
    """
    differences = []
    for split in ("train", "validation"):
        files = source.files(split)
        if files is None:
            continue
        record = manifest["splits"][split]
        have = [(file["name"], file["bytes"]) for file in record["files"]]
        now = [(file.name, file.num_bytes) for file in files]
        if have != (now if record["complete"] else now[: len(have)]):
            differences.append(f"{split} files: {_listed(have)} in the cache, {_listed(now)} found now")
    return differences


def _listed(files: list[tuple[str, int]]) -> str:
    named = [f"{name} ({size} bytes)" for name, size in files]
    return ", ".join(named if len(named) <= 4 else [*named[:2], "…", named[-1]]) or "none"


def is_enough(split: TokenSplit, target: int | None) -> bool:
    """Whether a split holds the tokens asked for (None: all that there are), or all that there are."""
    return split.complete or (target is not None and split.num_tokens >= target)


def capacity_fault(
    cache: TokenCache,
    data: DataConfig,
    *,
    needed_blocks: int,
    context_length: int,
    command: str = "llama-c4 prepare <the settings of the run>",
) -> str | None:
    """Why a cache cannot feed a run, with the command that would prepare enough; None if it can.

    Args:
        cache: The cache.
        data: The configuration of the data: loader, groups, source.
        needed_blocks: Blocks of the whole run.
        context_length: L, targets of a block.
        command: The preparation of this configuration as the user would type it, overrides included.
    Returns:
        The message for a DataError.
    """
    usable = _usable_blocks(cache, data, context_length)
    if needed_blocks <= usable:
        return None
    needed = tokens_needed(data, total_blocks=needed_blocks, context_length=context_length)
    fault = (
        f"data.cache_dir={cache.path}: the run takes {needed_blocks} blocks of {context_length} targets, but its "
        f"{cache.train.num_tokens} training tokens give {usable}"
    )
    fewer = f"training.tokens_per_parameter=null training.total_tokens={usable * context_length}"
    if isinstance(data, MarkovConfig):
        another = f"{command} data.train_tokens={needed} data.cache_dir={cache.path}-{needed}"
        return f"{fault}; prepare a larger one: `{another}`, or set {fewer}"
    if cache.train.complete:
        return f"{fault}, and its corpus holds no more (no document is trained on twice unasked); set {fewer}"
    amount = "" if isinstance(data, C4Config) and data.train_tokens is None else f" data.train_tokens={needed}"
    return f"{fault}; prepare more: `{command}{amount}`, or set {fewer}"


def _usable_blocks(cache: TokenCache, data: DataConfig, context_length: int) -> int:
    if data.loader == "v1" or data.shuffle_group_size is None:
        return cache.train.num_blocks(context_length)
    order = GroupOrder(
        [shard.num_tokens for shard in cache.train.shards],
        group_size=data.shuffle_group_size,
        context_length=context_length,
        seed=None,
        complete=cache.train.complete,
    )
    return order.capacity
