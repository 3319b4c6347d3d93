"""What environment.json says about where a run was computed: enough to explain a number, no secrets."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from llama_c4.runtime.context import Runtime, scheduler_ids, usable_cores

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = ("llama-c4", "torch", "numpy", "hydra-core", "pydantic", "datasets", "tokenizers", "safetensors", "wandb")


def environment(runtime: Runtime) -> dict[str, Any]:
    """Describe software, hardware, source and scheduler.

    Returns:
        Plain values: versions, hardware, git (None outside a checkout), source_sha256, threads, precision, slurm, host.
    """
    return {
        "versions": _versions(),
        "hardware": _hardware(runtime.device),
        "git": _git_state(PACKAGE.parent),
        "source_sha256": source_sha256(),
        "device": str(runtime.device),
        "precision": runtime.precision,
        "deterministic": runtime.deterministic,
        "threads": runtime.threads,
        "allocator": runtime.allocator,
        "compile_mode": runtime.compile_mode,
        "rank": runtime.rank,
        "world_size": runtime.world_size,
        "slurm": scheduler_ids(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def source_sha256() -> str:
    """SHA-256 over path and content of every python file of the package and every YAML of conf/, sorted by path."""
    conf = next((place for place in (PACKAGE.parent / "conf", PACKAGE / "conf") if place.is_dir()), None)
    files = {f"llama_c4/{f.relative_to(PACKAGE).as_posix()}": f for f in PACKAGE.rglob("*.py")}
    if conf is not None:
        files |= {f"conf/{f.relative_to(conf).as_posix()}": f for f in conf.rglob("*.yaml")}
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _versions() -> dict[str, str | None]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    cuda = {"cuda": torch.version.cuda, "cudnn": _text(torch.backends.cudnn.version())}
    return found | {name: _version(name) for name in LIBRARIES} | cuda


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "gpu": None,
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        capability = f"{card.major}.{card.minor}"
        found["gpu"] = {"name": card.name, "memory_bytes": card.total_memory, "capability": capability}
    return found


def _cpu_model() -> str:
    """The model name that the kernel gives, else what python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None where the code does not run from a checkout."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain")
    return None if commit is None else {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None where git is missing, slow or unwilling (a foreign owner of the checkout)."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
