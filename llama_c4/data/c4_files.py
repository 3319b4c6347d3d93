"""English C4 from local files: gzip JSON-lines under the hub's names, or whatever a glob finds."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from llama_c4.config.errors import DataError
from llama_c4.data.documents import Document, Reading, SkippedRow, SourceFile, text_of_line

_HUB_NAME = re.compile(r"c4-(train|validation)\.(\d+)-of-(\d+)\.json\.gz")
_LINE_BUFFER_BYTES = 1 << 20


class C4Files:
    """The document source over local files.

    Args:
        train: Files of the training split, in reading order.
        validation: Files of the validation split, in reading order.
    """

    def __init__(self, *, train: list[Path], validation: list[Path]) -> None:
        self._paths = {"train": train, "validation": validation}

    def settings(self) -> dict[str, object]:
        return {"kind": "c4_files"}

    def files(self, split: str) -> list[SourceFile] | None:
        return [SourceFile(path.name, path.stat().st_size) for path in self._paths[split]]

    def documents(self, split: str, reading: Reading) -> Generator[Document, None, None]:
        """Documents in file and line order.

        Raises:
            DataError: A file is truncated or corrupt (its rows before the damage were handed out already), or cannot
                be read.
        """
        total = sum(path.stat().st_size for path in self._paths[split]) or 1
        before = 0
        for path in self._paths[split]:
            reading.seen = reading.seen.begin(SourceFile(path.name, path.stat().st_size))
            with path.open("rb") as raw:
                file = _HashedFile(raw)
                for line in _lines(path, file):
                    reading.fraction = (before + file.num_bytes) / total
                    document = _document(line, path.name, reading)
                    if document is not None:
                        yield document
            reading.seen = reading.seen.finish(file.hexdigest())
            before += file.num_bytes
        reading.fraction = 1.0


class _HashedFile(io.RawIOBase):
    """A file that is hashed and counted as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, place: bytearray) -> int:  # type: ignore[override]
        data = self._file.read(len(place))
        place[: len(data)] = data
        self._digest.update(data)
        self.num_bytes += len(data)
        return len(data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _lines(path: Path, file: _HashedFile) -> Iterator[bytes]:
    """Lines that end in a line feed and in nothing else, so that U+2028 or U+0085 in a text cuts nothing."""
    stream = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
    try:
        yield from io.BufferedReader(cast("io.RawIOBase", stream), _LINE_BUFFER_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        # The checksum stands at the end of an archive: what came before looked good and is worth nothing.
        raise DataError(
            f"{path}: the archive is truncated or corrupt ({error}); fetch the file again, then run the same command: "
            "it continues after the last complete shard"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _document(line: bytes, file: str, reading: Reading) -> Document | None:
    if not line.strip():
        return None
    try:
        text = text_of_line(line)
    except SkippedRow as row:
        reading.seen = reading.seen.skip(file, row.kind)
        return None
    reading.documents += 1
    return Document(text, reading.seen)


def find_c4_files(files: str | None, validation_files: str | None) -> C4Files:
    """Find the files of both splits.

    A folder gives its `c4-train.*-of-*.json.gz` and `c4-validation.*-of-*.json.gz` (or those of its subfolder `en`) and
    nothing else, in the order of their numbers, whatever the directory listing says. A glob gives the training files
    that it finds, numbers in names compared as numbers; the validation files are found by their own glob or beside
    them, and are never training files.

    Raises:
        DataError: Nothing is found for a split, or two files carry one number.
    """
    if files is None:
        raise DataError("data.files=null: name the folder (or a glob) of the json.gz files, data.files=/path/to/en")
    folder = Path(files).expanduser()
    if folder.is_dir():
        if not _hub_files(folder, "train") and (folder / "en").is_dir():
            folder = folder / "en"
        train, beside = _hub_files(folder, "train"), folder
    else:
        train = _glob(files)
        beside = train[0].parent if train else Path()
    validation = _glob(validation_files) if validation_files is not None else _hub_files(beside, "validation")
    train = [path for path in train if path.resolve() not in {v.resolve() for v in validation}]
    if not train:
        raise DataError(f"data.files={files}: no training files there (c4-train.*-of-*.json.gz in a folder, or a glob)")
    if not validation:
        asked = f"data.validation_files={validation_files}" if validation_files else f"{beside}"
        raise DataError(f"{asked}: no validation files there; set data.validation_files to a glob of held-out files")
    return C4Files(train=train, validation=validation)


def _hub_files(folder: Path, split: str) -> list[Path]:
    found: dict[int, Path] = {}
    for path in folder.iterdir():
        match = _HUB_NAME.fullmatch(path.name)
        if match is None or match[1] != split:
            continue
        other = found.setdefault(int(match[2]), path)
        if other is not path:
            raise DataError(f"data.files={folder}: {other.name} and {path.name} carry one number; keep one of them")
    return [found[number] for number in sorted(found)]


def _glob(pattern: str) -> list[Path]:
    found = [Path(name) for name in glob.glob(str(Path(pattern).expanduser()), recursive=True)]  # noqa: PTH207
    return sorted((path for path in found if path.is_file()), key=_numeric_order)


def _numeric_order(path: Path) -> list[tuple[int, int, str]]:
    """Sort key that takes runs of digits as numbers: shard 2 before shard 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(1, int(part), part) if part.isdigit() else (0, 0, part) for part in parts]
