"""An exclusive lock on a folder that a process gives back by dying."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any, final

from llama_c4.config.errors import CheckpointError

LOCK_FILE = ".lock"

# A reader that asks whether a folder is in use holds a shared lock for a moment; it is waited out.
_PATIENCE_SECONDS = 0.5
_PAUSE_SECONDS = 0.02


@final
class FolderLock:
    """An exclusive `flock` on the file `.lock` of a folder.

    The kernel releases it when the last descriptor of this opening is closed: on `release`, or when the process ends in
    whatever way. The file names the holder, for people and for the message of the second process. Children that are
    forked close their copy, so that an orphan cannot keep a folder locked.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            CheckpointError: Another process holds it, or the file system knows no locks or lets nobody write.
        """
        self.path = folder / LOCK_FILE
        self._descriptor = _take(self.path)
        _write_holder(self._descriptor)
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _release_in_child(reference))

    def release(self) -> None:
        """Give the lock back; a second time does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _take(path: Path) -> int:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(_no_locks(path, error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The folder may have been renamed between open and lock: then this is the lock of another name.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(_in_use(path)) from None
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(_no_locks(path, error)) from error
        os.close(descriptor)
        time.sleep(_PAUSE_SECONDS)


def _write_holder(descriptor: int) -> None:
    """For people alone: where the disk is full the lock holds without it, and the next file tells."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    os.ftruncate(descriptor, 0)
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _in_use(path: Path) -> str:
    holder = read_holder(path)
    who = "another process"
    if holder:
        who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('time')}"
    return f"{path.parent} is in use by {who}; wait for it, stop it, or choose another run.name"


def _no_locks(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return f"{path}: this file system has no locks ({error.strerror}); choose a run.output_dir on one that has"
    return f"{path}: cannot be locked ({error.strerror})"


def read_holder(path: Path) -> dict[str, Any]:
    """Who holds, or last held, a lock file: pid, host, time; empty where it does not say."""
    try:
        holder = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _release_in_child(reference: weakref.ref[FolderLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()
