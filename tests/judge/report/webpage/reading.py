"""Read a page as a browser's parser would, and find what a page must not have."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "hr", "input"}
#: All elements that pages are made of; whatever else is there came from a record.
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "nav", "p", "h1", "h2", "h3", "a"),
    *("dl", "div", "dt", "dd", "ul", "ol", "li", "pre", "code", "b", "strong", "em", "br", "span", "figure"),
    *("figcaption", "details", "summary", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "defs", "clippath", "path", "use", "text", "tspan", "rect"),
}
MAX_BYTES = 500_000


@dataclass
class Page(HTMLParser):
    """The elements, texts and faults of a page."""

    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} closes another element")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        """What is read on the page."""
        return " ".join(" ".join(self.texts).split())


def read(html: str) -> Page:
    """The page; fails for one that is not well-formed, loads anything, runs anything, or is large."""
    page = Page()
    page.feed(html)
    page.close()
    assert page.faults == []
    assert page.open == []
    assert html.startswith("<!DOCTYPE html>")
    assert len(html.encode()) < MAX_BYTES
    assert set(page.tags) <= ALLOWED, set(page.tags) - ALLOWED
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name, value)
        assert name not in ("src", "srcset", "action", "data", "background"), (tag, name, value)
        if name in ("href", "xlink:href"):
            assert value.startswith("#"), (tag, name, value)
        if name in ("style", "clip-path"):
            assert all(found.startswith("#") for found in re.findall(r"url\(\s*['\"]?([^)]*)", value)), (tag, value)
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    assert "@import" not in html
    return page
