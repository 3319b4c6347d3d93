"""Saved settings come back exactly: here with this reader, and with stricter and looser ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llama_c4.config.errors import ConfigError
from llama_c4.config.yaml_text import read_tree, write_tree

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
NUMBER_LIKE = st.from_regex(r"[-+]?[0-9_.:]{1,5}([eE][-+]?[0-9_]{1,4})?", fullmatch=True)
WORDS = st.sampled_from(
    ["null", "~", "", "true", "True", "yes", "off", "on", "y", "=", "<<", "- a", "a: b", "#", "2024-01-01"]
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS, NUMBER_LIKE, WORDS
)


def reread(tree: dict[str, object]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(write_tree(tree).encode("utf-8"))
        return read_tree(path)


@given(VALUES)
@example("1E234")
@example("0_e0")
@example("12e4567")
@example(1e-05)
@example(1e16)
@example(5e-324)
@example(-0.0)
@example("\x85\u2028\x7f\ufeff")
@example("${oc.env:HOME}")
def test_every_value_comes_back_as_it_was(value: object) -> None:
    tree = {"group": {"key": value, "entries": [value, value]}}
    back = reread(tree)
    assert back == tree and repr(back) == repr(tree)


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), NUMBER_LIKE, WORDS, st.integers(), st.booleans()))
def test_other_readers_see_the_same_value(value: object) -> None:
    text = write_tree({"key": value})
    assert repr(yaml.safe_load(text)["key"]) == repr(value)
    assert repr(OmegaConf.to_container(OmegaConf.create(text), resolve=False)) == repr({"key": value})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1e3),
        ("5.", 5.0),
        ("-3", -3),
        ("007", "007"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("~", None),
    ],
)
def test_a_value_typed_by_hand_is_read_as_a_person_reads_it(text: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"key: {text}\n")
    found = read_tree(tmp_path / "c.yaml")["key"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.getcwd []", "!!timestamp 2024-01-01", "!!binary aGk="])
def test_no_tag_makes_anything_but_plain_values(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"key: {text}\n")
    with pytest.raises(ConfigError, match="no YAML of a configuration"):
        read_tree(tmp_path / "c.yaml")
