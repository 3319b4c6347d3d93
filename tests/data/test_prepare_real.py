"""Real English C4 with a real 32,000-entry tokenizer, and the embedded corpus whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llama_c4.config.schema import C4FilesConfig, SampleConfig
from llama_c4.data.cache import TokenCache
from llama_c4.data.prepare import prepare
from tests.data.small_corpus import EOS


@pytest.fixture(scope="module")
def data(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> C4FilesConfig:
    return C4FilesConfig(
        name="c4_files",
        files=str(shared / "data" / "c4" / "en"),
        validation_files=None,
        cache_dir=str(tmp_path_factory.mktemp("c4") / "cache"),
        loader="v2",
        shuffle_group_size=2,
        buffer_size_mib=None,
        prefetch=False,
        shard_tokens=33_554_432,
        prepare_processes=2,
        tokenizer=str(shared / "data" / "tokenizer" / "tokenizer.json"),
        tokenizer_revision=None,
        eos_token=EOS,
        train_tokens=None,
        validation_tokens=None,
        shuffle_documents=100_000,
        shuffle_seed=42,
    )


def prepared(data: C4FilesConfig | SampleConfig, vocab_size: int = 32_000) -> TokenCache:
    return prepare(data, vocab_size=vocab_size, context_length=1024, train_tokens_needed=None, progress=False)


@pytest.fixture(scope="module")
def cache(data: C4FilesConfig) -> TokenCache:
    return prepared(data)


def test_the_c4_sample_has_the_tokens_that_sentencepiece_counts(cache: TokenCache) -> None:
    assert cache.train.num_tokens == 526_309 + 494_735 + 1_900  # one EOS for each document
    assert cache.validation.num_tokens == 43_476 + 100
    assert (cache.train.num_documents, cache.validation.num_documents) == (1_900, 100)
    for split in (cache.train, cache.validation):
        assert np.count_nonzero(split.read(0, split.num_tokens) == 2) == split.num_documents


def test_one_process_gives_the_bytes_of_two(data: C4FilesConfig, cache: TokenCache) -> None:
    one = prepared(replace(data, prepare_processes=1, cache_dir=data.cache_dir + "-1"))
    assert one.identity == cache.identity


@pytest.mark.slow
def test_the_embedded_corpus_fills_a_demonstration(tmp_path: Path, data: C4FilesConfig) -> None:
    shared_settings = {k: v for k, v in vars(data).items() if k not in ("name", "files", "validation_files")}
    settings = {**shared_settings, "tokenizer": "train", "shard_tokens": 524_288, "cache_dir": str(tmp_path / "sample")}
    sample = SampleConfig(name="sample", document_bytes=2000, holdout_every=20, **settings)
    cache = prepared(sample, vocab_size=4096)
    assert cache.train.num_documents == 7_130
    assert cache.validation.num_documents == 401
    assert 2_600_000 < cache.train.num_tokens < 2_800_000
    assert cache.train.complete
    assert not (cache.path / "corpus").exists()
