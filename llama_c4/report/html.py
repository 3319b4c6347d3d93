"""One HTML file about one or more runs: it asks for nothing from anywhere, so it can be mailed, archived and opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from llama_c4.checkpoint.atomic import write_text
from llama_c4.config.errors import CheckpointError, TrainingError
from llama_c4.report import units
from llama_c4.report.details import cards, name_with_key, run_details, runs_table, state_badge
from llama_c4.report.ledger import RunSummary, read_run, scan
from llama_c4.report.markup import NOTHING, Markup, element, together
from llama_c4.report.palette import DARK, LIGHT
from llama_c4.report.plots import LAYOUTS, PLOTS, Layout, Plot
from llama_c4.report.tables import ranked

# Nothing may be loaded, run or sent, whatever a run's name or message says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

Drawings = Mapping[tuple[Plot, Layout], Markup]


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write a page about runs, and its figures as PNG files for slides beside it.

    The page is OUT; the figures lie in the folder OUT's name without ending + `_figures`. Each file is replaced at
    once, the page last. Runs may still be going on.

    Args:
        run_dirs: Run folders, or folders that hold run folders.
        out: The HTML file; its folder is made if missing.
    Raises:
        CheckpointError: A folder is not there or holds no run; or OUT is a folder.
        TrainingError: The page cannot be written.
    """
    from llama_c4.report.figures import svg, write_figures  # matplotlib takes a second, which only a report should pay

    if out.is_dir():
        raise CheckpointError(f"{out} is a folder; name the HTML file to write, such as {out / 'report.html'}")
    runs = ranked(_read_runs(run_dirs))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_figures(runs, out.with_name(f"{out.stem}_figures"))
    except OSError as error:
        raise TrainingError(f"{out}: cannot be written ({error.strerror}); choose another --out") from error
    drawings = {(plot, layout): svg(plot, runs, layout) for plot in PLOTS for layout in LAYOUTS}
    write_text(out, page(runs, drawings), durable=False)


def _read_runs(run_dirs: Sequence[Path]) -> list[RunSummary]:
    """The runs of all folders, each once."""
    runs: dict[Path, RunSummary] = {}
    for place in run_dirs:
        found = [read_run(place)] if (place / "config.yaml").is_file() else scan(place)
        if not found:
            raise CheckpointError(f"{place} holds no run folder (one with a config.yaml); name one that a run has made")
        runs |= {run.path: run for run in found}
    if not runs:
        raise CheckpointError("a report needs at least one run folder; name it, such as outputs/demo")
    return list(runs.values())


def page(runs: Sequence[RunSummary], drawings: Drawings) -> Markup:
    """The whole document about runs that are in the order of their rank, with the drawing of each plot and layout."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    figures = _figures(runs, drawings)
    body = element("main", _head(title, runs), _alerts(runs), _overview(runs), figures, run_details(runs))
    head = element(
        "head",
        element("meta", attributes={"charset": "utf-8"}),
        element("meta", attributes={"http-equiv": "Content-Security-Policy", "content": POLICY}),
        element("meta", attributes={"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("link", attributes={"rel": "icon", "href": "data:,"}),
        element("title", units.printable(title)),
        element("style", _style()),
    )
    document = element("html", head, element("body", body), attributes={"lang": "en"})
    return together(Markup("<!doctype html>\n"), document)


def _style() -> Markup:
    light, dark = (" ".join(f"--{name}: {value};" for name, value in colours.items()) for colours in (LIGHT, DARK))
    sheet = (resources.files("llama_c4.report") / "report.css").read_text(encoding="utf-8")
    return Markup(f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{sheet}")


def _head(title: str, runs: Sequence[RunSummary]) -> Markup:
    drawn = f"Drawn {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. A target is a position whose label counts in the loss."
    badge = [" ", state_badge(runs[0])] if len(runs) == 1 else []
    return element("header", element("h1", units.printable(title), badge), element("p.muted", drawn))


def _alerts(runs: Sequence[RunSummary]) -> Markup:
    said = [_mishap(run) for run in runs if run.is_diverged or run.state == "failed"]
    said += [f"Damaged: {units.printable(fault)}" for run in runs for fault in run.faults]
    return element("div.alert", element("ul", [element("li", text) for text in said])) if said else NOTHING


def _mishap(run: RunSummary) -> str:
    what = "diverged, ranked last" if run.is_diverged else "failed"
    reason = run.status.get("message") or "a loss or gradient norm is not a finite number"
    return f"{units.printable(run.name)} {what}: {units.printable(str(reason))}"


def _overview(runs: Sequence[RunSummary]) -> Markup:
    """The best run in numbers, and all runs as a table when there are several."""
    if len(runs) == 1:
        return cards(runs[0])
    best = runs[0]
    heading = element("h2", f"Best of {len(runs)}: ", units.printable(best.name)) if not best.is_diverged else NOTHING
    return together(heading, cards(best) if heading else NOTHING, element("h2", "Runs"), runs_table(runs))


def _figures(runs: Sequence[RunSummary], drawings: Drawings) -> Markup:
    drawn = [_figure(plot, runs, drawings) for plot in PLOTS if any(plot.curves(run) for run in runs)]
    content = element("div.plots", drawn) if drawn else element("p.muted", "Nothing was measured yet.")
    return together(element("h2", "Figures"), content)


def _figure(plot: Plot, runs: Sequence[RunSummary], drawings: Drawings) -> Markup:
    drawn = [element(f"div.{layout.name}", drawings[plot, layout]) for layout in LAYOUTS]
    names = [element("li", name_with_key(index, run)) for index, run in enumerate(runs) if plot.curves(run)]
    signs = {"x": "× and shading", "v": "▼"}
    marks = "".join(f" {signs[marker]}: {meaning}." for marker, meaning in plot.marks(runs))
    legend = element("ul.legend", names) if len(runs) > 1 else NOTHING
    caption = element("figcaption", plot.caption + marks)
    return element("figure", element("h3", plot.title), drawn, legend, caption, attributes={"id": plot.name})
