"""Records are strict JSON that loses nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_c4.metrics.best import BestTracker
from llama_c4.metrics.records import FIELDS, check_record, from_line, from_strict, to_line, to_strict

from .runs import validation

NAN, INF = math.nan, math.inf


def refuse(word: str) -> None:
    raise AssertionError(f"a bare {word}")


@pytest.mark.parametrize(("value", "word"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_a_number_that_is_not_finite_is_null_and_says_which_it_was(value: float, word: str) -> None:
    assert to_strict({"loss": value, "update": 3}) == {"loss": None, "loss_nonfinite": word, "update": 3}


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())


@given(record=st.dictionaries(st.text().filter(lambda key: not key.endswith("_nonfinite")), VALUES))
def test_a_record_survives_a_line_of_strict_json(record: dict[str, Any]) -> None:
    line = to_line(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    json.loads(line, parse_constant=refuse)
    found = from_line(line)
    assert repr(sorted(found.items())) == repr(sorted(record.items()))  # repr: nan equals nan, -0.0 differs from 0.0
    assert repr(from_strict(to_strict(record))) == repr(found)


@pytest.mark.parametrize("line", [b"", b"{", b'{"a": NaN}', b'{"a": Infinity}', b"[1]", b"3", b"\xff{}", b"{} {}"])
def test_a_line_that_is_no_strict_json_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_line(line)


@pytest.mark.parametrize("kind", FIELDS)
def test_a_record_that_lacks_a_field_of_its_kind_is_refused(kind: str) -> None:
    whole: dict[str, Any] = dict.fromkeys(FIELDS[kind], 1.0) | {"kind": kind}
    check_record(whole | {"more": 2})
    for field in set(whole) - {"kind"}:
        with pytest.raises(ValueError, match=f"of kind '{kind}' lacks {field}"):
            check_record({key: value for key, value in whole.items() if key != field})


def test_a_record_without_a_kind_or_with_more_than_plain_values_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks kind"):
        check_record({"update": 1})
    with pytest.raises(ValueError, match=r"plain numbers and words: \{'spectrum': 'list'\}"):
        check_record({"kind": "curvature", "spectrum": [1.0]})


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((NAN, 3.2, 3.1, NAN), 3.1),
        ((3.1, 3.2), 3.1),
        ((INF, 5.0), 5.0),
        ((NAN, NAN), None),
        ((-INF, 3.0), 3.0),
        ((), None),
    ],
)
def test_the_best_is_the_least_finite_loss(losses: tuple[float, ...], best: float | None) -> None:
    tracker = BestTracker()
    for update, loss in enumerate(losses):
        tracker.offer(validation(update, loss))
    assert (tracker.record or {"loss": None})["loss"] == best


def test_the_earlier_of_equal_losses_stays_best_over_a_resume() -> None:
    tracker, resumed = BestTracker(), BestTracker()
    assert tracker.offer(validation(10, 3.0))
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert not resumed.offer(validation(20, 3.0)) and resumed.offer(validation(30, 2.9))
    assert tracker.record is not None and tracker.record["update"] == 10
