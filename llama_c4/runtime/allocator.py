"""The C heap: keep freed pages, so that the large temporaries of every update are not faulted in anew.

glibc gives blocks above 128 KiB back to the kernel when they are freed, and a training step on a CPU frees and takes
hundreds of megabytes: most of the loss of eager PyTorch there is page faults (4 KiB a time) on fresh memory.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Literal

from llama_c4.config.errors import ConfigError

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
TOP_PAD_BYTES = 64 * 2**20


def configure_allocator(choice: Literal["auto", "retain", "default"], *, on_cpu: bool) -> Literal["retain", "default"]:
    """Set the C heap up for the whole process; to be called before torch allocates much.

    `retain` never uses mmap for a block, never trims the heap, and grows it by 64 MiB at a time. It cannot be undone
    in a running process, so a later `default` finds the heap as it is.

    Args:
        choice: `auto` retains on CPUs where the C library can, and takes the default everywhere else.
        on_cpu: Whether the model's tensors live in this heap.
    Returns:
        What was done.
    Raises:
        ConfigError: `retain` was asked for and the C library cannot.
    """
    if choice == "default" or (choice == "auto" and not on_cpu):
        return "default"
    if _retain_pages():
        return "retain"
    if choice == "auto":
        return "default"
    raise ConfigError(
        "runtime.allocator=retain needs glibc's mallopt, which this system's C library "
        f"({platform.libc_ver()[0] or platform.system()}) does not offer; set runtime.allocator=auto"
    )


def _retain_pages() -> bool:
    """Ask glibc to keep pages; False where the C library is another one or refuses."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, TOP_PAD_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted)
