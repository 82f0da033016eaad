"""Compile a stretch with LLVM."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm

from greenfast.emulator.compiled.accesses import CountedAccess, MemoryCode, load_parameter
from greenfast.emulator.compiled.arithmetic import LOWERED
from greenfast.emulator.compiled.context import DONE, Slot
from greenfast.emulator.compiled.ir import I64, POINTER, Builder, IrFunction, IrModule, Phi, Value
from greenfast.emulator.compiled.lane import Lane, NotCompiledError
from greenfast.emulator.compiled.patterns import counter_name, define_counter
from greenfast.emulator.machine.blocks import WARP
from greenfast.emulator.ptx.forms import refusal
from greenfast.emulator.ptx.syntax import Function, Instruction
from greenfast.emulator.ptx.unsupported import unsupported


@dataclass(frozen=True)
class MachineCode:
    """A compiled stretch. run(context, registers, symbols, out, cache) returns a status (accesses.py).

    registers, symbols: the tables of pointers and addresses. out: the instructions with a guard that a call has
    executed; two counts per guard, of warps and of threads; four per access (MemoryCode.count). cache: a pattern per
    access.
    """

    run: Callable[[int, int, int, int, int], int]
    registers: Sequence[str]
    symbols: Sequence[tuple[str, str]]
    accesses: Sequence[CountedAccess]
    guards: int
    keep: Any


class RefusedError(Exception):
    """A stretch holds an instruction that stays with the interpreter; index: its position in the stretch."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def compile_stretch(
    code: Sequence[Instruction],
    function: Function,
    live: Collection[str] | None,
    units: Mapping[str, int],
    specials: Collection[str],
    *,
    sparse: bool,
    tags: bool,
    effort: int = 0,
) -> MachineCode:
    """Compile instructions for threads that come as a list of indices (sparse), or are adjacent whole warps.

    live: the registers that are read after them, None for all. units, tags: see MemoryCode. specials: the special
    registers that exist. effort: how long to compile, 0 to 3. Raises RefusedError.
    """
    module = IrModule()
    lane = Lane(IrFunction(module, "stretch", [POINTER] * 5, I64), function, specials, _has_halves())
    accesses = MemoryCode(lane, dict(units), whole=not sparse, tags=tags)
    loop = _begin_thread(lane, sparse)
    guards: list[tuple[Value, Value]] = []
    for n, i in enumerate(code):
        try:
            _emit(lane, accesses, i, guards)
        except (NotCompiledError, KeyError, ValueError, StopIteration) as e:
            raise RefusedError(n) from e
        except type(unsupported(i)) as e:
            raise RefusedError(n) from e
    lane.store_registers(live)
    accesses.count(1 + 2 * len(guards))
    _end_thread(lane, loop, guards, sparse)
    for access in accesses.accesses:
        _link_counter(access.parts)
    run, keep = _assemble(str(module), effort)
    return MachineCode(run, lane.names, lane.symbol_names, accesses.accesses, len(guards), keep)


def _emit(lane: Lane, accesses: MemoryCode, i: Instruction, guards: list[tuple[Value, Value]]) -> None:
    """Emit an instruction, and count the threads that execute it if it has a guard."""
    if refusal(i.name, i.parts):
        raise NotCompiledError(i.text)
    lane.guard, number = None, -1
    if i.guard is not None:
        value = lane.value(i.guard[0])
        lane.guard = lane.b.not_(value) if i.guard[1] else value
        number = len(guards)
        counter, total = lane.entry.alloca(I64), lane.entry.alloca(I64)
        lane.entry.store(I64(0), total)
        lane.warp.store(I64(0), counter)
        lane.b.store(lane.b.add(lane.b.load(I64, counter), lane.b.convert("zext", lane.guard, I64)), counter)
        guards.append((counter, total))
    if i.name == "ld" and load_parameter(lane, i):
        return
    if i.name in ("ld", "st"):
        accesses.emit(i, number)
    else:
        LOWERED[i.name](lane, i)


@dataclass
class _Loop:
    """The loops over warps and over their threads: heads, indices of the first thread of a warp and of a thread."""

    warp_head: Builder
    head: Builder
    first: Phi
    index: Phi
    count: Value
    lanes: Value


def _begin_thread(c: Lane, sparse: bool) -> _Loop:
    """Emit the heads of the loops over the warps and over the threads of one."""
    warp_head, head = Builder(c.function, c.function.new_block()), Builder(c.function, c.function.new_block())
    first, index = warp_head.phi(I64), head.phi(I64)
    loop = _Loop(warp_head, head, first, index, c.slot(Slot.COUNT), c.pointer(Slot.LANES))
    if sparse:
        c.thread = head.load(I64, head.element(I64, loop.lanes, index.value))
        c.lane = head.and_(c.thread, I64(WARP - 1))
    else:
        c.thread = head.add(c.slot(Slot.START), index.value)
        c.lane = head.sub(index.value, first.value)
    head.branch(c.prologue.block)
    return loop


def _end_thread(c: Lane, loop: _Loop, guards: list[tuple[Value, Value]], sparse: bool) -> None:
    """Emit the ends of the loops, and connect all blocks."""
    b = c.b
    following = b.add(loop.index.value, I64(1))
    if sparse:
        more = c.function.new_block()
        b.cbranch(b.icmp_signed("<", following, loop.count), more, c.after_warp_start)
        b.block = more
        differs = b.xor(b.load(I64, b.element(I64, loop.lanes, following)), c.thread)
        same_warp = b.icmp_unsigned("<", differs, I64(WARP))
    else:
        same_warp = b.icmp_signed("<", b.sub(following, loop.first.value), I64(WARP))
    b.cbranch(same_warp, loop.head.block, c.after_warp_start)
    loop.index.add(loop.first.value, c.warp.block)
    loop.index.add(following, b.block)
    b = c.after_warp
    for n, (counter, total) in enumerate(guards):
        threads = b.load(I64, counter)
        some = b.convert("zext", b.icmp_signed(">", threads, I64(0)), I64)
        for offset, value in ((0, some), (1, threads)):
            place = b.element(I64, c.out, I64(1 + 2 * n + offset))
            b.store(b.add(b.load(I64, place), value), place)
        b.store(b.add(b.load(I64, total), threads), total)
    b.branch(loop.warp_head.block)
    loop.first.add(I64(0), c.entry.block)
    loop.first.add(following, b.block)
    done = Builder(c.function, c.function.new_block())
    more_warps = loop.warp_head.icmp_signed("<", loop.first.value, loop.count)
    loop.warp_head.cbranch(more_warps, c.warp.block, done.block)
    c.warp.branch(loop.head.block)
    c.prologue.branch(c.body_start)
    executed = I64(0)
    for _, total in guards:
        some = done.icmp_signed(">", done.load(I64, total), I64(0))
        executed = done.add(executed, done.convert("zext", some, I64))
    done.store(executed, c.out)
    done.ret(I64(DONE))
    c.entry.branch(loop.warp_head.block)


@cache
def _has_halves() -> bool:
    """Return whether this CPU converts to and from f16: else LLVM calls functions that are not there."""
    return bool(llvm.get_host_cpu_features().get("f16c", True))


@cache
def _describe_host() -> tuple[Any, str, str]:
    """Return LLVM's target, the name of the CPU and its features."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _create_machine(effort: int) -> Any:
    """Return LLVM's description of this machine, for one engine to own; effort: 0 to 3, like a compiler's -O."""
    target, cpu, features = _describe_host()
    return target.create_target_machine(cpu=cpu, features=features, opt=effort, jit=True)


#: Engines with a function of patterns.py, by its number of parts: the linker knows its address. The lock is held while
#: one is made. Two threads that made it at once would keep one engine and free the other.
_COUNTERS: dict[int, Any] = {}
_COUNTERS_LOCK = threading.Lock()


def _link_counter(parts: int) -> None:
    """Compile a function of patterns.py, and make it known to the linker."""
    with _COUNTERS_LOCK:
        if parts in _COUNTERS:
            return
        module = IrModule()
        define_counter(module, parts)
        counter, machine = llvm.parse_assembly(str(module)), _create_machine(2)
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(counter, builder)
        engine = llvm.create_mcjit_compiler(counter, machine)
        engine.finalize_object()
        llvm.add_symbol(counter_name(parts), engine.get_function_address(counter_name(parts)))
        _COUNTERS[parts] = engine


def _assemble(text: str, effort: int) -> tuple[Any, Any]:
    """Return the function ``stretch`` of a module, and what has to be kept for it.

    LLVM's passes are left out: they take longer than the rest of it, and gain nothing (docs/performance-log.md).
    """
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), _create_machine(effort))
    engine.finalize_object()
    address = engine.get_function_address("stretch")
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(address), engine
