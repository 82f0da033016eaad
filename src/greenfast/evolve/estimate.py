"""An estimate of a kernel's time from what the emulator counted, and the pipe that it makes busiest.

A model of throughput alone: each kind of work at its rate on all multiprocessors, the slowest decides. It orders
variants of a kernel roughly and says nothing about latency, so it is a screen and never a speed
(docs/evolve.md#the-screen has what it was worth).
"""

from __future__ import annotations

from collections.abc import Mapping

from greenfast.spec.arch import Target
from greenfast.spec.facts import KernelCounts
from greenfast.spec.peaks import matrix_rate

#: Of a multiprocessor, per clock: warp instructions, exponentials, passes over shared memory (of 128 bytes), and bytes
#: that it exchanges with the L2 cache (CUDA C++ Programming Guide, "Arithmetic Instructions"; 64 bytes is what NVIDIA's
#: A100 whitepaper gives for the L2).
_ISSUED, _SPECIAL, _PASSES, _L2_BYTES = 4, 16, 1, 64
_SECTOR = 32
#: A clock that is near those of all targets; estimates are compared with each other only.
_HERTZ = 1.7e9


def pipes(counts: KernelCounts, target: Target, fmt: str) -> dict[str, float]:
    """Clocks that a launch keeps each pipe busy, on all multiprocessors of the target.

    Products by ``wgmma`` are of the format's operands, all others of half.
    """
    wide = any(name.startswith("wgmma") for name in counts.instructions)
    rate = matrix_rate(".".join(map(str, target.capability)), fmt if wide else "f16")
    sectors = counts.global_load_sectors + counts.global_store_sectors
    work = {
        "tensor": counts.matrix_flops / rate if rate else 0.0,
        "special": counts.exponentials / _SPECIAL,
        "issue": counts.warp_instructions / _ISSUED,
        "shared": counts.shared_passes / _PASSES,
        "memory": sectors * _SECTOR / _L2_BYTES,
    }
    return {name: clocks / target.multiprocessors for name, clocks in work.items()}


def estimate(counts: Mapping[str, KernelCounts], target: Target, fmt: str) -> tuple[float, str]:
    """Seconds of one launch at each counted shape, summed, and the pipe that is busiest over all of them."""
    total, busy = 0.0, dict[str, float]()
    for of_shape in counts.values():
        found = pipes(of_shape, target, fmt)
        total += max(found.values()) / _HERTZ
        for name, clocks in found.items():
            busy[name] = busy.get(name, 0.0) + clocks
    return total, max(busy, key=lambda name: busy[name]) if busy else ""
