"""The state file, format version 2: one `torch.save` payload, an index in JSON, and a footer with a checksum.

    payload     a zip archive as torch.save writes it: {"index": {…}, "parts": {name: state}}
    index       JSON in UTF-8: kind, header, progress; the same as in the payload, readable without torch
    footer      64 bytes, little-endian:
                8 s   magic "LLAMAC4S"
                u32   format version
                u32   length of the index in bytes
                u64   length of the payload in bytes
                u32   CRC-32 of the index
                u32   CRC-32 of the 28 bytes of the footer before this field
                32 s  SHA-256 of everything before this field

`torch.load(path, weights_only=True)` reads such a file as it is: a zip reader looks for its directory from the end and
passes over what follows it. No number in the footer is believed before it fits the size of the file.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from llama_c4.checkpoint.atomic import replace_file, write_failure
from llama_c4.config.errors import CheckpointError, TrainingError

VERSION = 2
KIND_ORDINARY = "ordinary"

MAGIC = b"LLAMAC4S"
FOOTER_BYTES = 64
# A zip reader finds the archive's directory only if at most 64 KiB follow it; index and footer must stay below that.
MAX_INDEX_BYTES = 60_000

_FIELDS = struct.Struct("<8sIIQI")  # 28 bytes: magic, version, index length, payload length, CRC-32 of the index
_CHECK = struct.Struct("<I")
_CHUNK_BYTES = 1 << 22


class DamagedState(CheckpointError):
    """A file that is cut short, altered or no state at all, so that an older one is to be used instead."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A state as read from a file.

    Attributes:
        kind: `ordinary`: one model.
        header: What the state belongs to; see `header.StateHeader`.
        progress: Position in the plan: update, micro_step, sequences.
        files: Name → SHA-256 (hex) of the files in the same folder that belong with it.
        parts: Part name → its state, tensors on the CPU; empty where only the index was read.
    """

    kind: str
    header: Mapping[str, Any]
    progress: Mapping[str, int]
    files: Mapping[str, str]
    parts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Footer:
    version: int
    index_bytes: int
    payload_bytes: int
    index_crc: int
    sha256: bytes


def write_state(
    path: Path,
    parts: Mapping[str, Any],
    *,
    header: Mapping[str, Any],
    progress: Mapping[str, int],
    kind: str = KIND_ORDINARY,
    files: Mapping[str, str] | None = None,
) -> int:
    """Write a state: under a side name, synced, then renamed.

    Args:
        path: The file; its folder must exist.
        parts: Part name → nested dicts and lists of tensors, numbers, strings and None. Tensors are taken to the CPU;
            views are copied, so that the file holds no more than what they show.
        header, progress, kind: The index, plain JSON values.
        files: Name → SHA-256 of the files in the same folder that belong with it.
    Returns:
        Bytes written.
    Raises:
        ValueError: A part holds something else than plain types, or keys of a compiled module.
        TrainingError: The file system refused (full, read-only, I/O error); nothing is left of the file.
    """
    index = _encode({"kind": kind, "header": dict(header), "progress": dict(progress), "files": dict(files or {})})
    plain = {name: to_plain(part, place=name) for name, part in parts.items()}
    payload = {"index": json.loads(index), "parts": plain}
    try:
        with replace_file(path) as file:
            return _write(file, payload, index)
    except OSError as error:
        raise TrainingError(write_failure(path, error, needed_bytes=tensor_bytes(payload))) from error


def _encode(index: Mapping[str, Any]) -> bytes:
    text = json.dumps(index, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > MAX_INDEX_BYTES:
        raise ValueError(f"the index of a state has {len(text)} bytes; at most {MAX_INDEX_BYTES} can be read back")
    return text


def _write(file: BinaryIO, payload: Mapping[str, Any], index: bytes) -> int:
    writer = _HashingWriter(file)
    try:
        torch.save(payload, cast(BinaryIO, writer))
    except RuntimeError:
        # torch reports a failed write as its own RuntimeError; the file system's reason is the one to tell.
        if writer.fault is None:
            raise
        raise writer.fault from None
    payload_bytes = writer.count
    writer.write(index)
    fields = _FIELDS.pack(MAGIC, VERSION, len(index), payload_bytes, zlib.crc32(index))
    writer.write(fields + _CHECK.pack(zlib.crc32(fields)))
    file.write(writer.digest())
    return payload_bytes + len(index) + FOOTER_BYTES


class _HashingWriter:
    """The write side of a file, hashing what passes; remembers the fault that made a write fail."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.count = 0
        self.fault: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.fault = error
            raise
        self._hash.update(data)
        self.count += written
        return written

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> bytes:
        return self._hash.digest()


def to_plain(value: Any, *, place: str) -> Any:
    """Copy a part to what `torch.load(weights_only=True)` reads everywhere: plain types and compact CPU tensors.

    Args:
        value: Nested mappings, lists and tuples of tensors, numbers, strings and None.
        place: Where it stands, for the error.
    Raises:
        ValueError: Another type, a key that is neither str nor int, or a key of a compiled module.
    """
    if isinstance(value, Tensor):
        return _compact(value)
    if isinstance(value, Mapping):
        return {_plain_key(key, place): to_plain(item, place=f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, place=f"{place}.{number}") for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise ValueError(f"{place} is a {kind}; a state holds plain types and tensors only")


def _plain_key(key: Any, place: str) -> str | int:
    if type(key) not in (str, int):
        raise ValueError(f"{place} has the key {key!r}; keys of a state are str or int")
    if isinstance(key, str) and "_orig_mod" in key:
        # Such a state would load into a compiled model only.
        raise ValueError(f"{place} has the key {key!r} of a compiled module; take the state of the module inside it")
    return key


def _compact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples: nearly the size of the file that holds them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def read_index(path: Path) -> State:
    """Read what a state is, without its tensors: cheap, and without torch's reader.

    Raises:
        DamagedState: No state file, or cut short or altered where that shows without reading everything.
        CheckpointError: Missing, or of another version.
    """
    try:
        with path.open("rb") as file:
            return _state(path, _read_index(file, path, _read_footer(file, path)), parts={})
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def verify_state(path: Path) -> State:
    """Check every byte of a state and return what `read_index` does.

    Raises:
        DamagedState, CheckpointError: As `read_state`.
    """
    try:
        with path.open("rb") as file:
            footer = _read_footer(file, path)
            index = _read_index(file, path, footer)
            _check_hash(file, path, footer)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return _state(path, index, parts={})


def read_state(path: Path) -> State:
    """Read a whole state after checking every byte of it. The random number generators are left alone.

    Raises:
        DamagedState: No state file, or cut short or altered.
        CheckpointError: Missing, of another version, or made by somebody else (it holds objects that are code).
    """
    checked = verify_state(path)
    try:
        # The CPU, whatever device the tensors came from: states of random generators are refused anywhere else.
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {_NOT_OURS} (torch refuses it: {str(error).splitlines()[0]})") from error
    if not isinstance(payload, dict) or not isinstance(payload.get("parts"), dict):
        raise CheckpointError(f"{path}: {_NOT_OURS} (it holds no parts)")
    if _state(path, payload.get("index"), parts={}) != checked:
        raise CheckpointError(f"{path}: {_NOT_OURS} (its payload is not the one that its index describes)")
    return replace(checked, parts=payload["parts"])


def _read_footer(file: BinaryIO, path: Path) -> _Footer:
    size = file.seek(0, 2)
    file.seek(max(0, size - FOOTER_BYTES))
    data = file.read(FOOTER_BYTES)
    file.seek(0)
    is_zip = file.read(4) == b"PK\x03\x04"
    if not is_zip and data[: len(MAGIC)] != MAGIC:
        if size == 0:
            raise DamagedState(f"{path}: is empty; {_WAY_OUT}")
        raise DamagedState(f"{path}: is no state file of llama_c4 (neither a torch archive nor a footer)")
    if len(data) < FOOTER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise DamagedState(f"{path}: ends without a footer after {size} bytes: cut short, or no state file; {_WAY_OUT}")
    _, version, index_bytes, payload_bytes, index_crc = _FIELDS.unpack_from(data)
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(data[: _FIELDS.size]):
        raise DamagedState(f"{path}: its footer does not have its checksum; {_WAY_OUT}")
    if version != VERSION:
        raise CheckpointError(_other_version(path, version))
    if index_bytes + payload_bytes + FOOTER_BYTES != size:
        said = index_bytes + payload_bytes + FOOTER_BYTES
        raise DamagedState(f"{path}: has {size} bytes where its footer says {said}; {_WAY_OUT}")
    return _Footer(
        version=version,
        index_bytes=index_bytes,
        payload_bytes=payload_bytes,
        index_crc=index_crc,
        sha256=data[-hashlib.sha256().digest_size :],
    )


_WAY_OUT = "use an older state"
_NOT_OURS = "has right checksums and yet was not written by llama_c4"


def _other_version(path: Path, version: int) -> str:
    age = "newer" if version > VERSION else "older"
    return (
        f"{path}: has format version {version}, {age} than the {VERSION} that this program reads; "
        f"continue it with the version of llama_c4 that wrote it (environment.json names it)"
    )


def _read_index(file: BinaryIO, path: Path, footer: _Footer) -> dict[str, Any]:
    file.seek(footer.payload_bytes)
    text = file.read(footer.index_bytes)
    if zlib.crc32(text) != footer.index_crc:
        raise DamagedState(f"{path}: its index does not have its checksum; {_WAY_OUT}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: {_NOT_OURS} (its index is not JSON)") from error


def _check_hash(file: BinaryIO, path: Path, footer: _Footer) -> None:
    found = hashlib.sha256()
    file.seek(0)
    left = footer.payload_bytes + footer.index_bytes + FOOTER_BYTES - len(footer.sha256)
    while left and (chunk := file.read(min(_CHUNK_BYTES, left))):
        found.update(chunk)
        left -= len(chunk)
    if found.digest() != footer.sha256:
        raise DamagedState(
            f"{path}: sha256 {found.hexdigest()[:16]}… where its footer says {footer.sha256.hex()[:16]}…: "
            f"bytes were altered; {_WAY_OUT}"
        )


def _state(path: Path, index: Any, *, parts: Mapping[str, Any]) -> State:
    try:
        return State(**{field: index[field] for field in ("kind", "header", "progress", "files")}, parts=parts)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {_NOT_OURS} (its index lacks a field)") from error
