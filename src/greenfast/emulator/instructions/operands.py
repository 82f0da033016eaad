"""Read and write operands: from PTX types and registers to NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from greenfast.emulator.machine.blocks import ThreadSet, Values, lane_indices
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.literals import as_float
from greenfast.emulator.ptx.syntax import CLOCKS, Immediate, Instruction, Operand, Register, Special, Symbol, Vector
from greenfast.emulator.ptx.unsupported import unsupported
from greenfast.spec.errors import UnsupportedError

Reader: TypeAlias = Callable[[ResidentBlocks, ThreadSet], Values]
Writer: TypeAlias = Callable[[ResidentBlocks, ThreadSet, Values], None]
Function: TypeAlias = Callable[..., Any]

#: PTX type -> NumPy type. Bit types are unsigned; packed halves are kept as their 32 bits.
TYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f64": np.float64, "u16x2": np.uint32, "s16x2": np.uint32,
}  # fmt: skip
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def parse_dtype(name: str) -> Any:
    """Return the NumPy type of a PTX type."""
    return np.dtype(TYPES[name])


def parse_type(instruction: Instruction) -> str:
    """Return the last type among an opcode's parts."""
    for part in reversed(instruction.parts):
        if part in TYPES:
            return part
    raise unsupported(instruction, "has no type that is known")


def list_items(operand: Operand) -> tuple[Operand, ...]:
    """Return the operands in a vector or of d|p, or the one that an operand is."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def parse_constant(operand: Operand, instruction: Instruction) -> int:
    """Return the number that an operand is."""
    if not isinstance(operand, Immediate):
        raise unsupported(instruction, "has an operand that is not a number")
    return operand.bits


def do_nothing(m: ResidentBlocks, lanes: ThreadSet) -> None:
    """Execute an instruction without an effect here."""


def cast(values: Values, dtype: Any) -> Values:
    """Return the low bits of unsigned register values as ``dtype``; registers may be wider than the read type."""
    if values.dtype is dtype:
        return values
    if dtype == np.bool_ or values.dtype == np.bool_:
        return values.astype(dtype, copy=False)
    if values.dtype.itemsize != dtype.itemsize:
        values = values.astype(_UNSIGNED[dtype.itemsize])
    return values.view(dtype)


def reader(operand: Operand, type_name: str, instruction: Instruction) -> Reader:
    """Build a function that reads an operand as a PTX type for some threads; a constant gives one value."""
    dtype = parse_dtype(type_name)
    if isinstance(operand, Register):
        name = operand.name
        if name == "_":
            raise unsupported(instruction, "reads _ as a source; it only takes results,")

        def read(m: ResidentBlocks, lanes: ThreadSet) -> Values:
            if m.products is not None and name in m.products.guards:
                bad = m.products.unreadable(name, lanes)
                if len(bad):
                    why = "read of a wgmma's accumulator before a wgmma.wait_group that covers it"
                    raise m.fault(f"{why} ({name})", int(lane_indices(lanes)[bad[0]]))
            result = m.registers.get(name)
            values: Values = (m.register(name) if result is None else result)[lanes]
            return values if values.dtype is dtype else cast(values, dtype)

        return read
    if isinstance(operand, Immediate):
        if not _may_be_constant(type_name, dtype, operand.width):
            number = "a number with a point" if operand.width else "an integer"
            raise unsupported(instruction, f"has {number} as an operand of type .{type_name}")
        constant = _constant(operand, dtype)
        return lambda m, lanes: constant
    if isinstance(operand, Special):
        return _special(operand.name, dtype, instruction)
    if isinstance(operand, Symbol):
        symbol, offset = operand.name, operand.offset
        if symbol.startswith("!"):
            negated = symbol[1:]
            return lambda m, lanes: ~m.register(negated)[lanes]
        return lambda m, lanes: np.asarray(load_address(m, symbol) + offset, dtype=np.uint64).astype(dtype)
    raise unsupported(instruction, "has an operand that is not known")


def _may_be_constant(type_name: str, dtype: Any, width: int) -> bool:
    """Return whether a type accepts float constants of ``width`` bits, or integers with width 0."""
    if type_name.removesuffix("x2") in ("f16", "bf16"):
        return False
    if dtype.kind == "f":
        return width > 0
    return not width or (type_name[0] == "b" and width == 8 * dtype.itemsize)


def _constant(operand: Immediate, dtype: Any) -> Values:
    size = dtype.itemsize
    bits = operand.bits
    if dtype.kind == "f" and operand.width != 8 * size:
        return np.asarray(as_float(bits, operand.width), dtype=dtype)
    if dtype == np.bool_:
        return np.asarray(bool(bits))
    return np.asarray(bits & (2 ** (8 * size) - 1), dtype=_UNSIGNED[size]).view(dtype)


def _special(name: str, dtype: Any, instruction: Instruction) -> Reader:
    if name in CLOCKS:
        return lambda m, lanes: m.clock(name, instruction, lanes).astype(dtype)

    def read(m: ResidentBlocks, lanes: ThreadSet) -> Values:
        result = m.specials.get(name)
        if result is None:
            raise unsupported(instruction, f"reads {name}, unknown to the emulator")
        return result[lanes].astype(dtype, copy=False)

    return read


def load_address(m: ResidentBlocks, symbol: str) -> int:
    """Return a variable's address: an offset in its space, or a generic address for global variables."""
    if symbol in m.shared_layout:
        return m.shared_layout[symbol]
    if symbol in m.local_layout:
        return m.local_layout[symbol]
    if symbol in m.symbols:
        return m.symbols[symbol]
    if symbol in m.param_layout:
        return m.param_layout[symbol]
    raise UnsupportedError(f"{symbol} has no address that is known to the emulator")


def load_window(m: ResidentBlocks, symbol: str) -> str:
    """Return the space of a variable that has to be converted to a generic address; empty for global variables."""
    layouts = {"shared": m.shared_layout, "local": m.local_layout, "param": m.param_layout}
    return next((space for space, layout in layouts.items() if symbol in layout and symbol not in m.symbols), "")


def writer(operand: Operand, type_name: str, instruction: Instruction) -> Writer:
    """Build a function that writes values of a PTX type to a register, sign-extended if the type is signed."""
    if not isinstance(operand, Register):
        raise unsupported(instruction, "writes to something that is not a register")
    dtype = parse_dtype(type_name)
    name = operand.name
    if name == "_":
        return lambda m, lanes, values: None

    def write(m: ResidentBlocks, lanes: ThreadSet, values: Values) -> None:
        if m.products is not None and name in m.products.guards:
            require_writable(m, name, lanes)
            m.products.guards[name].touched[lanes] = m.products.fences[lanes] + 1
        register = m.registers.get(name)
        if register is None:
            register = m.register(name)
        held = register.dtype
        if held is dtype:
            register[lanes] = values
        elif held.itemsize == dtype.itemsize and held.kind != "b":
            register.view(dtype)[lanes] = values
        elif held.kind == "b":
            register[lanes] = values
        else:
            wide = np.int64 if dtype.kind == "i" else np.uint64
            bits = np.asarray(values, dtype=dtype)
            if dtype.kind == "f":
                bits = bits.view(_UNSIGNED[dtype.itemsize])
            register[lanes] = bits.astype(wide).view(np.uint64).astype(register.dtype)

    return write


def require_writable(m: ResidentBlocks, name: str, lanes: ThreadSet) -> None:
    """Report a write to a register that a matrix product in flight uses."""
    assert m.products is not None
    bad = m.products.unwritable(name, lanes)
    if len(bad):
        why = "write to a register that a wgmma in flight uses, before a wgmma.wait_group that covers it"
        raise m.fault(f"{why} ({name})", int(lane_indices(lanes)[bad[0]]))


def elementwise(
    instruction: Instruction, function: Function, types: list[str] | None = None, out: str = ""
) -> Operation:
    """Build an operation that writes function(sources) to its first operand, of types ``out`` and ``types``."""
    kind = parse_type(instruction)
    destination, *sources = instruction.operands
    types = types or [kind] * len(sources)
    read = [reader(s, t, instruction) for s, t in zip(sources, types, strict=True)]
    write = writer(destination, out or kind, instruction)

    if len(read) == 1:
        (one,) = read
        return lambda m, lanes: write(m, lanes, function(one(m, lanes)))
    if len(read) == 2:
        first, second = read
        return lambda m, lanes: write(m, lanes, function(first(m, lanes), second(m, lanes)))
    if len(read) == 3:
        one, two, three = read
        return lambda m, lanes: write(m, lanes, function(one(m, lanes), two(m, lanes), three(m, lanes)))
    return lambda m, lanes: write(m, lanes, function(*[r(m, lanes) for r in read]))
