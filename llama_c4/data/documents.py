"""Documents on their way to the tokenizer: what a source hands out, how a row becomes a text, the shuffle buffer."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True)
class SourceFile:
    """A file that documents came from; `sha256` is of its bytes on disk, None until it was read to its end."""

    name: str
    num_bytes: int
    sha256: str | None = None


@dataclass(frozen=True)
class Seen:
    """What a source had read when it handed out a document: files, and the rows it had to skip.

    A new `Seen` is made only when a file begins or ends or a row is skipped; documents share it. So the manifest of a
    preparation that stops early can say what the documents in the cache took, however far the reader was ahead.
    """

    files: tuple[SourceFile, ...] = ()
    skipped: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def skip(self, file: str, kind: str) -> Seen:
        """With one more skipped row of this file and kind."""
        kinds = dict(self.skipped.get(file, {}))
        kinds[kind] = kinds.get(kind, 0) + 1
        return replace(self, skipped={**self.skipped, file: kinds})

    def begin(self, file: SourceFile) -> Seen:
        """With one more file, opened just now."""
        return replace(self, files=(*self.files, file))

    def finish(self, sha256: str) -> Seen:
        """With the newest file read to its end."""
        return replace(self, files=(*self.files[:-1], replace(self.files[-1], sha256=sha256)))


class Document(NamedTuple):
    """One text, UTF-8, and what had been read by then.

    Bytes, not str: a str with one curly quote takes two bytes a character, and the shuffle buffer holds many.
    """

    text: bytes
    seen: Seen


class Reading:
    """How far a source has come, for whoever iterates over its documents.

    Attributes:
        seen: Files and skipped rows so far; final once the documents are exhausted.
        documents: Documents handed out so far.
        fraction: Part of the source that was read, in [0, 1]; None where nobody knows.
    """

    def __init__(self) -> None:
        self.seen = Seen()
        self.documents = 0
        self.fraction: float | None = None


class DocumentSource(Protocol):
    """A corpus of text with a `train` and a `validation` split."""

    def settings(self) -> dict[str, object]:
        """What identifies the corpus, as plain values for the manifest; files are listed apart."""
        ...

    def files(self, split: str) -> list[SourceFile] | None:
        """The files of a split in reading order; None where the source has none of its own."""
        ...

    def documents(self, split: str, reading: Reading) -> Generator[Document, None, None]:
        """The documents of a split in order; keeps `reading` up to date. Close the generator to stop early."""
        ...


class SkippedRow(ValueError):
    """A row without a usable text.

    Attributes:
        kind: `not_utf8`, `not_json`, `not_an_object`, `missing_text`, `null_text`, `text_not_a_string` or
            `lone_surrogate`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def text_of_line(line: bytes) -> bytes:
    """The `text` of one JSON line, in UTF-8.

    Python's own JSON reader, a line at a time: the columnar readers lose a whole file to one bad row.

    Raises:
        SkippedRow: There is none, or it cannot be decoded.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise SkippedRow("not_utf8") from None
    except (ValueError, RecursionError):
        raise SkippedRow("not_json") from None
    if not isinstance(row, dict):
        raise SkippedRow("not_an_object")
    return text_of_row(row)


def text_of_row(row: Mapping[str, object]) -> bytes:
    """The `text` of a parsed row, in UTF-8.

    Raises:
        SkippedRow: There is none, or it holds a lone surrogate, which no UTF-8 can carry.
    """
    if "text" not in row:
        raise SkippedRow("missing_text")
    text = row["text"]
    if text is None:
        raise SkippedRow("null_text")
    if not isinstance(text, str):
        raise SkippedRow("text_not_a_string")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise SkippedRow("lone_surrogate") from None


def shuffle_documents(documents: Iterator[Document], *, buffer_size: int, seed: int) -> Iterator[Document]:
    """Shuffle a stream with a buffer of `buffer_size` documents; 0 keeps the order.

    Once the buffer is full, every new document takes the place of a random one, which is handed out; at the end the
    rest follows in random order. Depends on the order of the stream and the seed alone. What a document hands on as
    `seen` is the newest state of the reader: all that was read for the documents up to it.
    """
    if buffer_size == 0:
        yield from documents
        return
    random = np.random.default_rng(np.random.SeedSequence([seed, 2]))
    buffer: list[bytes] = []
    places: list[int] = []
    seen = Seen()
    for text, seen in documents:
        if len(buffer) < buffer_size:
            buffer.append(text)
            continue
        if not places:
            places = random.integers(buffer_size, size=1024).tolist()
        place = places.pop()
        yield Document(buffer[place], seen)
        buffer[place] = text
    for place in random.permutation(len(buffer)).tolist():
        yield Document(buffer[place], seen)
