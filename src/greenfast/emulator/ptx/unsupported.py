"""Errors for unsupported instructions and functions, and for bugs of the emulator."""

from __future__ import annotations

from greenfast.emulator.ptx.syntax import Instruction
from greenfast.spec.errors import UnsupportedError


def internal_error(where: str, error: Exception) -> UnsupportedError:
    """Return the error for a failure of the emulator itself; ``where``: the kernel or instruction that it ran."""
    # NumPy's error for a size beyond any memory is a ValueError.
    large = isinstance(error, MemoryError) or str(error).startswith(("array is too big", "Maximum allowed"))
    reason = "there is not enough memory to emulate this" if large else "a bug in the emulator"
    return UnsupportedError(f"{where}: {reason}: {type(error).__name__}: {error}")


def unsupported(instruction: Instruction, why: str = "is not known to the emulator") -> UnsupportedError:
    """Return the error for an instruction that cannot be run."""
    opcode = ".".join((instruction.name, *instruction.parts)).replace(":", "::")
    return UnsupportedError(
        f"PTX instruction {opcode} {why} at {instruction.source or 'unknown line'}: {instruction.text}"
    )
