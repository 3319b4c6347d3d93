"""The folder of a run: claimed by one process at a time, readable by everybody at any moment.

    .lock              held by the process that runs (lock.py)
    config.yaml        resolved configuration, loadable on its own
    environment.json   versions, hardware, code of the latest start
    status.json        what the run is doing; the run id
    lineage.jsonl      one line a start: who, where, from which state, with which changed machine settings
    metrics.jsonl      records (metrics package)       run.log     the same for people
    result.json        the outcome, once there is one  best.json   best subset validation
    final.pt  checkpoints/  rescue/                    states (store.py)

Every file is written in one piece or line by line, so a run killed at any moment leaves a folder that the same command
continues. Needs no torch.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final

from llama_c4.checkpoint.atomic import (
    append_json_line,
    read_json,
    remove_side_files,
    set_aside,
    sync_folder,
    write_json,
    write_text,
)
from llama_c4.checkpoint.header import BUDGET_KEYS
from llama_c4.checkpoint.lock import LOCK_FILE, FolderLock, read_holder
from llama_c4.checkpoint.places import CONFIG_FILE, EXPORT_FOLDER, RESCUE_FOLDER
from llama_c4.config.errors import CheckpointError, TrainingError

RunState = Literal["starting", "training", "evaluating", "finished", "interrupted", "failed", "diverged"]

STATUS_FILE = "status.json"
RESULT_FILE = "result.json"
BEST_FILE = "best.json"
ENVIRONMENT_FILE = "environment.json"
LINEAGE_FILE = "lineage.jsonl"

_OLD_LABEL = "old"
_STATUS_SECONDS = 2.0
"""Least time between two files of the same state; a change of state is written at once."""


@final
class RunFolder:
    """A claimed run folder. Use as a context manager, or call `release`.

    Attributes:
        path: The folder.
        run_id: Twelve hex digits, the same for every start of this run.
        is_new: No run has been here.
        is_finished: This very run is finished already; its outcome is `read_result()`.
    """

    def __init__(self, path: Path, *, lock: FolderLock, run_id: str, is_new: bool, is_finished: bool) -> None:
        """Use `RunFolder.claim`."""
        self.path = path
        self.run_id = run_id
        self.is_new = is_new
        self.is_finished = is_finished
        self._lock = lock
        self._last_status: tuple[str, float] = ("", 0.0)

    @classmethod
    def claim(
        cls,
        path: Path,
        *,
        config_yaml: str,
        differences: Callable[[Path], Sequence[str]],
        on_finished: Literal["refuse", "skip", "restart"],
        extend: bool = False,
    ) -> RunFolder:
        """Take the folder for this process, making it if need be, and clear away what killed writers left.

        Args:
            path: The folder.
            config_yaml: The resolved configuration; written if the folder is new. A folder that is continued keeps its
                own until `record_start`.
            differences: Recipe settings in which the config.yaml given differs from this run, as "key: there → here".
            on_finished: When this very run is finished: refuse; skip (`is_finished` is set and nothing was touched); or
                restart in an empty folder, the old one being kept as NAME.old-1, NAME.old-2, ….
            extend: A larger budget continues the run, finished or not.
        Raises:
            CheckpointError: In use; no run folder or none can be made; another recipe; finished and on_finished=refuse.
        """
        _check_usable(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be made ({error.strerror or error}); choose another run.output_dir"
            ) from error
        lock = FolderLock(path)
        try:
            if not (path / CONFIG_FILE).exists():
                return cls._begin(path, lock, config_yaml)
            grows = _check_recipe(path, differences(path / CONFIG_FILE), extend=extend)
            status = read_status(path)
            is_finished = status["state"] == "finished" and not grows
            if is_finished and on_finished == "refuse":
                raise CheckpointError(_finished(path))
            if is_finished and on_finished == "restart":
                set_aside(path, label=_OLD_LABEL)
            else:
                if not is_finished:
                    _clear_side_files(path)
                return cls(path, lock=lock, run_id=status["run_id"], is_new=False, is_finished=is_finished)
        except BaseException:
            lock.release()
            raise
        # The lock went with the old folder; the name is free, and whoever comes first has it.
        lock.release()
        return cls.claim(path, config_yaml=config_yaml, differences=differences, on_finished=on_finished, extend=extend)

    @classmethod
    def _begin(cls, path: Path, lock: FolderLock, config_yaml: str) -> RunFolder:
        """Make a new run; config.yaml comes last, so that a folder that has it has a status too."""
        sync_folder(path.parent)
        _clear_side_files(path)
        folder = cls(path, lock=lock, run_id=secrets.token_hex(6), is_new=True, is_finished=False)
        folder.write_status("starting", update=0, targets=0, total_targets=None)
        write_text(path / CONFIG_FILE, config_yaml)
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let other processes claim the folder; a second time does nothing."""
        self._lock.release()

    def record_start(
        self,
        *,
        config_yaml: str,
        code_version: str,
        total_targets: int,
        resumed_from: Path | None,
        update: int,
        sequences: int,
        machine_changes: Sequence[str] = (),
        is_extended: bool = False,
    ) -> None:
        """After the state was loaded and accepted: write config.yaml of this start and add a line to lineage.jsonl.

        A result that an earlier start has left (diverged, or of a shorter budget) is kept as result.json.old-1, ….

        Args:
            config_yaml: The resolved configuration of this start.
            code_version: Version of llama_c4, with the commit where it is known.
            total_targets: Prediction targets of the plan.
            resumed_from: The state that was loaded; None from the beginning.
            update, sequences: Where training goes on.
            machine_changes: Machine settings that are different from the state's, "key: before → now".
            is_extended: Whether the budget has grown.
        Raises:
            TrainingError: A file cannot be written.
        """
        if (self.path / RESULT_FILE).exists():
            set_aside(self.path / RESULT_FILE, label=_OLD_LABEL)
        write_text(self.path / CONFIG_FILE, config_yaml)
        line = {
            "time": _now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run_id": self.run_id,
            "code_version": code_version,
            "resumed_from": None if resumed_from is None else str(resumed_from.relative_to(self.path)),
            "update": update,
            "sequences": sequences,
            "total_targets": total_targets,
            "machine_changes": list(machine_changes),
            "extended": is_extended,
        }
        append_json_line(self.path / LINEAGE_FILE, line)

    def write_status(
        self, state: RunState, *, update: int, targets: int, total_targets: int | None, message: str = ""
    ) -> None:
        """Say what the run is doing. The same state again is written at most every two seconds.

        A failed or diverged run is on its way to tell why: then a file that cannot be written is passed over, lest it
        hide the reason.

        Args:
            state: One of `RunState`.
            update, targets: Updates finished, prediction targets consumed.
            total_targets: Prediction targets of the plan; None while it is not known.
            message: One line for people.
        Raises:
            TrainingError: The file cannot be written.
        """
        last, written_at = self._last_status
        is_change = state != last
        if not is_change and time.monotonic() - written_at < _STATUS_SECONDS:
            return
        status = {
            "state": state,
            "update": update,
            "targets": targets,
            "total_targets": total_targets,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": _now(),
            "message": message,
            "run_id": self.run_id,
        }
        try:
            write_json(self.path / STATUS_FILE, status, durable=is_change)
        except TrainingError:
            if state not in ("failed", "diverged"):
                raise
        self._last_status = (state, time.monotonic())

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write environment.json. Raises TrainingError when it cannot be written."""
        write_json(self.path / ENVIRONMENT_FILE, environment)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json. Raises TrainingError when it cannot be written."""
        write_json(self.path / RESULT_FILE, result)

    def write_best(self, best: Mapping[str, Any] | None) -> None:
        """Write best.json, or remove it where nothing is best yet. Raises TrainingError when it cannot be written."""
        if best is None:
            (self.path / BEST_FILE).unlink(missing_ok=True)
        else:
            write_json(self.path / BEST_FILE, best)

    def read_result(self) -> dict[str, Any]:
        """result.json of a finished run. Raises CheckpointError when it is missing or damaged."""
        return read_json(self.path / RESULT_FILE)


def read_status(path: Path) -> dict[str, Any]:
    """status.json of a run folder.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    status = read_json(path / STATUS_FILE)
    if not isinstance(status, dict) or not {"state", "run_id"} <= set(status):
        raise CheckpointError(f"{path / STATUS_FILE}: has no state and run_id; it was edited: put it back as it was")
    return status


def _check_usable(path: Path) -> None:
    """Refuse to put a run where something else lies."""
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; choose another run.name or run.output_dir")
    names = {entry.name for entry in path.iterdir()}
    lock = path / LOCK_FILE
    is_ours = LOCK_FILE in names and (lock.stat().st_size == 0 or "pid" in read_holder(lock))
    if names and not is_ours and not {CONFIG_FILE, STATUS_FILE} <= names:
        listed = ", ".join(sorted(names)[:5])
        raise CheckpointError(f"{path} is no run folder and not empty ({listed}); choose another run.name")


def _check_recipe(path: Path, differences: Sequence[str], *, extend: bool) -> bool:
    """Whether the budget is another one, and may be; any other difference is refused."""
    if not differences:
        return False
    others = [entry for entry in differences if entry.split(":")[0] not in BUDGET_KEYS]
    if extend and not others:
        return True
    listed = "".join(f"\n  {entry}" for entry in differences)
    hint = "" if others else ", or set training.extend=true to continue to a larger budget"
    raise CheckpointError(
        f"{path} holds a run of another recipe; it differs (there → here) in{listed}\nchoose another run.name{hint}"
    )


def _finished(path: Path) -> str:
    return (
        f"{path} holds this very run, and it is finished; set run.on_finished=skip to accept its result, "
        f"run.on_finished=restart to run it again (the old folder is kept), or choose another run.name"
    )


def _clear_side_files(path: Path) -> None:
    for folder in (path, path / RESCUE_FOLDER, path / EXPORT_FOLDER):
        remove_side_files(folder)


def _now() -> str:
    """Local time with its offset, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
