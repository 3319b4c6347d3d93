"""Where states lie in a run folder. Names carry the numbers in fixed widths, so their order is that of progress."""

from __future__ import annotations

import re
from pathlib import Path

from llama_c4.checkpoint.header import Position

FINAL_FILE = "final.pt"
RESCUE_FOLDER = "rescue"
EXPORT_FOLDER = "checkpoints"
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.yaml"
STATE_FILE = "state.pt"

_FINAL_NAME = re.compile(r"final(-update-\d+)?\.pt")
_EXPORT_NAME = re.compile(r"epoch-\d+")
_RESCUE_NAME = re.compile(r"update-\d+-sequence-\d+\.pt")


def export_folder(run_dir: Path, epoch: int) -> Path:
    """The export at the end of an epoch (1-based)."""
    return run_dir / EXPORT_FOLDER / f"epoch-{epoch:04d}"


def rescue_path(run_dir: Path, position: Position) -> Path:
    """The rolling state of a position."""
    return run_dir / RESCUE_FOLDER / f"update-{position.update:08d}-sequence-{position.sequences:012d}.pt"


def rescue_files(run_dir: Path) -> list[Path]:
    """Rolling states, the furthest last."""
    files = sorted((run_dir / RESCUE_FOLDER).glob("*.pt"))
    return [path for path in files if _RESCUE_NAME.fullmatch(path.name)]


def state_files(run_dir: Path) -> list[Path]:
    """Every file of a run folder that a run may continue from; what was set aside is left out."""
    finals = [path for path in sorted(run_dir.glob("*.pt")) if _FINAL_NAME.fullmatch(path.name)]
    folders = [path for path in sorted((run_dir / EXPORT_FOLDER).glob("*")) if _EXPORT_NAME.fullmatch(path.name)]
    exports = [folder / STATE_FILE for folder in folders]
    return [*finals, *filter(Path.is_file, exports), *rescue_files(run_dir)]
