"""The schema and the YAML files: every field classified, every variant and every choice covered by the other side."""

from __future__ import annotations

import pytest

from llama_c4.config.compose import compose_config
from llama_c4.config.conf_files import group_choices
from llama_c4.config.fields import fields_of, leaf_of, leaves, variants_of
from llama_c4.config.identity import settings_of_kind
from llama_c4.config.schema import RunConfig

VARIANTS = [
    (group, tag) for group, info in fields_of(RunConfig).items() for tag in variants_of(info) if tag is not None
]
# What a choice cannot do without, beside itself.
COMPANIONS = {
    ("data", "c4_files"): ["data.files=corpus"],
    ("model", "llama"): [
        "model.num_layers=1",
        "model.hidden_size=8",
        "model.num_heads=2",
        "model.intermediate_size=16",
        "optim.lr=0.001",
        "optim.beta1=0.9",
        "optim.beta2=0.99",
        "training.batch_tokens=4096",
        "training.micro_batch_size=4",
    ],
}


@pytest.mark.parametrize("key", leaves())
def test_every_setting_is_recipe_machine_or_observation(key: str) -> None:
    assert {leaf.kind for leaf in leaves()[key]} <= {"recipe", "machine", "observation"}


@pytest.mark.parametrize(("group", "tag"), VARIANTS)
def test_every_variant_has_a_yaml_of_its_name_that_composes(group: str, tag: str) -> None:
    config = compose_config([f"{group}={tag}", *COMPANIONS.get((group, tag), [])])
    assert getattr(config, group).name == tag


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g, choices in group_choices().items() for c in choices])
def test_every_choice_makes_a_valid_configuration(group: str, choice: str) -> None:
    config = compose_config([f"{group}={choice}", *COMPANIONS.get((group, choice), [])])
    assert isinstance(config, RunConfig)


def test_every_group_of_the_schema_can_be_chosen_or_has_its_one_place() -> None:
    not_chosen = set(fields_of(RunConfig)) - set(group_choices())
    not_in_schema = set(group_choices()) - set(fields_of(RunConfig))
    assert (not_chosen, not_in_schema) == ({"run"}, {"loader", "experiment"})


def test_the_three_kinds_share_out_all_settings_of_a_run() -> None:
    config = compose_config(["optim=accum_adamw", "lr_schedule=linear", "data=markov"])
    kinds = [settings_of_kind(config, kind) for kind in ("recipe", "machine", "observation")]
    variant = {"model": "llama", "optim": "accum_adamw", "lr_schedule": "linear", "data": "markov", "topology": "sync"}
    expected = [key for key in leaves() if leaf_of(key, variant.get(key.split(".")[0])) is not None]
    assert sorted(key for kind in kinds for key in kind) == sorted(expected)


def test_no_number_stands_in_the_schema_as_a_default() -> None:
    classes = [RunConfig, *(cls for info in fields_of(RunConfig).values() for cls in variants_of(info).values())]
    assert [(cls, name) for cls in classes for name, info in fields_of(cls).items() if not info.is_required()] == []
