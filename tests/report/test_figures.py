from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest

from llama_c4.report.figures import svg, write_figures
from llama_c4.report.ledger import RunSummary, read_run, scan
from llama_c4.report.plots import LAYOUTS, NARROW, PLOTS, WIDE, Plot
from tests.report.conftest import always_nan, healthy, inf_at_60, nan_at_5_to_9, write_run

BY_NAME = {plot.name: plot for plot in PLOTS}
CROSS = "M -4 4 \nL 4 -4 \nM -4 -4 \nL 4 4"
"""Outline of the mark at a value that is not finite."""


@pytest.fixture(autouse=True)
def _no_warnings() -> object:
    """An axis that cannot take its data warns; that must not happen."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def read(place: Path, loss: Callable[[int], float], **changes: object) -> RunSummary:
    return read_run(write_run(place, "run", loss=loss, **changes))  # type: ignore[arg-type]


def test_figures_of_runs_of_every_fate_are_whole_png_files_of_1200_pixels(outputs: Path, tmp_path: Path) -> None:
    files = write_figures(scan(outputs), tmp_path / "figures")
    assert [f.name for f in files] == ["loss.png", "loss_last_half.png", "lr.png", "grad_norm.png", "rate.png"]
    assert sorted(f.name for f in (tmp_path / "figures").iterdir()) == sorted(f.name for f in files)
    for file in files:
        data = file.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert data[-8:-4] == b"IEND"
        assert struct.unpack(">I", data[16:20]) == (1200,)


@pytest.mark.parametrize("plot", [BY_NAME["loss"], BY_NAME["grad_norm"]], ids=lambda plot: plot.name)
@pytest.mark.parametrize("loss", [nan_at_5_to_9, always_nan, inf_at_60])
def test_values_that_are_not_finite_are_marked_on_log_axes(
    tmp_path: Path, plot: Plot, loss: Callable[[int], float]
) -> None:
    run = read(tmp_path, loss)
    assert CROSS in svg(plot, [run], WIDE)
    assert ("x", "not a finite number") in plot.marks([run])


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_a_healthy_run_has_no_such_mark(tmp_path: Path, plot: Plot) -> None:
    run = read(tmp_path, healthy)
    assert CROSS not in svg(plot, [run], WIDE)
    assert plot.marks([run]) == []


def test_a_gradient_norm_of_zero_is_marked_below_the_log_axis(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", updates=2, state="interrupted")
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]) | {"grad_norm": 0.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert BY_NAME["grad_norm"].marks([read_run(folder)]) == [("v", "not above zero")]
    assert svg(BY_NAME["grad_norm"], [read_run(folder)], WIDE)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
@pytest.mark.parametrize("updates", [0, 1, 2])
def test_a_run_that_has_hardly_begun_can_be_drawn(tmp_path: Path, plot: Plot, updates: int) -> None:
    run = read(tmp_path, healthy, updates=updates, state="training")
    assert "prediction targets consumed" in svg(plot, [run], NARROW)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_every_axis_has_its_quantity_and_texts_stay_texts(tmp_path: Path, plot: Plot) -> None:
    drawing = svg(plot, [read(tmp_path, healthy)], WIDE)
    assert f">{plot.y_label}</text>" in drawing


def test_the_clip_of_the_gradient_norm_is_drawn_and_named(tmp_path: Path) -> None:
    assert ">optim.grad_clip 1</text>" in svg(BY_NAME["grad_norm"], [read(tmp_path, healthy)], WIDE)


def test_the_entropy_floor_is_drawn_and_named_where_it_is_known(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run")
    result = json.loads((folder / "result.json").read_text()) | {"entropy_floor": 1.386294}
    (folder / "result.json").write_text(json.dumps(result))
    assert ">entropy floor 1.3863</text>" in svg(BY_NAME["loss"], [read_run(folder)], WIDE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_colours_of_a_page_figure_are_the_page_s_own(outputs: Path, layout) -> None:  # type: ignore[no-untyped-def]
    drawing = svg(BY_NAME["loss"], scan(outputs), layout)
    assert all(f"var(--{name})" in drawing for name in ("ink", "muted", "grid", "s0", "s5"))
    assert not any(f"{kind}: #" in drawing for kind in ("fill", "stroke"))


def test_the_same_runs_give_the_same_drawing(tmp_path: Path) -> None:
    run = read(tmp_path, nan_at_5_to_9)
    assert svg(BY_NAME["loss"], [run], WIDE) == svg(BY_NAME["loss"], [run], WIDE)


def test_identifiers_of_two_figures_of_a_page_never_meet(tmp_path: Path) -> None:
    run = read(tmp_path, healthy)
    pieces = [svg(plot, [run], layout).split('id="')[1:] for plot in PLOTS for layout in LAYOUTS]
    identifiers = [{piece.split('"')[0] for piece in drawing} for drawing in pieces]
    assert len(set.union(*identifiers)) == sum(map(len, identifiers))


def test_drawing_leaves_the_global_state_of_matplotlib_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    write_figures([read(tmp_path, healthy)], tmp_path / "figures")
    assert dict(matplotlib.rcParams) == before


def test_settings_of_the_user_s_matplotlib_change_nothing(tmp_path: Path) -> None:
    run = read(tmp_path, healthy)
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 40, "text.usetex": True}):
        drawing = svg(BY_NAME["loss"], [run], WIDE)
    assert drawing == svg(BY_NAME["loss"], [run], WIDE)


def test_a_name_with_dollars_or_an_underscore_is_a_plain_label(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path, name)) for name in (r"$\frac$ cheap", "_hidden")]
    assert all(file.stat().st_size > 10_000 for file in write_figures(runs, tmp_path / "figures"))


def test_a_long_run_makes_a_small_drawing(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", updates=1, state="training")
    line = json.loads((folder / "metrics.jsonl").read_text())
    records = (line | {"targets": i * 1000, "loss": healthy(i % 100)} for i in range(1, 20_001))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(svg(BY_NAME["loss"], [read_run(folder)], WIDE)) < 100_000
