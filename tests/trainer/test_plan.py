"""The plan: every worked value, and properties of all plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_c4.config.errors import CheckpointError, ConfigError
from llama_c4.trainer.plan import Progress, TrainingPlan, build_plan
from tests.tiny_training import tiny_plan, training

P_20M = 20_403_520
RECIPE = {"tokens_per_parameter": 20.0, "epoch_tokens_per_parameter": 0.5, "batch_tokens": 131_072}


def updates(plan: TrainingPlan) -> list[tuple[int, int, int, bool]]:
    return [(u.first_block, u.num_blocks, u.epoch, u.ends_epoch) for u in plan.remaining(Progress())]


def per_epoch(plan: TrainingPlan) -> list[int]:
    ends = [u.number for u in plan.remaining(Progress()) if u.ends_epoch]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def test_20m_recipe_has_the_published_blocks_epochs_and_updates() -> None:
    plan = build_plan(training(**RECIPE), num_parameters=P_20M, context_length=1024)
    assert (plan.total_blocks, plan.total_targets) == (398_507, 408_071_168)
    assert plan.boundaries[0] == 9_963
    assert (plan.num_epochs, plan.num_updates) == (40, 3_120)
    assert plan.boundaries[0] * 1024 == 10_202_112


def test_20m_last_update_of_an_epoch_is_shortened_to_what_is_left() -> None:
    plan = build_plan(training(**RECIPE), num_parameters=P_20M, context_length=1024)
    last = plan.update(77)
    assert (last.first_block, last.num_blocks, last.epoch, last.ends_epoch) == (77 * 128, 9_963 - 77 * 128, 1, True)
    assert last.end_targets == 10_202_112
    assert plan.update(78).first_block == 9_963 and plan.update(78).epoch == 2


def test_packed_20m_budget_has_40_epochs_and_3119_updates() -> None:
    config = training(total_tokens=408_068_096, epoch_tokens=10_207_232, batch_tokens=131_072)
    plan = build_plan(config, num_parameters=P_20M, context_length=1024, num_workers=4)
    assert (plan.num_epochs, plan.num_updates, plan.total_targets) == (40, 3_119, 408_068_096)
    assert plan.boundaries[-1] - plan.boundaries[-2] < plan.boundaries[0] == 9_968


def test_small_budget_has_boundaries_at_6_12_and_17_blocks() -> None:
    plan = build_plan(training(total_tokens=67, epoch_tokens=23, batch_tokens=16), num_parameters=1, context_length=4)
    assert plan.boundaries == (6, 12, 17)
    assert updates(plan) == [
        (0, 4, 1, False), (4, 2, 1, True), (6, 4, 2, False), (10, 2, 2, True), (12, 4, 3, False), (16, 1, 3, True),
    ]  # fmt: skip


def test_20m_whole_updates_has_the_published_epochs() -> None:
    plan = build_plan(training(**RECIPE, epoch_boundary="whole_updates"), num_parameters=P_20M, context_length=1024)
    assert per_epoch(plan)[:6] == [78, 78, 77, 78, 78, 78]
    assert (plan.num_updates, plan.total_targets, plan.num_epochs) == (3_113, 408_027_136, 40)
    assert all(plan.update(i).num_blocks == 128 for i in (0, 77, 232, 3_112))


def test_ratios_are_read_as_decimals_so_03_over_01_is_exactly_3_epochs() -> None:
    config = training(
        tokens_per_parameter=0.3, epoch_tokens_per_parameter=0.1, batch_tokens=4, epoch_boundary="whole_updates"
    )
    plan = build_plan(config, num_parameters=100, context_length=4)  # 2.5 updates an epoch, rounded half up
    assert plan.boundaries == (3, 5, 8)


@pytest.mark.parametrize("workers", [1, 2, 4, 128])
def test_a_doubled_budget_keeps_every_earlier_boundary_of_whole_updates(workers: int) -> None:
    short, long = (
        build_plan(
            training(**RECIPE | {"tokens_per_parameter": ratio}, epoch_boundary="whole_updates"),
            num_parameters=P_20M, context_length=1024, num_workers=workers,
        )
        for ratio in (20.0, 40.0)
    )  # fmt: skip
    assert long.boundaries[:40] == short.boundaries
    assert all(b % workers == 0 for b in long.boundaries)
    ideal = [k * 0.5 * P_20M for k in range(1, 41)]
    assert max(abs(b * 1024 - i) for b, i in zip(short.boundaries, ideal, strict=True)) <= 131_072 / 2


def test_an_epoch_without_an_update_is_refused() -> None:
    config = training(total_tokens=24, epoch_tokens=4, batch_tokens=16, epoch_boundary="whole_updates")
    with pytest.raises(ConfigError, match="virtual epoch 1 of 4 targets has no update"):
        build_plan(config, num_parameters=1, context_length=4)
    with pytest.raises(ConfigError, match="shorter than one sequence of 4"):
        build_plan(training(total_tokens=24, epoch_tokens=3), num_parameters=1, context_length=4)


def test_whole_updates_refuse_a_broken_number_of_epochs() -> None:
    config = training(total_tokens=100, epoch_tokens=64, batch_tokens=16, epoch_boundary="whole_updates")
    with pytest.raises(ConfigError, match=r"100 targets are 1\.5625 epochs of 64"):
        build_plan(config, num_parameters=1, context_length=4)


def test_batch_that_is_no_whole_number_of_sequences_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"batch_tokens=18 .* set training.batch_tokens=16"):
        build_plan(training(total_tokens=64, epoch_tokens=64, batch_tokens=18), num_parameters=1, context_length=4)


def test_boundary_that_does_not_divide_among_workers_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="virtual epoch 1 ends after 5 sequences, which 2 workers"):
        build_plan(training(total_tokens=40, epoch_tokens=20), num_parameters=1, context_length=4, num_workers=2)
    with pytest.raises(ConfigError, match=r"4 sequences, which 3 workers .* set training.batch_tokens=24"):
        build_plan(training(total_tokens=48, epoch_tokens=48), num_parameters=1, context_length=4, num_workers=3)


@given(total=st.integers(1, 400), epoch=st.integers(4, 400), batch=st.integers(1, 9))
def test_updates_tile_the_stream_without_gap_and_every_epoch_ends_once(total: int, epoch: int, batch: int) -> None:
    config = training(total_tokens=total, epoch_tokens=epoch, batch_tokens=4 * batch)
    plan = build_plan(config, num_parameters=1, context_length=4)
    all_updates = list(plan.remaining(Progress()))
    assert [u.index for u in all_updates] == list(range(plan.num_updates))
    assert [u.first_block for u in all_updates] == [0, *(u.end_block for u in all_updates[:-1])]
    assert all_updates[-1].end_block == plan.total_blocks == -(-total // 4)
    assert [u.end_block for u in all_updates if u.ends_epoch] == list(plan.boundaries)
    assert all(1 <= u.num_blocks <= batch for u in all_updates)


def test_remaining_starts_with_the_update_in_progress() -> None:
    plan = tiny_plan()
    inside = Progress(update=1, micro_step=1, sequences=6)
    assert [u.index for u in plan.remaining(inside)] == list(range(1, plan.num_updates))
    assert list(plan.remaining(Progress(update=plan.num_updates, sequences=plan.total_blocks))) == []


@pytest.mark.parametrize("odd", [(1, 0, 5), (1, 1, 9), (0, 0, 1), (6, 0, 19), (9, 0, 20)])
def test_progress_of_another_plan_is_refused(odd: tuple[int, int, int]) -> None:
    with pytest.raises(CheckpointError, match="no position of this run of 6 updates and 20 sequences"):
        tiny_plan().remaining(Progress(*odd))


def test_progress_survives_its_state_and_refuses_a_damaged_one() -> None:
    progress = Progress(update=3, micro_step=1, sequences=12)
    other = Progress()
    other.load_state_dict(progress.state_dict())
    assert other == progress
    for damage in ({"update": 1.5}, {"update": -1}, {"update": True}, {"more": 1}):
        with pytest.raises(CheckpointError, match="progress"):
            other.load_state_dict(progress.state_dict() | damage)
    assert other == progress


def test_update_outside_of_the_run_is_an_error() -> None:
    with pytest.raises(IndexError, match="update 6 is outside"):
        tiny_plan().update(6)
