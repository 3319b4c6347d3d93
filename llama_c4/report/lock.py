"""Whether a process holds a run folder, asked without taking it."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_locked(lock: Path) -> bool:
    """Whether another process holds the lock file exclusively.

    A shared lock is asked for and given back at once: it never waits, writes nothing, and any number of readers may ask
    at the same time. A lock file that is not there or may not be read is held by nobody that we could see.
    """
    try:
        file = lock.open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False  # closing has released it
