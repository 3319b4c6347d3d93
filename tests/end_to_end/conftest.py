"""A run so small that it takes a second: every path of the real thing, on a Markov chain."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SHAPE = [
    "model=tiny",
    "model.vocab_size=64",
    "model.context_length=16",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.intermediate_size=32",
]
DATA = [
    "data=markov",
    "data.train_tokens=8192",
    "data.validation_tokens=1000",
    "data.shard_tokens=512",
    "data.successors=4",
]
# 140 blocks in updates of 8, micro-batches of 3; an epoch of 35 blocks ends with a shortened update of 3.
BUDGET = [
    "training.tokens_per_parameter=null",
    "training.total_tokens=2240",
    "training.epoch_tokens_per_parameter=null",
    "training.epoch_tokens=560",
    "training.batch_tokens=128",
    "training.micro_batch_size=3",
    "lr_schedule.warmup_steps=2",
    "logging.log_every=2",
    "evaluation.subset_blocks=16",
]


@pytest.fixture(scope="session")
def micro_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared token cache of the micro run; made once."""
    from llama_c4.config.compose import compose_config
    from llama_c4.prepare import run_preparation

    place = tmp_path_factory.mktemp("caches") / "markov"
    assert run_preparation(compose_config([*SHAPE, *DATA, *BUDGET, f"data.cache_dir={place}"]), verify=False) == 0
    return place


@pytest.fixture
def micro(micro_cache: Path, tmp_path: Path) -> list[str]:
    """Overrides of the micro run; its run folder is `tmp_path/runs/micro`."""
    return micro_overrides(micro_cache, tmp_path / "runs")


def micro_overrides(cache: Path, runs: Path) -> list[str]:
    """The micro run on a cache, in a folder of runs."""
    places = [f"data.cache_dir={cache}", f"run.output_dir={runs}", "run.name=micro"]
    return [*SHAPE, *DATA, *BUDGET, *places, "runtime=cpu", "training.micro_batch_size=3", "runtime.threads=1"]


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def train() -> Command:
    """`train(*overrides)` runs train.py as a user does and returns what it printed and its exit code."""

    def run(*overrides: str, cwd: Path = ROOT, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "train.py"), *overrides]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=quiet_environment()
        )

    return run


@pytest.fixture
def llama_c4() -> Command:
    """`llama_c4(*words)` runs the command line tool."""

    def run(*words: str, cwd: Path = ROOT, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llama_c4.cli", *words]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=quiet_environment()
        )

    return run


def quiet_environment() -> dict[str, str]:
    """One thread a process, no network, no terminal colours."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
