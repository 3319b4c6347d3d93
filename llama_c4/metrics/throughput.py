"""Seconds and memory of training alone: what start-up, evaluation and saving take is told apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final


@final
class TrainingClock:
    """Two stopwatches: all seconds since the start, and those outside of pauses. Both go on across resumes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            clock: Seconds that never go back.
        """
        self._clock = clock
        self._started = clock()
        self._before = 0.0
        self._paused = 0.0
        self._paused_at: float | None = None

    def pause(self) -> None:
        """What follows is not training; a second time changes nothing."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resume(self) -> None:
        """What follows is training again."""
        assert self._paused_at is not None
        self._paused += self._clock() - self._paused_at
        self._paused_at = None

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that the run's processes have lived, those of earlier starts up to their last state."""
        return self._before + self._clock() - self._started

    @property
    def training_seconds(self) -> float:
        """Elapsed seconds without pauses."""
        now = self._clock()
        in_pause = 0.0 if self._paused_at is None else now - self._paused_at
        return self._before + now - self._started - self._paused - in_pause

    def state_dict(self) -> dict[str, Any]:
        """Both readings, for a checkpoint."""
        return {"elapsed_seconds": self.elapsed_seconds, "training_seconds": self.training_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these readings; what this process has taken so far is added to them."""
        self._before = state["elapsed_seconds"]
        self._paused += state["elapsed_seconds"] - state["training_seconds"]


@final
class PeakMemory:
    """The largest memory of training alone.

    A high-water mark cannot be told apart afterwards, so it is read when training pauses and reset when it goes on;
    what was there before the first `resume` does not count.
    """

    def __init__(self, read: Callable[[], int | None], reset: Callable[[], bool]) -> None:
        """
        Args:
            read: The high-water mark in bytes, None where the system has none.
            reset: Let the mark start again; False where the system does not allow it.
        """
        self._read = read
        self._reset = reset
        self._peak: int | None = None
        self._is_clean = False

    def pause(self) -> None:
        """What follows is not training."""
        self._peak = self.peak_bytes

    def resume(self) -> None:
        """What follows is training again."""
        self._is_clean = bool(self._reset())

    @property
    def peak_bytes(self) -> int | None:
        """Largest memory of training in this process; None where it cannot be told from the rest."""
        mark = self._read() if self._is_clean else None
        return mark if self._peak is None else self._peak if mark is None else max(mark, self._peak)
