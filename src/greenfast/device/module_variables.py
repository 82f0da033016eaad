"""Find the memory of a module that outlives a launch: a kernel could keep state there.

Variables that the PTX never writes are no state. A dataflow analysis finds them: all uses of their addresses are loads.
An address is followed through copies, conversions between address spaces, sums with a number, selections, and as 64
bits through local memory and call parameters. Any other use may hide it in a table, the carry flag, a branch or a
store; the variable then counts as written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from greenfast.device.cubin import UNDEFINED, ElfSection, ElfSymbol, Image, ImageError
from greenfast.device.directives import COMMENT_OR_STRING, FILE, LOC
from greenfast.spec.errors import DamagedCodeError

#: Comments, strings, and the two directives that no semicolon ends: an instruction may follow them in their line.
_COMMENTS = re.compile(f"{FILE}|{LOC}|{COMMENT_OR_STRING}", re.DOTALL)
_LIST = re.compile(r"\{([^{};]*)\}")  # a vector of registers or a variable's initial values; a scope holds statements
_WORD = re.compile(r"(?<![\w$%'])[a-zA-Z_$%][\w$%']*")  # no number
_DECLARED = re.compile(r"[^;{}()\[=]*\.(?:global|const)\b[^;{}()\[=]*?([\w$%]+)[ \t]*[\[=;]")
_VARIABLE = re.compile(r"\.(?:global|const)\b")
_PARAMETER = re.compile(r"\.param\b.*?([\w$%]+)(?:\[\d*\])?$", re.DOTALL)
_STATEMENT = re.compile(
    r"(?:[\w$%]+\s*:\s*)*(?:@!?\s*(?P<guard>[\w$%]+)\s+)?(?P<opcode>[a-zA-Z.][\w.:]*)(?:\s+(?P<operands>.*))?$",
    re.DOTALL,
)
_LOAD = re.compile(r"(?:ldu?|prefetchu?)\b")
#: Instructions that compute an address from an address, with the indices of the possible source operands. A sum or a
#: difference of two addresses is no address.
_ADDRESS_OPERATIONS = (
    (re.compile(r"(?:mov\.[bus]64|cvta(?:\.to)?(?:\.\w+(?:::\w+)?)?\.[us]64|cvt\.[us]64\.[us]64)$"), (1,)),
    (re.compile(r"add\.[us]64$"), (1, 2)),
    (re.compile(r"sub\.[us]64$"), (1,)),
    (re.compile(r"mad\.(?:lo\.[us]64|wide\.[us]32)$"), (3,)),
    (re.compile(r"selp\.[bus]64$"), (1, 2)),
)
_SELECTION = "selp"
#: A register, a variable with an offset, or a number.
_SIMPLE = re.compile(r"(?:[a-zA-Z_$%][\w$%']*(?:\s*[+-]\s*\w+)?|[+-]?\d\w*)$")
_OPERAND = re.compile(r"(?:\([^()]*\)|\[[^\[\]]*\]|[^,()\[\]])+")
_WHOLE_ADDRESS = re.compile(r"\.[bus]64$")
_STORE_TO_LOCAL = re.compile(r"st(?:\.(?:weak|volatile|local|L\w+(?:::\w+)?|wb|cg|cs|wt|v\d))*\.[busf]\d+$")
#: Loads from other memory than local; stores to a parameter are followed by its name.
_LOAD_ELSEWHERE = re.compile(r"ldu?\.(?:global|const|shared|param|volatile\.global|volatile\.shared)\b")
_COPY_INTO_SHARED = re.compile(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global\b")
_CALLED = re.compile(r"\s*(?:\([^)]*\)\s*,\s*)?([\w$%]+)")
_NAMED = re.compile(r"\.func\s*(?:\([^)]*\)\s*)?([\w$%]+)")
#: Functions of CUDA that read what their arguments point to; ptxas resolves the names itself, unless a module has a
#: function, an alias or a register of its own of the name.
_READERS = {"vprintf", "__assertfail"}
_RENAMES = re.compile(r"\.(?:alias|reg)\b[^;]*")


def find_readonly_globals(ptx: str, names: Iterable[str]) -> set[str]:
    """Return the ``names`` that are variables of the module and that its code cannot write."""
    # Most variables are never referenced.
    alone = set() if "/*" in ptx else {name for name in names if _only_declared(ptx, name)}
    module = _AddressFlow(set(names) - alone)
    if module.names:
        text = _COMMENTS.sub(" ", ptx)
        while (joined := _LIST.sub(r"(\1)", text)) != text:
            text = joined
        module.read(text)
    return alone | (module.declared - module.lost)


def _only_declared(ptx: str, name: str) -> bool:
    """Return whether a text without block comments has a name only once: in a declaration, alone on its line."""
    start = ptx.find(name)
    if start < 0 or ptx.find(name, start + 1) >= 0:
        return False
    end = ptx.find("\n", start)
    line = ptx[ptx.rfind("\n", 0, start) + 1 : end if end >= 0 else None]
    declaration = None if '"' in line or "//" in line else _DECLARED.match(line)
    return declaration is not None and declaration[1] == name


def _rename(text: str, names: Mapping[str, str]) -> str:
    return _WORD.sub(lambda word: names.get(word[0], word[0]), text) if names else text


@dataclass(frozen=True)
class _Statement:
    """One instruction or directive.

    guard: the words of its predicate. operands: their texts. initial: the words of a declaration's initial value.
    called: the function, or the register, of a call.
    """

    opcode: str
    guard: tuple[str, ...]
    operands: tuple[str, ...]
    initial: tuple[str, ...]
    called: str

    @property
    def words(self) -> tuple[str, ...]:
        """All registers and names in the statement."""
        return (*self.guard, *(word for operand in self.operands for word in _WORD.findall(operand)))

    def operand_words(self, *numbers: int) -> list[str]:
        """Return the registers and names in some operands."""
        return [word for n in numbers if n < len(self.operands) for word in _WORD.findall(self.operands[n])]

    @classmethod
    def parse(cls, text: str) -> _Statement:
        match = _STATEMENT.match(text)
        if match is None:  # not understood: opcode "" loses every address in it
            return cls("", (), (text,), (), "")
        operands = match["operands"] or ""
        called = _CALLED.match(operands) if match["opcode"].startswith("call") else None
        return cls(
            opcode=match["opcode"],
            guard=tuple(filter(None, [match["guard"]])),
            operands=tuple(operand.strip() for operand in _OPERAND.findall(operands)),
            initial=tuple(_WORD.findall(operands.partition("=")[2])),
            called=called[1] if called else "",
        )


@dataclass
class _AddressFlow:
    """The state of the dataflow analysis of a module.

    names: variables to analyse. held: variable -> variables with an address in its initial value. local: addresses
    stored in local memory. local_in_parts: whether any store to local memory writes part of an address.
    parameters_in_parts: call parameters with such stores. lost: variables that may be written. own: functions with a
    body in the module, aliases and registers.
    """

    names: set[str]
    declared: set[str] = field(default_factory=set)
    held: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    local: set[str] = field(default_factory=set)
    local_in_parts: bool = False
    parameters_in_parts: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)

    def read(self, text: str) -> None:
        """Follow the addresses through all functions, until nothing new is found."""
        self.own |= {name for renames in _RENAMES.findall(text) for name in _WORD.findall(renames)}
        functions = [[_Statement.parse(s) for s in body] for body in self._bodies(text)]
        for statement in (statement for function in functions for statement in function):
            if _WHOLE_ADDRESS.search(statement.opcode):
                continue
            if statement.opcode.startswith("st.param"):
                self.parameters_in_parts |= set(statement.operand_words(0))
            elif _STORE_TO_LOCAL.match(statement.opcode) or not statement.opcode:
                self.local_in_parts = True
        registers: list[dict[str, set[str]]] = [defaultdict(set) for _ in functions]
        size, before = 0, -1
        while size != before:
            for function, holds in zip(functions, registers, strict=True):
                for statement in function:
                    self._step(statement, holds)
            before = size
            size = len(self.local) + len(self.lost) + sum(len(held) for holds in registers for held in holds.values())

    def _bodies(self, text: str) -> Iterator[list[str]]:
        """Yield the statements of each function. Each parameter of a call gets a unique name, such as param0'7."""
        body, scopes, number = list[str](), list[dict[str, str]](), 0
        parts = re.split(r"([{};])", text)
        for statement, end in zip(map(str.strip, parts[::2]), parts[1::2], strict=False):
            if not scopes:
                self._declare(statement)
                if end == "{" and (name := _NAMED.search(statement)):
                    self.own.add(name[1])
            elif statement:
                if end == ";" and (parameter := _PARAMETER.match(statement)):
                    number += 1
                    scopes[-1][parameter[1]] = f"{parameter[1]}'{number}"
                body.append(_rename(statement, {old: new for scope in scopes for old, new in scope.items()}))
            if end == "{":
                scopes.append({})
            elif end == "}" and scopes:
                scopes.pop()
                if not scopes:
                    yield body
                    body = []

    def _declare(self, statement: str) -> None:
        """Read a statement outside of functions: a variable, possibly with addresses in its initial value."""
        if not _VARIABLE.search(statement.partition("=")[0]):
            return
        left, _, values = statement.partition("=")
        declared, addressed = (self.names & set(_WORD.findall(part)) for part in (left, values))
        self.declared |= declared
        for name in declared:
            self.held[name] |= addressed
        if not declared or "=" in values:
            self.lost |= addressed

    def _step(self, statement: _Statement, holds: dict[str, set[str]]) -> None:
        def find_addresses(words: Iterable[str]) -> set[str]:
            return {name for word in words for name in (holds.get(word, set()) | ({word} & self.names))}

        opcode = statement.opcode
        self.lost |= find_addresses(statement.guard)
        if opcode.startswith("."):
            self.lost |= find_addresses(statement.initial)
        elif _LOAD.match(opcode):
            loaded = self._find_loaded(statement, find_addresses)
            for word in statement.operand_words(0):
                holds[word] |= loaded
        elif opcode.startswith("st.local"):
            self.lost |= find_addresses(statement.operand_words(0))
            self._store(self.local, find_addresses(statement.operand_words(1)), opcode)
        elif opcode.startswith("st.param") and "'" in statement.operands[0]:
            for word in statement.operand_words(0):
                self._store(holds[word], find_addresses(statement.operand_words(1)), opcode)
        elif _COPY_INTO_SHARED.match(opcode):
            self._read(find_addresses(statement.operand_words(1)))
            self.lost |= find_addresses(statement.operand_words(0, *range(2, len(statement.operands))))
        elif statement.called in _READERS - self.own:
            pass
        elif (sources := _address_sources(statement)) and not any("'" in word for word in statement.words):
            addresses = [find_addresses(statement.operand_words(n)) for n in sources]
            others = find_addresses(
                statement.operand_words(*(n for n in range(1, len(statement.operands)) if n not in sources))
            )
            if others or (sum(map(bool, addresses)) > 1 and not opcode.startswith(_SELECTION)):
                self.lost |= others.union(*addresses)
            for word in statement.operand_words(0):
                holds[word] |= set().union(*addresses)
        else:
            words = list(statement.words)
            if statement.called in words:  # a called table of functions is only read
                words.remove(statement.called)
            self.lost |= find_addresses(words)

    def _find_loaded(self, statement: _Statement, find_addresses: Callable[[Iterable[str]], set[str]]) -> set[str]:
        """Return the addresses that a load reads. Addresses that it reads in part become lost."""
        opcode, bracketed = statement.opcode, 0 if statement.opcode.startswith("prefetch") else 1
        words = statement.operand_words(bracketed)
        loaded = {held for name in find_addresses(words) for held in self.held.get(name, ())}
        self.lost |= find_addresses(statement.operand_words(*range(bracketed + 1, len(statement.operands))))
        if len(words) > 1 or statement.operands[bracketed : bracketed + 1] == ():
            self.lost |= find_addresses(statement.words)
        in_parts = False
        for word in words:
            if "'" in word:  # a parameter of a call
                loaded |= find_addresses([word])
                in_parts |= word in self.parameters_in_parts
        if not _LOAD_ELSEWHERE.match(opcode) and self.local and bracketed:
            loaded |= self.local
            in_parts |= self.local_in_parts
        if in_parts or not _WHOLE_ADDRESS.search(opcode):
            self.lost |= loaded
        return loaded

    def _read(self, names: set[str]) -> None:
        """Mark the addresses in copied variables as lost."""
        self.lost |= {held for name in names for held in self.held.get(name, ())}

    def _store(self, target: set[str], addresses: set[str], opcode: str) -> None:
        """Store addresses. Addresses that are stored in part become lost."""
        target |= addresses
        if not _WHOLE_ADDRESS.search(opcode):
            self.lost |= addresses


def _address_sources(statement: _Statement) -> tuple[int, ...]:
    """Return the operands from which the result may be an address; empty if the result is no address."""
    for operation, sources in _ADDRESS_OPERATIONS:
        if operation.match(statement.opcode):
            return sources if all(_SIMPLE.match(statement.operands[n]) for n in (0, *sources)) else ()
    return ()


_GLOBAL = (".nv.global", ".nv.global.init")
#: Bank 3: ``__constant__`` variables. A kernel can write them through their address in global memory.
_CONSTANT = ".nv.constant3"
#: The device heap outlives a launch, and an allocation contains the freed data.
HEAP_FUNCTIONS = {"malloc", "__nv_aligned_device_malloc"}
HEAP_BYTES = 8 << 20  # the driver's default


def variable_bytes(cubin: bytes, ptx: str = "") -> tuple[int, int]:
    """Return the bytes of a module's state across launches, and the bytes of its ``__constant__`` variables.

    State is every variable in global memory (also managed ones, and ones declared in a function by inline PTX) and
    every ``__constant__`` variable. Variables that ``ptx`` never writes are not state: ``static constexpr`` tables and
    strings of printf. Without PTX all variables count. A kernel that allocates on the device heap counts with
    ``HEAP_BYTES``.

    Raises DamagedCodeError for a cubin that cannot be read.
    """
    image, sections = _find_variables(cubin)
    constants = set(read_only_variables(cubin, ptx))
    state = sum(
        section.size - sum(v.size for v in variables if v.name in constants) - _padding(section, variables)
        for section, variables in sections
    )
    heap = any(symbol.section == UNDEFINED and symbol.name in HEAP_FUNCTIONS for symbol in image.symbols)
    constant = sum(section.size for section, _ in sections if section.name == _CONSTANT)
    return state + heap * HEAP_BYTES, constant


@lru_cache(maxsize=64)
def read_only_variables(cubin: bytes, ptx: str) -> tuple[str, ...]:
    """Return the variables of a module that its PTX never writes.

    They are not state, so a launch that changes one is wrong. Raises DamagedCodeError as ``variable_bytes``.
    """
    _, sections = _find_variables(cubin)
    names = {v.name for _, variables in sections for v in variables}
    return tuple(sorted(find_readonly_globals(ptx, names))) if names else ()


def _find_variables(cubin: bytes) -> tuple[Image, list[tuple[ElfSection, list[ElfSymbol]]]]:
    """Return the image of a cubin, and each section of variables with its variables."""
    try:
        image = Image(cubin)
    except ImageError as e:
        raise DamagedCodeError(f"the machine code cannot be read: {e}") from e
    sections = [
        (section, _list_variables(image, n))
        for n, section in enumerate(image.sections)
        if section.name in (*_GLOBAL, _CONSTANT)
    ]
    for section, variables in sections:
        for v in variables:
            if v.value + v.size > section.size:  # ptxas writes a section's size modulo 4 GiB
                raise DamagedCodeError(
                    f"the variable {v.name!r} of {v.size} bytes exceeds its section of {section.size} bytes; variables "
                    "must have less than 4 GiB together"
                )
    return image, sections


def _list_variables(image: Image, section: int) -> list[ElfSymbol]:
    """Return the variables of a section by address, without aliases."""
    symbols = {(s.value, s.size): s for s in image.symbols if s.section == section and not s.is_section and s.size}
    return [symbols[key] for key in sorted(symbols)]


def _padding(section: ElfSection, variables: list[ElfSymbol]) -> int:
    """Return the bytes between variables that alignment explains; 0 for a section without variables."""
    if not variables:
        return 0
    total, end = 0, 0
    for variable in variables:
        gap = variable.value - end
        total += gap if 0 < gap < max(section.alignment, 1) else 0
        end = max(end, variable.value + variable.size)
    return total
