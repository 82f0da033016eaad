"""Parse PTX text (PTX ISA 9.0 syntax, as NVRTC writes it) into plain data.

The parser knows only structure: statements, operands, labels and source lines. The instruction modules define the
semantics.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from greenfast.device.directives import COMMENT_OR_STRING, FILE, LOC
from greenfast.emulator.ptx.literals import Tokens, initial, integer
from greenfast.emulator.ptx.scopes import ELEMENTS, Scope
from greenfast.emulator.ptx.syntax import (
    SIZES,
    Address,
    Frame,
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
#: Other statements outside of functions that have no semicolon.
_HEAD = re.compile(rf"\.version\s+[\d.]+|\.target\s+\w+(?:\s*,\s*\w+)*|\.address_size\s+\d+|{FILE}")
#: Sections for debuggers hold only data.
_SECTION = re.compile(r"\.section\s+[\w$.]+\s*\{[^{}]*\}")
_HEADER = re.compile(
    r"(?P<link>(?:\.(?:visible|weak|extern)\s+)*)\.(?P<kind>entry|func)\s*"
    r"(?:\((?P<results>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*(?:\((?P<params>[^)]*)\))?"
)
_LINKED = re.compile(r"(?:\.(?:visible|weak|extern|common)\b\s*)*")
_SPACE = re.compile(r"\.(global|const|shared|local|param)\b\s*")
#: Text between a variable's space and its name; after .ptr the properties of a pointer.
_QUALIFIER = re.compile(
    r"\.(?:attribute\s*\([^)]*\)|align\s+(?P<align>\d+)(?=\s)|v(?P<vector>[248])\b|(?P<pointer>ptr)\b|(?P<type>\w+)\b)\s*"
)
_POINTED_TO = re.compile(r"(?:\.(?:global|const|shared|local)\b\s*)?(?:\.align\s+\d+\s+)?")
_DECLARATOR = re.compile(r"(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\s*\w*\s*\]\s*)*)(?:=\s*(?P<init>.+))?$", re.DOTALL)
#: Between a function's header and its body.
_DIRECTIVE = re.compile(
    r"\s*\.(?:(?:maxntid|reqntid|reqnctapercluster)\s+\d+(?:\s*,\s*\d+){0,2}(?![\w$])"
    r"|(?:minnctapersm|maxnctapersm|maxnreg|maxclusterrank|abi_preserve|abi_preserve_control)\s+\d+(?![\w$])"
    r"|(?:noreturn|explicitcluster|blocksareclusters)\b|attribute\s*\([^)]*\)|pragma\s+\"[^\"]*\"(?:\s*,\s*\"[^\"]*\")*\s*;)"
)
_GUARD = re.compile(r"@\s*(!?)\s*([%\w$]+)\s+")
_OPCODE = re.compile(r"([a-z]\w*)((?:\s*\.\w+(?:::\w+)*)*)(?=[^\w.:]|$)")
#: Instructions with an operand that may be an element of a variable, name[3], without brackets around it.
_MEMORY = ("ld", "ldu", "st", "atom", "red", "prefetch")
_LOC = re.compile(LOC)
_FUNCTION_NAME = re.compile(r"function_name\s+([\w$]+)")
#: A function's name in a debug section: its label, and the bytes.
_STRING = re.compile(r"^([\w$]+):\s*\.b8 ([\d,]+)\s*$", re.MULTILINE)
#: Directives in a function without effect on its results.
_IGNORED = re.compile(r'\.pragma\s+"[^"]*"(?:\s*,\s*"[^"]*")*$')
#: The most inlined calls followed from a library's line to the caller's; beyond that (a cycle) any of them is named.
_INLINED = 16
#: Folder of cuda::memcpy_async in the standard library.
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


@dataclass(frozen=True)
class _Element:
    """name[index], an element of a variable, and an addend to its address."""

    name: str
    index: int
    offset: int


@dataclass(frozen=True)
class _Sum:
    """A register and the number that is added to it, outside of an address."""

    name: str
    addend: int


class _Lines:
    """The source lines of a module's instructions.

    whole: with debug sections. text: the text that positions refer to. library: folders of headers that readers need
    not see; an instruction from there is reported at its call.
    """

    def __init__(self, whole: str, text: str, library: tuple[str, ...]) -> None:
        self._files = {int(n): path for n, path in _FILE.findall(whole)}
        self._library = {n for n, path in self._files.items() if path.startswith(library)}
        self._callers: dict[str, str] = {}  # "file line" that was inlined -> the line that it was inlined at, if known
        self._functions: dict[str, str] = {}  # "file line" -> the function that it was in last
        self._strings = {
            label: bytes(int(n) for n in data.split(",") if int(n)).decode(errors="replace")
            for label, data in _STRING.findall(whole)
        }
        self._ends = [match.start() for match in re.finditer("\n", text)]

    def own_files(self) -> tuple[str, ...]:
        """Return the paths of the source files, libraries' left out."""
        return tuple(path for n, path in self._files.items() if n not in self._library)

    def own(self, position: int) -> SourceLine:
        """Return the line of the PTX itself, for instructions without a .loc directive."""
        return SourceLine("ptx", bisect_left(self._ends, position) + 1)

    def source(self, loc: re.Match[str], function: str) -> SourceLine:
        """Return the line of a .loc directive in a function; an inlined line's directive follows its caller's."""
        file, line, of, index = loc.groups()
        location = f"{file} {line}"
        label = _FUNCTION_NAME.search(loc[0])
        self._functions[location] = self._strings.get(label[1], "") if label else function
        if of:
            self._callers[location] = f"{of} {index}"
        else:
            self._callers.pop(location, None)
        stack: list[Frame] = []
        of_library, where = False, location
        for _ in range(_INLINED):
            number, row = map(int, where.split())
            if number in self._library:
                of_library |= not stack and _MEMCPY_ASYNC in self._files[number]
            else:
                stack.append(Frame(self._name(number), row, self._functions.get(where, "")))
            if where not in self._callers:
                break
            where = self._callers[where]
        if not stack:
            number, row = map(int, location.split())
            stack.append(Frame(self._name(number), row))
        return SourceLine(stack[0].file, stack[0].line, of_library, tuple(stack))

    def _name(self, number: int) -> str:
        path: str = self._files.get(number, f"file {number}")
        return path.rsplit("/", 1)[-1]


def parse(text: str, library: tuple[str, ...] = ()) -> Module:
    """Parse a whole PTX file. Lines in a folder of ``library`` are reported at their calls.

    Raises UsageError with the statement that could not be parsed.
    """
    files, text = text, _COMMENT.sub(lambda c: c[0] if c[0][0] == '"' else " " + "\n" * c[0].count("\n"), text)
    lines = _Lines(files, text, library)
    module = Module(files=lines.own_files())
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
        variables = _variables(statement)
        if variables is None and not statement.startswith("."):
            raise UsageError(f"PTX: cannot read {statement[:80]!r}")
        if variables is None and not _IGNORED.match(statement):
            raise UnsupportedError(f"PTX: a statement that is not known to the emulator: {statement[:80]!r}")
        for variable in variables or ():
            # A module's declaration has its definition in another module; uses of it are refused.
            if variable.space == "shared" or ".extern" not in _LINKED.match(statement)[0]:  # type: ignore[index]
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
                variables = _variables(declaration.strip()) or _register_parameter(declaration.strip(), function)
                if variables is None or len(variables) != 1:
                    raise UsageError(f"PTX: cannot read parameter {declaration.strip()!r} of {function.name}")
                into += variables
    position = header.end()
    while directive := _DIRECTIVE.match(text, position):
        position = directive.end()
    function.directives = text[header.end() : position]
    position = _skip_space(text, position)
    if position == len(text):
        raise UsageError(f"PTX: {function.name} has no end")
    if text[position] not in "{;":
        excerpt = text[position : position + 80].split("{")[0].strip()
        if text[position] != ".":
            raise UsageError(f"PTX: cannot read {excerpt!r} after {function.name}")
        raise UnsupportedError(f"PTX: {function.name} has a directive that is not emulated: {excerpt}")
    if text[position] == ";":  # a declaration only, such as vprintf's
        module.functions.setdefault(function.name, function)
        return position + 1
    scopes, position, source = [Scope(function, module)], position + 1, None
    scopes[0].registers.update({name: name for name in function.registers})
    while scopes:
        position = _skip_space(text, position)
        if position >= len(text):
            raise UsageError(f"PTX: {function.name} has no end")
        char = text[position]
        if char in "{}":
            if char == "{":
                scopes.append(Scope(function, module, scopes[-1], f"@{position}"))
            else:
                scopes.pop().close()
            position += 1
            continue
        loc = _LOC.match(text, position)
        if loc:
            source = lines.source(loc, function.name)
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


def _register_parameter(declaration: str, function: Function) -> list[Variable] | None:
    """Return a parameter or result of a function that is a register; None for anything but a declaration of one."""
    match = re.fullmatch(r"\.reg\s*\.(\w+)\s+([%\w$]+)", declaration)
    if match is None or match[1] not in SIZES or match[1] == "b128":
        return None
    function.registers[match[2]] = match[1]
    return [Variable(match[2], "reg", SIZES[match[1]], SIZES[match[1]], type=match[1])]


def _statement(statement: str, function: Function, source: SourceLine | None, scope: Scope) -> None:
    """Parse one statement of a body: a declaration, a directive to skip, or an instruction."""
    if re.match(r"\.reg\b", statement):
        declared = re.match(r"\.reg\s*(?:\.v([24])\s*)?\.(\w+)\s+(.*)$", statement)
        if declared is None or declared[2] not in SIZES:
            raise UsageError(f"PTX: {function.name} declares registers of an unknown type: {statement}")
        if declared[2] == "b128":
            raise UnsupportedError(
                f"PTX: {function.name} declares registers of a type that is not emulated: {statement}"
            )
        for name in declared[3].split(","):
            scope.declare(name.strip(), declared[2], int(declared[1] or 0))
    elif statement.startswith("."):
        variables = _variables(statement)
        if variables is None and not _IGNORED.match(statement):
            raise UnsupportedError(f"PTX: {function.name} has a directive that is not emulated: {statement}")
        for variable in variables or ():
            _declare(variable, function, scope)
    else:
        try:
            function.code += _instructions(statement, source, scope)
        except UsageError as e:
            why = str(e).removeprefix("PTX: ")
            raise UsageError(
                str(e) if statement in why else f"PTX: cannot read {statement!r} in {function.name}: {why}"
            ) from None
        except (ValueError, IndexError) as e:
            raise UsageError(f"PTX: cannot read {statement!r} in {function.name}") from e


def _declare(variable: Variable, function: Function, scope: Scope) -> None:
    """Declare a variable in a body; it is visible there and in nested blocks."""
    own = scope.own(variable.name)
    relocations = tuple(replace(r, symbol=scope.variables.get(r.symbol, r.symbol)) for r in variable.relocations)
    if variable.space in ("global", "const"):  # it exists once, as one of the module does
        scope.variables[variable.name] = own = f"{own}@{function.name}"
        scope.module.variables[own] = replace(variable, name=own, relocations=relocations)
        return
    # A parameter here is an argument or the result of a call that follows.
    space = "local" if variable.space == "param" else variable.space
    function.variables[own] = replace(variable, name=own, space=space, relocations=relocations)


def _instructions(statement: str, source: SourceLine | None, scope: Scope) -> list[Instruction]:
    """Return the instruction of a statement, after the additions for operands that are a register plus a number."""
    guard, remainder = None, statement
    if remainder.startswith("@"):
        match = _GUARD.match(remainder)
        name = scope.register(match[2]) if match else None
        if match is None or name is None or scope.function.register_kind(name) != "pred":
            raise UsageError(f"PTX: cannot read {statement!r}: its guard is no predicate of {scope.function.name}")
        guard, remainder = (name, bool(match[1])), remainder[match.end() :]
    opcode = _OPCODE.match(remainder)
    if opcode is None:
        raise UsageError(f"PTX: cannot read {statement!r} in {scope.function.name}")
    parts = tuple(part.strip() for part in opcode[2].replace("::", ":").split(".")[1:])
    made: list[Instruction] = []
    operands: list[Operand] = []
    for text in _split(remainder[opcode.end() :].strip()):
        operand = _operand(text, opcode[1] == "call")
        if isinstance(operand, _Element) and opcode[1] in _MEMORY:
            base = _declared(operand, scope)
            assert isinstance(base, Symbol)
            operands.append(Address(Symbol(base.name), base.offset))
        elif isinstance(operand, _Sum) and scope.register(operand.name):
            if not operands:
                raise UsageError(f"PTX: cannot read {statement!r}: a number added to a result")
            made.append(_sum(operand, guard, source, statement, scope))
            operands.append(made[-1].operands[0])
        else:
            operands.append(_declared(operand, scope))
    return [*made, Instruction(opcode[1], parts, tuple(operands), guard, source, statement)]


def _sum(
    operand: _Sum, guard: tuple[str, bool] | None, source: SourceLine | None, statement: str, scope: Scope
) -> Instruction:
    """Return the addition for an operand ``register + number``, into a new register."""
    function, name = scope.function, str(scope.register(operand.name))
    kind = str(function.register_kind(name))
    if kind[0] not in "bus" or SIZES[kind] == 1:
        raise UsageError(f"PTX: cannot read {statement!r}: a number added to a register of type .{kind}")
    own = f"%~sum{len(function.code)}.{len(function.registers)}~"
    function.registers[own] = kind
    addend = Immediate(operand.addend & (2**64 - 1))
    return Instruction(
        "add", (f"u{8 * SIZES[kind]}",), (Register(own), Register(name), addend), guard, source, statement
    )


def _declared(operand: Operand | _Element | _Sum, scope: Scope) -> Operand:
    """Resolve names of declared registers in an operand: inline assembly may omit the %."""
    if isinstance(operand, Register):
        if operand.name == "_":
            return operand
        own = scope.register(operand.name)
        if own is None:
            return _vector_register(operand.name, scope)
        return operand if own == operand.name else Register(own)
    if isinstance(operand, _Sum):
        return Symbol(scope.variables.get(operand.name, operand.name), operand.addend)
    if isinstance(operand, Symbol):
        if operand.name[0] == "!":
            own = scope.register(operand.name[1:])
            if own is None or scope.function.register_kind(own) != "pred":
                raise UsageError(f"PTX: {operand.name} in {scope.function.name} is no predicate, and cannot be negated")
            return Symbol("!" + own)
        own = scope.register(operand.name)
        if own is not None:
            return Register(own)
        if operand.name in scope.vectors or "." in operand.name:
            return _vector_register(operand.name, scope)
        if operand.name in scope.variables:
            return Symbol(scope.variables[operand.name], operand.offset)
        return operand
    if isinstance(operand, _Element):
        name = scope.variables.get(operand.name, operand.name)
        variable = scope.function.variables.get(name) or scope.module.variables.get(name)
        if variable is None:
            raise UsageError(f"PTX: {operand.name}[{operand.index}] in {scope.function.name} is of no known variable")
        return Symbol(name, operand.index * variable.element + operand.offset)
    if isinstance(operand, Vector):
        return Vector(tuple(_declared(item, scope) for item in operand.items))
    if isinstance(operand, Address) and operand.base is not None:
        base = operand.base
        if isinstance(base, _Element):
            symbol = _declared(base, scope)
            assert isinstance(symbol, Symbol)
            base, operand = Symbol(symbol.name), replace(operand, offset=operand.offset + symbol.offset)
        own_base = _declared(base, scope)
        if not isinstance(own_base, (Register, Symbol)) or own_base.name == "_":
            raise UsageError(f"PTX: cannot read an address in {scope.function.name}: its base is no register or name")
        return Address(own_base, operand.offset, tuple(_declared(c, scope) for c in operand.coordinates))
    return operand


def _vector_register(name: str, scope: Scope) -> Operand:
    """Return the elements of a vector register. Raises UsageError for a register that is not declared."""
    if name not in scope.vectors:
        raise UsageError(f"PTX: the register {name} is not declared in {scope.function.name}")
    return Vector(tuple(Register(scope.registers[f"{name}.{e}"]) for e in ELEMENTS[: scope.vectors[name]]))


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and braces. Raises UsageError if brackets do not match."""
    if not text:
        return []
    if not _BRACKET.search(text):
        return [part.strip() for part in text.split(",")]
    result, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if depth < 0:
            break
        if char == "," and depth == 0:
            result.append(text[start:i].strip())
            start = i + 1
    if depth:
        raise UsageError(f"PTX: cannot read the operands {text!r}")
    return [*result, text[start:].strip()]


#: Registers as compilers name them; no special one is named so.
_PLAIN = re.compile(r"%(?!pm)[a-z]{1,2}\d+")


@lru_cache(maxsize=1 << 14)  # a kernel names each of its registers several times
def _operand(text: str, of_call: bool = False) -> Operand | _Element | _Sum:
    """Parse one operand. Raises UsageError for invalid text."""
    if _PLAIN.fullmatch(text):
        return Register(text)
    tokens = Tokens(text, "the operand")
    if tokens.accept("{"):
        result: Operand | _Element | _Sum = _list(tokens, "}")
    elif of_call and tokens.accept("("):
        result = _list(tokens, ")")
    elif tokens.accept("["):
        result = _address(tokens)
    else:
        result = _scalar(tokens)
        if tokens.accept("|"):  # two results
            result = Vector((result, _scalar(tokens)))  # type: ignore[arg-type]
            if not all(isinstance(o, (Register, Symbol)) and o.name[0] != "!" for o in result.items):
                raise tokens.error()
    tokens.end()
    return result


def _list(tokens: Tokens, close: str) -> Vector:
    """Return the operands up to a bracket; of a call there may be none."""
    items: list[Any] = []
    while not (tokens.peek() == close and not items):
        items.append(_scalar(tokens))
        if isinstance(items[-1], (_Element, _Sum)):
            raise tokens.error()
        if tokens.peek() == close:
            break
        tokens.expect(",")
    tokens.expect(close)
    if not items and close == "}":
        raise tokens.error()
    return Vector(tuple(items))


def _address(tokens: Tokens) -> Address:
    """Parse an address, after its opening bracket."""
    if tokens.kind() == "name" and tokens.peek() != "WARP_SZ":
        name = tokens.next()
        base: Any = _named(name)
        if not isinstance(base, (Register, Symbol)):
            raise tokens.error()
        if tokens.accept("["):
            base = _Element(name, _index(tokens), 0)
        offset = tokens.offset()
    else:
        base, offset = None, _whole(tokens)
    coordinates: tuple[Operand, ...] = ()
    if tokens.accept(","):
        tokens.expect("{")
        coordinates = _list(tokens, "}").items
    tokens.expect("]")
    return Address(base, offset, coordinates)


def _scalar(tokens: Tokens) -> Operand | _Element | _Sum:
    """Parse a register or name with an optional number, a negated predicate, or a constant expression."""
    if tokens.peek() == "!" and tokens.kind(1) == "name" and tokens.peek(1) != "WARP_SZ":
        tokens.next()
        return Symbol("!" + tokens.next())
    if tokens.kind() != "name" or tokens.peek() == "WARP_SZ":
        return Immediate(*tokens.constant().pattern())
    name = tokens.next()
    named = _named(name)
    if isinstance(named, Special) or name == "_":
        return named
    if tokens.accept("["):
        index = _index(tokens)
        return _Element(name, index, tokens.offset())
    addend = tokens.offset()
    return _Sum(name, addend) if addend else named


def _index(tokens: Tokens) -> int:
    """Return the number in brackets, after the opening one."""
    result = _whole(tokens)
    tokens.expect("]")
    return result


def _whole(tokens: Tokens) -> int:
    """Parse an integer constant expression."""
    result = tokens.constant()
    if result.kind == "f":
        raise tokens.error()
    return int(result.value)


def _named(name: str) -> Register | Special | Symbol:
    """Return the operand for a plain name. Names other than special registers are resolved in their scope."""
    if _SPECIAL.fullmatch(name):
        return Special(name)
    return Register(name) if name[0] == "%" or name == "_" else Symbol(name)


def _variables(statement: str) -> list[Variable] | None:
    """Return the variables that a statement declares; None for any other directive."""
    position = _LINKED.match(statement).end()  # type: ignore[union-attr]
    space = _SPACE.match(statement, position)
    if space is None:
        return None
    align, vector, kind, position = 0, 0, "", space.end()
    while qualifier := _QUALIFIER.match(statement, position):
        position = qualifier.end()
        if qualifier["align"]:
            align = int(qualifier["align"])
        elif qualifier["vector"]:
            vector = int(qualifier["vector"])
        elif qualifier["pointer"] and kind:
            position = _POINTED_TO.match(statement, position).end()  # type: ignore[union-attr]
        elif qualifier["type"] and not kind:
            kind = qualifier["type"]
        elif not qualifier[0].startswith(".attribute"):
            raise UsageError(f"PTX: cannot read the variable {statement!r}")
    if align & (align - 1):
        raise UsageError(f"PTX: an alignment of {align}, not a power of two: {statement!r}")
    result = []
    for text in _split(statement[position:].strip()):
        match = _DECLARATOR.match(text)
        if match is None:
            raise UsageError(f"PTX: cannot read the variable {statement!r}")
        size = SIZES.get(kind)
        if size is None or kind == "pred":
            raise UsageError(f"PTX: {match['name']} is of the type .{kind}, unknown to the emulator")
        result.append(_variable(match, space[1], kind, size, vector, align))
    if not result:
        raise UsageError(f"PTX: cannot read the variable {statement!r}")
    return result


def _variable(match: re.Match[str], space: str, kind: str, size: int, vector: int, align: int) -> Variable:
    """Parse a variable's name, dimensions and initial value."""
    lengths = re.findall(r"\[\s*(\w*)\s*\]", match["dims"])
    counts = [32 if n == "WARP_SZ" else integer(n or "0") for n in lengths]
    if any(count is None for count in counts):
        raise UsageError(f"PTX: cannot read the extents {match['dims'].strip()!r} of {match['name']}")
    dims = tuple(int(count or 0) for count in counts)
    if vector:
        dims = (*dims, vector)
    data, relocations = initial(match["init"].strip(), kind, size, dims) if match["init"] else (b"", ())
    whole = size * math.prod(dims)
    if data and not whole:  # name[] = { ... }: as many as there are
        whole = len(data)
    element = size * (vector or 1)
    return Variable(match["name"], space, align or element, whole, data, kind, relocations, element)
