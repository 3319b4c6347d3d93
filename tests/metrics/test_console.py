"""What people see, and that nothing of it can stop a run."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from llama_c4.metrics.console import BarSink, GuardedStream, PlainSink, bar_line, build_display, open_log
from llama_c4.metrics.text import Extent, Pace, line_of, short_count, short_duration

from .runs import validation

ROOT = Path(__file__).resolve().parents[2]
EXTENT = Extent(num_updates=3120, num_epochs=40, total_targets=408_071_168)


def train(**changes: Any) -> dict[str, Any]:
    fields = {
        "kind": "train",
        "update": 120,
        "epoch": 2,
        "targets": 15_728_640,
        "loss": 4.12345,
        "lr": 0.0056,
        "grad_norm": 0.9312,
        "clipped_updates": 1,
        "window_updates": 20,
        "targets_per_second": 65_300.0,
        "elapsed_targets_per_second": 60_000.0,
        "training_seconds": 240.0,
        "elapsed_seconds": 260.0,
        "peak_memory_bytes": None,
    }
    return fields | changes


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (999, "999"),
        (999_960, "1.0M"),
        (65_300.0, "65.3k"),
        (408_071_168, "408.1M"),
        (3e12, "3.0T"),
    ],
)
def test_counts_fit_into_a_line(value: float | None, text: str) -> None:
    assert short_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–:––"), (float("inf"), "–:––"), (0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (90_000, "1d 1:00:00")],
)
def test_durations_fit_into_a_line(seconds: float | None, text: str) -> None:
    assert short_duration(seconds) == text


def test_a_training_record_is_one_line() -> None:
    assert line_of(train(), extent=EXTENT, seconds_left=4000) == (
        "update 120/3120  epoch 2/40  15.7M/408.1M targets  loss 4.1235  lr 5.60e-03  grad norm 0.931  "
        "65.3k targets/s  1:06:40 left"
    )


def test_a_validation_record_is_one_line() -> None:
    record = validation(78, 3.5, perplexity=33.1155, bits_per_byte=1.2)
    text = "loss 3.5000, perplexity 33.12, 1.2000 bits per byte, 256 targets in 0:00"
    assert line_of(record, extent=EXTENT) == f"validation after update 78, epoch 1: {text}"
    assert line_of(record | {"kind": "final_validation", "scope": "full"}, extent=EXTENT).startswith("full validation")


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_missing_and_non_finite_numbers_are_shown(value: float | None) -> None:
    words = "–" if value is None else str(value)
    assert f"loss {words}" in line_of(train(loss=value, grad_norm=value), extent=EXTENT)
    assert f"loss {words}, perplexity {words}" in line_of(validation(1, value, perplexity=value), extent=EXTENT)  # type: ignore[arg-type]


def test_a_record_of_another_kind_is_shown_with_its_fields() -> None:
    assert (
        line_of({"kind": "curvature", "update": 3, "trace": 0.123456789}, extent=EXTENT)
        == "curvature  update=3  trace=0.12346"
    )


def test_the_time_left_follows_the_elapsed_rate_of_this_process() -> None:
    pace = Pace(1000)
    assert pace.seconds_left(100) is None
    pace.add(train(targets=100, elapsed_seconds=50.0, targets_per_second=10.0))
    assert pace.seconds_left(100) == 90.0
    pace.add(train(targets=300, elapsed_seconds=90.0, targets_per_second=10.0))
    assert pace.seconds_left(300) == 700 / 5


# --- the bar ----------------------------------------------------------------------------------------------------------


def bar(width: int, **changes: Any) -> str:
    fields: dict[str, Any] = {"targets": 139_500_000, "train": train(), "validation": validation(78, 3.5)}
    return bar_line(width=width, extent=EXTENT, seconds_left=4000.0, **({"phase": "training"} | fields | changes)).plain


@given(
    width=st.integers(1, 250),
    targets=st.integers(0, EXTENT.total_targets),
    phase=st.sampled_from(["training", "startup", "evaluation", "saving"]),
    has=st.tuples(st.booleans(), st.booleans()),
)
def test_the_bar_never_wraps(width: int, targets: int, phase: str, has: tuple[bool, bool]) -> None:
    records = {"train": train() if has[0] else None, "validation": validation(78, 3.5) if has[1] else None}
    text = bar(width, targets=targets, phase=phase, **records)
    assert 0 < cell_len(text) <= max(1, width - 1) and "\n" not in text


def test_a_wide_bar_shows_everything() -> None:
    fields = "34.2%  139.5M/408.1M targets  loss 4.1235  validation 3.5000  lr 5.60e-03  65.3k/s  1:06:40 left"
    assert bar(140).replace("━", "") == f"   {fields}"
    assert bar(140).count("━") == 40 and bar(120).count("━") == 20


def test_a_narrow_bar_keeps_what_matters_most() -> None:
    assert bar(60).replace("━", "") == "   34.2%  loss 4.1235  65.3k/s  1:06:40 left"
    assert bar(40).replace("━", "") == "   34.2%  loss 4.1235  65.3k/s"
    assert bar(30).replace("━", "") == "   34.2%  loss 4.1235"
    assert bar(60, phase="evaluation").startswith("evaluation  ━")


@pytest.mark.parametrize(("targets", "filled"), [(0, 0), (204_035_584, 20), (408_071_168, 40)])
def test_the_bar_is_filled_in_proportion(targets: int, filled: int) -> None:
    text = bar(200, targets=targets, can_draw=False)
    assert text.startswith("#" * filled + "-" * (40 - filled) + " ")


# --- which display ----------------------------------------------------------------------------------------------------


def terminal(width: int = 80) -> tuple[int, Any]:
    """The master's descriptor and the slave's text stream of a new pseudo-terminal."""
    master, slave = pty.openpty()
    return master, os.fdopen(slave, "w", encoding="utf-8")


def test_auto_draws_a_bar_on_a_terminal_and_prints_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = terminal()
    monkeypatch.setenv("TERM", "xterm")
    display = build_display("auto", stream=slave, extent=EXTENT)
    assert isinstance(display, BarSink)
    display.close(0)
    assert isinstance(build_display("plain", stream=slave, extent=EXTENT), PlainSink)
    assert isinstance(build_display("auto", stream=io.StringIO(), extent=EXTENT), PlainSink)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(build_display("auto", stream=slave, extent=EXTENT), PlainSink)
    os.close(master)


def test_off_and_a_process_without_standard_output_show_nothing() -> None:
    assert build_display("off", stream=io.StringIO(), extent=EXTENT) is None
    assert build_display("auto", stream=None, extent=EXTENT) is None


def test_plain_lines_come_whole_and_at_once() -> None:
    stream = io.StringIO()
    display = build_display("plain", stream=stream, extent=EXTENT)
    assert display is not None
    display.write(train())
    display.message("two\nlines")
    assert stream.getvalue().splitlines()[1:] == ["two", "lines"]
    assert "loss 4.1235" in stream.getvalue().splitlines()[0]


def test_the_log_file_is_added_to_and_has_times(tmp_path: Path) -> None:
    for number in range(2):
        log = open_log(tmp_path / "run.log", extent=EXTENT)
        log.message(f"start {number} η")
        log.close(0)
    lines = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    assert [line[21:] for line in lines] == ["start 0 η", "start 1 η"] and lines[0][:2] == "20"


# --- nothing of the terminal stops a run ------------------------------------------------------------------------------


def exercise(display: Any) -> None:
    """All that a run does with a display."""
    for name in ("startup", "training", "evaluation"):
        display.phase(name)
        display.advance(1, 10**6)
        display.write(train())
        display.write(validation(78, 3.5))
        display.message("a message")
    display.close(0)


class Broken(io.StringIO):
    """A stream on which every write fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("mode", ["bar", "plain"])
@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), ValueError("I/O operation on closed file")],
)
def test_a_stream_that_fails_is_swallowed(mode: Any, error: Exception) -> None:
    exercise(build_display(mode, stream=Broken(error), extent=EXTENT))


@pytest.mark.parametrize("mode", ["bar", "plain"])
def test_a_terminal_that_hangs_up_is_swallowed(mode: Any) -> None:
    master, slave = terminal()
    display = build_display(mode, stream=slave, extent=EXTENT)
    os.close(master)
    exercise(display)
    exercise(build_display(mode, stream=slave, extent=EXTENT))


@pytest.mark.parametrize("mode", ["bar", "plain"])
def test_a_terminal_without_unicode_gets_what_it_can_show(mode: Any) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = build_display(mode, stream=stream, extent=EXTENT)
    assert display is not None
    display.message("η = 0.1")
    exercise(display)
    assert b"? = 0.1" in raw.getvalue() and b"a message" in raw.getvalue()


def test_a_dead_stream_stays_dead() -> None:
    broken = Broken(BrokenPipeError())
    stream = GuardedStream(broken)
    stream.write("x")
    broken.error = AssertionError("written to again")  # type: ignore[assignment]
    stream.write("y")
    assert stream.is_dead


CHATTY = """
import sys
from llama_c4.metrics.console import build_display
from llama_c4.metrics.text import Extent
display = build_display(sys.argv[1], stream=sys.stdout, extent=Extent(num_updates=9, num_epochs=1, total_targets=90))
for _ in range(3000):
    display.message("x" * 70)
display.close(0)
print("printed by somebody else")
print("survived", file=sys.stderr)
"""


@pytest.mark.parametrize("mode", ["bar", "plain"])
@pytest.mark.parametrize("output", ["pipe that closes", "full device", "closed"])
def test_a_process_ends_well_whatever_becomes_of_its_output(mode: str, output: str) -> None:
    redirect = {"pipe that closes": "| head -c 100 >/dev/null", "full device": ">/dev/full", "closed": ">&-"}[output]
    script = f"set -o pipefail; {sys.executable} -c '{CHATTY}' {mode} {redirect}"
    if output == "closed":
        script = script.replace("display.", "display and display.")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "survived\n")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("width", [60, 140])
def test_in_a_real_terminal_the_bar_is_one_line_below_what_scrolled(tmp_path: Path, width: int) -> None:
    demo = Path(__file__).with_name("demo_bar.py")
    command = f"PYTHONPATH={ROOT} COLUMNS=80 {sys.executable} {demo} auto 3; touch {tmp_path}/done; sleep 60"
    tmux = ["tmux", "-S", str(tmp_path / "socket")]
    subprocess.run([*tmux, "new-session", "-d", "-s", "bar", "-x", str(width), "-y", "20", command], check=True)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "done").exists() and time.monotonic() < end:
            time.sleep(0.1)
        screen = subprocess.run([*tmux, "capture-pane", "-p", "-t", "bar"], capture_output=True, text=True, check=True)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    lines = [line for line in screen.stdout.splitlines() if line]
    bars = [line for line in lines if "━" in line]
    assert len(bars) == 1 and "100.0%" in bars[0] and "loss" in bars[0] and lines[-1] == "the end"
    assert ("targets  loss" in bars[0]) == (width == 140)
    assert sum(line.startswith("validation after update") for line in lines) == 3
