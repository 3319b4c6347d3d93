from __future__ import annotations

import dataclasses

import pytest

from llama_c4.config.command import overrides_of
from llama_c4.config.compose import compose_config

COMMANDS = [
    [],
    ["model=50m", "optim=adamw_b2_099", "optim.lr=1e-3"],
    ["experiment=demo"],
    ["model=tiny", "model.num_layers=1"],
    ["experiment=demo", "model.vocab_size=512", "optim=accum_adamw", "optim.window=4", "optim.grad_clip=null"],
    ["loader=v1", "lr_schedule=cosine_5pct", "runtime=deterministic"],
    ["data=c4_files", "data.files=/some/where/c4 train*.gz", "training.checkpoint_policy=explicit",
     "training.checkpoint_epochs=[1,7]", "training.checkpoint_every_epochs=null"],
    ["data=markov", "model=tiny", "data.train_tokens=100000", "training.tokens_per_parameter=null",
     "training.total_tokens=8192", "training.epoch_tokens_per_parameter=null", "training.epoch_tokens=8192"],
    ["logging.wandb.group=1E234", "logging.wandb.tags=[a,null_,12e4567]", "logging.wandb.mode=offline"],
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "defaults")
def test_the_overrides_of_a_configuration_compose_to_it_again(command: list[str]) -> None:
    config = compose_config([*command, "run.name=here", "run.output_dir=there"])
    again = compose_config(overrides_of(config))
    assert dataclasses.replace(again, run=config.run) == config


def test_what_a_size_brings_is_not_typed_again() -> None:
    assert overrides_of(compose_config(["model=50m"])) == [
        *("model=50m", "optim=adamw", "lr_schedule=cosine", "data=c4", "loader=v2", "topology=sync"),
    ]


def test_what_differs_from_the_choices_is_typed_in_full_precision() -> None:
    assert "optim.beta2=0.99943234" in overrides_of(compose_config(["optim.beta2=0.99943234"]))


@pytest.mark.parametrize("name", ["it's", 'a "b"', "a,b", "[x]", "a b", "null", "1e5", "$HOME", "a=b", "ü~"])
def test_any_text_can_be_typed(name: str) -> None:
    config = compose_config([])
    wandb = dataclasses.replace(config.logging.wandb, project=name)
    config = dataclasses.replace(config, logging=dataclasses.replace(config.logging, wandb=wandb))
    assert compose_config(overrides_of(config)).logging.wandb.project == name
