"""The request to stop: real signals to this very process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from llama_c4.runtime.stop import SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    """What a test leaves ignored would be inherited by every process that later tests start."""
    former = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.001)  # the handler runs between two bytecodes


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)])
def test_a_signal_sets_the_flag_and_nothing_else(number: signal.Signals, exit_code: int) -> None:
    with StopRequest() as stop:
        assert (stop.requested, stop.reason, stop.exit_code) == (False, None, 0)
        send(number)
        assert (stop.requested, stop.reason, stop.exit_code) == (True, number.name, exit_code)


def test_a_second_sigterm_50_ms_later_is_harmless_and_the_first_signal_stays_the_reason() -> None:
    with StopRequest() as stop:
        send(signal.SIGUSR2)
        time.sleep(0.05)
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert (stop.reason, stop.exit_code) == ("SIGUSR2", 75)


def test_a_second_sigint_is_a_keyboard_interrupt() -> None:
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
        assert stop.requested
        send(signal.SIGINT)


def test_former_handlers_are_back_afterwards_also_after_an_error() -> None:
    heard = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(ValueError, match="inside"), StopRequest():
            send(signal.SIGUSR2)
            raise ValueError("inside")
        assert heard == []
        send(signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, former)


def test_a_deadline_is_a_request_by_itself() -> None:
    now = 100.0
    stop = StopRequest(deadline_seconds=60, clock=lambda: now)
    assert not stop.requested and stop.exit_code == 0
    now = 160.0
    assert (stop.requested, stop.reason, stop.exit_code) == (True, "deadline of 60 seconds", 75)


def test_a_signal_that_came_before_the_deadline_is_the_reason() -> None:
    with StopRequest(deadline_seconds=0) as stop:
        assert stop.reason == "deadline of 0 seconds"
        send(signal.SIGINT)
        assert (stop.reason, stop.exit_code) == ("SIGINT", 130)


def test_outside_of_the_main_thread_only_the_deadline_counts() -> None:
    seen = []

    def work() -> None:
        with StopRequest(deadline_seconds=0) as stop:
            seen.append(stop.requested)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True] and signal.getsignal(signal.SIGTERM) is before


def test_two_sigterms_from_outside_leave_the_process_in_command_of_its_exit() -> None:
    code = (
        "import sys, time\nfrom llama_c4.runtime.stop import StopRequest\n"
        "with StopRequest() as stop:\n    print('ready', flush=True)\n"
        "    while not stop.requested: time.sleep(0.005)\ntime.sleep(0.3)\nsys.exit(stop.exit_code)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=30) == 75
