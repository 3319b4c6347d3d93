"""Does a cache belong to a configuration, and does it hold enough for a run: differences and ways out, in numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_c4.config.errors import DataError
from llama_c4.config.schema import C4Config, C4FilesConfig, MarkovConfig, SampleConfig
from llama_c4.data.cache import TokenCache
from llama_c4.data.cache_match import capacity_fault, check_cache, tokenizer_differences
from llama_c4.data.loader import build_stream
from llama_c4.data.prepare import prepare
from tests.data.small_corpus import EOS, VOCAB_SIZE, run, write_corpus
from tests.data.test_prepare import markov

L = 8


@pytest.fixture
def data(tmp_path: Path) -> C4FilesConfig:
    return write_corpus(tmp_path)


def as_hub(data: C4FilesConfig, **changes: Any) -> C4Config:
    shared = {key: value for key, value in vars(data).items() if key not in ("name", "files", "validation_files")}
    changes = {"dataset": "allenai/c4", "dataset_config": "en", "revision": "0" * 40, **changes}
    return C4Config(name="c4", **{**shared, **changes})


def test_a_cache_fits_its_configuration_even_without_the_files(data: C4FilesConfig) -> None:
    cache = run(data)
    check_cache(cache, data, vocab_size=VOCAB_SIZE)
    check_cache(cache, replace(data, files="/gone", tokenizer="/gone/tokenizer.json"), vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("changes", "vocab_size", "difference"),
    [
        ({"shuffle_seed": 1}, VOCAB_SIZE, "shuffle.seed: 42 in the cache, 1 asked for"),
        ({}, 999, "vocab_size: 320 in the cache, 999 asked for"),
        ({"tokenizer": "train"}, VOCAB_SIZE, "tokenizer.origin: file in the cache, train asked for"),
        (
            {"tokenizer": "owner/name", "tokenizer_revision": "1" * 40},
            VOCAB_SIZE,
            "tokenizer.origin: file in the cache, owner/name asked for",
        ),
    ],
)
def test_every_difference_is_listed(
    data: C4FilesConfig, changes: dict[str, Any], vocab_size: int, difference: str
) -> None:
    cache = run(data)
    with pytest.raises(DataError, match=re.escape(difference) + r"(.|\n)*name another data\.cache_dir"):
        check_cache(cache, replace(data, **changes), vocab_size=vocab_size)


def test_another_corpus_is_another_cache(data: C4FilesConfig, tmp_path: Path) -> None:
    cache = run(data)
    sample = {key: value for key, value in vars(data).items() if key not in ("name", "files", "validation_files")}
    others = [
        as_hub(data),
        SampleConfig(name="sample", document_bytes=2000, holdout_every=20, **sample),
        markov(tmp_path),
    ]
    for other in others:
        with pytest.raises(DataError, match=rf"source.kind: c4_files in the cache, {other.name} asked for"):
            check_cache(cache, other, vocab_size=VOCAB_SIZE)


def test_a_text_cache_is_not_of_a_synthetic_source_and_the_reverse(data: C4FilesConfig, tmp_path: Path) -> None:
    chain = markov(tmp_path)
    cache = prepare(chain, vocab_size=64, context_length=L, train_tokens_needed=None, progress=False)
    check_cache(cache, chain, vocab_size=64)
    with pytest.raises(DataError, match="tokenizer: none in the cache"):
        check_cache(cache, data, vocab_size=64)


def test_a_hub_tokenizer_is_known_by_name_and_commit_and_else_by_its_bytes(
    data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "5" * 40
    record = {"origin": "owner/name", "revision": commit, "fingerprint": "f" * 64, "eos_token": EOS}
    asked = replace(data, tokenizer="owner/name", tokenizer_revision=commit)
    assert tokenizer_differences({"tokenizer": record}, asked, fetch=True) == []
    other = replace(asked, tokenizer_revision="6" * 40)
    assert tokenizer_differences({"tokenizer": record}, other, fetch=False) == [
        f"tokenizer.revision: {commit} in the cache, {'6' * 40} asked for"
    ]
    monkeypatch.setattr("llama_c4.data.cache_match.download_tokenizer", lambda *_: (b"{}", "6" * 40))
    [difference] = tokenizer_differences({"tokenizer": record}, other, fetch=True)
    assert difference.startswith("tokenizer.fingerprint: ffff")


def stream_capacity(data: C4FilesConfig | MarkovConfig, cache: TokenCache) -> int:
    """Blocks that the loader itself can give."""
    import torch

    stream = build_stream(data, cache, context_length=L, seed=1, total_blocks=1, device=torch.device("cpu"))
    try:
        return stream.capacity
    finally:
        stream.close()


@pytest.mark.parametrize("train_tokens", [None, 3100])
def test_capacity_is_what_the_loader_can_give(data: C4FilesConfig, train_tokens: int | None) -> None:
    cache = run(data, train_tokens=train_tokens)
    capacity = stream_capacity(data, cache)
    assert capacity_fault(cache, data, needed_blocks=capacity, context_length=L) is None
    assert capacity_fault(cache, data, needed_blocks=capacity + 1, context_length=L) is not None


def test_the_command_of_a_too_small_cache_prepares_enough(data: C4FilesConfig) -> None:
    cache = run(data, train_tokens=1100)
    needed = 180
    fault = capacity_fault(cache, data, needed_blocks=needed, context_length=L, command="llama-c4 prepare model=tiny")
    assert fault is not None
    match = re.search(
        r"`llama-c4 prepare model=tiny data.train_tokens=(\d+)`, or set (\S+ )?training.total_tokens=(\d+)", fault
    )
    assert match is not None
    assert int(match[3]) == stream_capacity(data, cache) * L
    larger = run(data, train_tokens=int(match[1]))
    assert capacity_fault(larger, data, needed_blocks=needed, context_length=L) is None


def test_a_hub_cache_grows_by_the_same_command(data: C4FilesConfig) -> None:
    cache = run(data, train_tokens=1100)
    hub = as_hub(data, train_tokens=None)
    fault = capacity_fault(cache, hub, needed_blocks=180, context_length=L, command="llama-c4 prepare model=50m")
    assert fault is not None
    assert "prepare more: `llama-c4 prepare model=50m`, or set" in fault


def test_a_corpus_that_holds_no_more_says_so_and_names_the_budget_that_fits(data: C4FilesConfig) -> None:
    cache = run(data)
    fault = capacity_fault(cache, data, needed_blocks=10_000, context_length=L)
    assert fault is not None
    assert f"its {cache.train.num_tokens} training tokens" in fault
    assert "its corpus holds no more" in fault
    assert f"training.total_tokens={stream_capacity(data, cache) * L}" in fault
    assert "llama-c4 prepare" not in fault


def test_a_larger_synthetic_corpus_goes_into_another_folder(tmp_path: Path) -> None:
    data = markov(tmp_path)
    cache = prepare(data, vocab_size=64, context_length=L, train_tokens_needed=None, progress=False)
    fault = capacity_fault(cache, data, needed_blocks=500, context_length=L)
    assert fault is not None
    match = re.search(
        r"`llama-c4 prepare <the settings of the run> data.train_tokens=(\d+) data.cache_dir=(\S+)`", fault
    )
    assert match is not None
    assert match[2] != data.cache_dir
    larger = replace(data, train_tokens=int(match[1]), cache_dir=match[2])
    more = prepare(larger, vocab_size=64, context_length=L, train_tokens_needed=None, progress=False)
    assert capacity_fault(more, larger, needed_blocks=500, context_length=L) is None
