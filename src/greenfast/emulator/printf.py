"""Calls: the only function that a kernel may call here without being inlined is printf."""

from __future__ import annotations

import re

import numpy as np

from greenfast.emulator.access import locate
from greenfast.emulator.machine import Lanes, Machine, Operation, lane_indices
from greenfast.emulator.operands import unsupported
from greenfast.emulator.ptx import Instruction, Symbol, Vector

_SPECIFIER = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(hh|h|ll|l|z)?([diouxXeEfFgGcsp%])")


def call(i: Instruction) -> Operation:
    """call of vprintf(format, arguments)."""
    names = [o.name for o in i.operands if isinstance(o, Symbol)]
    arguments = [o for o in i.operands if isinstance(o, Vector)]
    if "vprintf" not in names or not arguments:
        raise unsupported(i, "calls a function that is not known to the emulator")
    given = [item.name for item in arguments[-1].items if isinstance(item, Symbol)]

    def run(m: Machine, lanes: Lanes) -> None:
        formats, buffers = (m.call_arguments[name].astype(np.int64) for name in given)
        for n, lane in enumerate(lane_indices(lanes)):
            m.output.append(_formatted(m, int(formats[n]), int(buffers[n]), int(lane)))
        for result in arguments[:-1]:
            for item in result.items:
                if isinstance(item, Symbol):
                    m.call_arguments[item.name] = np.zeros(len(formats), np.uint32)

    return run


def _bytes(m: Machine, address: int, size: int, lane: int) -> bytes:
    one = np.array([lane])
    arena, offsets, _ = locate(m, "generic", np.array([address], np.int64), one)
    return arena.data[int(offsets[0]) : int(offsets[0]) + size].tobytes()


def _formatted(m: Machine, text_at: int, buffer: int, lane: int) -> str:
    """What one thread prints; arguments lie in the buffer, each aligned to its size."""
    text = _bytes(m, text_at, 4096, lane).split(b"\0")[0].decode(errors="replace")
    position = 0

    def one(match: re.Match[str]) -> str:
        nonlocal position
        length, kind = match.groups()
        if kind == "%":
            return "%"
        size = 8 if kind in "eEfFgGps" or length in ("l", "ll", "z") else 4
        position = -(-position // size) * size
        raw = _bytes(m, buffer + position, size, lane)
        position += size
        specifier = match[0].replace(length or "\0", "")
        if kind in "eEfFgG":
            return specifier % float(np.frombuffer(raw, np.float64)[0])
        if kind == "s":
            return specifier % _bytes(m, int.from_bytes(raw, "little"), 4096, lane).split(b"\0")[0].decode()
        value = int.from_bytes(raw, "little", signed=kind in "di")
        return f"{value:#x}" if kind == "p" else specifier.replace("u", "d") % value

    return _SPECIFIER.sub(one, text)
