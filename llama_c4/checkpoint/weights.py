"""The weights of any run, export or state file, with what they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from llama_c4.checkpoint.exports import read_export_weights
from llama_c4.checkpoint.format import DamagedState, State, read_index, read_state
from llama_c4.checkpoint.header import Position, StateHeader
from llama_c4.checkpoint.places import STATE_FILE, state_files
from llama_c4.config.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Attributes:
    path: The file or export they come from.
    weights: Name → tensor of one ordinary model, on the CPU.
    header: What the state belongs to.
    position: How far it is.
    """

    path: Path
    weights: Mapping[str, Tensor]
    header: StateHeader
    position: Position


def load_weights(path: Path) -> StoredWeights:
    """Read weights after checking every byte.

    Args:
        path: A run folder (its furthest intact state), an export of an epoch, or a state file.
    Raises:
        CheckpointError: Nothing there, no state of ours, or damaged.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such run, export or state; `llama-c4 runs` lists the runs")
    if path.is_file():
        return _from_state(path, read_state(path))
    if (path / STATE_FILE).is_file():
        weights, _ = read_export_weights(path)
        index = read_index(path / STATE_FILE)
        return _stored(path, index, weights)
    return _furthest(path)


def _furthest(run_dir: Path) -> StoredWeights:
    """The furthest intact state of a run folder; if there are only damaged ones, each is named."""
    faults: list[str] = []
    found: list[tuple[Position, Path]] = []
    for file in state_files(run_dir):
        try:
            found.append((Position.from_json(read_index(file).progress, file=str(file)), file))
        except DamagedState as error:
            faults.append(str(error))
    for _, file in sorted(found, reverse=True):
        try:
            return _from_state(file, read_state(file))
        except DamagedState as error:
            faults.append(str(error))
    listed = "".join(f"\n  {fault}" for fault in faults)
    reason = f"none of its states is intact:{listed}" if faults else "holds no state yet; train the run first"
    raise CheckpointError(f"{run_dir}: {reason}")


def _from_state(path: Path, state: State) -> StoredWeights:
    try:
        weights = state.parts["engine"]["model"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{path}: holds no weights of one model ({sorted(state.parts)})") from None
    return _stored(path, state, weights)


def _stored(path: Path, state: State, weights: Mapping[str, Tensor]) -> StoredWeights:
    return StoredWeights(
        path=path,
        weights=weights,
        header=StateHeader.from_json(state.header, file=str(path)),
        position=Position.from_json(state.progress, file=str(path)),
    )
