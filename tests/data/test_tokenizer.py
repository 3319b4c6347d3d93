"""What a tokenizer must be, and what it makes of documents."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from llama_c4.config.errors import DataError
from llama_c4.data.tokenizer import Tokenizer, file_fingerprint, read_tokenizer, train_tokenizer
from tests.data.small_corpus import EOS, byte_level_json, sentencepiece_json, text, tokenizer


def changed(content: bytes, **settings: Any) -> bytes:
    """A tokenizer.json with some of its top-level entries replaced."""
    return json.dumps({**json.loads(content), **settings}).encode()


def word_level(entries: int, *, first: str = "<the end>") -> bytes:
    """One entry a word; `w7` is number 7. Its EOS holds a space, so no word is spelled like it."""
    vocabulary = {first: 0, **{f"w{index}": index for index in range(1, entries)}}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w1"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return library.to_str().encode()


def encoded(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return tokenizer.encoder.encode([text.encode() for text in texts])[0].tolist()


FORMS = {"byte level": byte_level_json, "sentencepiece": sentencepiece_json}


@pytest.mark.parametrize("form", FORMS)
def test_documents_are_the_librarys_ids_with_one_eos_behind_each(form: str) -> None:
    content = FORMS[form]()
    texts = [text(1), "", text(2), "   ", "\n", text(3, words=400)]
    tokens, ends = Tokenizer(content, eos_token=EOS, name="t").encoder.encode([t.encode() for t in texts])
    library = tokenizers.Tokenizer.from_str(content.decode())
    eos = library.token_to_id(EOS)
    expected = [[*library.encode(t, add_special_tokens=False).ids, eos] for t in texts]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(itertools.chain.from_iterable(expected))
    assert ends.tolist() == np.cumsum([len(ids) for ids in expected]).tolist()


def test_an_empty_document_is_a_lone_eos() -> None:
    small = tokenizer()
    assert encoded(small, "", "") == [small.eos_id, small.eos_id]
    assert small.encoder.encode([])[0].tolist() == []


@pytest.mark.parametrize("form", FORMS)
def test_text_that_spells_a_special_token_is_text(form: str) -> None:
    small = Tokenizer(FORMS[form](), eos_token=EOS, name="t")
    spelled = f"a{EOS}b {EOS} <s><unk>"
    tokens = encoded(small, spelled)
    assert tokens.count(small.eos_id) == 1
    assert tokens[-1] == small.eos_id
    assert small.decode(tokens[:-1]) == spelled
    assert tokenizers.Tokenizer.from_str(small.data.decode()).encode(EOS).ids == [small.eos_id]  # what is avoided


def test_added_tokens_that_are_not_special_are_not_matched_either() -> None:
    added = [{"id": 320, "content": "the", "special": False, "normalized": False}]
    added[0].update(single_word=False, lstrip=False, rstrip=False)
    content = changed(byte_level_json(), added_tokens=[*json.loads(byte_level_json())["added_tokens"], *added])
    small = Tokenizer(content, eos_token=EOS, name="t")
    assert small.vocab_size == 321
    assert 320 not in encoded(small, "the other the")


def test_template_truncation_and_padding_of_the_file_do_nothing() -> None:
    library = tokenizers.Tokenizer.from_str(byte_level_json().decode())
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{EOS} $A {EOS}", special_tokens=[(EOS, 0)]
    )
    library.enable_truncation(3)
    library.enable_padding(length=50)
    content = library.to_str().encode()
    assert encoded(Tokenizer(content, eos_token=EOS, name="t"), text(1)) == encoded(tokenizer(), text(1))


def test_a_trained_tokenizer_has_exactly_the_entries_asked_for_and_the_same_bytes_each_time() -> None:
    texts = [text(seed) for seed in range(30)]
    one, two = (train_tokenizer(texts, vocab_size=300, eos_token="<end>") for _ in range(2))
    assert one.vocab_size == 300
    assert one.data == two.data
    assert one.fingerprint == two.fingerprint
    assert one.decode(encoded(one, texts[0])) == texts[0]


def test_training_says_how_many_entries_a_text_can_give() -> None:
    with pytest.raises(DataError, match=r"vocab_size=400: the training text yields a tokenizer of 26\d entries only"):
        train_tokenizer(["hello world"], vocab_size=400, eos_token=EOS)
    with pytest.raises(DataError, match="has 257"):
        train_tokenizer(["hello"], vocab_size=256, eos_token=EOS)


def test_the_largest_uint16_id_round_trips_and_a_larger_vocabulary_is_refused() -> None:
    largest = Tokenizer(word_level(65_536), eos_token="<the end>", name="t")
    assert encoded(largest, "w65535 w65534") == [65_535, 65_534, 0]
    with pytest.raises(DataError, match="65537 entries with ids up to 65536, but ids are stored as uint16"):
        Tokenizer(word_level(65_537), eos_token="<the end>", name="t")


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    content = json.loads(word_level(10))
    content["model"]["vocab"]["w9"] = 65_000
    with pytest.raises(DataError, match="ids up to 65000 with 10 entries"):
        Tokenizer(json.dumps(content).encode(), eos_token="<the end>", name="t")


def test_a_tokenizer_whose_plain_text_becomes_the_eos_is_refused() -> None:
    with pytest.raises(DataError, match="a document could forge its own end"):
        Tokenizer(word_level(10, first=EOS), eos_token=EOS, name="t")


def test_an_unknown_eos_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.eos_token='<eot>': not an entry of t"):
        Tokenizer(byte_level_json(), eos_token="<eot>", name="t")


def test_a_random_encoding_is_refused() -> None:
    model = {**json.loads(byte_level_json())["model"], "dropout": 0.1}
    with pytest.raises(DataError, match="encodes at random"):
        Tokenizer(changed(byte_level_json(), model=model), eos_token=EOS, name="t")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"model": {"type": "BPE", "vocab": {"</s>": 0}}}'])
def test_a_file_that_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match=r"not a tokenizer\.json that can be read"):
        Tokenizer(content, eos_token=EOS, name="t")


def test_the_vocabulary_must_be_the_models() -> None:
    tokenizer().check_vocabulary(320)
    with pytest.raises(DataError, match=r"320 entries, but model.vocab_size=32000; set model.vocab_size=320"):
        tokenizer().check_vocabulary(32_000)


def test_a_path_may_be_the_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_json())
    assert read_tokenizer(tmp_path, eos_token=EOS).fingerprint == tokenizer().fingerprint
    assert file_fingerprint(tmp_path) == file_fingerprint(tmp_path / "tokenizer.json") == tokenizer().fingerprint
    assert file_fingerprint(tmp_path / "none") is None
    with pytest.raises(DataError, match=r"data.tokenizer=.*none: cannot be read"):
        read_tokenizer(tmp_path / "none", eos_token=EOS)


def test_a_fixed_sentence_has_the_ids_of_its_vocabulary(shared: Path) -> None:
    real = read_tokenizer(shared / "data" / "tokenizer" / "tokenizer.json", eos_token=EOS)
    assert (real.vocab_size, real.eos_id) == (32_000, 2)
    assert encoded(real, "Hello, world!") == [22557, 28725, 1526, 28808, 2]
    assert encoded(real, "Hello, world!") != [
        15043,
        29892,
        3186,
        29991,
        2,
    ]  # Llama 2: the same size, another vocabulary


def test_loading_a_tokenizer_loads_no_heavy_library() -> None:
    code = "import sys, llama_c4.data.tokenizer; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
