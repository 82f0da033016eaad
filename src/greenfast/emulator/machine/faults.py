"""What the emulator finds wrong with a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from greenfast.emulator.ptx.syntax import Instruction, SourceLine
from greenfast.spec.errors import GreenfastError
from greenfast.spec.facts import ERROR


@dataclass(frozen=True)
class Location:
    """Where a fault was found: line and instruction, block and thread by their indices.

    place: the memory of the access, in words; empty for a fault that is none of an access.
    """

    source: SourceLine | None
    instruction: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    place: str = ""


class KernelFaultError(GreenfastError):
    """The kernel did something that no kernel may do; the message names kernel, source line, block and thread.

    printed: what the kernel had printed by then. unwritten: whether it is a read of a block's or a thread's own memory
    or of an output's that nothing has written, which harms only if the value matters. read: of a data race of a load
    and a store, the load, whose value may not matter either. level: ERROR, or FORMAL. reason: the message without
    kernel, line and thread. location: where.
    """

    exit_code = 1
    printed = ""
    kernel = ""
    reason = ""
    location: Location | None = None
    unwritten = False
    level = ERROR
    read: Instruction | None = None
