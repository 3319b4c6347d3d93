"""Killed while saving, and out of space: the newest complete state always loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llama_c4.checkpoint.atomic import write_json
from llama_c4.config.errors import TrainingError

from .killed_saver import build
from .parts import MiniRun, Weights, files_of, training

SAVER = Path(__file__).with_name("killed_saver.py")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rounds"), [("rescue", 24), ("export", 8)])
def test_the_newest_complete_state_loads_after_a_kill_at_any_moment(tmp_path: Path, policy: str, rounds: int) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    command = [sys.executable, str(SAVER), str(tmp_path / "run"), policy, str(rounds), str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(SAVER.parents[2])}
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == rounds, done.stderr
    reached = 0
    for outcome in outcomes:
        # What was confirmed is there; a save that was not confirmed may be. Nothing is half there.
        assert outcome["update"] >= max(outcome["confirmed"], reached), (seed, outcome)
        assert outcome["loaded"] == (outcome["update"] > 0) and outcome["is_whole"], (seed, outcome)
        assert outcome["side_files_after_claim"] == 0 and len(outcome["torn"]) <= 1, (seed, outcome)
        reached = outcome["update"]
    assert sum(bool(outcome["torn"]) for outcome in outcomes) >= rounds // 4, "the kills missed the saves"


TWICE = """
import sys
from pathlib import Path
import torch
from llama_c4.runtime.stop import StopRequest
from llama_c4.trainer.plan import Update
from tests.checkpoint.killed_saver import NUMBERS, build
store, weights, progress = build(Path(sys.argv[1]), "rescue")
with StopRequest() as stop:
    while not stop.requested:
        progress.finish(Update(progress.update, progress.sequences, 1, 1, ends_epoch=False, context_length=1))
        weights.values = torch.full((NUMBERS,), float(progress.update))
        store.rescue(progress)
        print(progress.update, flush=True)
    store.rescue(progress)
raise SystemExit(stop.exit_code)
"""


@pytest.mark.slow
def test_a_second_signal_while_the_first_is_being_answered_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWICE, str(tmp_path)]
    saver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=SAVER.parents[2])
    assert saver.stdout is not None and saver.stdout.readline() == "1\n"
    for _ in range(2):
        saver.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    last = int(["1", *saver.stdout.read().split()][-1])
    assert saver.wait(60) == 75 and not list(tmp_path.rglob(".*.partial"))
    store, weights, progress = build(tmp_path, "rescue")
    assert store.load_newest() and progress.update == last and (weights.values == float(last)).all()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(run: MiniRun, numbers: int) -> None:
    run.weights.tensors = Weights(1.0, size=numbers).tensors


@pytest.mark.parametrize("what", ["rescue", "final", "export"])
def test_a_full_disk_is_told_and_leaves_the_older_state_and_no_side_files(small_disk: Path, what: str) -> None:
    policy = training(checkpoint_policy="interval", checkpoint_every_epochs=1)
    run = MiniRun(small_disk / "run", training=policy)
    run.train_to(4)
    older = run.store.rescue(run.progress)
    fill(run, 1_000_000)
    with pytest.raises(TrainingError) as caught:
        save_next(run, what)
    text, needed = str(caught.value), "7.6" if what == "export" else "3.8"  # an export holds the weights twice
    assert f"(No space left on device); about {needed} MiB are needed, 3.0 MiB are free" in text
    assert f"the newest intact state is {older} (update 4)" in text and "free some space" in text
    assert files_of(run.dir) == {str(older.relative_to(run.dir))}
    resumed = MiniRun(small_disk / "run", training=policy)
    assert resumed.store.load_newest() and resumed.value == 4.0


def save_next(run: MiniRun, what: str) -> None:
    run.progress.update, run.progress.sequences = 5, 5
    if what == "rescue":
        run.store.rescue(run.progress)
    elif what == "final":
        run.store.save_final(run.progress)
    else:
        from llama_c4.trainer.plan import Update

        run.store.save_if_due(run.progress, Update(4, 4, 1, epoch=1, ends_epoch=True, context_length=50))


def test_a_full_disk_without_an_older_state_says_so(small_disk: Path) -> None:
    run = MiniRun(small_disk / "run")
    fill(run, 1_000_000)
    with pytest.raises(TrainingError, match=r"No space left on device.*there is no older state"):
        run.store.rescue(run.progress)
    assert files_of(run.dir) == set()


def test_saving_goes_on_once_there_is_space_again(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2_900_000))
    run = MiniRun(small_disk / "run")
    fill(run, 100_000)
    with pytest.raises(TrainingError):
        run.store.rescue(run.progress)
    ballast.unlink()
    run.store.rescue(run.progress)
    resumed = MiniRun(small_disk / "run")
    assert resumed.store.load_newest() and torch.equal(resumed.weights.tensors["w"], torch.ones(100_000))


def test_a_small_file_on_a_full_disk_stays_what_it_was(small_disk: Path) -> None:
    write_json(small_disk / "best.json", {"loss": 3.0})
    (small_disk / "ballast").write_bytes(bytes(3 * 2**20 - 8192))
    with pytest.raises(TrainingError, match=r"best\.json: cannot be written \(No space left on device\)"):
        write_json(small_disk / "best.json", {"loss": 2.0, "padding": "x" * 20_000})
    assert json.loads((small_disk / "best.json").read_text()) == {"loss": 3.0}
    assert files_of(small_disk) == {"best.json", "ballast"}
