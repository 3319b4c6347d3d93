"""Policies, rescue states, and from which state a run continues."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llama_c4.checkpoint import store as store_module
from llama_c4.checkpoint.exports import read_export_weights
from llama_c4.checkpoint.format import DamagedState, read_state, write_state
from llama_c4.checkpoint.policy import export_epochs
from llama_c4.config.errors import CheckpointError, ConfigError
from llama_c4.config.schema import RescueConfig

from .parts import HEADER, MiniRun, files_of, header, training


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "num_epochs", "epochs"),
    [
        ({"checkpoint_policy": "final"}, 40, ()),
        ({"checkpoint_policy": "none"}, 40, ()),
        ({"checkpoint_policy": "interval", "checkpoint_every_epochs": 1}, 4, (1, 2, 3, 4)),
        ({"checkpoint_policy": "interval", "checkpoint_every_epochs": 7}, 40, (7, 14, 21, 28, 35, 40)),
        ({"checkpoint_policy": "interval", "checkpoint_every_epochs": 50}, 40, (40,)),
        ({"checkpoint_policy": "explicit", "checkpoint_epochs": (10, 2, 10, 1)}, 40, (1, 2, 10)),
    ],
)
def test_epochs_to_export(settings: dict[str, Any], num_epochs: int, epochs: tuple[int, ...]) -> None:
    assert export_epochs(training(**settings), num_epochs=num_epochs) == epochs


def test_an_epoch_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.checkpoint_epochs=\[2, 41\] .* beyond 40"):
        export_epochs(training(checkpoint_policy="explicit", checkpoint_epochs=(41, 2)), num_epochs=40)


def exports(*epochs: int) -> set[str]:
    names = ("config.yaml", "model.safetensors", "state.pt")
    return {f"checkpoints/epoch-{epoch:04d}/{name}" for epoch in epochs for name in names}


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"checkpoint_policy": "none"}, set()),
        ({"checkpoint_policy": "final"}, {"final.pt"}),
        ({"checkpoint_policy": "interval", "checkpoint_every_epochs": 3}, {"final.pt", *exports(3, 4)}),
        ({"checkpoint_policy": "explicit", "checkpoint_epochs": (1, 2)}, {"final.pt", *exports(1, 2)}),
    ],
)
def test_a_policy_leaves_exactly_its_files(tmp_path: Path, settings: dict[str, Any], files: set[str]) -> None:
    run = MiniRun(tmp_path / "run", training=training(**settings))
    run.train_to(7)
    run.store.rescue(run.progress)
    run.train_to(20)
    run.store.save_final(run.progress)
    run.store.finish()
    assert files_of(run.dir) == files
    assert not (run.dir / "rescue").exists()


def test_an_export_holds_the_weights_the_configuration_and_the_state_of_its_epoch(tmp_path: Path) -> None:
    policy = training(checkpoint_policy="explicit", checkpoint_epochs=(2,))
    run = MiniRun(tmp_path / "run", training=policy)
    run.train_to(20)
    folder = run.dir / "checkpoints/epoch-0002"
    assert load_file(folder / "model.safetensors")["embedding.weight"].tolist() == [10.0] * 8
    assert (folder / "config.yaml").read_text() == HEADER.config
    assert read_state(folder / "state.pt").progress == {"update": 10, "micro_step": 0, "sequences": 10}
    assert read_export_weights(folder)[1] == HEADER.config
    assert run.store.weights_of(2) == "checkpoints/epoch-0002/model.safetensors" and run.store.weights_of(3) is None


# --- what is committed stays ------------------------------------------------------------------------------------------


def test_committed_files_are_not_written_again(tmp_path: Path) -> None:
    stamps = []
    for _ in range(2):
        run = MiniRun(tmp_path / "run", training=training(checkpoint_policy="interval", checkpoint_every_epochs=2))
        run.train_to(20)
        run.store.save_final(run.progress)
        stamps.append({name: (run.dir / name).stat().st_mtime_ns for name in files_of(run.dir)})
    assert stamps[0] == stamps[1] and set(stamps[0]) == {"final.pt", *exports(2, 4)}


def test_an_interrupted_export_is_written_anew(tmp_path: Path) -> None:
    policy = training(checkpoint_policy="interval", checkpoint_every_epochs=2)
    run = MiniRun(tmp_path / "run", training=policy)
    side = run.dir / "checkpoints/.epoch-0002.partial"
    side.mkdir(parents=True)
    (side / "state.pt").write_bytes(b"half of it")
    run.train_to(20)
    assert files_of(run.dir) == exports(2, 4)


def test_a_damaged_committed_file_is_set_aside_and_not_overwritten(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    run.train_to(20)
    (run.dir / "final.pt").write_bytes(b"PK\x03\x04 damaged")
    run.store.save_final(run.progress)
    assert (run.dir / "final.pt.damaged-1").read_bytes() == b"PK\x03\x04 damaged"
    assert read_state(run.dir / "final.pt").progress["update"] == 20
    assert any("set aside as final.pt.damaged-1" in message for message in run.messages)


@pytest.mark.parametrize("name", ["model.safetensors", "config.yaml", "state.pt"])
@pytest.mark.parametrize("how", ["altered", "missing"])
def test_an_export_with_an_altered_or_missing_file_is_refused(tmp_path: Path, name: str, how: str) -> None:
    run = MiniRun(tmp_path / "run", training=training(checkpoint_policy="interval", checkpoint_every_epochs=1))
    run.train_to(5)
    path = run.dir / "checkpoints/epoch-0001" / name
    data = path.read_bytes()
    path.unlink() if how == "missing" else path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DamagedState, match=name):
        read_export_weights(path.parent)


# --- restoring --------------------------------------------------------------------------------------------------------


def test_a_fresh_folder_has_nothing_to_load(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    assert run.store.load_newest() is False and run.store.loaded is None


def test_every_part_and_the_counters_come_back(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    run.train_to(7)
    run.progress.advance(1)
    run.store.rescue(run.progress)
    resumed = MiniRun(tmp_path / "run", header=header(machine={"runtime.threads": 8}))
    assert resumed.store.load_newest()
    assert (resumed.value, resumed.progress) == (7.0, run.progress)
    assert (resumed.progress.update, resumed.progress.micro_step, resumed.progress.sequences) == (7, 1, 8)
    assert resumed.store.loaded is not None
    assert resumed.store.loaded.machine_changes == ("runtime.threads: 2 → 8",)
    assert "continuing from" in resumed.messages[-1] and "(update 7 and 1 micro-steps)" in resumed.messages[-1]


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002 (the global ones are meant)


class DrawsWhenLoaded:
    """A part whose restoring uses up random numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        draws()


def test_random_numbers_go_on_where_they_were_even_if_restoring_a_part_draws_some(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run", parts={"noisy": DrawsWhenLoaded()})
    draws()
    run.store.rescue(run.progress)
    expected = draws()
    draws()
    assert MiniRun(tmp_path / "run", parts={"noisy": DrawsWhenLoaded()}).store.load_newest()
    assert draws() == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_of_the_gpu_go_on_where_they_were(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    torch.rand(3, device="cuda")
    run.store.rescue(run.progress)
    expected = torch.rand(3, device="cuda")
    assert MiniRun(tmp_path / "run").store.load_newest()
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_a_state_with_other_parts_is_refused(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run", parts={"extra": DrawsWhenLoaded()})
    run.store.rescue(run.progress)
    with pytest.raises(
        CheckpointError, match=r"holds the parts \['engine', 'extra', 'progress', 'rng'\], this run has"
    ):
        MiniRun(tmp_path / "run").store.load_newest()


# --- rolling states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "saved_at"), [(10.0, [600, 1200]), (0.0, [0, 300, 599, 600, 1200]), (None, [])])
def test_a_rolling_state_is_saved_when_its_minutes_have_passed(
    tmp_path: Path, minutes: float | None, saved_at: list[int]
) -> None:
    now = [0.0]
    rescue = RescueConfig(every_minutes=minutes)
    run = MiniRun(tmp_path / "run", training=training(rescue=rescue), clock=lambda: now[0])
    seen = []
    for now[0] in (0, 300, 599, 600, 1200):
        run.progress.advance(1)
        run.store.rescue_if_due(run.progress)
        if any(f"sequence-{run.progress.sequences:012d}" in name for name in files_of(run.dir)):
            seen.append(now[0])
    assert seen == saved_at


def test_the_last_two_rolling_states_are_kept(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    for update in (8, 9, 10, 11):
        run.train_to(update)
        run.store.rescue(run.progress)
    assert files_of(run.dir) == {f"rescue/update-{n:08d}-sequence-{n:012d}.pt" for n in (10, 11)}


def test_a_rolling_state_at_the_same_place_is_replaced_by_the_later_one(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    run.train_to(3)
    run.store.rescue(run.progress)
    run.weights.tensors["step"] = torch.tensor(33)  # a probe has measured since
    run.store.rescue(run.progress)
    resumed = MiniRun(tmp_path / "run")
    assert resumed.store.load_newest() and resumed.weights.tensors["step"] == 33
    assert len(files_of(run.dir)) == 1


def test_the_furthest_state_is_found_by_number_and_not_by_name(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    for epoch, update in ((9999, 9), (10000, 10)):
        folder = run.dir / f"checkpoints/epoch-{epoch:04d}"
        folder.mkdir(parents=True)
        run.train_to(update)
        write_mini_state(run, folder / "state.pt")
    resumed = MiniRun(tmp_path / "run")
    assert resumed.store.load_newest() and resumed.value == 10.0


def write_mini_state(run: MiniRun, path: Path, **changes: Any) -> None:
    parts = {"engine": run.weights.state_dict(), "progress": run.progress.state_dict(), "rng": store_module.rng_state()}
    fields = {"header": HEADER.to_json(), "progress": run.progress.state_dict(), "parts": parts} | changes
    write_state(path, fields.pop("parts"), **fields)


@pytest.mark.parametrize("furthest", ["final", "export", "rescue"])
def test_a_run_continues_from_whatever_is_furthest(tmp_path: Path, furthest: str) -> None:
    run = MiniRun(tmp_path / "run", training=training(checkpoint_policy="explicit", checkpoint_epochs=(2,)))
    run.train_to(8)
    run.store.rescue(run.progress)
    run.train_to(12 if furthest == "rescue" else 20 if furthest == "final" else 10)
    if furthest == "rescue":
        run.store.rescue(run.progress)
    if furthest == "final":
        run.store.save_final(run.progress)
    resumed = MiniRun(tmp_path / "run")
    assert resumed.store.load_newest() and resumed.value == run.value


# --- damaged states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_newest_state_is_told_and_the_older_one_is_used(tmp_path: Path, how: str) -> None:
    run = MiniRun(tmp_path / "run")
    for update in (3, 4):
        run.train_to(update)
        newest = run.store.rescue(run.progress)
    data = bytearray(newest.read_bytes())
    data[1000] ^= 255
    newest.write_bytes({"truncated": data[:1500], "flipped": data, "empty": b""}[how])
    resumed = MiniRun(tmp_path / "run")
    assert resumed.store.load_newest() and resumed.value == 3.0
    assert str(newest) in resumed.messages[0] and "update 3" in resumed.messages[-1]


def test_after_a_damaged_state_new_ones_are_kept_again(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    for update in (3, 4):
        run.train_to(update)
        newest = run.store.rescue(run.progress)
    damage(newest)
    resumed = MiniRun(tmp_path / "run")
    resumed.store.load_newest()
    resumed.train_to(4)
    resumed.store.rescue(resumed.progress)
    again = MiniRun(tmp_path / "run")
    assert again.store.load_newest() and again.value == 4.0 and len(again.messages) == 1


def test_a_run_whose_states_are_all_damaged_does_not_start_over_silently(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    for update in (3, 20):
        run.train_to(update)
        run.store.rescue(run.progress) if update < 20 else run.store.save_final(run.progress)
    for name in files_of(run.dir):
        damage(run.dir / name)
    with pytest.raises(CheckpointError, match="none of its states is intact") as caught:
        MiniRun(tmp_path / "run").store.load_newest()
    assert "final.pt" in str(caught.value) and "rescue/update-00000003" in str(caught.value)


# --- states that belong elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": {"optim.lr": 0.003, "model.vocab_size": 65}}, "optim.lr: 0.001 → 0.003"),
        ({"recipe": {"optim.lr": 0.003, "model.vocab_size": 65}}, "model.vocab_size: 64 → 65"),
        ({"recipe": {"optim.window": 4}}, "optim.window: absent → 4"),
        ({"recipe": {"optim.lr": True}}, "optim.lr: 0.001 → true"),
        ({"recipe": {"training.total_tokens": 2000}}, "training.total_tokens: 1000 → 2000"),
        ({"cache_identity": "cache-b"}, "its token cache is cache-a, that of the run is cache-b"),
        ({"loader": "v1, ranges of 64 MiB"}, "its loader is v2, groups of 2 shards, that of the run is v1"),
        ({"loader": "v2, groups of 3 shards"}, "groups of 2 shards, that of the run is v2, groups of 3 shards"),
        ({"precision": "bfloat16"}, "its precision is float32, that of the run is bfloat16"),
    ],
)
def test_a_state_of_another_run_is_refused_with_both_sides(tmp_path: Path, changes: Any, named: str) -> None:
    run = MiniRun(tmp_path / "run")
    run.train_to(4)
    path = run.store.rescue(run.progress)
    other = MiniRun(tmp_path / "run", header=header(**changes))
    with pytest.raises(CheckpointError) as caught:
        other.store.load_newest()
    assert named in str(caught.value) and str(path) in str(caught.value)
    assert (other.value, other.progress.update) == (0.0, 0)


@pytest.mark.parametrize("changes", [{"machine": {"runtime.threads": 8}}, {"code_version": "0.2.0"}])
def test_a_state_continues_under_other_machine_settings_and_code(tmp_path: Path, changes: Any) -> None:
    run = MiniRun(tmp_path / "run")
    run.store.rescue(run.progress)
    assert MiniRun(tmp_path / "run", header=header(**changes)).store.load_newest()


def test_a_state_on_a_cache_that_was_extended_since_is_continued(tmp_path: Path) -> None:
    run = MiniRun(tmp_path / "run")
    run.store.rescue(run.progress)
    grown = MiniRun(tmp_path / "run", header=header(cache_identity="cache-b"), cache_ancestors={"cache-a"})
    assert grown.store.load_newest()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "packed"}, "kind packed, this run needs kind ordinary"),
        ({"header": {"recipe_identity": "ab"}}, "its header has the fields"),
        ({"progress": {"update": 3, "micro_step": 0, "sequences": -1}}, "its progress is"),
        ({"progress": {"update": 3.0, "micro_step": 0, "sequences": 3}}, "its progress is"),
    ],
)
def test_a_state_of_another_kind_or_form_is_refused(tmp_path: Path, changes: Any, reason: str) -> None:
    run = MiniRun(tmp_path / "run")
    write_mini_state(run, run.dir / "final.pt", **changes)
    with pytest.raises(CheckpointError, match=reason):
        run.store.load_newest()


# --- a larger budget --------------------------------------------------------------------------------------------------


def larger(**changes: Any) -> dict[str, Any]:
    """A run that is to be extended from 1000 to 2000 targets."""
    grown = {"recipe": {"training.total_tokens": 2000}, "total_targets": 2000}
    settings = {"training": training(extend=True), "refuse_extension": lambda header, position: None}
    return settings | {"header": header(**(grown | changes.pop("grown", {})))} | changes


def finish_short(tmp_path: Path) -> MiniRun:
    run = MiniRun(tmp_path / "run")
    run.train_to(20)
    run.store.save_final(run.progress)
    return run


def test_a_finished_run_is_extended_and_its_first_end_is_kept(tmp_path: Path) -> None:
    finish_short(tmp_path)
    run = MiniRun(tmp_path / "run", **larger())
    assert run.store.load_newest() and run.store.loaded is not None and run.store.loaded.is_extended
    run.train_to(40)
    run.store.save_final(run.progress)
    ends = {name: read_state(run.dir / name).progress["update"] for name in files_of(run.dir)}
    assert ends == {"final.pt": 40, "final-update-00000020.pt": 20}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"training": training()}, "training.extend=true continues to a larger budget"),
        ({"refuse_extension": lambda header, position: f"decays at {position}"}, "targets: decays at update 20"),
        ({"grown": {"total_targets": 900}}, "a budget can only grow"),
        ({"grown": {"recipe": {"training.total_tokens": 2000, "optim.lr": 1.0}}}, "another recipe"),
    ],
)
def test_an_extension_is_refused_with_its_reason(tmp_path: Path, changes: Any, reason: str) -> None:
    finish_short(tmp_path)
    run = MiniRun(tmp_path / "run", **larger(**changes))
    with pytest.raises(CheckpointError) as caught:
        run.store.load_newest()
    assert reason in str(caught.value) and run.progress.update == 0


def test_loader_v1_cannot_be_extended(tmp_path: Path) -> None:
    v1 = {"loader": "v1, ranges of 64 MiB"}
    run = MiniRun(tmp_path / "run", header=header(**v1))
    run.store.rescue(run.progress)
    with pytest.raises(CheckpointError, match="loader v1 orders the blocks by the whole budget"):
        MiniRun(tmp_path / "run", **larger(grown={**v1, "recipe": {"training.total_tokens": 2000}})).store.load_newest()
