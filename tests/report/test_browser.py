"""The page in a real browser. Needs Debian's packages `chromium` and `chromium-driver`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_c4.report.html import write_report
from llama_c4.report.plots import PLOTS
from tests.report.conftest import healthy, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (a development dependency)")

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG_NAME = "a-run-whose-name-is-as-long-as-a-sweep-makes-them-lr0.0056-b2_0.98-wd0.1-s42-<b>&-0123456789abcdef"
PHONE, LAPTOP = 390, 1280
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

# Of every figure: how many of its drawings are shown, the size of that one, and what is wrong with its texts.
FIGURES = """
return [...document.querySelectorAll('figure')].map(figure => {
  const drawings = [...figure.querySelectorAll('svg')].filter(svg => !svg.closest('.legend'));
  const shown = drawings.filter(svg => svg.getClientRects().length);
  const box = shown[0].getBoundingClientRect();
  const scale = box.width / shown[0].viewBox.baseVal.width;
  const texts = [...shown[0].querySelectorAll('text')];
  const outside = texts.filter(text => {
    const at = text.getBoundingClientRect();
    return at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1 || at.bottom > box.bottom + 1;
  });
  return {name: figure.id, drawings: shown.length, width: box.width, height: box.height,
    font: Math.min(...texts.map(text => parseFloat(getComputedStyle(text).fontSize) * scale)),
    outside: outside.map(text => text.textContent)};
});
"""
SMALLEST_FONT = """
return Math.min(...[...document.querySelectorAll('body *')]
  .filter(e => e.getClientRects().length && !e.closest('figure svg')
    && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
  .map(e => parseFloat(getComputedStyle(e).fontSize)));
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on five runs, one of which has diverged and one of which goes on."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("out") / "report.html"
    write_run(runs, LONG_NAME, starts=(0, 33, 64, 90))
    for seed in (43, 44):
        write_run(runs, f"seed-{seed}", seed=seed, loss=lambda update, s=seed: healthy(update) + 0.01 * (s - 42))
    write_run(runs, "diverged", lr=0.5, loss=lambda update: math.nan if update > 70 else healthy(update) * 1.2)
    write_run(runs, "unfinished", updates=50, state="training")
    write_report([runs], out)
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


@pytest.fixture(params=[LAPTOP, PHONE], ids=["1280px", "390px"])
def opened(request: pytest.FixtureRequest, browser: Any, report: Path) -> Any:
    """The report open in a window of a laptop's or a phone's width, everything folded out."""
    is_phone = request.param == PHONE
    size = {"width": request.param, "height": 844, "deviceScaleFactor": 2, "mobile": is_phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)  # what the browser's own start page has said and asked for
    browser.get(report.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    return browser


def test_the_console_stays_empty(opened: Any) -> None:
    assert opened.get_log("browser") == []


def test_no_request_goes_anywhere_but_to_the_file(opened: Any, report: Path) -> None:
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert report.as_uri() in asked
    assert {url for url in asked if not url.startswith("data:")} == {report.as_uri()}


def test_the_page_never_scrolls_sideways(opened: Any) -> None:
    width, window = opened.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert window in (LAPTOP, PHONE)
    assert width <= window


def test_every_figure_is_drawn_once_and_readable(opened: Any) -> None:
    figures = opened.execute_script(FIGURES)
    assert [figure["name"] for figure in figures] == [plot.name for plot in PLOTS]
    for figure in figures:
        assert figure["drawings"] == 1
        assert figure["width"] >= 340
        assert figure["height"] >= 250
        assert figure["font"] >= 10
        assert figure["outside"] == []


def test_no_text_of_the_page_is_smaller_than_twelve_pixels(opened: Any) -> None:
    assert opened.execute_script(SMALLEST_FONT) >= 12


def test_a_name_with_markup_is_text(opened: Any) -> None:
    assert LONG_NAME in opened.find_element("css selector", "h2").text
    assert opened.find_elements("css selector", "main b") == []


def test_a_gap_of_values_that_are_not_finite_is_said_in_the_captions(opened: Any) -> None:
    captions = [e.text for e in opened.find_elements("css selector", "#loss figcaption, #grad_norm figcaption")]
    assert len(captions) == 2
    assert all("× and shading: not a finite number." in caption for caption in captions)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_colour_scheme_of_the_reader(browser: Any, report: Path, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(report.as_uri())
    script = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    page, ink = ([int(part) for part in colour[4:-1].split(",")] for colour in browser.execute_script(script))
    assert (sum(page) < sum(ink)) == (scheme == "dark")
    axis = "return getComputedStyle(document.querySelector('#loss .wide text')).fill"
    assert browser.execute_script(axis) == f"rgb({', '.join(map(str, ink))})"
