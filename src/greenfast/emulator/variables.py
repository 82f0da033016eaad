"""Layout and initial values of a module's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenfast.emulator.ptx.syntax import Function, Module, Variable
from greenfast.spec.errors import UsageError


def initial_value(v: Variable, symbols: Mapping[str, int]) -> bytes:
    """Return a variable's initial value with its relocations applied."""
    data = bytearray(v.data)
    for r in v.relocations:
        if r.symbol not in symbols:
            raise UsageError(f"PTX: the initial value of {v.name} names {r.symbol}, not a variable in memory")
        data[r.offset : r.offset + r.size] = r.value(symbols[r.symbol])
    return bytes(data)


def pack(variables: Sequence[Variable], start: int = 0) -> tuple[dict[str, int], int]:
    """Return the offsets of variables in sequence, and the end of the last one."""
    layout, end = {}, start
    for v in variables:
        end = -(-end // v.align) * v.align
        layout[v.name] = end
        end += v.size
    return layout, end


def list_shared(module: Module, function: Function) -> list[Variable]:
    """Return the shared variables of a kernel and its module."""
    return [v for v in (*module.variables.values(), *function.variables.values()) if v.space == "shared"]


def layout_shared(module: Module, function: Function, dynamic_bytes: int) -> tuple[dict[str, int], int]:
    """Return the layout of shared variables: static ones, then the dynamic array (declared without a size)."""
    shared = list_shared(module, function)
    layout, end = pack([v for v in shared if v.size])
    dynamic = [v for v in shared if not v.size]
    if dynamic:
        align = max(v.align for v in dynamic)
        end = -(-end // align) * align
        layout |= {v.name: end for v in dynamic}
    return layout, end + dynamic_bytes
