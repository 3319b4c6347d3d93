from __future__ import annotations

import math

import pytest

from llama_c4.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (999_949, "999.9k"),
        (999_960, "1M"),
        (408_071_168, "408.1M"),
        (20_403_520, "20.4M"),
        (3.26e9, "3.3B"),
        (2e12, "2T"),
        (0.0056, "0.0056"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_a_count_is_said_with_its_letter(value: float | None, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1250, "1.25k"), (2e6, "2M"), (0.00025, "0.00025"), (3.45, "3.45"), (999, "999")]
)
def test_a_tick_has_all_its_digits(value: float, text: str) -> None:
    assert units.tick(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.7, "1 min 0 s"),
        (410.2, "6 min 50 s"),
        (3600, "1 h 0 min"),
        (180_000, "2 d 2 h"),
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86_400, "1 d"), (9e6, "104 d")]
)
def test_an_age_is_said_in_its_largest_unit(seconds: float, text: str) -> None:
    assert units.age(seconds) == text


@pytest.mark.parametrize(
    ("part", "total", "text"), [(999, 1000, "99%"), (5, 5, "100%"), (1, None, "–"), (None, 5, "–")]
)
def test_a_hundred_percent_means_done(part: float | None, total: float | None, text: str) -> None:
    assert units.percent(part, total) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.0056, "0.0056"),
        (1e-08, "1e-08"),
        (0.99943234, "0.99943234"),
        ((1, 2.5), "[1, 2.5]"),
    ],
)
def test_a_setting_is_said_as_one_types_it(value: object, text: str) -> None:
    assert units.setting(value) == text


def test_control_characters_of_a_name_do_not_reach_the_terminal() -> None:
    assert units.printable("a\x1b[31mb\tc\nd é 試") == r"a\x1b[31mb\tc\nd é 試"
