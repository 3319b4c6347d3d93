"""The C heap, measured by page faults in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from llama_c4.config.errors import ConfigError
from llama_c4.runtime import allocator
from llama_c4.runtime.allocator import configure_allocator

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")

FAULTS = """
import resource, sys
import numpy as np
from llama_c4.runtime.allocator import configure_allocator
configure_allocator(sys.argv[1], on_cpu=sys.argv[2] == "cpu")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**23, dtype=np.uint8)
before = faults()
for _ in range(20):
    np.ones(2**23, dtype=np.uint8)
print(faults() - before)
"""


def faults_of_20_blocks_of_2048_pages(choice: str, device: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, choice, device], capture_output=True, text=True, check=True)
    return int(done.stdout)


@glibc
def test_retained_pages_are_not_faulted_in_again() -> None:
    assert faults_of_20_blocks_of_2048_pages("retain", "cuda") < 2_048
    assert faults_of_20_blocks_of_2048_pages("auto", "cpu") < 2_048


@glibc
def test_default_and_auto_beside_a_gpu_leave_the_heap_alone() -> None:
    # Huge pages, where the kernel gives them, are faulted in 512 at a time; glibc's default gives every block back.
    retained = faults_of_20_blocks_of_2048_pages("retain", "cpu")
    for choice, device in (("default", "cpu"), ("auto", "cuda")):
        assert faults_of_20_blocks_of_2048_pages(choice, device) > max(20, 2 * retained)


def test_without_glibc_auto_takes_the_default_and_a_forced_retain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    assert configure_allocator("auto", on_cpu=True) == "default"
    with pytest.raises(ConfigError, match=r"runtime.allocator=retain needs glibc.*set runtime.allocator=auto"):
        configure_allocator("retain", on_cpu=True)
