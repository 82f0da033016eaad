"""The code of one thread in a compiled stretch: its registers as LLVM values, and the pointers that it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from greenfast.emulator.compiled.context import INTERPRET
from greenfast.emulator.compiled.ir import (
    F16,
    F32,
    F64,
    I8,
    I32,
    I64,
    POINTER,
    Builder,
    IrFunction,
    Type,
    Value,
    integer,
)
from greenfast.emulator.instructions.operands import parse_dtype, reader
from greenfast.emulator.ptx.syntax import CLOCKS, Function, Immediate, Instruction, Operand, Register, Special, Symbol

_FLOATS = {2: F16, 4: F32, 8: F64}


class NotCompiledError(Exception):
    """An instruction that stays with the interpreter."""


class Lane:
    """The code of one thread.

    Each block of the function has a builder: ``entry`` runs once per call, ``prologue`` once per thread, ``b`` is where
    the current instruction goes, ``after_warp`` runs after the threads of each warp. specials: the special registers
    that exist. halves: whether the CPU has conversions of f16.
    """

    def __init__(self, function: IrFunction, ptx: Function, specials: Collection[str], halves: bool) -> None:
        self.function, self.ptx, self.specials, self.halves = function, ptx, specials, halves
        self.context, self.registers, self.symbols, self.out, self.cache = function.arguments
        self.entry, self.warp, self.prologue, self.b, self.after_warp = (
            Builder(function, function.new_block()) for _ in range(5)
        )
        self.body_start, self.after_warp_start = self.b.block, self.after_warp.block
        self.bail_block = function.new_block()
        Builder(function, self.bail_block).ret(I64(INTERPRET))
        #: The thread's index and its lane in the warp, set by the loop over threads.
        self.thread = self.lane = I64(0)
        #: Registers and other arrays by thread, in the order of the table of pointers.
        self.names: list[str] = []
        #: Contents of the table of symbols: addresses of variables, places of parameters, tables of conversions.
        self.symbol_names: list[tuple[str, str]] = []
        self.values: dict[str, Value] = {}
        self.written: dict[str, Value] = {}
        self.guard: Value | None = None
        self._pointers: dict[str, Value] = {}
        self._context: dict[tuple[int, Type], Value] = {}
        self._per_thread: dict[int, Value] = {}

    # ---- tables -----------------------------------------------------------------------------------------------------

    def slot(self, number: int, kind: Type = I64) -> Value:
        """Return an entry of the context, loaded once per call."""
        key = number, kind
        if key not in self._context:
            self._context[key] = self.entry.load(kind, self.entry.element(I64, self.context, I64(number)))
        return self._context[key]

    def pointer(self, number: int) -> Value:
        """Return an entry of the context as a pointer."""
        return self.slot(number, POINTER)

    def per_thread(self, number: int) -> Value:
        """Return the thread's element of an array of the context, loaded once per thread."""
        if number not in self._per_thread:
            place = self.prologue.element(I64, self.pointer(number), self.thread)
            self._per_thread[number] = self.prologue.load(I64, place)
        return self._per_thread[number]

    def symbol(self, kind: str, name: str) -> Value:
        """Return an entry of the table of symbols; kind: address, param or table."""
        if (kind, name) not in self.symbol_names:
            self.symbol_names.append((kind, name))
        index = self.symbol_names.index((kind, name))
        return self.entry.load(I64, self.entry.element(I64, self.symbols, I64(index)))

    def _array(self, name: str) -> Value:
        """Return the pointer to the values of a register or special register."""
        if name not in self._pointers:
            self.names.append(name)
            place = self.entry.element(I64, self.registers, I64(len(self.names) - 1))
            self._pointers[name] = self.entry.load(POINTER, place)
        return self._pointers[name]

    # ---- registers --------------------------------------------------------------------------------------------------

    def width(self, name: str) -> int:
        """Return the bits of a register, 1 for a predicate."""
        kind = self.ptx.register_kind(name)
        if kind is None:
            raise NotCompiledError(name)
        return 1 if kind == "pred" else 32 if kind.endswith("16x2") else int(kind.lstrip("busf"))

    def value(self, name: str) -> Value:
        """Return the current value of a register."""
        if name not in self.values:
            width = self.width(name)
            stored = I8 if width == 1 else integer(width)
            value = self.prologue.load(stored, self.prologue.element(stored, self._array(name), self.thread))
            self.values[name] = self.prologue.icmp_unsigned("!=", value, I8(0)) if width == 1 else value
        return self.values[name]

    def set(self, name: str, value: Value) -> None:
        """Set a register where the guard holds."""
        if self.guard is not None:
            value = self.b.select(self.guard, value, self.value(name))
        self.values[name] = self.written[name] = value

    def store_registers(self, names: Collection[str] | None) -> None:
        """Store the registers that the stretch has written; names: those that are read later, None for all."""
        for name, value in self.written.items():
            if names is not None and name not in names:
                continue
            width = self.width(name)
            stored = I8 if width == 1 else integer(width)
            place = self.b.element(stored, self._array(name), self.thread)
            self.b.store(self.b.convert("zext", value, stored), place)

    def read(self, operand: Operand, kind: str, i: Instruction) -> Value:
        """Return the bits of an operand as an integer of the type's width; of a predicate i1."""
        dtype = parse_dtype(kind)
        bits = 1 if kind == "pred" else 8 * dtype.itemsize
        if isinstance(operand, Register):
            value = self.value(operand.name)
            if (value.type.width == 1) != (bits == 1):
                raise NotCompiledError(i.text)
            return self.resize(value, bits)
        if isinstance(operand, Immediate):
            constant: Any = np.asarray(reader(operand, kind, i)(None, slice(0, 0)))  # type: ignore[arg-type]
            return integer(bits)(int(constant) if bits == 1 else int(constant.reshape(1).view(f"u{bits // 8}")[0]))
        if isinstance(operand, Special):
            if operand.name in CLOCKS or operand.name not in self.specials or dtype.kind == "f" or bits == 1:
                raise NotCompiledError(i.text)
            if operand.name not in self.values:
                place = self.prologue.element(I32, self._array(operand.name), self.thread)
                self.values[operand.name] = self.prologue.load(I32, place)
            return self.resize(self.values[operand.name], bits)
        if isinstance(operand, Symbol):
            if operand.name.startswith("!"):
                return self.b.not_(self.value(operand.name[1:]))
            if dtype.kind == "f" or bits == 1:
                raise NotCompiledError(i.text)
            address = self.entry.add(self.symbol("address", operand.name), I64(operand.offset))
            return self.entry.convert("trunc", address, integer(bits))
        raise NotCompiledError(i.text)

    def number(self, operand: Operand, kind: str, i: Instruction) -> Value:
        """Return a floating-point operand of type f16, f32 or f64 as a number."""
        return self.b.convert("bitcast", self.read(operand, kind, i), _FLOATS[parse_dtype(kind).itemsize])

    def write(self, operand: Operand, kind: str, value: Value, i: Instruction) -> None:
        """Set a register from a value of a PTX type, sign-extended if the type is signed."""
        if not isinstance(operand, Register):
            raise NotCompiledError(i.text)
        if operand.name == "_":
            return
        if value.type.is_float:
            value = self.bits(value)
        width = self.width(operand.name)
        if (width == 1) != (value.type.width == 1):
            raise NotCompiledError(i.text)
        self.set(operand.name, self.resize(value, width, signed=parse_dtype(kind).kind == "i"))

    def resize(self, value: Value, bits: int, signed: bool = False) -> Value:
        """Cut or extend an integer to a width."""
        own = value.type.width
        if own == bits:
            return value
        if own > bits:
            return self.b.convert("trunc", value, integer(bits))
        return self.b.convert("sext" if signed else "zext", value, integer(bits))

    def bits(self, number: Value) -> Value:
        """Return the bits of a floating-point number."""
        return self.b.convert("bitcast", number, integer(number.type.width))

    # ---- control ----------------------------------------------------------------------------------------------------

    def require(self, condition: Value, status: Value | None = None) -> None:
        """Leave the stretch with a status, INTERPRET by default, unless a condition holds: the grid runs again."""
        go_on, bail = self.function.new_block(), self.bail_block
        if status is not None:
            bail = self.function.new_block()
            Builder(self.function, bail).ret(status)
        self.b.cbranch(condition, go_on, bail)
        self.b.block = go_on

    def choose(self, condition: Value, run: Callable[[], Sequence[Value]], otherwise: Sequence[Value]) -> list[Value]:
        """Run code where a condition holds. Return its values there, elsewhere ``otherwise``."""
        origin = self.b.block
        with self.b.when(condition):
            values = run()
            end = self.b.block
        result = []
        for value, other in zip(values, otherwise, strict=True):
            phi = self.b.phi(value.type)
            phi.add(value, end)
            phi.add(other, origin)
            result.append(phi.value)
        return result
