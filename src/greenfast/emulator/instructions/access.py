"""Instructions that touch memory: ld, st, atom, red, cp.async (PTX ISA, "Data Movement")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions import floats
from greenfast.emulator.instructions.operands import (
    list_items,
    load_address,
    load_window,
    parse_constant,
    parse_dtype,
    parse_type,
    reader,
    writer,
)
from greenfast.emulator.machine.blocks import ThreadSet, Values, lane_count, lane_indices
from greenfast.emulator.machine.memory import (
    BASES,
    IN_FLIGHT,
    WINDOW_BITS,
    WRITTEN,
    Arena,
    BadAccessError,
    explain_pointer,
    window,
)
from greenfast.emulator.machine.ordering import parse_scope
from greenfast.emulator.machine.state import Copy, Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Address, Instruction, Operand, Register, Symbol
from greenfast.emulator.ptx.unsupported import unsupported

Offsets = NDArray[np.int64]

#: Qualifiers of loads and stores that are never a race, and that threads may synchronize through.
STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})


def parse_space(i: Instruction) -> str:
    """Return the state space of an access; "generic" where the opcode names none."""
    for part in i.parts:
        name = part.split(":")[0]
        if name in ("global", "shared", "local", "param", "const"):
            return name
    return "generic"


def without_policy(i: Instruction, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Return the operands without the cache policy, the last operand of an instruction with a cache hint."""
    return operands[:-1] if "L2:cache_hint" in i.parts else operands


def addresses(operand: Operand, i: Instruction) -> Callable[[ResidentBlocks, ThreadSet], Offsets]:
    """Build a function that gives every thread's address, as written in the instruction."""
    if not isinstance(operand, Address) or operand.base is None:
        raise unsupported(i, "has an address that is not known")
    base, offset = operand.base, operand.offset
    if isinstance(base, Symbol):
        symbol = base if offset == 0 else replace(base, offset=base.offset + offset)
        generic = parse_space(i) == "generic"

        def symbol_address(m: ResidentBlocks, lanes: ThreadSet) -> Offsets:
            window = BASES.get(load_window(m, symbol.name), 0) if generic else 0
            return np.full(lane_count(lanes), load_address(m, symbol.name) + symbol.offset + window, np.int64)

        return symbol_address
    wide, narrow, low = reader(base, "u64", i), reader(base, "u32", i), np.uint32(offset & 0xFFFF_FFFF)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Offsets:
        if m.register(base.name).dtype.itemsize == 8:
            return np.asarray(wide(m, lanes)).view(np.int64) + offset
        values = np.asarray(narrow(m, lanes))
        return (values + low if offset else values).astype(np.int64)  # addresses of 32 bits wrap

    return run


def by_space(
    space: str,
    where: Callable[[ResidentBlocks, ThreadSet], Offsets],
    run: Callable[[ResidentBlocks, ThreadSet, Offsets], None],
) -> Operation:
    """Build an operation on each thread's address. Generic addresses run one state space at a time."""
    if space != "generic":
        return lambda m, lanes: run(m, lanes, where(m, lanes))

    def parted(m: ResidentBlocks, lanes: ThreadSet) -> None:
        addresses = where(m, lanes)
        windows = addresses >> WINDOW_BITS
        if len(windows) < 2 or (windows == windows[0]).all():
            run(m, lanes, addresses)
            return
        indices = lane_indices(lanes)
        for one in np.unique(windows):
            mine = windows == one
            run(m, indices[mine], addresses[mine])

    return parted


def locate(m: ResidentBlocks, space: str, addresses: Offsets, lanes: ThreadSet) -> tuple[Arena, Offsets, str]:
    """Return the arena of an access, the offsets into it, and the space that it turned out to be in."""
    if space == "generic":
        spaces = [window(int(a)) for a in np.unique(addresses >> WINDOW_BITS) << WINDOW_BITS]
        if len(spaces) != 1 or "none" in spaces:
            lost = next((n for n, a in enumerate(addresses) if window(int(a)) == "none"), -1)
            lane, pointer = int(lane_indices(lanes)[lost]), f"generic address {int(addresses[lost]):#x}"
            if lost >= 0:
                raise m.fault(f"{pointer} is in no memory{explain_pointer(int(addresses[lost]))}", lane)
            raise m.limit(f"{pointer} is in another memory than other threads' addresses (not emulated)", lane)
        space = spaces[0]
        addresses = addresses - (m.memory.base if space == "global" else BASES[space])
    elif space in ("global", "const"):  # constant variables are allocations like those in global memory
        addresses = addresses - m.memory.base
    if space in ("global", "const"):
        return m.memory, addresses, space
    if space == "param":
        return m.param_memory, addresses, space
    if space == "shared":
        addresses, mine = m.shared_offsets(addresses, lanes)
        if m.geometry.cluster_size > 1:
            m.races.warp_sync.record_remote_access(mine // m.shared_stride, lane_indices(lanes))
    else:
        mine = m.local_start[lanes]
    size = m.shared_bytes if space == "shared" else m.local_bytes
    if len(addresses) and int(addresses.view(np.uint64).max()) >= size:  # the address is in another block's memory
        position = int(np.flatnonzero((addresses < 0) | (addresses >= size))[0])
        where = f"byte {int(addresses[position])} of {size} of {space} memory"
        raise m.fault(f"access out of bounds: {where}", int(lane_indices(lanes)[position]), where)
    return (m.shared if space == "shared" else m.local), addresses + mine, space


def count_access(m: ResidentBlocks, space: str, store: bool, offsets: Offsets, lanes: ThreadSet, size: int) -> None:
    """Count an access of ``size`` bytes per thread by the current instruction."""
    m.counts.access(space, store, offsets, lanes, size, m.current.source)


def load(i: Instruction) -> Operation:
    """Build ld: values come back only from bytes that something wrote."""
    space = parse_space(i)
    if space == "param" and isinstance(getattr(i.operands[1], "base", None), Symbol):
        return _load_param(i)
    kind = parse_type(i)
    write = [writer(item, kind, i) for item in list_items(i.operands[0])]
    total = parse_dtype(kind).itemsize * len(write)
    where = addresses(i.operands[1], i)
    access = f"{total}-byte read"
    strong, scope = not STRONG.isdisjoint(i.parts), parse_scope(i.parts)

    def run(m: ResidentBlocks, lanes: ThreadSet, addresses: Offsets) -> None:
        arena, offsets, actual = locate(m, space, addresses, lanes)
        if m.redundant_loads is not None and actual == "global" and not strong and m.redundant_loads.contains(i):
            result = m.redundant_loads.read(m, arena, offsets, total, access, lanes)
        else:
            with m.accessing(lanes, actual):
                result = arena.read(offsets, total, access, strong)
        if strong and actual in ("global", "shared"):
            m.races.synchronize(actual, offsets, lanes, True, False, False, scope)
            if m.races.stale is not None:
                result = m.races.stale.read(actual, offsets, result, lanes)
        count_access(m, actual, False, offsets, lanes, total)
        values = result.view(parse_dtype(kind))
        for n, w in enumerate(write):
            w(m, lanes, values[:, n])

    return by_space(space, where, run)


def peek(arena: Arena, offsets: Offsets, size: int) -> NDArray[np.uint8]:
    """Return (threads, size) bytes without recording an access; zeros outside of the arena."""
    places = offsets[:, None] + np.arange(size)
    inside = (places >= 0) & (places < len(arena.data))
    return np.where(inside, arena.data[np.where(inside, places, 0)], np.uint8(0))


def store(i: Instruction) -> Operation:
    """Build st."""
    space = parse_space(i)
    kind = parse_type(i)
    read = [reader(item, kind, i) for item in list_items(i.operands[1])]
    size = parse_dtype(kind).itemsize * len(read)
    where = addresses(i.operands[0], i)
    access = f"{size}-byte write"
    strong, releases, scope = not STRONG.isdisjoint(i.parts), "release" in i.parts, parse_scope(i.parts)

    def run(m: ResidentBlocks, lanes: ThreadSet, addresses: Offsets) -> None:
        arena, offsets, actual = locate(m, space, addresses, lanes)
        values = np.empty((len(offsets), len(read)), parse_dtype(kind))
        for n, r in enumerate(read):
            values[:, n] = r(m, lanes)
        watched = strong and actual in ("global", "shared")
        stale = m.races.stale if watched else None
        before = peek(arena, offsets, size) if stale is not None else None
        with m.accessing(lanes, actual):
            arena.write(offsets, values.view(np.uint8), access, strong)
        if watched:
            m.races.synchronize(actual, offsets, lanes, False, True, releases, scope)
        if stale is not None and before is not None:
            stale.write(actual, offsets, before, lanes)
        count_access(m, actual, True, offsets, lanes, size)

    return by_space(space, where, run)


def _load_param(i: Instruction) -> Operation:
    kind = parse_type(i)
    destination, source = i.operands
    write = [writer(item, kind, i) for item in list_items(destination)]
    assert isinstance(source, Address)
    assert isinstance(source.base, Symbol)
    name, offset, dtype = source.base.name, source.offset, parse_dtype(kind)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        data = m.params.get(name)
        if data is None:
            raise m.limit("read of the bytes of a tensor map: they are not modelled", int(lane_indices(lanes)[0]))
        for n, w in enumerate(write):
            start = offset + n * dtype.itemsize
            if not 0 <= start <= len(data) - dtype.itemsize:
                reason = f"read of byte {start} of parameter {name}: it has {len(data)} bytes"
                raise m.fault(reason, int(lane_indices(lanes)[0]))
            w(m, lanes, np.frombuffer(data[start : start + dtype.itemsize], dtype)[0])

    return run


#: NumPy's functions of the operations of atomic accesses and reductions.
FUNCTIONS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


#: Operations of reductions into memory.
REDUCTIONS = (*FUNCTIONS, "inc", "dec")


def atomic(i: Instruction) -> Operation:
    """Build atom and red: the threads of a warp go one after the other, in order."""
    space = parse_space(i)
    kind = parse_type(i)
    dtype = parse_dtype(kind)
    operation = next(p for p in i.parts if p in (*REDUCTIONS, "exch", "cas"))
    returns, releases = i.name == "atom", not {"release", "acq_rel"}.isdisjoint(i.parts)
    scope = parse_scope(i.parts)
    target, *sources = without_policy(i, i.operands[1:] if returns else i.operands)
    parts = [list_items(s) for s in sources]
    read = [[reader(item, kind, i) for item in column] for column in zip(*parts, strict=True)]
    write = [writer(r, kind, i) for r in list_items(i.operands[0])] if returns else []
    where, whole = addresses(target, i), len(read) * dtype.itemsize

    def run(m: ResidentBlocks, lanes: ThreadSet, addresses: Offsets) -> None:
        arena, offsets, actual = locate(m, space, addresses, lanes)
        with m.accessing(lanes, actual):
            before = arena.read(offsets, whole, f"{whole}-byte atomic access", True)
        after = atomic_result(operation, kind, actual)
        watched = actual in ("global", "shared")
        if watched:
            m.access_lanes = lanes
            m.races.atomics.check(actual, offsets, whole, scope, lock=operation in ("cas", "exch"))
            m.races.synchronize(actual, offsets, lanes, returns, True, releases, scope)
            if m.races.stale is not None:
                m.races.stale.read(actual, offsets, before, lanes, newest=True)
                m.races.stale.write(actual, offsets, before.copy(), lanes)
        changed = np.zeros(len(offsets), np.bool_)
        sources = [[np.broadcast_to(np.array(r(m, lanes)), len(offsets)) for r in column] for column in read]
        for element, arguments in enumerate(sources):  # each element of a vector for itself
            old, new = apply_atomically(arena, offsets + element * dtype.itemsize, dtype, after, arguments)
            changed |= new
            if write:
                write[element](m, lanes, old)
        if watched and changed.any():
            m.access_lanes = lane_indices(lanes)[changed]
            m.races.atomics.record(actual, offsets[changed], whole)

    return by_space(space, where, run)


def apply_atomically(
    arena: Arena, offsets: Offsets, dtype: Any, after: Callable[..., Any], arguments: Sequence[Values]
) -> tuple[Values, NDArray[np.bool_]]:
    """Apply an atomic operation to elements, one after the other. Return their old values, and which have changed.

    after: from ``atomic_result``. arguments: each a value per element.
    """
    cells, old = arena.data.view(dtype), np.empty(len(offsets), dtype)
    changed = np.zeros(len(offsets), np.bool_)
    for n, row in enumerate(offsets // dtype.itemsize):
        old[n] = cells[row]
        new = after(old[n], *(a[n] for a in arguments))
        cells[row], changed[n] = new, new != old[n]
    if arena.poisoned:  # previously unwritten bytes hold a value now
        for byte in range(dtype.itemsize):
            arena.state[offsets + byte] = WRITTEN
    arena.writes += int(np.count_nonzero(changed))
    return old, changed


def atomic_result(operation: str, kind: str, space: str) -> Callable[..., Any]:
    """Build the function that computes the new value of an atomic operation from the old value and the arguments."""
    if operation == "exch":
        return lambda old, new: new
    if operation == "cas":
        return lambda old, expected, new: new if old == expected else old
    if operation == "inc":
        return lambda old, limit: 0 if old >= limit else old + 1
    if operation == "dec":
        return lambda old, limit: limit if old == 0 or old > limit else old - 1
    if operation == "add" and kind in floats.KINDS:
        # The ISA: on global memory atom.add.f32 flushes subnormal inputs and results.
        return floats.build_sum(kind, ftz=kind == "f32" and space == "global")
    function: Callable[..., Any] = FUNCTIONS[operation]
    return function


def asynchronous_copy(i: Instruction) -> Operation:
    """Build cp.async: the data is read now and lands at the wait; until then reading it is a fault."""
    if "commit_group" in i.parts:
        return _commit
    if "wait_group" in i.parts:
        pending = parse_constant(i.operands[0], i)
        return lambda m, lanes: deliver(m, lanes, pending)
    if "wait_all" in i.parts:
        return _deliver_all
    size = parse_constant(i.operands[2], i)
    to, source = addresses(i.operands[0], i), addresses(i.operands[1], i)
    source_bytes = _source_size(i, size)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        indices = lane_indices(lanes)
        present = np.broadcast_to(source_bytes(m, lanes), len(indices))
        values = np.zeros((len(indices), size), np.uint8)
        arena, offsets, _ = locate(m, "shared", to(m, lanes), lanes)
        sources = source(m, lanes) - m.memory.base
        if (present > size).any():
            bad = int(indices[present > size][0])
            raise m.fault(f"cp.async of {int(present.max())} source bytes to {size} bytes", bad)
        for count in np.unique(present[present > 0]):
            some = present == count
            with m.accessing(indices[some], "global"):
                values[some, :count] = _bytes(m, sources[some], size, int(count))
            count_access(m, "global", False, sources[some], indices[some], int(count))
        with m.accessing(indices, "shared"):
            arena.mark(offsets, size, IN_FLIGHT, f"{size}-byte asynchronous write")
            if arena.on_write is not None:
                arena.on_write(offsets, size, None)
        count_access(m, "shared", True, offsets, indices, size)
        m.copies.append(Copy(indices, offsets, values, m.copy_groups[indices].copy(), m.copies_issued, m.current))
        m.copies_issued += 1

    return run


def _source_size(i: Instruction, size: int) -> Callable[[ResidentBlocks, ThreadSet], Values]:
    """Return how many bytes each thread copies; the rest of its ``size`` bytes becomes zero."""
    operands = without_policy(i, i.operands)
    if len(operands) < 4:
        return lambda m, lanes: np.asarray(size)
    last = operands[3]
    if isinstance(last, Register):
        read, ignore = reader(last, "u32", i), reader(last, "pred", i)

        def count(m: ResidentBlocks, lanes: ThreadSet) -> Values:
            if m.register(last.name).dtype == np.bool_:  # the form with a predicate: whether to ignore the source
                return np.where(ignore(m, lanes), 0, size)
            return read(m, lanes)

        return count
    return reader(last, "u32", i)


def _bytes(m: ResidentBlocks, sources: Offsets, size: int, count: int) -> NDArray[np.uint8]:
    """Return (threads, count) bytes of global memory, at addresses that are aligned to ``size``."""
    access = f"{count}-byte read"
    if count == size:
        return m.memory.read(sources, size, access)
    misaligned = np.flatnonzero(sources & (size - 1))
    if len(misaligned):
        raise BadAccessError(f"misaligned {access}", int(misaligned[0]), int(sources[misaligned[0]]))
    return np.concatenate([m.memory.read(sources + n, 1, access) for n in range(count)], axis=1)


def _commit(m: ResidentBlocks, lanes: ThreadSet) -> None:
    m.copy_groups[lanes] += 1


def _deliver_all(m: ResidentBlocks, lanes: ThreadSet) -> None:
    """Complete all copies (wait_all), also copies without a commit."""
    _commit(m, lanes)
    deliver(m, lanes, 0)


def deliver(m: ResidentBlocks, lanes: ThreadSet, pending: int) -> None:
    """Complete the threads' copies in all groups except the newest ``pending`` ones."""
    land(m, lanes, lambda copy: copy.groups < m.copy_groups[copy.lanes] - pending)


def land(m: ResidentBlocks, lanes: ThreadSet, selected: Callable[[Copy], Any]) -> None:
    """Complete the threads' copies that ``selected`` selects."""
    waiting = np.zeros(m.lanes, bool)
    waiting[lanes] = True
    in_flight = []
    for copy in m.copies:
        done = waiting[copy.lanes] & selected(copy)
        if done.any():
            m.shared.place(copy.offsets[done], copy.values[done])
            m.races.record_finished(copy.offsets[done], copy.values.shape[1], copy.lanes[done], True, copy.instruction)
            if m.proxies is not None:
                m.proxies.record_cp_async(copy.offsets[done], copy.lanes[done], copy.instruction)
        if not done.all():
            left = ~done
            in_flight.append(
                replace(
                    copy,
                    lanes=copy.lanes[left],
                    offsets=copy.offsets[left],
                    values=copy.values[left],
                    groups=copy.groups[left],
                )
            )
    m.copies = in_flight


BUILDERS = {"ld": load, "ldu": load, "st": store, "atom": atomic, "red": atomic, "cp": asynchronous_copy}
