"""Matrix products with fragments in the lanes of a warp: mma.sync, and the layout that it shares with WMMA.

Facts: PTX ISA, "Matrix Fragments for mma". Lane l holds one register of elements of A: number l % 4 of a group of four
in row l // 4. For B it is the same with column l // 4; for C and D two neighbours of row l // 4. Further registers step
by 8 rows, then by four registers along K (A); along K, then by 8 columns (B); by 8 rows, then 8 columns (C, D).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.formats import BITS, INTEGERS, decode
from greenfast.emulator.instructions.operands import Reader, parse_dtype, reader, writer
from greenfast.emulator.instructions.warp import whole_warps
from greenfast.emulator.machine.blocks import WARP, ThreadSet, Values, lane_count
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Operand, Vector
from greenfast.emulator.ptx.unsupported import unsupported

_GROUPS, _MEMBERS = 8, 4  # lanes of a warp: number of groups, and of members of a group


def parse_shape(i: Instruction) -> tuple[int, int, int]:
    """Return M, N and K of a product or tile."""
    shape = next(part for part in i.parts if re.fullmatch(r"m\d+n\d+k\d+", part))
    m, n, k = map(int, re.findall(r"\d+", shape))
    return m, n, k


def register_type(kind: str) -> str:
    """Return the type of a register that holds elements of a matrix."""
    return "b64" if kind == "f64" else "b32"


def registers(rows: int, k: int, kind: str) -> int:
    """Return how many registers hold a fragment of A (of B with ``rows`` columns)."""
    bits = 8 * int(parse_dtype(register_type(kind)).itemsize)
    return rows // _GROUPS * k * BITS[kind] // (_MEMBERS * bits)


def left_rows(words: Values, rows: int) -> NDArray[np.uint8]:
    """Return (warps, rows, bytes of K) from the lanes' (warps, 32, registers) of A."""
    blocks = rows // _GROUPS
    table = words.reshape(len(words), _GROUPS, _MEMBERS, -1, blocks).transpose(0, 4, 1, 3, 2)
    return np.ascontiguousarray(table).reshape(len(words), rows, -1).view(np.uint8)


def left_words(data: NDArray[np.uint8], kind: str) -> Values:
    """Return the inverse of ``left_rows``."""
    words = np.ascontiguousarray(data).view(parse_dtype(register_type(kind)))
    table = words.reshape(len(data), -1, _GROUPS, words.shape[2] // _MEMBERS, _MEMBERS).transpose(0, 2, 4, 3, 1)
    return np.ascontiguousarray(table).reshape(len(data), WARP, -1)


def right_rows(words: Values, columns: int) -> NDArray[np.uint8]:
    """Return (warps, columns, bytes of K) from the lanes' (warps, 32, registers) of B."""
    blocks = columns // _GROUPS
    table = words.reshape(len(words), _GROUPS, _MEMBERS, blocks, -1).transpose(0, 3, 1, 4, 2)
    return np.ascontiguousarray(table).reshape(len(words), columns, -1).view(np.uint8)


def right_words(data: NDArray[np.uint8], kind: str) -> Values:
    """Return the inverse of ``right_rows``."""
    words = np.ascontiguousarray(data).view(parse_dtype(register_type(kind)))
    table = words.reshape(len(data), -1, _GROUPS, words.shape[2] // _MEMBERS, _MEMBERS).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(table).reshape(len(data), WARP, -1)


def sums_matrix(held: Values, rows: int, columns: int) -> Values:
    """Return (warps, rows, columns) from the lanes' (warps, 32, elements) of C or D."""
    table = held.reshape(len(held), _GROUPS, _MEMBERS, columns // 8, rows // 8, 2).transpose(0, 4, 1, 3, 2, 5)
    return table.reshape(len(held), rows, columns)


def sums_held(matrix: Values) -> Values:
    """Return the inverse of ``sums_matrix``."""
    warps, rows, columns = matrix.shape
    table = matrix.reshape(warps, rows // 8, _GROUPS, columns // 8, _MEMBERS, 2).transpose(0, 2, 4, 3, 1, 5)
    return table.reshape(warps, WARP, -1)


class Registers:
    """Registers of the lanes that hold the elements of a fragment, several in one where these are narrow."""

    def __init__(self, operand: Operand, kind: str, i: Instruction) -> None:
        if not isinstance(operand, Vector):
            raise unsupported(i, "has a fragment that is not a list of registers")
        self.items, self.kind, self.i = operand.items, kind, i

    def reading(self, count: int) -> Callable[[ResidentBlocks, ThreadSet], Values]:
        """Build a function that gives (warps, 32, count) words, the first of the registers."""
        if len(self.items) < count:
            raise unsupported(self.i, "has another number of registers than its shape")
        read = [reader(r, self.kind, self.i) for r in self.items[:count]]
        dtype = parse_dtype(self.kind)
        return lambda m, lanes: _stacked(m, read, lanes, dtype)

    def writing(self) -> Callable[[ResidentBlocks, ThreadSet, Values], None]:
        """Build a function that writes (warps, 32, words); registers beyond these repeat them from the first."""
        write = [writer(r, self.kind, self.i) for r in self.items]

        def run(m: ResidentBlocks, lanes: ThreadSet, words: Values) -> None:
            for n, w in enumerate(write):
                w(m, lanes, words[:, :, n % words.shape[2]].reshape(-1))

        return run


def _stacked(m: ResidentBlocks, read: Sequence[Reader], lanes: ThreadSet, dtype: Any) -> Values:
    words = np.empty((lane_count(lanes), len(read)), dtype)
    for n, r in enumerate(read):
        words[:, n] = r(m, lanes)
    return words.reshape(-1, WARP, len(read))


def product(i: Instruction, d: Operand, a: Operand, b: Operand, c: Operand, kinds: Sequence[str]) -> Operation:
    """Compute d = a * b + c; ``kinds``: the types of D, A, B and C."""
    rows, columns, k = parse_shape(i)
    out, left_kind, right_kind, addend = kinds
    read_a = Registers(a, register_type(left_kind), i).reading(registers(rows, k, left_kind))
    read_b = Registers(b, register_type(right_kind), i).reading(registers(columns, k, right_kind))
    read_c = read_sums(c, addend, rows, columns, i)
    write = write_sums(d, out, rows, columns, i)
    integer, saturates = left_kind in INTEGERS, "satfinite" in i.parts
    wide: Any = np.float64 if left_kind == "f64" else np.int64 if integer else np.float32

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        whole_warps(m, lanes, "a matrix instruction")
        left = decode(left_rows(read_a(m, lanes), rows), left_kind)
        right = decode(right_rows(read_b(m, lanes), columns), right_kind)
        result = left @ right.swapaxes(1, 2)
        total = result.astype(wide) + read_c(m, lanes)
        if saturates and integer:
            total = np.clip(total, -(2**31), 2**31 - 1)
        m.counts.matrix(len(total), 2 * rows * columns * k)
        write(m, lanes, total)

    return run


def read_sums(
    operand: Operand, kind: str, rows: int, columns: int, i: Instruction
) -> Callable[[ResidentBlocks, ThreadSet], Values]:
    """Build a function that gives the (warps, rows, columns) of a fragment of C."""
    dtype = parse_dtype(kind)
    per = 2 if kind == "f16" else 1
    read = Registers(operand, "b64" if kind == "f64" else "b32", i).reading(rows * columns // WARP // per)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Values:
        held = np.ascontiguousarray(read(m, lanes)).view(dtype)
        return sums_matrix(held, rows, columns)

    return run


def write_sums(
    operand: Operand, kind: str, rows: int, columns: int, i: Instruction
) -> Callable[[ResidentBlocks, ThreadSet, Values], None]:
    """Build a function that writes (warps, rows, columns) to a fragment of D."""
    dtype = parse_dtype(kind)
    target = Registers(operand, "b64" if kind == "f64" else "b32", i)
    if len(target.items) != rows * columns // WARP // (2 if kind == "f16" else 1):
        raise unsupported(i, "has another number of registers than its shape")
    write = target.writing()

    def run(m: ResidentBlocks, lanes: ThreadSet, matrix: Values) -> None:
        held = np.ascontiguousarray(sums_held(matrix.astype(dtype, copy=False)))
        write(m, lanes, held.view(np.uint64 if kind == "f64" else np.uint32))

    return run


def mma(i: Instruction) -> Operation:
    """Build mma.sync."""
    kinds = [p for p in i.parts if p in BITS or p in ("f32", "s32")]
    fragments = [o for o in i.operands if isinstance(o, Vector)]
    if len(fragments) != 4 or len(i.operands) != 4:
        raise unsupported(i, "has no four fragments")
    d, a, b, c = fragments
    m, n, k = parse_shape(i)
    if (len(a.items), len(b.items)) != (registers(m, k, kinds[1]), registers(n, k, kinds[2])):
        raise unsupported(i, "has another number of registers than its shape")
    return product(i, d, a, b, c, kinds)


BUILDERS = {"mma": mma}
