"""Tensor maps that kernels make: tensormap.replace and tensormap.cp_fenceproxy (PTX ISA)."""

from __future__ import annotations

import numpy as np

from greenfast.emulator.instructions.access import addresses, by_space, locate
from greenfast.emulator.instructions.operands import do_nothing, reader
from greenfast.emulator.instructions.warp import whole_warps
from greenfast.emulator.machine.blocks import ThreadSet, Values, lane_count, lane_indices
from greenfast.emulator.machine.memory import WINDOW_BITS, window
from greenfast.emulator.machine.ordering import parse_scope
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.machine.tensormap import ELEMENT, FIELDS, MARK
from greenfast.emulator.ptx.syntax import Immediate, Instruction
from greenfast.emulator.ptx.unsupported import unsupported
from greenfast.spec.kernel import MAP_ALIGNMENT, MAP_BYTES

#: Bytes of an element by the number of its type: u8, u16, u32, s32, u64, s64, f16, f32, -, f64, bf16, tf32. Types that
#: flush subnormal numbers to zero, and packed ones, are refused.
_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 9: 8, 10: 2, 11: 4}
#: The width of a swizzle by the number of its mode.
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}
#: Modes with value 0 only: no interleaving, zeros outside of the tensor, swizzles of 16 bytes.
_ZERO = ("interleave_layout", "fill_mode", "swizzle_atomicity")
_MOST_DIMENSIONS = 5


def _replace_field(i: Instruction) -> Operation:
    """Build tensormap.replace: it writes one field of the 128 bytes of a map."""
    field = i.parts[2]
    space = next((p.split(":")[0] for p in i.parts if p.split(":")[0] in ("global", "shared")), "generic")
    value = i.operands[-1]
    kind = "u64" if "b64" in i.parts else "u32"
    dimension = i.operands[1] if len(i.operands) == 3 else Immediate(0)
    if not isinstance(dimension, Immediate) or dimension.bits >= _MOST_DIMENSIONS:
        raise unsupported(i, "has a dimension that is no number from 0 to 4")
    number = value.bits if isinstance(value, Immediate) else None
    if field in _ZERO:
        if number != 0:
            raise unsupported(i, f"sets .{field} to another value than 0")
        return do_nothing
    read = reader(value, kind, i)
    if field in ("elemtype", "swizzle_mode"):
        known = _SIZES if field == "elemtype" else _SWIZZLES
        if number not in known:
            raise unsupported(i, f"sets .{field} to another value than {', '.join(map(str, known))}")
        number = known[number]
    start, dtype = FIELDS[field]
    start += dimension.bits * np.dtype(dtype).itemsize
    where = addresses(i.operands[0], i)

    def run(m: ResidentBlocks, lanes: ThreadSet, addresses: Values) -> None:
        for index in np.flatnonzero(addresses % MAP_ALIGNMENT):
            reason = f"a tensor map at address {addresses[index]:#x}, not a multiple of {MAP_ALIGNMENT}"
            raise m.fault(reason, int(lane_indices(lanes)[index]))
        is_generic = space == "shared" and len(addresses) and window(int(addresses[0])) == "shared"
        arena, offsets, actual = locate(m, "generic" if is_generic else space, addresses, lanes)
        given = np.asarray(read(m, lanes)) if field not in ("elemtype", "swizzle_mode") else np.uint64(number or 0)
        values = np.broadcast_to(given, lane_count(lanes)).astype(np.uint64) + np.uint64(field == "rank")
        writes = [(start, values.astype(dtype)), (MARK[0], np.full(len(values), np.frombuffer(MARK[1], np.uint64)[0]))]
        if field == "elemtype":
            writes.append((ELEMENT, values))
        with m.accessing(lanes, actual):
            for place, content in writes:
                table = np.ascontiguousarray(content).view(np.uint8).reshape(len(values), -1)
                arena.write(offsets + place, table, f"{table.shape[1]}-byte write of a tensor map")

    return by_space(space, where, run)


def _copy_map(i: Instruction) -> Operation:
    """Build tensormap.cp_fenceproxy: a warp copies a map from shared to global memory, and releases it."""
    if i.operands[2] != Immediate(MAP_BYTES):
        raise unsupported(i, f"needs a size of {MAP_BYTES} bytes")
    to, source = addresses(i.operands[0], i), addresses(i.operands[1], i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        leads = whole_warps(m, lanes, "tensormap.cp_fenceproxy")[:, 0]
        step = len(lane_indices(lanes)) // len(leads)
        target, origin = (where(m, lanes)[::step] for where in (to, source))
        parts = np.arange(0, MAP_BYTES, 8)
        threads = np.repeat(leads, len(parts))
        arenas = []
        for space, begin in (("shared", origin), ("global", target)):  # each may be a generic address too
            generic = "generic" if space == "global" or (begin >> WINDOW_BITS).any() else space
            arenas.append(locate(m, generic, (begin[:, None] + parts).ravel(), threads))
        (arena, offsets, actual), (memory, places, outer) = arenas
        with m.accessing(threads, actual):
            data = arena.read(offsets, 8, "8-byte read of a tensor map")
        with m.accessing(threads, outer):
            memory.write(places, data, "8-byte write of a tensor map")
        m.races.fence(lanes, parse_scope(i.parts))

    return run


def build(i: Instruction) -> Operation:
    """Build any tensormap instruction."""
    return _replace_field(i) if i.parts[0] == "replace" else _copy_map(i)


BUILDERS = {"tensormap": build}
