"""Read PTX text (PTX ISA 9.0 syntax, as NVRTC writes it) into plain data.

Only the structure is known here: statements, operands, labels and source lines. What an instruction does is the
business of the instruction modules.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import TypeAlias

from greenfast.emulator.scopes import Scope
from greenfast.spec.errors import UsageError


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
    """A literal. ``bits`` is the two's complement of an integer, or the bit pattern of a 0f/0d literal."""

    bits: int
    is_float: bool = False


@dataclass(frozen=True)
class Symbol:
    """A variable, parameter, function or label by name."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset], the base a register or a symbol (or None for an absolute address).

    coordinates: those of [tensor map, {c0, c1, ...}], innermost first.
    """

    base: Register | Symbol | None
    offset: int
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}."""

    items: tuple[Operand, ...]


Operand: TypeAlias = "Register | Special | Immediate | Symbol | Address | Vector"


@dataclass(frozen=True)
class SourceLine:
    """Where an instruction comes from."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


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


@dataclass(frozen=True)
class Variable:
    """A variable of a module or function. ``space`` is global, const, shared, local or param; ``type`` an element's."""

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""
    type: str = ""


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


@dataclass
class Module:
    """A parsed PTX file."""

    target: str = ""
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    def entry(self, name: str) -> Function:
        """The kernel of that name; raises UsageError naming the kernels there are."""
        function = self.functions.get(name)
        if function is None or not function.is_entry:
            entries = [f.name for f in self.functions.values() if f.is_entry]
            raise UsageError(f"no kernel {name!r} in the PTX; there are: {', '.join(entries) or 'none'}")
        return function


SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4}
SIZES |= {"f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 1}

#: Special registers that hold a clock.
CLOCKS = ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FILE = re.compile(r"\.file\s+(\d+)\s+\"([^\"]*)\"")
_HEADER = re.compile(
    r"(?P<link>(?:\.(?:visible|weak|extern)\s+)*)\.(?P<kind>entry|func)\s*"
    r"(?:\((?P<results>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*(?:\((?P<params>[^)]*)\))?"
)
_VARIABLE = re.compile(
    r"\.(?P<space>global|const|shared|local|param)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s+(?:\.[a-z]+\s+)?(?:\.align\s+\d+\s+)?)?"  # of a parameter: what it points to
    r"(?P<name>[\w$%]+)(?P<dims>(?:\[\d*\])*)(?:\s*=\s*(?P<init>.+))?$",
    re.DOTALL,
)
_LOC = re.compile(r"\.loc\s+(\d+ \d+)(?: \d+)?(?:.*?inlined_at (\d+ \d+))?")
#: Up to so many calls lead from a library's line to the caller's own; beyond, as in a circle, any of them may stand.
_INLINED = 16
_LABEL = re.compile(r"([\w$]+)\s*:")
_SPECIALS: tuple[str, ...] = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid", "%nwarpid")
_SPECIALS += ("%smid", "%nsmid", "%gridid")
_SPECIALS += ("%clock", "%globaltimer", "%lanemask", "%dynamic_smem_size", "%total_smem_size", "%envreg")
_SPECIALS += ("%cluster", "%nclusterid", "%is_explicit_cluster", "%aggr_smem_size")


class _Lines:
    """The source lines of a module's instructions.

    library: folders of headers whose lines say nothing to a reader; an instruction from there stands at the call.
    """

    def __init__(self, text: str, library: tuple[str, ...]) -> None:
        self._files = {int(n): path for n, path in _FILE.findall(text)}
        self._library = {n for n, path in self._files.items() if path.startswith(library)}
        self._callers: dict[str, str] = {}  # "file line" that was inlined -> the line that it was inlined at, if known

    def source(self, loc: re.Match[str]) -> SourceLine:
        """The line of a .loc directive; the directive of an inlined line follows that of its caller."""
        place, caller = loc.groups()
        if caller:
            self._callers[place] = caller
        where = place
        for _ in range(_INLINED):
            if int(where.split()[0]) not in self._library:
                break
            where = self._callers.get(where, place)
        file, line = map(int, where.split())
        return SourceLine(self._files.get(file, f"file {file}").rsplit("/", 1)[-1], line)


def parse(text: str, library: tuple[str, ...] = ()) -> Module:
    """Read a whole PTX file; lines in a folder of ``library`` stand for those that call them.

    Raises UsageError with the statement that could not be read.
    """
    lines = _Lines(text, library)
    # Debug sections hold only data for debuggers; .loc lines need no symbol of theirs.
    text = _COMMENT.sub("", text.split("\n\t.section", 1)[0])
    module = Module()
    target = re.search(r"\.target\s+(\w+)", text)
    module.target = target[1] if target else ""
    position = 0
    while position < len(text):
        position = _skip_space(text, position)
        if position >= len(text):
            break
        header = _HEADER.match(text, position)
        if header:
            position = _function(text, header, module, lines)
            continue
        if text.startswith((".version", ".target", ".address_size", ".file"), position):
            position = text.find("\n", position) + 1 or len(text)
            continue
        end = text.find(";", position)
        if end < 0:
            raise UsageError(f"PTX: cannot read {text[position : position + 80]!r}")
        statement = text[position:end].strip()
        linked = re.sub(r"^(?:\.(?:visible|weak|extern|common)\s+)*", "", statement)
        variable = _variable(linked)
        if variable is not None:
            module.variables[variable.name] = variable
        position = end + 1
    return module


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _function(text: str, header: re.Match[str], module: Module, lines: _Lines) -> int:
    """Read one function from its header on; returns the position behind it."""
    function = Function(header["name"], header["kind"] == "entry")
    for into, listed in ((function.params, header["params"]), (function.results, header["results"])):
        for declaration in (listed or "").split(","):
            if declaration.strip():
                variable = _variable(declaration.strip())
                if variable is None:
                    raise UsageError(f"PTX: cannot read parameter {declaration.strip()!r} of {function.name}")
                into.append(variable)
    position = header.end()
    while text[position : position + 1] not in ("{", ";", ""):  # performance directives such as .maxntid
        position += 1
    if position == len(text):
        raise UsageError(f"PTX: {function.name} has no end")
    function.directives = text[header.end() : position]
    if text[position] == ";":  # a declaration only, such as that of vprintf
        module.functions.setdefault(function.name, function)
        return position + 1
    scopes, position, source = [Scope(function)], position + 1, None
    while scopes:
        position = _skip_space(text, position)
        if position >= len(text):
            raise UsageError(f"PTX: {function.name} has no end")
        char = text[position]
        if char in "{}":
            if char == "{":
                scopes.append(Scope(function, scopes[-1], f"@{position}"))
            else:
                scopes.pop().close()
            position += 1
            continue
        loc = _LOC.match(text, position)
        if loc:
            source = lines.source(loc)
            position = text.find("\n", position) + 1 or len(text)
            continue
        label = _LABEL.match(text, position)
        if label:
            scopes[-1].label(label[1])
            position = label.end()
            continue
        end = text.find(";", position)
        if end < 0:
            raise UsageError(f"PTX: {function.name} has no end")
        _statement(" ".join(text[position:end].split()), function, source, scopes[-1])
        position = end + 1
    module.functions[function.name] = function
    return position


def _statement(statement: str, function: Function, source: SourceLine | None, scope: Scope) -> None:
    """One statement of a body: a declaration, a directive to skip, or an instruction."""
    if statement.startswith(".reg"):
        kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)", statement).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            scope.declare(name.strip(), kind)
    elif statement.startswith("."):
        variable = _variable(statement)
        if variable is not None:
            function.variables[variable.name] = variable
    elif statement:
        function.code.append(_instruction(statement, source, scope.registers))


def _instruction(statement: str, source: SourceLine | None, registers: dict[str, str]) -> Instruction:
    guard = None
    rest = statement
    if rest.startswith("@"):
        predicate, rest = rest[1:].split(None, 1)
        name = predicate.lstrip("!")
        guard = (registers.get(name, name), predicate.startswith("!"))
    opcode, _, operands = rest.partition(" ")
    name, *parts = opcode.replace("::", ":").split(".")
    return Instruction(
        name=name,
        parts=tuple(parts),
        operands=tuple(_declared(_operand(o), registers) for o in _split(operands)),
        guard=guard,
        source=source,
        text=statement,
    )


def _declared(operand: Operand, registers: dict[str, str]) -> Operand:
    """The operand, names that were declared as registers read as such: in inline assembly they may lack the %."""
    if isinstance(operand, (Symbol, Register)) and operand.name in registers:
        return Register(registers[operand.name])
    if isinstance(operand, Symbol) and operand.name[1:] in registers and operand.name[0] == "!":
        return Symbol("!" + registers[operand.name[1:]])
    if isinstance(operand, Vector):
        return Vector(tuple(_declared(item, registers) for item in operand.items))
    if isinstance(operand, Address) and operand.base is not None:
        base = _declared(operand.base, registers)
        assert isinstance(base, (Register, Symbol))
        return Address(base, operand.offset, tuple(_declared(c, registers) for c in operand.coordinates))
    return operand


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    found, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*found, last] if last else found


def _operand(text: str) -> Operand:
    if text[0] in "{(":
        return Vector(tuple(_operand(item) for item in _split(text[1:-1])))
    if text[0] == "[":
        inner, *coordinates = _split(text[1:-1].strip())
        match = re.fullmatch(r"([%\w$.]+)\s*(?:\+\s*(-?\d+))?", inner)
        if match is None:
            raise UsageError(f"PTX: cannot read the address {text!r}")
        base = _operand(match[1])
        if isinstance(base, Immediate):
            return Address(None, base.bits)
        assert isinstance(base, (Register, Symbol))
        items = _operand(coordinates[0]) if coordinates else Vector(())
        assert isinstance(items, Vector)
        return Address(base, int(match[2] or 0), items.items)
    if "|" in text:
        return Vector(tuple(_operand(item) for item in text.split("|")))
    if text.startswith(_SPECIALS):
        return Special(text)
    if text[0] == "%" or text == "_":  # _ takes a result that nobody wants
        return Register(text)
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Immediate(int(text[2:], 16), True)
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Immediate(int(text[2:], 16), True)
    if re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
        return Immediate(int(text.rstrip("U"), 0) & (2**64 - 1))
    if text == "WARP_SZ":
        return Immediate(32)
    return Symbol(text)


def _variable(statement: str) -> Variable | None:
    """A variable's declaration; None for any other directive."""
    match = _VARIABLE.match(statement)
    if match is None:
        return None
    size = SIZES[match["type"]]
    count = 1
    for dim in re.findall(r"\[(\d*)\]", match["dims"]):
        count *= int(dim or 0)
    data = b""
    if match["init"]:
        values = re.findall(r"0[fFdD][0-9a-fA-F]+|-?0[xX][0-9a-fA-F]+|-?\d+", match["init"])
        for value in values:
            if value[:2] in ("0f", "0F", "0d", "0D"):
                data += int(value[2:], 16).to_bytes(size, "little")
            else:
                data += struct.pack("<Q", int(value, 0) & (2**64 - 1))[:size]
    return Variable(match["name"], match["space"], int(match["align"] or size), size * count, data, match["type"])
