from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llama_c4.config.errors import CheckpointError
from llama_c4.report.details import differing_settings
from llama_c4.report.html import page, write_report
from llama_c4.report.ledger import read_run, scan
from llama_c4.report.markup import NOTHING, Markup, element
from llama_c4.report.plots import LAYOUTS, PLOTS
from tests.report.conftest import healthy, write_run

HOSTILE = "<script>alert(1)</script>&\"'"


class Reader(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def drawn(*folders: Path) -> str:
    """The page about runs without its drawings, which take the time."""
    return page([read_run(folder) for folder in folders], {(p, layout): NOTHING for p in PLOTS for layout in LAYOUTS})


@pytest.fixture(scope="module")
def page_of_all(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report on one good, one diverged and one unfinished run."""
    place = tmp_path_factory.mktemp("runs")
    write_run(place, "good", starts=(0, 33, 64, 90))
    write_run(place, "bad", lr=0.5, loss=lambda update: float("nan") if update > 50 else healthy(update))
    write_run(place, "unfinished", updates=50, state="training")
    out = tmp_path_factory.mktemp("out") / "r.html"
    write_report([place], out)
    return out.read_text()


def test_every_tag_is_closed_in_its_order(page_of_all: str) -> None:
    assert Reader(page_of_all).open == []


def test_nothing_outside_the_file_is_asked_for(page_of_all: str) -> None:
    reader = Reader(page_of_all)
    references = [
        v for _, attributes in reader.tags for k, v in attributes.items() if k in ("src", "href", "xlink:href")
    ]
    assert all(reference is not None and reference.startswith(("#", "data:,")) for reference in references)
    assert {tag for tag, _ in reader.tags} & {"script", "img", "iframe", "object", "embed", "base", "form"} == set()
    assert re.findall(r"url\((?!#)|@import|https?://", page_of_all) == []
    policy = next(a["content"] for _, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_the_summary_has_the_numbers_one_looks_for(page_of_all: str) -> None:
    text = Reader(page_of_all).text
    assert f"{healthy(120) + 0.06:.4f}" in text
    words = ("perplexity", "bits per byte", "targets", "parameters", "rate", "peak memory", "time", "Best of 3: good")
    assert [word for word in words if word not in text] == []


def test_diverged_and_unfinished_runs_are_flagged(page_of_all: str) -> None:
    text = Reader(page_of_all).text
    assert "bad diverged, ranked last: a loss or gradient norm is not a finite number" in text
    assert "interrupted (no process)" in text


def test_the_reason_that_a_run_gives_for_its_end_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "run", updates=50, state="failed")
    status = json.loads((folder / "status.json").read_text()) | {"message": "the disk is full"}
    (folder / "status.json").write_text(json.dumps(status))
    assert "run failed: the disk is full" in Reader(drawn(folder)).text


def test_only_settings_that_differ_are_columns_of_the_table(page_of_all: str) -> None:
    table = page_of_all[page_of_all.index("<h2>Runs</h2>") : page_of_all.index("</table>")]
    headings = re.findall(r"<th[^>]*>([^<]*)</th>", table)
    assert [heading for heading in headings if "." in heading] == ["optim.lr"]


def test_a_setting_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    write_run(tmp_path, "a")
    other = write_run(tmp_path, "b")
    (other / "config.yaml").write_text((other / "config.yaml").read_text() + "packed: {num_workers: 4}\n")
    assert differing_settings(scan(tmp_path)) == ["packed.num_workers"]


def test_settings_environment_and_every_start_are_told(page_of_all: str) -> None:
    text = Reader(page_of_all).text
    assert "Starts of this run: 4" in text
    assert all(word in text for word in ("runtime.threads: 2 → 8", "git.commit", "12e4567", "optim.weight_decay"))
    assert "Decoupled decay of tensors with two or more dimensions" in text


def test_every_text_of_a_run_is_text_and_not_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "run")
    for name in ("status.json", "environment.json", "result.json"):
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**record, HOSTILE: HOSTILE, "message": HOSTILE, "run": HOSTILE}))
    (folder / "lineage.jsonl").write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    (folder / "config.yaml").write_text(json.dumps({HOSTILE.replace("</", "<"): HOSTILE}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{HOSTILE}\n")
    hostile_name = folder.rename(folder.with_name(HOSTILE.replace("/", "")))
    write_run(tmp_path / "runs", "other")
    reader = Reader(drawn(hostile_name, tmp_path / "runs" / "other"))
    assert "script" not in {tag for tag, _ in reader.tags}
    assert reader.text.count("<script>alert(1)") >= 8


@pytest.mark.parametrize(
    ("child", "shown"), [("<b>", "&lt;b&gt;"), (Markup("<b>"), "<b>"), (["<", Markup("<hr>")], "&lt;<hr>")]
)
def test_text_becomes_markup_only_escaped(child: str, shown: str) -> None:
    assert element("p", child) == f"<p>{shown}</p>"
    assert element("p", attributes={"title": '"<'}) == '<p title="&quot;&lt;"></p>'


def test_a_run_that_has_measured_nothing_gets_its_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("runtime: {seed: 1}\n")
    assert "Nothing was measured yet." in drawn(tmp_path / "run")


def test_a_report_has_its_figures_beside_it_and_replaces_an_older_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "alone")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "r.html").write_text("old")
    write_report([folder, folder / "..", folder], tmp_path / "out" / "r.html")
    text = (tmp_path / "out" / "r.html").read_text()
    assert "<title>alone</title>" in text
    assert len(re.findall("<figure", text)) == 5
    files = [str(f.relative_to(tmp_path / "out")) for f in sorted((tmp_path / "out").rglob("*"))]
    assert files == ["r.html", "r_figures", *(f"r_figures/{name}.png" for name in sorted(p.name for p in PLOTS))]


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty holds no run folder"):
        write_report([tmp_path / "empty"], tmp_path / "r.html")
    with pytest.raises(CheckpointError, match="needs at least one run folder"):
        write_report([], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_folder_in_the_place_of_the_page_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "r.html").mkdir()
    with pytest.raises(CheckpointError, match="is a folder; name the HTML file"):
        write_report([write_run(tmp_path, "run")], tmp_path / "r.html")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["r.html", "run"]
