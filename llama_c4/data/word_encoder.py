"""Tokenizing word by word, each word once: exact for the tokenizers that never join what stands on the two sides of a
space, and several times as fast as the library, which does all its work anew for every occurrence of `the`.

A text is cut into *words*: white space and what follows it up to the next white space. Where no token can reach over
such a border, ids(text) = ids(word 1) ids(word 2) …, so the ids of a word can be kept in a table. Two kinds of
tokenizer are known to have that property, and both are recognised from their JSON alone:

* sentencepiece BPE (Llama, Mistral): spaces become `▁`, and no piece has a `▁` behind another character;
* byte-level BPE with GPT-2's pattern, whose every alternative is white space, or a run without any and at most a
  space before it; its one look-ahead, `\\s+(?!\\S)`, sees the character behind the white space, of the same word.

Everything else goes through the library as a whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_META = "▁"
# The white space of Unicode, spelled out: Python's \s counts U+001C to U+001F too.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

MAX_WORDS = 1 << 17
"""Words in the table, tens of MB; the frequent ones come early, so it is filled once and kept."""
MAX_WORD_LENGTH = 64
"""A longer word is encoded every time; it would rarely be met again."""
PIECE_LENGTH = 1 << 20
"""Characters of a text that are cut into words at once; it bounds the memory that a huge document takes."""


@dataclass(frozen=True)
class WordRule:
    """How the texts of a tokenizer are cut into words.

    Attributes:
        normalizes: Whether words come out of the cut normalized, so that the library must not do it again.
        piece_bytes: UTF-8 bytes of a word that each id stands for, [V]; by them the ids of many words are told apart.
        prefix: What the tokenizer puts before a text.
        space: What stands for a space in a cut text.
        space_class: White space in a cut text, as the inside of a regular expression's brackets.
    """

    normalizes: bool
    piece_bytes: NDArray[np.int64]
    prefix: str
    space: str
    space_class: str

    def of_words(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The tokenizer.json for single words, from that for whole texts."""
        return {**settings, "normalizer": None, "pre_tokenizer": None} if self.normalizes else dict(settings)


class WordEncoder:
    """The table of words of one tokenizer.

    Args:
        rule: How texts are cut.
        encode_words: Words → the ids of all of them, one after the other.
    """

    def __init__(self, rule: WordRule, encode_words: Callable[[list[str]], list[int]]) -> None:
        self._rule = rule
        self._encode_words = encode_words
        self._words = re.compile(f"[{rule.space_class}]*[^{rule.space_class}]+|[{rule.space_class}]+")
        self._border = re.compile(f"[^{rule.space_class}](?=[{rule.space_class}])")
        self._table = _Table()

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of every text, as uint16 bytes in the machine's order; an empty text has none."""
        if all(len(text) <= PIECE_LENGTH for text in texts):
            return self._encode_pieces([self._normalized(text) for text in texts])
        return [
            b"".join(ids for piece in self._pieces(self._normalized(text)) for ids in self._encode_pieces([piece]))
            for text in texts
        ]

    def _normalized(self, text: str) -> str:
        return self._rule.prefix + text.replace(" ", self._rule.space) if text else ""

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut a huge text at borders of words."""
        start = 0
        while (border := self._border.search(text, start + PIECE_LENGTH)) is not None:
            yield text[start : border.start() + 1]
            start = border.start() + 1
        yield text[start:]

    def _encode_pieces(self, pieces: list[str]) -> list[bytes]:
        words = [self._words.findall(piece) for piece in pieces]
        unknown = {word for of_piece in words for word in of_piece if word not in self._table}
        self._table.fresh = self._encoded_words(list(unknown)) if unknown else {}
        ids = [b"".join(map(self._table.__getitem__, of_piece)) for of_piece in words]
        self._table.keep_fresh()
        return ids

    def _encoded_words(self, words: list[str]) -> dict[str, bytes]:
        """Encode many words in one call, which gives one list of ids."""
        ids = np.array(self._encode_words(words), np.uint32)
        reached = np.cumsum(self._rule.piece_bytes[ids])
        borders = np.cumsum([len(word.encode()) for word in words])
        last = np.searchsorted(reached, borders)
        assert np.array_equal(reached[last], borders), "the ids of a word do not spell it"
        data = ids.astype(np.uint16).tobytes()
        ends = (2 * (last + 1)).tolist()
        return {word: data[start:end] for word, start, end in zip(words, [0, *ends], ends, strict=False)}


class _Table(dict[str, bytes]):
    """Word → ids: the words that are kept, and behind them the fresh ones of the texts at hand."""

    fresh: Mapping[str, bytes]

    def __missing__(self, word: str) -> bytes:
        return self.fresh[word]

    def keep_fresh(self) -> None:
        """Keep what is likely to be met again, as long as there is room."""
        for word, ids in self.fresh.items():
            if len(self) >= MAX_WORDS:
                break
            if len(word) <= MAX_WORD_LENGTH:
                self[word] = ids
        self.fresh = {}


def word_rule(settings: Mapping[str, Any]) -> WordRule | None:
    """The rule for a tokenizer.json without added tokens; None where cutting it into words may not be exact."""
    model = settings["model"]
    variants = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(key) for key in variants):
        return None
    if _is_sentencepiece(settings):
        return WordRule(
            normalizes=True,
            piece_bytes=_piece_bytes(model["vocab"], lambda p: 1 if _BYTE_PIECE.fullmatch(p) else len(p.encode())),
            prefix=_META,
            space=_META,
            space_class=_META,
        )
    if _is_byte_level(settings):
        piece_bytes = _piece_bytes(model["vocab"], len)
        return WordRule(normalizes=False, piece_bytes=piece_bytes, prefix="", space=" ", space_class=_SPACE)
    return None


_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_SENTENCEPIECE_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": _META},
        {"type": "Replace", "pattern": {"String": " "}, "content": _META},
    ],
}
_SENTENCEPIECE_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": f"{_META}*[^{_META}]+|{_META}+"},
    "behavior": "Isolated",
    "invert": False,
}


# GPT-2's characters for the 256 bytes: the visible ones for themselves, 68 others from U+0100 on.
_BYTE_ALPHABET = {*map(chr, [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 256 + 68)])}


def _is_sentencepiece(settings: Mapping[str, Any]) -> bool:
    """Llama's form: with byte fallback there is no unknown character, whose ids could be fused over a border."""
    model = settings["model"]
    return (
        settings.get("normalizer") == _SENTENCEPIECE_NORMALIZER
        and settings.get("pre_tokenizer") in (None, _SENTENCEPIECE_SPLIT)
        and bool(model.get("byte_fallback"))
        and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
        and not any(_META in piece.lstrip(_META) for piece in model["vocab"])
    )


def _is_byte_level(settings: Mapping[str, Any]) -> bool:
    """GPT-2's form, with every byte in the vocabulary."""
    pre_tokenizer = settings.get("pre_tokenizer") or {}
    return (
        settings.get("normalizer") is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("add_prefix_space") is False
        and pre_tokenizer.get("use_regex", True) is True
        and set(settings["model"]["vocab"]) >= _BYTE_ALPHABET
    )


def _piece_bytes(vocabulary: Mapping[str, int], length: Callable[[str], int]) -> NDArray[np.int64]:
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for piece, index in vocabulary.items():
        lengths[index] = length(piece)
    return lengths
