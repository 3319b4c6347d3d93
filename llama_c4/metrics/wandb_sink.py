"""Weights & Biases as a view of the records, through a process of its own (`wandb_process`).

W&B can be away, slow, unreachable or killed; a run must not notice. The run writes to a pipe without ever waiting, and
the first fault ends the view with one message that says what happened and how to fill the gap: `metrics.jsonl` has
every record, and `rebuild_wandb` makes one whole W&B run of it.

A run has one id over all its starts. Every offline start makes a piece of its own (an `offline-run-*` folder) with that
id and disjoint steps; `wandb sync` joins them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast, final

from llama_c4.config.compose import load_config
from llama_c4.config.errors import CheckpointError, TrainingError
from llama_c4.config.schema import WandbConfig
from llama_c4.metrics import wandb_process
from llama_c4.metrics.records import Record, from_line

CLOSE_SECONDS = 8.0
"""How long the end of a run waits for W&B to write what is left."""
REBUILD_SECONDS = 600.0
_PENDING_BYTES = 64 << 20
_READ_BYTES = 65_536


@final
class WandbSink:
    """Passes records to W&B; never raises and never waits, but at the end for a few seconds.

    Keys are "<kind>/<field>"; `global_step` and the step of W&B are the update.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        settings: WandbConfig,
        run_id: str,
        config: Mapping[str, Any],
        message: Callable[[str], None],
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Start the process; it asks W&B for a run while training begins.

        Args:
            run_dir: The run folder; W&B's files go to its `wandb/`, and its name is the display name.
            settings: Mode (online or offline), project, entity, group, tags.
            run_id: Of the run folder: the same for every start.
            config: The configuration as a tree of plain values.
            message: Told once what went wrong.
            close_seconds: How long `close` waits.
        """
        self._message = message
        self._close_seconds = close_seconds
        self._feed: Feed | None = None
        arguments = run_arguments(run_dir, settings, run_id=run_id, config=config, mode=settings.mode)
        try:
            self._feed = Feed(arguments)
        except OSError as error:
            self._give_up(f"its process cannot be started ({error.strerror})")

    def write(self, record: Record) -> None:
        """Pass a record on; it is dropped once W&B has failed."""
        if self._feed is not None:
            self._feed.put(log_item(record))
            self._look()

    def close(self, exit_code: int) -> None:
        """Pass the end on and wait a few seconds at most; a second time does nothing."""
        if self._feed is None:
            return
        self._feed.put({"exit_code": exit_code})
        self._feed.finish(self._close_seconds)
        self._look()
        if self._feed is not None and self._feed.answer is None:
            self._give_up(f"it was not done {self._close_seconds:g} seconds after the run")
        self._feed = None

    def _look(self) -> None:
        assert self._feed is not None
        fault = self._feed.fault()
        if fault is not None:
            self._give_up(fault)

    def _give_up(self, reason: str) -> None:
        if self._feed is not None:
            self._feed.abandon()
            self._feed = None
        self._message(
            f"W&B is left out from here on: {reason}; the run itself is not touched, metrics.jsonl has every record, "
            f"and `llama-c4 report --wandb` makes a whole W&B run of it"
        )


@final
class Feed:
    """The pipe to a W&B process. Nothing here blocks but `finish`, and that not longer than it is told.

    Attributes:
        answer: What the process has said at its end; None while it goes on.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the process. Raises OSError when that is impossible."""
        self.answer: dict[str, Any] | None = None
        # -P: the folder of the script holds our modules, which are no libraries of wandb's.
        command = [sys.executable, "-P", wandb_process.__file__]
        # A session of its own: Ctrl-C and signals to the job's processes are for the run, which then closes this.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)
        self._pending = bytearray()
        self._said = b""
        self._broken: str | None = None
        self.put(arguments)

    def put(self, item: Mapping[str, Any]) -> None:
        """Queue an item and write what the pipe takes."""
        self._pending += json.dumps(item).encode() + b"\n"  # NaN as wandb writes it itself
        self._push()
        if len(self._pending) > _PENDING_BYTES:
            self._broken = "it does not take records any more"

    def _push(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._input.fileno(), self._pending)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._broken = f"its process is gone ({error.strerror})"
            self._pending.clear()

    def fault(self) -> str | None:
        """Why W&B can take no more, or None."""
        code = self._process.poll()  # before listening: what it said at its end is then there to be read
        if self.answer is None:
            self._listen()
        if self.answer is not None:
            return self.answer.get("failed")
        return self._broken if code is None else f"its process ended with code {code}"

    def _listen(self) -> None:
        try:
            self._said += os.read(self._output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if self._said.endswith(b"\n"):
            self.answer = json.loads(self._said)

    def finish(self, seconds: float) -> None:
        """Write what is pending, end the input and wait for the answer, so many seconds at most."""
        deadline = time.monotonic() + seconds
        while self._pending and self.fault() is None and time.monotonic() < deadline:
            select.select([], [self._input], [], 0.1)
            self._push()
        self._input.close()
        while self.answer is None and self.fault() is None and time.monotonic() < deadline:
            select.select([self._output], [], [], 0.1)
        if self.answer is not None:
            self._process.wait()

    def abandon(self) -> None:
        """Let go of the process: its input ends, and it ends itself within a minute."""
        self._input.close()
        self._output.close()
        self._process.poll()


def rebuild_wandb(run_dir: Path, *, mode: Literal["online", "offline"], seconds: float = REBUILD_SECONDS) -> str:
    """Make one whole W&B run of a run folder's records, whatever became of the pieces that were logged on the way.

    Its id is that of the run with "-rebuilt": W&B does not take steps again that a run already has. Project, entity,
    group and tags are those of the run's own configuration.

    Args:
        run_dir: The run folder.
        mode: online, or offline for a piece to be uploaded with `wandb sync`.
        seconds: How long W&B may take.
    Returns:
        The id of the W&B run.
    Raises:
        CheckpointError: There are no records, or a line of them is damaged.
        ConfigError: config.yaml is missing or cannot be read.
        TrainingError: W&B is not installed, or failed.
    """
    records = _read_records(run_dir / "metrics.jsonl")
    config = load_config(run_dir / "config.yaml")
    run_id = f"{_run_id_of(run_dir)}-rebuilt"
    tree = dataclasses.asdict(cast("Any", config))
    feed = Feed(run_arguments(run_dir, config.logging.wandb, run_id=run_id, config=tree, mode=mode))
    for record in records:
        feed.put(log_item(record))
    feed.put({"exit_code": 0})
    feed.finish(seconds)
    fault = feed.fault() or (None if feed.answer else f"it was not done after {seconds:g} seconds")
    if fault is not None:
        feed.abandon()
        raise TrainingError(f"{run_dir}: no whole W&B run was made of it: {fault}")
    return run_id


def run_arguments(
    run_dir: Path, settings: WandbConfig, *, run_id: str, config: Mapping[str, Any], mode: str
) -> dict[str, Any]:
    """The first line for the process."""
    return {
        "dir": str(run_dir.resolve()),
        "name": run_dir.resolve().name,
        "run_id": run_id,
        "mode": mode,
        "project": settings.project,
        "entity": settings.entity,
        "group": settings.group,
        "tags": list(settings.tags),
        "config": dict(config),
    }


def log_item(record: Record) -> dict[str, Any]:
    """A record as a line for the process: the numbers, under the kind's name, at the update."""
    step = record.get("update")
    values = {f"{record['kind']}/{key}": value for key, value in record.items() if _is_curve(key, value)}
    return {"step": step, "values": values if step is None else values | {"global_step": step}}


def _is_curve(key: str, value: Any) -> bool:
    return key not in ("kind", "update") and isinstance(value, (int, float))


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); name a run folder that has records"
        ) from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # behind the last line break: still being written
        try:
            records.append(from_line(line))
        except ValueError as error:
            raise CheckpointError(f"{path}, line {number}: {error}") from error
    return records


def _run_id_of(run_dir: Path) -> str:
    try:
        return str(json.loads((run_dir / "status.json").read_bytes())["run_id"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{run_dir / 'status.json'}: has no run_id ({error}); name a run folder") from error
