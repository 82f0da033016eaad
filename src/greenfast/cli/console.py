"""Console output during a run, and the exit code."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from greenfast.judge.record_schema import GateResult
from greenfast.spec.printable import printable

_STYLES = {
    "PASS": "green",
    "FAIL": "bold red",
    "PENDING": "yellow",
    "MERGE": "bold green",
    "INCOMPLETE": "yellow",
    "UNCHECKED": "yellow",
    "DEFER": "bold red",
}
_MAX_REASONS = 8
#: Longer words, such as paths, may be split in a table.
_WHOLE_WORD = 20


class ClosableConsole(Console):
    """A console that raises BrokenPipeError if the reader closed the pipe. Rich's own ends the process with code 1."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        raise


def status(text: str) -> Text:
    """Return a status or decision in its colour."""
    return Text(text, style=_STYLES.get(text, ""))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> Table:
    """Make a plain table with literal cells."""
    shown = Table(title=title, box=None, pad_edge=False, header_style="bold")
    cells = [[printable(cell) for cell in row] for row in rows]
    for name, *column in zip(header, *cells, strict=True):
        words = [word for cell in (name, *column) for word in cell.split()]
        shown.add_column(name, overflow="fold", min_width=min(_WHOLE_WORD, max(map(len, words), default=1)))
    for row in cells:
        shown.add_row(*map(Text, row))
    return shown


def show(content: Table | Text | str) -> None:
    """Print to standard output: text unchanged, and tables as wide as their words, if need be over the edge."""
    console = ClosableConsole(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(content, markup=False, soft_wrap=isinstance(content, str), crop=False)


class GateConsole:
    """Prints each gate when it ends, and the current step before.

    The step is a line of a terminal that the next step replaces. Use as a context manager: its end removes the line.
    """

    #: Seconds without output after which a file or a pipe gets the current step too.
    quiet_s = math.inf

    def __init__(self, *, to_stderr: bool) -> None:
        stream = sys.stderr if to_stderr else sys.stdout
        self._live = stream.isatty()
        self._console = ClosableConsole(stderr=to_stderr, width=None if self._live else 200, highlight=False)
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> GateConsole:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def line(self, text: Text | str) -> None:
        """Print a line."""
        self.clear()
        text = Text(text) if isinstance(text, str) else text
        self._console.print(text, soft_wrap=not self._live)  # in a file, one line per text
        self._shown = time.monotonic()

    def clear(self) -> None:
        """Remove the current step from a terminal."""
        if self._live:
            self._console.file.write("\r\x1b[K")

    def say(self, text: str) -> None:
        """Show the current step."""
        now = time.monotonic()
        step = f"{now - self._start:6.0f} s  {printable(text)}"
        if self._live:
            self._console.file.write(f"\r\x1b[K{step[: self._console.width - 1]}")
            self._console.file.flush()
        elif now - self._shown > self.quiet_s:
            self.line(step)

    def progress(self, gate: str, share: float, text: str) -> None:
        """Show a gate's progress."""
        self.say(f"{gate} {share:.0%} {text}")

    def gate(self, result: GateResult) -> None:
        """Print a gate's outcome and the reasons of a failure."""
        self.line(Text.assemble(f"{result.gate:12}", status(f"{result.status:8}"), printable(result.summary)))
        reasons = [f"- {reason}" for reason in result.reasons[:_MAX_REASONS]]
        if len(result.reasons) > _MAX_REASONS:
            reasons.append(f"and {len(result.reasons) - _MAX_REASONS} more")
        for reason in reasons:
            self._console.print(Text(printable(f"{'':12}{reason}")))
