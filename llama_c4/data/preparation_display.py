"""What a preparation says while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.2


class PreparationDisplay:
    """Documents, tokens, rate and time left, on standard error; use as a context manager.

    Args:
        enabled: False says nothing.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._console = Console(stderr=True, quiet=not enabled)
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
                transient=True,
            )
        self._split = ""
        self._started = self._said = 0.0
        self._first_tokens: int | None = None

    def start(self, split: str) -> None:
        """A split begins."""
        self._split = split
        self._started = self._said = time.monotonic()
        self._first_tokens = None
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(split, total=1.0, numbers="")

    def update(self, *, documents: int, tokens: int, fraction: float | None) -> None:
        """So much is done.

        Args:
            documents, tokens: Of the split so far.
            fraction: Part of it that is done, in [0, 1]; None where nobody knows.
        """
        if self._first_tokens is None:
            self._first_tokens = tokens  # those of an earlier preparation do not count for the rate
        now = time.monotonic()
        if now - self._said < (_SECONDS_BETWEEN_LINES if self._bar is None else _SECONDS_BETWEEN_DRAWINGS):
            return
        self._said = now
        rate = (tokens - self._first_tokens) / (now - self._started)
        numbers = f"{documents:,} documents  {tokens:,} tokens  {rate:,.0f} tokens/s"
        if fraction and rate:
            left = (tokens / fraction - tokens) / rate
            numbers += f"  {_duration(left)} left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=fraction or 0.0, numbers=numbers)
        else:
            self._console.print(f"{self._split}: {numbers}", highlight=False, soft_wrap=True)

    def note(self, message: str) -> None:
        """One line of text."""
        self._console.print(message, highlight=False, soft_wrap=True, markup=False)

    def __enter__(self) -> PreparationDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
