"""The loop: what happens in which order, where it may stop, and that going on is as if it had not stopped."""

from __future__ import annotations

from typing import Any

import pytest

from llama_c4.config.errors import TrainingError
from llama_c4.config.schema import ConstantConfig, CosineConfig, LinearConfig, LrScheduleConfig, WsdConfig
from llama_c4.optim.lr_schedule import build_schedule
from llama_c4.runtime.stop import Stopped
from llama_c4.trainer.engine import Progress
from llama_c4.trainer.loop import train
from tests.tiny_training import TinyModel, accum_adamw, adamw, bitwise_equal, tiny_engine, tiny_plan
from tests.trainer.recorders import EpochProbe, Recorder

WARMUP = {"warmup_steps": 2, "warmup_fraction": None}
SCHEDULES: list[LrScheduleConfig] = [
    CosineConfig(name="cosine", **WARMUP, min_lr_ratio=0.1),
    WsdConfig(name="wsd", **WARMUP, decay_fraction=0.5),
    LinearConfig(name="linear", **WARMUP, decay_fraction=0.8, min_lr_ratio=0.3),
    ConstantConfig(name="constant", **WARMUP),
    ConstantConfig(name="constant", warmup_steps=None, warmup_fraction=0.7),
]
PROBES = (EpochProbe(),)
PLAN = tiny_plan()  # 6 updates of 4, 4, 2 | 4, 4, 2 blocks


def run(
    recorder: Recorder,
    progress: Progress,
    *,
    micro_batch_size: int = 2,
    schedule: Any = SCHEDULES[0],
    plan: Any = PLAN,
    probes: Any = PROBES,
) -> bool:
    return train(
        recorder.engine,
        recorder,
        plan,
        progress,
        micro_batch_size=micro_batch_size,
        peak_lr=0.01,
        schedule=build_schedule(schedule, batch_tokens=16, total_targets=plan.total_targets),
        checkpoints=recorder,
        logger=recorder,
        probes=probes,
        stop=recorder,
    )


def test_an_update_is_its_micro_steps_then_the_record_the_probes_and_the_checkpoint() -> None:
    recorder = Recorder(tiny_engine())
    assert run(recorder, Progress(), plan=tiny_plan(total_tokens=24, epoch_tokens=24))
    assert recorder.events == [
        "blocks 0+2", "rescue?", "blocks 2+2", "rescue?", "update 1", "save? 1",
        "blocks 4+2", "rescue?", "update 2", "begin evaluation", "end evaluation", "record 2", "save? 2", "final 2.0",
    ]  # fmt: skip


def test_the_last_micro_step_of_an_update_takes_what_is_left() -> None:
    recorder = Recorder(tiny_engine())
    run(recorder, Progress(), micro_batch_size=3, plan=tiny_plan(total_tokens=40))
    asked = [event for event in recorder.events if event.startswith("blocks")]
    assert asked == ["blocks 0+3", "blocks 3+1", "blocks 4+3", "blocks 7+1", "blocks 8+2"]


def test_learning_rate_is_taken_at_the_targets_consumed_after_the_update() -> None:
    recorder = Recorder(tiny_engine())
    run(recorder, Progress(), schedule=ConstantConfig(name="constant", warmup_steps=None, warmup_fraction=1.0))
    assert recorder.lrs == pytest.approx([0.01 * blocks / 20 for blocks in (4, 8, 10, 14, 18, 20)], rel=1e-14)


@pytest.mark.parametrize("optim", [adamw(), accum_adamw(window=3), adamw(grad_clip=None)])
@pytest.mark.parametrize("first_block", range(0, 20, 2))
def test_a_run_stopped_after_any_micro_step_continues_bitwise(first_block: int, optim: Any) -> None:
    whole = Recorder(tiny_engine(optim=optim))
    assert run(whole, Progress())

    first = Recorder(tiny_engine(optim=optim), stop_at=lambda event: event == f"blocks {first_block}+2")
    assert not run(first, Progress())
    position, state = first.saved[-1]
    assert position.sequences == first_block + 2 and position.micro_step > 0
    second = Recorder(tiny_engine(model=TinyModel(seed=9), optim=optim))
    second.engine.load_state_dict(state)
    assert run(second, position)

    assert first.lrs + second.lrs == whole.lrs
    assert first.losses + second.losses == whole.losses
    assert bitwise_equal(second.saved[-1][1], whole.saved[-1][1])


def test_a_resume_without_the_accumulated_gradient_is_another_run() -> None:
    whole, first = Recorder(tiny_engine()), Recorder(tiny_engine(), stop_at=lambda event: event == "blocks 4+2")
    run(whole, Progress())
    run(first, Progress())
    position, state = first.saved[-1]
    second = Recorder(tiny_engine())
    second.engine.load_state_dict(state | {"accumulated": None})
    run(second, position)
    assert not bitwise_equal(second.saved[-1][1], whole.saved[-1][1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("after", [1, 3, 5])
def test_learning_rates_of_a_resumed_run_are_those_of_the_uninterrupted(schedule: Any, after: int) -> None:
    whole = Recorder(tiny_engine())
    run(whole, Progress(), schedule=schedule)
    first = Recorder(tiny_engine(), stop_at=lambda event: event == f"save? {after}")
    run(first, Progress(), schedule=schedule)
    position, state = first.saved[-1]
    assert (position.update, position.micro_step) == (after, 0)
    second = Recorder(tiny_engine())
    second.engine.load_state_dict(state)
    run(second, position, schedule=schedule)
    assert first.lrs + second.lrs == whole.lrs and len(first.lrs) == after


def test_a_signal_during_a_probe_that_does_not_look_is_acted_on_after_it() -> None:
    recorder = Recorder(tiny_engine(), stop_at=lambda event: event == "begin evaluation")
    assert not run(recorder, Progress())
    assert recorder.events[-5:] == ["begin evaluation", "end evaluation", "record 3", "save? 3", "rescue 3.0"]


class ImpatientProbe(EpochProbe):
    """Stops measuring when somebody asks to, as validation does between its batches."""

    def measure(self, engine: Any, progress: Progress) -> Any:
        if self.recorder.requested:
            raise Stopped
        return super().measure(engine, progress)

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder


def test_a_probe_that_was_cut_short_measures_anew_before_anything_else_happens() -> None:
    first = Recorder(tiny_engine(), stop_at=lambda event: event == "update 3")
    assert not run(first, Progress(), probes=[EpochProbe(), ImpatientProbe(first)])
    assert first.events[-4:] == ["update 3", "begin evaluation", "end evaluation", "rescue 3.0"]  # no record, no save
    position, state = first.saved[-1]
    assert (position.update, position.observed) == (3, 2)
    second = Recorder(tiny_engine())
    second.engine.load_state_dict(state)
    assert run(second, position, probes=[EpochProbe(), ImpatientProbe(second)])
    assert second.events[:6] == [
        "begin evaluation", "end evaluation", "record 3", "record 3", "save? 3", "blocks 10+2",
    ]  # fmt: skip


def test_a_stop_after_the_last_micro_step_leaves_the_update_to_the_next_process() -> None:
    recorder = Recorder(tiny_engine(), stop_at=lambda event: event == "blocks 2+2")
    assert not run(recorder, Progress())
    assert recorder.events == ["blocks 0+2", "rescue?", "blocks 2+2", "rescue 0.2"]


def test_another_micro_batch_size_may_continue_inside_an_update() -> None:
    whole = Recorder(tiny_engine())
    run(whole, Progress())
    first = Recorder(tiny_engine(), stop_at=lambda event: event == "update 1")
    run(first, Progress())
    position, state = first.saved[-1]
    second = Recorder(tiny_engine())
    second.engine.load_state_dict(state)
    assert run(second, position, micro_batch_size=1)
    final, expected = second.saved[-1][1]["model"], whole.saved[-1][1]["model"]
    assert max(float((final[k] - expected[k]).abs().max()) for k in final) < 1e-12


def test_a_finished_run_only_writes_its_final_state() -> None:
    recorder = Recorder(tiny_engine())
    assert run(recorder, Progress(update=6, sequences=20, observed=6))
    assert recorder.events == ["final 6.0"]


def test_a_run_that_cannot_go_on_saves_nothing() -> None:
    model = TinyModel()
    model.layer.data[0, 0] = float("nan")
    recorder = Recorder(tiny_engine(model=model))
    with pytest.raises(TrainingError, match="update 1 is not finite"):
        run(recorder, Progress())
    assert recorder.saved == [] and "update 1" not in recorder.events
