from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llama_c4.report.curves import Curve, curve, since
from llama_c4.report.ledger import read_run
from tests.report.conftest import BATCH_TOKENS, inf_at_60, nan_at_5_to_9, write_run


def of(*values: float) -> Curve:
    return Curve(np.arange(1.0, len(values) + 1), np.array(values))


def test_a_gap_runs_from_its_first_to_its_last_value_that_is_not_finite() -> None:
    assert of(np.nan, 1, np.inf, -np.inf, np.nan, 2, np.nan).gaps() == [(1, 1), (3, 5), (7, 7)]
    assert of(1, 2).gaps() == of().gaps() == []


def test_zero_is_below_a_log_axis_and_is_not_a_gap() -> None:
    measured = of(0.0, 1, -1, 0, np.nan)
    assert measured.below_log_axis() == [(1, 1), (3, 4)]
    assert measured.gaps() == [(5, 5)]


@pytest.mark.parametrize(("log", "breaks"), [(True, [0, 2, 3]), (False, [2, 3])])
def test_what_an_axis_cannot_show_breaks_the_curve(log: bool, breaks: list[int]) -> None:
    shown = of(0.0, 1, np.nan, np.inf, 2).drawable(log=log)
    assert np.flatnonzero(np.isnan(shown.y)).tolist() == breaks


def test_the_records_of_a_run_with_nan_at_updates_5_to_9_have_that_gap(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, "run", loss=nan_at_5_to_9))
    assert curve(run, "train", "loss").gaps() == [(5 * BATCH_TOKENS, 9 * BATCH_TOKENS)]


def test_an_infinite_loss_is_a_gap_too(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, "run", loss=inf_at_60))
    assert curve(run, "train", "loss").gaps() == [(60 * BATCH_TOKENS, 60 * BATCH_TOKENS)]


def test_thinning_keeps_every_peak_and_every_gap() -> None:
    y = np.sin(np.linspace(0, 300, 100_000))
    y[12_345], y[54_321], y[77_777] = 50, -50, np.nan
    thin = Curve(np.arange(100_000.0), y).thinned(1000)
    assert len(thin.x) <= 1000
    assert (thin.y[thin.x == 12_345], thin.y[thin.x == 54_321]) == (50, -50)
    assert np.isnan(thin.y[thin.x == 77_777])
    assert (np.diff(thin.x) > 0).all()


def test_a_short_curve_is_not_thinned() -> None:
    measured = of(*range(1000))
    assert measured.thinned(1000) is measured


def test_the_last_part_of_a_curve_begins_at_its_start() -> None:
    assert since(of(9, 8, 7, 6), 3).y.tolist() == [7, 6]
