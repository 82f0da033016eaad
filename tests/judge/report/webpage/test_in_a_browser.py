"""Pages in Chromium, by Playwright: they load nothing, fit a phone, follow light and dark, and print whole.

Skipped where Playwright or a browser is missing: `pip install playwright`, then `playwright install chromium` or the
system's own Chromium.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.pictures import benchmark_page
from benchmarks.records import read_benchmark
from greenfast.judge.pages import record_page
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import Record
from greenfast.judge.report.history import histories, history_page
from greenfast.judge.report.webpage.run import run_page
from tests.judge.report.records import record
from tests.judge.report.webpage.test_run import hostile, with_clocks

EVIDENCE = Path(__file__).parents[4] / "evidence"
PHONE, DESK = 390, 1100
#: The contrast of every visible text with what lies behind it; returns the texts that have too little.
PALE = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const found = rgb(getComputedStyle(e).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const pale = [];
  const kinds = "p, li, dt, dd, th, td, a, h1, h2, b, pre, figcaption, summary, span, text";
  for (const e of document.querySelectorAll(kinds)) {
    const style = getComputedStyle(e);
    const [a, b] = [light(rgb(e.tagName == "text" ? style.fill : style.color)), light(behind(e))];
    if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5) pale.push(e.tagName + ": " + e.textContent.slice(0, 40));
  }
  return pale;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, Playwright's or the system's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    with playwright.sync_playwright() as p:
        own = p.chromium.executable_path
        found = own if Path(own).exists() else shutil.which("chromium") or shutil.which("google-chrome")
        if not found:
            pytest.skip("Playwright has no browser here: playwright install chromium")
        started = p.chromium.launch(executable_path=found)
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind, as files."""
    shipped = read_record(EVIDENCE / "h200/fp8_attention-e4m3-hopper")
    runs = [(f"run-{day}", record(created=f"2030-01-{day:02}T00:00:00Z")) for day in (1, 2)]
    texts = {
        "kept": record_page(shipped, "ab" * 32),
        "clocks": run_page(with_clocks(record())),
        "hostile": run_page(msgspec.convert(hostile(msgspec.to_builtins(record())), Record)),
        "peers": benchmark_page(read_benchmark(EVIDENCE / "h200/peers")),
        "history": history_page("Runs", histories(runs)),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


@pytest.fixture(params=["kept", "clocks", "hostile", "peers", "history"])
def page(request: pytest.FixtureRequest, browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """The page in a window of its own without a network; fails for whatever it asks for, says or opens."""
    context = browser.new_context(viewport={"width": DESK, "height": 900}, offline=True)
    one = context.new_page()
    seen: list[str] = []
    one.on("request", lambda request: seen.append(request.url))
    one.on("console", lambda message: seen.append(message.text))
    one.on("pageerror", lambda error: seen.append(str(error)))
    one.on("dialog", lambda dialog: seen.append(dialog.message))
    url = pages[request.param].as_uri()
    one.goto(url)
    yield one
    assert seen == [url]
    context.close()


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_is_wider_than_the_window(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_light_and_dark(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
    assert page.evaluate(PALE) == []


def test_on_paper_it_is_light_and_nothing_is_folded(page: Any) -> None:
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    heights = page.evaluate("[...document.querySelectorAll('details > *:last-child')].map(e => e.offsetHeight)")
    assert all(height > 0 for height in heights)
    assert page.evaluate(PALE) == []


def test_links_lead_to_the_sections(page: Any) -> None:
    targets = page.evaluate(
        "[...document.links].map(a => document.getElementById(decodeURI(a.hash).slice(1)) !== null)"
    )
    assert targets
    assert all(targets)


def test_there_is_no_script(page: Any) -> None:
    assert page.evaluate("document.scripts.length + document.images.length + document.forms.length") == 0
