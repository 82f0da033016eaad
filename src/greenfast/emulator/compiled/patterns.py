"""Machine code that counts the sectors, passes and bank conflicts of a warp's access, as counts.py does.

The pattern of an access is the offsets of its threads relative to the first thread, and the lowest bits of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from greenfast.emulator.compiled.ir import I1, I64, POINTER, VOID, Builder, IrFunction, IrModule, Value
from greenfast.emulator.machine.blocks import WARP

#: The offset of a thread that takes no part.
NO_THREAD = -1
#: Slots of a pattern: its lowest and highest address; the mark of a thread that takes no part.
_LEAST, _MOST, _FAR = WARP + 3, WARP + 4, -(1 << 62)


def counter_name(parts: int) -> str:
    """Return the name of the function that counts an access of ``parts`` words per thread to shared memory.

    With 0 parts, it counts an access to global memory. Arguments: the offsets of a warp's threads, the pattern of the
    access, its counts (MemoryCode.count), the start of the block's shared memory, and the bytes of an element.
    """
    return f"greenfast_count_{parts}"


def define_counter(module: IrModule, parts: int) -> None:
    """Define the function of ``counter_name``.

    If the pattern is the same as at the last access, its counts are reused.
    """
    function = IrFunction(module, counter_name(parts), [POINTER] * 3 + [I64] * 2, VOID)
    offsets, cache, out, start, size = function.arguments
    b = Builder(function, function.new_block())
    changed, lowest, seen = b.alloca(I64), b.alloca(I64), b.alloca(I1)
    banks, most = b.alloca(I64, 32), b.alloca(I64)
    c = _Counter(b, offsets, at(b, cache, WARP + 1), at(b, cache, WARP + 2), seen, banks, most)
    first = b.load(I64, offsets)
    b.store(first, lowest)  # the address of the first thread that takes part
    with b.when(b.icmp_signed("==", first, I64(NO_THREAD))), b.loop(I64(0), I64(WARP)) as n:
        value = b.load(I64, at(b, offsets, b.sub(I64(WARP - 1), n)))
        b.store(b.select(b.icmp_signed("==", value, I64(NO_THREAD)), b.load(I64, lowest), value), lowest)
    base = b.load(I64, lowest)
    nobody, go_on = function.new_block(), function.new_block()
    b.cbranch(b.icmp_signed("==", base, I64(NO_THREAD)), nobody, go_on)
    Builder(function, nobody).ret()
    b.block = go_on
    low_bits = b.and_(base, I64(31 if parts == 0 else 3))
    b.store(b.xor(low_bits, b.load(I64, at(b, cache, WARP))), changed)

    def relative(n: Value) -> Value:
        value = b.load(I64, at(b, offsets, n))
        return b.select(b.icmp_signed("==", value, I64(NO_THREAD)), I64(_FAR), b.sub(value, base))

    with b.loop(I64(0), I64(WARP)) as n:
        b.store(b.or_(b.load(I64, changed), b.xor(relative(n), b.load(I64, at(b, cache, n)))), changed)
    with b.when(b.icmp_signed("!=", b.load(I64, changed), I64(0))):
        with b.loop(I64(0), I64(WARP)) as n:
            b.store(relative(n), at(b, cache, n))
        b.store(low_bits, at(b, cache, WARP))
        for slot in (_LEAST, _MOST):
            b.store(I64(0), at(b, cache, slot))
        with b.loop(I64(0), I64(WARP)) as n:
            value = relative(n)
            takes_part = b.icmp_signed(">", value, I64(_FAR))
            for slot, order in ((_LEAST, "<"), (_MOST, ">")):
                known = b.load(I64, at(b, cache, slot))
                beyond = b.and_(takes_part, b.icmp_signed(order, value, known))
                b.store(b.select(beyond, value, known), at(b, cache, slot))
        if parts:
            c.count_passes(parts)
        else:
            c.count_sectors()
    for count, slot in ((0, WARP + 1), (1, WARP + 2)):
        place = at(b, out, count)
        b.store(b.add(b.load(I64, place), b.load(I64, at(b, cache, slot))), place)
    if parts:
        own = b.sub(base, start)
        low = b.add(own, b.load(I64, at(b, cache, _LEAST)))
        high = b.add(b.add(own, b.load(I64, at(b, cache, _MOST))), b.sub(size, I64(1)))
        for slot, value, order in ((2, low, "<"), (3, high, ">")):
            known = b.load(I64, at(b, out, slot))
            b.store(b.select(b.icmp_signed(order, value, known), value, known), at(b, out, slot))
    b.ret()


def at(b: Builder, array: Value, index: Value | int) -> Value:
    """Emit the pointer to an element of an array of i64."""
    return b.element(I64, array, index if isinstance(index, Value) else I64(index))


@dataclass
class _Counter:
    """Emits the counting of a new pattern. first, second: addresses of its counts; the others are scratch memory."""

    b: Builder
    offsets: Value
    first: Value
    second: Value
    seen: Value
    banks: Value
    most: Value

    def count_sectors(self) -> None:
        """Emit the number of different sectors."""
        b = self.b
        b.store(I64(0), self.first)
        b.store(I64(0), self.second)

        def sector(n: Value) -> Value:
            return b.ashr(b.load(I64, at(b, self.offsets, n)), I64(5))

        with b.loop(I64(0), I64(WARP)) as n:
            value = b.load(I64, at(b, self.offsets, n))
            with b.when(b.icmp_signed("!=", value, I64(NO_THREAD))):
                known = self._find_before(I64(0), n, sector)
                b.store(b.add(b.load(I64, self.first), b.select(known, I64(0), I64(1))), self.first)

    def _find_before(self, start: Value, n: Value, key: Callable[[Value], Value]) -> Value:
        """Return whether an index from ``start`` to n - 1 has the key of n. Keys of threads without a part differ."""
        b = self.b
        b.store(I1(0), self.seen)
        own = key(n)
        with b.when(b.icmp_signed("<", start, n)), b.loop(start, n) as m:
            b.store(b.or_(b.load(I1, self.seen), b.icmp_signed("==", key(m), own)), self.seen)
        return b.load(I1, self.seen)

    def count_passes(self, parts: int) -> None:
        """Emit the number of passes over shared memory, and of bank conflicts: passes beyond one per part."""
        b = self.b
        b.store(I64(0), self.first)
        b.store(I64(0), self.second)

        def word(m: Value) -> Value:
            value = b.load(I64, at(b, self.offsets, b.lshr(m, I64(parts.bit_length() - 1))))
            inside = b.add(b.ashr(value, I64(2)), b.and_(m, I64(parts - 1)))
            return b.select(b.icmp_signed("==", value, I64(NO_THREAD)), b.sub(I64(NO_THREAD), m), inside)

        with b.loop(I64(0), I64(parts)) as part:
            with b.loop(I64(0), I64(32)) as bank:
                b.store(I64(0), at(b, self.banks, bank))
            begin = b.mul(part, I64(WARP))
            b.store(I64(0), self.most)
            with b.loop(begin, b.add(begin, I64(WARP))) as n:
                own = word(n)
                with b.when(b.icmp_signed(">=", own, I64(0))):
                    known = self._find_before(begin, n, word)
                    place = at(b, self.banks, b.and_(own, I64(31)))
                    count = b.add(b.load(I64, place), b.select(known, I64(0), I64(1)))
                    b.store(count, place)
                    most = b.load(I64, self.most)
                    b.store(b.select(b.icmp_signed(">", count, most), count, most), self.most)
            passes = b.load(I64, self.most)
            b.store(b.add(b.load(I64, self.first), passes), self.first)
            more = b.select(b.icmp_signed(">", passes, I64(1)), b.sub(passes, I64(1)), I64(0))
            b.store(b.add(b.load(I64, self.second), more), self.second)
