"""Faults of a kernel, and their location."""

from __future__ import annotations

from dataclasses import dataclass

from greenfast.emulator.machine.observed import Observed, Recorder
from greenfast.emulator.ptx.syntax import Instruction, SourceLine
from greenfast.spec.errors import GreenfastError
from greenfast.spec.facts import ERROR


@dataclass(frozen=True)
class Location:
    """The location of a fault: source line, instruction, block index and thread index.

    place: description of the accessed memory; empty for a fault without a memory access.
    """

    source: SourceLine | None
    instruction: str
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    place: str = ""


class KernelFaultError(GreenfastError):
    """A fault of the kernel. The message names kernel, source line, block and thread.

    printed: the output of the kernel up to the fault. unwritten: True for a read of uninitialised shared, local or
    output memory. It is harmless if its value is unused. read: for a data race between a load and a store, the load;
    its value may be unused as well. level: ERROR or FORMAL. reason: the message without kernel, line and thread.
    location: the source location. observer: the recorder of the run up to the fault, if there was one.
    """

    exit_code = 1
    printed = ""
    kernel = ""
    reason = ""
    location: Location | None = None
    unwritten = False
    level = ERROR
    read: Instruction | None = None
    observer: Recorder | None = None

    @property
    def observed(self) -> Observed | None:
        """The observations of the recorder, if there is one."""
        return self.observer.observed() if self.observer is not None else None
