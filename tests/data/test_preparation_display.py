"""What a preparation says: lines elsewhere than on a terminal, a bar there, and nothing when told so."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_c4.data import preparation_display
from llama_c4.data.preparation_display import PreparationDisplay


class Clock:
    """A monotonic clock that the test turns."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(preparation_display, "time", clock)
    return clock


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_a_line_every_ten_seconds_tells_documents_tokens_rate_and_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with PreparationDisplay(enabled=True) as display:
        display.start("train")
        display.update(documents=5, tokens=1_000, fraction=0.1)  # those of an earlier preparation
        clock.now += 9
        display.update(documents=10, tokens=3_000, fraction=0.3)
        clock.now += 1
        display.update(documents=20, tokens=6_000, fraction=0.6)
    assert lines(capsys.readouterr().err) == ["train: 20 documents  6,000 tokens  500 tokens/s  0:08 left"]


def test_without_an_end_in_sight_there_is_no_time_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with PreparationDisplay(enabled=True) as display:
        display.start("train")
        clock.now += 4000
        display.update(documents=1, tokens=10, fraction=None)
    assert lines(capsys.readouterr().err) == ["train: 1 documents  10 tokens  0 tokens/s"]


def test_switched_off_it_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with PreparationDisplay(enabled=False) as display:
        display.note("a note")
        display.start("train")
        clock.now += 20
        display.update(documents=1, tokens=10, fraction=0.5)
    assert capsys.readouterr() == ("", "")


CODE = """
import time
from llama_c4.data.preparation_display import PreparationDisplay
with PreparationDisplay(enabled=True) as display:
    display.start("train")
    for step in range(1, 6):
        time.sleep(0.25)
        display.update(documents=step, tokens=1000 * step, fraction=step / 5)
"""


def test_on_a_terminal_a_bar_is_drawn(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", CODE], stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    shown = io.BytesIO()
    try:
        while chunk := os.read(master, 4096):
            shown.write(chunk)
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue().decode())
    assert re.search(r"train ━+.* documents +\d,000 tokens .* tokens/s", text)
