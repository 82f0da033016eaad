"""CUDA's limits of a launch, checked before anything runs, so that all devices report the same error."""

from __future__ import annotations

import math

from greenfast.spec.arch import Target
from greenfast.spec.facts import Resources
from greenfast.spec.kernel import KernelSource, Launch

_MOST_THREADS = 1024
_BLOCK = (1024, 1024, 64)
_GRID = (2**31 - 1, 65535, 65535)
_REGISTERS = 65536  # of a block, and of a multiprocessor
_BLOCKS, _THREADS = 32, 2048  # of a multiprocessor; some have fewer
#: Compute capability -> the most shared memory of a block, in bytes; other targets have the least of these.
_SHARED = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
_LEAST_SHARED = 99 * 1024


def most_shared(target: Target) -> int:
    """The shared memory that a block can have on a target, in bytes."""
    return _SHARED.get(target.capability, _LEAST_SHARED)


def launch_faults(source: KernelSource, plan: Launch, resources: Resources | None, target: Target) -> list[str]:
    """Describe why no GPU of a target can launch a kernel with this launch; empty if it can.

    resources: of the compiled kernel; None if it was not assembled.
    """
    found = []
    for what, extents, most in (("block", source.block, _BLOCK), ("grid", plan.grid, _GRID)):
        if any(not 1 <= extent <= limit for extent, limit in zip(extents, most, strict=True)):
            found.append(f"its {what} is {_by(extents)}; extents are at least 1, and at most {_by(most)}")
    threads = math.prod(source.block)
    if not found and threads > _MOST_THREADS:
        found.append(f"its block of {_by(source.block)} has {threads} threads; at most {_MOST_THREADS} are allowed")
    shared = source.dynamic_smem_bytes + (resources.static_smem_bytes if resources else 0)
    if source.dynamic_smem_bytes < 0 or shared > most_shared(target):
        asked = f"{shared} bytes of shared memory ({source.dynamic_smem_bytes} of them dynamic)"
        found.append(f"a block asks for {asked}; on {target.name} it has at most {most_shared(target)}")
    # A warp's registers are allocated in units of 256.
    registers = -(-resources.registers // 8) * 8 * 32 * -(-threads // 32) if resources else 0
    if resources and not found and registers > _REGISTERS:
        found.append(
            f"{threads} threads of {resources.registers} registers need {registers}; a block has at most {_REGISTERS}"
        )
    if plan.cooperative and not found:
        held = target.multiprocessors * min(_BLOCKS, _THREADS // (-(-threads // 32) * 32))
        if registers:
            held = min(held, target.multiprocessors * (_REGISTERS // registers))
        if math.prod(plan.grid) > held:
            found.append(f"a cooperative launch of {math.prod(plan.grid)} blocks; at most {held} are resident at once")
    return found


def _by(extents: tuple[int, ...]) -> str:
    return " x ".join(map(str, extents))
