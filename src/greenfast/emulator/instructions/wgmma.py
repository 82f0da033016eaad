"""wgmma: matrix products of a warpgroup, in flight until a wait.

Facts: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".

A product is computed at its issue, exactly and with float32 sums; with float16 accumulators, each instruction rounds
its sums once. The hardware adds 8-bit products with fewer bits (about 14 of significand); this is not modelled. Until a
wgmma.wait_group covers the product, its accumulators must not be read or written, its A registers not written, and its
shared-memory operands not overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.descriptors import DescriptorError, MatrixDescriptor
from greenfast.emulator.instructions.formats import INTEGERS, decode
from greenfast.emulator.instructions.fragments import parse_shape
from greenfast.emulator.instructions.operands import cast, parse_constant, parse_dtype, reader, require_writable
from greenfast.emulator.machine.blocks import WARP, ThreadSet, Values, lane_indices
from greenfast.emulator.machine.in_flight import (
    GROUPS,
    MatrixReads,
    Products,
    ProductWaits,
    chunk_indices,
    hold,
    release,
)
from greenfast.emulator.machine.memory import CHUNK
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Immediate, Instruction, Operand, Register, Vector
from greenfast.emulator.ptx.unsupported import unsupported

_WARPS, _M = 4, 64

# ---- ordering -------------------------------------------------------------------------------------------------------


def _products(m: ResidentBlocks) -> Products:
    assert m.products is not None
    return m.products


def _fence(m: ResidentBlocks, lanes: ThreadSet) -> None:
    _products(m).fences[lanes] += 1


def _commit(m: ResidentBlocks, lanes: ThreadSet) -> None:
    p, leads = _products(m), lane_indices(lanes)[::WARP]
    p.committed[lanes] += 1
    p.before[leads // WARP, p.committed[leads] % GROUPS] = m.races.ordering.now


def _wait(i: Instruction) -> Operation:
    """Build wgmma.wait_group. At the first try, other threads run first, to expose accesses to data in flight."""
    allowed = parse_constant(i.operands[0], i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Any:
        p = _products(m)
        indices = lane_indices(lanes)
        reached = p.committed[indices] - allowed
        early = (reached > p.done[indices]) & ~m.has_yielded[indices]
        stay, go = indices[early], indices[~early]
        if len(stay):
            m.has_yielded[stay] = True
            m.events += 1
        if len(go):
            m.has_yielded[go] = False
            p.done[go] = np.maximum(p.done[go], reached[~early])
            _release(m, go)
            leads = go[::WARP]
            if m.proxies is not None:
                m.proxies.fence_products(leads, p.before[leads // WARP, p.done[leads] % GROUPS])
        return stay

    return run


def _release(m: ResidentBlocks, lanes: NDArray[np.intp]) -> None:
    """Release the shared memory of products that a warp has waited for: its warpgroup executes them as one."""
    p = _products(m)
    leads = np.unique(lanes // WARP) * WARP
    warps, blocks = leads // m.threads_per_warp_slot, m.block_of[leads]
    done = np.full((m.warps, len(m.blocks)), -1, np.int64)
    done[warps, blocks] = p.done[leads]
    number, saved = m.races.begin(), []
    for r in p.reads:
        first = r.warpgroup * _WARPS
        waited = r.groups <= done[first : first + _WARPS, r.blocks]
        r.waited.numbers[waited & (r.waited.numbers == 0)] = number
        now = r.open & waited.any(axis=0)
        if now.any():
            release(m.shared, r.chunks[now])
            r.open &= ~now
        if not r.waited.numbers.all():
            saved.append(r)
    p.reads = saved


# ---- the product ----------------------------------------------------------------------------------------------------


def _fragment(values: list[Values], blocks: int) -> Values:
    """Return (blocks, 64, N) from the accumulator registers of a warpgroup's threads, laid out [warp][block][lane].

    Warp w holds rows 16w to 16w + 15; register r of lane l row l // 4 + 8 * (r // 2 % 2), column 8 * (r // 4) +
    2 * (l % 4) + r % 2.
    """
    table = np.stack(values).reshape(-1, 2, 2, _WARPS, blocks, 8, 4)
    return table.transpose(4, 3, 1, 5, 0, 6, 2).reshape(blocks, _M, -1)


def _registers(matrix: Values, blocks: int) -> Values:
    """Return the inverse of ``_fragment``: (registers, threads)."""
    table = matrix.reshape(blocks, _WARPS, 2, 8, -1, 4, 2).transpose(4, 2, 6, 1, 0, 3, 5)
    return np.ascontiguousarray(table).reshape(-1, _WARPS * blocks * WARP)


def _register_rows(values: list[Values], blocks: int) -> NDArray[np.uint8]:
    """Return (blocks, 64, 32) bytes of A from four registers a thread.

    Register r of lane l holds the four bytes from 4 * (l % 4) + 16 * (r // 2) on of its warp's row l // 4 +
    8 * (r % 2); for 16-bit elements these are the same bytes.
    """
    table = np.stack(values).reshape(2, 2, _WARPS, blocks, 8, 4)
    rows = np.ascontiguousarray(table.transpose(3, 2, 1, 4, 0, 5)).reshape(blocks, _M, 8)
    return rows.view(np.uint8)


class _WgmmaForm:
    """The parts and operands of a wgmma.mma_async."""

    def __init__(self, i: Instruction) -> None:
        _, self.n, self.k = parse_shape(i)
        self.out, self.a, self.b = (p for p in i.parts[4:] if p != "satfinite")
        wide, integer = self.a in ("f16", "bf16"), self.a in INTEGERS
        self.saturates = "satfinite" in i.parts
        d, a, b, scale, *remainder = i.operands
        count = self.n // (4 if self.out == "f16" else 2)
        if not isinstance(d, Vector) or len(d.items) != count:
            raise unsupported(i, f"has no {count} accumulator registers")
        self.d = [_name(r, i) for r in d.items]
        self.a_registers = [_name(r, i) for r in a.items] if isinstance(a, Vector) else []
        if isinstance(a, Vector) and len(a.items) != 4:
            raise unsupported(i, "has no 4 registers of A")
        self.read_a = [reader(r, "b32", i) for r in a.items] if isinstance(a, Vector) else [reader(a, "b64", i)]
        self.read_b = reader(b, "b64", i)
        self.accumulates = reader(scale, "pred", i)
        flags = [int(np.int64(np.uint64(parse_constant(o, i)))) for o in remainder]
        self.sign = 1
        if not integer:
            self.sign = flags[0] * flags[1]
        transposes = flags[2:] if wide else []
        self.transpose_b = bool(transposes and transposes[-1])
        self.transpose_a = bool(len(transposes) == 2 and transposes[0])


def _name(operand: Operand, i: Instruction) -> str:
    if not isinstance(operand, Register):
        raise unsupported(i, "has an operand that is not a register")
    return operand.name


def multiply(i: Instruction) -> Operation:
    """Build wgmma.mma_async."""
    form = _WgmmaForm(i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        p = _products(m)
        indices = lane_indices(lanes)
        blocks = m.block_of[indices[: len(indices) // _WARPS : WARP]]
        _check_fences(m, form, lanes)
        flag = np.broadcast_to(np.asarray(form.accumulates(m, lanes)), len(indices))
        adds = _read_uniform(m, flag, blocks, lanes, "scale-d")
        used: list[NDArray[np.int64]] = []
        if form.a_registers:
            left = decode(_register_rows([r(m, lanes) for r in form.read_a], len(blocks)), form.a)
        else:
            left, chunks = _operand(m, form.read_a[0], blocks, lanes, _M, form.a, form.transpose_a, True)
            used.append(chunks)
        right, chunks = _operand(m, form.read_b, blocks, lanes, form.n, form.b, form.transpose_b, False)
        used.append(chunks)
        product = left @ right.swapaxes(1, 2)
        _accumulate(m, form, lanes, product if form.sign == 1 else -product, adds, len(blocks))
        m.counts.matrix(len(blocks) * _WARPS, 2 * _M // _WARPS * form.n * form.k)
        group = p.committed[indices] + 1
        for name in form.d:
            p.guard(name).writes[lanes] = group
        for name in form.a_registers:
            p.guard(name).reads[lanes] = group
        every = np.concatenate(used, axis=1)
        hold(m.shared, every)
        groups = group.reshape(_WARPS, len(blocks), WARP)[:, :, 0]
        warpgroup = int(indices[0]) // (m.threads_per_warp_slot * _WARPS)
        waited = ProductWaits(m.current, blocks, np.zeros(groups.shape, np.int64))
        reads = MatrixReads(blocks, every, groups, np.ones(len(blocks), np.bool_), warpgroup, waited)
        p.add(reads, len(m.shared.data) // CHUNK)

    return run


def _accumulate(
    m: ResidentBlocks, form: _WgmmaForm, lanes: ThreadSet, product: Values, adds: Values, blocks: int
) -> None:
    dtype = np.dtype(np.float32) if form.out == "f16" else parse_dtype(form.out)
    result: Values = product.astype(dtype)  # sums of 32 products of 8-bit integers are exact in float32
    if adds.any():
        held = _fragment(_read_accumulators(m, form, lanes), blocks)
        if form.saturates:
            limits = np.iinfo(np.int32)
            total = np.clip(result.astype(np.int64) + held, limits.min, limits.max).astype(np.int32)
        else:
            total = held + result
        result = total if adds.all() else np.where(adds[:, None, None], total, result)
    rows = _registers(result, blocks)
    if form.out == "f16":  # register r has elements 2r and 2r + 1
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16).view(np.uint16).astype(np.uint32)
        rows, dtype = halves[0::2] | halves[1::2] << 16, np.dtype(np.uint32)
    for name, values in zip(form.d, rows, strict=True):
        m.register(name).view(dtype)[lanes] = values


def _read_accumulators(m: ResidentBlocks, form: _WgmmaForm, lanes: ThreadSet) -> list[Values]:
    """Return the elements of D of each thread, in their order."""
    if form.out != "f16":
        return [cast(m.register(name)[lanes], parse_dtype(form.out)) for name in form.d]
    words = [np.ascontiguousarray(cast(m.register(name)[lanes], np.dtype(np.uint32))) for name in form.d]
    halves = [word.view(np.float16).reshape(-1, 2).astype(np.float32) for word in words]
    return [half[:, n] for half in halves for n in range(2)]


def _check_fences(m: ResidentBlocks, form: _WgmmaForm, lanes: ThreadSet) -> None:
    p = _products(m)
    missing = np.flatnonzero(p.fences[lanes] == 0)
    if len(missing):
        raise m.fault("a wgmma with no wgmma.fence before it", int(lane_indices(lanes)[missing[0]]))
    for name in (*form.d, *form.a_registers):
        touched = np.flatnonzero(p.guard(name).touched[lanes] > p.fences[lanes])
        if len(touched):
            reason = f"a wgmma on {name}: written with no wgmma.fence since"
            raise m.fault(reason, int(lane_indices(lanes)[touched[0]]))


def _read_uniform(
    m: ResidentBlocks, values: Values, blocks: NDArray[np.intp], lanes: ThreadSet, operand: str
) -> Values:
    """Return (blocks,) values that must be equal in all threads of a warpgroup."""
    table = np.broadcast_to(values, len(lane_indices(lanes))).reshape(_WARPS, len(blocks), WARP)
    differ = np.flatnonzero((table != table[:1, :, :1]).ravel())
    if len(differ):
        raise m.fault(f"the threads of a warpgroup differ in {operand}", int(lane_indices(lanes)[differ[0]]))
    return np.ascontiguousarray(table[0, :, 0])


def _operand(
    m: ResidentBlocks,
    read: Callable[[ResidentBlocks, ThreadSet], Values],
    blocks: NDArray[np.intp],
    lanes: ThreadSet,
    rows: int,
    kind: str,
    transposed: bool,
    is_a: bool,
) -> tuple[Values, NDArray[np.int64]]:
    """Return (blocks, rows, K) values of an operand in shared memory, and its (blocks, chunks) of memory."""
    bits = _read_uniform(m, np.asarray(read(m, lanes)), blocks, lanes, "a matrix descriptor")
    owner = lane_indices(lanes)[: len(blocks) * WARP : WARP]
    offsets = np.zeros((len(blocks), 0, 0), np.int64)
    for descriptor in np.unique(bits).tolist():
        start, layout = MatrixDescriptor.parse(descriptor)
        mine = np.flatnonzero(bits == descriptor)
        try:
            layout.check(start)
        except DescriptorError as e:
            raise m.limit(str(e), int(owner[mine[0]])) from None
        result = layout.offsets(np.array([start], np.int64), rows, 32, transposed)
        if not offsets.size:
            offsets = np.zeros((len(blocks), *result.shape[1:]), np.int64)
        offsets[mine] = result
    outside = np.flatnonzero(((offsets < 0) | (offsets + CHUNK > m.shared_bytes)).any(axis=(1, 2)))
    if len(outside):
        worst = int(offsets[outside[0]].max())
        reason = f"a matrix descriptor that reaches byte {worst} of {m.shared_bytes} of shared memory"
        raise m.fault(reason, int(owner[outside[0]]))
    location = offsets + (blocks * m.shared_stride)[:, None, None]
    flat = location.ravel()
    with m.accessing(np.repeat(owner, location[0].size), "shared"):
        # Not recorded as a read: it is held until a wait covers it.
        data = m.shared.read(flat, CHUNK, "wgmma operand read", atomic=True, asynchronous=True)
        group = int(owner[0]) // (m.threads_per_warp_slot * _WARPS) * _WARPS + np.arange(_WARPS)
        # Each warp reads its own 16 rows of A and the whole of B.
        each = np.split(location, _WARPS, axis=2 if transposed else 1) if is_a else [location]
        for warps, part in zip(np.split(group, len(each)), each, strict=True):
            if m.races.warp_sync.is_single_block:
                m.races.read_product(part.ravel(), warps.tolist())
            if m.proxies is not None:
                m.proxies.require_fenced(part.ravel(), warps, "wgmma operand read", False)
    values = decode(data.reshape(*location.shape[:2], -1), kind)
    return values.swapaxes(1, 2) if transposed else values, chunk_indices(location.reshape(len(blocks), -1))


# ---- moves ----------------------------------------------------------------------------------------------------------


def is_plain(i: Instruction) -> bool:
    """Return whether a mov copies a register or a literal to a register."""
    plain = isinstance(i.operands[1], (Register, Immediate))
    return plain and isinstance(i.operands[0], Register) and i.operands[0].name != "_"


def move(i: Instruction) -> Operation:
    """Build mov of a register in a kernel with wgmma: the state of the source goes with its value.

    Such moves are the compiler's, between a wgmma and its wait and after a fence too; machine code has one register.
    """
    target, source = i.operands
    assert isinstance(target, Register)
    kind = "pred" if i.parts[-1] == "pred" else f"b{8 * parse_dtype(i.parts[-1]).itemsize}"
    name, origin = target.name, source.name if isinstance(source, Register) else ""
    constant = None if origin else reader(source, i.parts[-1], i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        p = _products(m)
        require_writable(m, name, lanes)
        values = cast(m.register(origin)[lanes], parse_dtype(kind)) if constant is None else constant(m, lanes)
        _write_bits(m, name, lanes, values)
        if origin in p.guards:
            p.guard(name).writes[lanes] = p.guards[origin].writes[lanes]
            p.guard(name).touched[lanes] = p.guards[origin].touched[lanes]

    return run


def is_repacking(i: Instruction) -> bool:
    """Return whether a mov packs two registers of 16 bits into one, or unpacks it."""
    vectors = [o for o in i.operands if isinstance(o, Vector)]
    others = [o for o in i.operands if not isinstance(o, Vector)]
    names = [*others, *(item for vector in vectors for item in vector.items)]
    is_halves = i.parts == ("b32",) and len(vectors) == 1 and len(names) == 3
    return is_halves and all(isinstance(o, Register) and o.name != "_" for o in names)


def repack(i: Instruction) -> Operation:
    """Build such a mov in a kernel with wgmma: as in ``move``, the states of its sources go with their values.

    The compiler unpacks the sums of a product with float16 accumulators before its wait, and packs them again after it.
    """
    target, source = i.operands
    halves = [o.name for o in (source if isinstance(source, Vector) else target).items if isinstance(o, Register)]  # type: ignore[union-attr]
    whole = (target if isinstance(source, Vector) else source).name  # type: ignore[union-attr]
    targets, sources = ([whole], halves) if isinstance(source, Vector) else (halves, [whole])
    word, half = parse_dtype("b32"), parse_dtype("b16")

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        p = _products(m)
        for name in targets:
            require_writable(m, name, lanes)
        if len(sources) == 2:
            low, high = (cast(m.register(name)[lanes], half).astype(word) for name in sources)
            _write_bits(m, whole, lanes, low | high << 16)
        else:
            bits = np.ascontiguousarray(cast(m.register(whole)[lanes], word))
            for n, name in enumerate(targets):
                _write_bits(m, name, lanes, (bits >> 16 * n).astype(half))
        guards = [p.guards[name] for name in sources if name in p.guards]
        for name in targets if guards else ():
            p.guard(name).writes[lanes] = np.max([guard.writes[lanes] for guard in guards], axis=0)
            p.guard(name).touched[lanes] = np.max([guard.touched[lanes] for guard in guards], axis=0)

    return run


def _write_bits(m: ResidentBlocks, name: str, lanes: ThreadSet, values: Values) -> None:
    register = m.register(name)
    if register.dtype != np.bool_ and values.dtype.itemsize == register.dtype.itemsize:
        values = values.view(register.dtype)
    register[lanes] = values


def build(i: Instruction) -> Operation:
    """Build any wgmma instruction."""
    action = i.parts[0]
    if action == "wait_group":
        return _wait(i)
    if action == "mma_async":
        return multiply(i)
    return _fence if action == "fence" else _commit


BUILDERS = {"wgmma": build}
