"""Preparation: the tokens are the documents', the same for any number of processes; reused, extended or refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_c4.config.errors import DataError
from llama_c4.config.schema import C4Config, C4FilesConfig, MarkovConfig
from llama_c4.data import encode_pool
from llama_c4.data.cache import MANIFEST, TokenCache
from llama_c4.data.markov import MarkovChain
from llama_c4.data.prepare import prepare
from llama_c4.data.tokenizer import train_tokenizer
from tests.data.small_corpus import (
    EOS,
    VOCAB_SIZE,
    documents_of,
    run,
    shard_bytes,
    text,
    tokenizer,
    write_corpus,
    write_rows,
)


@pytest.fixture
def data(tmp_path: Path) -> C4FilesConfig:
    return write_corpus(tmp_path)


def tokens_of(cache: TokenCache, split: str = "train") -> np.ndarray:
    whole = getattr(cache, split)
    return whole.read(0, whole.num_tokens)


def ids(text: str) -> list[int]:
    return tokenizer().encoder.encode([text.encode()])[0].tolist()[:-1]


def test_every_document_is_there_once_with_one_eos_and_validation_in_order(data: C4FilesConfig) -> None:
    cache = run(data)
    train = documents_of(tokens_of(cache), cache.eos_id or 0)
    assert Counter(map(tuple, train)) == Counter(tuple(ids(text(seed))) for seed in range(60))
    assert train != [ids(text(seed)) for seed in range(60)]
    assert documents_of(tokens_of(cache, "validation"), cache.eos_id or 0) == [ids(text(s)) for s in range(1000, 1005)]


def test_without_a_buffer_the_documents_stand_in_file_order(data: C4FilesConfig) -> None:
    cache = run(data, shuffle_documents=0)
    assert documents_of(tokens_of(cache), cache.eos_id or 0) == [ids(text(seed)) for seed in range(60)]


def test_the_manifest_counts_documents_tokens_and_bytes(data: C4FilesConfig) -> None:
    cache = run(data)
    assert (cache.train.num_documents, cache.validation.num_documents) == (60, 5)
    assert cache.train.text_bytes == sum(len(text(seed).encode()) for seed in range(60))
    assert cache.train.num_tokens == 60 + sum(len(ids(text(seed))) for seed in range(60))
    assert [shard.num_tokens for shard in cache.train.shards[:-1]] == [500] * (cache.train.num_tokens // 500)
    assert (cache.vocab_size, cache.shard_tokens, cache.entropy_floor) == (VOCAB_SIZE, 500, None)
    assert cache.train.complete
    assert cache.manifest["validation_complete"]
    assert cache.manifest["tokenizer"]["fingerprint"] == tokenizer().fingerprint
    assert [file["name"] for file in cache.manifest["splits"]["train"]["files"]] == [
        f"c4-train.0000{number}-of-01024.json.gz" for number in (0, 1)
    ]


def test_empty_documents_and_bad_rows_are_counted_where_they_stand(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    name = "c4-train.00002-of-01024.json.gz"
    rows = ["", b'{"text": null}', b"{", b'{"url": "x"}', rb'{"text": "\ud83d"}', b'{"text": "\xff"}', "  ", EOS]
    write_rows(tmp_path / "en" / name, rows)
    cache = run(data, shuffle_documents=0)
    last = documents_of(tokens_of(cache), cache.eos_id or 0)[60:]
    assert last == [[], ids("  "), ids(EOS)]
    kinds = ["null_text", "not_json", "missing_text", "lone_surrogate", "not_utf8"]
    assert cache.manifest["splits"]["train"]["skipped"] == {name: dict.fromkeys(kinds, 1)}


def test_the_bytes_do_not_depend_on_the_number_of_processes(
    data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_pool, "BATCH_DOCUMENTS", 4)
    caches = [run(data, cache_dir=f"{data.cache_dir}-{n}", prepare_processes=n, train_tokens=1800) for n in (1, 3)]
    assert caches[0].identity == caches[1].identity
    assert shard_bytes(caches[0]) == shard_bytes(caches[1])


def test_the_identity_changes_with_tokenizer_shuffle_and_files_and_not_with_the_place(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "a")
    same, more = write_corpus(tmp_path / "b"), write_corpus(tmp_path / "c", documents=61)
    other = tmp_path / "other.json"
    other.write_bytes(train_tokenizer([text(s) for s in range(9, 60)], vocab_size=VOCAB_SIZE, eos_token=EOS).data)
    one = run(data).identity
    assert run(same).identity == one
    others = {
        run(more).identity,
        run(same, cache_dir=f"{tmp_path}/1", shuffle_seed=1).identity,
        run(same, cache_dir=f"{tmp_path}/2", tokenizer=str(other)).identity,
        run(same, cache_dir=f"{tmp_path}/3", shard_tokens=501).identity,
    }
    assert one not in others
    assert len(others) == 4


def test_a_matching_cache_is_reused_without_a_process_or_a_write(
    data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(data)
    before = {path: path.stat().st_mtime_ns for path in [first.path, *first.path.iterdir()]}
    monkeypatch.setattr(encode_pool.subprocess, "Popen", None)
    again = run(data, prepare_processes=4)
    assert again.identity == first.identity
    assert {path: path.stat().st_mtime_ns for path in [again.path, *again.path.iterdir()]} == before


def test_one_process_needs_no_pool(data: C4FilesConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_pool.subprocess, "Popen", None)
    assert run(data).train.num_documents == 60


def test_reuse_hashes_every_shard(data: C4FilesConfig) -> None:
    shard = run(data).train.shards[3].path
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=f"{shard.name}: sha256"):
        run(data)


def test_verification_builds_nothing(data: C4FilesConfig) -> None:
    def verify() -> TokenCache:
        return prepare(
            data, vocab_size=VOCAB_SIZE, context_length=8, train_tokens_needed=None, verify=True, progress=False
        )

    with pytest.raises(DataError, match="no token cache there; make it with `llama-c4 prepare"):
        verify()
    assert not Path(data.cache_dir + ".partial").exists()
    assert run(data).identity == verify().identity


def test_a_target_ends_with_the_document_that_it_falls_in(data: C4FilesConfig) -> None:
    cache = run(data, train_tokens=1200, validation_tokens=100)
    whole = run(data, cache_dir=f"{data.cache_dir}-whole")
    assert 1200 <= cache.train.num_tokens < 1200 + max(len(ids(text(seed))) for seed in range(60)) + 1
    assert np.array_equal(tokens_of(cache), tokens_of(whole)[: cache.train.num_tokens])
    assert tokens_of(cache)[-1] == cache.eos_id
    assert not cache.train.complete
    assert not cache.manifest["validation_complete"]
    assert run(data).train.complete  # which extends it


@pytest.mark.parametrize("steps", [(1200, None), (300, 700, 1500, None), (1000, 1001, 1900), (4000, None)])
def test_an_extended_cache_has_the_bytes_of_one_prepared_at_once(
    data: C4FilesConfig, steps: tuple[int | None, ...]
) -> None:
    earlier: list[TokenCache] = []
    for target in steps:
        earlier.append(run(data, train_tokens=target))
    once = run(data, cache_dir=f"{data.cache_dir}-once", train_tokens=steps[-1])
    extended = earlier[-1]
    assert shard_bytes(extended) == shard_bytes(once)
    assert extended.manifest["splits"] == once.manifest["splits"]
    for cache in earlier[:-1]:  # a reader of the shorter cache goes on undisturbed
        cache.verify()
        assert np.array_equal(tokens_of(cache), tokens_of(once)[: cache.train.num_tokens])
        if cache.identity != extended.identity:
            assert extended.ancestors[cache.identity] == cache.train.num_tokens


def test_a_cache_that_holds_more_than_is_asked_for_is_left_as_it_is(data: C4FilesConfig) -> None:
    assert run(data, train_tokens=1500).identity == run(data, train_tokens=400, validation_tokens=3).identity


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"shuffle_seed": 7}, "shuffle.seed: 42 in the cache, 7 asked for"),
        ({"shuffle_documents": 0}, "shuffle.documents: 20 in the cache, 0 asked for"),
        ({"shard_tokens": 600}, "shard_tokens: 500 in the cache, 600 asked for"),
        ({"eos_token": "<s>"}, "tokenizer.eos_token: </s> in the cache, <s> asked for"),
    ],
)
def test_a_cache_of_other_settings_is_refused_with_the_differences(
    data: C4FilesConfig, changes: dict[str, Any], difference: str
) -> None:
    run(data)
    with pytest.raises(DataError, match=difference.replace(".", r"\.")):
        run(data, **changes)


def test_a_tokenizer_of_the_same_size_and_other_content_is_refused(data: C4FilesConfig) -> None:
    run(data)
    other = train_tokenizer([text(seed) for seed in range(9, 60)], vocab_size=VOCAB_SIZE, eos_token=EOS)
    Path(data.tokenizer).write_bytes(other.data)
    with pytest.raises(
        DataError, match=rf"tokenizer.fingerprint: {tokenizer().fingerprint} in the cache, {other.fingerprint}"
    ):
        run(data)


def test_another_vocabulary_of_the_model_is_refused(data: C4FilesConfig) -> None:
    for _ in range(2):  # before there is a cache, and with one
        with pytest.raises(DataError, match=r"320.*model\.vocab_size=|vocab_size: 320 in the cache, 400 asked for"):
            prepare(data, vocab_size=400, context_length=8, train_tokens_needed=None, progress=False)
        run(data)


def test_more_files_extend_a_cache_of_a_part_and_are_refused_for_one_of_the_whole(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    part, whole = run(data, train_tokens=400), run(data, cache_dir=f"{tmp_path}/whole")
    write_rows(tmp_path / "en" / "c4-train.00002-of-01024.json.gz", [text(99)])
    assert run(data).ancestors == {part.identity: part.train.num_tokens}
    with pytest.raises(DataError, match=r"train files: .*00001.* in the cache, .*00002.* found now"):
        run(data, cache_dir=str(whole.path))


def test_a_corpus_that_changed_is_found_out_when_a_cache_is_extended(tmp_path: Path) -> None:
    data = write_corpus(tmp_path)
    run(data, train_tokens=1200)
    first = tmp_path / "en" / "c4-train.00000-of-01024.json.gz"
    size = first.stat().st_size
    for seed in range(100, 400):  # other documents, an archive of the same size
        write_rows(first, [text(seed + n) for n in range(30)])
        content = first.read_bytes()
        if len(content) <= size:
            first.write_bytes(content + b"\0" * (size - len(content)))  # zero padding is legal behind a gzip member
            break
    with pytest.raises(DataError, match="train: the corpus is not the one that the cache was made of"):
        run(data)


def test_an_altered_copy_of_the_tokenizer_is_found_out(data: C4FilesConfig) -> None:
    cache = run(data)
    (cache.path / "tokenizer.json").write_bytes(tokenizer().data + b" ")
    with pytest.raises(DataError, match=r"cache/tokenizer.json: sha256 .* where the manifest says"):
        run(data)


@pytest.mark.parametrize("rows", [[], [b'{"text": null}', b"{"]])
def test_a_corpus_without_a_document_is_refused(tmp_path: Path, rows: list[bytes]) -> None:
    data = write_corpus(tmp_path, files=1)
    write_rows(tmp_path / "en" / "c4-train.00000-of-01024.json.gz", rows)
    with pytest.raises(DataError, match=r"data.files=.*: no document with a text in the train split"):
        run(data)
    assert not Path(data.cache_dir).exists()


def test_a_preparation_that_never_began_leaves_nothing_behind(data: C4FilesConfig) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        run(data, tokenizer="/none/tokenizer.json")
    assert not Path(data.cache_dir + ".partial").exists()


def test_a_cache_without_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hold no block of model.context_length=100000 targets"):
        prepare(
            write_corpus(tmp_path),
            vocab_size=VOCAB_SIZE,
            context_length=100_000,
            train_tokens_needed=None,
            progress=False,
        )


def test_a_folder_that_is_no_cache_is_never_overwritten(data: C4FilesConfig) -> None:
    Path(data.cache_dir).mkdir()
    (Path(data.cache_dir) / "precious").touch()
    with pytest.raises(DataError, match="is no token cache; name another folder"):
        run(data)
    (Path(data.cache_dir) / "precious").unlink()
    assert run(data).train.num_documents == 60


def test_a_budget_decides_for_the_hub_and_not_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    data = write_corpus(tmp_path)
    rows = [{"text": text(seed)} for seed in range(60)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter(rows))
    shared = {key: value for key, value in vars(data).items() if key not in ("name", "files", "validation_files")}
    hub = C4Config(name="c4", dataset="allenai/c4", dataset_config="en", revision="0" * 40, **shared)
    cache = prepare(hub, vocab_size=VOCAB_SIZE, context_length=8, train_tokens_needed=900, progress=False)
    assert 900 <= cache.train.num_tokens < 1200
    assert cache.manifest["source"]["revision"] == "0" * 40
    with pytest.raises(DataError, match="say how many to prepare"):
        prepare(hub, vocab_size=VOCAB_SIZE, context_length=8, train_tokens_needed=None, progress=False)
    with pytest.raises(DataError, match=r"source\.revision: 0{40} in the cache, 1{40} asked for"):
        other = replace(hub, revision="1" * 40)
        prepare(other, vocab_size=VOCAB_SIZE, context_length=8, train_tokens_needed=900, progress=False)


def test_a_tokenizer_can_be_trained_on_the_training_text_alone(data: C4FilesConfig) -> None:
    cache = run(data, tokenizer="train")
    expected = train_tokenizer([text(seed) for seed in range(60)], vocab_size=VOCAB_SIZE, eos_token=EOS)
    assert cache.manifest["tokenizer"]["fingerprint"] == expected.fingerprint
    assert (cache.path / "tokenizer.json").read_bytes() == expected.data
    assert run(data, tokenizer="train").identity == cache.identity


def markov(tmp_path: Path, train_tokens: int = 2500) -> MarkovConfig:
    return MarkovConfig(
        name="markov",
        cache_dir=str(tmp_path / "markov"),
        loader="v2",
        shuffle_group_size=2,
        buffer_size_mib=None,
        prefetch=False,
        shard_tokens=1000,
        prepare_processes=None,
        successors=4,
        chain_seed=5,
        train_tokens=train_tokens,
        validation_tokens=700,
    )


def test_a_synthetic_cache_holds_the_chain_and_its_floor(tmp_path: Path) -> None:
    chain = MarkovChain(vocab_size=64, successors=4, seed=5)
    cache = prepare(markov(tmp_path), vocab_size=64, context_length=8, train_tokens_needed=9, progress=False)
    assert np.array_equal(tokens_of(cache), np.concatenate(list(chain.tokens("train", 2500))))
    assert np.array_equal(tokens_of(cache, "validation"), np.concatenate(list(chain.tokens("validation", 700))))
    assert (cache.entropy_floor, cache.entropy_std) == (chain.entropy_rate, chain.entropy_std)
    assert (cache.eos_id, cache.train.text_bytes, cache.train.complete) == (None, None, True)


def test_a_synthetic_corpus_of_another_length_is_another_corpus(tmp_path: Path) -> None:
    prepare(markov(tmp_path), vocab_size=64, context_length=8, train_tokens_needed=9, progress=False)
    with pytest.raises(DataError, match=r"source\.train_tokens: 2500 in the cache, 3000 asked for"):
        prepare(markov(tmp_path, 3000), vocab_size=64, context_length=8, train_tokens_needed=9, progress=False)


def test_a_cache_is_two_bytes_a_token_and_little_more(data: C4FilesConfig) -> None:
    cache = run(data)
    tokens = cache.train.num_tokens + cache.validation.num_tokens
    assert sum(map(len, shard_bytes(cache).values())) == 2 * tokens
    assert sorted(path.name for path in cache.path.iterdir()) == sorted(
        [*shard_bytes(cache), MANIFEST, "tokenizer.json"]
    )
    assert json.loads((cache.path / MANIFEST).read_text()) == cache.manifest
