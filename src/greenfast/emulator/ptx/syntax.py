"""A PTX module as plain data, the result of parser.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from greenfast.emulator.ptx.literals import Relocation
from greenfast.emulator.ptx.names import ArrayShape, demangle
from greenfast.spec.errors import UsageError

_LONG_LIST = re.compile(r"\{\s*([^{},]+?)\s*(?:,[^{},]+){8,},\s*([^{},]+?)\s*\}")


@dataclass(frozen=True)
class Register:
    """A declared register, such as %r12."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal. ``bits`` is the two's complement of an integer, or the pattern of a float of ``width`` bits."""

    bits: int
    width: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable, parameter, function or label by name, plus ``offset`` bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """[base + offset], the base a register or a symbol (or None for an absolute address).

    coordinates: as in [tensor map, {c0, c1, ...}], innermost first.
    """

    base: Register | Symbol | None
    offset: int
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}."""

    items: tuple[Operand, ...]


Operand: TypeAlias = "Register | Special | Immediate | Symbol | Address | Vector"


def list_registers(operand: Operand) -> list[str]:
    """Return the registers in an operand."""
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Vector):
        return [name for item in operand.items for name in list_registers(item)]
    if isinstance(operand, Address):
        base = [operand.base.name] if isinstance(operand.base, Register) else []
        return [*base, *(name for item in operand.coordinates for name in list_registers(item))]
    if isinstance(operand, Symbol):  # a negated predicate, or two predicates
        return [part.lstrip("!") for part in operand.name.split("|")]
    return []


@dataclass(frozen=True)
class Frame:
    """A line of a function; ``function`` is mangled, or empty if it is not known."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        location = f"{self.file}:{self.line}"
        return f"{demangle(self.function)} at {location}" if self.function else location


@dataclass(frozen=True)
class SourceLine:
    """The source line of an instruction; memcpy_async: it was inlined from cuda::memcpy_async of the standard library.

    stack: the line and its call sites, outermost last; empty if they are not known.
    """

    file: str
    line: int
    memcpy_async: bool = field(default=False, compare=False)
    stack: tuple[Frame, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def shown(self) -> Frame:
        """The line to show first: the innermost one in the kernel's own file, so a caller's in place of a header's."""
        if not self.stack:
            return Frame(self.file, self.line)
        return next(frame for frame in self.stack if frame.file == self.stack[-1].file)

    def describe(self) -> str:
        """Return the line to show, followed by all lines if there are several."""
        if len(self.stack) < 2:
            return str(self)
        shown = self.shown
        return f"{shown.file}:{shown.line} [{', '.join(map(str, self.stack))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``name`` is the opcode's first word, ``parts`` the words after it.

    guard: the predicate register's name and whether it is negated.
    """

    name: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    source: SourceLine | None
    text: str

    @property
    def place(self) -> str:
        """Its line in the source, with the lines where it was inlined or called."""
        return self.source.describe() if self.source else "unknown line"

    @property
    def short_text(self) -> str:
        """Its text for messages, with the ends of long register lists: a wgmma has up to 128 accumulators."""
        return _LONG_LIST.sub(r"{\1, ..., \2}", self.text)


@dataclass(frozen=True)
class Variable:
    """A variable of a module or function.

    space: global, const, shared, local, param, or reg for a parameter of a function in a register. type: type of an
    element.

    data: the initial value before ``relocations`` are applied. element: bytes of an element (a scalar or a vector).
    """

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""
    type: str = ""
    relocations: tuple[Relocation, ...] = ()
    element: int = 0


@dataclass
class Function:
    """A kernel or device function: parameters in order, register classes, variables, code and label positions."""

    name: str
    is_entry: bool
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name, or prefix of a %name<N> declaration -> type
    variables: dict[str, Variable] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    directives: str = ""  # such as .maxntid 128 .reqnctapercluster 2
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of brx.idx -> labels
    frames: dict[str, Any] = field(default_factory=dict)  # of recursive functions, see recursion.py
    shapes: dict[str, ArrayShape] = field(default_factory=dict)  # array declarations of the source, if known

    def register_kind(self, name: str) -> str | None:
        """Return the type of a register, b32 and the like; None for one that is not declared."""
        return self.registers.get(name) or self.registers.get(name.rstrip("0123456789"))


@dataclass
class Module:
    """A parsed PTX file."""

    target: str = ""
    files: tuple[str, ...] = ()
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    def entry(self, name: str) -> Function:
        """Return the kernel of that name; raises UsageError naming the kernels there are."""
        function = self.functions.get(name)
        if function is None or not function.is_entry:
            entries = [f.name for f in self.functions.values() if f.is_entry]
            raise UsageError(f"no kernel {name!r} in the PTX; there are: {', '.join(entries) or 'none'}")
        return function


SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4}
SIZES |= {"f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 1}

#: Special registers that hold a clock.
CLOCKS = ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo")
