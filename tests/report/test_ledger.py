from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from llama_c4.checkpoint.lock import FolderLock
from llama_c4.config.errors import CheckpointError
from llama_c4.report.ledger import RunSummary, read_run, scan
from llama_c4.report.lock import is_locked
from tests.report.conftest import TOTAL, UPDATES, always_nan, healthy, inf_at_60, nan_at_5_to_9, write_run


def read(place: Path, **changes: object) -> RunSummary:
    return read_run(write_run(place, "run", **changes))  # type: ignore[arg-type]


def test_a_finished_run_is_read_with_its_settings_progress_and_measurements(tmp_path: Path) -> None:
    run = read(tmp_path, lr=0.008, seed=43)
    assert (run.name, run.state, run.faults) == ("run", "finished", ())
    assert (run.lr, run.seed, run.settings["optim.weight_decay"]) == (0.008, 43, 0.1)
    assert (run.update, run.targets, run.total_targets) == (UPDATES, TOTAL, TOTAL)
    assert run.final_loss == healthy(UPDATES) + 0.06
    assert run.subset_loss == healthy(UPDATES) + 0.05
    assert 89_000 < (run.rate or 0) < 91_000
    assert run.num_parameters == 1_344_000


def test_a_torn_last_line_is_no_fault_and_hides_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", updates=31, state="interrupted")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "update": 32, "loss": 4.')
    run = read_run(folder)
    assert run.faults == ()
    assert [r["update"] for r in run.of_kind("train")] == list(range(1, 32))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"kind": "train", "loss"', "line 3: is not JSON"),
        (b'{"loss": NaN}', "line 3: holds a bare NaN"),
        (b'{"loss": -Infinity}', "line 3: holds a bare -Infinity"),
        (b"{\xff}", "line 3: is not UTF-8 text (byte 1)"),
        (b"[1]", "line 3: is no JSON object but list"),
        (b'{"loss": null, "loss_nonfinite": "big"}', "line 3: could not convert string to float: 'big'"),
        (b'{"kind": "train", "loss": "low"}', "line 3: loss is 'low', not a number"),
        (b"", "line 3: is not JSON"),
    ],
)
def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, reason: str) -> None:
    folder = write_run(tmp_path, "run")
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    (folder / "metrics.jsonl").write_bytes(b"\n".join([*lines[:2], line, *lines[3:]]))
    run = read_run(folder)
    assert len(run.faults) == 1
    assert f"metrics.jsonl, {reason}" in run.faults[0]
    assert [r["update"] for r in run.of_kind("train")] == [1, 2, *range(4, UPDATES + 1)]


def test_many_damaged_lines_of_a_file_are_counted_not_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run")
    (folder / "metrics.jsonl").write_text("x\n" * 1000)
    faults = read_run(folder).faults
    assert len(faults) == 6
    assert "995 more damaged lines" in faults[-1]


@pytest.mark.parametrize("name", ["status.json", "result.json", "environment.json", "config.yaml"])
def test_a_damaged_file_is_named_and_the_run_is_still_listed(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path, "run")
    (folder / name).write_text("{ nothing")
    run = read_run(folder)
    assert [name in fault for fault in run.faults] == [True]
    assert len(run.of_kind("train")) == UPDATES


def test_numbers_that_are_not_finite_come_back_from_strict_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", loss=inf_at_60, updates=60)
    losses = [r["loss"] for r in read_run(folder).of_kind("train")]
    assert losses[-1] == math.inf
    assert all(map(math.isfinite, losses[:-1]))


@pytest.mark.parametrize("loss", [nan_at_5_to_9, always_nan, inf_at_60])
def test_a_run_with_a_loss_that_is_not_finite_is_diverged_whatever_its_status_says(tmp_path: Path, loss) -> None:  # type: ignore[no-untyped-def]
    assert read(tmp_path, loss=loss, state="finished").state == "diverged"


@pytest.mark.parametrize(("losses", "best"), [((math.nan, 3.2, 3.1, math.nan), 3.1), ((math.nan, math.nan), None)])
def test_nan_is_never_the_best_and_hides_no_best(tmp_path: Path, losses: tuple[float, ...], best: float | None) -> None:
    by_update = {30 * (i + 1): loss - 0.05 for i, loss in enumerate(losses)}
    run = read(tmp_path, loss=lambda update: by_update.get(update, 4.0), updates=30 * len(losses), state="diverged")
    assert run.best_subset_loss == (None if best is None else pytest.approx(best))
    assert run.is_diverged


def test_a_training_run_whose_process_is_gone_is_shown_as_interrupted(tmp_path: Path) -> None:
    assert read(tmp_path, updates=50, state="training").state == "interrupted (no process)"


def test_a_training_run_whose_process_lives_is_shown_as_training(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", updates=50, state="training")
    lock = FolderLock(folder)
    assert read_run(folder).state == "training"
    lock.release()
    assert read_run(folder).state == "interrupted (no process)"


def test_a_run_of_another_machine_whose_lock_is_not_seen_is_left_open(tmp_path: Path) -> None:
    run = read(tmp_path, updates=50, state="training", host="elsewhere")
    assert (run.has_process, run.state) == (None, "training?")


def test_asking_for_the_lock_disturbs_nobody_who_wants_it(tmp_path: Path) -> None:
    FolderLock(tmp_path).release()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            is_locked(tmp_path / ".lock")

    readers = [threading.Thread(target=ask) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            FolderLock(tmp_path).release()
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not is_locked(tmp_path / ".lock")


def test_reading_changes_no_file_of_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run")
    before = {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.iterdir()}
    read_run(folder)
    assert {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.iterdir()} == before


def test_a_run_of_another_version_is_read_with_settings_that_this_one_does_not_know(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run")
    (folder / "config.yaml").write_text("optim: {name: muon, momentum: 0.95}\nfuture: {}\n")
    assert read_run(folder).settings == {"optim.name": "muon", "optim.momentum": 0.95, "future": {}}


def test_a_folder_that_only_has_a_configuration_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("runtime: {seed: 1}\n")
    run = read_run(tmp_path)
    assert (run.state, run.records, run.final_loss, run.rate, run.headline) == ("no status", (), None, None, {})


def test_a_folder_without_configuration_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a run folder: it has no config\.yaml"):
        read_run(tmp_path)


def test_every_start_of_a_run_is_in_its_lineage(tmp_path: Path) -> None:
    assert [line["update"] for line in read(tmp_path, starts=(0, 33, 64, 90)).lineage] == [0, 33, 64, 90]


def test_a_scan_finds_runs_at_any_depth_and_nothing_else(outputs: Path) -> None:
    write_run(outputs / "sweep" / "of lr", "deep")
    export = outputs / "lr-0.004" / "checkpoints" / "epoch-0001"
    export.mkdir(parents=True)
    for folder in (export, outputs / "caches" / "sample-4096", outputs / ".hidden"):
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text("{}")
    names = [run.name for run in scan(outputs)]
    assert names == ["all-nan", "inf", "lr-0.004", "lr-0.008", "nan-5-9", "resumed", "deep", "torn", "unfinished"]
    assert "lr-0.004.old-1" in [run.name for run in scan(outputs, include_old=True)]


def test_a_scan_of_a_run_folder_is_that_run(tmp_path: Path) -> None:
    assert [run.name for run in scan(write_run(tmp_path, "one"))] == ["one"]


def test_a_scan_of_no_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        scan(tmp_path / "absent")


def test_the_fixture_writes_strict_json(outputs: Path) -> None:
    def refuse(word: str) -> float:
        raise AssertionError(word)

    lines = (outputs / "all-nan" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=refuse)["kind"] for line in lines)
