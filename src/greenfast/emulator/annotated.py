"""Annotated sources: the observations beside each source line, as text and as a web page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from greenfast.emulator.machine.observed import LineAccesses, LineCounts, Observed, format_step

HEADER = ("threads", "instructions", "active", "loads", "stores", "shared")
LEGEND = (
    "threads: different threads that executed the line. instructions: of warps, without inlined calls.\n"
    "active: threads per warp instruction, of 32. loads, stores: 32-byte sectors of global memory per request.\n"
    "shared: passes over shared memory per request. In brackets: the fewest for the same bytes."
)
#: Source lines that are shown around lines with instructions.
_CONTEXT = 2
#: Watched values that are listed in the text.
_MAX_WATCHED = 64


@dataclass(frozen=True)
class _Row:
    """A source line. number: 0 for omitted lines. cells: as HEADER. executed: None for a line without instructions."""

    number: int
    text: str
    cells: tuple[str, ...] = ("",) * len(HEADER)
    executed: bool | None = None
    notes: tuple[str, ...] = ()


def annotate(observed: Observed, sources: Mapping[str, str]) -> str:
    """Return the sources with the counts of each line, then the watched values. sources: texts by file name."""
    parts = []
    for file, rows in _files(observed, sources):
        widths = [max(len(name), *(len(row.cells[n]) for row in rows)) for n, name in enumerate(HEADER)]
        lines = [" ".join(["  line", *(name.rjust(width) for name, width in zip(HEADER, widths, strict=True))])]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row.cells, widths, strict=True)]
            lines.append(" ".join([str(row.number or "...").rjust(6), *cells, "|", row.text]).rstrip())
            lines += [f"{'':7}^ {note}" for note in row.notes]
        parts.append("\n".join([file, *lines]))
    if parts:
        parts.append(LEGEND)
    if observed.watched:
        parts.append("\n".join(["watched:", *_watched_lines(observed)]))
    return "\n\n".join(parts)


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1rem; }}
table {{ border-collapse: collapse; font-family: ui-monospace, Consolas, monospace; font-size: 13px; }}
td, th {{ padding: 0 .6rem; text-align: right; white-space: nowrap; }}
td:last-child, th:last-child {{ text-align: left; white-space: pre; }}
.ran td:first-child {{ background: #2e9d5b66; }} .never td {{ background: #d6454566; }}
.note {{ opacity: .7; }} pre {{ white-space: pre-wrap; }}
</style></head><body><h1>{title}</h1>
{body}</body></html>
"""


def annotated_page(title: str, observed: Observed, sources: Mapping[str, str]) -> str:
    """Return the annotated sources and the watched values as an HTML file, without scripts."""
    header = "".join(f"<th>{name}</th>" for name in ("line", *HEADER, "source"))
    parts = []
    for file, rows in _files(observed, sources):
        body = "".join(map(_html_row, rows))
        parts.append(f"<h2>{escape(file)}</h2>\n<table><tr>{header}</tr>\n{body}</table>\n<pre>{LEGEND}</pre>\n")
    if observed.watched:
        listed = escape("\n".join(_watched_lines(observed)))
        parts.append(f"<h2>Watched values</h2>\n<pre>{listed}</pre>\n")
    return _PAGE.format(title=escape(title), body="".join(parts))


def _html_row(row: _Row) -> str:
    state = {True: "ran", False: "never", None: ""}[row.executed]
    notes = "".join(f'\n<span class="note">^ {escape(note)}</span>' for note in row.notes)
    cells = "".join(f"<td>{cell}</td>" for cell in (str(row.number or "..."), *row.cells))
    return f'<tr class="{state}">{cells}<td>{escape(row.text)}{notes}</td></tr>\n'


def _watched_lines(observed: Observed) -> list[str]:
    more = len(observed.watched) - _MAX_WATCHED
    return [*map(format_step, observed.watched[:_MAX_WATCHED]), *([f"... and {more} more"] if more > 0 else [])]


def _files(observed: Observed, sources: Mapping[str, str]) -> Iterator[tuple[str, list[_Row]]]:
    """Yield each file with its rows: lines with instructions, and some lines around them."""
    for file in dict.fromkeys(line.file for line in observed.lines):
        counts = {line.line: line for line in observed.lines if line.file == file}
        text = sources.get(file, "").splitlines()
        rows: list[_Row] = []
        for number in range(1, max(len(text), max(counts)) + 1):
            content = text[number - 1].expandtabs() if number <= len(text) else ""
            if number in counts:
                rows.append(_count_row(counts[number], content))
            elif any(n in counts for n in range(number - _CONTEXT, number + _CONTEXT + 1)):
                rows.append(_Row(number, content))
            elif rows and rows[-1].number:
                rows.append(_Row(0, ""))
        yield file, rows


def _count_row(line: LineCounts, text: str) -> _Row:
    executed = line.threads > 0
    ends = [f"line {s.to_line}" if s.to_line else "the end" for s in line.sides if not s.threads]
    notes = [f"no thread went from here to {end}" for end in ends]
    if 0 < line.executed_code < line.code:
        notes.append(f"{line.code - line.executed_code} of {line.code} PTX instructions were not executed")
    for stack in line.stacks:
        calls = ", ".join(
            f"{call.file}:{call.line}" + (f" in {call.function}" if call.function else "") for call in stack
        )
        notes.append(f"{line.function or 'the line'} was inlined at {calls}")
    shared = LineAccesses(
        requests=line.shared_loads.requests + line.shared_stores.requests,
        transactions=line.shared_loads.transactions + line.shared_stores.transactions,
        ideal=line.shared_loads.ideal + line.shared_stores.ideal,
    )
    cells = (
        str(line.threads) if executed else "never",
        str(line.instructions) if line.instructions else "",
        f"{line.thread_instructions / line.instructions:.1f}" if line.instructions else "",
        *map(_format_access, (line.global_loads, line.global_stores, shared)),
    )
    return _Row(line.line, text, cells, executed, tuple(notes))


def _format_access(access: LineAccesses) -> str:
    """Return transactions per request, with the fewest for the same bytes in brackets; empty without accesses."""
    if not access.requests:
        return ""
    return f"{access.transactions / access.requests:.1f} ({access.ideal / access.requests:.1f})"
