"""The environment that PTX does not define: clocks, multiprocessor and warp slots, grid numbers, addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: Default values of %nsmid and %nwarpid.
MULTIPROCESSORS, WARPS = 132, 64


@dataclass(frozen=True)
class Surroundings:
    """Values of special registers that no launch defines, and the address of global memory.

    ticks: for each clock register, its initial value and its increment per executed instruction. multiprocessors: the
    value of %nsmid. turned: place blocks on other multiprocessors and warps in other slots. grid: %gridid of the first
    run. memory: offset in bytes of all allocations from their default addresses. forced: a launch and a comparison in
    it; the first result of each thread there is inverted. is_possible: whether a GPU can show all values at once. A
    forced comparison of address bits may be impossible on a GPU; then only out-of-bounds accesses count. name: for
    messages.
    """

    name: str = ""
    ticks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    multiprocessors: int = MULTIPROCESSORS
    turned: bool = False
    grid: int = 1
    memory: int = 0
    forced: tuple[int, int] | None = None
    is_possible: bool = True

    def clock(self, register: str, executed: int) -> int:
        """Return the value of a clock after a number of instructions."""
        start, rate = self.ticks.get(register, (0, 1))
        return start + rate * executed

    def place_blocks(self, block: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return %smid of blocks. Every second multiprocessor gets none: CUDA does not promise one to each."""
        count = self.multiprocessors
        location = block % (count // 2) * 2
        return count - 2 - location if self.turned else location + 1

    def place_warps(self, slot: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return %warpid of warps, from their default slots."""
        return WARPS - 1 - slot if self.turned else slot


USUAL = Surroundings()
#: A device that has run for some hours in 2026, with fewer multiprocessors, and its memory at addresses of a driver.
_CYCLES, _NANOSECONDS = (54_321_987_654_321, 7), (1_790_123_456_789_012_345, 1000)
OTHER = Surroundings(
    "other clocks, multiprocessors and addresses",
    ticks={
        "%clock": _CYCLES,
        "%clock64": _CYCLES,
        "%clock_hi": (_CYCLES[0] >> 32, 0),
        "%globaltimer": _NANOSECONDS,
        "%globaltimer_lo": _NANOSECONDS,
        "%globaltimer_hi": (_NANOSECONDS[0] >> 32, 0),
    },
    multiprocessors=114,
    turned=True,
    grid=1_234_567,
    memory=0x5A_4600_0000,
)
#: Special registers with values that no launch defines. %envreg1 and %envreg2 hold the workspace of a cooperative
#: launch.
UNDEFINED = {
    *("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"),
    *("%smid", "%nsmid", "%warpid", "%nwarpid", "%gridid"),
    *(f"%envreg{n}" for n in range(32) if n not in (1, 2)),
    *(f"%pm{n}" for n in range(8)),
    *(f"%pm{n}_64" for n in range(8)),
}
