"""The token cache on disk, read side: a manifest and shards of little-endian uint16 tokens.

A cache is a folder with `manifest.json` and the shards of two splits, `train` and `validation`. The tokens of a split
are the concatenation of its shards; every shard but the last holds `shard_tokens` of them. `docs/data.md` is normative
for the manifest. Needs nothing but numpy, so that a login node can look at a cache.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama_c4.config.errors import DataError

FORMAT = "llama-c4-token-cache"
VERSION = 1
DTYPE = "uint16-le"
MANIFEST = "manifest.json"
PARTIAL = ".partial"

Tokens = NDArray[np.uint16]


def manifest_identity(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest without its `identity`, as JSON with sorted keys and no white space."""
    rest = {key: value for key, value in manifest.items() if key != "identity"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def partial_path(path: Path) -> Path:
    """`NAME.partial` beside a cache: where it lies while it is being prepared."""
    return path.with_name(path.name + PARTIAL)


@dataclass(frozen=True)
class Shard:
    """One file of tokens: its path, how many tokens it holds, and the SHA-256 of its bytes (hex)."""

    path: Path
    num_tokens: int
    sha256: str

    def check_size(self) -> None:
        """Raise DataError unless the file exists and holds two bytes a token."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise DataError(f"{self.path}: the shard cannot be read ({error.strerror}); {_REPAIR}") from None
        if size != 2 * self.num_tokens:
            raise DataError(f"{self.path}: {size} bytes where the manifest says {2 * self.num_tokens}; {_REPAIR}")

    def check_hash(self) -> None:
        """Read the whole file and raise DataError unless its SHA-256 is the manifest's."""
        with self.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise DataError(f"{self.path}: sha256 {found} where the manifest says {self.sha256}; {_REPAIR}")


_REPAIR = "the cache is damaged: remove its folder and prepare it again"


class TokenSplit:
    """The tokens of one split, as if its shards were one array.

    Attributes:
        name: `train` or `validation`.
        num_tokens: Tokens in all shards.
        num_documents: Documents that end or begin in them (for a synthetic source 0).
        text_bytes: UTF-8 bytes of the documents' text; None where the source has no text or the split ends inside a
            document.
        complete: Whether the source has no more to give, so that this split can never be extended. The last group of
            shards of a complete split is as whole as it will ever be, so its order is final.
        shards: The files, in order.
        vocab_size: V; a larger id in a shard means that it was altered.
    """

    def __init__(
        self,
        name: str,
        shards: tuple[Shard, ...],
        *,
        vocab_size: int,
        num_documents: int,
        text_bytes: int | None,
        complete: bool,
    ) -> None:
        self.name = name
        self.shards = shards
        self.vocab_size = vocab_size
        self.num_documents = num_documents
        self.text_bytes = text_bytes
        self.complete = complete
        self._starts = [0]
        for shard in shards:
            self._starts.append(self._starts[-1] + shard.num_tokens)
        self.num_tokens = self._starts[-1]

    def num_blocks(self, context_length: int) -> int:
        """Full blocks of L targets: floor((T - 1) / L); neighbours share one look-ahead token."""
        return max(0, (self.num_tokens - 1) // context_length)

    def read(self, start: int, count: int, out: Tokens | None = None) -> Tokens:
        """Read tokens [start, start + count), across the borders of shards, one contiguous read a shard.

        Args:
            start: First token, counted from the start of the split.
            count: How many; the range must lie inside the split.
            out: Where to put them, contiguous uint16 [count]; None makes a new array.
        Returns:
            The tokens, uint16 [count]; `out` itself where it was given.
        Raises:
            ValueError: The range leaves the split, or `out` has another shape or type.
            DataError: A shard is shorter than the manifest says, holds an id beyond the vocabulary, or cannot be read.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise ValueError(f"tokens [{start}, {start + count}) of a split of {self.num_tokens} tokens")
        if out is None:
            out = np.empty(count, np.uint16)
        if out.dtype != np.uint16 or out.shape != (count,) or not out.flags.c_contiguous:
            raise ValueError(f"out must be contiguous uint16 [{count}], not {out.dtype} {list(out.shape)}")
        index, done = bisect.bisect_right(self._starts, start) - 1, 0
        while done < count:
            offset = start + done - self._starts[index]
            take = min(count - done, self.shards[index].num_tokens - offset)
            piece = out[done : done + take]
            _read_tokens(self.shards[index].path, offset, piece)
            if int(piece.max()) >= self.vocab_size:
                raise DataError(
                    f"{self.shards[index].path}: holds the id {piece.max()}, and the vocabulary has {self.vocab_size}, "
                    f"so it was altered; {_REPAIR}"
                )
            index, done = index + 1, done + take
        return out


def _read_tokens(path: Path, offset: int, out: Tokens) -> None:
    """Fill `out` from the token at `offset`; the operating system may return less than it was asked for."""
    place = out.view(np.uint8).data  # writing to these bytes fills `out`
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(2 * offset)
            while len(place):
                got = file.readinto(place)
                if not got:
                    raise DataError(f"{path}: ends before token {offset + len(out)}; {_REPAIR}")
                place = place[got:]
    except OSError as error:
        raise DataError(f"{path}: tokens {offset} to {offset + len(out)} cannot be read ({error.strerror})") from error
    if sys.byteorder == "big":
        out.byteswap(inplace=True)


class TokenCache:
    """A prepared corpus: two splits of tokens and the manifest that describes them.

    Attributes:
        path: The folder.
        manifest: The parsed manifest.
        identity: SHA-256 (hex) of the manifest's content; another corpus, tokenizer or amount has another identity.
        ancestors: Identity → training tokens of the caches that this one was extended from; the training tokens of an
            ancestor are the first ones of this cache.
        vocab_size: V; every id is below it.
        eos_id: The token after every document; None for a synthetic source.
        entropy_floor: Entropy rate of the source in nats per token, below which no honest loss can lie; None where
            unknown.
        entropy_std: Standard deviation of -ln p of one token of such a source, in nats: the mean over n tokens may lie
            below the floor by a few entropy_std / sqrt(n). None where unknown.
        shard_tokens: Tokens of every shard but the last of a split.
        train, validation: The splits.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.identity: str = manifest["identity"]
        self.ancestors: dict[str, int] = {a["identity"]: a["train_tokens"] for a in manifest["ancestors"]}
        self.vocab_size: int = manifest["vocab_size"]
        self.eos_id: int | None = manifest["eos_id"]
        self.entropy_floor: float | None = manifest["entropy_floor"]
        self.entropy_std: float | None = manifest.get("entropy_std")
        self.shard_tokens: int = manifest["shard_tokens"]
        self.train = _split(path, manifest, "train")
        self.validation = _split(path, manifest, "validation")

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = False) -> TokenCache:
        """Open a complete cache: check the manifest and the size of every shard.

        Args:
            path: The folder.
            verify: Read and hash every shard too (tens of seconds for tens of GiB).
        Raises:
            DataError: No cache there, one that is still incomplete, an edited or unknown manifest, a missing, shortened
                or (with `verify`) altered shard.
        """
        path = Path(path)
        manifest = read_manifest(path)
        try:
            cache = cls(path, manifest)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path / MANIFEST}: not a manifest of version {VERSION} ({error!r}); {_REPAIR}") from None
        for split in (cache.train, cache.validation):
            for shard in split.shards:
                shard.check_size()
        if verify:
            cache.verify()
        return cache

    def verify(self) -> None:
        """Hash every shard and raise DataError at the first whose bytes are not the manifest's."""
        for shard in (*self.train.shards, *self.validation.shards):
            shard.check_hash()


def describe_cache(cache: TokenCache) -> str:
    """Where it lies and how much it holds, in one line."""
    train, validation = cache.train.num_tokens, cache.validation.num_tokens
    return f"{cache.path}: {train:,} training and {validation:,} validation tokens"


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check `manifest.json` in a cache's folder: format, version, identity; the shards are not looked at.

    Raises:
        DataError: See `TokenCache.open`.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DataError(_missing(path)) from None
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror}); point data.cache_dir to a cache's folder"
        ) from None
    except ValueError as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); {_REPAIR}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{file}: not the manifest of a token cache; point data.cache_dir somewhere else")
    if manifest.get("version") != VERSION:
        raise DataError(f"{file}: version {manifest.get('version')!r}, but this program reads version {VERSION}")
    if manifest.get("dtype") != DTYPE:
        raise DataError(f"{file}: dtype {manifest.get('dtype')!r}, but this program reads {DTYPE}")
    if manifest.get("identity") != manifest_identity(manifest):
        raise DataError(f"{file}: was edited after the preparation (its identity does not fit its content); {_REPAIR}")
    return manifest


def _missing(path: Path) -> str:
    command = f"`llama-c4 prepare … data.cache_dir={path}` with the settings of the run"
    partial = partial_path(path)
    if partial.exists():
        return f"data.cache_dir={path}: its preparation is incomplete ({partial.name}); finish it with {command}"
    if path.exists():
        return f"data.cache_dir={path}: holds no {MANIFEST}, so it is no token cache; name another folder"
    return f"data.cache_dir={path}: no token cache there; make it with {command}"


def _split(path: Path, manifest: Mapping[str, Any], name: str) -> TokenSplit:
    record = manifest["splits"][name]
    shards = tuple(Shard(path / _plain_name(s["file"]), s["tokens"], s["sha256"]) for s in record["shards"])
    split = TokenSplit(
        name,
        shards,
        vocab_size=manifest["vocab_size"],
        num_documents=record["documents"],
        text_bytes=record["text_bytes"],
        complete=record["complete"],
    )
    if split.num_tokens != record["tokens"] or any(s.num_tokens != manifest["shard_tokens"] for s in shards[:-1]):
        raise DataError(f"{path / MANIFEST}: the shards of {name} do not add up to its {record['tokens']} tokens")
    return split


def _plain_name(name: str) -> str:
    """A manifest names files of its own folder only."""
    if Path(name).name != name:
        raise DataError(f"{MANIFEST}: {name!r} is not the name of a file in the cache's folder")
    return name
