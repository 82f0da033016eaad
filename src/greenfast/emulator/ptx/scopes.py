"""Names in the blocks { } of PTX."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from greenfast.emulator.ptx.syntax import Function, Module
from greenfast.spec.errors import UsageError

_REGISTER = re.compile(r"([%_$]?[\w$]+)\s*(?:<\s*(\d+)\s*>)?")
#: The elements of a vector register, and other names for them (r, g, b, a).
ELEMENTS, _COLORS = "xyzw", "rgba"


class Scope:
    """A block { } of a body. Declarations of inline assembly are local to it: copies of it have equal names.

    module: with the variables that the function sees.
    """

    def __init__(self, function: Function, module: Module, outer: Scope | None = None, suffix: str = "") -> None:
        self.function, self.module, self.suffix = function, module, suffix
        self.registers: dict[str, str] = dict(outer.registers) if outer else {}  # name here -> name in the function
        self.counts: dict[str, int] = dict(outer.counts) if outer else {}  # of %name<count> -> count
        self.vectors: dict[str, int] = dict(outer.vectors) if outer else {}  # vector register -> elements
        self.variables: dict[str, str] = dict(outer.variables) if outer else {}  # of calls, in the same way
        self.labels: dict[str, str] = {}
        self.start = len(function.code)
        self._own = set[str]()

    def declare(self, declared: str, kind: str, elements: int = 0) -> None:
        """Declare a register, or several as name<count>; a register of the function's outermost block keeps its name.

        elements: of a vector register. Raises UsageError for invalid and for repeated declarations.
        """
        match = _REGISTER.fullmatch(declared)
        if match is None or declared in self._own:
            why = "twice" if match else "something that is no register"
            raise UsageError(f"PTX: {self.function.name} declares {why}: {declared}")
        self._own.add(declared)
        name, count = match[1], match[2]
        if count and not elements and not self.suffix and name.startswith("%"):  # known by their prefix
            self.counts[name] = int(count)
            self.function.registers[name] = kind
            return
        for each in [f"{name}{n}" for n in range(int(count))] if count else [name]:
            if elements:
                self.registers.pop(each, None)
                self.vectors[each] = elements
                for n in range(elements):
                    own = f"{each}.{ELEMENTS[n]}"
                    self.registers[own] = self.registers[f"{each}.{_COLORS[n]}"] = own + self.suffix
                    self.function.registers[own + self.suffix] = kind
            else:
                self.vectors.pop(each, None)
                self.registers[each] = each + self.suffix
                self.function.registers[each + self.suffix] = kind

    def register(self, name: str) -> str | None:
        """Return the name in the function of a register that is declared here or around; None for any other name."""
        own = self.registers.get(name)
        if own is None and name[:1] == "%":
            prefix = name.rstrip("0123456789")
            digits = name[len(prefix) :]
            if digits and int(digits) < self.counts.get(prefix, 0) and str(int(digits)) == digits:
                self.registers[name] = own = name
        return own

    def own(self, name: str) -> str:
        """Declare a variable of this block alone; returns its name in the function. Raises UsageError if it has one."""
        if name in self._own:
            raise UsageError(f"PTX: {self.function.name} declares twice: {name}")
        self._own.add(name)
        self.variables[name] = name + self.suffix
        return self.variables[name]

    def label(self, name: str) -> None:
        """Put a label at the next instruction. Raises UsageError if the block has it already."""
        if name in self.labels:
            raise UsageError(f"PTX: {self.function.name} has the label {name} twice")
        self.labels[name] = name + self.suffix
        self.function.labels[name + self.suffix] = len(self.function.code)

    def close(self) -> None:
        """Resolve the branches of this block to its own labels. A label may follow its branch."""
        if not self.suffix or not self.labels:
            return
        code = self.function.code
        for n, i in enumerate(code[self.start :], self.start):
            if i.name == "bra":
                targets: tuple[Any, ...] = i.operands
                if len(targets) == 1 and getattr(targets[0], "name", "") in self.labels:
                    code[n] = replace(i, operands=(replace(targets[0], name=self.labels[targets[0].name]),))
