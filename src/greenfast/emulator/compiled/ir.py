"""Text of LLVM's intermediate language: values, blocks and functions.

llvmlite has such classes, too; theirs take longer than LLVM itself (docs/performance-log.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """A value: its type, its name or constant, and the number of an integer constant."""

    type: Type
    text: str
    constant: int | None = None


@dataclass(frozen=True)
class Type:
    """A type of LLVM. width: its bits, 0 for void and pointers. A call makes a constant of it."""

    name: str
    width: int = 0
    is_float: bool = False

    def __call__(self, number: float) -> Value:
        """Return a constant."""
        if not self.is_float:
            return Value(self, str(int(number)), int(number))
        unsigned, own = _FORMATS[self.width]
        return self.from_bits(struct.unpack(unsigned, struct.pack(own, number))[0])

    def from_bits(self, bits: int) -> Value:
        """Return the floating-point constant of a bit pattern."""
        if self.width == 16:
            return Value(self, f"0xH{bits:04X}")
        if self.width == 32:  # written as the float64 of the same value, or NaN payload
            if bits & 0x7F80_0000 == 0x7F80_0000:
                bits = (bits >> 31) << 63 | 0x7FF << 52 | (bits & 0x7F_FFFF) << 29
            else:
                (bits,) = struct.unpack("<Q", struct.pack("<d", *struct.unpack("<f", struct.pack("<I", bits))))
        return Value(self, f"0x{bits:016X}")


_FORMATS = {16: ("<H", "<e"), 32: ("<I", "<f"), 64: ("<Q", "<d")}
VOID, POINTER = Type("void"), Type("ptr")
I1, I8, I16, I32, I64 = (Type(f"i{bits}", bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = Type("half", 16, True), Type("float", 32, True), Type("double", 64, True)
_INTEGERS = {t.width: t for t in (I1, I8, I16, I32, I64)}
_COMPARISONS = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


def integer(bits: int) -> Type:
    """Return the integer type of a width."""
    return _INTEGERS.get(bits) or Type(f"i{bits}", bits)


class Phi:
    """A phi instruction that gets its values later."""

    def __init__(self, block: IrBlock, index: int, value: Value) -> None:
        self._block, self._index, self.value = block, index, value
        self._incoming: list[str] = []

    def add(self, value: Value, block: IrBlock) -> None:
        """Add the value that comes from a block."""
        self._incoming.append(f"[ {value.text}, %{block.label} ]")
        text = f"{self.value.text} = phi {self.value.type.name} {', '.join(self._incoming)}"
        self._block.lines[self._index] = text


class IrBlock:
    """A basic block."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.lines: list[str] = []


class IrModule:
    """Functions and their declarations."""

    def __init__(self) -> None:
        self.functions: list[IrFunction] = []
        self.declared: dict[str, str] = {}

    def __str__(self) -> str:
        return "\n".join([*self.declared.values(), *map(str, self.functions)])


class IrFunction:
    """A function of pointers and integers that returns i64 or nothing."""

    def __init__(self, module: IrModule, name: str, arguments: Sequence[Type], result: Type) -> None:
        self.module, self.name, self.result = module, name, result
        self.arguments = [Value(kind, f"%a{n}") for n, kind in enumerate(arguments)]
        self.blocks: list[IrBlock] = []
        self._count = 0
        module.functions.append(self)

    def new_block(self) -> IrBlock:
        """Add a block."""
        self.blocks.append(IrBlock(f"b{len(self.blocks)}"))
        return self.blocks[-1]

    def new_name(self) -> str:
        """Return the name of a new value."""
        self._count += 1
        return f"%v{self._count}"

    def __str__(self) -> str:
        arguments = ", ".join(f"{a.type.name} {a.text}" for a in self.arguments)
        blocks = ["\n  ".join([f"{b.label}:", *b.lines]) for b in self.blocks]
        return "\n".join([f"define {self.result.name} @{self.name}({arguments}) {{", *blocks, "}"])


def _define_binary(
    name: str, *, left_zero: bool = False, right_zero: bool = False
) -> Callable[[Builder, Value, Value], Value]:
    """Return a method that emits an instruction of two operands; left_zero, right_zero: where 0 is neutral."""

    def emit(builder: Builder, a: Value, b: Value) -> Value:
        if right_zero and b.constant == 0:
            return a
        return b if left_zero and a.constant == 0 else builder.binary(name, a, b)

    return emit


def _define_comparison(name: str) -> Callable[[Builder, str, Value, Value], Value]:
    """Return a method that emits a comparison, such as <=; name: its name in LLVM without the order."""

    def emit(builder: Builder, order: str, a: Value, b: Value) -> Value:
        prefix = name[:-1] if name[0] == "i" and order in ("==", "!=") else name
        return builder.compare(f"{prefix}{_COMPARISONS[order]}", a, b)

    return emit


class Builder:
    """Appends instructions to a block of a function."""

    def __init__(self, function: IrFunction, block: IrBlock) -> None:
        self.function, self.block = function, block

    def _emit(self, kind: Type, text: str) -> Value:
        value = Value(kind, self.function.new_name())
        self.block.lines.append(f"{value.text} = {text}")
        return value

    def binary(self, name: str, a: Value, b: Value) -> Value:
        """Emit an instruction of two operands of one type, by its name in LLVM."""
        return self._emit(a.type, f"{name} {a.type.name} {a.text}, {b.text}")

    # The instructions themselves. A constant zero that changes nothing is left out.
    add, shl, lshr = (_define_binary(name, right_zero=True) for name in ("add", "shl", "lshr"))
    or_ = _define_binary("or", left_zero=True)
    sub, mul, and_, xor, ashr = (_define_binary(name) for name in ("sub", "mul", "and", "xor", "ashr"))
    fadd, fsub, fmul, fdiv = (_define_binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))

    def neg(self, a: Value) -> Value:
        """Emit -a."""
        return self.binary("sub", a.type(0), a)

    def not_(self, a: Value) -> Value:
        """Emit ~a."""
        return self.binary("xor", a, a.type(-1))

    def fneg(self, a: Value) -> Value:
        """Emit -a."""
        return self._emit(a.type, f"fneg {a.type.name} {a.text}")

    def compare(self, text: str, a: Value, b: Value) -> Value:
        """Emit a comparison, by its name in LLVM."""
        return self._emit(I1, f"{text} {a.type.name} {a.text}, {b.text}")

    # Comparisons of signed and unsigned integers, and of numbers: false with NaN, and true with NaN.
    icmp_signed, icmp_unsigned, fcmp_ordered, fcmp_unordered = map(
        _define_comparison, ("icmp s", "icmp u", "fcmp o", "fcmp u")
    )

    def are_ordered(self, a: Value, b: Value) -> Value:
        """Emit whether neither is NaN."""
        return self.compare("fcmp ord", a, b)

    def is_nan(self, a: Value) -> Value:
        """Emit whether a number is NaN."""
        return self.compare("fcmp uno", a, a)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """Emit a if the condition holds, else b."""
        kind = a.type.name
        return self._emit(a.type, f"select i1 {condition.text}, {kind} {a.text}, {kind} {b.text}")

    def convert(self, name: str, a: Value, kind: Type) -> Value:
        """Emit a conversion: zext, sext, trunc, bitcast, fpext, fptrunc, sitofp, uitofp, fptosi, fptoui, inttoptr."""
        if a.type == kind:
            return a
        return self._emit(kind, f"{name} {a.type.name} {a.text} to {kind.name}")

    def load(self, kind: Type, place: Value, align: int = 0) -> Value:
        """Emit a load; align: the bytes of the alignment, 0 for the type's own."""
        return self._emit(kind, f"load {kind.name}, ptr {place.text}{f', align {align}' if align else ''}")

    def store(self, value: Value, place: Value, align: int = 0) -> None:
        """Emit a store."""
        align_text = f", align {align}" if align else ""
        self.block.lines.append(f"store {value.type.name} {value.text}, ptr {place.text}{align_text}")

    def element(self, kind: Type, array: Value, index: Value) -> Value:
        """Emit the pointer to an element of an array."""
        if index.constant == 0:
            return array
        return self._emit(POINTER, f"getelementptr {kind.name}, ptr {array.text}, {index.type.name} {index.text}")

    def alloca(self, kind: Type, count: int = 1) -> Value:
        """Emit an array on the stack; only in the first block."""
        return self._emit(POINTER, f"alloca [{count} x {kind.name}]")

    def phi(self, kind: Type) -> Phi:
        """Emit a phi instruction."""
        value = Value(kind, self.function.new_name())
        self.block.lines.append("")
        return Phi(self.block, len(self.block.lines) - 1, value)

    def branch(self, target: IrBlock) -> None:
        """End the block with a jump."""
        self.block.lines.append(f"br label %{target.label}")

    def cbranch(self, condition: Value, yes: IrBlock, no: IrBlock) -> None:
        """End the block with a conditional jump."""
        self.block.lines.append(f"br i1 {condition.text}, label %{yes.label}, label %{no.label}")

    def ret(self, value: Value | None = None) -> None:
        """End the block with a return."""
        self.block.lines.append("ret void" if value is None else f"ret {value.type.name} {value.text}")

    def intrinsic(self, name: str, *arguments: Value) -> Value:
        """Emit a call of an intrinsic of LLVM. All arguments and the result have one type."""
        kind = arguments[0].type
        full = f"llvm.{name}.{ ({16: 'f16', 32: 'f32', 64: 'f64'}[kind.width] if kind.is_float else kind.name) }"
        return self.call(full, kind, *arguments)

    def call(self, name: str, result: Type, *arguments: Value) -> Value:
        """Emit a call of a function that is defined elsewhere."""
        types = ", ".join(a.type.name for a in arguments)
        self.function.module.declared[name] = f"declare {result.name} @{name}({types})"
        text = f"call {result.name} @{name}({', '.join(f'{a.type.name} {a.text}' for a in arguments)})"
        if result == VOID:
            self.block.lines.append(text)
            return Value(VOID, "")
        return self._emit(result, text)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Emit code that runs where a condition holds."""
        inside, after = self.function.new_block(), self.function.new_block()
        self.cbranch(condition, inside, after)
        self.block = inside
        yield
        self.branch(after)
        self.block = after

    @contextmanager
    def loop(self, start: Value, stop: Value) -> Iterator[Value]:
        """Emit a loop over start, ..., stop - 1, of one iteration at least."""
        origin, body, after = self.block, self.function.new_block(), self.function.new_block()
        self.branch(body)
        self.block = body
        index = self.phi(start.type)
        index.add(start, origin)
        yield index.value
        following = self.add(index.value, start.type(1))
        index.add(following, self.block)
        self.cbranch(self.icmp_signed("<", following, stop), body, after)
        self.block = after
