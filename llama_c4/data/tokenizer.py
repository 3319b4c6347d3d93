"""Text to token ids: the adapter of the library `tokenizers`, and what a tokenizer must be to be used here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from llama_c4.config.errors import DataError
from llama_c4.data.cache import Tokens
from llama_c4.data.word_encoder import WordEncoder, WordRule, word_rule

MAX_VOCAB_SIZE = 1 << 16
"""Ids are stored as uint16."""


@dataclass(frozen=True)
class EncoderSettings:
    """What it takes to encode documents, in a form that is quick to send to another process and to start from.

    Attributes:
        library: The tokenizer.json without added tokens, template, truncation and padding; of single words if there is
            a rule.
        rule: How texts are cut into words; None where they are encoded whole.
        vocab_size, eos_id, eos_token, name: As of the tokenizer.
    """

    library: str
    rule: WordRule | None
    vocab_size: int
    eos_id: int
    eos_token: str
    name: str


class DocumentEncoder:
    """Encodes documents: no special tokens, and one EOS after each. Text that spells a special token is text."""

    def __init__(self, settings: EncoderSettings) -> None:
        # The switch of the library's threads is read from the process's environment and from nowhere else. Processes
        # are the parallelism here, and a thread pool that has been used makes a later fork hang.
        os.putenv("TOKENIZERS_PARALLELISM", "false")
        self._settings = settings
        try:
            self._library = tokenizers.Tokenizer.from_str(settings.library)
        except Exception as error:  # the library raises bare Exception
            raise DataError(_unreadable(settings.name, error)) from None
        self._words = None if settings.rule is None else WordEncoder(settings.rule, self._encode_words)

    def encode(self, texts: Sequence[bytes]) -> tuple[Tokens, NDArray[np.int64]]:
        """Encode documents, each followed by EOS.

        Args:
            texts: Documents in UTF-8; an empty one gives a lone EOS.
        Returns:
            All tokens, uint16 [n], and the position after every document's EOS, [len(texts)].
        Raises:
            DataError: An id that is not below V, or an EOS inside a document.
        """
        settings = self._settings
        ids = self.ids([text.decode() for text in texts])
        eos = np.uint16(settings.eos_id).tobytes()
        tokens = np.frombuffer(b"".join(part for document in ids for part in (document, eos)), np.uint16)
        ends = np.cumsum([len(document) // 2 + 1 for document in ids], dtype=np.int64)
        if tokens.size and int(tokens.max()) >= settings.vocab_size:
            raise DataError(
                f"data.tokenizer={settings.name}: gave id {tokens.max()}, beyond its {settings.vocab_size} entries"
            )
        if np.count_nonzero(tokens == settings.eos_id) != len(texts):
            raise DataError(
                f"data.tokenizer={settings.name}: gave {settings.eos_token!r} inside a document; {_AMBIGUOUS}"
            )
        return tokens, ends

    def ids(self, texts: list[str]) -> list[bytes]:
        """The ids of every text, as uint16 bytes; word by word where that is exact, else through the library."""
        if self._words is not None:
            return self._words.encode(texts)
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        return [_as_uint16(np.array(encoding.ids, np.uint32)).tobytes() for encoding in encodings]

    def _encode_words(self, words: list[str]) -> list[int]:
        return self._library.encode_batch_fast([words], is_pretokenized=True, add_special_tokens=False)[0].ids


def _as_uint16(ids: NDArray[np.uint32]) -> Tokens:
    if ids.size and int(ids.max()) >= MAX_VOCAB_SIZE:
        raise DataError(f"the tokenizer gave id {ids.max()}, which uint16 cannot hold")
    return ids.astype(np.uint16)


class Tokenizer:
    """A `tokenizer.json`, as it is used for training: its entries, its EOS, and the encoder of its documents.

    Args:
        data: The bytes of the tokenizer.json.
        eos_token: The entry put after every document.
        name: How to call it in messages.
    Attributes:
        data: As given.
        fingerprint: SHA-256 (hex) of those bytes. Two tokenizers of one size are told apart by this alone.
        vocab_size: V, entries with the added ones.
        eos_token, eos_id: The end of a document.
        encoder: Encodes documents in this process.
        encoder_settings: Makes such an encoder in another one.
    Raises:
        DataError: Not a tokenizer.json, no such EOS, ids beyond uint16 or not below V, or a random (BPE dropout) or
            ambiguous (text that spells the EOS becomes it) encoding.
    """

    def __init__(self, data: bytes, *, eos_token: str, name: str) -> None:
        self.data = data
        self.fingerprint = hashlib.sha256(data).hexdigest()
        self.eos_token = eos_token
        self.name = name
        settings = _parse(data, name)
        vocabulary = _vocabulary(settings)
        self.vocab_size = len(vocabulary)
        self.eos_id = _checked_eos(vocabulary, eos_token, name)
        plain = _without_special_tokens(settings, name)
        rule = word_rule(plain)
        self.encoder_settings = EncoderSettings(
            library=json.dumps(plain if rule is None else rule.of_words(plain)),
            rule=rule,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            eos_token=eos_token,
            name=name,
        )
        self.encoder = DocumentEncoder(self.encoder_settings)
        self._check_eos_text_stays_text()

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of token ids, special tokens left out."""
        library = tokenizers.Tokenizer.from_str(self.data.decode())
        return library.decode([int(token) for token in tokens], skip_special_tokens=True)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError unless the model has exactly this tokenizer's vocabulary."""
        if self.vocab_size != vocab_size:
            raise DataError(
                f"data.tokenizer={self.name}: {self.vocab_size} entries, but model.vocab_size={vocab_size}; "
                f"set model.vocab_size={self.vocab_size} or name another tokenizer"
            )

    def _check_eos_text_stays_text(self) -> None:
        for text in (self.eos_token, f"a{self.eos_token}b", f"a {self.eos_token} b"):
            if self.eos_id in np.frombuffer(self.encoder.ids([text])[0], np.uint16):
                raise DataError(f"data.tokenizer={self.name}: turns the text {text!r} into its EOS; {_AMBIGUOUS}")


_AMBIGUOUS = "a document could forge its own end: choose another data.eos_token or tokenizer"


def _unreadable(name: str, error: Exception) -> str:
    return f"data.tokenizer={name}: not a tokenizer.json that can be read ({error!r})"


def _parse(data: bytes, name: str) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(data)
        _ = settings["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(_unreadable(name, error)) from None
    return settings


def _vocabulary(settings: dict[str, Any]) -> dict[str, int]:
    """Every entry and its id, the added ones too."""
    entries = settings["model"]["vocab"]  # Unigram lists [piece, score]
    pieces = entries if isinstance(entries, dict) else {piece: index for index, (piece, _) in enumerate(entries)}
    return {**pieces, **{token["content"]: token["id"] for token in settings.get("added_tokens") or []}}


def _checked_eos(vocabulary: dict[str, int], eos_token: str, name: str) -> int:
    largest = max(vocabulary.values(), default=-1)
    if len(vocabulary) > MAX_VOCAB_SIZE or largest >= MAX_VOCAB_SIZE:
        raise DataError(
            f"data.tokenizer={name}: {len(vocabulary)} entries with ids up to {largest}, but ids are stored as uint16 "
            f"(at most {MAX_VOCAB_SIZE - 1}); name a tokenizer of at most {MAX_VOCAB_SIZE} entries"
        )
    if largest >= len(vocabulary):
        raise DataError(
            f"data.tokenizer={name}: ids up to {largest} with {len(vocabulary)} entries; ids must be 0 … V - 1"
        )
    if eos_token not in vocabulary:
        raise DataError(f"data.eos_token={eos_token!r}: not an entry of {name}; name the token that ends a document")
    return vocabulary[eos_token]


def _without_special_tokens(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The same model without added tokens, template, truncation and padding: text in, ids of that text out."""
    if settings["model"].get("dropout"):
        raise DataError(f"data.tokenizer={name}: encodes at random (model.dropout in the file); set it to null there")
    return {**settings, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}


def read_tokenizer(path: Path, *, eos_token: str) -> Tokenizer:
    """Load a tokenizer.json, or the one inside a folder."""
    try:
        data = _json_file(path).read_bytes()
    except OSError as error:
        raise DataError(f"data.tokenizer={path}: cannot be read ({error.strerror}); name a tokenizer.json") from None
    return Tokenizer(data, eos_token=eos_token, name=str(path))


def file_fingerprint(path: Path | str) -> str | None:
    """SHA-256 of a tokenizer.json, or of the one inside a folder; None where there is none."""
    file = _json_file(Path(path).expanduser())
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _json_file(path: Path) -> Path:
    return path / "tokenizer.json" if path.is_dir() else path


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, eos_token: str) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` entries: the EOS, the 256 bytes, and the merges of a text.

    The same texts give the same bytes of JSON, on any machine.

    Raises:
        DataError: The vocabulary is too small for the bytes, or the texts too few for it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(alphabet) + 1
    if not smallest <= vocab_size <= MAX_VOCAB_SIZE:
        raise DataError(
            f"model.vocab_size={vocab_size}: a byte-level tokenizer has {smallest} (bytes and EOS) to {MAX_VOCAB_SIZE} "
            "entries; set it between them, or data.tokenizer to a tokenizer.json"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[eos_token], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size}: the training text yields a tokenizer of {found} entries only; "
            f"set model.vocab_size={found} or take more text"
        )
    return Tokenizer(tokenizer.to_str().encode(), eos_token=eos_token, name="train")
