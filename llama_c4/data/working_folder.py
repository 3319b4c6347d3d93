"""`NAME.partial`: where a cache is made, under a lock, and what it takes to continue there after any interruption."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from llama_c4.config.errors import DataError
from llama_c4.data.cache import MANIFEST, Shard, TokenCache, manifest_identity, partial_path
from llama_c4.data.shards import FullShards, disk_faults, sync_folder, write_json

_LOCK = ".lock"
_JOURNAL = "progress.json"
TOKENIZER = "tokenizer.json"


class WorkingFolder:
    """The claimed folder of one preparation and its journal.

    The journal holds what is being made (its settings, the identity of the cache that is being extended) and, of each
    split, the full shards that are safe on disk or the finished record.

    Attributes:
        path: `NAME.partial`.
    """

    def __init__(self, cache_path: Path, path: Path) -> None:
        self.path = path
        self._cache_path = cache_path
        self._journal: dict[str, Any] = {}

    def resume(self, settings: dict[str, Any], *, base: str | None) -> bool:
        """Take up the work that lies here if it is of these settings and unharmed; else clear the folder.

        Returns:
            Whether there was something to take up.
        """
        wanted = {"settings": settings, "base": base}
        try:
            self._journal = json.loads((self.path / _JOURNAL).read_bytes())
            usable = all(self._journal.get(key) == value for key, value in wanted.items()) and self._is_unharmed()
        except (OSError, ValueError, KeyError, TypeError, DataError):
            usable = False
        if not usable:
            self._clear()
            self._journal = {**wanted, "full_shards": {}, "finished": {}}
            self._save()
        return usable

    def tokenizer(self) -> dict[str, Any] | None:
        """The manifest's record of the tokenizer whose copy lies here; None when there is none yet."""
        return self._journal.get("tokenizer")

    def keep_tokenizer(self, content: bytes, record: dict[str, Any]) -> None:
        """Keep a copy of the tokenizer in the cache."""
        with disk_faults(self.path / TOKENIZER):
            (self.path / TOKENIZER).write_bytes(content)
        self._journal["tokenizer"] = record
        self._save()

    def full_shards(self, split: str) -> FullShards | None:
        """The full shards of a split that were written here, and where to go on; None when there are none yet."""
        record = self._journal["full_shards"].get(split)
        return FullShards.from_json(record) if record is not None else None

    def keep_full_shards(self, split: str, shards: FullShards) -> None:
        """Note that these shards of a split are safe on disk."""
        self._journal["full_shards"][split] = shards.to_json()
        self._save()

    def finished(self, split: str) -> dict[str, Any] | None:
        """The manifest's record of a split that was written to its end."""
        return self._journal["finished"].get(split)

    def keep_finished(self, split: str, record: dict[str, Any]) -> None:
        """Note that a split is done."""
        self._journal["finished"][split] = record
        self._save()

    def publish(self, manifest: dict[str, Any]) -> TokenCache:
        """Turn the folder into the cache, or move its shards into the one that it extends; the manifest comes last."""
        manifest = {**manifest, "identity": manifest_identity(manifest)}
        shards = {shard["file"] for split in manifest["splits"].values() for shard in split["shards"]}
        self._clear(keep={*shards, TOKENIZER, _JOURNAL})
        with disk_faults(self._cache_path):
            if (self._cache_path / MANIFEST).exists():
                self._move_into_cache(shards, manifest)
            else:
                write_json(self.path / MANIFEST, manifest)
                self.path.rename(self._cache_path)
                sync_folder(self._cache_path.parent)
                for name in (_JOURNAL, _LOCK):
                    (self._cache_path / name).unlink(missing_ok=True)
        return TokenCache.open(self._cache_path)

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)

    def discard_if_empty(self) -> None:
        """Remove the folder unless there is work in it to go on from."""
        if not any(self._journal.get(key) for key in ("tokenizer", "full_shards", "finished")):
            self.discard()

    def _move_into_cache(self, shards: Collection[str], manifest: dict[str, Any]) -> None:
        """Readers of the old manifest go on undisturbed: no file that it names is touched."""
        for name in shards:
            if (self.path / name).exists():
                (self.path / name).rename(self._cache_path / name)
        sync_folder(self._cache_path)
        write_json(self._cache_path / MANIFEST, manifest)
        self.discard()

    def _is_unharmed(self) -> bool:
        """Hash what lies here: the journal's promise must hold after a crash of the machine, too."""
        records = [*self._journal["full_shards"].values(), *self._journal["finished"].values()]
        for shard in {shard["file"]: shard for record in records for shard in record["shards"]}.values():
            here, there = self.path / shard["file"], self._cache_path / shard["file"]
            found = Shard(here if here.exists() else there, shard["tokens"], shard["sha256"])
            found.check_size()
            found.check_hash()
        return True

    def _save(self) -> None:
        write_json(self.path / _JOURNAL, self._journal)

    def _clear(self, keep: Collection[str] = ()) -> None:
        for entry in self.path.iterdir():
            if entry.name == _LOCK or entry.name in keep:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


@contextmanager
def claim_working_folder(cache_path: Path) -> Generator[WorkingFolder, None, None]:
    """Make `NAME.partial` and hold its lock; no two processes prepare one cache.

    Raises:
        DataError: Another process holds it, or the folder cannot be made.
    """
    path = partial_path(cache_path)
    with _locked(path):
        yield WorkingFolder(cache_path, path)


def _locked(path: Path) -> TextIO:
    """The open lock file of the folder, held; closing it lets go."""
    while True:
        with disk_faults(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / _LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "?"
            lock.close()
            raise DataError(
                f"{path}: being prepared by process {holder}; wait for it, or prepare another data.cache_dir"
            ) from None
        if _is_same_file(lock, path / _LOCK):
            lock.truncate(0)
            lock.write(f"{os.getpid()} on {os.uname().nodename}")
            lock.flush()
            return lock
        lock.close()  # another process has just finished and renamed the folder that this lock lay in


def _is_same_file(lock: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False
