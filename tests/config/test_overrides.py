"""Override text: how it is split, quoted and sorted, checked against Hydra's own grammar."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from llama_c4.config.completion import complete_override
from llama_c4.config.compose import expand_sweep
from llama_c4.config.conf_files import group_choices
from llama_c4.config.errors import ConfigError
from llama_c4.config.overrides import quote_text, read_overrides, split_top_level

PARSER = OverridesParser.create()
# Bare words: anything that does not use the grammar's own signs for lists, sweeps, functions, quotes and escapes.
BARE = st.text(st.characters(exclude_categories=("Cs", "Cc", "Z")), min_size=1).filter(
    lambda word: not set(word) & set("\\,'\"[](){}$") and word.lower() != "null"
)


@given(BARE)
def test_a_quoted_word_is_the_word_for_hydra(word: str) -> None:
    assert PARSER.parse_override(f"a={quote_text(word)}").value() == word


@given(st.lists(BARE, min_size=2, max_size=4))
def test_every_word_of_a_sweep_and_of_a_list_is_the_word_for_hydra(words: list[str]) -> None:
    sweep = PARSER.parse_override(f"a={quote_text(','.join(words))}")
    assert [value.text for value in sweep.sweep_iterator()] == words
    assert PARSER.parse_override(f"a={quote_text('[' + ', '.join(words) + ']')}").value() == words


@given(st.lists(BARE, min_size=1, max_size=3))
def test_quoting_twice_is_quoting_once(words: list[str]) -> None:
    once = quote_text(",".join(words))
    assert quote_text(once) == once


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ("a,b", ["a", "b"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"a,\'b",c', ['"a,\'b"', "c"]),
        ("choice(a,b)", ["choice(a,b)"]),
        ("{a:[1,2],b:3}", ["{a:[1,2],b:3}"]),
        (r"a\,b", [r"a\,b"]),
        ("it's,b", ["it's", "b"]),
        ("", [""]),
        ("a,", ["a", ""]),
    ],
)
def test_commas_split_outside_of_quotes_and_brackets(raw: str, parts: list[str]) -> None:
    assert split_top_level(raw) == parts


@pytest.mark.parametrize("raw", ["null", "NULL", "'007'", '"1E5"', "${oc.env:HOME}/x", r"a\,b", ""])
def test_what_has_its_meaning_already_stays(raw: str) -> None:
    assert quote_text(raw) == raw


def test_functions_keep_their_names_and_quote_their_words() -> None:
    assert quote_text("choice(1E3,'b')") == "choice('1E3','b')"


def test_overrides_are_sorted_by_what_they_do() -> None:
    request = read_overrides(["+model=50m", "++optim.lr=1", "hydra.verbose=true", "oops", "optim.lr=2"])
    assert request.choices["model"].value == "50m" and request.values["optim.lr"].value == "2"
    assert [o.key for o in request.hydra] == ["hydra.verbose"] and request.faults[0].startswith("oops")


# --- sweeps as text ---------------------------------------------------------------------------------------------------


def test_a_sweep_is_the_product_in_order_and_the_last_varies_fastest() -> None:
    jobs = expand_sweep(["optim.lr=1e-3,2e-3", "runtime.seed=1,2", "model=50m"])
    values = [[o.split("=")[1] for o in job] for job in jobs]
    assert values == [["50m", lr, seed] for lr in ("0.001", "0.002") for seed in ("1", "2")]


@pytest.mark.parametrize(
    ("override", "count"),
    [
        ("training.checkpoint_epochs=[1,2],[1,3]", 2),
        ("training.checkpoint_epochs=[1,2]", 1),
        ("run.name='a,b'", 1),
        ("run.name='a,b',c", 2),
        ("optim.lr=choice(1,2,3)", 3),
        ("runtime.seed=range(1,5)", 4),
        ("optim=glob(adamw_b2_*)", 4),
    ],
)
def test_commas_in_brackets_and_quotes_do_not_sweep(override: str, count: int) -> None:
    assert len(expand_sweep([override])) == count


def test_hydras_own_settings_belong_to_no_job() -> None:
    assert expand_sweep(["hydra.verbose=true", "optim.lr=1"]) == [["++optim.lr=1"]]


@pytest.mark.parametrize("override", ["optim.lr=interval(0,1)", "optim.lr=1,(", "model=glob(x*)", "oops"])
def test_a_sweep_that_cannot_be_listed_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=override[:4]):
        expand_sweep([override, "runtime.seed=1,2"])


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("mo", {"model=", "model."}),
        ("model=5", {"model=50m", "model=500m"}),
        ("lr_schedule.warm", {"lr_schedule.warmup_steps=", "lr_schedule.warmup_fraction="}),
        ("runtime.compile=", {"runtime.compile=true", "runtime.compile=false", "runtime.compile=auto"}),
        ("training.rescue.", {"training.rescue.every_minutes="}),
        ("++optim=accum", {"++optim=accum_adamw"}),
        ("optim.lr=", set()),
        ("nothing", set()),
    ],
)
def test_a_half_typed_override_is_completed(prefix: str, expected: set[str]) -> None:
    assert set(complete_override(prefix)) == expected


def test_every_group_is_offered_with_all_its_choices() -> None:
    assert {w for group in group_choices() for w in complete_override(f"{group}=")} == {
        f"{group}={choice}" for group, choices in group_choices().items() for choice in choices
    }
