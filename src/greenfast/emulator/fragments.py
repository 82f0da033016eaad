"""mma.sync: matrix products of a warp on fragments in registers (PTX ISA, "Matrix Fragments for mma")."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from greenfast.emulator.formats import FORMATS, decode
from greenfast.emulator.machine import WARP, Lanes, Machine, Operation, Values, lane_count
from greenfast.emulator.operands import dtype_of, reader, unsupported, writer
from greenfast.emulator.ptx import Instruction, Vector
from greenfast.emulator.warp import whole_warps


def mma(i: Instruction) -> Operation:
    """mma.sync.m16n8k*: 8-bit floats and integers, halves and bfloat16, accumulated in float32, halves or integers.

    Register r of A holds the four bytes from 4 * (l % 4) + 16 * (r // 2) on of row l // 4 + 8 * (r % 2); of B those of
    column l // 4 from 4 * (l % 4) + 16 * r on.
    """
    parts = [p for p in i.parts if p not in ("kind:f8f6f4", "satfinite")]
    shape = re.match(r"m16n8k(\d+)$", parts[2]) if len(parts) == 9 else None
    if shape is None or parts[3:5] != ["row", "col"]:
        raise unsupported(i)
    out, left_kind, right_kind, addend = parts[5:]
    integer = left_kind in ("s8", "u8")
    size = {"f16": 2, "bf16": 2}.get(left_kind, 1)
    known = left_kind in FORMATS and right_kind in FORMATS and out == addend
    if not known or out not in (("s32",) if integer else ("f32", "f16")) or int(shape[1]) * size not in (16, 32):
        raise unsupported(i)
    if integer != (right_kind in ("s8", "u8")) or (size == 2 and left_kind != right_kind):
        raise unsupported(i)
    d, a, b, c = (o.items for o in i.operands if isinstance(o, Vector))
    pairs = int(shape[1]) * size // 16  # pieces of 16 bytes along K
    read_a, read_b = ([reader(r, "b32", i) for r in items] for items in (a, b))
    read_c, write = [reader(r, "b32", i) for r in c], [writer(r, "b32", i) for r in d]
    if len(read_a) != 2 * pairs or len(read_b) != pairs or len(write) != (2 if out == "f16" else 4):
        raise unsupported(i, "has another number of registers than its shape")
    dtype = dtype_of(out)

    def run(m: Machine, lanes: Lanes) -> None:
        whole_warps(m, lanes, "a matrix instruction")
        left = _registers(m, read_a, lanes).reshape(-1, 8, 4, pairs, 2).transpose(0, 4, 1, 3, 2)
        right = _registers(m, read_b, lanes).reshape(-1, 8, 4, pairs).transpose(0, 1, 3, 2)
        held = np.ascontiguousarray(_registers(m, read_c, lanes)).view(dtype).reshape(-1, WARP, 2, 2)
        first, second = (np.ascontiguousarray(x).view(np.uint8) for x in (left, right))
        product = (
            decode(first.reshape(len(held), 16, -1), left_kind)
            @ decode(second.reshape(len(held), 8, -1), right_kind).swapaxes(1, 2)
        ).astype(np.int64 if integer else np.float32)
        total = product.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(held.shape) + held
        if "satfinite" in i.parts:
            total = np.clip(total, -(2**31), 2**31 - 1)
        m.counts.matrix(len(held), 2 * 16 * 8 * int(shape[1]))
        packed = np.ascontiguousarray(total.astype(dtype)).reshape(-1, 4).view(np.uint32)
        for n, w in enumerate(write):
            w(m, lanes, packed[:, n])

    return run


def _registers(m: Machine, registers: list[Any], lanes: Lanes) -> Values:
    """(warps, 32, registers) words."""
    count = lane_count(lanes)
    columns = [np.broadcast_to(np.asarray(r(m, lanes)), (count,)) for r in registers]
    return np.stack(columns, axis=1).reshape(-1, WARP, len(registers))


BUILDERS = {"mma": mma}
