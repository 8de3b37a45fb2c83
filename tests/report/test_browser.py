"""The page in a real browser: charts are drawn, nothing is loaded, nothing overflows, news come in."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli import main
from composer_replication.cli.report_live import live_look
from composer_replication.cli.view import RunReader
from composer_replication.report import page as html_page
from composer_replication.report import payload, run_from_json
from composer_replication.report.live import LiveServer
from composer_replication.store import open_store
from tests.report.fleet import SteppedFleet
from tests.report.samples import run_json
from tests.support.browser import chromium_program, running_browser

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
SMALL = [
    *("fleet.replicas=2", "training.steps=24", "scheduler.warmup_steps=2", "autoloco.base_horizon=4"),
    *("autoloco.warmup_steps=4", "model.args.width=16", "model.args.layers=1", "data.args.batch_size=4"),
    *("data.args.max_bytes=60000", "data.args.validation_bytes=2000"),
]
LAPTOP, PHONE = (1280, 800), (390, 844)
DRAWN = (
    "() => { const all = [...document.querySelectorAll('.plot')]; return all.length && all.every(p => p._fullLayout); }"
)
# Of each chart: its name, its traces that have points, and the shapes that were drawn for them.
CHARTS = """() => [...document.querySelectorAll('.plot')].map(p => [p.chart.id, p.data.filter(t => t.x.length).length,
    p.querySelectorAll('.scatterlayer path, .barlayer path').length])"""
# Text that is smaller than 12 px, in the page or in a chart.
SMALL_TEXT = """() => [...document.querySelectorAll('main *')].filter(node =>
    [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())
    && node.getClientRects().length && parseFloat(getComputedStyle(node).fontSize) < 12
  ).map(node => `${node.textContent} ${getComputedStyle(node).fontSize}`)"""
LOWEST_FACT = "() => Math.max(...[...document.querySelectorAll('.fact')].map(f => f.getBoundingClientRect().bottom))"
GROUNDS = """() => [getComputedStyle(document.body).backgroundColor,
    document.querySelector('.plot')._fullLayout.paper_bgcolor]"""
WIDTHS = "() => [document.documentElement.scrollWidth, window.innerWidth]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = chromium_program()
    if program is None:
        reason = "no browser: name a Chromium in the variable CHROMIUM, or have one on the path"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with running_browser(program) as found:
        yield found


@contextmanager
def opened(browser: Any, url: str, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> Iterator[Any]:
    """A page whose errors, warnings and requests to anywhere else fail the test."""
    phone = size == PHONE
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, has_touch=phone, is_mobile=phone
    )
    page, troubles = context.new_page(), list[str]()
    page.set_default_timeout(120_000)
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    own = ("data:", "blob:", url)
    page.on("request", lambda asked: None if asked.url.startswith(own) else troubles.append(f"asked for {asked.url}"))
    try:
        page.goto(url)
        page.wait_for_function(DRAWN)
        yield page
        assert troubles == []
    finally:
        context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two seeds and a fixed interval, simulated, and of a fleet that met in a store."""
    folder = tmp_path_factory.mktemp("report")
    runs, store, path = folder / "runs.jsonl", str(folder / "store"), folder / "report.html"
    assert main(["simulate", RECIPE, *SMALL, "--seeds", "1", "2", "-o", str(runs), "--json"]) == 0
    assert main(["simulate", RECIPE, *SMALL, "autoloco.policy=fixed", "-o", str(runs), "--json"]) == 0
    fleet = SteppedFleet(store)
    fleet.round()
    fleet.finish()
    assert main(["report", store, str(runs), "-o", str(path)]) == 0
    return path.as_uri()


@pytest.mark.parametrize(("size", "scheme"), [(LAPTOP, "light"), (PHONE, "dark")])
def test_the_page(browser: Any, report: str, size: tuple[int, int], scheme: str) -> None:
    with opened(browser, report, size, scheme) as page:
        width, room = page.evaluate(WIDTHS)
        assert width <= room == size[0]
        answers = page.locator(".fact .answer").all_inner_texts()
        assert len(answers) == 3 and all(re.search(r"\d", answer) for answer in answers)
        if size == LAPTOP:  # the facts are there before anyone scrolls
            assert page.evaluate(LOWEST_FACT) <= size[1]
        charts = page.evaluate(CHARTS)
        assert {name for name, _, _ in charts} == {
            *("loss", "communication", "intervals", "measured"),
            *("decisions", "signals", "outer", "shares", "bytes", "timeline"),
        }
        assert all(traces and shapes for _, traces, shapes in charts), charts
        assert page.evaluate(SMALL_TEXT) == []
        dark = scheme == "dark"
        ground, paper = page.evaluate(GROUNDS)
        assert ground == ("rgb(15, 18, 22)" if dark else "rgb(246, 247, 249)")
        assert paper == ("#171b21" if dark else "#ffffff")
        assert page.locator("#settings-tables summary").inner_text() == "Settings and versions"


def test_a_table_that_is_cut_says_that_it_goes_on(browser: Any, report: str) -> None:
    with opened(browser, report, PHONE) as page:
        page.wait_for_selector(".frame.cut .hint >> visible=true")
        assert "scroll it sideways" in page.locator(".frame.cut .hint").first.inner_text()
        assert page.locator("#rounds-table summary").inner_text().startswith("Every round as a table, the newest first")
    with opened(browser, report) as page:
        page.wait_for_function("() => document.querySelector('.frame')")
        table = page.locator(".frame").first
        fits = table.evaluate("node => node.querySelector('.scroll').scrollWidth <= node.clientWidth")
        assert fits != table.locator(".hint").is_visible()


def test_the_loss_begins_behind_its_fall_until_the_whole_scale_is_asked_for(browser: Any, tmp_path: Path) -> None:
    values = run_json(intervals=(4,) * 25)
    for index, one in enumerate(values["rounds"]):
        for told in one["replicas"].values():
            told["loss"] = 5.0 - index if index < 2 else 2.0 - 0.04 * index
    (tmp_path / "page.html").write_text(html_page(payload([run_from_json(values, source="a file")])))
    scale = "() => document.getElementById('all-loss').querySelector('.plot')._fullLayout.yaxis.range"
    with opened(browser, (tmp_path / "page.html").as_uri()) as page:
        assert page.evaluate(scale)[1] < 2.0
        page.locator("#all-loss .nsewdrag").first.dblclick()
        page.wait_for_function(f"() => ({scale})()[1] > 5.0")
        page.locator("#all-loss .tools button", has_text="whole scale").click()
        page.wait_for_function(f"() => ({scale})()[1] > 5.0")
        page.locator("#all-loss .tools button", has_text="whole scale").click()
        page.wait_for_function(f"() => ({scale})()[1] < 2.0")


def test_switches_another_run_and_pictures(browser: Any, report: str, tmp_path: Path) -> None:
    with opened(browser, report) as page:
        buttons = page.locator(".switch button")
        for index in range(buttons.count()):
            buttons.nth(index).click()
            assert all(traces and shapes for _, traces, shapes in page.evaluate(CHARTS))
        titles = "() => document.getElementById('all-loss').querySelector('.plot').layout.xaxis.title.text"
        assert page.evaluate(titles) == "MB sent by all replicas together"
        # Times were not recorded in a simulation: its detail has no chart of them.
        page.locator(".pick select").select_option(index=1)
        assert {name for name, _, _ in page.evaluate(CHARTS)} & {"timeline", "shares"} == set()
        page.locator(".pick select").select_option(index=0)
        assert {name for name, _, _ in page.evaluate(CHARTS)} >= {"timeline", "shares"}
        page.locator(".picks button").nth(1).click()
        assert page.locator(".picks button").nth(1).get_attribute("aria-pressed") == "true"
        for kind, begins in (("png", b"\x89PNG"), ("svg", b"<svg")):
            with page.expect_download() as waiting:
                page.locator(f"#all-loss .save button[title*='{kind.upper()}']").click()
            waiting.value.save_as(tmp_path / kind)
            assert waiting.value.suggested_filename == f"loss.{kind}"
            assert (tmp_path / kind).read_bytes().startswith(begins)


def test_text_of_a_run_stays_text(browser: Any, tmp_path: Path) -> None:
    bad = "</script><script>window.hacked = 1</script><img src=http://localhost:1/x onerror='window.hacked = 1'>"
    values = run_json(name=bad, codec=bad, versions={bad: bad}, policy=bad)
    values["rounds"][0] |= {
        "absent": {"1": bad},
        "outliers": {"0": bad},
        "assessment": bad,
        "action": bad,
        "phase": bad,
    }
    (tmp_path / "page.html").write_text(html_page(payload([run_from_json(values, source=bad)], notices=[bad])))
    with opened(browser, (tmp_path / "page.html").as_uri()) as page:
        assert page.locator("h1").inner_text() == bad and page.locator(".notices li").first.inner_text() == bad
        assert page.evaluate("() => [window.hacked, document.querySelectorAll('main img, main script').length]") == [
            None,
            0,
        ]
        page.locator("#rounds-table summary").click()
        assert bad in page.locator("#rounds-table").inner_text()
        legend = page.locator("#run-decisions .legendtext").all_text_contents()
        assert any("<script>" in name for name in legend)


def test_a_run_that_goes_on_is_followed(browser: Any, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    fleet = SteppedFleet(store)
    for _ in range(3):
        fleet.round()
    server = LiveServer(live_look(RunReader(open_store(store)), store), every_seconds=0.2)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with browser.new_context() as context:
            page, troubles = context.new_page(), list[str]()
            page.set_default_timeout(120_000)
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else troubles.append(r.url))
            page.goto(server.url)
            page.wait_for_function(DRAWN)
            assert page.locator("#live").inner_text() == "running: round 3 is open"
            assert page.locator("table").first.inner_text().startswith("replica")
            loss = "document.getElementById('all-loss').querySelector('.plot')"
            assert page.evaluate(f"() => {loss}.data.at(-1).x") == [4, 8, 12]
            page.evaluate(f"() => Plotly.relayout({loss}, {{'xaxis.range': [2, 9]}})")
            fleet.round()
            page.wait_for_function(f"() => {loss}.data.at(-1).x.length === 4")
            assert page.locator("#live").inner_text() == "running: round 4 is open"
            assert page.evaluate(f"() => {loss}.layout.xaxis.range") == [2, 9], "a reader's zoom is kept"
            fleet.finish()
            page.wait_for_function("() => document.getElementById('live').textContent === 'the run has ended'")
            assert troubles == []
            server.stop()
            thread.join()
            page.wait_for_function("() => /^no news for \\d+ s/.test(document.getElementById('live').textContent)")
            assert page.locator(".fact").count() == 3  # what was known stays
    finally:
        server.stop()
        thread.join()
        fleet.close()


def test_without_a_browser_ci_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert chromium_program() is None
    monkeypatch.setenv("CHROMIUM", json.dumps("x"))
    assert chromium_program() == '"x"'
