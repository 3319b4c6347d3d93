"""A run that is stopped, at any moment and any number of times, ends as the run that never was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llama_c4.cli import main
from llama_c4.config.compose import compose_config
from llama_c4.config.errors import CheckpointError
from llama_c4.prepare import run_preparation
from llama_c4.run import run_training
from tests.end_to_end.runs import StopAt, assert_same, final_parts, records


def run(overrides: list[str], *, stop_at: int | None = None) -> tuple[int, int]:
    """Exit code, and how often the run asked whether to stop."""
    stop = StopAt(stop_at)
    return run_training(compose_config([*overrides, "logging.progress=off"]), stop=stop), stop.asked


@pytest.fixture
def uninterrupted(micro: list[str], tmp_path: Path) -> Path:
    assert run([*micro, "run.name=whole"])[0] == 0
    return tmp_path / "runs" / "whole"


def assert_equal_runs(a: Path, b: Path) -> None:
    assert records(a) == records(b)
    assert_same(final_parts(a), final_parts(b))


@pytest.mark.slow
def test_stopped_at_every_moment_and_resumed_equals_uninterrupted(
    micro: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    moments = run([*micro, "run.name=count"])[1]
    assert moments > 60  # 20 updates of up to 3 micro-steps, 4 evaluations, and the end
    for k in range(moments):
        name = f"stopped-{k}"
        assert run([*micro, f"run.name={name}"], stop_at=k)[0] == 75
        assert run([*micro, f"run.name={name}"])[0] == 0
        assert_equal_runs(uninterrupted, tmp_path / "runs" / name)


def test_stopped_again_and_again_equals_uninterrupted(micro: list[str], uninterrupted: Path, tmp_path: Path) -> None:
    starts = 0
    while run(micro, stop_at=12)[0] == 75:  # more than the final evaluation asks, so that it gets done
        starts += 1
    assert starts >= 5
    assert_equal_runs(uninterrupted, tmp_path / "runs" / "micro")


def test_a_resume_may_change_the_micro_batch_and_prefetch_and_keeps_the_numbers(
    micro: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    assert run(micro, stop_at=10)[0] == 75
    assert run([*micro, "training.micro_batch_size=2", "data.prefetch=false"])[0] == 0
    ours, theirs = records(tmp_path / "runs" / "micro"), records(uninterrupted)
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-6)


VARIANTS = {
    "deterministic": ["runtime.deterministic=true"],
    "no clipping": ["optim.grad_clip=null"],
    "moments that move once in a window": ["optim=accum_adamw"],
    "loader v1": ["loader=v1"],
    "several shuffle groups inside an epoch": ["data.shuffle_group_size=1", "data.shard_tokens=128"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_stopped_again_and_again_equals_uninterrupted(
    variant: str, micro: list[str], micro_cache: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache" if "shuffle groups" in variant else micro_cache
    overrides = [*micro, *VARIANTS[variant], f"data.cache_dir={cache}"]
    if cache != micro_cache:
        assert run_preparation(compose_config(overrides), verify=False) == 0
    assert run([*overrides, "run.name=whole"])[0] == 0
    starts = 1
    while run(overrides, stop_at=12)[0] == 75:
        starts += 1
    assert starts >= 5
    assert_equal_runs(tmp_path / "runs" / "whole", tmp_path / "runs" / "micro")


@pytest.mark.parametrize("changes", [[], ["runtime.threads=1", "data.prefetch=false"]])
def test_the_command_with_resume_goes_on_and_equals_uninterrupted(
    changes: list[str], micro: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "micro"
    assert run(micro, stop_at=30)[0] == 75
    assert main(["train", "--resume", str(folder), *changes]) == 0
    assert_equal_runs(uninterrupted, folder)
    starts = [json.loads(line) for line in (folder / "lineage.jsonl").read_text().splitlines()]
    assert [bool(start["resumed_from"]) for start in starts] == [False, True]
    assert starts[1]["machine_changes"] == (["data.prefetch: true → false"] if changes else [])


@pytest.mark.parametrize("policy", ["interval", "final"])
def test_the_export_of_an_epoch_alone_is_enough_to_go_on(
    policy: str, micro: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    exporting = ["training.checkpoint_policy=interval", "training.checkpoint_every_epochs=1"]
    folder = tmp_path / "runs" / "micro"
    assert run([*micro, *exporting], stop_at=30)[0] == 75  # in the second of four epochs
    shutil.rmtree(folder / "rescue")
    assert [str(p.relative_to(folder)) for p in folder.rglob("*.pt")] == ["checkpoints/epoch-0001/state.pt"]
    assert run([*micro, *(exporting if policy == "interval" else [])])[0] == 0
    assert_equal_runs(uninterrupted, folder)
    assert "checkpoints/epoch-0001/state.pt" in (folder / "lineage.jsonl").read_text()


@pytest.mark.parametrize("policy", ["none", "final", "interval", "explicit"])
def test_every_policy_leaves_exactly_its_files_and_the_same_loss(
    policy: str, micro: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    more = {"interval": ["training.checkpoint_every_epochs=2"], "explicit": ["training.checkpoint_epochs=[3,1,3]"]}
    assert run([*micro, f"training.checkpoint_policy={policy}", *more.get(policy, [])])[0] == 0
    folder = tmp_path / "runs" / "micro"
    epochs = sorted(p.name for p in folder.glob("checkpoints/*"))
    expected = {"interval": ["epoch-0002", "epoch-0004"], "explicit": ["epoch-0001", "epoch-0003"]}
    assert epochs == expected.get(policy, [])
    assert (folder / "final.pt").exists() == (policy != "none")
    assert not (folder / "rescue").exists()
    assert records(folder) == records(uninterrupted)


def test_a_finished_run_is_refused_skipped_or_set_aside_as_asked(micro: list[str], tmp_path: Path) -> None:
    assert run(micro)[0] == 0
    with pytest.raises(CheckpointError, match="on_finished=skip"):
        run(micro)
    assert run([*micro, "run.on_finished=skip"])[0] == 0
    assert run([*micro, "run.on_finished=restart"])[0] == 0
    assert (tmp_path / "runs" / "micro.old-1" / "result.json").exists()


def test_a_constant_schedule_extends_to_the_run_that_was_longer_from_the_start(
    micro: list[str], tmp_path: Path
) -> None:
    flat = [*micro, "lr_schedule=constant", "lr_schedule.warmup_steps=2"]
    long = [*flat, "training.total_tokens=4480"]
    assert run([*long, "run.name=long"])[0] == 0
    assert run(flat)[0] == 0
    assert run([*long, "training.extend=true"])[0] == 0
    assert_same(final_parts(tmp_path / "runs" / "micro")["engine"], final_parts(tmp_path / "runs" / "long")["engine"])


WSD = ["lr_schedule=wsd", "lr_schedule.warmup_steps=2"]  # 2,016 of 2,240 targets at the peak, then the decay


def test_wsd_stopped_before_its_decay_extends_to_the_run_that_was_longer_from_the_start(
    micro: list[str], tmp_path: Path
) -> None:
    long = [*micro, *WSD, "training.total_tokens=4480"]
    assert run([*long, "run.name=long"])[0] == 0
    assert run([*micro, *WSD], stop_at=60)[0] == 75  # 1,680 targets or a little more
    assert run([*long, "training.extend=true"])[0] == 0
    assert_equal_runs(tmp_path / "runs" / "micro", tmp_path / "runs" / "long")


def test_wsd_in_its_decay_cannot_be_extended_and_goes_on_as_planned(micro: list[str], tmp_path: Path) -> None:
    short = [*micro, *WSD]
    assert run([*short, "run.name=whole"])[0] == 0
    assert run(short, stop_at=74)[0] == 75  # 2,064 targets or more
    with pytest.raises(CheckpointError, match="its decay began after 2016 targets"):
        run([*short, "training.total_tokens=4480", "training.extend=true"])
    assert run(short)[0] == 0
    assert_equal_runs(tmp_path / "runs" / "micro", tmp_path / "runs" / "whole")


def test_another_recipe_is_refused_with_the_differing_keys(micro: list[str]) -> None:
    assert run(micro, stop_at=4)[0] == 75
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0\.004 → 0\.001"):
        run([*micro, "optim.lr=0.001"])
