"""When and where states are saved, and from which one a run continues.

What lies in a run folder, and what it is for:

    final.pt                        the end of the run; policies final, interval and explicit
    checkpoints/epoch-0004/         an export (see exports.py); policies interval and explicit
    rescue/update-…-sequence-….pt   rolling states of an unfinished run, the last two; any policy

A state is complete once it has its name, and then it is never changed. A run continues from the one that is furthest.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor

from llama_c4.checkpoint.atomic import make_folder, set_aside, write_failure
from llama_c4.checkpoint.exports import verify_export, write_export
from llama_c4.checkpoint.format import (
    KIND_ORDINARY,
    DamagedState,
    State,
    read_index,
    read_state,
    verify_state,
    write_state,
)
from llama_c4.checkpoint.header import ExtensionRule, Position, StateHeader, check_header, machine_differences
from llama_c4.checkpoint.places import (
    FINAL_FILE,
    RESCUE_FOLDER,
    STATE_FILE,
    WEIGHTS_FILE,
    export_folder,
    rescue_files,
    rescue_path,
    state_files,
)
from llama_c4.checkpoint.policy import export_epochs
from llama_c4.config.errors import CheckpointError, TrainingError
from llama_c4.config.schema import TrainingConfig
from llama_c4.runtime.seeding import restore_rng_state, rng_state

RNG_PART = "rng"


class Stateful(Protocol):
    """A part of a run that is saved and restored."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Progress(Protocol):
    """The counters of a run that say how far it is."""

    @property
    def update(self) -> int: ...

    @property
    def micro_step(self) -> int: ...

    @property
    def sequences(self) -> int: ...


class Update(Protocol):
    """What the store has to know of an update."""

    @property
    def epoch(self) -> int: ...

    @property
    def ends_epoch(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """From what a run continues.

    Attributes:
        path: The file.
        position: How far it is.
        machine_changes: Machine settings that are different now, "key: found → expected".
        is_extended: Whether the budget has grown.
    """

    path: Path
    position: Position
    machine_changes: tuple[str, ...]
    is_extended: bool


@final
class CheckpointStore:
    """Saves the parts of a run into its folder and restores them.

    Attributes:
        loaded: From what this process continues; None for a fresh start.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        training: TrainingConfig,
        num_epochs: int,
        header: StateHeader,
        parts: Mapping[str, Stateful],
        weights: Callable[[], Mapping[str, Tensor]],
        message: Callable[[str], None],
        cache_ancestors: Collection[str] = (),
        refuse_extension: ExtensionRule | None = None,
        saving: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            run_dir: The claimed run folder.
            training: Policy, rescue cadence, `extend`.
            num_epochs: Epochs of the plan.
            header: What every state of this run belongs to.
            parts: Name → part, restored in this order. The random number generators are saved beside them as `rng` and
                restored after them, since restoring a part may draw numbers.
            weights: Gives the weights of one ordinary model, for exports.
            message: Told what a user should know: a damaged state, the file continued from.
            cache_ancestors: Identities of the caches that this run's cache was extended from.
            refuse_extension: Why a state cannot continue to a larger budget, or None; required with `training.extend`.
            saving: Context in which every save happens, so that its time can be told from training.
            clock: Seconds that never go back.
        Raises:
            ConfigError: An epoch to export does not exist.
        """
        if RNG_PART in parts:
            raise ValueError(f"the part {RNG_PART!r} is the store's own")
        if training.extend and refuse_extension is None:
            raise ValueError("training.extend needs refuse_extension")
        self.loaded: LoadedState | None = None
        self._dir = run_dir
        self._training = training
        self._export_epochs = export_epochs(training, num_epochs=num_epochs)
        self._header = header
        self._parts = dict(parts)
        self._weights = weights
        self._message = message
        self._cache_ancestors = cache_ancestors
        self._refuse_extension = refuse_extension
        self._saving = saving
        self._clock = clock
        self._saved_at = clock()
        self._newest: tuple[Position, Path] | None = None

    # --- saving -------------------------------------------------------------------------------------------------------

    def save_if_due(self, progress: Progress, update: Update) -> None:
        """After an update and its probes: export the epoch that it ends, if the policy wants it.

        Raises:
            TrainingError: The file system refused; older states are as they were.
        """
        if update.ends_epoch and update.epoch in self._export_epochs:
            self._save_export(progress, export_folder(self._dir, update.epoch))

    def rescue_if_due(self, progress: Progress) -> None:
        """Between any two micro-steps: save a rolling state if `training.rescue.every_minutes` have passed.

        Raises:
            TrainingError: The file system refused; older states are as they were.
        """
        minutes = self._training.rescue.every_minutes
        if minutes is not None and self._clock() - self._saved_at >= 60 * minutes:
            self.rescue(progress)

    def rescue(self, progress: Progress) -> Path:
        """Save a rolling state now; the one before stays, older ones go.

        Returns:
            The file.
        Raises:
            TrainingError: The file system refused; older states are as they were.
        """
        position = _position(progress)
        path = rescue_path(self._dir, position)
        # A state at this very position is replaced: the probes may have measured since.
        self._save_state(path, position)
        others = [other for other in rescue_files(self._dir) if other != path]
        for outdated in others[:-1]:
            outdated.unlink()
        return path

    def save_final(self, progress: Progress) -> None:
        """After the last update: write final.pt, unless the policy is none.

        The final.pt of a shorter budget stays, as `final-update-NNNNNNNN.pt`.

        Raises:
            TrainingError: The file system refused; older states are as they were.
        """
        if self._training.checkpoint_policy != "none":
            position = _position(progress)
            if self._make_way(self._dir / FINAL_FILE, position):
                self._save_state(self._dir / FINAL_FILE, position)

    def finish(self) -> None:
        """The run has its result: remove the rolling states."""
        shutil.rmtree(self._dir / RESCUE_FOLDER, ignore_errors=True)

    def weights_of(self, epoch: int) -> str | None:
        """The file, relative to the run folder, for the weights at the end of an epoch; None if they are not kept."""
        if epoch not in self._export_epochs:
            return None
        return str((export_folder(self._dir, epoch) / WEIGHTS_FILE).relative_to(self._dir))

    def _save_state(self, path: Path, position: Position) -> None:
        with self._saving(), self._naming_intact_state(path):
            make_folder(path.parent)
            write_state(path, self._collect(), header=self._header.to_json(), progress=_counts(position))
        self._has_saved(path, position)

    def _save_export(self, progress: Progress, folder: Path) -> None:
        position = _position(progress)
        with self._saving(), self._naming_intact_state(folder):
            make_folder(folder.parent)
            if self._make_way(folder, position):
                write_export(
                    folder,
                    self._collect(),
                    weights=self._weights(),
                    config=self._header.config,
                    header=self._header.to_json(),
                    progress=_counts(position),
                )
        self._has_saved(folder / STATE_FILE, position)

    def _collect(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()} | {RNG_PART: rng_state()}

    def _make_way(self, path: Path, position: Position) -> bool:
        """Whether `path` is to be written: not if this very state is there. What else is there is set aside."""
        if not path.exists():
            return True
        try:
            state = verify_export(path) if path.is_dir() else verify_state(path)
        except CheckpointError as error:
            moved = set_aside(path, label="damaged")
            self._message(f"{error}; set aside as {moved.name}")
            return True
        there = Position.from_json(state.progress, file=str(path))
        if there == position:
            return False
        kept = path.with_name(f"{path.stem}-update-{there.update:08d}{path.suffix}")
        moved = set_aside(path, label="shorter") if kept.exists() or path.is_dir() else path.rename(kept)
        self._message(f"{path.name} of {there} stays as {moved.name}")
        return True

    @contextmanager
    def _naming_intact_state(self, path: Path) -> Iterator[None]:
        """Adds to the error of a failed save which older state is intact."""
        try:
            yield
        except (TrainingError, OSError) as error:
            reason = write_failure(path, error, needed_bytes=0) if isinstance(error, OSError) else str(error)
            intact = "there is no older state"
            if self._newest is not None:
                intact = f"the newest intact state is {self._newest[1]} ({self._newest[0]})"
            raise TrainingError(f"{reason}; {intact}; free some space and give the same command again") from error

    def _has_saved(self, path: Path, position: Position) -> None:
        self._newest = (position, path)
        self._saved_at = self._clock()

    # --- loading ------------------------------------------------------------------------------------------------------

    def load_newest(self) -> bool:
        """Continue from the intact state that is furthest.

        A damaged one is passed over with a message. A state of another recipe, cache, loader, precision or version is
        not passed over: it says that this run does not belong here.

        Returns:
            Whether there was a state.
        Raises:
            CheckpointError: The furthest state does not belong to this run, or there are states and none is intact.
        """
        damaged: list[str] = []
        for path, state in self._furthest_first(damaged):
            try:
                self._continue_from(path, state)
            except DamagedState as error:
                self._pass_over(path, error, damaged)
                continue
            return True
        if damaged:
            listed = "".join(f"\n  {fault}" for fault in damaged)
            raise CheckpointError(
                f"{self._dir}: none of its states is intact:{listed}\n"
                f"move them away to start from the beginning, or choose another run.name"
            )
        return False

    def load(self, path: Path) -> None:
        """Continue from this very file.

        Raises:
            CheckpointError: It is damaged or does not belong to this run.
        """
        self._continue_from(path, read_index(path))

    def _furthest_first(self, damaged: list[str]) -> Iterator[tuple[Path, State]]:
        """The states of the folder whose index can be read; the others are passed over."""
        found: list[tuple[Position, Path, State]] = []
        for path in state_files(self._dir):
            try:
                state = read_index(path)
            except DamagedState as error:
                self._pass_over(path, error, damaged)
                continue
            found.append((Position.from_json(state.progress, file=str(path)), path, state))
        for _, path, state in sorted(found, key=lambda entry: entry[0], reverse=True):
            yield path, state

    def _pass_over(self, path: Path, error: DamagedState, damaged: list[str]) -> None:
        damaged.append(str(error))
        self._message(f"{error}; looking for an older one")
        if path.parent.name == RESCUE_FOLDER:
            # It must not count among the two newest, nor be in the way of the state that comes here again.
            set_aside(path, label="damaged")

    def _continue_from(self, path: Path, state: State) -> None:
        header = StateHeader.from_json(state.header, file=str(path))
        position = Position.from_json(state.progress, file=str(path))
        is_extended = self._check(path, state, header, position)
        self._restore(path, read_state(path))
        self._newest = (position, path)
        self._saved_at = self._clock()
        self.loaded = LoadedState(
            path=path,
            position=position,
            machine_changes=tuple(machine_differences(header, self._header)),
            is_extended=is_extended,
        )
        self._message(f"continuing from {path} ({position})")

    def _check(self, path: Path, state: State, header: StateHeader, position: Position) -> bool:
        if state.kind != KIND_ORDINARY:
            raise CheckpointError(f"{path}: is a state of kind {state.kind}, this run needs kind {KIND_ORDINARY}")
        rule = self._refuse_extension
        return check_header(
            header,
            self._header,
            file=str(path),
            cache_ancestors=self._cache_ancestors,
            extend=self._training.extend,
            refuse_extension=(lambda: None) if rule is None else (lambda: rule(header, position)),
        )

    def _restore(self, path: Path, state: State) -> None:
        expected, found = {*self._parts, RNG_PART}, set(state.parts)
        if expected != found:
            raise CheckpointError(f"{path}: holds the parts {sorted(found)}, this run has {sorted(expected)}")
        for name, part in self._parts.items():
            part.load_state_dict(state.parts[name])
        restore_rng_state(state.parts[RNG_PART])


def _position(progress: Progress) -> Position:
    return Position(update=progress.update, sequences=progress.sequences, micro_step=progress.micro_step)


def _counts(position: Position) -> dict[str, int]:
    return {"update": position.update, "micro_step": position.micro_step, "sequences": position.sequences}
