"""Look at every page of the documentation in a browser, at 1280 and at 400 px.

make docs
python scripts/site_screenshots.py [--site site] [--out FOLDER] [--sheets docs/images]

Reports pages that are wider than the window, elements that are cut off at its right edge, links to missing files or
anchors, and a navigation that does not open on a phone; exit 1 if there are any. ``--out`` keeps a picture of each
page, ``--sheets`` a contact sheet of the tops of all pages for each width. Needs Playwright (pip install playwright)
with its own Chromium or the system's.
"""

from __future__ import annotations

import argparse
import importlib
import io
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
#: Width of the window -> width and height of a page on the contact sheet, and its columns.
WIDTHS = {1280: (320, 360, 8), 400: (160, 360, 16)}
#: Return the widths of the page and the window, and the elements that are cut off: those that reach beyond the window
#: and are in no element inside the article that scrolls.
MEASURE = """() => {
  const width = document.documentElement.clientWidth, cut = [];
  for (const e of document.querySelectorAll("main *")) {
    const box = e.getBoundingClientRect();
    if (box.right <= width + 1 || box.width == 0 || getComputedStyle(e).visibility == "hidden") continue;
    let parent = e.parentElement;
    while (parent && !["auto", "scroll"].includes(getComputedStyle(parent).overflowX)) parent = parent.parentElement;
    if (!parent || parent.contains(document.querySelector("article")))
      cut.push(e.tagName.toLowerCase() + ": " + e.textContent.trim().slice(0, 50));
  }
  return [document.documentElement.scrollWidth, width, cut];
}"""


def find_broken_links(site: Path) -> list[str]:
    """Return each link of a page to a file or an anchor that does not exist."""
    texts = {file: file.read_text(encoding="utf-8") for file in site.rglob("*.html")}
    anchors = {file: set(re.findall(r'\bid="([^"]+)"', text)) for file, text in texts.items()}
    broken = []
    for file, text in texts.items():
        for target, anchor in sorted(set(re.findall(r'href="([^"#:?]*)(?:#([^"]*))?"', text))):
            other = (file.parent / unquote(target)).resolve() if target else file
            other = other / "index.html" if other.is_dir() else other
            missing_anchor = anchor and other in anchors and unquote(anchor) not in anchors[other]
            if not other.exists() or missing_anchor:
                broken.append(f"{file.relative_to(site)}: {target}#{anchor}")
    return broken


def start_browser(playwright: Any) -> Any:
    """Start Playwright's own Chromium, or the system's. Raises SystemExit if neither exists."""
    own = playwright.chromium.executable_path
    path = own if Path(own).exists() else shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        raise SystemExit("no browser: playwright install chromium, or a system package")
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def write_sheet(pictures: list[bytes], width: int, file: Path) -> None:
    """Write the tops of all pages as one WebP picture."""
    image: Any = importlib.import_module("PIL.Image")
    cell_width, cell_height, columns = WIDTHS[width]
    rows = -(-len(pictures) // columns)
    sheet = image.new("RGB", (columns * cell_width, rows * cell_height), "white")
    for number, picture in enumerate(pictures):
        page = image.open(io.BytesIO(picture)).convert("RGB")
        page = page.resize(
            (cell_width - 4, round(page.height * (cell_width - 4) / page.width)), image.Resampling.LANCZOS
        )
        page = page.crop((0, 0, cell_width - 4, min(page.height, cell_height - 4)))
        sheet.paste(page, (number % columns * cell_width, number // columns * cell_height))
    sheet.save(file, "WEBP", quality=50, method=6)


def check_navigation(browser: Any, site: Path) -> list[str]:
    """Open the menu of a page in a narrow window. Return its faults."""
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.goto(f"file://{site / 'masks.html'}")
    page.locator(".primary-toggle").first.click()
    link = page.locator("dialog[open] a", has_text="Serving").first
    faults = [] if link.is_visible() else ["the menu of a narrow window shows no section"]
    page.close()
    return faults


def main() -> int:
    """Check all pages, and write the pictures that are asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="the folder that make docs writes")
    parser.add_argument("--out", type=Path, help="a folder for a picture of each page and width")
    parser.add_argument("--sheets", type=Path, help="a folder for the contact sheets")
    args = parser.parse_args()
    site = args.site.resolve()
    pages = sorted(file for file in site.rglob("*.html") if "_static" not in file.parts)
    if not pages:
        raise SystemExit(f"{site} has no pages: make docs")
    faults = [f"broken link: {link}" for link in find_broken_links(site)]
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = start_browser(playwright)
        faults += check_navigation(browser, site)
        for width in WIDTHS:
            cell_width, cell_height, _ = WIDTHS[width]
            window = browser.new_page(viewport={"width": width, "height": width * cell_height // cell_width})
            tops = []
            for file in pages:
                name = file.relative_to(site).with_suffix("").as_posix()
                window.goto(f"file://{file}")
                page_width, window_width, cut = window.evaluate(MEASURE)
                if page_width > window_width:
                    faults.append(f"{name} at {width} px is {page_width} px wide")
                faults += [f"{name} at {width} px cuts off {element}" for element in cut]
                if args.sheets:
                    tops.append(window.screenshot())
                if args.out:
                    args.out.mkdir(parents=True, exist_ok=True)
                    window.screenshot(path=args.out / f"{name.replace('/', '-')}-{width}.png", full_page=True)
            window.close()
            if args.sheets:
                write_sheet(tops, width, args.sheets / f"site-{width}.webp")
        browser.close()
    print("\n".join(faults) or f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} px: no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
