"""Stretches of instructions without branches that run as machine code once they have run often.

Instructions on registers are compiled in every program. Loads and stores are compiled if the program's warps run in
lockstep (lockstep.py), and only as accesses without a fault or race: any other ends the run by RestartCompiled, and the
next run decides.

Each thread of a stretch runs through all instructions before the next thread begins. This order changes no result: two
accesses of different threads to one place are reported unless both are reads.

Without llvmlite (greenfast[compiled]) all instructions are interpreted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np

from greenfast.emulator.compiled.context import ACCESS_COUNTS, CACHE_SLOTS, FIRST_OWNER, CallContext
from greenfast.emulator.instructions.access import parse_space
from greenfast.emulator.instructions.convert import HALVES
from greenfast.emulator.instructions.operands import load_address
from greenfast.emulator.machine.access_log import RestartWithReadTracking
from greenfast.emulator.machine.blocks import ThreadSet
from greenfast.emulator.machine.epochs import INTERPRETED, TAGS, RestartCompiled
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.ptx.syntax import CLOCKS, Address, Function, Instruction, Special, Symbol, list_registers
from greenfast.spec.errors import MachineError

#: Opcodes that may be compiled (arithmetic.py).
_REGISTERS = frozenset({
    "mov", "cvta", "add", "sub", "mul", "mad", "fma", "and", "or", "xor", "not", "shl", "shr", "shf", "lop3", "prmt",
    "bfe", "popc", "clz", "min", "max", "neg", "abs", "setp", "selp", "div", "sqrt", "rcp", "cvt",
})  # fmt: skip
#: The first release of llvmlite that works (pyproject.toml).
OLDEST_LLVMLITE = [0, 46]
#: The first and last byte of no access.
_NO_SPAN = (1 << 62, -1)
#: A stretch of fewer instructions is interpreted.
_FEWEST = 4
#: When to compile: once a stretch has been interpreted for about as long as compiling it takes. Microseconds of
#: compiling a stretch and each of its instructions, and of interpreting an instruction and each of its threads.
COMPILE_STRETCH, COMPILE_INSTRUCTION = 1500.0, 100.0
#: Microseconds of interpreting stretches in this process after which LLVM is loaded: about as long as that takes.
LOAD_LLVM = 150_000.0
_INTERPRET_INSTRUCTION, _INTERPRET_THREAD = 8.0, 0.008
#: After how many threads LLVM optimizes the machine code of a stretch. It then takes twice as long to compile, and runs
#: in 0.6 of the time.
OPTIMIZE_AFTER = 1_000_000


@cache
def is_available() -> bool:
    """Return whether stretches can be compiled here. Older releases of llvmlite have an LLVM with other pointers."""
    try:
        release = importlib.metadata.version("llvmlite").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return [int(n) for n in release[:2]] >= OLDEST_LLVMLITE


def _import_build() -> Any:
    """Import the compiler, only once it is needed: it loads LLVM. Raises MachineError for a broken llvmlite."""
    try:
        return importlib.import_module("greenfast.emulator.compiled.build")
    except (ImportError, OSError) as e:
        raise MachineError(
            f"llvmlite is installed and cannot be imported ({e}): install it again, or uninstall it: without it the "
            "emulator interprets all instructions"
        ) from e


@dataclass(eq=False)
class Stretch:
    """Instructions ``start`` to ``end`` - 1, entered only at the first. keys: their names in the counts.

    heat: microseconds of interpreting it. threads: how many threads have run it as machine code. code: its machine code
    once compiled, for threads by their indices (True) and for whole warps (False).
    """

    start: int
    end: int
    instructions: list[Instruction]
    keys: list[str]
    heat: float = 0.0
    threads: int = 0
    code: dict[bool, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unguarded = Counter(key for key, i in zip(self.keys, self.instructions, strict=True) if i.guard is None)
        self.always = sum(self.unguarded.values())
        memory = [(i.name, _arena(i)) for i in self.instructions if i.name in ("ld", "st") and not _is_parameter(i)]
        self.loads = {arena for name, arena in memory if name == "ld"}
        self.stores = {arena for name, arena in memory if name == "st"}
        self.touches = bool(memory)

    @property
    def length(self) -> int:
        """The number of instructions."""
        return self.end - self.start


def _arena(i: Instruction) -> str:
    space = parse_space(i)
    return "global" if space == "const" else space


def _is_parameter(i: Instruction) -> bool:
    operand = i.operands[1] if i.name == "ld" else None
    return isinstance(operand, Address) and isinstance(operand.base, Symbol) and parse_space(i) == "param"


def _may_compile(i: Instruction, memory: bool) -> bool:
    """Return whether an instruction may be compiled; the compiler decides."""
    if any(isinstance(o, Special) and o.name in CLOCKS for o in i.operands):
        return False
    if i.name in ("ld", "st"):
        return _is_parameter(i) or (memory and parse_space(i) in ("shared", "global", "local", "const"))
    return i.name in _REGISTERS and "cc" not in i.parts


def _find_guarded(function: Function) -> set[str]:
    """Return the registers of wgmma, and their copies by mov: each access to them is checked (in_flight.py)."""
    products = [i for i in function.code if i.name == "wgmma"]
    result = {name for i in products for o in i.operands for name in list_registers(o)}
    moves = [i.operands for i in function.code if result and i.name == "mov"]
    before = -1
    while before != len(result):
        before = len(result)
        for target, source in moves:
            if not result.isdisjoint(list_registers(source)):
                result.update(list_registers(target))
    return result


def find_stretches(function: Function, keys: list[str], memory: bool) -> dict[int, Stretch]:
    """Return the stretches of a program by their first instruction; memory: with loads and stores."""
    leaders, guarded = set(function.labels.values()), _find_guarded(function)
    result: dict[int, Stretch] = {}
    start = 0
    for pc in range(len(function.code) + 1):
        ends = pc == len(function.code) or not _may_compile(function.code[pc], memory)
        ends = ends or not guarded.isdisjoint(n for o in function.code[pc].operands for n in list_registers(o))
        if ends or pc in leaders:
            _add(result, function, keys, start, pc)
            start = pc + ends
    return result


class Compilable(Protocol):
    """The part of a program that describes its stretches (program.py)."""

    function: Function
    keys: list[str]
    stretches: dict[bool, dict[int, Stretch]]
    compiled_accesses: str

    @property
    def liveness(self) -> Liveness:
        """The registers that are read later."""


def bind_stretches(machine: ResidentBlocks, program: Compilable) -> CompiledCode | None:
    """Return the compiled code of a program for a machine; None if all of its instructions are interpreted."""
    if not is_available() or machine.phases is not None:
        return None
    mode = program.compiled_accesses if machine.lockstep_units and machine.launches is None else INTERPRETED
    memory = mode != INTERPRETED
    stretches = program.stretches.get(memory)
    if stretches is None:
        stretches = program.stretches[memory] = find_stretches(program.function, program.keys, memory)
    return CompiledCode(machine, program, stretches, mode == TAGS) if stretches else None


def _add(stretches: dict[int, Stretch], function: Function, keys: list[str], start: int, end: int) -> None:
    if end - start >= _FEWEST:
        stretches[start] = Stretch(start, end, function.code[start:end], keys[start:end])


class Liveness:
    """The registers that may be read from each instruction of a function on."""

    def __init__(self, function: Function) -> None:
        self._names: dict[str, int] = {}
        #: By instruction, a bit for each register; empty if the flow of control is not known.
        self._bits: list[int] = []
        code = function.code
        reads, writes, following = [0] * len(code), [0] * len(code), list[list[int]]()
        for pc, i in enumerate(code):
            label = i.operands[0] if i.name == "bra" else None
            if "~" in i.name or i.name == "brx" or (label and getattr(label, "name", "") not in function.labels):
                return
            pure = i.name in _REGISTERS or i.name == "ld"
            guard = [i.guard[0]] if i.guard is not None else []
            reads[pc] = self._mask([*guard, *(name for o in i.operands[pure:] for name in list_registers(o))])
            if pure and not guard:
                writes[pc] = self._mask(list_registers(i.operands[0]))
            ends = not guard and i.name in ("ret", "exit", "trap", "bra")
            following.append([] if ends else [pc + 1])
            if isinstance(label, Symbol):
                following[-1].append(function.labels[label.name])
        self._bits = [0] * (len(code) + 1)
        changed = True
        while changed:
            changed = False
            for pc in range(len(code) - 1, -1, -1):
                after = 0
                for n in following[pc]:
                    after |= self._bits[n]
                now = reads[pc] | (after & ~writes[pc])
                if now != self._bits[pc]:
                    self._bits[pc], changed = now, True

    def _mask(self, names: list[str]) -> int:
        result = 0
        for name in names:
            result |= 1 << self._names.setdefault(name, len(self._names))
        return result

    def get_registers(self, pc: int) -> frozenset[str] | None:
        """Return the registers that may be read from an instruction on; None if that is not known."""
        if not self._bits:
            return None
        return frozenset(name for name, n in self._names.items() if self._bits[pc] >> n & 1)


class _Bound:
    """Machine code with the tables of one machine: pointers to its registers, and the counts of all calls."""

    def __init__(self, stretch: Stretch, code: Any, machine: ResidentBlocks) -> None:
        self.stretch, self.code = stretch, code
        registers = [
            machine.specials[name] if name in machine.specials else machine.register(name) for name in code.registers
        ]
        self.registers = np.array([r.ctypes.data for r in registers], np.int64)
        self.symbols = np.array([_find_symbol(machine, *symbol) for symbol in code.symbols], np.int64)
        self.out = np.zeros(1 + 2 * code.guards + ACCESS_COUNTS * len(code.accesses), np.int64)
        #: The first and last byte of each access to shared memory, with the name of that load or store.
        self.loads: dict[object, Any] = {}
        self.stores: list[Any] = []
        for n, access in enumerate(code.accesses):
            span = self._counts(n)[2:4]
            span[:] = _NO_SPAN
            if access.space == "shared" and access.store:
                self.stores.append(span)
            elif access.space == "shared":
                self.loads[self, n] = span
        self.cache = np.full(max(1, len(code.accesses)) * CACHE_SLOTS, -1, np.int64)
        self.arguments = [a.ctypes.data for a in (self.registers, self.symbols, self.out, self.cache)]
        self.warps = self.threads = 0
        self.fresh = True
        self.optimized = stretch.threads > OPTIMIZE_AFTER

    def _counts(self, n: int) -> Any:
        """Return the counts of an access."""
        first = 1 + 2 * self.code.guards + ACCESS_COUNTS * n
        return self.out[first : first + ACCESS_COUNTS]

    def take_access(self, n: int) -> tuple[int, int]:
        """Return the two counts of an access, and begin again with 0."""
        counts = self._counts(n)
        first, second = counts[:2].tolist()
        counts[:2] = 0
        return first, second


class CompiledCode:
    """The compiled stretches of a program on a machine; tags: see MemoryCode."""

    #: Microseconds of interpreting stretches in this process.
    interpreted = 0.0

    def __init__(self, machine: ResidentBlocks, program: Compilable, stretches: dict[int, Stretch], tags: bool) -> None:
        self.m, self.program, self.stretches = machine, program, stretches
        self._bound: dict[tuple[int, bool], _Bound] = {}
        self._context = CallContext(machine, tags)

    def run(self, pc: int, lanes: ThreadSet, size: tuple[int, int]) -> int:
        """Run the stretch that begins at an instruction. Return the instruction after it, or ``pc`` if it did not run.

        Raises RestartCompiled and RestartWithReadTracking.
        """
        sparse = not isinstance(lanes, slice)
        bound = self._bound.get((pc, sparse))
        if bound is None:
            bound = self._bind(self.stretches[pc], sparse, size[1])
            if bound is None:
                return pc
        stretch, context = bound.stretch, self._context
        context.set_threads(lanes)
        if stretch.touches:
            self._begin(bound)
        status = bound.code.run(context.address, *bound.arguments)
        if status:
            if status >= FIRST_OWNER:
                raise RestartWithReadTracking(self.m.memory.get_name(status - FIRST_OWNER))
            raise RestartCompiled(INTERPRETED)
        if stretch.touches:
            self._end(bound)
        bound.warps += size[0]
        bound.threads += size[1]
        stretch.threads += size[1]
        if stretch.threads > OPTIMIZE_AFTER and not bound.optimized:
            self._compile(stretch, sparse, effort=1)
            bound.code, bound.optimized = stretch.code[sparse], True
        self.m.executed += stretch.always + (int(bound.out[0]) if bound.code.guards else 0)
        if bound.fresh:  # so that names enter the counters in the order of their execution
            bound.fresh = False
            self._flush(bound)
        return stretch.end

    def _begin(self, bound: _Bound) -> None:
        """Prepare the accesses of a call."""
        self._context.begin(bound.stretch.loads, bound.stretch.stores)
        for span in bound.stores:
            span[:] = _NO_SPAN
        spans = self._context.read_spans
        if spans is not None and bound.loads and spans.keys().isdisjoint(bound.loads):
            for span in bound.loads.values():
                span[:] = _NO_SPAN
            spans.update(bound.loads)

    def _end(self, bound: _Bound) -> None:
        """Check and note the accesses of a call."""
        self._context.end(bound.stretch.loads, bound.stretch.stores)
        for span in bound.stores:
            self._context.check_span(*span.tolist())

    def _bind(self, stretch: Stretch, sparse: bool, threads: int) -> _Bound | None:
        """Return the machine code of a stretch for this machine; None if it has not run often enough."""
        compiled = sparse in stretch.code or (self._is_worth(stretch, threads) and self._compile(stretch, sparse))
        if not compiled:
            return None
        code = stretch.code[sparse]
        if any(kind == "param" and name not in self.m.params for kind, name in code.symbols):
            del self.stretches[stretch.start]
            return None
        bound = self._bound[stretch.start, sparse] = _Bound(stretch, code, self.m)
        return bound

    def _is_worth(self, stretch: Stretch, threads: int) -> bool:
        """Return whether a stretch has been interpreted for as long as compiling it takes."""
        time = stretch.length * (_INTERPRET_INSTRUCTION + _INTERPRET_THREAD * threads)
        stretch.heat += time
        CompiledCode.interpreted += time
        cost = COMPILE_STRETCH + COMPILE_INSTRUCTION * stretch.length
        return stretch.heat >= cost and CompiledCode.interpreted >= LOAD_LLVM

    def _compile(self, stretch: Stretch, sparse: bool, effort: int = 0) -> bool:
        """Compile a stretch, or split it at an instruction that stays with the interpreter."""
        if "shared" in stretch.loads and self._context.overlaps and not self._context.tags:
            self._record_tags()
        live = self.program.liveness.get_registers(stretch.end)
        build = _import_build()
        try:
            stretch.code[sparse] = build.compile_stretch(
                stretch.instructions,
                self.m.function,
                live,
                self.m.lockstep_units or {},
                self.m.specials.keys(),
                sparse=sparse,
                tags=self._context.tags,
                effort=effort,
            )
        except build.RefusedError as e:
            del self.stretches[stretch.start]
            middle = stretch.start + e.index
            for start, end in ((stretch.start, middle), (middle + 1, stretch.end)):
                _add(self.stretches, self.m.function, self.program.keys, start, end)
                if start in self.stretches:
                    self.stretches[start].heat = stretch.heat * (end - start) / stretch.length
            return False
        return True

    def _record_tags(self) -> None:
        """Record reads of shared memory by thread from now on. Restart if some have been recorded as spans."""
        self.program.compiled_accesses = TAGS
        self._context.tags = True
        if any(stretch.code and "shared" in stretch.loads for stretch in self.stretches.values()):
            raise RestartCompiled(TAGS)

    def flush(self) -> None:
        """Add the counts of all calls to the machine's counts."""
        for bound in self._bound.values():
            self._flush(bound)

    def _flush(self, bound: _Bound) -> None:
        stretch = bound.stretch
        counts = self.m.counts
        guard = access = 0
        for key, i in zip(stretch.keys, stretch.instructions, strict=True):
            warps, threads = bound.warps, bound.threads
            if i.guard is not None:
                warps, threads = bound.out[1 + 2 * guard : 3 + 2 * guard].tolist()
                bound.out[1 + 2 * guard : 3 + 2 * guard] = 0
                guard += 1
            if warps:
                counts.instructions[key] += warps
                counts.threads[key] += threads
            if access < len(bound.code.accesses) and bound.code.accesses[access].instruction is i:
                a, passes = bound.code.accesses[access], bound.take_access(access)
                if threads:
                    counts.add_access(a.space, a.store, threads * a.size, *passes, i.source)
                access += 1
        bound.warps = bound.threads = 0


def _find_symbol(machine: ResidentBlocks, kind: str, name: str) -> int:
    """Return the address of a variable, the place of a parameter, or the address of a table of halves."""
    if kind == "table":
        return int(HALVES[name].ctypes.data)
    return machine.param_layout[name] if kind == "param" else load_address(machine, name)
