"""Real processes, real signals: nothing is lost but the work since the last rescue point."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, quiet_environment
from tests.end_to_end.runs import assert_same, final_parts, records

LONGER = ["training.total_tokens=8000", "training.rescue.every_minutes=0.001", "logging.progress=off"]


def start(*overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *overrides],
        cwd=ROOT,
        env=quiet_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Until the file is there, or the process has ended."""
    end = time.monotonic() + seconds
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)


@pytest.fixture
def whole(micro: list[str], tmp_path: Path) -> Path:
    assert start(*micro, *LONGER, "run.name=whole").wait(120) == 0
    return tmp_path / "runs" / "whole"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_at_random_moments_lose_nothing(micro: list[str], whole: Path, tmp_path: Path) -> None:
    """A fork server keeps the libraries loaded, so that a start takes the time of the run's own start alone."""
    chance = random.Random(42)
    folder = tmp_path / "runs" / "micro"
    deaths, furthest = 0, 0
    with ForkServer([*micro, *LONGER]) as server:
        while deaths < 50:
            pid = server.fork()
            time.sleep(chance.uniform(0.05, 0.6))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if server.wait() == 0:  # it was done before the signal came: once more from the start
                assert_same(final_parts(folder), final_parts(whole))
                folder.rename(folder.with_name(f"done-{deaths}"))
                furthest = 0
                continue
            deaths += 1
            states = [int(p.stem.split("-")[1]) for p in folder.glob("rescue/update-*.pt")]
            assert max(states, default=furthest) >= furthest  # never back behind a rescue point
            furthest = max(states, default=furthest)
    process = start(*micro, *LONGER)
    assert process.wait(120) == 0 or "finished" in (folder / "status.json").read_text()
    assert_same(final_parts(folder), final_parts(whole))
    assert records(folder) == records(whole)


class ForkServer:
    """A process that has imported everything and forks a run whenever it is told to."""

    CODE = """
import os, sys
from llama_c4.config.compose import compose_config
from llama_c4.cli import guarded
from llama_c4.run import run_training
config = compose_config(sys.argv[1:])
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os._exit(guarded(lambda: run_training(config)))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

    def __init__(self, overrides: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, *overrides, "run.on_finished=skip"],
            cwd=ROOT,
            env=quiet_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def fork(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("fork\n")
        self.process.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR2", 75), ("SIGINT", 130)])
def test_a_signal_in_training_saves_and_the_same_command_goes_on(
    name: str, code: int, micro: list[str], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "micro"
    process = start(*micro, *LONGER)
    wait_for(folder / "rescue", process)
    process.send_signal(getattr(signal, name))
    process.send_signal(signal.SIGTERM if name == "SIGTERM" else 0)  # a scheduler sends it twice
    assert process.wait(60) == code
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
    assert start(*micro, *LONGER).wait(120) == 0
    assert_same(final_parts(folder), final_parts(whole))
    assert records(folder) == records(whole)
    assert len((folder / "lineage.jsonl").read_text().splitlines()) == 2


def test_a_signal_while_evaluating_is_obeyed_before_the_evaluation_ends(micro: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "micro"
    slow = ["data.cache_dir=" + str(tmp_path / "wide"), "data.validation_tokens=400000", "evaluation.batch_size=1"]
    prepare = [sys.executable, "-m", "llama_c4.cli", "prepare", *micro, *slow]
    subprocess.run(prepare, cwd=ROOT, env=quiet_environment(), check=True, capture_output=True)
    process = start(*micro, *slow, "logging.progress=off")
    wait_for(folder / "final.pt", process)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert time.monotonic() - begun < 10  # the whole evaluation takes far longer
    assert not (folder / "result.json").exists()
    assert start(*micro, *slow, "logging.progress=off", "evaluation.batch_size=64").wait(120) == 0
    assert json.loads((folder / "result.json").read_text())["num_targets"] == 399_999


def test_two_starts_of_one_run_never_share_its_folder(micro: list[str], tmp_path: Path) -> None:
    first, second = start(*micro, *LONGER), start(*micro, *LONGER)
    codes = sorted([first.wait(120), second.wait(120)])
    assert codes == [0, 2]
    loser = first if first.returncode == 2 else second
    assert loser.stderr is not None
    assert "Traceback" not in (message := loser.stderr.read()) and str(tmp_path / "runs" / "micro") in message
