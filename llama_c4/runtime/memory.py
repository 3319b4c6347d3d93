"""Memory: how much a device has, and the peak of the CUDA allocator or of the process (the kernel's mark)."""

from __future__ import annotations

import os
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def total_memory_bytes(device: torch.device) -> int | None:
    """Memory of the card, or what the process may use of the host: the machine's, or the container's limit.

    Returns:
        Bytes; None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not STATUS.exists():
        return None
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    return machine if limit == "max" else min(machine, int(limit))


def peak_memory_bytes(device: torch.device) -> int | None:
    """Largest memory since the start or the last reset.

    Returns:
        CUDA: bytes held by tensors. CPU: resident bytes of the process (VmHWM). None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not STATUS.exists():
        return None
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def reset_peak_memory(device: torch.device) -> bool:
    """Let the peak start again from what is held now; False where the system does not allow it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")  # 5 resets the high-water mark, see proc_pid_clear_refs(5)
    except OSError:
        return False
    return True
