"""Read PTX text (PTX ISA 9.0 syntax, as NVRTC writes it) into plain data.

Only the structure is known here: statements, operands, labels and source lines. What an instruction does is the
business of the instruction modules.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache

from greenfast.device.directives import COMMENT_OR_STRING, FILE, LOC
from greenfast.emulator.ptx.literals import initial, integer, pattern
from greenfast.emulator.ptx.scopes import Scope
from greenfast.emulator.ptx.syntax import (
    SIZES,
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    SourceLine,
    Special,
    Symbol,
    Variable,
    Vector,
)
from greenfast.spec.errors import UnsupportedError, UsageError

_COMMENT = re.compile(COMMENT_OR_STRING, re.DOTALL)
_FILE = re.compile(FILE)
#: What else stands outside of functions with no semicolon.
_HEAD = re.compile(rf"\.version\s+[\d.]+|\.target\s+\w+(?:\s*,\s*\w+)*|\.address_size\s+\d+|{FILE}")
#: Sections for debuggers hold only data.
_SECTION = re.compile(r"\.section\s+[\w$.]+\s*\{[^{}]*\}")
_HEADER = re.compile(
    r"(?P<link>(?:\.(?:visible|weak|extern)\s+)*)\.(?P<kind>entry|func)\s*"
    r"(?:\((?P<results>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*(?:\((?P<params>[^)]*)\))?"
)
_VARIABLE = re.compile(
    r"\.(?P<space>global|const|shared|local|param)\s+(?:\.attribute\([^)]*\)\s+)?(?:\.align\s+(?P<align>\d+)\s+)?"
    r"(?:\.v(?P<vector>[248])\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s+(?:\.[a-z]+\s+)?(?:\.align\s+\d+\s+)?)?"  # of a parameter: what it points to
    r"(?P<name>[\w$%]+)(?P<dims>(?:\[\d*\])*)(?:\s*=\s*(?P<init>.+))?$",
    re.DOTALL,
)
_LOC = re.compile(LOC)
#: Directives in a function that change nothing of what it computes.
_IGNORED = (".pragma",)
#: The most inlined calls followed from a library's line to the caller's; beyond that (a cycle) any of them is named.
_INLINED = 16
#: Where the standard library has cuda::memcpy_async.
_MEMCPY_ASYNC = "/__memcpy_async/"
_TABLE = re.compile(r"([\w$]+)\s*:\s*\.branchtargets\s+([^;]*);")
_PROTOTYPE = re.compile(r"[\w$]+\s*:\s*\.callprototype[^;]*;")
_BRACKET = re.compile(r"[{[(})\]]")
_LABEL = re.compile(r"([\w$]+)\s*:")
_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)(\.[xyzw])?|%(laneid|n?warpid|n?smid|gridid|lanemask_(eq|l[te]|g[te]))"
    r"|%(clock(64|_hi)?|globaltimer(_lo|_hi)?|cluster_n?ctarank|is_explicit_cluster|(dynamic|total|aggr)_smem_size)"
    r"|%(envreg\d+|pm\d(_64)?|reserved_smem_offset_\w+|current_graph_exec)"
)
#: A name, perhaps in generic( ), and what is added to it; ! negates a predicate.
_OFFSET = re.compile(r"(?:generic\(\s*([\w$]+)\s*\)|(!?[%\w$.]+))\s*(?:(\+\s*-?|-)\s*(\w+))?")


class _Lines:
    """The source lines of a module's instructions.

    whole: with debug sections. text: what positions are in. library: folders of headers whose lines say nothing to a
    reader; an instruction from there stands at the call.
    """

    def __init__(self, whole: str, text: str, library: tuple[str, ...]) -> None:
        self._files = {int(n): path for n, path in _FILE.findall(whole)}
        self._library = {n for n, path in self._files.items() if path.startswith(library)}
        self._callers: dict[str, str] = {}  # "file line" that was inlined -> the line that it was inlined at, if known
        self._ends = [match.start() for match in re.finditer("\n", text)]

    def own(self, position: int) -> SourceLine:
        """The line of the PTX itself, for what no .loc directive stands before."""
        return SourceLine("ptx", bisect_left(self._ends, position) + 1)

    def source(self, loc: re.Match[str]) -> SourceLine:
        """The line of a .loc directive; an inlined line's directive follows its caller's."""
        file, line, of, at = loc.groups()
        place = f"{file} {line}"
        if of:
            self._callers[place] = f"{of} {at}"
        where, of_library = place, False
        for _ in range(_INLINED):
            number = int(where.split()[0])
            if number not in self._library:
                break
            of_library |= _MEMCPY_ASYNC in self._files[number]
            where = self._callers.get(where, place)
        number, row = map(int, where.split())
        return SourceLine(self._files.get(number, f"file {number}").rsplit("/", 1)[-1], row, of_library)


def parse(text: str, library: tuple[str, ...] = ()) -> Module:
    """Read a whole PTX file; lines in a folder of ``library`` stand for those that call them.

    Raises UsageError with the statement that could not be read.
    """
    files, text = text, _COMMENT.sub(lambda c: c[0] if c[0][0] == '"' else " " + "\n" * c[0].count("\n"), text)
    lines = _Lines(files, text, library)
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
        head = _HEAD.match(text, position) or _SECTION.match(text, position)
        if head:
            position = head.end()
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
    """Read one function from its header on; returns the position after it."""
    function = Function(header["name"], header["kind"] == "entry")
    for into, listed in ((function.params, header["params"]), (function.results, header["results"])):
        for declaration in (listed or "").split(","):
            if declaration.strip():
                variable = _variable(declaration.strip()) or _register_parameter(declaration.strip(), function)
                if variable is None:
                    raise UsageError(f"PTX: cannot read parameter {declaration.strip()!r} of {function.name}")
                into.append(variable)
    position = header.end()
    while text[position : position + 1] not in ("{", ";", ""):  # performance directives such as .maxntid
        position += 1
    if position == len(text):
        raise UsageError(f"PTX: {function.name} has no end")
    function.directives = text[header.end() : position]
    if text[position] == ";":  # a declaration only, such as vprintf's
        module.functions.setdefault(function.name, function)
        return position + 1
    scopes, position, source = [Scope(function)], position + 1, None
    scopes[0].registers.update({name: name for name in function.registers})
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
            position = loc.end()
            continue
        prototype = _PROTOTYPE.match(text, position)
        if prototype:
            position = prototype.end()
            continue
        table = _TABLE.match(text, position)
        if table:
            labels = tuple(label.strip() for label in table[2].split(","))
            function.tables[table[1]] = tuple(scopes[-1].labels.get(label, label) for label in labels)
            position = table.end()
            continue
        label = _LABEL.match(text, position)
        if label:
            scopes[-1].label(label[1])
            position = label.end()
            continue
        end = text.find(";", position)
        if end < 0:
            raise UsageError(f"PTX: {function.name} has no end")
        where = source or lines.own(position)
        _statement(" ".join(text[position:end].split()), function, where, scopes[-1])
        position = end + 1
    module.functions[function.name] = function
    return position


def _register_parameter(declaration: str, function: Function) -> Variable | None:
    """A parameter or result of a function that is a register; None for anything but a declaration of one."""
    match = re.fullmatch(r"\.reg\s*\.(\w+)\s+([%\w$]+)", declaration)
    if match is None or match[1] not in SIZES or match[1] == "b128":
        return None
    function.registers[match[2]] = match[1]
    return Variable(match[2], "reg", SIZES[match[1]], SIZES[match[1]], type=match[1])


def _statement(statement: str, function: Function, source: SourceLine | None, scope: Scope) -> None:
    """One statement of a body: a declaration, a directive to skip, or an instruction."""
    if statement.startswith(".reg"):
        declared = re.match(r"\.reg\s*\.(\w+)\s+([^.]*)$", statement)
        if declared is None or declared[1] not in SIZES or declared[1] == "b128":
            raise UsageError(f"PTX: {function.name} declares registers of a type that is not emulated: {statement}")
        for name in declared[2].split(","):
            scope.declare(name.strip(), declared[1])
    elif statement.startswith("."):
        variable = _variable(statement)
        if variable is not None:
            if variable.space == "param":  # an argument or result of a call that follows
                variable = replace(variable, name=scope.own(variable.name), space="local")
            function.variables[variable.name] = variable
        elif not statement.startswith(_IGNORED):
            raise UnsupportedError(f"PTX: {function.name} has a directive that is not emulated: {statement}")
    elif statement:
        try:
            function.code.append(_instruction(statement, source, scope))
        except (ValueError, IndexError) as e:
            raise UsageError(f"PTX: cannot read {statement!r} in {function.name}") from e


def _instruction(statement: str, source: SourceLine | None, scope: Scope) -> Instruction:
    guard, registers = None, scope.registers
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
        operands=tuple(_declared(_operand(o), scope) for o in _split(operands)),
        guard=guard,
        source=source,
        text=statement,
    )


def _declared(operand: Operand, scope: Scope) -> Operand:
    """The operand, names that were declared as registers read as such: in inline assembly they may lack the %."""
    registers = scope.registers
    if isinstance(operand, (Symbol, Register)) and operand.name in registers:
        return Register(registers[operand.name])
    if isinstance(operand, Symbol) and operand.name[1:] in registers and operand.name[0] == "!":
        return Symbol("!" + registers[operand.name[1:]])
    if isinstance(operand, Symbol) and operand.name in scope.variables:
        return Symbol(scope.variables[operand.name], operand.offset)
    if isinstance(operand, Vector):
        return Vector(tuple(_declared(item, scope) for item in operand.items))
    if isinstance(operand, Address) and operand.base is not None:
        base = _declared(operand.base, scope)
        assert isinstance(base, (Register, Symbol))
        return Address(base, operand.offset, tuple(_declared(c, scope) for c in operand.coordinates))
    return operand


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and braces."""
    if not _BRACKET.search(text):
        found = [part.strip() for part in text.split(",")]
        return found if found[-1] else found[:-1]
    found, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*found, last] if last else found


@lru_cache(maxsize=1 << 14)  # a kernel names each of its registers several times
def _operand(text: str) -> Operand:
    if text[0] in "{(":
        return Vector(tuple(_operand(item) for item in _split(text[1:-1])))
    if text[0] == "[":
        inner, *coordinates = _split(text[1:-1].strip())
        name, offset = _with_offset(inner)
        base = _operand(name)
        if isinstance(base, Immediate):
            return Address(None, base.bits + offset)
        items = _operand(coordinates[0]) if coordinates else Vector(())
        if not isinstance(base, (Register, Symbol)) or not isinstance(items, Vector):
            raise UsageError(f"PTX: cannot read the address {text!r}")
        return Address(base, offset, items.items)
    if "|" in text:
        both = tuple(_operand(item) for item in text.split("|"))
        if any(isinstance(item, Immediate) for item in both):
            raise UsageError(f"PTX: cannot read the constant expression {text!r}")
        return Vector(both)
    if _SPECIAL.fullmatch(text):
        return Special(text)
    if text[0] == "%" or text == "_":  # _ takes a result that is not used
        return Register(text)
    number = integer(text)
    if number is not None:
        return Immediate(number & (2**64 - 1))
    found = pattern(text)
    if found is not None:
        return Immediate(*found)
    if text == "WARP_SZ":
        return Immediate(32)
    name, offset = _with_offset(text)
    if name.lstrip("!")[0].isdigit():
        raise UsageError(f"PTX: cannot read the constant expression {text!r}")
    return Symbol(name, offset)


def _with_offset(text: str) -> tuple[str, int]:
    """A name, and the number that is added to it or taken from it."""
    match = _OFFSET.fullmatch(text)
    number = integer(match[4] or "0") if match else None
    if match is None or number is None:
        raise UsageError(f"PTX: cannot read the address or name {text!r}")
    negative = (match[3] or "").count("-") == 1
    return match[1] or match[2], -number if negative else number


def _variable(statement: str) -> Variable | None:
    """A variable's declaration; None for any other directive."""
    match = _VARIABLE.match(statement)
    if match is None:
        return None
    size = SIZES.get(match["type"])
    if size is None:
        raise UsageError(f"PTX: {match['name']} is of the type .{match['type']}, which is not known to the emulator")
    dims = tuple(int(dim or 0) for dim in re.findall(r"\[(\d*)\]", match["dims"]))
    if match["vector"]:
        dims = (*dims, int(match["vector"]))
    data, relocations = initial(match["init"].strip(), match["type"], size, dims) if match["init"] else (b"", ())
    whole = size * math.prod(dims)
    if data and not whole:  # name[] = { ... }: as many as there are
        whole = len(data)
    align = int(match["align"] or size * int(match["vector"] or 1))
    return Variable(match["name"], match["space"], align, whole, data, match["type"], relocations)
