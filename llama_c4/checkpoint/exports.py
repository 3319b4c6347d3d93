"""An epoch's export: a folder with weights in the ordinary format, the configuration and the full state.

    checkpoints/epoch-0004/model.safetensors    weights of one ordinary model, float32, name → tensor
    checkpoints/epoch-0004/config.yaml          the resolved configuration
    checkpoints/epoch-0004/state.pt             the state; its index holds the SHA-256 of the other two

The folder is written under a side name and renamed when all of it is on the disk; it is never changed afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from llama_c4.checkpoint.atomic import new_folder, replace_file, write_failure
from llama_c4.checkpoint.format import DamagedState, State, tensor_bytes, to_plain, verify_state, write_state
from llama_c4.checkpoint.places import CONFIG_FILE, STATE_FILE, WEIGHTS_FILE
from llama_c4.config.errors import CheckpointError, TrainingError


def write_export(
    folder: Path,
    parts: Mapping[str, Any],
    *,
    weights: Mapping[str, Tensor],
    config: str,
    header: Mapping[str, Any],
    progress: Mapping[str, int],
) -> None:
    """Write the export of an epoch, whole or not at all.

    Args:
        folder: The folder to make; its parent exists, it does not.
        parts, header, progress: As `format.write_state` takes them.
        weights: Name → tensor of one ordinary model.
        config: Resolved YAML.
    Raises:
        FileExistsError: The folder is there; committed exports are immutable.
        TrainingError: The file system refused; nothing is left of the folder.
    """
    plain = to_plain(weights, place="weights")
    data = {CONFIG_FILE: config.encode(), WEIGHTS_FILE: safetensors.torch.save(plain, metadata={"format": "pt"})}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    try:
        with new_folder(folder) as side:
            for name, content in data.items():
                with replace_file(side / name) as file:
                    file.write(content)
            # Last, as the manifest of the others.
            write_state(side / STATE_FILE, parts, header=header, progress=progress, files=digests)
    except FileExistsError:
        raise
    except OSError as error:
        needed = sum(map(len, data.values())) + tensor_bytes(parts)
        raise TrainingError(write_failure(folder, error, needed_bytes=needed)) from error


def verify_export(folder: Path) -> State:
    """Check every byte of an export.

    Returns:
        The index of its state, without the parts.
    Raises:
        DamagedState: A file is missing, cut short or altered.
        CheckpointError: The state is of another version.
    """
    if not (folder / STATE_FILE).is_file():
        raise DamagedState(f"{folder}: has no {STATE_FILE}, so it is no export of an epoch; use another one")
    state = verify_state(folder / STATE_FILE)
    for name, digest in state.files.items():
        _check_file(folder / name, digest)
    return state


def read_export_weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Read the weights and the configuration of an export after checking every byte of it.

    Returns:
        Name → tensor on the CPU, and the resolved configuration as YAML.
    Raises:
        DamagedState, CheckpointError: As `verify_export`.
    """
    verify_export(folder)
    weights = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    return weights, (folder / CONFIG_FILE).read_text(encoding="utf-8")


def _check_file(path: Path, digest: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise DamagedState(f"{path}: is missing, {STATE_FILE} beside it names it; use another epoch") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if found != digest:
        raise DamagedState(
            f"{path}: sha256 {found[:16]}… where {STATE_FILE} beside it says {digest[:16]}…; use another epoch"
        )
