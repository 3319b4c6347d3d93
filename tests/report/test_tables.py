from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from llama_c4.report.ledger import read_run, scan
from llama_c4.report.tables import COLUMNS, notes, print_runs, ranked, runs_table
from tests.report.conftest import always_nan, healthy, write_run

WIDTHS = (40, 70, 100, 140)


def shown(folder: Path, width: int) -> list[str]:
    """The lines of the table on a terminal of a width."""
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None).print(
        runs_table(ranked(scan(folder)), width=width)
    )
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_runs_are_ranked_by_loss_unfinished_ones_after_finished_ones_and_diverged_ones_last(outputs: Path) -> None:
    order = [run.name for run in ranked(scan(outputs))]
    assert order == ["lr-0.004", "resumed", "lr-0.008", "torn", "unfinished", "nan-5-9", "all-nan", "inf"]


def test_a_diverged_run_is_last_even_with_the_smallest_final_loss(tmp_path: Path) -> None:
    write_run(tmp_path, "lucky", loss=lambda update: math.nan if update == 7 else healthy(update) - 1)
    write_run(tmp_path, "begun", updates=3, state="interrupted")
    assert [run.name for run in ranked(scan(tmp_path))] == ["begun", "lucky"]


def test_every_fate_of_a_run_can_be_read_off_the_table(outputs: Path) -> None:
    rows = {line.split()[0]: line for line in shown(outputs, 140)[1:]}
    assert "finished" in rows["lr-0.004"]
    assert all("diverged" in rows[name] for name in ("nan-5-9", "all-nan", "inf"))
    assert "interrupted (no process)" in rows["unfinished"]
    assert "41%" in rows["unfinished"]
    assert "nan" in rows["all-nan"].split()
    assert f"{healthy(120) + 0.06:.4f}" in rows["lr-0.004"]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(outputs: Path, width: int) -> None:
    assert max(map(len, shown(outputs, width))) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_a_column_is_either_shown_or_named_as_left_out(outputs: Path, width: int) -> None:
    headings = re.split(r"\s{2,}", shown(outputs, width)[0].strip())
    left_out = next((n.split(": ")[1].split(", ") for n in notes(scan(outputs), width=width) if "left out" in n), [])
    assert sorted(headings + left_out) == sorted(column.heading for column in COLUMNS)


def test_a_long_name_is_folded_and_not_cut(tmp_path: Path) -> None:
    name = "a-name-that-is-far-too-long-for-a-narrow-terminal-0123456789"
    write_run(tmp_path, name)
    pieces = [line.split()[0] for line in shown(tmp_path, 70)[1:]]
    assert "".join(pieces) == name


def test_a_name_can_neither_style_nor_steer_the_terminal(tmp_path: Path) -> None:
    write_run(tmp_path, "[red]x\x1b[2J")
    assert "[red]x\\x1b[2J" in shown(tmp_path, 140)[1]


def test_damaged_files_are_named_below_the_table(tmp_path: Path) -> None:
    (write_run(tmp_path, "run") / "status.json").write_text("{")
    assert "status.json" in notes(scan(tmp_path), width=140)[-1]


def test_elsewhere_than_on_a_terminal_the_runs_are_tab_separated_in_full_precision(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_runs(outputs)
    head, *rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert head == [column.heading for column in COLUMNS]
    assert {len(row) for row in rows} == {len(head)}
    best = dict(zip(head, rows[0], strict=True))
    assert float(best["final loss"]) == healthy(120) + 0.06
    assert (best["lr"], best["update"]) == ("0.004", "120")
    assert [row[1] for row in rows[-3:]] == ["diverged"] * 3


def test_a_name_with_a_tab_stays_one_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "run").rename(tmp_path / "a\tb\nc")
    print_runs(tmp_path)
    assert capsys.readouterr().out.splitlines()[1].startswith("a\\tb\\nc\t")


@pytest.mark.parametrize("columns", [40, 70])
def test_on_a_terminal_the_command_draws_a_table_that_fits(outputs: Path, columns: int) -> None:
    code = f"import pathlib; from llama_c4.report.tables import print_runs; print_runs(pathlib.Path({str(outputs)!r}))"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, timeout=60)
    os.close(theirs)
    text = re.sub(r"\x1b\[\d*m", "", os.read(ours, 65_536).decode())
    os.close(ours)
    assert done.returncode == 0
    assert "lr-0.004" in text
    assert max(map(len, text.splitlines())) <= columns


def test_a_folder_without_runs_prints_the_headings_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_runs(tmp_path)
    assert capsys.readouterr().out == "\t".join(column.heading for column in COLUMNS) + "\n"


def test_a_run_without_a_single_number_still_has_a_row(tmp_path: Path) -> None:
    write_run(tmp_path, "empty", updates=0, state="starting")
    run = read_run(tmp_path / "empty")
    assert all(column.shown(run) for column in COLUMNS)
    write_run(tmp_path, "nothing but nan", loss=always_nan, updates=1, state="diverged")
    assert [r.name for r in ranked(scan(tmp_path))] == ["empty", "nothing but nan"]
