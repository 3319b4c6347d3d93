"""The table of runs: for people on a terminal, as tab-separated values for programs elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llama_c4.report import units
from llama_c4.report.ledger import RunSummary, scan

MAX_NAME_WIDTH = 20
"""Characters of a name that are worth more than another column."""
MIN_NAME_WIDTH = 10
"""Least width of names, however narrow the terminal."""
STATE_STYLES = {"finished": "green", "diverged": "bold red", "failed": "bold red", "interrupted": "yellow"}


@dataclass(frozen=True)
class Column:
    """One column: its heading, how a run fills it for people and for programs, and what goes first when space is short.

    Attributes:
        heading: Word above the column.
        shown: Text for people.
        value: Plain value for programs.
        drop: Columns with larger numbers are left out first on a narrow terminal; 0 always stays.
        justify: Side on which the texts are flush.
    """

    heading: str
    shown: Callable[[RunSummary], str]
    value: Callable[[RunSummary], object]
    drop: int = 0
    justify: Literal["left", "right"] = "right"


COLUMNS = (
    Column("run", lambda r: units.printable(r.name), lambda r: r.name, justify="left"),
    Column("state", lambda r: units.printable(r.state), lambda r: r.state, justify="left"),
    Column(
        "done", lambda r: units.percent(r.targets, r.total_targets), lambda r: share(r.targets, r.total_targets), drop=1
    ),
    Column("update", lambda r: units.whole(r.update), lambda r: r.update, drop=5),
    Column("targets", lambda r: units.count(r.targets), lambda r: r.targets, drop=7),
    Column("budget", lambda r: units.count(r.total_targets), lambda r: r.total_targets, drop=8),
    Column("subset loss", lambda r: units.loss(r.subset_loss), lambda r: r.subset_loss, drop=3),
    Column("final loss", lambda r: units.loss(r.final_loss), lambda r: r.final_loss),
    Column("lr", lambda r: units.setting(r.lr), lambda r: r.lr, drop=4),
    Column("seed", lambda r: units.setting(r.seed), lambda r: r.seed, drop=9),
    Column("targets/s", lambda r: units.count(r.rate), lambda r: r.rate, drop=6),
    Column("age", lambda r: units.age(time.time() - r.seen_at), lambda r: round(time.time() - r.seen_at), drop=2),
)


def print_runs(folder: Path) -> None:
    """Print the runs at or below a folder, best first: a table on a terminal, tab-separated values elsewhere.

    Raises:
        CheckpointError: There is no such folder.
    """
    runs = ranked(scan(folder))
    if not sys.stdout.isatty():
        sys.stdout.write(tab_separated(runs))
        return
    console = Console()
    if runs:
        console.print(runs_table(runs, width=console.width))
    else:
        console.print(f"no run folders in {folder}; `python train.py` makes the first", markup=False, highlight=False)
    for note in notes(runs, width=console.width):
        console.print(Text(note, style="dim"))


def ranked(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Runs by final loss, then those without one by their latest subset loss, then the others; diverged ones last."""
    return sorted(runs, key=_rank)


def _rank(run: RunSummary) -> tuple[bool, int, float, str]:
    losses = (run.final_loss, run.subset_loss)
    place, loss = next(((i, x) for i, x in enumerate(losses) if x is not None and math.isfinite(x)), (2, 0.0))
    return run.is_diverged, place, loss, str(run.path)


def runs_table(runs: Sequence[RunSummary], *, width: int) -> Table:
    """The table for a terminal of a width, with the columns that fit; long names are folded, not cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = fitting_columns(runs, width=width)
    for column in columns:
        is_name = column.heading == "run"
        table.add_column(
            column.heading,
            justify=column.justify,
            overflow="fold",
            no_wrap=column.justify == "right",
            min_width=min(MIN_NAME_WIDTH, _needed(column, runs)) if is_name else _needed(column, runs),
        )
    for run in runs:
        table.add_row(*(Text(column.shown(run), style=_style(column, run)) for column in columns))
    return table


def fitting_columns(runs: Sequence[RunSummary], *, width: int) -> list[Column]:
    """The columns that a width has room for when names and states may be folded."""
    columns = list(COLUMNS)
    while sum(_needed(c, runs) + 2 for c in columns) - 2 > width and any(column.drop for column in columns):
        columns.remove(max(columns, key=lambda column: column.drop))
    return columns


def _needed(column: Column, runs: Sequence[RunSummary]) -> int:
    """Width of a column: names may be folded anywhere, states between words, numbers nowhere."""
    texts = [column.heading, *(column.shown(run) for run in runs)]
    if column.heading == "run":
        return min(MAX_NAME_WIDTH, max(map(len, texts)))
    words = " ".join(texts).split() if column.heading == "state" else texts
    return max(map(len, words))


def _style(column: Column, run: RunSummary) -> str:
    return STATE_STYLES.get(run.state.split()[0], "cyan") if column.heading == "state" else ""


def notes(runs: Sequence[RunSummary], *, width: int) -> list[str]:
    """What the table cannot say: columns left out, states that are guesses, damaged files."""
    left_out = [c.heading for c in COLUMNS if runs and c not in fitting_columns(runs, width=width)]
    said = [f"left out at this width: {', '.join(left_out)}"] if left_out else []
    if any(run.state.endswith("?") for run in runs):
        said.append("?: started on another machine; whether it lives cannot be seen from here")
    return said + [f"damaged: {units.printable(fault)}" for run in runs for fault in run.faults]


def tab_separated(runs: Sequence[RunSummary]) -> str:
    """One line a run and one for the headings; numbers in full, nan and inf by these words, an empty cell for none."""
    rows = [[column.heading for column in COLUMNS], *([_cell(column.value(run)) for column in COLUMNS] for run in runs)]
    return "".join("\t".join(row) + "\n" for row in rows)


def _cell(value: object) -> str:
    return "" if value is None else units.printable(str(value))


def share(part: float | None, total: float | None) -> float | None:
    """Part of a total, from 0 to 1."""
    return None if part is None or not total else part / total
