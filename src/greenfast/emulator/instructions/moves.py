"""mov, cvta and isspacep: values and addresses as they are (PTX ISA, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from greenfast.emulator.instructions.operands import elementwise, parse_dtype, parse_type, reader, writer
from greenfast.emulator.machine.blocks import ThreadSet
from greenfast.emulator.machine.memory import LOCAL_BASE, PARAM_BASE, SHARED_BASE, window
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Vector


def move(i: Instruction) -> Operation:
    """Build mov, also packing {a, b} into one register and unpacking it, and taking a variable's address."""
    kind = parse_type(i)
    destination, source = i.operands
    if isinstance(source, Vector):
        return _pack(i, kind, destination, source)
    if isinstance(destination, Vector):
        return _unpack(i, kind, destination, source)
    return elementwise(i, lambda a: a)


def _pack(i: Instruction, kind: str, destination: Any, source: Vector) -> Operation:
    size = parse_dtype(kind).itemsize // len(source.items)
    part = f"b{8 * size}"
    read = [reader(item, part, i) for item in source.items]
    write = writer(destination, f"b{8 * size * len(source.items)}", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        whole: Any = np.uint64(0)
        for n, r in enumerate(read):
            whole = whole | (np.asarray(r(m, lanes)).astype(np.uint64) << np.uint64(8 * size * n))
        write(m, lanes, np.asarray(whole).astype(parse_dtype(f"b{8 * size * len(read)}")))

    return run


def _unpack(i: Instruction, kind: str, destination: Vector, source: Any) -> Operation:
    size = parse_dtype(kind).itemsize // len(destination.items)
    read = reader(source, f"b{8 * parse_dtype(kind).itemsize}", i)
    write = [writer(item, f"b{8 * size}", i) for item in destination.items]

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        whole = np.asarray(read(m, lanes)).astype(np.uint64)
        for n, w in enumerate(write):
            w(m, lanes, (whole >> np.uint64(8 * size * n)).astype(parse_dtype(f"b{8 * size}")))

    return run


def cvta(i: Instruction) -> Operation:
    """Build cvta: global addresses are generic already; shared and local ones move into or out of their window."""
    from_generic = "to" in i.parts
    space = next(name for p in i.parts if (name := p.split(":")[0]) in ("global", "shared", "local", "const", "param"))
    base = _WINDOWS.get(space, 0)
    kind = parse_type(i)
    offset = np.uint64(base)
    return elementwise(
        i,
        lambda a: (np.asarray(a).astype(np.uint64) + (np.uint64(0) - offset if from_generic else offset)).astype(
            parse_dtype(kind)
        ),
    )


_WINDOWS = {"shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE}


def is_space(i: Instruction) -> Operation:
    """Build isspacep: test whether a generic address is in a state space."""
    space = i.parts[0].split(":")[0]
    read, write = reader(i.operands[1], "u64", i), writer(i.operands[0], "pred", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        result = np.atleast_1d(np.asarray(read(m, lanes)))
        write(m, lanes, np.array([window(int(a)) == space for a in result]))

    return run


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {"mov": move, "cvta": cvta, "isspacep": is_space}
