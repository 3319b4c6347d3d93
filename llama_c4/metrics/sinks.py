"""Where records go. `metrics.jsonl` is the truth; everything else is a view of the same records."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol, final

from llama_c4.config.errors import CheckpointError, TrainingError
from llama_c4.metrics.records import Record, from_line, to_line

TRAINING = "training"
"""The phase outside of all others; those are startup, evaluation and saving."""
LiveState = Literal["starting", "training", "evaluating"]
"""What status.json says of a run that goes on."""


class Sink(Protocol):
    """Takes records."""

    def write(self, record: Record) -> None:
        """Take a record; it is not kept or changed."""

    def close(self, exit_code: int) -> None:
        """No more records come; the run's exit code."""


class Display(Sink, Protocol):
    """Shows people what happens."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def advance(self, update: int, targets: int) -> None:
        """An update is done: updates and targets so far. Called after each, so it must be cheap."""

    def phase(self, name: str) -> None:
        """What the run is doing from now on: training, startup, evaluation or saving."""


@final
class JsonlSink:
    """`metrics.jsonl`: a record a line, each flushed, strict JSON.

    On opening, a last line that a killed writer left torn is cut. The rows of an earlier process stand only as far as
    the state that this one continues from knows them: `rewind` cuts the others, which are computed again.

    Attributes:
        rows: Rows that stand.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            CheckpointError: A line other than a torn last one is damaged.
            TrainingError: The file cannot be opened.
        """
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise TrainingError(f"{path}: cannot be opened ({error.strerror})") from error
        self._ends = list(self._row_ends(path.read_bytes()))
        self._cut_to(self.rows)

    @property
    def rows(self) -> int:
        return len(self._ends)

    def _row_ends(self, data: bytes) -> Iterator[int]:
        """Offsets behind each row."""
        position = 0
        while (end := data.find(b"\n", position) + 1) > 0:
            try:
                from_line(data[position:end])
            except ValueError as error:
                number = data.count(b"\n", 0, end)
                raise CheckpointError(
                    f"{self.path}, line {number}: {error}; only a last line can be torn by a kill, so the file was "
                    f"edited or the disk is damaged: put it back, or start again under another run.name"
                ) from error
            yield end
            position = end

    def _cut_to(self, rows: int) -> None:
        self._ends = self._ends[:rows]
        os.ftruncate(self._descriptor, self._ends[-1] if self._ends else 0)

    def rewind(self, rows: int) -> None:
        """Cut the rows beyond the first `rows`.

        Raises:
            CheckpointError: The file has fewer.
        """
        if rows > self.rows:
            raise CheckpointError(
                f"{self.path}: holds {self.rows} records, the state to continue from was saved after {rows}; "
                f"put the file back, or start again under another run.name"
            )
        self._cut_to(rows)

    def write(self, record: Record) -> None:
        """Append a record.

        Raises:
            TrainingError: The file system refused; no part of the line is left.
        """
        data = to_line(record)
        end = (self._ends[-1] if self._ends else 0) + len(data)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._cut_to(self.rows)
            free = shutil.disk_usage(self.path.parent).free
            raise TrainingError(
                f"{self.path}: cannot be written ({error.strerror}); {len(data)} bytes are needed, {free} are free; "
                f"free some space and give the same command again"
            ) from error
        self._ends.append(end)

    def sync(self) -> None:
        """fsync: a state that says how many rows there are must not outlive them.

        Raises:
            TrainingError: The file system refused.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written ({error.strerror})") from error

    def close(self, exit_code: int) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@final
class StatusDisplay:
    """Passes what the run is doing to `status.json`, by a callable that writes it."""

    def __init__(self, write_status: Callable[[LiveState, int, int], None]) -> None:
        """
        Args:
            write_status: Called with state, updates and targets after every update; decides itself how often to write.
        """
        self._write_status = write_status
        self._state: LiveState = "starting"
        self._position = (0, 0)

    def write(self, record: Record) -> None:
        """Records are not the status."""

    def message(self, text: str) -> None:
        """Messages are not the status."""

    def advance(self, update: int, targets: int) -> None:
        self._position = (update, targets)
        self._write_status(self._state, *self._position)

    def phase(self, name: str) -> None:
        # Saving is part of training to whoever looks at a run from outside.
        states: dict[str, LiveState] = {"startup": "starting", "evaluation": "evaluating"}
        state = states.get(name, "training")
        if state != self._state:
            self._state = state
            self._write_status(self._state, *self._position)

    def close(self, exit_code: int) -> None:
        """How a run ended is for the one who ends it to say."""
