"""How numbers, names and tables look in every report: all formatting is here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from greenfast.spec.printable import printable

#: What stands where there is no value.
NONE = "-"
_BACKTICKS = re.compile("`+")
# What begins a tag, or the target of a link but a path, unless an odd number of backslashes escapes it already.
_HTML = re.compile(r"(?<!\\)(?:\\\\)*(?=<[A-Za-z/!?])|(?<=\])(?=\((?![\w./#-]+\)))")
_FOLDERS = re.compile(r"(?<![\w<])/\S*/")


def micros(us: float) -> str:
    """Microseconds without the unit, to about five digits: 1391.6, 24.31, 3.142."""
    return f"{us:.1f}" if us >= 100 else f"{us:.2f}" if us >= 10 else f"{us:.3f}"


def speedup(ratio: float) -> str:
    """A measured speedup: 1.830x. Three decimals, so that what falls just short of a requirement shows it."""
    return f"{ratio:.3f}x"


def interval(low: float, high: float) -> str:
    """A confidence interval of a speedup: [1.810, 1.850]."""
    return f"[{low:.3f}, {high:.3f}]"


def requirement(ratio: float) -> str:
    """A required speedup as it was written: 1.15x; "none" for 0."""
    return f"{ratio:g}x" if ratio else "none"


def percent(fraction: float) -> str:
    """A fraction as a percentage: 0.005 is 0.50 %."""
    return f"{100 * fraction:.2f} %"


def kilobytes(size: int) -> str:
    """A size in bytes in units of 1024 bytes, as budgets state it: 37.1 KB."""
    return f"{size / 1024:.1f} KB"


def error(value: float | None) -> str:
    """An error or a ratio to three digits: 0.0596, 1.2e-05."""
    return NONE if value is None else f"{value:.3g}"


def dims(sizes: Mapping[str, int]) -> str:
    """A shape's dimensions: B=1 H=8 S=512 D=64; also toggles and their values."""
    return " ".join(f"{name}={value}" for name, value in sizes.items()) or NONE


def short(name: str, most: int = 32) -> str:
    """A name that fits next to an axis, its end cut off where it is too long."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def yes(flag: bool) -> str:
    """A flag in words."""
    return "yes" if flag else "no"


def one_line(text: str) -> str:
    """The text with every run of white space, line ends too, as one blank."""
    return " ".join(text.split())


def literal(text: str) -> str:
    """Text from elsewhere, such as a compiler's message, without the marks that Markdown would act on."""
    return re.sub(r"[`*<\\]|(?<=\])\(", r"\\\g<0>", text)


def without_html(text: str) -> str:
    """One line of Markdown without raw HTML and links, which text from elsewhere may hold; code stays as it is."""
    parts = _split_at_code(printable(one_line(text)))
    return "".join(part if n % 2 else _HTML.sub(r"\g<0>\\", part) for n, part in enumerate(parts))


def _split_at_code(line: str) -> list[str]:
    """Split a line at its spans of code, the odd parts, as CommonMark does.

    A run of backticks ends at the next run of the same length; one without such an end is text.
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
    """A Markdown list, an entry per text."""
    return "\n".join(f"- {without_html(line)}" for line in lines)


def without_folders(text: str) -> str:
    """A message without the folders of absolute paths, which say something of one machine only."""
    return _FOLDERS.sub("", text)


def code(text: str) -> str:
    """Text as inline code; a backtick in it becomes a quote."""
    return "`" + printable(one_line(text)).replace("`", "'") + "`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> str:
    """A Markdown table; columns named in ``right`` are aligned to the right. Its cells and header may hold any text."""
    to_right = set(right)
    rule = ["---:" if name in to_right else "---" for name in header]
    first, *others = ([without_html(cell).replace("|", "\\|") for cell in row] for row in (header, *rows))
    lines = [first, rule, *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
