"""The errors a user can meet, each with the exit code that the command line gives it."""

from __future__ import annotations

from collections.abc import Iterable


class GreenfastError(Exception):
    """Base of every error that greenfast raises on purpose; its message is for the user."""

    exit_code = 3


class UsageError(GreenfastError):
    """The request or a configuration file is wrong; the message says what is allowed."""

    exit_code = 2


class MachineError(GreenfastError):
    """The machine failed the run: no driver, a missing tool, a folder that cannot be written."""

    exit_code = 3


class CompileError(GreenfastError):
    """NVRTC refused a kernel, or crashed on it; the message carries the compiler's own, with file and line."""

    exit_code = 1


class WrongResultError(GreenfastError):
    """A kernel computed something wrong, so that nothing about its speed may be said."""

    exit_code = 1


def unknown(what: str, got: str, allowed: Iterable[str]) -> UsageError:
    """The error for a name that is none of the known ones."""
    return UsageError(f"unknown {what} {got!r}; allowed: {', '.join(sorted(allowed))}")
