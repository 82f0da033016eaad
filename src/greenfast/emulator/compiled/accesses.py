"""Loads and stores as code of one thread, with the checks of memory.py and epochs.py and the counts of counts.py.

An access that the interpreter might report ends the run (RestartCompiled): the grid runs again with interpreted
accesses, and that run decides. So the code only handles correct accesses.
"""

from __future__ import annotations

from dataclasses import dataclass

from greenfast.emulator.compiled.context import (
    ACCESS_COUNTS,
    CACHE_SLOTS,
    FIRST_OWNER,
    INPUT,
    OWNER_SHIFT,
    READ,
    TRACKED,
    Slot,
)
from greenfast.emulator.compiled.ir import I8, I32, I64, VOID, Value, integer
from greenfast.emulator.compiled.lane import Lane, NotCompiledError
from greenfast.emulator.compiled.patterns import NO_THREAD, counter_name
from greenfast.emulator.instructions.access import STRONG, parse_space
from greenfast.emulator.instructions.operands import list_items, parse_dtype, parse_type
from greenfast.emulator.machine.blocks import WARP
from greenfast.emulator.machine.epochs import BLOCK_BITS, SEVERAL, SEVERAL_WARPS, THREAD_BITS, WARP_BITS
from greenfast.emulator.machine.memory import UNWRITTEN, WRITTEN
from greenfast.emulator.ptx.syntax import Address, Instruction, Operand, Register, Symbol

_THREAD, _WARP, _BLOCKS = int(THREAD_BITS), int(WARP_BITS), int(BLOCK_BITS)
_SEVERAL, _SEVERAL_WARPS, _ONE_BLOCK = int(SEVERAL), int(SEVERAL_WARPS), _BLOCKS & -_BLOCKS


@dataclass
class CountedAccess:
    """An access of a stretch, for its counts; number: of its guard's counts, -1 without a guard."""

    instruction: Instruction
    space: str
    store: bool
    size: int
    guard: int

    @property
    def parts(self) -> int:
        """The words per thread of an access to shared memory; 0 for other memory."""
        return max(1, self.size // 4) if self.space == "shared" else 0


def _find_targets(i: Instruction, items: tuple[Operand, ...]) -> list[tuple[int, str]]:
    """Return the registers that a load writes, each with the number of its element."""
    names = [item.name for item in items if isinstance(item, Register)]
    if len(names) != len(items):
        raise NotCompiledError(i.text)
    return [(n, name) for n, name in enumerate(names) if name != "_"]


def _address(c: Lane, i: Instruction) -> Value:
    """Return the address of a thread as 64 bits."""
    operand = i.operands[0 if i.name == "st" else 1]
    if not isinstance(operand, Address) or operand.base is None:
        raise NotCompiledError(i.text)
    if isinstance(operand.base, Symbol):
        return c.entry.add(c.symbol("address", operand.base.name), I64(operand.base.offset + operand.offset))
    assert isinstance(operand.base, Register)
    value = c.value(operand.base.name)
    if value.type.width == 64:
        return c.b.add(value, I64(operand.offset))
    value = c.resize(value, 32)
    return c.resize(c.b.add(value, value.type(operand.offset & 0xFFFF_FFFF)), 64)


def load_parameter(c: Lane, i: Instruction) -> bool:
    """Emit ld.param of a parameter by its name. Return whether the instruction is one."""
    operand = i.operands[1]
    if parse_space(i) != "param" or not isinstance(operand, Address) or not isinstance(operand.base, Symbol):
        return False
    kind = parse_type(i)
    size = parse_dtype(kind).itemsize
    start = c.entry.add(c.symbol("param", operand.base.name), I64(operand.base.offset + operand.offset))
    for n, item in enumerate(list_items(i.operands[0])):
        place = c.entry.element(I8, c.pointer(Slot.PARAMS), c.entry.add(start, I64(n * size)))
        c.write(item, kind, c.entry.load(integer(8 * size), place, 1), i)
    return True


class MemoryCode:
    """The loads and stores of a stretch.

    units: the bytes of the smallest access by space (program.py). tags: whether to record the reads of shared memory
    by thread; else only the first and last byte that each load has read (EpochRaces.read_spans).
    """

    def __init__(self, lane: Lane, units: dict[str, int], *, whole: bool, tags: bool) -> None:
        self.c, self.units, self.whole, self.tags = lane, units, whole, tags
        self.accesses: list[CountedAccess] = []
        self._buffers: list[Value] = []

    def emit(self, i: Instruction, guard: int) -> None:
        """Emit a load or store; guard: the number of its guard, -1 for none."""
        c = self.c
        space, kind = parse_space(i), parse_type(i)
        items = list_items(i.operands[1 if i.name == "st" else 0])
        element = parse_dtype(kind).itemsize
        size = element * len(items)
        if space not in ("shared", "global", "local", "const") or size not in (1, 2, 4, 8, 16):
            raise NotCompiledError(i.text)
        if not STRONG.isdisjoint(i.parts) or "async" in i.parts or kind == "pred":
            raise NotCompiledError(i.text)
        if any(":" in p and p.startswith("shared") for p in i.parts):
            raise NotCompiledError(i.text)
        store = i.name == "st"
        arena = "global" if space == "const" else space
        if arena in self.units and size < self.units[arena]:
            raise NotCompiledError(i.text)
        guarded, c.guard = c.guard, None
        address = _address(c, i)
        values = [c.read(item, kind, i) for item in items] if store else []
        targets = [] if store else _find_targets(i, items)
        buffer = self._buffer(i, space, store, size, guard) if space in ("shared", "global") else None
        signed = parse_dtype(kind).kind == "i"

        def run() -> list[Value]:
            offset = self._locate(arena, address, size)
            if buffer is not None:
                c.b.store(offset, c.b.element(I64, buffer, c.lane))
            if store:
                self._store(arena, offset, values, size)
                return []
            loaded = self._load(arena, offset, size, element, len(items), "nc" in i.parts)
            return [c.resize(loaded[n], c.width(name), signed) for n, name in targets]

        old = [c.value(name) for _, name in targets] if guarded is not None else []
        result = run() if guarded is None else c.choose(guarded, run, old)
        for (_, name), value in zip(targets, result, strict=True):
            c.set(name, value)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _locate(self, arena: str, address: Value, size: int) -> Value:
        """Return the offset of an access in an arena. Bail out if it is out of bounds or misaligned."""
        c = self.c
        if arena == "global":
            offset = c.b.sub(address, c.slot(Slot.GLOBAL_BASE))
            inside = c.b.icmp_unsigned("<=", offset, c.entry.sub(c.slot(Slot.GLOBAL_SIZE), I64(size)))
        else:
            # An element that begins below the limit may end in the padding. The padding is never written.
            inside = c.b.icmp_unsigned("<", address, c.slot(_get_slot(arena, "LIMIT")))
            offset = c.b.add(address, c.per_thread(_get_slot(arena, "START")))
        if size > 1:
            aligned = c.b.icmp_unsigned("==", c.b.and_(offset, I64(size - 1)), I64(0))
            inside = c.b.and_(inside, aligned)
        c.require(inside)
        return offset

    def _places(self, arena: str, offset: Value) -> tuple[Value, Value]:
        """Return the pointers to the data and the states of an element."""
        data, state = (self.c.pointer(_get_slot(arena, part)) for part in ("DATA", "STATE"))
        return self.c.b.element(I8, data, offset), self.c.b.element(I8, state, offset)

    def _load(self, arena: str, offset: Value, size: int, element: int, count: int, constant: bool) -> list[Value]:
        """Emit the checks of a load, and return its elements; constant: the memory may not change (.nc)."""
        c = self.c
        data, state = self._places(arena, offset)
        kind, align = integer(8 * size), min(size, 8)
        c.require(c.b.icmp_unsigned("==", c.b.load(kind, state, align), kind(_repeat_in_bytes(WRITTEN, size))))
        if arena == "shared":
            with c.b.when(c.entry.icmp_unsigned("!=", c.slot(Slot.SHARED_WRITTEN), I64(0))):
                self._check("WRITES", offset, size, arena)
            if self.tags:
                self._record_read(offset, size, arena)
        elif arena == "global":
            _, flags = self._owner(offset)
            seen = c.b.load(I8, flags)
            with c.b.when(c.b.icmp_unsigned("!=", c.b.and_(seen, I8(TRACKED)), I8(0))):
                if constant:
                    for n in range(size // self.units[arena]):
                        tag = c.b.load(I64, self._tag("WRITES", offset, n, arena))
                        c.require(c.b.icmp_unsigned("==", tag, I64(0)))
                else:
                    self._check("WRITES", offset, size, arena)
                self._record_read(offset, size, arena)
            with c.b.when(c.b.icmp_unsigned("==", c.b.and_(seen, I8(READ | TRACKED)), I8(0))):
                c.b.store(c.b.or_(seen, I8(READ)), flags)
        whole = c.b.load(kind, data, align)
        if count == 1:
            return [whole]
        part = integer(8 * element)
        return [c.b.convert("trunc", c.b.lshr(whole, kind(8 * element * n)), part) for n in range(count)]

    def _store(self, arena: str, offset: Value, values: list[Value], size: int) -> None:
        c = self.c
        data, state = self._places(arena, offset)
        kind, align = integer(8 * size), min(size, 8)
        before = c.b.load(kind, state, align)
        written = kind(_repeat_in_bytes(WRITTEN, size))
        new = c.b.icmp_unsigned("==", before, kind(_repeat_in_bytes(UNWRITTEN, size)))
        c.require(c.b.or_(new, c.b.icmp_unsigned("==", before, written)))
        if arena == "global":
            owner, flags = self._owner(offset)
            seen = c.b.load(I8, flags)
            c.require(c.b.icmp_unsigned("==", c.b.and_(seen, I8(INPUT)), I8(0)))
            with c.b.when(c.b.icmp_unsigned("==", c.b.and_(seen, I8(TRACKED)), I8(0))):
                unread = c.b.icmp_unsigned("==", c.b.and_(seen, I8(READ)), I8(0))
                c.require(unread, c.b.add(owner, I64(FIRST_OWNER)))
                c.b.store(c.b.or_(seen, I8(TRACKED)), flags)
        if arena != "local":
            self._check("WRITES", offset, size, arena)
            self._check("READS", offset, size, arena)
            self._record_write(offset, size, arena)
        whole = kind(0)
        for n, value in enumerate(values):
            whole = c.b.or_(whole, c.b.shl(c.b.convert("zext", value, kind), kind(value.type.width * n)))
        c.b.store(whole, data, align)
        c.b.store(written, state, align)

    def _owner(self, offset: Value) -> tuple[Value, Value]:
        """Return the number of the allocation that holds an offset, and the pointer to its flags."""
        c = self.c
        place = c.b.element(I32, c.pointer(Slot.OWNERS), c.b.lshr(offset, I64(OWNER_SHIFT)))
        owner = c.b.convert("zext", c.b.load(I32, place), I64)
        return owner, c.b.element(I8, c.pointer(Slot.FLAGS), owner)

    # ---- races ------------------------------------------------------------------------------------------------------

    def _tag(self, table: str, offset: Value, unit: int, arena: str) -> Value:
        c = self.c
        index = c.b.lshr(offset, I64(self.units[arena].bit_length() - 1))
        return c.b.element(I64, c.pointer(_get_slot(arena, table)), c.b.add(index, I64(unit)))

    def _check(self, table: str, offset: Value, size: int, arena: str) -> None:
        """Bail out if an access to one of the units may not be ordered before one by this thread (EpochRaces)."""
        c = self.c
        floor, own = c.per_thread(Slot.BLOCK_FLOOR), c.per_thread(Slot.OWN)
        for n in range(size // self.units[arena]):
            tag = c.b.load(I64, self._tag(table, offset, n, arena))
            with c.b.when(self._is_late(tag, floor, arena)):
                differs = c.b.xor(tag, own)
                same_thread = c.b.icmp_unsigned("==", c.b.and_(differs, I64(_THREAD | _BLOCKS)), I64(0))
                same_warp = c.b.icmp_unsigned("==", c.b.and_(differs, I64(_WARP | _BLOCKS)), I64(0))
                earlier = c.b.icmp_unsigned("<", tag, c.per_thread(Slot.WARP_FLOOR))
                c.require(c.b.or_(same_thread, c.b.and_(same_warp, earlier)))

    def _is_late(self, tag: Value, floor: Value, arena: str) -> Value:
        """Return whether a tag is of another block, or of this block since its last barrier."""
        c = self.c
        late = c.b.icmp_unsigned(">=", tag, floor)
        if arena == "global":
            other = c.b.icmp_unsigned(">=", c.b.xor(tag, floor), I64(_ONE_BLOCK))
            late = c.b.or_(late, c.b.and_(other, c.b.icmp_unsigned("!=", tag, I64(0))))
        return late

    def _record_write(self, offset: Value, size: int, arena: str) -> None:
        c = self.c
        tag = self._own_tag()
        for n in range(size // self.units[arena]):
            c.b.store(tag, self._tag("WRITES", offset, n, arena))

    def _own_tag(self) -> Value:
        return self.c.b.or_(self.c.per_thread(Slot.OWN), self.c.slot(Slot.EPOCH))

    def _record_read(self, offset: Value, size: int, arena: str) -> None:
        """Record a read: a tag with several threads, warps or blocks replaces the tags of different readers."""
        c = self.c
        floor, tag = c.per_thread(Slot.BLOCK_FLOOR), self._own_tag()
        for n in range(size // self.units[arena]):
            place = self._tag("READS", offset, n, arena)
            before = c.b.load(I64, place)
            late = self._is_late(before, floor, arena)
            differs = c.b.xor(before, tag)

            def flag(mask: int, bits: int, differs: Value = differs) -> Value:
                found = c.b.icmp_unsigned("!=", c.b.and_(differs, I64(mask)), I64(0))
                return c.b.select(found, I64(bits), I64(0))

            more = c.b.or_(flag(_THREAD, _SEVERAL), flag(_WARP | _BLOCKS, _SEVERAL | _SEVERAL_WARPS))
            if arena == "global":
                more = c.b.or_(more, flag(_BLOCKS, _BLOCKS))
            c.b.store(c.b.or_(tag, c.b.select(late, more, I64(0))), place)

    # ---- counts -----------------------------------------------------------------------------------------------------

    def _buffer(self, i: Instruction, space: str, store: bool, size: int, guard: int) -> Value:
        """Return the array for the offsets of a warp's threads at an access."""
        c = self.c
        buffer = c.entry.alloca(I64, WARP)
        self.accesses.append(CountedAccess(i, space, store, size, guard))
        self._buffers.append(buffer)
        if guard >= 0 or not self.whole:
            for n in range(WARP):
                c.warp.store(I64(NO_THREAD), c.warp.element(I64, buffer, I64(n)))
        return buffer

    def count(self, first: int) -> None:
        """Emit, after each warp, the counts of its accesses; first: the index of the first of them in the output.

        These are passes over shared memory and conflicts, or sectors of global memory and 0; then the first and the
        last byte of an access to shared memory, as offsets in its block.
        """
        c = self.c
        for n, (access, buffer) in enumerate(zip(self.accesses, self._buffers, strict=True)):
            b = c.after_warp
            pattern, counts = (
                b.element(I64, c.cache, I64(n * CACHE_SLOTS)),
                b.element(I64, c.out, I64(first + ACCESS_COUNTS * n)),
            )
            start = c.per_thread(Slot.SHARED_START) if access.parts else I64(0)
            b.call(counter_name(access.parts), VOID, buffer, pattern, counts, start, I64(access.size))


def _get_slot(arena: str, part: str) -> int:
    """Return the entry of the context for a part of a memory."""
    number: int = getattr(Slot, f"{arena.upper()}_{part}")
    return number


def _repeat_in_bytes(state: int, size: int) -> int:
    return int.from_bytes(bytes([state]) * size, "little")
