"""What people see while a run goes on: a bar on a terminal, plain lines elsewhere. Nothing here can stop a run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal, TextIO, final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from llama_c4.metrics.records import Record
from llama_c4.metrics.sinks import TRAINING, Display
from llama_c4.metrics.text import Extent, Pace, line_of, number, short_count, short_duration

REFRESH_PER_SECOND = 4
_BAR_CELLS = (8, 40)
_GAP = "  "


def build_display(
    mode: Literal["auto", "bar", "plain", "off"], *, stream: TextIO | None, extent: Extent
) -> Display | None:
    """The display for a terminal or a pipe.

    Args:
        mode: auto draws a bar on a terminal and prints plain lines elsewhere; off shows nothing.
        stream: Standard output; None where the process has none.
        extent: How much there is to do.
    """
    if mode == "off" or stream is None:
        return None
    guarded = GuardedStream(stream)
    is_able = guarded.isatty() and not Console(file=guarded.as_file()).is_dumb_terminal
    if mode == "bar" or (mode == "auto" and is_able):
        return BarSink(guarded, extent=extent)
    return PlainSink(guarded, extent=extent)


def open_log(path: Path, *, extent: Extent) -> PlainSink:
    """run.log: the plain lines with their time, added to what is there. A full disk silences it, and nothing else."""
    return PlainSink(GuardedStream(path.open("a", encoding="utf-8")), extent=extent, timestamp=_now)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


@final
class GuardedStream:
    """A text stream that never raises: once writing fails (closed, hung up, full), it swallows everything.

    What the encoding cannot say is written as "?". A broken pipe is pointed to the null device, lest the interpreter
    complain about unwritten text at exit and change the exit code.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_dead = False
        self.encoding = getattr(stream, "encoding", None) or "ascii"

    @property
    def says_unicode(self) -> bool:
        """Whether the encoding has characters to draw with."""
        return self.encoding.lower().replace("-", "").startswith("utf")

    def write(self, text: str) -> int:
        if not self.is_dead:
            sayable = text.encode(self.encoding, "replace").decode(self.encoding)
            self._attempt(lambda: self._stream.write(sayable))
        return len(text)

    def flush(self) -> None:
        if not self.is_dead:
            self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        try:
            return self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        """Close the stream behind it."""
        self._attempt(self._stream.close)

    def as_file(self) -> IO[str]:
        """Itself, for libraries that are typed for files."""
        return self  # type: ignore[return-value]

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError):
            self.is_dead = True
            with contextlib.suppress(OSError, ValueError):
                descriptor = self._stream.fileno()
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


@final
class PlainSink:
    """A line a record, a line a message."""

    def __init__(self, stream: GuardedStream, *, extent: Extent, timestamp: Callable[[], str] | None = None) -> None:
        """
        Args:
            stream: Where the lines go.
            extent: How much there is to do.
            timestamp: Gives the text in front of a line; None puts nothing there.
        """
        self._stream = stream
        self._extent = extent
        self._timestamp = timestamp
        self._pace = Pace(extent.total_targets)

    def write(self, record: Record) -> None:
        left = None
        if record["kind"] == "train":
            self._pace.add(record)
            left = self._pace.seconds_left(record["targets"])
        self.message(line_of(record, extent=self._extent, seconds_left=left))

    def message(self, text: str) -> None:
        head = f"{self._timestamp()}  " if self._timestamp else ""
        self._stream.write("".join(f"{head}{line}\n" for line in text.splitlines()))
        self._stream.flush()

    def advance(self, update: int, targets: int) -> None:
        """Lines are for records."""

    def phase(self, name: str) -> None:
        """Lines are for records."""

    def close(self, exit_code: int) -> None:
        self._stream.flush()
        if self._timestamp:  # a file of its own; standard output stays open
            self._stream.close()


@final
class BarSink:
    """A live line at the bottom of the terminal; validations and messages scroll above it."""

    def __init__(self, stream: GuardedStream, *, extent: Extent) -> None:
        self._extent = extent
        self._stream = stream
        self._console = Console(file=stream.as_file(), force_terminal=True, highlight=False, emoji=False)
        self._pace = Pace(extent.total_targets)
        self._train: Record | None = None
        self._validation: Record | None = None
        self._phase = "startup"
        self._targets = 0
        self._live = Live(
            console=self._console, get_renderable=self._render, refresh_per_second=REFRESH_PER_SECOND, transient=False
        )
        self._live.start()

    def write(self, record: Record) -> None:
        if record["kind"] == "train":
            self._train = record
            self._pace.add(record)
            return
        if record["kind"] == "validation":
            self._validation = record
        self.message(line_of(record, extent=self._extent))

    def message(self, text: str) -> None:
        self._console.print(Text(text))

    def advance(self, update: int, targets: int) -> None:
        self._targets = targets

    def phase(self, name: str) -> None:
        self._phase = name

    def close(self, exit_code: int) -> None:
        self._phase = TRAINING
        self._live.stop()

    def _render(self) -> Text:
        # COLUMNS, which rich would believe, is what the terminal was once; a line that wraps is never erased again.
        with contextlib.suppress(OSError, ValueError):
            self._console.width = os.get_terminal_size(self._stream.fileno()).columns
        return bar_line(
            width=self._console.width,
            targets=self._targets,
            extent=self._extent,
            train=self._train,
            validation=self._validation,
            phase=self._phase,
            seconds_left=self._pace.seconds_left(self._targets),
            can_draw=self._stream.says_unicode,
        )


def bar_line(
    *,
    width: int,
    targets: int,
    extent: Extent,
    train: Record | None,
    validation: Record | None,
    phase: str,
    seconds_left: float | None,
    can_draw: bool = True,
) -> Text:
    """The live line, at most `width` cells: what matters least is left out first, and the bar takes what remains.

    Args:
        width: Cells of the terminal.
        targets: Prediction targets so far.
        extent: How much there is to do.
        train, validation: The latest records of their kinds.
        phase: What the run is doing.
        seconds_left: Estimate; None is shown as a dash.
        can_draw: Whether the terminal knows line-drawing characters.
    """
    fraction = targets / extent.total_targets
    fields = _fields(targets, extent, train, validation, seconds_left, percent=f"{100 * fraction:5.1f}%")
    label = "" if phase == TRAINING else phase
    room = width - 1 - _BAR_CELLS[0] - (len(label) + len(_GAP) if label else 0)
    shown: dict[int, str] = {}
    for _, place, text in sorted(fields):
        if len(_GAP) + len(text) <= room:
            shown[place] = text
            room -= len(_GAP) + len(text)
    cells = max(1, min(_BAR_CELLS[1], _BAR_CELLS[0] + room))
    line = Text(no_wrap=True, overflow="crop", end="")
    if label:
        line.append(label + _GAP, style="yellow")
    filled = int(fraction * cells)
    line.append(("━" if can_draw else "#") * filled, style="green")
    line.append(("━" if can_draw else "-") * (cells - filled), style="grey35")
    line.append("".join(_GAP + shown[place] for place in sorted(shown)))
    line.truncate(max(1, width - 1))
    return line


def _fields(
    targets: int,
    extent: Extent,
    train: Record | None,
    validation: Record | None,
    seconds_left: float | None,
    *,
    percent: str,
) -> list[tuple[int, int, str]]:
    """(rank when space is short, place from left to right, text)."""
    fields = [
        (0, 0, percent),
        (3, 1, f"{short_count(targets)}/{short_count(extent.total_targets)} targets"),
        (2, 6, f"{short_duration(seconds_left)} left"),
    ]
    if train is not None:
        rate = train["targets_per_second"]
        fields += [
            (1, 2, f"loss {number(train['loss'], '.4f')}"),
            (6, 4, f"lr {number(train['lr'], '.2e')}"),
            (4, 5, f"{short_count(rate)}/s"),
        ]
    if validation is not None:
        fields.append((5, 3, f"validation {number(validation['loss'], '.4f')}"))
    return fields
