"""One flag that asks the run to stop: a signal or a deadline. The handler only sets the flag.

With several ranks the flags must be brought together before the loop looks (one set flag is enough), so that all ranks
stop at the same micro-step; `requested` is the place.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR2") if hasattr(signal, name))
EXIT_STOPPED = 75
"""EX_TEMPFAIL: stopped with a state from which the same command continues."""
EXIT_INTERRUPTED = 130
"""The same after SIGINT, as shells report it."""


class Stopped(Exception):
    """Raised by work that was cut short because a stop was requested; what it was to measure is measured later."""


class StopRequest:
    """Whether somebody wants the run to stop, and who.

    As a context manager it catches SIGTERM, SIGINT and SIGUSR2 and puts the former handlers back at the end. The first
    signal is the reason; more of them change nothing, but a second SIGINT raises KeyboardInterrupt, for a user who does
    not want to wait. Handlers can only be set in the main thread: elsewhere the deadline alone counts.
    """

    def __init__(self, *, deadline_seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            deadline_seconds: Stop so many seconds after now; None never does.
            clock: Seconds that never go back.
        """
        self._clock = clock
        self._deadline = None if deadline_seconds is None else clock() + deadline_seconds
        self._deadline_seconds = deadline_seconds
        self._signal: signal.Signals | None = None
        self._interrupts = 0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            # None stands for a handler that C code installed; python cannot put that one back.
            former = signal.SIG_DFL if handler is None else handler
            # A scheduler sends its signal more than once. The answer is given, and the second one must not kill the
            # process on its way out, which would hide the exit code.
            is_repeated = self._signal == number and former == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if is_repeated else former)
        self._former = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal = signal.Signals(number)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

    @property
    def requested(self) -> bool:
        """True from the first signal on, or once the deadline has passed."""
        return self._signal is not None or (self._deadline is not None and self._clock() >= self._deadline)

    @property
    def reason(self) -> str | None:
        """The name of the signal, or the deadline in words; None while nobody asked."""
        if self._signal is not None:
            return self._signal.name
        return f"deadline of {self._deadline_seconds:g} seconds" if self.requested else None

    @property
    def exit_code(self) -> int:
        """0 while nobody asked, 130 after SIGINT, else 75."""
        if not self.requested:
            return 0
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_STOPPED
