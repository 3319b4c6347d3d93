"""A disk that fills up: a message that names the file, and nothing lost but time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_c4.cli import train_main
from tests.end_to_end.conftest import Command
from tests.end_to_end.runs import assert_same, final_parts, records

PAGE = 4096
EXPORTING = ["training.checkpoint_policy=interval", "training.checkpoint_every_epochs=1", "logging.progress=off"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two MiB, which is more than the run needs."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, *, leave: int) -> Path:
    """A file that takes all of a disk but so many pages."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"\0" * PAGE)
            except OSError:
                break
    os.truncate(ballast, ballast.stat().st_size // PAGE * PAGE - leave * PAGE)
    return ballast


@pytest.fixture
def undisturbed(micro: list[str], tmp_path: Path) -> Path:
    assert train_main([*micro, *EXPORTING, "run.name=undisturbed"]) == 0
    return tmp_path / "runs" / "undisturbed"


@pytest.mark.slow
@pytest.mark.parametrize("pages", [0, 3, 8, 40, 80])
def test_a_full_disk_ends_the_run_with_a_message_and_the_same_command_goes_on_once_there_is_space(
    pages: int, micro: list[str], undisturbed: Path, small_disk: Path, train: Command
) -> None:
    command = [*micro, *EXPORTING, f"run.output_dir={small_disk / 'runs'}"]
    folder = small_disk / "runs" / "micro"
    ballast = fill(small_disk, leave=pages)
    full = train(*command)
    assert full.returncode == 1, full.stderr
    assert f"{folder}/" in full.stderr and "No space left on device" in full.stderr and "are free" in full.stderr
    assert "Traceback" not in full.stderr + full.stdout and not (folder / "result.json").exists()
    ballast.unlink()
    assert train_main(command) == 0
    ours, theirs = (json.loads((place / "result.json").read_text()) for place in (folder, undisturbed))
    assert ours["loss"] == theirs["loss"]
    assert records(folder) == records(undisturbed)
    assert_same(final_parts(folder), final_parts(undisturbed))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_disk_that_cannot_be_written_is_refused_by_name(
    is_there: bool, micro: list[str], small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk / "runs" / "micro"
    if is_there:
        folder.mkdir(parents=True)
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be made read-only here")
    assert train_main([*micro, f"run.output_dir={small_disk / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert str(folder) in said and "Read-only file system" in said
