"""Formatting of numbers, names and tables for all reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from greenfast.spec.printable import printable

#: Placeholder for a missing value.
NONE = "-"
_BACKTICKS = re.compile("`+")
# The start of a tag, or of a link target that is not a path, unless an odd number of backslashes escapes it.
_HTML = re.compile(r"(?<!\\)(?:\\\\)*(?=<[A-Za-z/!?])|(?<=\])(?=\((?![\w./#-]+\)))")
_FOLDERS = re.compile(r"(?<![\w<])/\S*/")


@dataclass(frozen=True)
class Section:
    """A section of a report. parts: paragraphs of Markdown; in a web page also HTML, as ``markupsafe.Markup``."""

    title: str
    parts: Sequence[str]

    @property
    def anchor(self) -> str:
        """The target of links to this section."""
        return "-".join(self.title.lower().split())


def micros(us: float) -> str:
    """Format microseconds without the unit, with about five digits: 1391.6, 24.31, 3.142."""
    return f"{us:.1f}" if us >= 100 else f"{us:.2f}" if us >= 10 else f"{us:.3f}"


def speedup(ratio: float) -> str:
    """Format a speedup with three decimals, such as 1.830x, to show a small gap to a requirement."""
    return f"{ratio:.3f}x"


def interval(low: float, high: float) -> str:
    """Format a confidence interval of a speedup: [1.810, 1.850]."""
    return f"[{low:.3f}, {high:.3f}]"


def requirement(ratio: float) -> str:
    """Format a required speedup, such as 1.15x; "none" for 0."""
    return f"{ratio:g}x" if ratio else "none"


def percent(fraction: float) -> str:
    """Format a fraction as a percentage: 0.005 is 0.50 %."""
    return f"{100 * fraction:.2f} %"


def kilobytes(size: int) -> str:
    """Format bytes in units of 1024 bytes: 37.1 KB."""
    return f"{size / 1024:.1f} KB"


def error(value: float | None) -> str:
    """Format an error or a ratio with three digits: 0.0596, 1.2e-05."""
    return NONE if value is None else f"{value:.3g}"


def dims(sizes: Mapping[str, int]) -> str:
    """Format a shape's dimensions (or toggles): B=1 H=8 S=512 D=64."""
    return " ".join(f"{name}={value}" for name, value in sizes.items()) or NONE


def short(name: str, max_length: int = 32) -> str:
    """Shorten a text to ``max_length`` characters."""
    return name if len(name) <= max_length else f"{name[: max_length - 1]}…"


def yes(flag: bool) -> str:
    """Return "yes" or "no"."""
    return "yes" if flag else "no"


def one_line(text: str) -> str:
    """Replace every run of white space, including newlines, by one blank."""
    return " ".join(text.split())


def literal(text: str) -> str:
    """Escape Markdown's special characters in an external text, such as a compiler's message."""
    return re.sub(r"[`*<\\]|(?<=\])\(", r"\\\g<0>", text)


def without_html(text: str) -> str:
    """Escape raw HTML and links in one line of Markdown. Spans of code are unchanged."""
    parts = _split_at_code(printable(one_line(text)))
    return "".join(part if n % 2 else _HTML.sub(r"\g<0>\\", part) for n, part in enumerate(parts))


def _split_at_code(line: str) -> list[str]:
    """Split a line at its spans of code as CommonMark does. The parts with odd indices are code.

    A span begins and ends with runs of backticks of the same length. A run without a matching end is text.
    """
    parts, start, position = [], 0, 0
    while position < len(line):
        if line[position] == "\\":
            position += 2
            continue
        run = _BACKTICKS.match(line, position)
        if run is None:
            position += 1
            continue
        position = run.end()
        end = next((other.end() for other in _BACKTICKS.finditer(line, position) if other[0] == run[0]), None)
        if end is not None:
            parts += [line[start : run.start()], line[run.start() : end]]
            start = position = end
    return [*parts, line[start:]]


def bullets(lines: Iterable[str]) -> str:
    """Return a Markdown list with one entry per text."""
    return "\n".join(f"- {without_html(line)}" for line in lines)


def without_folders(text: str) -> str:
    """Remove the folders of absolute paths from a message, because they are specific to one machine."""
    return _FOLDERS.sub("", text)


def code(text: str) -> str:
    """Format text as inline code. Backticks in it become quotes."""
    return "`" + printable(one_line(text)).replace("`", "'") + "`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> str:
    """Return a Markdown table. Cells may contain any text. Columns named in ``right`` are right-aligned."""
    to_right = set(right)
    rule = ["---:" if name in to_right else "---" for name in header]
    first, *others = ([without_html(cell).replace("|", "\\|") for cell in row] for row in (header, *rows))
    lines = [first, rule, *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
