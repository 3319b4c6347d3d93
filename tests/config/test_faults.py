"""Broken configurations: each is refused with its key, the value as typed, the rule and the way out."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_c4.config.compose import compose_config
from llama_c4.config.conf_files import group_choices
from llama_c4.config.errors import ConfigError
from llama_c4.config.fields import leaves
from llama_c4.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]

# overrides → what the message must contain: key and value, then the way out.
BROKEN: list[tuple[list[str], list[str]]] = [
    (["optim.lr"], ["optim.lr: is not KEY=VALUE", "optim.lr=VALUE"]),
    (["50m"], ["50m", "model=50m"]),
    (["model"], ["model: is not KEY=VALUE", "model=20m|50m"]),
    (["=5"], ["=5", "dotted key"]),
    (["optim..lr=1"], ["optim..lr=1", "optim.lr=0.001"]),
    (["model=60m"], ["model=60m", "20m, 50m, 90m, 250m, 500m", "did you mean model=90m?"]),
    (["model=null"], ["model=null", "20m, 50m"]),
    (["optim=adam"], ["optim=adam", "adamw_b2_095", "did you mean optim=adamw?"]),
    (["data=_text"], ["data=_text", "c4, c4_files, markov, sample"]),
    (["experiment=null"], ["experiment=null is not a choice", "it has demo"]),
    (["experiment=dmo"], ["experiment=dmo", "did you mean experiment=demo?"]),
    (["optim.typo=1"], ["optim.typo=1", "there is no setting optim.typo"]),
    (["+optim.beta3=1"], ["optim.beta3=1", "did you mean optim.beta"]),
    (["optimizer.lr=1"], ["optimizer.lr=1", "did you mean optim.lr?"]),
    (["lr=1"], ["lr=1", "did you mean optim.lr?"]),
    (["modle=50m"], ["modle=50m", "did you mean model?"]),
    (["optim.betas=[0.9,0.95]"], ["optim.betas=[0.9,0.95]", "optim.beta1 and optim.beta2"]),
    (["runtime.param_dtype=bfloat16"], ["runtime.param_dtype=bfloat16", "parameters are float32"]),
    (["optim.beta2=1"], ["optim.beta2=1", "of at least 0 and below 1", "leave it out for 0.98"]),
    (["optim.lr=-1e-3"], ["optim.lr=-1e-3", "of at least 0", "0.0056"]),
    (["optim.lr=nan"], ["optim.lr=nan", "finite"]),
    (["optim.lr=1e400"], ["optim.lr=1e400", "finite"]),
    (["optim.lr=inf"], ["optim.lr=inf", "finite"]),
    (["optim.lr=null"], ["optim.lr=null", "leave it out for 0.0056"]),
    (["optim.lr="], ["optim.lr= is not a finite number"]),
    (["optim.lr=fast"], ["optim.lr=fast", "a finite number"]),
    (["optim.lr=[1,2]"], ["optim.lr=[1,2]", "a finite number"]),
    (["optim.lr={a:1}"], ["optim.lr={a:1}", "a finite number"]),
    (["optim.lr=(("], ["optim.lr=((", "cannot be read", "optim.lr=VALUE"]),
    (["optim.lr.x=1"], ["optim.lr.x=1", "optim.lr is a single value"]),
    (["training.rescue=5"], ["training.rescue=5", "training.rescue.every_minutes"]),
    (["optim.eps=0"], ["optim.eps=0", "above 0"]),
    (["optim.grad_clip=0"], ["optim.grad_clip=0", "above 0 or null"]),
    (["optim=accum_adamw", "optim.window=0"], ["optim.window=0", "above 0", "leave it out for 4"]),
    (["optim=accum_adamw", "optim.window=true"], ["optim.window=true", "a whole number"]),
    (["optim=accum_adamw", "optim.window=2.5"], ["optim.window=2.5", "a whole number"]),
    (["training.batch_tokens=131072.0"], ["training.batch_tokens=131072.0", "set training.batch_tokens=131072"]),
    (["training.total_tokens=1e6"], ["training.total_tokens=1e6", "set training.total_tokens=1000000"]),
    (["lr_schedule.warmup_steps=-1"], ["lr_schedule.warmup_steps=-1", "of at least 0"]),
    (["lr_schedule.warmup_steps=true"], ["lr_schedule.warmup_steps=true", "a whole number"]),
    (["lr_schedule.min_lr_ratio=1.5"], ["lr_schedule.min_lr_ratio=1.5", "at most 1"]),
    (["runtime.precision=bf16"], ["runtime.precision=bf16", "set runtime.precision=bfloat16"]),
    (["runtime.attention=flashy"], ["runtime.attention=flashy", "set runtime.attention=flash"]),
    (["runtime.compile=1"], ["runtime.compile=1", "true or false or auto"]),
    (["runtime.deterministic=yes"], ["runtime.deterministic=yes", "true or false"]),
    (["runtime.seed=9223372036854775808"], ["runtime.seed=9223372036854775808", "at most 9223372036854775807"]),
    (["training.checkpoint_policy=all"], ["training.checkpoint_policy=all", "final, interval, explicit, none"]),
    (["training.checkpoint_epochs=[0]"], ["training.checkpoint_epochs=[0]", "above 0"]),
    (["training.checkpoint_epochs=[true]"], ["training.checkpoint_epochs=[true]", "a whole number"]),
    (["training.checkpoint_epochs=[-1]"], ["training.checkpoint_epochs=[-1]", "above 0"]),
    (["training.checkpoint_epochs=3"], ["training.checkpoint_epochs=3", "set training.checkpoint_epochs=[3]"]),
    (["logging.wandb.tags=a"], ["logging.wandb.tags=a", "set logging.wandb.tags=[a]"]),
    (["logging.wandb.mode=true"], ["logging.wandb.mode=true", "off, online, offline"]),
    (["run.name=a/b"], ["run.name=a/b", "no slash"]),
    (["run.name="], ["run.name= is not text that is not empty"]),
    (["data.revision=main"], ["data.revision=main", "40 hexadecimal digits"]),
    (["lr_schedule.decay_fraction=0.2"], ["lr_schedule.decay_fraction=0.2", "lr_schedule=wsd or lr_schedule=linear"]),
    (["lr_schedule=wsd", "lr_schedule.min_lr_ratio=0.1"], ["lr_schedule.min_lr_ratio=0.1", "lr_schedule=cosine"]),
    (["optim.window=3"], ["optim.window=3", "choose the variant with optim=accum_adamw"]),
    (["data=markov", "data.tokenizer=x.json"], ["data.tokenizer=x.json", "data=sample"]),
    (["lr_schedule.name=wsd"], ["lr_schedule.name=wsd", "choose the variant with lr_schedule=wsd"]),
    (["optim.name=sgd"], ["optim.name=sgd", "adamw, accum_adamw"]),
    (["preset.lr=0.1"], ["preset.lr=0.1", "set optim.lr"]),
    (["preset.batch_tokens=1"], ["preset.batch_tokens=1", "set training.batch_tokens"]),
    (["~optim.lr"], ["~optim.lr", "no key can be taken away"]),
    (["~topology"], ["~topology", "no key can be taken away"]),
    (["model@other=20m"], ["model@other=20m", "type model=20m"]),
    (["trainer/kind=x"], ["trainer/kind=x", "the groups are"]),
    (["hydra.run.dir=x"], ["hydra.run.dir=x", "add -m"]),
    (["optim.lr=1e-3,1e-4"], ["optim.lr=1e-3,1e-4", "add -m"]),
    (["model=20m,50m"], ["model=20m,50m", "add -m"]),
    (["optim.lr=choice(1,2)"], ["optim.lr=choice(1,2)", "add -m"]),
    (["optim.lr=range(1,3)"], ["optim.lr=range(1,3)", "add -m"]),
    (["run.name=a,b"], ["run.name=a,b", "-m", "run.name='\"a,b\"'"]),
    (["training.checkpoint_epochs=1,2"], ["training.checkpoint_epochs=1,2", "-m", "training.checkpoint_epochs=[1,2]"]),
    (
        ["data.cache_dir=${oc.env:NO_SUCH_VARIABLE}"],
        ["data.cache_dir=", "NO_SUCH_VARIABLE", "set data.cache_dir=VALUE"],
    ),
    (["model.name=${preset}"], ["model.name=", "no variant of model"]),
    (['optim.name=${"}'], ["optim.name=", "cannot be read"]),
    (["nothing=[2]", "nothing.here=1"], ["nothing.here=1"]),
    (["data.cache_dir=${nothing}"], ["data.cache_dir=", "nothing", "set data.cache_dir=VALUE"]),
    (["model=llama"], ["optim.lr has no value", "choose model=SIZE", "model.num_layers has no value"]),
    (
        ["training.tokens_per_parameters=1", "training.tokens_per_parameter=1"],
        ["training.tokens_per_parameter and training.tokens_per_parameters", "leave one of them out"],
    ),
    (["run.name=\udcff"], ["run.name=", "UTF-8"]),
    (["model.num_layers=" + "9" * 5000], ["model.num_layers=", "cannot be read"]),
    (["optim.lr=" + "[" * 3000], ["optim.lr=", "cannot be read"]),
]


@pytest.mark.parametrize(("overrides", "parts"), BROKEN, ids=lambda x: str(x)[:60] if isinstance(x, list) else None)
def test_a_broken_configuration_is_refused_with_key_value_and_way_out(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("overrides", [b[0] for b in BROKEN if len(b[0]) == 1 and b[0][0] != "model=llama"])
def test_one_fault_makes_one_message(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert len(caught.value.faults) == 1


KEYS = st.sampled_from([*leaves(), *group_choices(), "hydra.verbose", "preset.lr", "optim", "nothing.here"])
VALUES = st.one_of(
    st.text(),
    st.text("0123456789eE+-._"),
    st.text("[]{}(),'\"\\\\$:=a1 "),
    st.sampled_from(
        ["${a}", "${oc.env:X}", "${preset}", "${model}", "${optim.lr}", "???", "nan", "-inf", "null", "true"]
    ),
)


@given(st.lists(st.one_of(st.tuples(KEYS, VALUES).map("=".join), st.text()), max_size=4))
@settings(deadline=None, max_examples=150)
def test_whatever_is_typed_is_a_configuration_or_a_message(overrides: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(compose_config(overrides), RunConfig)


def test_faults_of_every_kind_are_listed_at_once() -> None:
    overrides = [
        "no_equals",
        "model=60m",
        "preset.lr=1",
        "optim.typo=1",
        "optim.beta2=nan",
        "lr_schedule.decay_fraction=0.1",
        "lr_schedule.warmup_fraction=0.1",
        "runtime.precision=bf16",
        "runtime.deterministic=true",
        "runtime.compile=true",
        "logging.log_every=1,2",
    ]
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    text = str(caught.value)
    named = [o for o in overrides if o not in text and o != "runtime.deterministic=true"]
    assert named == [] and text.startswith("10 faults in the configuration:")


def test_a_rule_says_nothing_about_a_value_that_is_faulty_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["training.tokens_per_parameter=null", "training.total_tokens=many"])
    assert [fault.split(" ")[0] for fault in caught.value.faults] == ["training.total_tokens=many"]


def test_a_choice_that_does_not_exist_makes_no_faults_of_its_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["lr_schedule=wds", "lr_schedule.decay_fraction=0.1", "data=smaple", "data.document_bytes=9"])
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        ("training.total_tokens=1000000", "training.tokens_per_parameter=null"),
        ("training.epoch_tokens=1000000", "training.epoch_tokens_per_parameter=null"),
        ("lr_schedule.warmup_fraction=0.1", "lr_schedule.warmup_steps=null"),
    ],
)
def test_one_of_a_pair_alone_is_told_what_to_type_beside_it(typed: str, other: str) -> None:
    with pytest.raises(ConfigError, match=f"type {other} as well"):
        compose_config([typed])
    assert compose_config([typed, other])


def test_faults_of_a_yaml_file_are_listed_like_those_of_the_command_line(tmp_path: Path) -> None:
    copy_of_the_config_part(tmp_path, conf=tmp_path / "conf")
    experiment = "# @package _global_\noptim:\n  typo: 1\nrun:\n  name: 1E234\nextra:\n  a: {b: 2}\n"
    (tmp_path / "conf" / "experiment" / "odd.yaml").write_text(experiment)
    text = compose_in(tmp_path, "experiment=odd")
    assert "optim.typo" in text and "extra.a.b" in text and "run.name=" in text and "stands in quotes" in text


@pytest.mark.parametrize("place", ["conf", "llama_c4/conf"])
def test_the_yaml_files_are_found_beside_the_package_and_inside_an_installed_one(place: str, tmp_path: Path) -> None:
    copy_of_the_config_part(tmp_path, conf=tmp_path / place)
    assert compose_in(tmp_path, "model=50m") == "composed"


def copy_of_the_config_part(folder: Path, *, conf: Path) -> None:
    package = ROOT / "llama_c4"
    shutil.copytree(package / "config", folder / "llama_c4" / "config")
    shutil.copy(package / "__init__.py", folder / "llama_c4" / "__init__.py")
    shutil.copytree(ROOT / "conf", conf)


def compose_in(folder: Path, override: str) -> str:
    code = (
        "from llama_c4.config.compose import compose_config\nfrom llama_c4.config.errors import ConfigError\n"
        f"try:\n    compose_config([{override!r}]); print('composed')\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
