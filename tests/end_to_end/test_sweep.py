"""A sweep as a user starts it: jobs of one process are the runs that they are alone, and a signal stops it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, Command, quiet_environment
from tests.end_to_end.runs import assert_same, final_parts, records


def named(overrides: list[str], name: str) -> list[str]:
    return [*(o for o in overrides if not o.startswith("run.name=")), f"run.name={name}"]


@pytest.mark.slow
def test_the_second_job_of_a_sweep_is_the_run_alone(micro: list[str], tmp_path: Path, train: Command) -> None:
    swept = train("-m", *named(micro, "sweep-${optim.lr}"), "optim.lr=1e-3,2e-3")
    alone = train(*named(micro, "alone"), "optim.lr=2e-3")
    assert (swept.returncode, alone.returncode) == (0, 0), swept.stderr + alone.stderr
    runs = tmp_path / "runs"
    assert records(runs / "sweep-0.002") == records(runs / "alone") != records(runs / "sweep-0.001")
    assert_same(final_parts(runs / "sweep-0.002"), final_parts(runs / "alone"))


@pytest.mark.slow
def test_a_sweep_goes_on_past_a_failed_job_and_skips_finished_ones(
    micro: list[str], tmp_path: Path, train: Command
) -> None:
    command = ["-m", *named(micro, "sweep-${optim.lr}"), "optim.lr=1e30,2e-3"]
    first, second = train(*command), train(*command)
    assert first.returncode == second.returncode == 1
    assert "1 of 2 jobs failed" in first.stderr and "job 0 (optim.lr=1e+30)" in first.stderr
    assert "finished already" in second.stdout and (tmp_path / "runs" / "sweep-0.002" / "result.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_the_sweep_and_the_same_command_finishes_it(
    signum: int, code: int, micro: list[str], tmp_path: Path, train: Command
) -> None:
    words = ["-m", *named(micro, "sweep-${optim.lr}"), "optim.lr=1e-3,2e-3", "training.micro_batch_size=1"]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    process = subprocess.Popen(command, cwd=ROOT, env=quiet_environment(), stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "sweep-0.001" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == code and not (tmp_path / "runs" / "sweep-0.002").exists()
    assert train(*words).returncode == 0 and (tmp_path / "runs" / "sweep-0.002" / "result.json").is_file()


@pytest.mark.slow
def test_relative_paths_mean_the_working_directory_alone_and_in_a_sweep(
    micro: list[str], tmp_path: Path, train: Command
) -> None:
    relative = [o for o in named(micro, "r") if not o.startswith("run.output_dir=")] + ["run.output_dir=here"]
    assert train(*relative, cwd=tmp_path).returncode == 0
    assert train("-m", *named(relative, "a,b"), cwd=tmp_path).returncode == 0
    assert {p.name for p in tmp_path.iterdir()} == {"here"}
    assert {p.name for p in (tmp_path / "here").iterdir()} == {"r", "a", "b"}
