"""What the emulator refuses: instructions and functions that it does not know."""

from __future__ import annotations

from greenfast.emulator.ptx.syntax import Instruction
from greenfast.spec.errors import GreenfastError


class UnsupportedError(GreenfastError):
    """The kernel holds an instruction that the emulator does not know; the message names it and its source line."""

    exit_code = 3


def unsupported(instruction: Instruction, why: str = "is not known to the emulator") -> UnsupportedError:
    """The error for an instruction that cannot be run."""
    opcode = ".".join((instruction.name, *instruction.parts)).replace(":", "::")
    return UnsupportedError(
        f"PTX instruction {opcode} {why} at {instruction.source or 'unknown line'}: {instruction.text}"
    )
