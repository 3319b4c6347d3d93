"""The parts of the page that are about runs: cards of numbers, the table of runs, and what each run was."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_c4.config.command import override, overrides_of
from llama_c4.config.compose import load_config
from llama_c4.config.dotted import flat
from llama_c4.config.errors import ConfigError
from llama_c4.config.fields import leaves
from llama_c4.report import units
from llama_c4.report.ledger import RunSummary
from llama_c4.report.markup import NOTHING, Markup, element, together
from llama_c4.report.palette import stroke

# Outlines of matplotlib's markers in a box of 30 x 12 around (15, 6).
_MARKER_PATHS = {
    "o": "M11 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M11.5 2.5h7v7h-7z",
    "^": "M15 1.5l4.5 8.5h-9z",
    "D": "M15 1l5 5l-5 5l-5-5z",
    "v": "M15 10.5l4.5-8.5h-9z",
    "P": "M13.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
}


def state_badge(run: RunSummary) -> Markup:
    is_bad = run.is_diverged or run.state == "failed"
    return element("span.state bad" if is_bad else "span.state", units.printable(run.state))


def name_with_key(index: int, run: RunSummary) -> Markup:
    """A run's name behind the look of its curves."""
    return together(_key(index), element("span", units.printable(run.name)))


def _key(index: int) -> Markup:
    look = stroke(index)
    dashes = {"stroke-dasharray": " ".join(f"{2 * dash:g}" for dash in look.dashes)} if look.dashes else {}
    colour = f"var(--{look.colour})"
    line = element("path", attributes={"d": "M0 6h30", "stroke": colour, "stroke-width": "2", **dashes})
    marker = element("path", attributes={"d": _MARKER_PATHS[look.marker], "fill": colour})
    return element("svg.key", line, marker, attributes={"viewBox": "0 0 30 12", "aria-hidden": "true"})


def cards(run: RunSummary) -> Markup:
    """The numbers one looks for first."""
    measured = run.headline
    scope = "whole validation split" if run.final_loss is not None else "subset, latest"
    non_embedding = run.environment.get("non_embedding_parameters")
    training, elapsed = run.seconds("training_seconds"), run.seconds("elapsed_seconds")
    shown = [
        ("loss", units.loss(measured.get("loss")), f"nats per target, {scope}"),
        ("perplexity", units.count(measured.get("perplexity")), scope),
        ("bits per byte", units.loss(measured.get("bits_per_byte")), scope),
        (
            "targets",
            units.count(run.targets),
            f"of {units.count(run.total_targets)}; {units.whole(run.update)} updates",
        ),
        ("parameters", units.count(run.num_parameters), f"unique; {units.count(non_embedding)} without the embedding"),
        ("rate", units.count(run.rate), "targets per second, median window"),
        ("peak memory", units.memory(run.peak_memory_bytes), "of training"),
        ("time", units.duration(training), f"of training; {units.duration(elapsed)} in all"),
    ]
    return element("dl.cards", [_card(*card) for card in shown])


def _card(name: str, value: str, remark: str) -> Markup:
    return element("div", element("dt", name), element("dd", value), element("dd.muted", remark))


def differing_settings(runs: Sequence[RunSummary]) -> list[str]:
    """Dotted keys that are not the same in all runs, names and places of run folders apart."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [k for k in keys if not k.startswith("run.") and len({_said(run.settings, k) for run in runs}) > 1]


def _said(settings: Mapping[str, Any], key: str) -> str:
    return units.setting(settings[key]) if key in settings else units.MISSING


def runs_table(runs: Sequence[RunSummary]) -> Markup:
    """One row a run, best first, with the settings in which the runs differ."""
    keys = differing_settings(runs)
    headings = [element("th", "run"), element("th", "state")]
    headings += [element("th.number", word) for word in ("final loss", "subset loss", "done")]
    headings += [element("th", key) for key in keys]
    headings += [element("th.number", word) for word in ("targets/s", "training")]
    rows = [_row(index, run, keys) for index, run in enumerate(runs)]
    return _scrolling(element("thead", element("tr", headings)), element("tbody", rows))


def _row(index: int, run: RunSummary, keys: Sequence[str]) -> Markup:
    name = element("a", name_with_key(index, run), attributes={"href": f"#run-{index}"})
    progress = units.percent(run.targets, run.total_targets)
    losses = (units.loss(run.final_loss), units.loss(run.subset_loss), progress)
    speed = (units.count(run.rate), units.duration(run.seconds("training_seconds")))
    return element(
        "tr",
        element("td.name", name),
        element("td", state_badge(run)),
        [element("td.number", text) for text in losses],
        [element("td.setting", _said(run.settings, key)) for key in keys],
        [element("td.number", text) for text in speed],
    )


def _scrolling(*parts: str | Iterable[str]) -> Markup:
    """A table that scrolls by itself where it is wider than the page."""
    return element("div.scroll", element("table", *parts), attributes={"tabindex": "0"})


def run_details(runs: Sequence[RunSummary]) -> Markup:
    """What each run was: open when there is one, folded when there are several."""
    return together(element("h2", "Details"), [_details(index, run, len(runs) == 1) for index, run in enumerate(runs)])


def _details(index: int, run: RunSummary, alone: bool) -> Markup:
    title = "Settings, environment, lineage" if alone else name_with_key(index, run)
    message = run.status.get("message")
    return element(
        "details",
        element("summary", title),
        element("p", "Status: ", state_badge(run), f" {units.printable(str(message))}" if message else ""),
        element("p.muted", units.printable(str(run.path))),
        NOTHING if alone else cards(run),
        element("h3", "How to reproduce"),
        _reproduce(run),
        element("h3", f"Starts of this run: {len(run.lineage)}"),
        _lineage(run),
        _folded("Settings", _settings(run)),
        _folded("Environment", _pairs(flat(run.environment))),
        attributes={"id": f"run-{index}"} | ({"open": ""} if alone else {}),
    )


def _folded(title: str, content: Markup) -> Markup:
    return element("details", element("summary", title), content)


def _reproduce(run: RunSummary) -> Markup:
    """The commands that prepare the data and train the same again, in a folder of its own."""
    try:
        overrides = overrides_of(load_config(run.path))
    except ConfigError as error:
        return element("p.muted", "This version cannot run these settings: ", units.printable(str(error)))
    words = shlex.join(overrides)
    name = shlex.quote(override("run.name", f"{run.name}-again"))
    return element("pre", f"{_code(run)}llama-c4 prepare {words}\npython train.py {words} {name}")


def _code(run: RunSummary) -> str:
    git = run.environment.get("git") or {}
    if not git.get("commit"):
        return ""
    changed = ", which had changes that were not committed" if git.get("dirty") else ""
    return f"# at commit {units.printable(str(git['commit']))}{changed}\n"


def _lineage(run: RunSummary) -> Markup:
    if not run.lineage:
        return element("p.muted", "No lineage.jsonl.")
    keys = list(dict.fromkeys(key for line in run.lineage for key in line))
    rows = [element("tr", [element("td", _plain(line.get(key))) for key in keys]) for line in run.lineage]
    return _scrolling(element("thead", element("tr", [element("th", key) for key in keys])), element("tbody", rows))


def _settings(run: RunSummary) -> Markup:
    rows = [
        element("tr", element("td.setting", key), element("td.setting", units.setting(value)), *_meaning(key))
        for key, value in run.settings.items()
    ]
    headings = [element("th", word) for word in ("setting", "value", "kind", "meaning")]
    return _scrolling(element("thead", element("tr", headings)), element("tbody", rows))


def _meaning(key: str) -> tuple[Markup, Markup]:
    """Kind and docstring of a setting, where the schema of today has it."""
    known = leaves().get(key)
    kind, doc = (known[0].kind, known[0].doc) if known else ("not known to this version", "")
    return element("td", kind), element("td.muted", doc)


def _pairs(values: Mapping[str, Any]) -> Markup:
    rows = [element("tr", element("td.setting", key), element("td", _plain(value))) for key, value in values.items()]
    return _scrolling(element("tbody", rows)) if rows else element("p.muted", "Nothing is recorded.")


def _plain(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return units.printable(json.dumps(value, ensure_ascii=False))
    return units.MISSING if value is None else units.setting(value)
