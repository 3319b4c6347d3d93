"""Writing the tokens of a split into shards, so that it can be stopped and continued at the border of any two."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llama_c4.config.errors import DataError
from llama_c4.data.cache import Tokens
from llama_c4.data.documents import Document, Seen


@dataclass(frozen=True)
class EncodedBatch:
    """Consecutive documents as tokens.

    Attributes:
        tokens: Of all documents, each with its EOS; uint16 [n].
        documents: The documents; empty for a source that has none.
        ends: Position after each document's EOS, [documents].
        start: Position of the first document's first token: 0, or below it where a part is in the cache already.
    """

    tokens: Tokens
    documents: list[Document]
    ends: NDArray[np.int64]
    start: int = 0

    def first(self, num_documents: int) -> EncodedBatch:
        """The same without its later documents."""
        end = int(self.ends[num_documents - 1])
        return replace(
            self,
            tokens=self.tokens[:end],
            documents=self.documents[:num_documents],
            ends=self.ends[:num_documents],
        )

    def without_first(self, num_tokens: int) -> EncodedBatch:
        """The same without the first tokens of its first document."""
        return replace(
            self, tokens=self.tokens[num_tokens:], ends=self.ends - num_tokens, start=self.start - num_tokens
        )


@dataclass(frozen=True)
class Cursor:
    """A place in the stream of documents: that of the first token which is not in a full shard.

    Attributes:
        documents: Whole documents before it.
        offset: Tokens of the next document before it.
        text_bytes: UTF-8 bytes of the whole documents before it.
        text_chain: Hash of their texts, one after the other, by which a changed corpus is found out.
    """

    documents: int = 0
    offset: int = 0
    text_bytes: int = 0
    text_chain: str = ""

    def after(self, document: Document) -> Cursor:
        """The start of the next document: the chain goes on with SHA-256(chain, text)."""
        return Cursor(
            documents=self.documents + 1,
            text_bytes=self.text_bytes + len(document.text),
            text_chain=hashlib.sha256(self.text_chain.encode() + document.text).hexdigest(),
        )


@dataclass(frozen=True)
class FullShards:
    """The full shards of a split (manifest records: file, tokens, sha256), and where to go on after them."""

    shards: tuple[dict[str, Any], ...] = ()
    cursor: Cursor = field(default_factory=Cursor)

    @property
    def num_tokens(self) -> int:
        return sum(shard["tokens"] for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        return {"shards": list(self.shards), "cursor": asdict(self.cursor)}

    @classmethod
    def of_record(cls, record: dict[str, Any], shard_tokens: int) -> FullShards:
        """Those of a manifest's record of a split, without the incomplete last one."""
        shards = tuple(shard for shard in record["shards"] if shard["tokens"] == shard_tokens)
        return cls(shards, Cursor(**record["cursor"]))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> FullShards:
        return cls(tuple(record["shards"]), Cursor(**record["cursor"]))


class SplitWriter:
    """Writes the tokens of one split as shards of `shard_tokens` little-endian uint16 tokens.

    A full shard is `train-00007.bin`, an incomplete last one carries its length, `train-00008-123456.bin`: its
    completion is another file, so a reader of the shorter one is never disturbed.

    Args:
        folder: Where the shards go.
        name: The split.
        shard_tokens: Tokens of a full shard.
        start: Full shards that exist already; the first tokens added are those at its cursor.
        on_full_shard: Called with all full shards once another one is safe on disk.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        shard_tokens: int,
        start: FullShards,
        on_full_shard: Callable[[FullShards], None],
    ) -> None:
        self._folder = folder
        self._name = name
        self._shard_tokens = shard_tokens
        self._on_full_shard = on_full_shard
        self._full = start
        self._shard: _OpenShard | None = None
        self._next = replace(start.cursor, offset=0)  # the first document that is not whole in what was added
        self.num_tokens = start.num_tokens
        self.seen = Seen()

    @property
    def num_documents(self) -> int:
        return self._next.documents

    def add(self, batch: EncodedBatch) -> None:
        """Append a batch; its first document may have begun in the shard before (see `Cursor.offset`)."""
        done = whole = 0
        while done < len(batch.tokens):
            shard = self._open_shard()
            take = min(self._shard_tokens - shard.num_tokens, len(batch.tokens) - done)
            shard.write(batch.tokens[done : done + take])
            done += take
            self.num_tokens += take
            now_whole = int(np.searchsorted(batch.ends, done, side="right"))
            for document in batch.documents[whole:now_whole]:
                self._next = self._next.after(document)
                self.seen = document.seen
            whole = now_whole
            if shard.num_tokens == self._shard_tokens:
                start = int(batch.ends[whole - 1]) if whole else batch.start
                self._close_full(replace(self._next, offset=done - start))

    def finish(self) -> dict[str, Any]:
        """Close the incomplete last shard and give the split's record for the manifest."""
        shards = list(self._full.shards)
        if self._shard is not None:
            shards.append(self._shard.close(f"{self._name}-{len(shards):05d}-{self._shard.num_tokens}.bin"))
            self._shard = None
        return {
            "tokens": self.num_tokens,
            "documents": self._next.documents,
            "text_bytes": self._next.text_bytes,
            "shards": shards,
            "cursor": asdict(self._full.cursor),
        }

    def abort(self) -> None:
        """Close the file that is being written; it is not part of anything."""
        if self._shard is not None:
            self._shard.file.close()
            self._shard = None

    def _open_shard(self) -> _OpenShard:
        if self._shard is None:
            self._shard = _OpenShard(self._folder / f"{self._name}-{len(self._full.shards):05d}.writing")
        return self._shard

    def _close_full(self, cursor: Cursor) -> None:
        assert self._shard is not None
        record = self._shard.close(f"{self._name}-{len(self._full.shards):05d}.bin")
        self._shard = None
        self._full = FullShards((*self._full.shards, record), cursor)
        self._on_full_shard(self._full)


class _OpenShard:
    """A shard while it is written, under a side name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_tokens = 0
        self._digest = hashlib.sha256()
        with disk_faults(path):
            self.file: BinaryIO = path.open("wb")

    def write(self, tokens: Tokens) -> None:
        data = tokens.astype("<u2", copy=False).tobytes()
        self._digest.update(data)
        self.num_tokens += len(tokens)
        with disk_faults(self.path):
            self.file.write(data)

    def close(self, name: str) -> dict[str, Any]:
        """Sync, rename, and give the manifest's record."""
        with disk_faults(self.path):
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
            finally:
                self.file.close()
            self.path.rename(self.path.with_name(name))
            sync_folder(self.path.parent)
        return {"file": name, "tokens": self.num_tokens, "sha256": self._digest.hexdigest()}


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn a failed write into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{path}: no space left on the device; free some, or set data.cache_dir to another disk, and run the "
                "same command again: it continues after the last complete shard"
            ) from error
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file under a side name, sync it and rename it, so that it is there whole or not at all."""
    side = path.with_name(path.name + ".writing")
    with disk_faults(path):
        with side.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        side.rename(path)
        sync_folder(path.parent)
