"""Find asynchronous operations that may be in flight when a thread ends, by following every path of its PTX.

A thread that starts a bulk copy out of shared memory, or matrix products of a warpgroup, must commit them to a group
and wait for this group before it ends. Otherwise another block may receive the shared memory while it is still read.
For a bulk copy, a wait for the reads of its source (``.read``) is enough: its writes are complete when the kernel is.

Paths are followed for one thread. Branches on the same condition, such as two tests of ``threadIdx.x == 0``, have the
same outcome. Another thread may wait for copies that complete on an mbarrier, so only the presence of a wait is
checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from greenfast.device.toolchain import include_dirs
from greenfast.emulator.ptx.inlining import inline_calls
from greenfast.emulator.ptx.parser import parse
from greenfast.emulator.ptx.syntax import Function, Immediate, Instruction, Register, Special, Symbol, Vector

#: The name of every such operation contains one of the texts.
_MARKS = (".bulk_group", "wgmma.mma_async", "::complete_tx::bytes", "st.async", "red.async", "cp.reduce.async")
_MOST_STATES = 100_000
#: Number of recent groups that are tracked separately; older ones are merged into the last of them.
_GROUPS = 31
_BULK, _PRODUCTS = 0, 1
#: Special registers that one thread always reads the same of.
_FIXED = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%cluster_cta", "%clusterid", "%nclusterid", "%is_explicit")
_PURE = frozenset(("add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "not", "neg", "min", "max", "div"))
_PURE |= {"rem", "abs", "cvt", "mov", "setp", "selp", "bfe", "bfi", "lop3", "shf", "popc", "clz"}
_OPPOSITES = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_OPPOSITES |= {"lo": "hs", "hs": "lo", "hi": "ls", "ls": "hi"}
_Key = Any  # a nested tuple that identifies a value


@dataclass(frozen=True)
class Unawaited:
    """An operation that may be in flight at the end. is_certain: whether no path from it has a wait."""

    text: str
    is_certain: bool

    def __str__(self) -> str:
        path = "no" if self.is_certain else "not every"
        return f"{self.text}: {path} path from it to the end of the kernel waits for it"


def find_unawaited(ptx: str, entry: str) -> list[Unawaited]:
    """Return the operations of a kernel that may be in flight when one of its threads ends; raises UnsupportedError."""
    if not any(mark in ptx for mark in _MARKS):
        return []
    module = parse(ptx, tuple(f"{folder}/" for folder in include_dirs()))
    return _Paths(inline_calls(module, module.entry(entry))).find()


def _channel(i: Instruction) -> int | None:
    """Return the kind of groups that an operation is committed to; None for another instruction."""
    if i.name == "cp" and "bulk_group" in i.parts:
        return _BULK
    if i.name == "wgmma" and "mma_async" in i.parts:
        return _PRODUCTS
    return None


def _group_operation(i: Instruction) -> tuple[str, int] | None:
    """Return the effect of an instruction on groups, and the kind of groups."""
    if i.name == "cp" and "bulk" in i.parts:
        channel = _BULK
    elif i.name == "wgmma":
        channel = _PRODUCTS
    else:
        return None
    return next(((part, channel) for part in ("commit_group", "wait_group") if part in i.parts), None)


def _place(i: Instruction) -> str:
    return f"{i.text.split()[0].rstrip(';')} at {i.source}" if i.source else i.text.rstrip(";")


@dataclass(frozen=True)
class _State:
    """groups: for each kind, a bit for uncommitted operations, then one bit per group, latest first."""

    pc: int
    groups: tuple[int, int]
    known: frozenset[tuple[_Key, bool]]


@dataclass
class _Paths:
    function: Function
    definitions: dict[str, list[int]] = field(default_factory=dict)
    keys: dict[str, tuple[_Key, bool]] = field(default_factory=dict)

    def find(self) -> list[Unawaited]:
        code = self.function.code
        starts = [(pc, channel) for pc, i in enumerate(code) if (channel := _channel(i)) is not None]
        result = [*self._never_awaited()]
        if not starts:
            return result
        for pc, i in enumerate(code):
            for name in _defined(i):
                self.definitions.setdefault(name, []).append(pc)
        uses = Counter(part for i in code if i.guard for part in _split_parts(self._condition(i.guard[0])[0]))
        self.tracked = {key for key, count in uses.items() if count > 1}
        self.drops = self._drops()
        pending = self._reachable_ends()
        for pc, channel in starts:
            if pending is None or pending[channel]:
                result.append(Unawaited(_place(code[pc]), pending is not None and not self._may_wait(pc, channel)))
        return result

    def _never_awaited(self) -> Iterator[Unawaited]:
        """Return copies that complete on an mbarrier in a kernel without a wait for one."""
        if any(i.name == "mbarrier" and {"try_wait", "test_wait"} & set(i.parts) for i in self.function.code):
            return
        for i in self.function.code:
            if i.name in ("cp", "st", "red") and any("complete_tx" in part for part in i.parts):
                yield Unawaited(_place(i), True)

    def _condition(self, register: str) -> tuple[_Key, bool]:
        """Return the condition key of a predicate, and whether it is that condition or its negation."""
        if register not in self.keys:
            self.keys[register] = (("register", register), True)  # while it is looked at, against cycles
            self.keys[register] = self._named(register)
        return self.keys[register]

    def _named(self, register: str) -> tuple[_Key, bool]:
        plain = (("register", register), True)
        where = self.definitions.get(register, [])
        if len(where) != 1:
            return plain
        i = self.function.code[where[0]]
        if i.guard or i.name not in ("setp", "not", "mov", "and", "or") or isinstance(i.operands[0], Vector):
            return plain
        if i.name in ("and", "or"):
            first, second = i.operands[1:3]
            if not isinstance(first, Register) or not isinstance(second, Register):
                return plain
            return (i.name, self._condition(first.name), self._condition(second.name)), True
        if i.name in ("not", "mov"):
            if not isinstance(i.operands[1], Register) or "pred" not in i.parts:
                return plain
            key, same = self._condition(i.operands[1].name)
            return key, same == (i.name == "mov")
        if len(i.operands) != 3:
            return plain
        comparison, remainder = i.parts[0], i.parts[1:]
        if any(part.startswith("f") for part in remainder):
            return ("setp", i.parts, *map(self._value, i.operands[1:])), True
        is_first = comparison in ("eq", "lt", "le", "lo", "ls")
        base = comparison if is_first else _OPPOSITES.get(comparison, comparison)
        return ("setp", base, remainder, *map(self._value, i.operands[1:])), base == comparison

    def _value(self, operand: Any) -> _Key:
        """Return a key for an operand's value: equal for equal expressions of constant values."""
        if not isinstance(operand, Register):
            return operand
        where = self.definitions.get(operand.name, [])
        if len(where) == 1:
            i = self.function.code[where[0]]
            is_parameter = i.name == "ld" and "param" in i.parts
            special = any(isinstance(o, Special) and not o.name.startswith(_FIXED) for o in i.operands)
            if not i.guard and not special and (is_parameter or i.name in _PURE):
                return (i.name, i.parts, *map(self._value, i.operands[1:]))
        return ("register", operand.name)

    def _drops(self) -> dict[int, set[_Key]]:
        """Return the conditions that an instruction invalidates, because it defines one of their registers."""
        drops: dict[int, set[_Key]] = {}
        for key in self.tracked:
            for register in _registers_in(key):
                for pc in self.definitions.get(register, []):
                    drops.setdefault(pc, set()).add(key)
        return drops

    def _reachable_ends(self) -> tuple[int, int] | None:
        """Return the operations that may be in flight when a thread ends; None if there are too many paths."""
        pending = [0, 0]
        seen = {_State(0, (0, 0), frozenset())}
        ahead = list(seen)
        while ahead:
            state = ahead.pop()
            ends, following = self._step(state)
            for channel in (_BULK, _PRODUCTS):
                pending[channel] |= ends[channel]
            for after in following:
                if after not in seen:
                    seen.add(after)
                    ahead.append(after)
            if len(seen) > _MOST_STATES:
                return None
        return pending[0], pending[1]

    def _step(self, state: _State) -> tuple[tuple[int, int], list[_State]]:
        """Run to the next branch. Return the operations in flight if the thread may end there, and the next states."""
        pc, groups, known = state.pc, state.groups, state.known
        code = self.function.code
        while True:
            if pc >= len(code):
                return groups, []
            i = code[pc]
            if pc in self.drops:
                known = frozenset(item for item in known if item[0] not in self.drops[pc])
            is_branch = i.name in ("bra", "brx", "ret", "exit", "trap")
            changed = self._effect(i, groups)
            if not is_branch and (changed == groups or not i.guard):
                groups, pc = changed, pc + 1
                continue
            if not i.guard:
                return self._taken(i, groups, known)
            key, same = self._condition(i.guard[0])
            outcome = _outcome(key, dict(known))
            outcomes = [True, False] if outcome is None else [outcome]
            ends, following = (0, 0), list[_State]()
            for outcome in outcomes:
                runs = (outcome == same) != i.guard[1]
                now = known | {item for item in _implied(key, outcome) if item[0] in self.tracked}
                if not runs:
                    following.append(_State(pc + 1, groups, now))
                elif is_branch:
                    end, more = self._taken(i, groups, now)
                    ends = end if any(end) else ends
                    following += more
                else:
                    following.append(_State(pc + 1, changed, now))
            return ends, following

    def _taken(
        self, i: Instruction, groups: tuple[int, int], known: frozenset[tuple[_Key, bool]]
    ) -> tuple[tuple[int, int], list[_State]]:
        """Return the operations in flight if the thread ends with this instruction, and the other next states."""
        ends = groups if i.name in ("ret", "exit") else (0, 0)
        return ends, [_State(to, groups, known) for to in self._targets(i)]

    def _targets(self, i: Instruction) -> list[int]:
        """Return the possible targets of a branch."""
        if i.name not in ("bra", "brx"):
            return []
        labels, name = self.function.labels, i.operands[-1]
        if not isinstance(name, Symbol):
            return sorted(labels.values())
        return [labels[label] for label in self.function.tables.get(name.name, (name.name,))]

    def _effect(self, i: Instruction, groups: tuple[int, int]) -> tuple[int, int]:
        """Return the operations in flight after an instruction."""
        started, operation = _channel(i), _group_operation(i)
        if started is None and operation is None:
            return groups
        changed = list(groups)
        if started is not None:
            changed[started] |= 1
        elif operation is not None:
            name, channel = operation
            uncommitted, committed = groups[channel] & 1, groups[channel] >> 1
            if name == "commit_group":
                oldest = committed >> (_GROUPS - 1) << _GROUPS  # stays the oldest
                changed[channel] = uncommitted << 1 | (committed << 2 & (2 << _GROUPS) - 1) | oldest
            else:
                left = i.operands[0].bits if isinstance(i.operands[0], Immediate) else _GROUPS
                changed[channel] &= (2 << left) - 1
        return changed[0], changed[1]

    def _may_wait(self, start: int, channel: int) -> bool:
        """Return whether any path from an instruction has a wait for all groups."""
        code, seen, ahead = self.function.code, set[int](), [start]
        while ahead:
            pc = ahead.pop()
            if pc in seen or pc >= len(code):
                continue
            seen.add(pc)
            i = code[pc]
            if _group_operation(i) == ("wait_group", channel) and i.operands[0] == Immediate(0):
                return True
            ahead += self._targets(i)
            if i.guard or i.name not in ("bra", "brx", "ret", "exit", "trap"):
                ahead.append(pc + 1)
        return False


def _split_parts(key: _Key) -> Iterator[_Key]:
    """Return a condition and the conditions that it consists of."""
    yield key
    if key[0] in ("and", "or"):
        for part, _ in key[1:]:
            yield from _split_parts(part)


def _outcome(key: _Key, known: dict[_Key, bool]) -> bool | None:
    """Return the outcome of a condition if other conditions imply it, else None."""
    if key in known or key[0] not in ("and", "or"):
        outcome: bool | None = known.get(key)
        return outcome
    decides: bool = key[0] == "or"
    values = [None if (value := _outcome(part, known)) is None else value == same for part, same in key[1:]]
    if decides in values:
        return decides
    return None if None in values else not decides


def _implied(key: _Key, outcome: bool) -> Iterator[tuple[_Key, bool]]:
    """Yield the conditions that an outcome of a condition implies."""
    yield key, outcome
    if (key[0], outcome) in (("and", True), ("or", False)):
        for part, same in key[1:]:
            yield from _implied(part, outcome == same)


def _defined(i: Instruction) -> Iterator[str]:
    """Return the registers that an instruction may define."""
    nothing = ("st", "red", "bra", "brx", "bar", "barrier", "ret", "exit", "fence", "membar", "tensormap")
    if i.name not in nothing and i.operands:
        first = i.operands[0]
        for operand in first.items if isinstance(first, Vector) else (first,):
            if isinstance(operand, Register):
                yield operand.name


def _registers_in(key: _Key) -> Iterator[str]:
    """Return the registers that a condition depends on and that may change."""
    if isinstance(key, tuple):
        if len(key) == 2 and key[0] == "register":
            yield key[1]
        else:
            for part in key:
                yield from _registers_in(part)
