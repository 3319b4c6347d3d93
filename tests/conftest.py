"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden numbers anew; say why in the commit"
    )


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and tools beside the checkout; where it is missing, the test is skipped."""
    place = Path(os.environ.get("LLAMA_C4_SHARED", ROOT.parent / "shared"))
    if not place.is_dir():
        pytest.skip(f"needs the shared data folder; none at {place} (set LLAMA_C4_SHARED)")
    return place


@pytest.fixture(autouse=True)
def _one_thread_and_clean_determinism() -> object:
    """One torch thread in a test, and the framework's deterministic switch as it was before."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
