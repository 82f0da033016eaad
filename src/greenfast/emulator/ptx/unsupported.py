"""Errors for unsupported instructions and functions, and for bugs of the emulator."""

from __future__ import annotations

from greenfast.emulator.ptx.syntax import Instruction
from greenfast.spec.errors import UnsupportedError


class InternalError(UnsupportedError):
    """A failure of the emulator itself; ``where``: the kernel or instruction that it ran."""

    def __init__(self, where: str, error: Exception) -> None:
        # NumPy's error for a size beyond any memory is a ValueError.
        large = isinstance(error, MemoryError) or str(error).startswith(("array is too big", "Maximum allowed"))
        reason = "there is not enough memory to emulate this" if large else "a bug in the emulator"
        super().__init__(f"{where}: {reason}: {type(error).__name__}: {error}")


class LimitError(UnsupportedError):
    """A limit that a thread has reached with the values that it has read."""


def unsupported(instruction: Instruction, why: str = "is not known to the emulator") -> UnsupportedError:
    """Return the error for an instruction that cannot be run."""
    opcode = ".".join((instruction.name, *instruction.parts)).replace(":", "::")
    return UnsupportedError(
        f"PTX instruction {opcode} {why} at {instruction.source or 'unknown line'}: {instruction.text}"
    )
