"""Calls of functions that have no PTX: printf and the failure of an assertion."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from greenfast.emulator.instructions.access import locate
from greenfast.emulator.machine.blocks import ThreadSet, Values, lane_indices
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Symbol, Vector
from greenfast.emulator.ptx.unsupported import unsupported

#: A known specifier, or the % of an unknown one.
_SPECIFIER = re.compile(r"%([-+ #0]*)(\*|\d*)((?:\.(?:\*|\d*))?)(hh|h|ll|l|z)?([diouxXeEfFgGcsp%])|%")


def call(i: Instruction) -> Operation:
    """Build call of vprintf(format, arguments) or __assertfail(condition, file, line, function, size)."""
    name = next((o.name for o in i.operands if isinstance(o, Symbol)), "")
    vectors = [[item.name for item in o.items if isinstance(item, Symbol)] for o in i.operands if isinstance(o, Vector)]
    if name == "__assertfail" and vectors:
        condition, file, line, function = vectors[0][:4]

        def fails(m: ResidentBlocks, lanes: ThreadSet) -> None:
            lane = int(lane_indices(lanes)[0])
            texts = [_text(m, int(_argument(m, n, np.uint64, lanes)[0]), lane) for n in (condition, file, function)]
            number = int(_argument(m, line, np.uint32, lanes)[0])
            raise m.fault(f"assertion `{texts[0]}` failed in {texts[2]}, {texts[1]}:{number},", lane)

        return fails
    if name != "vprintf" or not vectors:
        raise unsupported(i, "calls a function that is not known to the emulator")
    *results, (text, values) = vectors

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        formats, buffers = (_argument(m, n, np.uint64, lanes) for n in (text, values))
        counts = []
        for n, lane in enumerate(lane_indices(lanes)):
            output, count = _format(m, int(formats[n]), int(buffers[n]), int(lane))
            m.output.append(output)
            counts.append([count])
        for result in results[:1]:
            for name in result:
                location = m.local_layout[name] + m.local_start[lanes]
                m.local.write(location, np.array(counts, np.uint32).view(np.uint8), "result of a call")

    return run


def _argument(m: ResidentBlocks, name: str, dtype: Any, lanes: ThreadSet) -> Values:
    """Return the threads' values of an argument."""
    size = np.dtype(dtype).itemsize
    data = m.local.read(m.local_layout[name] + m.local_start[lanes], size, "argument of a call")
    return np.asarray(data.view(dtype).reshape(-1))


def _text(m: ResidentBlocks, address: int, lane: int) -> str:
    return _bytes(m, address, 4096, lane).split(b"\0")[0].decode(errors="replace")


def _bytes(m: ResidentBlocks, address: int, size: int, lane: int) -> bytes:
    one = np.array([lane])
    arena, offsets, _ = locate(m, "generic", np.array([address], np.int64), one)
    return arena.data[int(offsets[0]) : int(offsets[0]) + size].tobytes()


def _format(m: ResidentBlocks, text_at: int, buffer: int, lane: int) -> tuple[str, int]:
    """Return the output of one thread and its number of arguments.

    The buffer holds the arguments, each aligned to its size.
    """
    text = _text(m, text_at, lane)
    position = count = 0

    def take(size: int) -> bytes:
        nonlocal position
        position = -(-position // size) * size + size
        return _bytes(m, buffer + position - size, size, lane)

    def take_int() -> str:
        return str(int.from_bytes(take(4), "little", signed=True))

    def one(match: re.Match[str]) -> str:
        nonlocal count
        flags, width, precision, length, kind = match.groups()
        if kind is None:
            raise m.limit(f"printf of {text[match.start() :][:20]!r}: a specifier unknown to the emulator", lane)
        if kind == "%":
            return "%"
        count += 1
        width = take_int() if width == "*" else width
        precision = "." + take_int() if precision == ".*" else precision
        raw = take(8 if kind in "eEfFgGps" or length in ("l", "ll", "z") else 4)
        if kind in "eEfFgG":
            value: Any = float(np.frombuffer(raw, np.float64)[0])
        elif kind == "s":
            value = _text(m, int.from_bytes(raw, "little"), lane)
        else:
            raw = raw[: {"hh": 1, "h": 2}.get(length, 8)]
            value = int.from_bytes(raw, "little", signed=kind in "di")
        if kind == "p":
            kind, value = "s", f"{value:#x}"
        result: str = f"%{flags}{width}{precision}{'d' if kind == 'u' else kind}" % value
        return result

    return _SPECIFIER.sub(one, text), count
