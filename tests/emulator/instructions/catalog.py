"""Every instruction that is tried."""

from __future__ import annotations

from tests.emulator.instructions import bitwise, conversions, floating, halves, integers, matrices, memory, warps
from tests.emulator.instructions.case import Case

CASES: tuple[Case, ...] = (
    *integers.cases(), *bitwise.cases(), *floating.cases(), *conversions.cases(), *warps.cases(), *memory.cases(),
    *matrices.cases(),
    *halves.cases(),
)  # fmt: skip

#: Kernels per translation unit: many, as each unit costs the compiler a start, but one that fails takes its unit along.
PER_UNIT = 32


def units(cases: tuple[Case, ...] = CASES) -> list[tuple[Case, ...]]:
    """Return the cases in groups that are compiled together."""
    return [cases[n : n + PER_UNIT] for n in range(0, len(cases), PER_UNIT)]
