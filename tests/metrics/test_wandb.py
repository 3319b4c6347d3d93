"""Weights & Biases sees every record of a run as one run, and can do nothing to the run itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_c4.config.compose import compose_config, to_yaml
from llama_c4.config.errors import CheckpointError, TrainingError
from llama_c4.config.schema import WandbConfig
from llama_c4.metrics import wandb_process
from llama_c4.metrics.sinks import JsonlSink
from llama_c4.metrics.wandb_sink import WandbSink, rebuild_wandb

pytest.importorskip("wandb")

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = WandbConfig(mode="offline", project="tests", entity=None, group="g", tags=("a", "b"))


def train(update: int, loss: float = 3.0) -> dict[str, Any]:
    return {"kind": "train", "update": update, "loss": loss, "peak_memory_bytes": None}


class Sink:
    """A sink in a run folder, and what it told."""

    def __init__(self, run_dir: Path, *, settings: WandbConfig = OFFLINE, run_id: str = "abc123", **more: Any) -> None:
        run_dir.mkdir(exist_ok=True)
        self.messages: list[str] = []
        self.sink = WandbSink(
            run_dir,
            settings=settings,
            run_id=run_id,
            config={"optim": {"lr": 0.1}},
            message=self.messages.append,
            **({"close_seconds": 60.0} | more),
        )

    def until_told(self, seconds: float = 60.0) -> str:
        """Write records until something is told."""
        end, update = time.monotonic() + seconds, 1000
        while not self.messages and time.monotonic() < end:
            update += 1
            self.sink.write(train(update))
            time.sleep(0.05)
        return self.messages[0]


def pieces(run_dir: Path) -> list[dict[str, Any]]:
    """Every offline piece of a run folder, oldest first: id, config, exit code, and its rows by step."""
    found = []
    for file in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        run = next(record["run"] for record in records if record["type"] == "run")
        ends = [record["exit"].get("exit_code", 0) for record in records if record["type"] == "exit"]
        rows = [record["history"]["item"] for record in records if record["type"] == "history"]
        found.append({"run": run, "exit": ends[0] if ends else None, "rows": {row["_step"]: row for row in rows}})
    return found


@pytest.mark.slow
def test_the_records_of_an_interrupted_run_are_pieces_of_one_run_with_disjoint_steps(tmp_path: Path) -> None:
    for updates in (range(1, 4), range(4, 6), range(6, 9)):
        run = Sink(tmp_path / "run")
        for update in updates:
            run.sink.write(train(update, loss=1 / update))
        run.sink.close(0)
        assert run.messages == []
    found = pieces(tmp_path / "run")
    assert {piece["run"]["run_id"] for piece in found} == {"abc123"}
    assert [list(piece["rows"]) for piece in found] == [[1, 2, 3], [4, 5], [6, 7, 8]]
    assert found[1]["rows"][5]["train/loss"] == 1 / 5 and found[1]["rows"][5]["global_step"] == 5
    run_record = found[0]["run"]
    assert (run_record["project"], run_record["run_group"], run_record["tags"]) == ("tests", "g", ["a", "b"])
    assert run_record["display_name"] == "run" and run_record["config"]["update"]["optim"] == {"lr": 0.1}


@pytest.mark.slow
def test_records_of_one_update_share_its_step_under_the_names_of_their_kinds(tmp_path: Path) -> None:
    run = Sink(tmp_path / "run")
    run.sink.write(train(20, loss=math.nan))
    run.sink.write({"kind": "validation", "scope": "subset", "update": 20, "loss": 3.5})
    run.sink.close(1)
    (piece,) = pieces(tmp_path / "run")
    row = piece["rows"][20]
    assert math.isnan(float(row["train/loss"])) and row["validation/loss"] == 3.5
    assert not {"validation/scope", "train/peak_memory_bytes", "train/update"} & set(row) and piece["exit"] == 1


@pytest.mark.slow
def test_two_runs_in_one_process_are_two_runs(tmp_path: Path) -> None:
    runs = [Sink(tmp_path / name, run_id=name) for name in ("first", "second")]
    for number, run in enumerate(runs):
        run.sink.write(train(1, loss=float(number)))
    for run in runs:
        run.sink.close(0)
    found = [pieces(tmp_path / name)[0] for name in ("first", "second")]
    assert [piece["run"]["run_id"] for piece in found] == ["first", "second"]
    assert [piece["rows"][1]["train/loss"] for piece in found] == [0.0, 1.0]


KILLED = """
import os, signal, sys
from pathlib import Path
from llama_c4.config.schema import WandbConfig
from llama_c4.metrics.wandb_sink import WandbSink
settings = WandbConfig(mode="offline", project="tests", entity=None, group=None, tags=())
sink = WandbSink(Path(sys.argv[1]), settings=settings, run_id="abc123", config={}, message=print)
for update in range(1, 51):
    sink.write({"kind": "train", "update": update, "loss": 3.0})
assert "wandb" not in sys.modules
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_records_of_a_killed_run_are_all_there(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -9
    end = time.monotonic() + 60
    while not (found := list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))) and time.monotonic() < end:
        time.sleep(0.1)
    while found and (found_pieces := pieces(tmp_path))[0]["exit"] is None and time.monotonic() < end:
        time.sleep(0.2)
    assert found_pieces[0]["exit"] == 1 and list(found_pieces[0]["rows"]) == list(range(1, 51))


# --- nothing of it reaches the run ------------------------------------------------------------------------------------


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Put another program in the place of the W&B process."""
    (tmp_path / "process.py").write_text(code)
    monkeypatch.setattr(wandb_process, "__file__", str(tmp_path / "process.py"))


def descendants(name: str) -> list[int]:
    """Processes of that name below this one."""
    found, parents = [], {os.getpid()}
    for _ in range(5):
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                head, _, tail = status.read_text().rpartition(")")
            except OSError:
                continue
            if int(tail.split()[1]) in parents:
                parents.add(int(status.parent.name))
                found += [int(status.parent.name)] if name in head else []
    return sorted(set(found))


@pytest.mark.parametrize("name", ["wandb-core", "python"])
def test_a_killed_process_of_wandb_is_told_once_and_nothing_else_happens(tmp_path: Path, name: str) -> None:
    run, before = Sink(tmp_path / "run"), set(descendants(name))
    run.sink.write(train(1))
    end = time.monotonic() + 60
    while not list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb")) and time.monotonic() < end:
        time.sleep(0.05)
    victims = set(descendants(name)) - before if name == "wandb-core" else {run.sink._feed._process.pid}  # type: ignore[union-attr]
    assert len(victims) == 1
    os.kill(victims.pop(), 9)
    assert "W&B is left out from here on" in run.until_told()
    run.sink.write(train(9999))
    run.sink.close(0)
    assert len(run.messages) == 1 and "llama-c4 report --wandb" in run.messages[0]


def test_without_wandb_a_run_goes_on_and_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('no module named wandb')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = Sink(tmp_path / "run")
    assert "wandb is not installed (pip install 'llama-c4[wandb]')" in run.until_told()


def test_a_network_that_does_not_answer_holds_a_run_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    online = WandbConfig(mode="online", project="tests", entity=None, group=None, tags=())
    run = Sink(tmp_path / "run", settings=online, close_seconds=0.5)
    began = time.monotonic()
    run.sink.write(train(1))
    run.sink.close(0)
    assert time.monotonic() - began < 2.0
    assert len(run.messages) == 1 and "it was not done 0.5 seconds after the run" in run.messages[0]


def test_online_without_a_key_is_told_with_the_reason_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    online = WandbConfig(mode="online", project="tests", entity=None, group=None, tags=())
    run = Sink(tmp_path / "run", settings=online)
    assert "No API key configured" in run.until_told()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(600)", "it was not done 0.3 seconds after the run"),
        ("raise SystemExit(7)", "its process"),
        ("import os, time; os.close(0); time.sleep(600)", "its process is gone|was not done"),
    ],
)
def test_a_process_that_hangs_or_dies_never_makes_a_run_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    script(tmp_path, monkeypatch, code)
    run = Sink(tmp_path / "run", close_seconds=0.3)
    process = run.sink._feed._process  # type: ignore[union-attr]
    began = time.monotonic()
    for update in range(5000):  # far more than a pipe holds
        run.sink.write(train(update))
    run.sink.close(0)
    run.sink.close(0)
    seconds = time.monotonic() - began
    process.kill()
    process.wait()
    assert seconds < 3.0 and len(run.messages) == 1
    assert any(part in run.messages[0] for part in reason.split("|"))


def test_an_interpreter_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    run = Sink(tmp_path / "run")
    run.sink.write(train(1))
    run.sink.close(0)
    assert len(run.messages) == 1 and "its process cannot be started (No such file or directory)" in run.messages[0]


# --- the rebuild ------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run folder with records and nothing of W&B."""
    folder = tmp_path / "demo"
    folder.mkdir()
    journal = JsonlSink(folder / "metrics.jsonl")
    for update in (20, 40, 60):
        journal.write(train(update, loss=math.inf if update == 40 else 3.0))
    journal.close(0)
    (folder / "config.yaml").write_text(to_yaml(compose_config(["experiment=demo", "logging.wandb.project=mine"])))
    (folder / "status.json").write_text('{"state": "finished", "run_id": "abc123"}')
    return folder


@pytest.mark.slow
def test_a_whole_run_is_made_of_the_records_alone(finished: Path) -> None:
    assert rebuild_wandb(finished, mode="offline") == "abc123-rebuilt"
    (piece,) = pieces(finished)
    assert (piece["run"]["run_id"], piece["run"]["project"], piece["exit"]) == ("abc123-rebuilt", "mine", 0)
    assert list(piece["rows"]) == [20, 40, 60] and float(piece["rows"][40]["train/loss"]) == math.inf
    assert piece["run"]["config"]["update"]["model"]["name"] == "llama"


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no records": (lambda run: (run / "metrics.jsonl").unlink(), r"metrics\.jsonl: cannot be read"),
    "a damaged line": (lambda run: (run / "metrics.jsonl").write_text("{}\nx\n"), r"metrics\.jsonl, line 2"),
    "no status": (lambda run: (run / "status.json").unlink(), r"status\.json: has no run_id"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_cannot_be_rebuilt_is_refused_by_name(finished: Path, name: str) -> None:
    DAMAGES[name][0](finished)
    with pytest.raises(CheckpointError, match=DAMAGES[name][1]):
        rebuild_wandb(finished, mode="offline")


def test_a_rebuild_that_fails_is_an_error_and_not_a_message(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(finished, monkeypatch, "import json; print(json.dumps({'failed': 'UsageError: no key'}))")
    with pytest.raises(TrainingError, match="no whole W&B run was made of it: UsageError: no key"):
        rebuild_wandb(finished, mode="online")
