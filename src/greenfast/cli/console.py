"""Console output during a run, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from greenfast.judge.record_schema import GateResult
from greenfast.spec.printable import printable

_STYLES = {
    "PASS": "green",
    "FAIL": "bold red",
    "PENDING": "yellow",
    "MERGE": "bold green",
    "PARTIAL": "yellow",
    "UNCHECKED": "yellow",
    "DEFER": "bold red",
}
_MAX_REASONS = 8


def status(text: str) -> Text:
    """A status or decision in its colour."""
    return Text(text, style=_STYLES.get(text, ""))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> Table:
    """Make a plain table with literal cells."""
    shown = Table(title=title, box=None, pad_edge=False, header_style="bold")
    for name in header:
        shown.add_column(name, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown


def show(what: Table | Text | str) -> None:
    """Print to standard output: text unchanged, and wide tables uncut if the output is a file or a pipe."""
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(what, markup=False, soft_wrap=isinstance(what, str))


class GateConsole:
    """An Observer that prints each gate when it ends, and a progress line before, on standard error or output."""

    def __init__(self, *, to_stderr: bool) -> None:
        stream = sys.stderr if to_stderr else sys.stdout
        width = None if stream.isatty() else 200
        self._console = Console(stderr=to_stderr, width=width, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:11}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not stream.isatty(),
        )
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> GateConsole:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def progress(self, gate: str, share: float, text: str) -> None:
        """Move the gate's progress line."""
        task = self._tasks.get(gate)
        if task is None:
            task = self._tasks[gate] = self._progress.add_task(gate, total=1.0, text="")
        self._progress.update(task, completed=share, text=text)  # type: ignore[arg-type]

    def gate(self, result: GateResult) -> None:
        """Print a gate's outcome and the reasons of a failure."""
        task = self._tasks.pop(result.gate, None)
        if task is not None:
            self._progress.remove_task(task)  # type: ignore[arg-type]
        line = Text.assemble(f"{result.gate:12}", status(f"{result.status:8}"), printable(result.summary))
        self._console.print(line, soft_wrap=not self._console.is_terminal)  # in a file, one line per gate
        for reason in result.reasons[:_MAX_REASONS]:
            self._console.print(Text(printable(f"{'':12}- {reason}")))
        if len(result.reasons) > _MAX_REASONS:
            self._console.print(f"{'':12}- and {len(result.reasons) - _MAX_REASONS} more")
