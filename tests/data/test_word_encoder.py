"""Word by word is exact: the ids are the library's, for every character and any mixture of white space."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_c4.data import word_encoder
from llama_c4.data.word_encoder import WordEncoder, word_rule
from tests.data.small_corpus import byte_level_json, sentencepiece_json, text

SPACES = [chr(point) for point in range(0x110000) if chr(point).isspace()]
ODD = [*SPACES, "\u200b", "\ufeff", "▁", "'", "s", "'s", "a", "é", "1", "²", "漢", "😀", ".", "-", "\x00", "\u0300"]


def parts(content: bytes) -> tuple[WordEncoder, Callable[[list[str]], list[bytes]]]:
    """The word encoder of a tokenizer.json, and the library on whole texts."""
    plain = {**json.loads(content), "added_tokens": []}
    rule = word_rule(plain)
    assert rule is not None
    single = tokenizers.Tokenizer.from_str(json.dumps(rule.of_words(plain)))
    whole = tokenizers.Tokenizer.from_str(json.dumps(plain))

    def encode_words(words: list[str]) -> list[int]:
        return [i for e in single.encode_batch(words, add_special_tokens=False) for i in e.ids]

    def library(texts: list[str]) -> list[bytes]:
        return [np.array(e.ids, np.uint16).tobytes() for e in whole.encode_batch(texts, add_special_tokens=False)]

    return WordEncoder(rule, encode_words), library


FORMS = {"byte level": parts(byte_level_json()), "sentencepiece": parts(sentencepiece_json())}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(ODD) | st.text(max_size=3), max_size=12))
def test_any_text_has_the_librarys_ids(form: str, pieces: list[str]) -> None:
    words, library = FORMS[form]
    mixed = "".join(pieces).encode("utf-8", "ignore").decode()
    assert words.encode([mixed, mixed + " a"]) == library([mixed, mixed + " a"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frame", ["a{0}b", "a{0} b", "{0}{0} ", "a \n{0}\n b"])
def test_every_character_has_the_librarys_ids_wherever_it_stands(form: str, frame: str) -> None:
    words, library = FORMS[form]
    points = [p for p in range(0x3100) if unicodedata.category(chr(p)) != "Cs"] + list(range(0xFE00, 0x10000))
    texts = ["".join(frame.format(chr(p)) for p in points[k : k + 32]) for k in range(0, len(points), 32)]
    assert words.encode(texts) == library(texts)


@pytest.mark.parametrize("form", FORMS)
def test_a_full_table_changes_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_encoder, "MAX_WORDS", 5)
    monkeypatch.setattr(word_encoder, "MAX_WORD_LENGTH", 3)
    words, library = parts({"byte level": byte_level_json, "sentencepiece": sentencepiece_json}[form]())
    for seed in range(5):
        texts = [text(seed), text(seed + 100)]
        assert words.encode(texts) == library(texts)
    assert len(words._table) == 5


@pytest.mark.parametrize("form", FORMS)
def test_a_huge_text_is_cut_at_borders_of_words(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_encoder, "PIECE_LENGTH", 7)
    words, library = FORMS[form]
    texts = [text(1, words=200), "", " \n " * 20, "x" * 50, "a  " + "b" * 20 + "  \n c"]
    assert words.encode(texts) == library(texts)


def changed(content: bytes, where: str, **values: Any) -> dict[str, Any]:
    settings = json.loads(content)
    (settings["model"] if where == "model" else settings).update(values)
    return settings


def with_joining_piece() -> dict[str, Any]:
    settings = json.loads(sentencepiece_json())
    vocabulary = settings["model"]["vocab"]
    vocabulary["e▁a"] = len(vocabulary)
    return settings


@pytest.mark.parametrize(
    "settings",
    [
        changed(sentencepiece_json(), "model", byte_fallback=False),
        changed(sentencepiece_json(), "model", ignore_merges=True),
        changed(sentencepiece_json(), "top", normalizer={"type": "NFKC"}),
        changed(byte_level_json(), "top", normalizer={"type": "NFC"}),
        changed(byte_level_json(), "top", pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}),
        changed(byte_level_json(), "top", pre_tokenizer=None),
        changed(byte_level_json(), "model", type="Unigram"),
        with_joining_piece(),
    ],
)
def test_a_tokenizer_that_may_join_words_is_left_to_the_library(settings: dict[str, Any]) -> None:
    assert word_rule(settings) is None


def test_a_piece_that_joins_words_would_have_made_the_cut_wrong() -> None:
    settings = {**with_joining_piece(), "added_tokens": []}
    settings["model"]["merges"] = [["e", "▁a"], *settings["model"]["merges"]]
    whole = tokenizers.Tokenizer.from_str(json.dumps(settings))
    joined = whole.encode("be a", add_special_tokens=False).tokens
    assert any("e▁a" in piece for piece in joined) == ("▁a" in joined or "e▁a" in joined)
