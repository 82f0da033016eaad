"""Recursive functions: subroutines, with a stack of frames for each thread.

All other calls are inlined. The code of a recursive function follows the kernel's code once. A call saves the registers
and local variables of a recursive caller on the stack, sets the parameters and jumps. The return jumps back, reads the
results and restores the saved values. Four instructions that PTX does not have do this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from greenfast.emulator.ptx.syntax import Address, Function, Module, Operand, Register, Symbol, Vector
from greenfast.spec.errors import UnsupportedError

#: Jump to a label, and back; keep a function's frame, and put it back; copy a variable to another as it is.
ENTER, LEAVE, KEEP, RESTORE, COPY = "call~", "ret~", "keep~", "restore~", "copy~"
JUMPS = (ENTER, LEAVE)


def recursive(module: Module) -> set[str]:
    """Return the names of the functions that call themselves, directly or through others."""
    calls = {
        name: {o.name for i in f.code if i.name == "call" for o in i.operands if isinstance(o, Symbol)}
        for name, f in module.functions.items()
    }
    result = set()
    for name in calls:
        reached, queue = set[str](), list(calls[name])
        while queue:
            other = queue.pop()
            if other in calls and other not in reached:
                reached.add(other)
                queue += calls[other]
        if name in reached:
            result.add(name)
    return result


@dataclass
class CallFrame:
    """The frame of a recursive function: the names of its registers, and its variables with their sizes."""

    registers: list[str] = field(default_factory=list)
    variables: dict[str, int] = field(default_factory=dict)


def build_frame(function: Function, start: int, end: int, name: str) -> CallFrame:
    """Build the frame of the function with code from ``start`` to ``end`` of a body.

    Raises UnsupportedError if the function takes the address of a variable in its frame, because all calls share it
    here.
    """
    frame = CallFrame()
    registers = set[str]()
    for i in function.code[start:end]:
        for operand in i.operands:
            _collect(operand, registers, frame, function)
        if i.guard is not None:
            registers.add(i.guard[0])
        if i.name in ("mov", "cvta"):
            taken = [o.name for o in i.operands if isinstance(o, Symbol) and o.name in frame.variables]
            if taken:
                raise UnsupportedError(
                    f"{name} calls itself and takes the address of its local variable {taken[0]}, unknown "
                    f"to the emulator, at {i.source or 'unknown line'}: {i.text}"
                )
    frame.registers = sorted(registers - {"_"})
    return frame


def _collect(operand: Operand, registers: set[str], frame: CallFrame, function: Function) -> None:
    if isinstance(operand, Register):
        registers.add(operand.name)
    elif isinstance(operand, Vector):
        for item in operand.items:
            _collect(item, registers, frame, function)
    elif isinstance(operand, Address) and operand.base is not None:
        _collect(operand.base, registers, frame, function)
        for item in operand.coordinates:
            _collect(item, registers, frame, function)
    elif isinstance(operand, Symbol):
        variable = function.variables.get(operand.name)
        if variable is not None and variable.space == "local":
            frame.variables[operand.name] = variable.size
        if operand.name.startswith("!"):
            registers.add(operand.name[1:])
