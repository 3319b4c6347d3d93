"""Identities: what makes two runs the same, and what a run is called."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_c4.config.compose import compose_config, load_config, to_yaml
from llama_c4.config.fields import leaves
from llama_c4.config.identity import (
    machine_differences,
    recipe_differences,
    recipe_identity,
    run_folder,
    run_label,
    settings_of_kind,
)

# A change of every recipe setting that a c4 run with AdamW and cosine has.
RECIPE_CHANGES = {
    "model.vocab_size": "1000", "model.context_length": "512", "model.num_layers": "3", "model.hidden_size": "640",
    "model.num_heads": "4", "model.intermediate_size": "7", "model.rope_theta": "5", "model.norm_eps": "1e-6",
    "model.init_std": "0.1", "optim.lr": "1e-3", "optim.beta1": "0.8", "optim.beta2": "0.8", "optim.eps": "1e-7",
    "optim.weight_decay": "0", "optim.grad_clip": "null", "lr_schedule.warmup_steps": "311",
    "lr_schedule.min_lr_ratio": "0", "data.shard_tokens": "99", "data.eos_token": "x", "data.shuffle_documents": "1",
    "data.shuffle_seed": "1", "data.dataset": "x", "data.dataset_config": "x", "data.revision": "a" * 40,
    "data.tokenizer_revision": "a" * 40, "data.tokenizer": "x", "data.shuffle_group_size": "3",
    "training.tokens_per_parameter": "21", "training.epoch_tokens_per_parameter": "1",
    "training.epoch_boundary": "whole_updates", "training.batch_tokens": "1024", "runtime.seed": "1",
    "runtime.precision": "float32", "runtime.deterministic": "true",
}  # fmt: skip
OTHER_CHANGES = {
    "data.cache_dir": "x", "data.prefetch": "false", "data.prepare_processes": "2", "data.train_tokens": "5",
    "data.validation_tokens": "5", "training.micro_batch_size": "1", "training.rescue.every_minutes": "1",
    "training.stop_after_minutes": "1", "evaluation.subset_blocks": "1", "evaluation.subset_seed": "1",
    "evaluation.batch_size": "1", "evaluation.full_at_end": "false", "runtime.device": "cuda",
    "runtime.compile": "true",
    "runtime.compile_mode": "max-autotune", "runtime.attention": "flash", "runtime.loss": "chunked",
    "runtime.optimizer_kernel": "plain", "runtime.threads": "2", "runtime.allocator": "retain",
    "logging.log_every": "1",
    "logging.progress": "plain", "logging.wandb.mode": "offline", "logging.wandb.project": "x",
    "logging.wandb.entity": "x", "logging.wandb.group": "x", "logging.wandb.tags": "[x]", "run.output_dir": "x",
    "run.name": "x", "run.on_finished": "skip",
}  # fmt: skip
COUPLED = {  # changed together with another key
    "training.total_tokens", "training.epoch_tokens", "lr_schedule.warmup_fraction", "data.buffer_size_mib",
    "training.checkpoint_policy", "training.checkpoint_every_epochs", "training.checkpoint_epochs", "training.extend",
    "data.loader",
}  # fmt: skip
BASE = compose_config([])


@pytest.mark.parametrize("key", RECIPE_CHANGES)
def test_a_recipe_setting_changes_the_identity_and_is_named(key: str) -> None:
    other = compose_config([f"{key}={RECIPE_CHANGES[key]}"])
    differences = recipe_differences(BASE, other)
    assert recipe_identity(other) != recipe_identity(BASE)
    assert [d.split(":")[0] for d in differences] == [key]


@pytest.mark.parametrize("key", OTHER_CHANGES)
def test_a_machine_or_observation_setting_leaves_the_identity(key: str) -> None:
    other = compose_config([f"{key}={OTHER_CHANGES[key]}"])
    assert other != BASE and recipe_identity(other) == recipe_identity(BASE) and recipe_differences(BASE, other) == []


def test_the_changes_above_cover_every_setting_of_the_run() -> None:
    kinds = [settings_of_kind(BASE, kind) for kind in ("recipe", "machine", "observation")]
    names = {key for key in leaves() if key.endswith(".name") and not key.startswith("run.")}
    assert {*kinds[0], *kinds[1], *kinds[2]} - names == {*RECIPE_CHANGES, *OTHER_CHANGES, *COUPLED}


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.checkpoint_policy=none"],
        ["training.checkpoint_policy=interval", "training.checkpoint_every_epochs=2"],
        ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[2]"],
    ],
)
def test_what_is_kept_of_a_run_leaves_the_identity(overrides: list[str]) -> None:
    assert recipe_identity(compose_config(overrides)) == recipe_identity(BASE)


@pytest.mark.parametrize("choice", ["lr_schedule=wsd", "lr_schedule=cosine_5pct", "optim=accum_adamw", "loader=v1"])
def test_another_variant_is_another_recipe(choice: str) -> None:
    assert recipe_identity(compose_config([choice])) != recipe_identity(BASE)


def test_an_equal_value_written_otherwise_is_the_same_recipe() -> None:
    same = compose_config(["optim.lr=56e-4", "training.tokens_per_parameter=20.0", "optim=adamw_b2_098"])
    assert recipe_identity(same) == recipe_identity(BASE)


def test_the_identity_is_the_digest_of_the_recipe_settings_of_the_chosen_variants_alone() -> None:
    recipe = settings_of_kind(BASE, "recipe")
    assert not {"optim.window", "lr_schedule.decay_fraction", "data.successors"} & set(recipe)
    text = json.dumps(dict(sorted(recipe.items())), separators=(",", ":"))
    assert recipe_identity(BASE) == hashlib.sha256(text.encode()).hexdigest()


def test_the_identity_does_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    def backwards(tree: Any) -> Any:
        return {key: backwards(tree[key]) for key in reversed(tree)} if isinstance(tree, dict) else tree

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(backwards(yaml.safe_load(to_yaml(BASE))), sort_keys=False))
    assert path.read_text().startswith("run:") and recipe_identity(load_config(path)) == recipe_identity(BASE)


def test_differences_name_both_values_and_keys_of_one_side_alone() -> None:
    other = compose_config(["optim.lr=0.003", "lr_schedule=wsd", "optim.grad_clip=null"])
    assert recipe_differences(BASE, other) == [
        "lr_schedule.decay_fraction: absent → 0.1",
        "lr_schedule.min_lr_ratio: 0.1 → absent",
        "lr_schedule.name: cosine → wsd",
        "optim.grad_clip: 1.0 → null",
        "optim.lr: 0.0056 → 0.003",
    ]


def test_machine_differences_are_listed_apart() -> None:
    other = compose_config(["runtime.threads=8", "optim.lr=1", "data.cache_dir=elsewhere"])
    assert machine_differences(BASE, other) == [
        "data.cache_dir: outputs/caches/c4 → elsewhere",
        "runtime.threads: null → 8",
    ]


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ([], "20m-adamw-lr0.0056-b2_0.98-wd0.1-s42-"),
        (["model=50m", "optim.lr=1e-05", "runtime.seed=7"], "50m-adamw-lr1e-05-b2_0.99-wd0.1-s7-"),
        (["optim=accum_adamw", "model=90m", "optim.weight_decay=0"], "90m-accum_adamw-w4-lr0.001-b2_0.99-wd0-s42-"),
        (["model.num_layers=9"], "llama-L9-C320-adamw-"),
        (["optim.lr=1e+16"], "20m-adamw-lr1e16-"),
        (["experiment=demo"], "tiny-adamw-lr0.004-"),
    ],
)
def test_a_label_says_size_and_recipe_and_ends_in_the_identity(overrides: list[str], start: str) -> None:
    config = compose_config(overrides)
    label = run_label(config)
    assert label.startswith(start) and label.endswith(f"-{recipe_identity(config)[:8]}")
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,120}", label)


def test_a_run_folder_has_the_name_given_or_the_label() -> None:
    assert run_folder(compose_config(["run.name=1E234", "run.output_dir=o"])) == Path("o/1E234")
    assert run_folder(BASE) == Path("outputs") / run_label(BASE)
