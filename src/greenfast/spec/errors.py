"""The errors that users see, each with its exit code on the command line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from pathlib import Path

#: Characters that a terminal may act on, or that reverse text; errors quote sources and messages of others.
_CONTROLS = re.compile(r"[^\n\t\x20-\x7e\u00a0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\uffff]")


class GreenfastError(Exception):
    """Base of every error that greenfast raises on purpose; its message is for the user, without control characters."""

    exit_code = 3

    def __init__(self, *args: object) -> None:
        super().__init__(*(_CONTROLS.sub("?", arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(GreenfastError):
    """The request or a configuration file is wrong; the message lists the allowed values."""

    exit_code = 2


class MachineError(GreenfastError):
    """The machine failed the run: no driver, a missing tool, a folder that cannot be written."""

    exit_code = 3


class UnsupportedError(GreenfastError):
    """A device cannot run a kernel that may be correct: the message names the missing feature and its source line."""

    exit_code = 3


class CompileError(GreenfastError):
    """NVRTC refused a kernel or crashed; the message contains the compiler's message with file and line."""

    exit_code = 1


class DamagedCodeError(CompileError, MachineError):
    """The machine code cannot be read: the file is damaged, or no tool of this machine can read its format."""

    exit_code = 1


class WrongResultError(GreenfastError):
    """A kernel computed a wrong result, so its speed must not be reported."""

    exit_code = 1


class AbsentError(MachineError):
    """This machine lacks a tool to build a solution in its language; its gates are PENDING."""


class SolutionError(GreenfastError):
    """A solution's own code ended without a verdict: it exited, crashed, hung, or returned invalid data."""

    exit_code = 5


def unknown(noun: str, got: str, allowed: Iterable[str]) -> UsageError:
    """Return the error for an unknown name."""
    return UsageError(f"unknown {noun} {got!r}; allowed: {', '.join(sorted(allowed))}")


_TOO_LARGE = ("too big", "too large", "allowed dimension", "allocate")


def too_large(label: str, e: Exception) -> UsageError | None:
    """Return a one-line error if a task's module failed because dimensions are too large; else None.

    label: noun for the failed object. Other exceptions are bugs: their author needs the traceback.
    """
    message = (str(e).splitlines() or [""])[0]
    memory = isinstance(e, (ValueError, RuntimeError)) and any(words in message for words in _TOO_LARGE)
    if not (memory or isinstance(e, (MemoryError, OverflowError))):
        return None
    frames = traceback.extract_tb(e.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and Path(f.filename).is_file()]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return UsageError(
        f"{label}: its dimensions are too large: {type(e).__name__}{f': {message}' if message else ''}{place}"
    )
