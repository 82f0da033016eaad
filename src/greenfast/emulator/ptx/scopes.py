"""What the names in the blocks { } of PTX stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenfast.emulator.ptx.syntax import Function


class Scope:
    """A block { } of a body. What inline assembly declares in one is its own: copies of it have equal names."""

    def __init__(self, function: Function, outer: Scope | None = None, suffix: str = "") -> None:
        self.function, self.suffix = function, suffix
        self.registers: dict[str, str] = dict(outer.registers) if outer else {}  # name here -> name in the function
        self.variables: dict[str, str] = dict(outer.variables) if outer else {}  # of calls, in the same way
        self.labels: dict[str, str] = {}
        self.start = len(function.code)

    def declare(self, declared: str, kind: str) -> None:
        """Declare a register, or several as name<count>; one that the whole function sees keeps its name."""
        name, _, count = declared.rstrip(">").partition("<")
        names = [name]
        if count and (self.suffix or not name.startswith("%")):  # %name0, ... of the function are known by their prefix
            names += [f"{name}{n}" for n in range(int(count))]
        for each in names:
            self.registers[each] = each + self.suffix
            self.function.registers[each + self.suffix] = kind

    def own(self, name: str) -> str:
        """Declare a variable of this block alone; returns its name in the function."""
        self.variables[name] = name + self.suffix
        return self.variables[name]

    def label(self, name: str) -> None:
        """Put a label at the next instruction."""
        self.labels[name] = name + self.suffix
        self.function.labels[name + self.suffix] = len(self.function.code)

    def close(self) -> None:
        """Point the branches of this block to its own labels, which may come after them."""
        if not self.suffix or not self.labels:
            return
        code = self.function.code
        for n, i in enumerate(code[self.start :], self.start):
            if i.name == "bra":
                target: Any = i.operands[0]
                if target.name in self.labels:
                    code[n] = replace(i, operands=(replace(target, name=self.labels[target.name]),))
