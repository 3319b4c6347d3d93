"""From the configuration to a corpus and a tokenizer, and to the settings that a manifest records of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from llama_c4.config.rules import is_local_tokenizer
from llama_c4.config.schema import C4Config, C4FilesConfig, MarkovConfig, SampleConfig
from llama_c4.data.c4_files import find_c4_files
from llama_c4.data.cache import DTYPE
from llama_c4.data.documents import Document, DocumentSource, Reading
from llama_c4.data.hub import HubDataset, download_tokenizer
from llama_c4.data.sample import SampleCorpus
from llama_c4.data.tokenizer import Tokenizer, read_tokenizer, train_tokenizer

TextConfig = C4Config | C4FilesConfig | SampleConfig

TRAINING_TEXT_BYTES = 100_000_000
"""A tokenizer is trained on this much of the training text, from its beginning."""


def build_source(data: TextConfig, *, working: Path) -> DocumentSource:
    """The corpus of a configuration.

    Args:
        data: The configuration.
        working: Folder for files that exist only while the corpus is read.
    Raises:
        DataError: Local files that are not there.
    """
    if isinstance(data, C4Config):
        return HubDataset(data.dataset, data.dataset_config, revision=data.revision)
    if isinstance(data, C4FilesConfig):
        return find_c4_files(data.files, data.validation_files)
    return SampleCorpus(document_bytes=data.document_bytes, holdout_every=data.holdout_every, working=working)


def load_tokenizer(
    data: TextConfig, source: DocumentSource, *, vocab_size: int
) -> tuple[Tokenizer, dict[str, str | None]]:
    """Read, download or train the tokenizer of a configuration.

    Args:
        data: The configuration.
        source: The corpus, whose training text a tokenizer is trained on.
        vocab_size: V of the model; the tokenizer must have exactly as many entries.
    Returns:
        The tokenizer, and where it comes from: `origin` (`train`, `file` or a repository) and `revision` (a commit).
    Raises:
        DataError: It cannot be had, is none that can be used, or has another vocabulary size.
    """
    origin, revision = tokenizer_origin(data)
    if origin == "train":
        tokenizer = _train(source, vocab_size=vocab_size, eos_token=data.eos_token)
    elif origin == "file":
        tokenizer = read_tokenizer(Path(data.tokenizer).expanduser(), eos_token=data.eos_token)
    else:
        content, revision = download_tokenizer(origin, revision)
        tokenizer = Tokenizer(content, eos_token=data.eos_token, name=origin)
    tokenizer.check_vocabulary(vocab_size)
    return tokenizer, {"origin": origin, "revision": revision}


def tokenizer_origin(data: TextConfig) -> tuple[str, str | None]:
    """Where a tokenizer comes from: `train`, `file`, or a hub repository, and the revision asked for there."""
    if data.tokenizer == "train":
        return "train", None
    if is_local_tokenizer(data.tokenizer):
        return "file", None
    return data.tokenizer, data.tokenizer_revision


def _train(source: DocumentSource, *, vocab_size: int, eos_token: str) -> Tokenizer:
    with closing(source.documents("train", Reading())) as documents:
        texts = (document.text.decode() for document in _first_bytes(documents, TRAINING_TEXT_BYTES))
        return train_tokenizer(texts, vocab_size=vocab_size, eos_token=eos_token)


def _first_bytes(documents: Iterator[Document], num_bytes: int) -> Iterator[Document]:
    for document in documents:
        yield document
        num_bytes -= len(document.text)
        if num_bytes <= 0:
            return


def text_settings(data: TextConfig, source: DocumentSource, *, vocab_size: int) -> dict[str, Any]:
    """What decides the tokens of a text cache, but for the tokenizer and the files; part of the manifest."""
    return {
        "dtype": DTYPE,
        "source": source.settings(),
        "shuffle": {"documents": data.shuffle_documents, "seed": data.shuffle_seed},
        "shard_tokens": data.shard_tokens,
        "vocab_size": vocab_size,
    }


def markov_settings(data: MarkovConfig, *, vocab_size: int) -> dict[str, Any]:
    """What decides the tokens of a synthetic cache; part of the manifest."""
    source = {
        "kind": "markov",
        "successors": data.successors,
        "chain_seed": data.chain_seed,
        "train_tokens": data.train_tokens,
        "validation_tokens": data.validation_tokens,
    }
    return {
        "dtype": DTYPE,
        "source": source,
        "shuffle": None,
        "shard_tokens": data.shard_tokens,
        "vocab_size": vocab_size,
    }
