"""Window sums, rates and phases; and that a resumed run writes the records of an uninterrupted one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_c4.checkpoint.format import read_state, write_state
from llama_c4.config.errors import CheckpointError
from llama_c4.metrics.throughput import PeakMemory

from .runs import Listener, MiniLogger, numbered_outcome, outcome, update_at, validation

TIMES = ("targets_per_second", "elapsed_targets_per_second", "training_seconds", "elapsed_seconds")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_every", "ends"), [(5, [5, 10, 15, 20, 23]), (1, list(range(1, 24))), (23, [23]), (99, [23])]
)
def test_a_record_closes_every_window_and_the_run(path: Path, log_every: int, ends: list[int]) -> None:
    run = MiniLogger(path, log_every=log_every)
    run.train_to(23)
    found = rows(path)
    assert [record["update"] for record in found] == ends
    assert [record["window_updates"] for record in found] == [b - a for a, b in zip([0, *ends], ends, strict=False)]


def test_the_loss_of_a_window_is_the_mean_over_its_targets(path: Path) -> None:
    run = MiniLogger(path, log_every=2)
    for index, (loss, num_blocks) in enumerate(((4.0, 4), (1.0, 1))):  # the second update is a shortened one
        update = update_at(index, num_blocks=num_blocks)
        run.progress.finish(update)
        run.logger.log_update(run.progress, update, outcome(loss, 2.0 + index, clipped=index == 0), lr=0.5)
    (record,) = rows(path)
    assert record["loss"] == (4.0 * 64 + 1.0 * 16) / 80
    assert (record["grad_norm"], record["clipped_updates"], record["lr"]) == (3.0, 1, 0.5)
    assert (record["targets"], record["epoch"], record["kind"]) == (5 * 16, 1, "train")


def test_windows_agree_with_float64_sums_over_the_updates(path: Path) -> None:
    run = MiniLogger(path, log_every=7)
    run.train_to(23)
    for record in rows(path):
        indices = range(record["update"] - record["window_updates"], record["update"])
        losses = [numbered_outcome(index).loss.item() for index in indices]
        assert record["loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-14)
        assert record["clipped_updates"] == sum(bool(numbered_outcome(index).clipped) for index in indices)


def test_the_host_fetches_numbers_only_when_a_record_is_due(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)

        def counted(self: Any, *args: Any, _real: Any = real, **more: Any) -> Any:
            fetched.append(run.progress.update)
            return _real(self, *args, **more)

        monkeypatch.setattr(torch.Tensor, name, counted)
    run, ready = MiniLogger(path, log_every=5), outcome(3.0)
    run.train_to(23, outcome_of=lambda index: ready)
    assert fetched == [5, 10, 15, 20, 23]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_written_and_its_window_alone_has_it(path: Path, loss: float) -> None:
    run = MiniLogger(path, log_every=5)
    run.train_to(15, outcome_of=lambda index: outcome(loss if index == 7 else 3.0))
    assert [record["loss"] for record in rows(path)] == [3.0, None, 3.0]
    assert rows(path)[1]["loss_nonfinite"] == str(loss)


def test_everybody_gets_the_same_record(path: Path) -> None:
    sink = Listener()
    run = MiniLogger(path, sinks=[sink])
    run.train_to(5)
    run.logger.log_record(validation(5, 3.0))
    assert sink.records == run.listener.records == rows(path)
    assert ("advance", 5, 320) in run.listener.events


def test_a_record_before_begin_is_a_mistake(path: Path) -> None:
    run = MiniLogger(path, begin=False)
    with pytest.raises(RuntimeError, match="before begin"):
        run.logger.log_record(validation(1, 3.0))
    run.logger.message("a message is none")


# --- time and memory --------------------------------------------------------------------------------------------------


def test_training_seconds_leave_out_startup_evaluation_and_saving(path: Path) -> None:
    run = MiniLogger(path, log_every=5, begin=False)
    with run.logger.phase("startup"):
        run.clock.now += 30
        run.logger.begin()
    run.train_to(4)
    with run.logger.phase("evaluation"):
        run.clock.now += 10
        with run.logger.phase("saving"):
            run.clock.now += 5
        run.clock.now += 1
    run.train_to(10)
    first, second = rows(path)
    assert (first["training_seconds"], first["elapsed_seconds"]) == (5.0, 51.0)
    assert (first["targets_per_second"], first["elapsed_targets_per_second"]) == (320 / 5, 320 / 51)
    assert (second["targets_per_second"], second["elapsed_targets_per_second"]) == (320 / 5, 320 / 5)


def test_an_interrupted_phase_ends(path: Path) -> None:
    run = MiniLogger(path, log_every=5)
    with pytest.raises(KeyboardInterrupt), run.logger.phase("evaluation"):
        run.clock.now += 10
        raise KeyboardInterrupt
    run.train_to(5)
    assert rows(path)[0]["training_seconds"] == 5.0 and run.listener.events[-6] == ("phase", "training")


def test_the_device_is_waited_for_where_a_phase_begins_and_ends_and_nowhere_else(path: Path) -> None:
    waits: list[int] = []
    run = MiniLogger(path, log_every=5, synchronize=lambda: waits.append(run.progress.update))
    run.train_to(7)
    with run.logger.phase("evaluation"), run.logger.phase("saving"):
        pass
    run.train_to(12)
    assert waits == [7, 7]


def test_the_peak_memory_is_that_of_training_alone(path: Path) -> None:
    run = MiniLogger(path, log_every=1, begin=False)
    run.memory[0] = 900
    with run.logger.phase("startup"):
        run.logger.begin()
    for peak_in_training, peak_in_evaluation in ((500, 2000), (400, 0), (600, 0)):
        run.memory[0] = max(run.memory[0], peak_in_training)
        run.train_to(run.progress.update + 1)
        with run.logger.phase("evaluation"):
            run.memory[0] = max(run.memory[0], peak_in_evaluation)
    assert [record["peak_memory_bytes"] for record in rows(path)] == [500, 500, 600]


def test_a_peak_that_cannot_be_told_from_the_rest_is_not_reported() -> None:
    memory = PeakMemory(read=lambda: 2000, reset=lambda: False)  # a system that does not let the mark start again
    memory.resume()
    assert memory.peak_bytes is None
    memory.pause()
    memory.resume()
    assert memory.peak_bytes is None


# --- resume -----------------------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A state as it comes back from a checkpoint."""
    write_state(folder / "state.pt", {"logger": state}, header={}, progress={"update": 0})
    return read_state(folder / "state.pt").parts["logger"]


def drive(run: MiniLogger, start: int, stop: int) -> None:
    """Train with a validation after every tenth update."""
    for number in range(start + 1, stop + 1):
        run.train_to(number)
        if number % 10 == 0:
            with run.logger.phase("evaluation"):
                run.clock.now += 3
            run.logger.log_record(validation(number, 3.0 + 0.1 * math.sin(number)))


@pytest.mark.parametrize("stopped_at", range(24))
@pytest.mark.parametrize("beyond", [0, 4])
def test_a_run_resumed_at_any_update_writes_the_records_of_the_uninterrupted_one(
    tmp_path: Path, stopped_at: int, beyond: int
) -> None:
    whole = MiniLogger(tmp_path / "whole.jsonl")
    drive(whole, 0, 23)
    first = MiniLogger(tmp_path / "pieces.jsonl")
    drive(first, 0, stopped_at)
    state = through_a_file(first.logger.state_dict(), tmp_path)
    drive(first, stopped_at, min(23, stopped_at + beyond))  # killed only after some more records
    second = MiniLogger(tmp_path / "pieces.jsonl", begin=False)
    second.logger.load_state_dict(state)
    second.logger.begin()
    second.progress.update = stopped_at
    drive(second, stopped_at, 23)
    assert timeless(rows(tmp_path / "pieces.jsonl")) == timeless(rows(tmp_path / "whole.jsonl"))
    assert second.logger.best == whole.logger.best


def test_seconds_go_on_over_a_resume_and_its_startup_is_elapsed_only(path: Path, tmp_path: Path) -> None:
    first = MiniLogger(path, log_every=5)
    with first.logger.phase("startup"):
        first.clock.now += 7
    first.train_to(3)
    state = through_a_file(first.logger.state_dict(), tmp_path)
    second = MiniLogger(path, log_every=5, begin=False)
    with second.logger.phase("startup"):
        second.clock.now += 20
        second.logger.load_state_dict(state)
        second.logger.begin()
    second.progress.update = 3
    second.train_to(5)
    (record,) = rows(path)
    assert (record["training_seconds"], record["elapsed_seconds"]) == (5.0, 7 + 3 + 20 + 2)
    assert record["targets_per_second"] == 320 / 5


def test_records_of_an_attempt_that_saved_nothing_are_superseded(path: Path) -> None:
    first = MiniLogger(path)
    drive(first, 0, 12)
    second = MiniLogger(path)
    drive(second, 0, 6)
    assert [record["update"] for record in rows(path)] == [5]


def test_a_state_that_knows_more_records_than_there_are_is_refused(path: Path) -> None:
    first = MiniLogger(path)
    drive(first, 0, 12)
    state = first.logger.state_dict()
    path.unlink()
    second = MiniLogger(path, begin=False)
    second.logger.load_state_dict(state)
    with pytest.raises(CheckpointError, match="holds 0 records, the state to continue from was saved after 3"):
        second.logger.begin()


def test_another_log_every_continues_the_open_window(path: Path) -> None:
    first = MiniLogger(path, log_every=5)
    first.train_to(7)
    second = MiniLogger(path, log_every=4, begin=False)
    second.logger.load_state_dict(first.logger.state_dict())
    second.logger.begin()
    second.progress.update = 7
    second.train_to(12)
    assert [(record["update"], record["window_updates"]) for record in rows(path)] == [(5, 5), (8, 3), (12, 4)]


# --- the best ---------------------------------------------------------------------------------------------------------


def test_a_new_best_subset_validation_is_told_at_once_and_no_other(path: Path) -> None:
    run = MiniLogger(path)
    for update, loss in ((10, 3.2), (20, math.nan), (30, 3.1), (40, 3.3)):
        run.logger.log_record(validation(update, loss))
    run.logger.log_record(validation(40, 1.0, kind="final_validation", scope="full"))
    assert [best and best["loss"] for best in run.best] == [None, 3.2, 3.1]


def test_the_best_told_to_a_resumed_run_is_that_of_the_state_and_not_of_superseded_records(path: Path) -> None:
    first = MiniLogger(path)
    first.logger.log_record(validation(10, 3.2))
    state = first.logger.state_dict()
    first.logger.log_record(validation(20, 2.0))
    second = MiniLogger(path, begin=False)
    second.logger.load_state_dict(state)
    second.logger.begin()
    assert [best and best["loss"] for best in second.best] == [3.2]


class LastWord(Listener):
    """A sink that has something to tell at its end."""

    def __init__(self, display: Listener) -> None:
        super().__init__()
        self.display = display

    def close(self, exit_code: int) -> None:
        self.display.message("not done in time")


def test_what_a_sink_tells_at_its_end_is_still_shown(path: Path) -> None:
    run = MiniLogger(path, begin=False)
    run.logger._sinks.append(LastWord(run.listener))
    run.logger.close(0)
    assert run.listener.events == [("message", "not done in time"), ("close", 0)]


def test_close_reaches_everybody_once(path: Path) -> None:
    run = MiniLogger(path)
    run.logger.close(75)
    run.logger.close(0)
    assert run.listener.events.count(("close", 75)) == 1 and ("close", 0) not in run.listener.events
