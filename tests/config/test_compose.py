"""Composition: presets, the precedence of the command line, and values that stay what was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_c4.config.compose import compose_config, load_config, to_yaml
from llama_c4.config.errors import ConfigError

# name: layers, hidden, heads, intermediate, lr, beta1, beta2, batch_tokens, micro_batch_size (published recipes).
PRESETS = {
    "20m": (8, 320, 5, 896, 0.0056, 0.9, 0.98, 131_072, 128),
    "50m": (10, 512, 8, 1408, 0.001, 0.9, 0.99, 32_768, 32),
    "90m": (14, 640, 10, 1792, 0.001, 0.9, 0.99, 32_768, 32),
    "250m": (20, 960, 15, 2560, 0.001, 0.9, 0.99, 32_768, 16),
    "500m": (24, 1280, 20, 3456, 0.001, 0.9, 0.99, 32_768, 8),
}
PARAMETERS = {"20m": 20_403_520, "50m": 48_507_392, "90m": 91_605_120, "250m": 251_943_360, "500m": 516_814_080}


@pytest.mark.parametrize("size", PRESETS)
def test_a_size_brings_its_shape_and_its_recipe(size: str) -> None:
    c = compose_config([f"model={size}"])
    m, o, t = c.model, c.optim, c.training
    shape = (m.num_layers, m.hidden_size, m.num_heads, m.intermediate_size)
    assert (*shape, o.lr, o.beta1, o.beta2, t.batch_tokens, t.micro_batch_size) == PRESETS[size]


@pytest.mark.parametrize("size", PRESETS)
def test_a_size_has_the_published_number_of_parameters(size: str) -> None:
    m = compose_config([f"model={size}"]).model
    d, f = m.hidden_size, m.intermediate_size
    assert m.vocab_size * d + m.num_layers * (4 * d * d + 3 * d * f + 2 * d) + d == PARAMETERS[size]


def test_the_settings_that_no_size_changes_are_the_published_ones() -> None:
    c = compose_config([])
    assert (c.optim.eps, c.optim.weight_decay, c.optim.grad_clip) == (1e-8, 0.1, 1.0)
    assert (c.model.vocab_size, c.model.context_length, c.model.rope_theta, c.model.norm_eps) == (
        32000,
        1024,
        1e4,
        1e-5,
    )
    assert (c.lr_schedule.name, c.lr_schedule.warmup_steps, c.lr_schedule.min_lr_ratio) == ("cosine", 312, 0.1)
    assert (c.training.tokens_per_parameter, c.training.epoch_tokens_per_parameter) == (20, 0.5)
    assert (c.runtime.seed, c.runtime.deterministic, c.evaluation.batch_size, c.logging.log_every) == (
        42,
        False,
        128,
        20,
    )
    assert (c.data.shuffle_group_size, c.training.checkpoint_policy) == (2, "final")


@pytest.mark.parametrize(
    ("overrides", "lr", "beta2", "batch_tokens"),
    [
        (["model=50m", "optim=adamw_b2_095"], 0.001, 0.95, 32_768),
        (["optim=adamw_b2_095", "model=50m"], 0.001, 0.95, 32_768),
        (["optim=adamw_b2_0999"], 0.0056, 0.999, 131_072),
        (["model=90m", "optim.beta2=0.9", "optim.lr=0.003"], 0.003, 0.9, 32_768),
        (["optim.lr=0.003", "model=90m"], 0.003, 0.99, 32_768),
        (["experiment=demo", "model=50m", "training.batch_tokens=4096"], 0.001, 0.99, 4096),
        (["optim=accum_adamw"], 0.0056, 0.98, 131_072),
    ],
)
def test_what_is_typed_wins_over_what_a_size_brings(
    overrides: list[str], lr: float, beta2: float, batch_tokens: int
) -> None:
    c = compose_config(overrides)
    assert (c.optim.lr, c.optim.beta2, c.training.batch_tokens) == (lr, beta2, batch_tokens)


def test_a_typed_value_wins_over_every_group_that_sets_the_same_key() -> None:
    c = compose_config(["runtime=cpu", "training.micro_batch_size=9", "experiment=demo", "lr_schedule.warmup_steps=5"])
    assert (c.training.micro_batch_size, c.lr_schedule.warmup_steps) == (9, 5)


def test_another_schedule_keeps_no_key_of_the_former() -> None:
    schedule = compose_config(["lr_schedule=wsd"]).lr_schedule
    assert vars(schedule).keys() == {"name", "warmup_steps", "warmup_fraction", "decay_fraction"}


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_plus_before_a_key_or_group_means_nothing(plus: str) -> None:
    assert compose_config([f"{plus}optim.lr=0.5", f"{plus}experiment=demo"]).optim.lr == 0.5


def test_the_last_of_a_repeated_override_counts() -> None:
    c = compose_config(["model=20m", "optim.lr=1", "optim.lr=2", "model=50m"])
    assert (c.model.num_layers, c.optim.lr) == (10, 2)


def test_the_plural_of_tokens_per_parameter_is_the_same_key() -> None:
    assert compose_config(["training.tokens_per_parameters=10"]).training.tokens_per_parameter == 10


@pytest.mark.parametrize(("typed", "value"), [("1e-5", 1e-5), ("3E-3", 3e-3), (".5", 0.5), ("1", 1.0), ("1_0.5", 10.5)])
def test_a_typed_number_is_that_number(typed: str, value: float) -> None:
    lr = compose_config([f"optim.lr={typed}"]).optim.lr
    assert (type(lr), lr) == (float, value)


NUMBER_LIKE = [
    "1E234",
    "123e456",
    "12e4567",
    "0_e0",
    "007",
    "true",
    "1_000",
    "0x1F",
    "1:30",
    "nan",
    "-inf",
    "2024-01-01",
]


@pytest.mark.parametrize("word", [*NUMBER_LIKE, "</s>", "a=b", "it's", "50%", "ü", "[", "a b", "a(b", "null_", "a:b"])
def test_a_text_stays_as_it_was_typed(word: str, tmp_path: Path) -> None:
    c = compose_config([f"logging.wandb.group={word}"])
    assert c.logging.wandb.group == word
    (tmp_path / "config.yaml").write_text(to_yaml(c))
    assert load_config(tmp_path) == c


@pytest.mark.parametrize("word", NUMBER_LIKE)
def test_a_word_in_a_list_of_texts_stays_as_it_was_typed(word: str) -> None:
    c = compose_config([f"logging.wandb.tags=[{word}, b,{word}]", f"run.name={word}"])
    assert (c.logging.wandb.tags, c.run.name) == ((word, "b", word), word)


def test_a_commit_of_digits_and_e_stays_text() -> None:
    commit = "12e4567890" * 4
    c = compose_config([f"data.revision={commit}", f"data.tokenizer_revision={'0' * 40}"])
    assert (c.data.revision, c.data.tokenizer_revision) == (commit, "0" * 40)


def test_null_is_nothing_and_a_quoted_null_is_a_word() -> None:
    assert compose_config(["run.name=null"]).run.name is None
    assert compose_config(["run.name='null'"]).run.name == "null"


@pytest.mark.parametrize("typed", ["[3,1,1]", "[3, 1, 1]", "[ 3,1 , 1 ]"])
def test_a_list_is_one_value_with_or_without_spaces(typed: str) -> None:
    c = compose_config(["training.checkpoint_policy=explicit", f"training.checkpoint_epochs={typed}"])
    assert c.training.checkpoint_epochs == (3, 1, 1)


def test_quotes_keep_a_comma_in_a_text() -> None:
    assert compose_config(["run.name='a,b'"]).run.name == "a,b"


def test_the_home_folder_is_expanded_where_the_shell_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    c = compose_config(["data=c4_files", "data.files=~/c4", "data.cache_dir=~/cache", "run.output_dir=~"])
    assert (c.data.files, c.data.cache_dir, c.run.output_dir) == (
        "/home/someone/c4",
        "/home/someone/cache",
        "/home/someone",
    )


def test_an_interpolation_of_the_environment_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_C4_TEST_PLACE", "/scratch")
    assert compose_config(["data.cache_dir=${oc.env:LLAMA_C4_TEST_PLACE}/c"]).data.cache_dir == "/scratch/c"


def test_one_composition_leaves_nothing_behind_for_the_next() -> None:
    before = compose_config([])
    compose_config(["optim.lr=5", "runtime.threads=3", "experiment=demo"])
    assert compose_config([]) == before


# --- saved configurations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=90m", "lr_schedule=linear", "optim=accum_adamw", "data=sample", "data.tokenizer=train"],
        ["data=markov", "loader=v1", "optim.eps=1e-05", "optim.lr=1e+16", "optim.weight_decay=1e-300"],
        [
            "training.checkpoint_policy=explicit",
            "training.checkpoint_epochs=[2,1]",
            "logging.wandb.tags=[1e5,'a: b',#]",
        ],
    ],
)
def test_a_saved_configuration_comes_back_exactly(overrides: list[str], tmp_path: Path) -> None:
    config = compose_config(overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    assert to_yaml(load_config(path)) == to_yaml(config)


def test_a_saved_configuration_needs_no_other_file_and_no_preset(tmp_path: Path) -> None:
    text = to_yaml(compose_config(["model=50m"]))
    assert "preset" not in text and "$" not in text and "???" not in text


def test_a_saved_configuration_takes_single_keys(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(compose_config(["experiment=demo"])))
    changed = load_config(tmp_path, ["runtime.threads=2", "run.name=1E5"])
    assert (changed.runtime.threads, changed.run.name) == (2, "1E5")
    assert changed.optim == compose_config(["experiment=demo"]).optim


@pytest.mark.parametrize(
    "override", ["runtime=cpu", "hydra.verbose=true", "optim.lr=x", "optim.typo=1", "optim.lr=1,2"]
)
def test_a_saved_configuration_refuses_what_a_run_refuses(override: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(compose_config([])))
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        load_config(tmp_path, [override])


def test_all_faults_of_a_saved_configuration_are_listed(tmp_path: Path) -> None:
    text = to_yaml(compose_config(["experiment=demo"])).replace("seed: 42", "sead: 42").replace("lr: 0.004", "lr: .nan")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    text = str(caught.value)
    assert "runtime.sead" in text and "runtime.seed has no value" in text and "optim.lr=NaN" in text


@pytest.mark.parametrize(
    "content", [b"", b"[1, 2]", b"a: [", b"\xff\xfe\x00", b"{}", b"a: !!python/object:x {}", b"1: 2"]
)
def test_a_file_that_is_no_configuration_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml.*cannot be read"):
        load_config(tmp_path / "nothing.yaml")
