"""Small corpora of text in C4's files, and the configuration and tokenizers that go with them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from llama_c4.config.schema import C4FilesConfig
from llama_c4.data.cache import TokenCache
from llama_c4.data.prepare import prepare
from llama_c4.data.tokenizer import Tokenizer, train_tokenizer

VOCAB_SIZE = 320
EOS = "</s>"
FREQUENT = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an"


def text(seed: int, words: int = 40) -> str:
    """A text of frequent words, some numbers and some punctuation."""
    random = np.random.default_rng(seed)
    parts = [*FREQUENT.split(), "don't", "naïve", "(1790)", "—", "\n", "x  y", "漢字", "😀."]
    return " ".join(random.choice(parts, size=words).tolist())


@cache
def byte_level_json() -> bytes:
    """A byte-level tokenizer.json of 320 entries."""
    return train_tokenizer([text(seed) for seed in range(50)], vocab_size=VOCAB_SIZE, eos_token=EOS).data


@cache
def sentencepiece_json() -> bytes:
    """A tokenizer.json in Llama's form: `▁` for a space, byte fallback, </s> = 2."""
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("▁*[^▁]+|▁+"), "isolated")
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    library.train_from_iterator([text(seed) for seed in range(50)], trainer)
    settings = json.loads(library.to_str())
    settings["model"].update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    settings.update(pre_tokenizer=None, added_tokens=settings["added_tokens"][:3])
    return json.dumps(settings).encode()


def tokenizer() -> Tokenizer:
    """The byte-level tokenizer, opened."""
    return Tokenizer(byte_level_json(), eos_token=EOS, name="small")


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write a gzip JSON-lines file; a row that is bytes is a line as it is, one that is str a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        row if isinstance(row, bytes) else json.dumps({"text": row} if isinstance(row, str) else row).encode()
        for row in rows
    ]
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines), mtime=0))
    return path


def write_corpus(folder: Path, *, documents: int = 60, files: int = 2, words: int = 40) -> C4FilesConfig:
    """Write a corpus of training files and five validation documents, and give its configuration."""
    texts = [text(seed, words) for seed in range(documents)]
    size = -(-documents // files)
    for number in range(files):
        rows = texts[number * size : (number + 1) * size]
        write_rows(folder / "en" / f"c4-train.{number:05d}-of-01024.json.gz", rows)
    write_rows(folder / "en" / "c4-validation.00000-of-00008.json.gz", [text(seed) for seed in range(1000, 1005)])
    return configuration(folder)


def configuration(folder: Path) -> C4FilesConfig:
    """The configuration of a corpus in `folder/en`: one process, shards of 500 tokens, a buffer of 20 documents."""
    (folder / "tokenizer.json").write_bytes(byte_level_json())
    return C4FilesConfig(
        name="c4_files",
        files=str(folder / "en"),
        validation_files=None,
        cache_dir=str(folder / "cache"),
        loader="v2",
        shuffle_group_size=2,
        buffer_size_mib=None,
        prefetch=False,
        shard_tokens=500,
        prepare_processes=1,
        tokenizer=str(folder / "tokenizer.json"),
        tokenizer_revision=None,
        eos_token=EOS,
        train_tokens=None,
        validation_tokens=None,
        shuffle_documents=20,
        shuffle_seed=42,
    )


def run(data: C4FilesConfig, **changes: Any) -> TokenCache:
    """Prepare a configuration with some settings changed."""
    return prepare(
        replace(data, **changes), vocab_size=VOCAB_SIZE, context_length=8, train_tokens_needed=None, progress=False
    )


def documents_of(tokens: np.ndarray, eos_id: int) -> list[list[int]]:
    """Cut a stream of tokens behind every EOS; the EOS is left out."""
    ends = np.flatnonzero(tokens == eos_id)
    assert ends[-1] == len(tokens) - 1
    return [tokens[start:end].tolist() for start, end in zip([0, *(ends[:-1] + 1)], ends, strict=True)]


def shard_bytes(cache: TokenCache) -> dict[str, bytes]:
    """File name → content of every shard that the manifest names."""
    return {
        shard.path.name: shard.path.read_bytes() for split in (cache.train, cache.validation) for shard in split.shards
    }
