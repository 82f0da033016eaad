"""Estimate a kernel's time from the emulator's counts, and name its busiest pipe.

The model covers throughput alone: each kind of work runs at its peak rate on all multiprocessors, and the slowest kind
determines the time. It ranks variants of a kernel roughly and ignores latency. It is a screen, not a measurement
(docs/evolve.md#the-screen reports its recall).
"""

from __future__ import annotations

from collections.abc import Mapping

from greenfast.spec.arch import Target
from greenfast.spec.facts import KernelCounts
from greenfast.spec.peaks import matrix_rate

#: Rates per multiprocessor and clock: warp instructions, exponentials, passes of 128 bytes over shared memory, and
#: bytes to or from the L2 cache (CUDA C++ Programming Guide, "Arithmetic Instructions"; NVIDIA A100 whitepaper for the
#: L2).
_ISSUED, _SPECIAL, _PASSES, _L2_BYTES = 4, 16, 1, 64
_SECTOR = 32
#: A clock near those of all targets. Estimates are compared only with each other.
_HERTZ = 1.7e9


def compute_pipe_clocks(counts: KernelCounts, target: Target, fmt: str) -> dict[str, float]:
    """Return the clocks for which a launch keeps each pipe busy, over all multiprocessors of the target.

    ``wgmma`` multiplies operands of the format; all other matrix instructions multiply half.
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
    """Return the seconds of one launch, summed over the counted shapes, and the busiest pipe."""
    total, busy = 0.0, dict[str, float]()
    for shape_counts in counts.values():
        pipe_clocks = compute_pipe_clocks(shape_counts, target, fmt)
        total += max(pipe_clocks.values()) / _HERTZ
        for name, clocks in pipe_clocks.items():
            busy[name] = busy.get(name, 0.0) + clocks
    return total, max(busy, key=lambda name: busy[name]) if busy else ""
