"""docs/formats.md is normative: it names what the code writes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from llama_c4.checkpoint.format import FOOTER_BYTES, MAGIC, MAX_INDEX_BYTES, VERSION
from llama_c4.checkpoint.header import StateHeader
from llama_c4.checkpoint.run_folder import RunState
from llama_c4.metrics.records import FIELDS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\s]+)`", TEXT))


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_a_record_is_documented(kind: str) -> None:
    assert {kind, *FIELDS[kind]} - {"kind"} <= NAMED


def test_every_field_of_a_header_is_documented() -> None:
    assert {f"header.{field.name}" for field in fields(StateHeader)} <= NAMED


def test_every_state_of_a_run_is_documented() -> None:
    assert set(get_args(RunState)) <= NAMED


def test_the_numbers_of_the_format_are_those_of_the_code() -> None:
    assert f"`{MAGIC.decode()}`" in TEXT and f"| footer | {FOOTER_BYTES}, little-endian" in TEXT
    assert f"at most {MAX_INDEX_BYTES:,}" in TEXT and f"Version {VERSION} is the first" in TEXT
