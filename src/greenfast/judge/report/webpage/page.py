"""The parts of a page, and the page: one HTML file without scripts that loads nothing.

A record is data that somebody else made, so every text is escaped: by Jinja's autoescape, by markdown-it with neither
HTML nor links nor pictures, and by matplotlib in its SVG. The page's own policy forbids loading and running anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from greenfast.judge.report.formatting import Section
from greenfast.spec.printable import printable

_JINJA = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_MARKDOWN = MarkdownIt("zero", {"html": False}).enable(
    ["table", "heading", "list", "fence", "emphasis", "backticks", "escape"]
)
_MARKDOWN.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
_MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")

#: Words that a table shows in a colour.
_TONES = {
    **dict.fromkeys(("PASS", "FAST", "MERGE"), "good"),
    **dict.fromkeys(("FAIL", "SHORT", "SLOWER", "DEFER"), "bad"),
    **dict.fromkeys(("PENDING", "INCOMPLETE", "UNCHECKED", "NO EFFECT", "INCONCLUSIVE"), "undecided"),
}


def page(
    title: str,
    sections: Sequence[Section],
    *,
    word: str = "",
    claims: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the whole HTML file. word: the decision. claims, facts: the summary; facts are pairs of name and value.

    Control characters become visible escapes, since HTML allows few of them.
    """
    rendered = [replace(section, parts=list(map(_render, section.parts))) for section in sections]
    text = _JINJA.get_template("page.html.jinja").render(
        title=title, word=word, tone=tone(word), claims=claims, facts=facts, sections=rendered
    )
    return printable(text)


def tone(word: str) -> str:
    """Return "good", "bad" or "undecided" for a verdict, a decision or a status; empty for any other text."""
    return _TONES.get(word, "")


def paragraph(text: str) -> Markup:
    """Return a paragraph of plain text."""
    return Markup("<p>{}</p>\n").format(text)


def bullets(lines: Iterable[str]) -> Markup:
    """Return a list of plain texts."""
    items = Markup("").join(Markup("<li>{}</li>\n").format(line) for line in lines)
    return Markup("<ul>\n{}</ul>\n").format(items)


def code(text: str) -> Markup:
    """Return preformatted text, such as a command."""
    return Markup("<pre>{}</pre>\n").format(text)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> Markup:
    """Return a table. Columns named in ``right`` are right-aligned; verdicts and statuses are coloured."""
    return _part("table", header=header, rows=list(rows), right=set(right), tone=tone)


def figure(drawing: Markup, caption: str) -> Markup:
    """Return a drawing with a caption."""
    return _part("figure", drawing=drawing, caption=caption)


def fold(summary: str, parts: Iterable[Markup]) -> Markup:
    """Return a fold with these parts. Print shows it open."""
    return _part("fold", summary=summary, parts=list(parts))


def markdown(text: str) -> Markup:
    """Render a section of a Markdown report: tables, headings, lists, emphasis and code. The rest is plain text."""
    return Markup(_MARKDOWN.render(text))


def _render(part: str) -> Markup:
    return part if isinstance(part, Markup) else markdown(part)


def part(name: str, **values: Any) -> Markup:
    """Render the template ``name``.html.jinja."""
    return Markup(_JINJA.get_template(f"{name}.html.jinja").render(tone=tone, **values))


def _part(name: str, **values: Any) -> Markup:
    module = _JINJA.get_template("parts.html.jinja").module
    return Markup(getattr(module, name)(**values))
