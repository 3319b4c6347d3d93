"""Files that are there whole or not at all: a side name in the same folder, fsync, rename, fsync of the folder.

A process may be killed at any line. What it leaves behind is then the old file (or none) and perhaps a side file, which
the next owner of the run folder removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from llama_c4.config.errors import CheckpointError, TrainingError

SIDE_SUFFIX = ".partial"


def side_path(path: Path) -> Path:
    """The hidden name beside `path` under which it is written. One writer a folder, so the name may be fixed."""
    return path.with_name(f".{path.name}{SIDE_SUFFIX}")


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open the side file of `path` for writing; it takes the place of `path` when the block ends without an error.

    Args:
        path: The file to make or replace.
        durable: fsync file and folder, so that the file survives a loss of power and not only a kill.
    Raises:
        OSError: As the system reports it. The side file is gone then, and `path` is what it was.
    """
    side = side_path(path)
    try:
        with side.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        side.replace(path)
    except BaseException:
        side.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make the side folder of `path`; it becomes `path` when the block ends without an error.

    Raises:
        FileExistsError: `path` is there already: a committed folder is never replaced.
        OSError: As the system reports it; the side folder is gone then.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; a committed folder is never replaced")
    side = side_path(path)
    shutil.rmtree(side, ignore_errors=True)
    try:
        side.mkdir(parents=True)
        yield side
        sync_folder(side)
        side.rename(path)
    except BaseException:
        shutil.rmtree(side, ignore_errors=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder in an existing one, durably; nothing happens when it is there."""
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that a rename in it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """fsync a file that another library has written and closed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_side_files(folder: Path) -> list[Path]:
    """Remove what writers that were killed have left in a folder (not below it).

    Returns:
        The side files and side folders removed.
    """
    leftovers = sorted(folder.glob(f".*{SIDE_SUFFIX}")) if folder.is_dir() else []
    for leftover in leftovers:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    return leftovers


def set_aside(path: Path, *, label: str) -> Path:
    """Rename a file or folder to the first free `NAME.LABEL-1`, `NAME.LABEL-2`, …; nothing is lost.

    Returns:
        The new path.
    """
    number = 1
    while (target := path.with_name(f"{path.name}.{label}-{number}")).exists():
        number += 1
    path.rename(target)
    sync_folder(path.parent)
    return target


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write strict JSON (no bare NaN), one atomic file.

    Raises:
        ValueError: A number is not finite; records.to_strict turns it into null and a sibling.
        TrainingError: The file cannot be written.
    """
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text, durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a text file in UTF-8, atomically.

    Raises:
        TrainingError: The file cannot be written.
    """
    data = text.encode()
    try:
        with replace_file(path, durable=durable) as file:
            file.write(data)
    except OSError as error:
        raise TrainingError(write_failure(path, error, needed_bytes=len(data))) from error


def append_json_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line of strict JSON, durably; what a killed writer left after the last line break is cut first.

    Raises:
        TrainingError: The file cannot be written.
    """
    data = json.dumps(line, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    try:
        with path.open("ab+") as file:
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TrainingError(write_failure(path, error, needed_bytes=len(data))) from error


def read_json(path: Path) -> Any:
    """Read a JSON file that `write_json` has written.

    Raises:
        CheckpointError: It is missing or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path}: is not JSON ({error}); put it back as it was: it is never written in part"
        ) from error


def write_failure(path: Path, error: OSError, *, needed_bytes: int) -> str:
    """What went wrong when a file could not be written, with the space that was needed and that is there."""
    try:
        free = format_bytes(shutil.disk_usage(path.parent).free)
    except OSError:
        free = "an unknown number"
    needed = f"about {format_bytes(needed_bytes)} are needed, {free} are free"
    return f"{path}: cannot be written ({error.strerror or error}); {needed}"


def format_bytes(count: int) -> str:
    """A number of bytes for people, in powers of 1024."""
    if count < 1024:
        return f"{count} bytes"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"
