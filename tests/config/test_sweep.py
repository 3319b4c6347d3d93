"""Sweeps: all jobs are checked before the first, each is the run it would be alone, and one failure stays its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_c4.cli import run_sweep
from llama_c4.config.compose import compose_config
from llama_c4.config.errors import ConfigError, DataError, TrainingError
from llama_c4.config.identity import run_label
from llama_c4.config.schema import RunConfig
from llama_c4.config.sweep import plan_sweep


class Recorder:
    """Stands where training would: keeps the configurations, and answers by learning rate."""

    def __init__(self, answers: dict[float, int | Exception] | None = None) -> None:
        self.answers, self.seen = answers or {}, []

    def __call__(self, config: RunConfig) -> int:
        self.seen.append(config)
        answer = self.answers.get(config.optim.lr, 0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def lrs(self) -> list[float]:
        return [config.optim.lr for config in self.seen]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_job_has_the_configuration_of_the_same_command_alone() -> None:
    train = Recorder()
    assert run_sweep(["model=50m", "optim.lr=1e-3,2e-3", "run.on_finished=skip"], train=train) == 0
    assert train.seen == [
        compose_config(["model=50m", f"optim.lr={lr}", "run.on_finished=skip"]) for lr in (1e-3, 2e-3)
    ]


def test_a_sweep_leaves_no_files_and_the_working_directory(tmp_path: Path) -> None:
    run_sweep(["optim.lr=1,2"], train=Recorder())
    assert list(tmp_path.iterdir()) == [] and Path.cwd() == tmp_path


def test_number_like_names_stay_text_in_every_job() -> None:
    train = Recorder()
    run_sweep(["run.name=1E234,007", "logging.wandb.tags=[123e456,12e4567]"], train=train)
    assert [c.run.name for c in train.seen] == ["1E234", "007"]
    assert {c.logging.wandb.tags for c in train.seen} == {("123e456", "12e4567")}


def test_lists_sweep_as_wholes() -> None:
    train = Recorder()
    assert (
        run_sweep(["training.checkpoint_epochs=[1, 2],[1,3]", "training.checkpoint_policy=explicit"], train=train) == 0
    )
    assert [c.training.checkpoint_epochs for c in train.seen] == [(1, 2), (1, 3)]


def test_a_finished_run_is_skipped_in_a_sweep_unless_told_otherwise() -> None:
    assert {job.config.run.on_finished for job in plan_sweep(["optim.lr=1,2"])} == {"skip"}
    assert {job.config.run.on_finished for job in plan_sweep(["optim.lr=1,2", "run.on_finished=restart"])} == {
        "restart"
    }


def test_a_failed_job_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    failures = {1.0: 1, 2.0: TrainingError("loss is nan"), 3.0: DataError("no cache"), 4.0: RuntimeError("a bug")}
    train = Recorder(failures)
    assert run_sweep(["optim.lr=1,2,3,4,5"], train=train) == 1
    told = capsys.readouterr().err.split("4 of 5 jobs failed:")[1]
    assert train.lrs == [1, 2, 3, 4, 5]
    for number, reason in enumerate(["exit code 1", "loss is nan", "no cache", "RuntimeError: a bug"]):
        assert f"job {number} (optim.lr={number + 1}): {reason}" in told


@pytest.mark.parametrize("code", [75, 130])
def test_a_signal_that_stops_a_job_stops_the_sweep_with_its_code(code: int) -> None:
    train = Recorder({2.0: code})
    with pytest.raises(SystemExit) as stop:
        run_sweep(["optim.lr=2,3"], train=train)
    assert stop.value.code == code and train.lrs == [2]


def test_a_faulty_job_refuses_the_whole_sweep_before_the_first_runs() -> None:
    train = Recorder()
    with pytest.raises(ConfigError) as caught:
        run_sweep(["optim.lr=1,-1,nan", "runtime.treads=2"], train=train)
    text = str(caught.value)
    assert train.seen == [] and "job 1 (optim.lr=-1): optim.lr=-1 is not" in text and "job 2 (optim.lr=nan)" in text
    assert text.count("runtime.treads=2") == 1 and "every job: runtime.treads=2" in text


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["optim.lr=1,2", "run.name=same"], "run.name='same-${optim.lr}'"),
        (["optim.lr=1,2", "run.name=a,b"], "run.name='a-${optim.lr}'"),
        (["optim.lr=1,1.0", "run.name=same"], "they are the same run"),
    ],
)
def test_jobs_that_would_share_a_folder_are_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match="would share the run folder") as caught:
        plan_sweep(overrides)
    assert reason in str(caught.value)


def test_a_name_may_vary_with_the_rest() -> None:
    jobs = plan_sweep(["optim.lr=1e-3,2e-3", "run.name=same-${optim.lr}"])
    assert [job.config.run.name for job in jobs] == ["same-0.001", "same-0.002"]


def test_jobs_of_one_recipe_are_named_apart_by_what_varies() -> None:
    jobs = plan_sweep(["runtime.threads=1,2"])
    label = run_label(compose_config([]))
    assert [job.config.run.name for job in jobs] == [f"{label}-runtime.threads_1", f"{label}-runtime.threads_2"]


def test_relative_paths_may_not_change_their_meaning_in_a_sweep() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.job\.chdir=true"):
        plan_sweep(["optim.lr=1,2", "hydra.job.chdir=true"])


def test_a_sweep_of_nothing_is_one_job() -> None:
    train = Recorder()
    assert run_sweep([], train=train) == 0 and len(train.seen) == 1
