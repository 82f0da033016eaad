"""Which variables of a module its PTX never writes: the ones whose address demonstrably goes into loads alone.

An address is followed through registers, local memory and the parameters of calls, whatever computes with it. It is
lost, and the variable may be written, where it is stored elsewhere, passed to or returned by a function, decides a
branch, or is used by any instruction that does more than load.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from greenfast.device.directives import COMMENT_OR_STRING, FILE, LOC

#: Comments, strings, and the two directives that no semicolon ends: an instruction may follow them in their line.
_COMMENTS = re.compile(f"{FILE}|{LOC}|{COMMENT_OR_STRING}", re.DOTALL)
_LIST = re.compile(r"\{([^{};]*)\}")  # a vector of registers or a variable's initial values; a scope holds statements
_WORD = re.compile(r"(?<![\w$%'])[a-zA-Z_$%][\w$%']*")  # no number
_DECLARED = re.compile(r"[^;{}()\[=]*\.(?:global|const)\b[^;{}()\[=]*?([\w$%]+)[ \t]*[\[=;]")
_VARIABLE = re.compile(r"\.(?:global|const)\b")
_PARAMETER = re.compile(r"\.param\b.*?([\w$%]+)(?:\[\d*\])?$", re.DOTALL)
_STATEMENT = re.compile(
    r"(?:[\w$%]+\s*:\s*)*(?:@!?\s*(?P<guard>[\w$%]+)\s+)?(?P<opcode>[a-zA-Z.][\w.:]*)(?:\s+(?P<rest>.*))?$", re.DOTALL
)
_FIRST_OPERAND = re.compile(r"\([^)]*\)|\[[^\]]*\]|[^,]*")
_LOAD = re.compile(r"(?:ldu?|prefetchu?)\b")
#: From elsewhere than local memory; what is stored to a parameter is followed by its name.
_LOAD_ELSEWHERE = re.compile(r"ldu?\.(?:global|const|shared|param|volatile\.global|volatile\.shared)\b")
_COPY_INTO_SHARED = re.compile(r"cp\.async\.c[ag]\.shared(?:::cta)?\.global\b")
_CONTROL = re.compile(r"(?:bra|brx|call|ret|exit)\b")
_CALLED = re.compile(r"\s*(?:\([^)]*\)\s*,\s*)?([\w$%]+)")
_NAMED = re.compile(r"\.func\s*(?:\([^)]*\)\s*)?([\w$%]+)")
#: Functions of CUDA that read what their arguments point to; ptxas resolves the names itself, unless a module has a
#: function, an alias or a register of its own of the name.
_READERS = {"vprintf", "__assertfail"}
_RENAMES = re.compile(r"\.(?:alias|reg)\b[^;]*")


def never_written(ptx: str, names: Iterable[str]) -> set[str]:
    """The ones of ``names`` that are variables of the module and that none of its code can write."""
    # most: nothing refers to them
    alone = set() if "/*" in ptx else {name for name in names if _only_declared(ptx, name)}
    module = _Module(set(names) - alone)
    if module.names:
        text = _COMMENTS.sub(" ", ptx)
        while (joined := _LIST.sub(r"(\1)", text)) != text:
            text = joined
        module.read(text)
    return alone | (module.declared - module.lost)


def _only_declared(ptx: str, name: str) -> bool:
    """Whether a name stands once in a text without block comments: in a declaration, on a line without another."""
    at = ptx.find(name)
    if at < 0 or ptx.find(name, at + 1) >= 0:
        return False
    end = ptx.find("\n", at)
    line = ptx[ptx.rfind("\n", 0, at) + 1 : end if end >= 0 else None]
    found = None if '"' in line or "//" in line else _DECLARED.match(line)
    return found is not None and found[1] == name


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return _WORD.sub(lambda word: names.get(word[0], word[0]), text) if names else text


@dataclass(frozen=True)
class _Statement:
    """One instruction or directive: the words of its first operand, of the others with the guard, and in brackets."""

    opcode: str
    first: tuple[str, ...]
    others: tuple[str, ...]
    addresses: tuple[str, ...]
    initial: tuple[str, ...]  # of a declaration
    called: str  # of a call

    @property
    def words(self) -> tuple[str, ...]:
        return self.first + self.others

    @classmethod
    def parse(cls, text: str) -> _Statement:
        found = _STATEMENT.match(text)
        if found is None:  # not understood: opcode "" loses every address in it
            return cls("", (), tuple(_WORD.findall(text)), (), (), "")
        rest = found["rest"] or ""
        first = _FIRST_OPERAND.match(rest)
        assert first is not None  # it matches the empty text
        called = _CALLED.match(rest) if found["opcode"].startswith("call") else None
        return cls(
            opcode=found["opcode"],
            first=tuple(_WORD.findall(first[0])),
            others=(*filter(None, [found["guard"]]), *_WORD.findall(rest[first.end() :])),
            addresses=tuple(_WORD.findall(" ".join(re.findall(r"\[([^\]]*)\]", rest)))),
            initial=tuple(_WORD.findall(rest.partition("=")[2])),
            called=called[1] if called else "",
        )


@dataclass
class _Module:
    """names: the variables asked for. held: the ones whose addresses a variable's initial value holds.

    local: the addresses that are stored in local memory. lost: the variables that may be written. own: functions that
    have a body here, aliases and registers.
    """

    names: set[str]
    declared: set[str] = field(default_factory=set)
    held: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    local: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)

    def read(self, text: str) -> None:
        """Follow the addresses through all functions, until nothing new is found."""
        self.own |= {name for renames in _RENAMES.findall(text) for name in _WORD.findall(renames)}
        functions = [[_Statement.parse(s) for s in body] for body in self._bodies(text)]
        registers: list[dict[str, set[str]]] = [defaultdict(set) for _ in functions]
        size, before = 0, -1
        while size != before:
            for function, holds in zip(functions, registers, strict=True):
                for statement in function:
                    self._step(statement, holds)
            before = size
            size = len(self.local) + len(self.lost) + sum(len(held) for holds in registers for held in holds.values())

    def _bodies(self, text: str) -> Iterator[list[str]]:
        """The statements of each function, each parameter of a call under a name that no other has (param0'7)."""
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
                body.append(_renamed(statement, {old: new for scope in scopes for old, new in scope.items()}))
            if end == "{":
                scopes.append({})
            elif end == "}" and scopes:
                scopes.pop()
                if not scopes:
                    yield body
                    body = []

    def _declare(self, statement: str) -> None:
        """What stands outside of functions: a variable of the module, perhaps with addresses as initial value."""
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
        def of(words: Iterable[str]) -> set[str]:
            return {name for word in words for name in (holds.get(word, set()) | ({word} & self.names))}

        opcode = statement.opcode
        if opcode.startswith("."):
            self.lost |= of(statement.initial)
        elif _LOAD.match(opcode):
            found = {held for name in of(statement.addresses) for held in self.held.get(name, ())}
            found |= of(word for word in statement.addresses if "'" in word)  # a parameter of a call
            found |= set() if _LOAD_ELSEWHERE.match(opcode) else self.local
            for word in statement.first:
                holds[word] |= found
        elif opcode.startswith("st.local"):
            self.lost |= of(statement.first)
            self.local |= of(statement.others)
        elif opcode.startswith("st.param") and any("'" in word for word in statement.first):
            for word in statement.first:
                holds[word] |= of(statement.others)
        elif _COPY_INTO_SHARED.match(opcode):
            self.lost |= of(statement.first)
        elif statement.called in _READERS - self.own:
            pass
        elif not opcode or statement.addresses or _CONTROL.match(opcode) or any("'" in w for w in statement.words):
            words = list(statement.words)
            if statement.called in words:  # a called table of functions is only read
                words.remove(statement.called)
            self.lost |= of(words)
        else:
            for word in statement.first:
                holds[word] |= of(statement.others)
