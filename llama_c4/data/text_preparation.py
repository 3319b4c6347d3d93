"""The preparation of a cache of text: documents, shuffled and tokenized, behind whatever is there already."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llama_c4.config.errors import DataError
from llama_c4.config.schema import C4Config, C4FilesConfig
from llama_c4.data.cache import FORMAT, VERSION, TokenCache
from llama_c4.data.cache_match import (
    file_differences,
    is_enough,
    refuse,
    setting_differences,
    tokenizer_differences,
)
from llama_c4.data.documents import Document, DocumentSource, Reading, Seen, shuffle_documents
from llama_c4.data.encode_pool import Encoder, batches_of, build_encoder
from llama_c4.data.preparation_display import PreparationDisplay
from llama_c4.data.shards import Cursor, EncodedBatch, FullShards, SplitWriter
from llama_c4.data.sources import TextConfig, build_source, load_tokenizer, text_settings, tokenizer_origin
from llama_c4.data.tokenizer import Tokenizer, file_fingerprint, read_tokenizer
from llama_c4.data.working_folder import TOKENIZER, WorkingFolder

SPLITS = ("validation", "train")
"""In the order of preparation: what is wrong shows in the small split first."""


class TextPreparation:
    """Writes a corpus up to the targets of its splits; a target of None is all that there is.

    A split ends with the document in which its target falls, so it holds whole documents only.
    """

    def __init__(
        self, data: TextConfig, *, vocab_size: int, train_tokens_needed: int | None, display: PreparationDisplay
    ) -> None:
        self._data = data
        self._vocab_size = vocab_size
        self._targets = {
            "train": _train_target(data, train_tokens_needed),
            "validation": data.validation_tokens,
        }
        self._display = display

    def is_enough(self, cache: TokenCache) -> bool:
        return is_enough(cache.train, self._targets["train"]) and is_enough(
            cache.validation, self._targets["validation"]
        )

    def check_base(self, cache: TokenCache) -> None:
        source = build_source(self._data, working=Path())
        settings = text_settings(self._data, source, vocab_size=self._vocab_size)
        differences = setting_differences(cache.manifest, settings)
        differences += tokenizer_differences(cache.manifest, self._data, fetch=True)
        refuse(cache, differences + file_differences(cache.manifest, source))
        cache.verify()
        _kept_tokenizer(cache.path, cache.manifest["tokenizer"])

    def build(self, work: WorkingFolder, base: TokenCache | None) -> dict[str, Any]:
        source = build_source(self._data, working=work.path / "corpus")
        settings = text_settings(self._data, source, vocab_size=self._vocab_size)
        if work.resume({**settings, "tokenizer": self._request()}, base=base.identity if base is not None else None):
            self._display.note(f"continuing what lies in {work.path}")
        tokenizer, record = self._tokenizer(work, base, source)
        with build_encoder(tokenizer, processes=self._processes()) as encoder:
            splits = {name: self._split(name, work, base, source, encoder) for name in SPLITS}
        return {
            **settings,
            "format": FORMAT,
            "version": VERSION,
            "eos_id": tokenizer.eos_id,
            "tokenizer": record,
            "entropy_floor": None,
            "ancestors": _ancestors(base),
            "validation_complete": splits["validation"]["complete"],
            "splits": splits,
        }

    def _request(self) -> dict[str, Any]:
        """What is asked for as the tokenizer, before it is there."""
        origin, revision = tokenizer_origin(self._data)
        fingerprint = file_fingerprint(self._data.tokenizer) if origin == "file" else None
        return {
            "origin": origin,
            "revision": revision,
            "eos_token": self._data.eos_token,
            "fingerprint": fingerprint,
        }

    def _tokenizer(
        self, work: WorkingFolder, base: TokenCache | None, source: DocumentSource
    ) -> tuple[Tokenizer, dict[str, Any]]:
        """The copy that a cache or an interrupted preparation keeps, or else the configured one."""
        if base is not None:
            return _kept_tokenizer(base.path, base.manifest["tokenizer"]), base.manifest["tokenizer"]
        record = work.tokenizer()
        if record is not None:
            return _kept_tokenizer(work.path, record), record
        self._display.note(f"tokenizer: {self._data.tokenizer}")
        tokenizer, origin = load_tokenizer(self._data, source, vocab_size=self._vocab_size)
        record = {
            **origin,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos_token": tokenizer.eos_token,
        }
        work.keep_tokenizer(tokenizer.data, record)
        return tokenizer, record

    def _processes(self) -> int:
        return self._data.prepare_processes or len(os.sched_getaffinity(0))

    def _split(
        self, name: str, work: WorkingFolder, base: TokenCache | None, source: DocumentSource, encoder: Encoder
    ) -> dict[str, Any]:
        """The manifest's record of a split: an old one that is enough, or one that continues the longest beginning."""
        target = self._targets[name]
        old = base.manifest["splits"][name] if base is not None else None
        for record in (work.finished(name), old):
            if record is not None and (record["complete"] or (target is not None and record["tokens"] >= target)):
                return record
        first = FullShards() if old is None else FullShards.of_record(old, self._data.shard_tokens)
        try:
            record = self._write(name, work, source, encoder, start=work.full_shards(name) or first)
        except CorpusChanged:
            if old is not None:
                raise DataError(
                    f"{name}: the corpus is not the one that the cache was made of; bring the old files back, or "
                    "prepare another data.cache_dir"
                ) from None
            self._display.note(f"{name}: the corpus has changed since the interruption; starting anew")
            record = self._write(name, work, source, encoder, start=first)
        work.keep_finished(name, record)
        return record

    def _write(
        self, name: str, work: WorkingFolder, source: DocumentSource, encoder: Encoder, *, start: FullShards
    ) -> dict[str, Any]:
        """Write a split behind its full shards, up to its target or the end of the corpus."""
        self._display.start(name)
        reading = Reading()
        writer = SplitWriter(
            work.path,
            name,
            shard_tokens=self._data.shard_tokens,
            start=start,
            on_full_shard=lambda shards: work.keep_full_shards(name, shards),
        )
        try:
            with closing(source.documents(name, reading)) as documents:
                stream = self._in_order(name, documents)
                _skip(stream, start.cursor)
                with closing(encoder.encode_in_order(batches_of(stream))) as batches:
                    complete = self._fill(name, writer, batches, reading, offset=start.cursor.offset)
            record = writer.finish()
        finally:
            writer.abort()
        seen = reading.seen if complete else writer.seen
        if record["documents"] == 0:
            raise DataError(
                f"{_place(self._data)}: no document with a text in the {name} split "
                f"(skipped rows: {dict(seen.skipped) or 0}); it needs JSON lines with a field `text`"
            )
        return {**record, "complete": complete, **_seen_record(seen, own_files=source.files(name) is not None)}

    def _in_order(self, name: str, documents: Iterator[Document]) -> Iterator[Document]:
        if name != "train":
            return documents
        return shuffle_documents(documents, buffer_size=self._data.shuffle_documents, seed=self._data.shuffle_seed)

    def _fill(
        self, name: str, writer: SplitWriter, batches: Iterator[EncodedBatch], reading: Reading, *, offset: int
    ) -> bool:
        """Add batches until the target is reached.

        Args:
            offset: Tokens of the first document that are in a full shard already.
        Returns:
            Whether the corpus came to its end instead.
        """
        target = self._targets[name]
        for batch in batches:
            if offset:
                if offset >= batch.ends[0]:
                    raise CorpusChanged
                batch, offset = batch.without_first(offset), 0
            reached = target is not None and writer.num_tokens + int(batch.ends[-1]) >= target
            if target is not None and reached:
                batch = batch.first(int(np.searchsorted(batch.ends, target - writer.num_tokens)) + 1)
            writer.add(batch)
            self._display.update(
                documents=writer.num_documents,
                tokens=writer.num_tokens,
                fraction=_fraction(writer, reading, target),
            )
            if reached:
                return False
        return True


class CorpusChanged(Exception):
    """The documents that the full shards were made of are not the ones that the source gives now."""


def _skip(documents: Iterator[Document], cursor: Cursor) -> None:
    """Go behind the documents that are in full shards already, and check that they are the same."""
    place = Cursor()
    for document in itertools.islice(documents, cursor.documents):
        place = place.after(document)
    if place != replace(cursor, offset=0):
        raise CorpusChanged


def _train_target(data: TextConfig, train_tokens_needed: int | None) -> int | None:
    if data.train_tokens is not None or not isinstance(data, C4Config):
        return data.train_tokens
    if train_tokens_needed is None:
        raise DataError("data.train_tokens=null: the hub holds 10^11 tokens; say how many to prepare")
    return train_tokens_needed


def _fraction(writer: SplitWriter, reading: Reading, target: int | None) -> float | None:
    """Part of a split that is done: of its target, or of the corpus where that ends first."""
    parts = [] if target is None else [writer.num_tokens / target]
    if reading.fraction and reading.documents:
        parts.append(writer.num_documents * reading.fraction / reading.documents)
    return min(1.0, max(parts)) if parts else None


def _seen_record(seen: Seen, *, own_files: bool) -> dict[str, Any]:
    files = [{"name": file.name, "bytes": file.num_bytes, "sha256": file.sha256} for file in seen.files]
    return {"files": files if own_files else [], "skipped": {name: dict(kinds) for name, kinds in seen.skipped.items()}}


def _kept_tokenizer(folder: Path, record: dict[str, Any]) -> Tokenizer:
    """The copy of the tokenizer that lies in a cache; DataError if it is not the one of the manifest."""
    tokenizer = read_tokenizer(folder / TOKENIZER, eos_token=record["eos_token"])
    if tokenizer.fingerprint != record["fingerprint"]:
        raise DataError(
            f"{folder / TOKENIZER}: sha256 {tokenizer.fingerprint} where the manifest says {record['fingerprint']}; "
            "the cache is damaged: remove its folder and prepare it again"
        )
    return tokenizer


def _ancestors(base: TokenCache | None) -> list[dict[str, Any]]:
    if base is None:
        return []
    return [*base.manifest["ancestors"], {"identity": base.identity, "train_tokens": base.train.num_tokens}]


def _place(data: TextConfig) -> str:
    return f"data.files={data.files}" if isinstance(data, C4FilesConfig) else f"data={data.name}"
