"""Claiming a run folder: one process, one recipe, and nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_c4.checkpoint.run_folder import RunFolder, read_status
from llama_c4.config.errors import CheckpointError, TrainingError

CONFIG = "optim:\n  lr: 0.001\n"


def differences_to(config: str) -> Callable[[Path], Sequence[str]]:
    """Compares the text of a config.yaml, a line a setting."""

    def compare(path: Path) -> list[str]:
        pairs = zip(path.read_text().splitlines(), config.splitlines(), strict=True)
        return [f"{old.strip()} → {new.split(': ')[1]}" for old, new in pairs if old != new]

    return compare


def claim(path: Path, *, config: str = CONFIG, on_finished: Any = "refuse", **more: Any) -> RunFolder:
    return RunFolder.claim(
        path, config_yaml=config, differences=differences_to(config), on_finished=on_finished, **more
    )


def finish(path: Path, **result: Any) -> str:
    """Make a finished run; returns its id."""
    with claim(path) as folder:
        folder.write_result({"status": "finished", **result})
        folder.write_status("finished", update=9, targets=90, total_targets=90)
        return folder.run_id


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_a_new_folder_is_made_with_its_parents_and_says_what_it_is(tmp_path: Path) -> None:
    with claim(tmp_path / "outputs" / "demo") as folder:
        assert folder.is_new and not folder.is_finished
        assert names(folder.path) == {".lock", "config.yaml", "status.json"}
        assert (folder.path / "config.yaml").read_text() == CONFIG
        status = read_status(folder.path)
    assert (status["state"], status["pid"], status["run_id"]) == ("starting", os.getpid(), folder.run_id)


def test_the_run_id_is_that_of_the_run_and_not_of_the_process(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "a", "b"):
        with claim(tmp_path / name) as folder:
            ids.append(folder.run_id)
    assert ids[0] == ids[1] != ids[2] and len(ids[0]) == 12


# --- one process ------------------------------------------------------------------------------------------------------


def test_a_second_claim_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    with (
        claim(tmp_path / "demo"),
        pytest.raises(CheckpointError, match=f"demo is in use by process {os.getpid()} on .* since 20"),
    ):
        claim(tmp_path / "demo")
    claim(tmp_path / "demo").release()


HOLD = """
import os, sys, time
from pathlib import Path
from llama_c4.checkpoint.run_folder import RunFolder
folder = RunFolder.claim(Path(sys.argv[1]), config_yaml={config!r}, differences=lambda path: [], on_finished="refuse")
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("child", ["none", "fork"])
def test_a_killed_process_gives_the_folder_back_even_if_a_child_lives_on(tmp_path: Path, child: str) -> None:
    command = [sys.executable, "-c", HOLD.format(config=CONFIG), str(tmp_path / "demo"), child]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert holder.stdout is not None and holder.stdout.readline().strip() == str(holder.pid)
        with pytest.raises(CheckpointError, match=f"in use by process {holder.pid}"):
            claim(tmp_path / "demo")
        holder.kill()
        holder.wait()
        claim(tmp_path / "demo").release()
    finally:
        os.killpg(holder.pid, 9) if child == "fork" else holder.kill()
        holder.wait()


def test_of_two_processes_that_start_together_one_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD.format(config=CONFIG), str(tmp_path / "demo"), "none"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    while all(process.poll() is None for process in both):
        time.sleep(0.02)
    winner, loser = sorted(both, key=lambda process: process.poll() is not None)
    assert loser.returncode == 1 and loser.stderr is not None and winner.stdout is not None
    assert f"is in use by process {winner.pid}" in loser.stderr.read()
    assert winner.stdout.readline().strip() == str(winner.pid)
    winner.kill()
    winner.wait()


def test_a_reader_that_asks_for_a_moment_does_not_make_a_claim_fail(tmp_path: Path) -> None:
    claim(tmp_path / "demo").release()
    reader = subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path / "demo/.lock")], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    reader.stdout.readline()
    claim(tmp_path / "demo").release()
    reader.wait()


ASK = """
import fcntl, sys, time
with open(sys.argv[1]) as lock:
    fcntl.flock(lock, fcntl.LOCK_SH)
    print("asking", flush=True)
    time.sleep(0.2)
"""


# --- what else may lie there ------------------------------------------------------------------------------------------


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("notes")
    with pytest.raises(CheckpointError, match=r"demo is a file; choose another run\.name"):
        claim(tmp_path / "demo")


@pytest.mark.parametrize("content", [{"thesis.tex": "x"}, {"config.yaml": "a: 1"}, {".lock": "other program", "b": ""}])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, content: dict[str, str]) -> None:
    (tmp_path / "demo").mkdir()
    for name, text in content.items():
        (tmp_path / "demo" / name).write_text(text)
    with pytest.raises(CheckpointError, match="is no run folder and not empty"):
        claim(tmp_path / "demo")
    assert {path.name: path.read_text() for path in (tmp_path / "demo").iterdir()} == content


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    with claim(tmp_path / "demo") as folder:
        assert folder.is_new


@pytest.mark.parametrize(
    "left", [[], [".lock"], [".lock", "status.json"], [".lock", "status.json", ".config.yaml.partial"]]
)
def test_a_claim_that_was_killed_on_its_way_is_begun_again(tmp_path: Path, left: list[str]) -> None:
    (tmp_path / "demo").mkdir()
    for name in left:
        (tmp_path / "demo" / name).write_text("")
    with claim(tmp_path / "demo") as folder:
        assert folder.is_new and names(folder.path) == {".lock", "config.yaml", "status.json"}


def test_side_files_that_killed_writers_left_are_removed_and_nothing_else(tmp_path: Path) -> None:
    claim(tmp_path / "demo").release()
    kept = ["final.pt", "rescue/update-1-sequence-1.pt", "checkpoints/epoch-0001/state.pt", "notes.partial", ".hidden"]
    left = [".final.pt.partial", "rescue/.x.pt.partial", "checkpoints/.epoch-0002.partial/state.pt"]
    for name in kept + left:
        (tmp_path / "demo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "demo" / name).write_text("x")
    claim(tmp_path / "demo").release()
    assert all((tmp_path / "demo" / name).exists() for name in kept)
    assert not list((tmp_path / "demo").rglob(".*.partial"))


# --- one recipe -------------------------------------------------------------------------------------------------------


def test_another_recipe_is_refused_with_the_differences_and_the_old_configuration_stays(tmp_path: Path) -> None:
    claim(tmp_path / "demo").release()
    with pytest.raises(CheckpointError, match=r"another recipe.*\n  lr: 0\.001 → 0\.003\nchoose another run\.name$"):
        claim(tmp_path / "demo", config="optim:\n  lr: 0.003\n")
    assert (tmp_path / "demo/config.yaml").read_text() == CONFIG
    claim(tmp_path / "demo").release()


BUDGET, LARGER = "training.total_tokens: 1000\n", "training.total_tokens: 2000\n"


def test_another_budget_needs_extend(tmp_path: Path) -> None:
    claim(tmp_path / "demo", config=BUDGET).release()
    with pytest.raises(CheckpointError, match=r"1000 → 2000\nchoose another run\.name, or set training\.extend=true"):
        claim(tmp_path / "demo", config=LARGER)
    with claim(tmp_path / "demo", config=LARGER, extend=True) as folder:
        assert not folder.is_new and (folder.path / "config.yaml").read_text() == BUDGET


def test_a_finished_run_is_continued_to_a_larger_budget(tmp_path: Path) -> None:
    with claim(tmp_path / "demo", config=BUDGET) as folder:
        folder.write_result({"loss": 3.0})
        folder.write_status("finished", update=9, targets=90, total_targets=90)
    with claim(tmp_path / "demo", config=LARGER, extend=True) as folder:
        assert not folder.is_finished
        record_start(folder, config_yaml=LARGER, is_extended=True, total_targets=2000)
        assert (folder.path / "config.yaml").read_text() == LARGER
        assert not (folder.path / "result.json").exists()
        assert json.loads((folder.path / "result.json.old-1").read_text()) == {"loss": 3.0}


# --- finished runs ----------------------------------------------------------------------------------------------------


def test_a_finished_run_is_refused_by_default(tmp_path: Path) -> None:
    finish(tmp_path / "demo")
    with pytest.raises(CheckpointError, match=r"it is finished; set run\.on_finished=skip .* run\.on_finished=restart"):
        claim(tmp_path / "demo")


def test_skip_gives_the_result_and_touches_nothing(tmp_path: Path) -> None:
    run_id = finish(tmp_path / "demo", loss=3.25)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "demo").iterdir() if path.name != ".lock"}
    with claim(tmp_path / "demo", on_finished="skip") as folder:
        assert folder.is_finished and folder.run_id == run_id and folder.read_result()["loss"] == 3.25
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "demo").iterdir() if path.name != ".lock"}
    assert before == after


def test_restart_keeps_every_old_folder(tmp_path: Path) -> None:
    ids = [finish(tmp_path / "demo", loss=1.0)]
    for _ in range(2):
        with claim(tmp_path / "demo", on_finished="restart") as folder:
            assert folder.is_new and not (folder.path / "result.json").exists()
            folder.write_result({"loss": 2.0})
            folder.write_status("finished", update=9, targets=90, total_targets=90)
            ids.append(folder.run_id)
    places = [tmp_path / name for name in ("demo.old-1", "demo.old-2", "demo")]
    assert [read_status(place)["run_id"] for place in places] == ids and len(set(ids)) == 3
    assert json.loads((tmp_path / "demo.old-1/result.json").read_text())["loss"] == 1.0


@pytest.mark.parametrize("state", ["starting", "training", "evaluating", "interrupted", "failed", "diverged"])
@pytest.mark.parametrize("on_finished", ["refuse", "skip", "restart"])
def test_an_unfinished_run_is_continued_whatever_on_finished_says(tmp_path: Path, state: Any, on_finished: str) -> None:
    with claim(tmp_path / "demo") as folder:
        folder.write_status(state, update=3, targets=30, total_targets=90)
    with claim(tmp_path / "demo", on_finished=on_finished) as again:
        assert (again.run_id, again.is_new, again.is_finished) == (folder.run_id, False, False)
    assert names(tmp_path) == {"demo"}


# --- what is written --------------------------------------------------------------------------------------------------


def record_start(folder: RunFolder, **changes: Any) -> None:
    fields = {"config_yaml": CONFIG, "code_version": "0.1.0", "total_targets": 1000, "resumed_from": None}
    folder.record_start(**(fields | {"update": 0, "sequences": 0} | changes))


def lineage(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "lineage.jsonl").read_text().splitlines()]


def test_the_lineage_gets_a_line_a_start(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        record_start(folder)
        record_start(
            folder,
            resumed_from=folder.path / "rescue" / "x.pt",
            update=7,
            sequences=71,
            machine_changes=("runtime.threads: 2 → 8",),
        )
    first, second = lineage(folder)
    assert (first["resumed_from"], first["update"], first["pid"]) == (None, 0, os.getpid())
    assert (second["resumed_from"], second["sequences"]) == ("rescue/x.pt", 71)
    assert second["machine_changes"] == ["runtime.threads: 2 → 8"] and second["extended"] is False


def test_a_torn_line_of_the_lineage_is_cut(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        record_start(folder)
        with (folder.path / "lineage.jsonl").open("a") as file:
            file.write('{"time": "2026-')
        record_start(folder, update=5)
    assert [line["update"] for line in lineage(folder)] == [0, 5]


def test_status_is_written_at_each_change_and_not_at_each_call(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        for update in range(100):
            folder.write_status("training", update=update, targets=update, total_targets=100)
        assert read_status(folder.path)["update"] == 0
        folder.write_status("evaluating", update=99, targets=99, total_targets=100)
        assert (read_status(folder.path)["state"], read_status(folder.path)["update"]) == ("evaluating", 99)


def test_a_reader_always_finds_a_whole_status(tmp_path: Path) -> None:
    states = ["training", "evaluating"]
    with claim(tmp_path / "demo") as folder:
        reader = subprocess.Popen(
            [sys.executable, "-c", READ, str(folder.path / "status.json")], stdout=subprocess.PIPE, text=True
        )
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            states.reverse()
            folder.write_status(states[0], update=1, targets=1, total_targets=1, message="x" * 5000)  # type: ignore[arg-type]
        output, _ = reader.communicate(timeout=30)
    assert reader.returncode == 0 and int(output) > 10


READ = """
import json, sys, time
reads, end = 0, time.monotonic() + 0.8
while time.monotonic() < end:
    json.load(open(sys.argv[1]))
    reads += 1
print(reads)
"""


def test_json_files_are_strict(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        folder.write_result({"loss": None, "loss_nonfinite": "nan"})
        with pytest.raises(ValueError, match="JSON compliant"):
            folder.write_result({"loss": float("nan")})
        assert folder.read_result() == {"loss": None, "loss_nonfinite": "nan"}
        assert not list(folder.path.glob(".*.partial"))


def test_best_json_goes_when_nothing_is_best(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        folder.write_best({"loss": 3.1, "update": 40})
        assert json.loads((folder.path / "best.json").read_text())["loss"] == 3.1
        folder.write_best(None)
        assert not (folder.path / "best.json").exists()


def test_a_failed_run_tells_its_own_reason_even_if_the_status_cannot_be_written(tmp_path: Path) -> None:
    with claim(tmp_path / "demo") as folder:
        (folder.path / ".status.json.partial").mkdir()  # opening it for writing fails, for root too
        with pytest.raises(TrainingError, match=r"status\.json: cannot be written"):
            folder.write_status("evaluating", update=1, targets=1, total_targets=1)
        folder.write_status("failed", update=1, targets=1, total_targets=1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "finished"}'])
def test_an_edited_status_is_refused_by_name(tmp_path: Path, text: str) -> None:
    claim(tmp_path / "demo").release()
    (tmp_path / "demo/status.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"demo/status\.json"):
        claim(tmp_path / "demo")
    (tmp_path / "demo/status.json").write_text('{"state": "training", "run_id": "0"}')
    claim(tmp_path / "demo").release()
