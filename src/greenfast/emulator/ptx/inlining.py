"""A kernel as one body of code: calls are replaced by the callee's code, branch tables by comparisons.

Arguments and results of calls (.param variables of a body) become local variables of the kernel. A function may be
called through a pointer if the module takes its address; such a call compares the pointer with each function that fits.
The code of recursive functions follows the kernel once (recursion.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from greenfast.emulator.ptx import recursion
from greenfast.emulator.ptx.forms import refusal
from greenfast.emulator.ptx.syntax import (
    Address,
    Frame,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    Symbol,
    Variable,
    Vector,
)
from greenfast.emulator.ptx.unsupported import unsupported
from greenfast.spec.errors import UnsupportedError, UsageError

#: Functions that the emulator implements.
BUILT_IN = ("vprintf", "__assertfail")
#: The most instructions that a kernel may grow to.
_MOST = 1_000_000


def inline_calls(module: Module, entry: Function) -> Function:
    """Return the kernel with all that it calls in its body.

    Raises UnsupportedError for a function that has no body and is not known, and for a recursive one that takes the
    address of a local variable or calls itself through a pointer.
    """
    body = Function(
        entry.name, True, entry.params, registers=dict(entry.registers), directives=entry.directives, tables={}
    )
    inliner = _Inliner(module, body)
    inliner.add(entry, _Names({}, ""), (entry.name,))
    inliner.add_subroutines(entry)
    return body


@dataclass
class _Names:
    """The meaning of names in a copy of a function. suffix: of its registers, labels and local variables.

    called_from: the lines of the call, outermost last.
    """

    parameters: Mapping[str, str]
    suffix: str
    variables: dict[str, str] = field(default_factory=dict)
    called_from: tuple[Frame, ...] = ()


class _Inliner:
    """Copies functions into a body."""

    def __init__(self, module: Module, body: Function) -> None:
        self.module, self.body = module, body
        self.copies = 0
        self.own = {p.name for p in body.params}
        taken = {r.symbol for v in module.variables.values() for r in v.relocations}
        for function in module.functions.values():
            taken |= {o.name for i in function.code if i.name != "call" for o in i.operands if isinstance(o, Symbol)}
        self.pointed_to = [f for name, f in module.functions.items() if name in taken and f.code]
        self.recursive = recursion.recursive(module)
        self.called: list[str] = []  # recursive functions to append after the kernel
        self.current = ""  # the recursive function that is being appended
        self.passing = set[str]()  # variables through which values go to and from recursive calls, of no frame

    def add(self, function: Function, names: _Names, callers: tuple[str, ...]) -> None:
        """Append a function's code and the label of its end."""
        labels: dict[int, list[str]] = {}
        for label, index in function.labels.items():
            labels.setdefault(index, []).append(label)
        for v in function.variables.values():
            # Static shared variables exist once, local ones in each copy.
            own = v.name if v.space == "shared" else v.name + names.suffix
            names.variables[v.name] = own
            self.body.variables[own] = replace(v, name=own)
        for index, i in enumerate(function.code):
            self.mark(labels.get(index, ()), names)
            self.instruction(i, function, names, callers)
        self.mark(labels.get(len(function.code), ()), names)

    def mark(self, labels: Sequence[str], names: _Names) -> None:
        """Put labels at the next instruction."""
        for label in labels:
            self.body.labels[label + names.suffix] = len(self.body.code)

    def instruction(self, i: Instruction, function: Function, names: _Names, callers: tuple[str, ...]) -> None:
        """Append one instruction, or its replacement."""
        if names.called_from and i.source is not None:
            i = replace(i, source=replace(i.source, stack=(*i.source.stack, *names.called_from)))
        if i.name in ("call", "brx", "ret"):
            refused = refusal(i.name, i.parts)
            if refused:
                raise unsupported(i, refused)
            if i.name == "ret" and i.operands:
                raise unsupported(i, f"has {len(i.operands)} operands in place of 0")
        guard = (self.register(i.guard[0], function, names), i.guard[1]) if i.guard else None
        if i.name == "ret" and len(callers) > 1 and callers[-1] in self.recursive:
            self.emit(replace(i, name=recursion.LEAVE, operands=(), guard=guard))
            return
        if i.name == "ret" and len(callers) > 1:
            self.emit(replace(i, name="bra", parts=("uni",), operands=(Symbol(_end(names)),), guard=guard))
            return
        if i.name == "bra" and len(i.operands) == 1 and isinstance(i.operands[0], Symbol):
            if i.operands[0].offset:
                raise unsupported(i, "adds a number to a label, unknown to the emulator,")
            label = Symbol(i.operands[0].name + names.suffix)
            self.emit(replace(i, operands=(label,), guard=guard))
            return
        if i.name == "brx":
            self.branch(i, guard, function, names)
            return
        if i.name == "call":
            self.call(i, guard, function, names, callers)
            return
        operands = tuple(self.operand(o, function, names) for o in i.operands)
        parts = i.parts
        if i.name in ("ld", "st") and any(p.split(":")[0] == "param" for p in parts):
            base = next((o.base for o in operands if isinstance(o, Address)), None)
            if isinstance(base, Symbol) and base.name not in self.own:
                parts = tuple("local" if p.split(":")[0] == "param" else p for p in parts)
        if operands != i.operands or parts != i.parts or guard != i.guard:
            i = replace(i, operands=operands, parts=parts, guard=guard)
        self.emit(i)

    def emit(self, i: Instruction) -> None:
        if len(self.body.code) >= _MOST:
            raise UnsupportedError(f"{self.body.name} grows beyond {_MOST} instructions when its calls are inlined")
        self.body.code.append(i)

    # ---- names ------------------------------------------------------------------------------------------------------

    def register(self, name: str, function: Function, names: _Names) -> str:
        """Return the body's register for one of a function."""
        if not names.suffix or name == "_":
            return name
        own = name + names.suffix
        kind = function.register_kind(name)
        if kind is not None:
            self.body.registers[own] = kind
        return own

    def operand(self, o: Operand, function: Function, names: _Names) -> Operand:
        """Return an operand of a function as one of the body."""
        if isinstance(o, Register):
            own = self.register(o.name, function, names)
            return o if own == o.name else Register(own)
        if isinstance(o, Symbol):
            negated = o.name.startswith("!")
            if negated:
                return Symbol("!" + self.register(o.name[1:], function, names))
            own = names.parameters.get(o.name) or names.variables.get(o.name, o.name)
            if not self.is_known(own):
                raise UsageError(f"PTX: {o.name} in {function.name} is not defined in this module")
            return o if own == o.name else Symbol(own, o.offset)
        if isinstance(o, Vector):
            return Vector(tuple(self.operand(item, function, names) for item in o.items))
        if isinstance(o, Address) and o.base is not None:
            base = self.operand(o.base, function, names)
            assert isinstance(base, (Register, Symbol))
            return Address(base, o.offset, tuple(self.operand(c, function, names) for c in o.coordinates))
        return o

    def is_known(self, name: str) -> bool:
        """Return whether a name is a variable, a parameter or a function."""
        of = (self.body.variables, self.module.variables, self.module.functions)
        return name in self.own or any(name in names for names in of)

    # ---- branches by table ------------------------------------------------------------------------------------------

    def branch(self, i: Instruction, guard: tuple[str, bool] | None, function: Function, names: _Names) -> None:
        """Append brx.idx: one comparison and branch for each label; an index beyond them is a trap."""
        table = i.operands[1] if len(i.operands) == 2 else None
        labels = function.tables.get(table.name) if isinstance(table, Symbol) else None
        if labels is None:
            raise unsupported(i, "names no list of labels")
        index = self.operand(i.operands[0], function, names)
        beyond = self.skip(i, guard)
        for n, label in enumerate(labels):
            matches = self.predicate()
            self.emit(_compare(i, "eq", "u32", matches, index, Immediate(n)))
            self.emit(_bra(i, label + names.suffix, (matches, False)))
        self.emit(replace(i, name="trap", parts=(), operands=(), guard=None))
        self.mark_new(beyond)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def call(
        self,
        i: Instruction,
        guard: tuple[str, bool] | None,
        function: Function,
        names: _Names,
        callers: tuple[str, ...],
    ) -> None:
        """Replace a call by the function's body, or by the body of each function that a pointer may name."""
        # A Symbol without brackets is a function or a prototype.
        operands = [o if isinstance(o, Symbol) else self.operand(o, function, names) for o in i.operands]
        if not operands or len(operands) > 4:
            raise unsupported(i, f"has {len(operands)} operands in place of 1 to 4")
        results = operands.pop(0) if isinstance(operands[0], Vector) else Vector(())
        target, *remainder = operands
        arguments = remainder[0] if remainder and isinstance(remainder[0], Vector) else Vector(())
        assert isinstance(results, Vector)
        after = self.skip(i, guard)
        if isinstance(target, Symbol):
            own = self.module.functions.get(target.name)
            if target.name in BUILT_IN and not (own is not None and own.code):
                self.emit(
                    replace(i, operands=tuple(operands if not results.items else (results, *operands)), guard=None)
                )
            else:
                self.copy(i, self.module.functions.get(target.name), target.name, results, arguments, callers)
            self.mark_new(after)
            return
        end = self.label()
        for candidate in self.pointed_to:
            if candidate.name in callers or not _fits(candidate, results, arguments):
                continue
            other, differs = self.label(), self.predicate()
            self.emit(_compare(i, "ne", "u64", differs, target, Symbol(candidate.name)))
            self.emit(_bra(i, other, (differs, False)))
            self.copy(i, candidate, candidate.name, results, arguments, callers)
            self.emit(_bra(i, end, None))
            self.mark_new(other)
        self.emit(replace(i, name="trap", parts=(), operands=(), guard=None))
        self.mark_new(end)
        self.mark_new(after)

    def copy(
        self,
        i: Instruction,
        callee: Function | None,
        name: str,
        results: Vector,
        arguments: Vector,
        callers: tuple[str, ...],
    ) -> None:
        """Append a copy of a function with the caller's variables as parameters."""
        where = f"at {i.source or 'unknown line'}: {i.text}"
        if callee is None or not callee.code:
            raise UnsupportedError(f"a call of {name}, unknown to the emulator and without a body, {where}")
        if not _fits(callee, results, arguments):
            raise UnsupportedError(f"a call of {name} with other arguments than it takes {where}")
        if name in self.recursive:
            self.enter(i, callee, results, arguments)
            return
        if name in callers:
            raise UnsupportedError(f"{name} calls itself through a pointer, unknown to the emulator, {where}")
        self.copies += 1
        names = _Names({}, f"~{self.copies}", called_from=i.source.stack if i.source else ())
        bound: dict[str, str] = {}
        for formal, actual in zip((*callee.params, *callee.results), (*arguments.items, *results.items), strict=True):
            if formal.space == "reg":
                self.register(formal.name, callee, names)
            elif isinstance(actual, Symbol):
                bound[formal.name] = actual.name
            else:  # a register or a number
                bound[formal.name] = own = formal.name + names.suffix
                self.body.variables[own] = Variable(own, "local", formal.align, formal.size, type=formal.type)
        names.parameters = bound
        for formal, actual in zip(callee.params, arguments.items, strict=True):
            self.pass_value(i, formal, actual, names, returns=False)
        self.add(callee, names, (*callers, name))
        self.mark_new(_end(names))
        for formal, actual in zip(callee.results, results.items, strict=True):
            self.pass_value(i, formal, actual, names, returns=True)

    def pass_value(self, i: Instruction, formal: Variable, actual: Operand, names: _Names, *, returns: bool) -> None:
        """Append the copy of an argument to its parameter, or of a result back; none for a variable of the caller."""
        if formal.space == "reg":
            own = Register(formal.name + names.suffix)
            operands = (actual, own) if returns else (own, actual)
            self.emit(replace(i, name="mov", parts=(formal.type,), operands=operands, guard=None))
        elif not isinstance(actual, Symbol):
            self.transfer(i, formal, names.parameters[formal.name], actual, store=not returns)

    # ---- recursive functions ----------------------------------------------------------------------------------------

    def enter(self, i: Instruction, callee: Function, results: Vector, arguments: Vector) -> None:
        """Append a call of a recursive function: its parameters and results are variables that belong to its frame."""
        if callee.name not in self.called:
            self.called.append(callee.name)
        suffix = f"~{callee.name}"
        if self.current:
            self.pseudo(i, recursion.KEEP, parts=(self.current,))
        self.copies += 1
        # An argument may be overwritten by another one, so all go through variables of this call.
        formals = [(f, self.parameter(f, suffix), self.parameter(f, f"~{self.copies}")) for f in callee.params]
        back = [(f, self.parameter(f, suffix), self.parameter(f, f"~{self.copies}")) for f in callee.results]
        self.passing |= {between for _, _, between in (*formals, *back)}
        for (formal, _, between), actual in zip(formals, arguments.items, strict=True):
            self.transfer(i, formal, between, actual, store=True)
        for _, own, between in formals:
            self.pseudo(i, recursion.COPY, (Symbol(own), Symbol(between)))
        self.pseudo(i, recursion.ENTER, (Symbol(f"~start{suffix}"),))
        self.mark_new(self.label())  # where threads that return may meet again
        for _, own, between in back:
            self.pseudo(i, recursion.COPY, (Symbol(between), Symbol(own)))
        if self.current:
            self.pseudo(i, recursion.RESTORE, parts=(self.current,))
        for (formal, _, between), actual in zip(back, results.items, strict=True):
            self.transfer(i, formal, between, actual, store=False)

    def parameter(self, formal: Variable, suffix: str) -> str:
        """Add a local variable for a parameter or result. Return its name."""
        name = formal.name + suffix
        self.body.variables[name] = replace(formal, name=name, space="local")
        return name

    def transfer(self, i: Instruction, formal: Variable, variable: str, actual: Operand, *, store: bool) -> None:
        """Move an argument of a call to a variable (``store``), or a variable to the caller's result."""
        if isinstance(actual, Symbol):
            pair = (Symbol(variable), actual) if store else (actual, Symbol(variable))
            self.pseudo(i, recursion.COPY, pair)
            return
        location, parts = Address(Symbol(variable), 0), ("local", formal.type)
        operands: tuple[Operand, ...] = (location, actual) if store else (actual, location)
        self.emit(replace(i, name="st" if store else "ld", parts=parts, operands=operands, guard=None))

    def pseudo(
        self, i: Instruction, name: str, operands: tuple[Operand, ...] = (), parts: tuple[str, ...] = ()
    ) -> None:
        """Emit one of the instructions that no PTX has."""
        self.emit(replace(i, name=name, parts=parts, operands=operands, guard=None))

    def add_subroutines(self, entry: Function) -> None:
        """Append every recursive function that is called."""
        if not self.called:
            return
        self.emit(Instruction("exit", (), (), None, None, "exit"))
        for name in self.called:  # grows meanwhile
            callee, start = self.module.functions[name], len(self.body.code)
            suffix = f"~{name}"
            names = _Names({}, suffix)
            # The variables that hold the parameters; the ones in registers are loaded from them.
            names.parameters = {f.name: f.name + suffix for f in (*callee.params, *callee.results) if f.space != "reg"}
            if any(f.space == "reg" for f in (*callee.params, *callee.results)):
                raise UnsupportedError(f"{name} calls itself with registers as parameters, unknown to the emulator")
            self.current = name
            self.mark_new(f"~start{suffix}")
            self.add(callee, names, (entry.name, name))
            self.emit(replace(self.body.code[-1], name=recursion.LEAVE, parts=(), operands=(), guard=None))
            self.current = ""
            frame = recursion.build_frame(self.body, start, len(self.body.code), name)
            frame.variables = {v: size for v, size in frame.variables.items() if v not in self.passing}
            self.body.frames[name] = frame

    # ---- labels and predicates of the body --------------------------------------------------------------------------

    def label(self) -> str:
        self.copies += 1
        return f"~label{self.copies}"

    def predicate(self) -> str:
        self.copies += 1
        name = f"%~p{self.copies}~"
        self.body.registers[name] = "pred"
        return name

    def mark_new(self, label: str) -> None:
        if label:
            self.body.labels[label] = len(self.body.code)

    def skip(self, i: Instruction, guard: tuple[str, bool] | None) -> str:
        """Branch past the replacement of an instruction if its guard is false. Return the label to put after it."""
        if guard is None:
            return ""
        label = self.label()
        self.emit(_bra(i, label, (guard[0], not guard[1])))
        return label


def _end(names: _Names) -> str:
    return f"~end{names.suffix}"


def _bra(i: Instruction, label: str, guard: tuple[str, bool] | None) -> Instruction:
    return replace(i, name="bra", parts=() if guard else ("uni",), operands=(Symbol(label),), guard=guard)


def _compare(i: Instruction, how: str, kind: str, to: str, a: Operand, b: Operand) -> Instruction:
    return replace(i, name="setp", parts=(how, kind), operands=(Register(to), a, b), guard=None)


def _fits(function: Function, results: Vector, arguments: Vector) -> bool:
    return len(function.params) == len(arguments.items) and len(function.results) == len(results.items)
