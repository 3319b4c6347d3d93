"""metrics.jsonl: whole lines only, torn tails cut, resumed rows never doubled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_c4.config.errors import CheckpointError, TrainingError
from llama_c4.metrics.sinks import JsonlSink, StatusDisplay

ROOT = Path(__file__).resolve().parents[2]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three records."""
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for update in (20, 40, 60):
        sink.write({"kind": "train", "update": update})
    sink.close(0)
    return sink.path


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for update in range(3):
        sink.write({"kind": "train", "update": update, "loss": float("nan")})
        assert rows(sink.path)[-1] == {"kind": "train", "update": update, "loss": None, "loss_nonfinite": "nan"}


@pytest.mark.parametrize("tail", [b'{"kind": "tr', b"\0\0\0\0", b"{", b'{"kind": "train"}'])
def test_a_torn_last_line_is_cut(path: Path, tail: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    sink = JsonlSink(path)
    assert sink.rows == 3 and path.read_bytes() == whole
    sink.write({"kind": "train", "update": 80})
    assert [row["update"] for row in rows(path)] == [20, 40, 60, 80]


@pytest.mark.parametrize("line", [b"not json\n", b"\n", b'{"loss": NaN}\n', b"[]\n", b"\0\0\n"])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_any_other_damage_is_refused_by_line_and_left_as_it_is(path: Path, line: bytes, place: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(place, line)
    path.write_bytes(b"".join(lines))
    with pytest.raises(CheckpointError, match=rf"metrics\.jsonl, line {place + 1}: "):
        JsonlSink(path)
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("standing", [0, 1, 3])
def test_rows_beyond_the_resumed_state_are_cut_and_not_doubled(path: Path, standing: int) -> None:
    sink = JsonlSink(path)
    sink.rewind(standing)
    sink.write({"kind": "train", "update": 100})
    assert [row["update"] for row in rows(path)] == [*[20, 40, 60][:standing], 100]


def test_a_file_with_fewer_rows_than_the_state_knows_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds 3 records, the state to continue from was saved after 4"):
        JsonlSink(path).rewind(4)


WRITER = """
import sys
from pathlib import Path
from llama_c4.metrics.sinks import JsonlSink
sink = JsonlSink(Path(sys.argv[1]))
for update in range(10**9):
    sink.write({"kind": "train", "update": update, "padding": "x" * 3000})
    if update == 50:
        print("going", flush=True)
"""


def test_after_a_kill_the_file_holds_whole_rows_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER, str(path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert writer.stdout is not None and writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    sink = JsonlSink(path)
    assert [row["update"] for row in rows(path)] == list(range(sink.rows)) and sink.rows > 50


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_stops_the_run_and_leaves_no_part_of_a_line(small_disk: Path) -> None:
    sink = JsonlSink(small_disk / "metrics.jsonl")
    written = 0
    with pytest.raises(
        TrainingError, match=r"metrics\.jsonl: cannot be written \(No space left on device\); \d+ bytes"
    ):
        for written in range(100):
            sink.write({"kind": "train", "update": written, "padding": "x" * 3000})
    assert [row["update"] for row in rows(sink.path)] == list(range(written)) and written > 10
    sink.close(1)


def test_the_status_follows_phases_and_updates() -> None:
    seen: list[Any] = []
    display = StatusDisplay(lambda *status: seen.append(status))
    display.phase("startup")
    display.phase("training")
    display.advance(1, 64)
    for name in ("saving", "training", "evaluation", "training"):
        display.phase(name)
    assert seen == [("training", 0, 0), ("training", 1, 64), ("evaluating", 1, 64), ("training", 1, 64)]
