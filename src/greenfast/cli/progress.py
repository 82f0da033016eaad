"""The current step of a command, on a terminal, once it has taken some seconds. Needs no extra, unlike console.py."""

from __future__ import annotations

import os
import sys
import threading
import time

_AFTER_S, _EVERY_S = 3.0, 1.0


class ProgressLine:
    """Writes a step and its seconds on one line of a terminal's standard error, from 3 s on.

    Use as a context manager around work that prints nothing. Writes nothing if standard error is a file or a pipe.
    """

    def __init__(self, step: str, *, after_s: float = _AFTER_S, every_s: float = _EVERY_S) -> None:
        """Take the step's words, and the seconds before the first line and between two."""
        self.step = step
        self._stream = sys.stderr
        self._after_s, self._every_s = after_s, every_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressLine:
        if self._stream is not None and self._stream.isatty():
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        start = time.monotonic()
        wait = self._after_s
        while not self._end.wait(wait):
            wait = self._every_s
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
            line = f"{time.monotonic() - start:6.0f} s  {self.step}"[: columns - 1]
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()
        if wait == self._every_s:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
