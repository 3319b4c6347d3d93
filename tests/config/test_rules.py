"""Rules over several keys: each has a configuration that breaks it, and one at its border that does not."""

from __future__ import annotations

import pytest

from llama_c4.config.compose import compose_config
from llama_c4.config.errors import ConfigError
from llama_c4.config.rules import RULES, check_rules, is_local_tokenizer

FILES = ["data=c4_files", "data.files=corpus"]
DETERMINISTIC = ["runtime.deterministic=true"]
HUB = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"

# rule, overrides that break it alone, the way out that the message must name.
BREAKING: list[tuple[str, list[str], str]] = [
    ("one_budget", ["training.total_tokens=1024000"], "training.tokens_per_parameter=null"),
    ("one_budget", ["training.tokens_per_parameter=null"], "training.total_tokens=NUMBER"),
    ("one_budget", ["training.tokens_per_parameter=2", "training.total_tokens=9"], "to keep training.total_tokens"),
    ("one_epoch_length", ["training.epoch_tokens=1024000"], "training.epoch_tokens_per_parameter=null"),
    ("one_epoch_length", ["training.epoch_tokens_per_parameter=null"], "training.epoch_tokens=NUMBER"),
    ("one_warmup", ["lr_schedule.warmup_fraction=0.1"], "lr_schedule.warmup_steps=null"),
    ("one_warmup", ["lr_schedule.warmup_steps=null"], "lr_schedule.warmup_fraction=NUMBER"),
    ("one_warmup", ["lr_schedule=cosine_5pct", "lr_schedule.warmup_steps=0"], "lr_schedule.warmup_fraction=null"),
    ("even_heads", ["model.num_heads=7"], "model.num_heads to one of 4, 5, 8"),
    ("even_heads", ["model.hidden_size=15", "model.num_heads=5"], "an even model.hidden_size"),
    ("even_heads", ["model.hidden_size=15", "model.num_heads=15"], "an even model.hidden_size"),
    ("whole_sequences", ["training.batch_tokens=500000"], "training.batch_tokens=499712 or 500736"),
    ("whole_sequences", ["training.batch_tokens=10"], "training.batch_tokens=1024"),
    ("checkpoint_policy", ["training.checkpoint_policy=interval"], "training.checkpoint_every_epochs=1"),
    ("checkpoint_policy", ["training.checkpoint_policy=explicit"], "training.checkpoint_epochs=[1,2]"),
    (
        "checkpoint_policy",
        ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[]"],
        "training.checkpoint_epochs=[1,2]",
    ),
    ("checkpoint_policy", ["training.checkpoint_every_epochs=7"], "training.checkpoint_policy=interval"),
    ("checkpoint_policy", ["training.checkpoint_epochs=[1]"], "training.checkpoint_policy=explicit"),
    (
        "checkpoint_policy",
        ["training.checkpoint_policy=none", "training.checkpoint_every_epochs=7"],
        "training.checkpoint_every_epochs=null",
    ),
    (
        "checkpoint_policy",
        [
            "training.checkpoint_policy=interval",
            "training.checkpoint_every_epochs=1",
            "training.checkpoint_epochs=[1]",
        ],
        "training.checkpoint_epochs=null",
    ),
    ("extendable", ["training.extend=true"], "lr_schedule=wsd or constant"),
    (
        "extendable",
        ["training.extend=true", "lr_schedule=wsd", "lr_schedule.warmup_steps=null", "lr_schedule.warmup_fraction=0.1"],
        "lr_schedule.warmup_fraction=null",
    ),
    ("extendable", ["training.extend=true", "lr_schedule=constant", "loader=v1"], "loader=v2"),
    ("folder_name", ["run.name=.."], "set another"),
    ("folder_name", ["run.name=" + "ü" * 101], "at most 200"),
    ("deterministic", [*DETERMINISTIC, "runtime.compile=true"], "runtime.compile=false or auto"),
    ("deterministic", [*DETERMINISTIC, "runtime.attention=math"], "runtime.attention=reference or auto"),
    ("deterministic", [*DETERMINISTIC, "runtime.attention=flash"], "runtime.attention=reference or auto"),
    ("deterministic", [*DETERMINISTIC, "runtime.optimizer_kernel=fused"], "runtime.optimizer_kernel=plain or auto"),
    ("deterministic", [*DETERMINISTIC, "runtime.optimizer_kernel=foreach"], "runtime.optimizer_kernel=plain or auto"),
    ("attention_backend", ["runtime.device=cpu", "runtime.attention=flash"], "runtime.attention=auto, math"),
    ("attention_backend", ["runtime.device=cpu", "runtime.attention=cudnn"], "runtime.attention=auto, math"),
    ("attention_backend", ["runtime.device=cpu", "runtime.attention=efficient"], "runtime.attention=auto, math"),
    ("attention_backend", ["runtime.precision=float32", "runtime.attention=flash"], "runtime.precision=bfloat16"),
    ("attention_backend", ["runtime.precision=float64", "runtime.attention=efficient"], "runtime.precision=bfloat16"),
    ("compile_mode", ["runtime.compile=false", "runtime.compile_mode=max-autotune"], "runtime.compile_mode=default"),
    ("compile_mode", ["runtime.device=cpu", "runtime.compile_mode=max-autotune"], "runtime.compile=true"),
    ("compile_mode", [*DETERMINISTIC, "runtime.compile_mode=max-autotune"], "runtime.compile_mode=default"),
    ("optimizer_kernel", ["optim=accum_adamw", "runtime.optimizer_kernel=fused"], "auto, foreach or plain"),
    ("loader_fields", ["data.loader=v1"], "choose the loader with loader=v1"),
    ("loader_fields", ["data.shuffle_group_size=null"], "data.shuffle_group_size=NUMBER"),
    ("loader_fields", ["data.buffer_size_mib=64"], "data.buffer_size_mib=null"),
    ("loader_fields", ["loader=v1", "data.buffer_size_mib=null"], "data.buffer_size_mib=NUMBER"),
    ("loader_fields", ["loader=v1", "data.shuffle_group_size=2"], "data.shuffle_group_size=null"),
    ("loader_fields", ["loader=v1", "data.prefetch=true"], "data.prefetch=false"),
    ("tokenizer_source", ["data.tokenizer=train"], "set data.tokenizer to a tokenizer.json"),
    ("tokenizer_source", ["data.tokenizer=my/tokenizer.json"], "data.tokenizer_revision=null as well"),
    ("tokenizer_source", ["data=sample", "data.tokenizer_revision=main"], "data.tokenizer_revision=null as well"),
    ("tokenizer_source", ["data.tokenizer_revision=null"], "set the commit"),
    ("tokenizer_source", ["data.tokenizer_revision=main"], "set the commit"),
    ("tokenizer_source", ["data=sample", f"data.tokenizer={HUB}"], "set the commit"),
    ("corpus_files", ["data=c4_files"], "set data.files=FOLDER"),
    ("corpus_files", [*FILES, "data.validation_files=v/*.gz"], "data.validation_files=null"),
    ("markov_successors", ["data=markov", "data.successors=32000"], "at most 31999"),
]


@pytest.mark.parametrize(("rule", "overrides", "way_out"), BREAKING, ids=lambda x: str(x)[:50])
def test_a_broken_rule_names_the_way_out(rule: str, overrides: list[str], way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert way_out in str(caught.value) and len(caught.value.faults) == 1


def test_every_rule_has_a_configuration_that_breaks_it() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, _, _ in BREAKING}


SOUND = [
    ["training.tokens_per_parameter=null", "training.total_tokens=7"],
    ["lr_schedule.warmup_steps=0"],
    ["model.hidden_size=16", "model.num_heads=8"],
    ["model.context_length=7", "training.batch_tokens=21"],
    ["training.checkpoint_policy=interval", "training.checkpoint_every_epochs=50"],
    ["training.checkpoint_policy=explicit", "training.checkpoint_epochs=[3,1,3]"],
    ["training.checkpoint_policy=none", "training.rescue.every_minutes=null"],
    ["training.extend=true", "lr_schedule=constant"],
    ["training.extend=true", "lr_schedule=wsd"],
    ["run.name=" + "ü" * 100],
    ["run.name=..."],
    ["runtime=deterministic"],
    [*DETERMINISTIC, "optim=accum_adamw"],
    [*DETERMINISTIC, "runtime.precision=float64", "runtime=cpu"],
    ["runtime=cpu", "runtime.attention=math", "runtime.compile=true", "runtime.compile_mode=max-autotune"],
    ["runtime.precision=float32", "runtime.attention=efficient"],
    ["optim=accum_adamw", "runtime.optimizer_kernel=foreach"],
    ["loader=v1"],
    ["loader=v1", "data=markov"],
    ["data.tokenizer=my/tokenizer.json", "data.tokenizer_revision=null"],
    ["data=c4_files", "data.files=/c4/c4-train.*.json.gz", "data.validation_files=/c4/v.json.gz"],
    ["data=sample", f"data.tokenizer={HUB}", f"data.tokenizer_revision={'a' * 40}"],
    ["data=markov", "data.successors=31999"],
]


@pytest.mark.parametrize("overrides", SOUND, ids=lambda x: " ".join(x)[:60])
def test_a_configuration_at_the_border_of_a_rule_is_sound(overrides: list[str]) -> None:
    assert check_rules(compose_config(overrides)) == []


def test_automatic_settings_give_way_to_deterministic_ones_without_a_word() -> None:
    runtime = compose_config(DETERMINISTIC).runtime
    assert (runtime.compile, runtime.attention, runtime.optimizer_kernel) == ("auto", "auto", "auto")


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("tokenizer.json", True),
        ("a/b/", True),
        ("/t", True),
        ("../t", True),
        ("~/t", True),
        (HUB, False),
        ("gpt2", False),
    ],
)
def test_a_path_is_told_from_a_name_on_the_hub(name: str, local: bool) -> None:
    assert is_local_tokenizer(name) is local
