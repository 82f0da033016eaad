"""The limits of GPUs: of a launch, and of the rates that a measured time can have.

All devices report the same errors of a launch, because these are checked before anything runs. Rates per multiprocessor
and clock follow from the architecture (dense products, fused multiply-adds counted as two operations). Bandwidths are
from the vendor's data sheets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from greenfast.spec.arch import Target
from greenfast.spec.facts import DeviceInfo, Resources
from greenfast.spec.kernel import KernelSource, Launch

#: Threads of a block, and extents of a block and of a grid (CUDA C++ Programming Guide, "Compute Capabilities").
MOST_THREADS, MOST_BLOCK, MOST_GRID = 1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535)
_REGISTERS = 65536  # of a block, and of a multiprocessor
_BLOCKS, _THREADS = 32, 2048  # of a multiprocessor; some have fewer
#: Compute capability -> the most shared memory of a block, in bytes; other targets have the smallest value.
_SHARED = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
_LEAST_SHARED = 99 * 1024


def most_shared(target: Target) -> int:
    """Return the shared memory that a block can have on a target, in bytes."""
    return _SHARED.get(target.capability, _LEAST_SHARED)


def launch_faults(source: KernelSource, plan: Launch, resources: Resources | None, target: Target) -> list[str]:
    """Describe why no GPU of a target can launch a kernel with this launch; empty if it can.

    resources: of the compiled kernel; None if it was not assembled.
    """
    faults = []
    for name, extents, most in (("block", source.block, MOST_BLOCK), ("grid", plan.grid, MOST_GRID)):
        if any(not 1 <= extent <= limit for extent, limit in zip(extents, most, strict=True)):
            faults.append(f"its {name} is {_by(extents)}; extents are at least 1, and at most {_by(most)}")
    threads = math.prod(source.block)
    if not faults and threads > MOST_THREADS:
        faults.append(f"its block of {_by(source.block)} has {threads} threads; at most {MOST_THREADS} are allowed")
    shared = source.dynamic_smem_bytes + (resources.static_smem_bytes if resources else 0)
    if source.dynamic_smem_bytes < 0 or shared > most_shared(target):
        asked = f"{shared} bytes of shared memory ({source.dynamic_smem_bytes} of them dynamic)"
        faults.append(f"a block asks for {asked}; on {target.name} it has at most {most_shared(target)}")
    # A warp's registers are allocated in units of 256.
    registers = -(-resources.registers // 8) * 8 * 32 * -(-threads // 32) if resources else 0
    if resources and not faults and registers > _REGISTERS:
        faults.append(
            f"{threads} threads of {resources.registers} registers need {registers}; a block has at most {_REGISTERS}"
        )
    if plan.cooperative and not faults:
        held = target.multiprocessors * min(_BLOCKS, _THREADS // (-(-threads // 32) * 32))
        if registers:
            held = min(held, target.multiprocessors * (_REGISTERS // registers))
        if math.prod(plan.grid) > held:
            faults.append(f"a cooperative launch of {math.prod(plan.grid)} blocks; at most {held} are resident at once")
    return faults


def _by(extents: tuple[int, ...]) -> str:
    return " x ".join(map(str, extents))


# Compute capability -> operations of matrix instructions per multiprocessor and clock, by kind of operand.
_MATRIX: dict[str, dict[str, int]] = {
    "8.0": {"f16": 2048, "int8": 4096},
    "8.6": {"f16": 1024, "int8": 2048},
    "8.9": {"f16": 1024, "int8": 2048, "fp8": 2048},
    "9.0": {"f16": 4096, "int8": 8192, "fp8": 8192},
    "10.0": {"f16": 8192, "int8": 16384, "fp8": 16384},
    "12.0": {"f16": 1024, "int8": 2048, "fp8": 2048},
}
_KINDS = {
    "f16": ("fp16", "f16", "float16", "half", "bf16", "bfloat16"),
    "int8": ("int8", "i8"),
    "fp8": ("fp8", "e4m3", "e5m2"),
}
# Special functions per multiprocessor and clock, on every architecture above.
_SPECIAL = 16
# A word of the device's name -> bytes of device memory per second, the largest of the models that carry it.
_MEMORY = {
    "A100": 2.039e12,
    "A10": 0.600e12,
    "A10G": 0.600e12,
    "L4": 0.300e12,
    "L40": 0.864e12,
    "L40S": 0.864e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
    "GH200": 4.9e12,
    "B200": 8.0e12,
    "3090": 0.936e12,
    "4090": 1.008e12,
    "5090": 1.792e12,
}


@dataclass(frozen=True)
class Peaks:
    """Operations, exponentials and bytes per second; 0 if unknown.

    matrix_flops: dense products of the operands of a number format. exponentials: on the special function units; a
    kernel can compute more as polynomials. memory_bytes: of device memory.
    """

    matrix_flops: float
    exponentials: float
    memory_bytes: float


def matrix_rate(capability: str, fmt: str) -> int:
    """Return the operations of matrix instructions per multiprocessor and clock for a format; 0 if unknown.

    capability: as "9.0".
    """
    matrix = _MATRIX.get(capability, {})
    kind = next((kind for kind, names in _KINDS.items() if fmt in names), "")
    return matrix.get(kind, max(matrix.values(), default=0))


def get_peaks(device: DeviceInfo | None, fmt: str) -> Peaks | None:
    """Return the peaks of a GPU at its highest clock for a number format; None for an unknown device.

    An unknown format, or one without matrix instructions on the device, gets the rate of the fastest products.
    """
    if device is None or device.kind != "gpu" or not (device.sm_count > 0 and device.sm_clock_mhz > 0):
        return None
    rate = matrix_rate(device.compute_capability, fmt)
    if not rate:
        return None
    per_second = device.sm_count * device.sm_clock_mhz * 1e6
    words = re.findall(r"\w+", device.name)
    return Peaks(
        matrix_flops=rate * per_second,
        exponentials=_SPECIAL * per_second,
        memory_bytes=next((_MEMORY[word] for word in words if word in _MEMORY), 0.0),
    )


def least_times_us(least: Mapping[str, int], moved_bytes: int, peaks: Peaks) -> dict[str, float]:
    """Return the minimum microseconds of each kind of work with a known peak: ``matrix``, ``exponentials``, ``memory``.

    least: minimum counts of the problem, by the names of KernelCounts. moved_bytes: of its inputs and outputs, 0 if
    unknown; they may stay in the L2 cache instead of device memory.
    """
    work = {
        "matrix": (least.get("matrix_flops", 0), peaks.matrix_flops),
        "exponentials": (least.get("exponentials", 0), peaks.exponentials),
        "memory": (moved_bytes, peaks.memory_bytes),
    }
    return {name: 1e6 * amount / rate for name, (amount, rate) in work.items() if amount > 0 and rate > 0}


#: Operations of dense matrix products per multiprocessor and clock in the device's fastest format (a multiply-add is
#: two), by compute capability: the vendor's peak over multiprocessors and boost clock.
_MATRIX_OPERATIONS = {
    (8, 0): 8192,  # int4, 1248 TOPS, 108 at 1410 MHz: NVIDIA A100 Tensor Core GPU Architecture, table 1
    (8, 6): 4096,  # int4, 568 TOPS, 82 at 1695 MHz: NVIDIA Ampere GA102 GPU Architecture, appendix A
    (8, 9): 4096,  # int4, 1321 TOPS, 128 at 2520 MHz: NVIDIA Ada GPU Architecture, appendix A
    (9, 0): 8192,  # fp8 and int8, 1979 TFLOPS, 132 at 1830 MHz: NVIDIA H100 Tensor Core GPU Architecture, table 1
    (10, 0): 32768,  # fp4, 9 to 10 PFLOPS, 148 at 1.9 GHz: NVIDIA Blackwell Architecture Technical Brief
    (12, 0): 4096,  # fp4, 1676 TFLOPS, 170 at 2407 MHz: NVIDIA RTX Blackwell GPU Architecture, appendix A
}
#: No multiprocessor loads or stores more bytes a clock, wherever they are: the width of its L1 cache.
_BYTES_PER_CLOCK = 128
#: Boards run faster than the clocks that their drivers state by less than this.
_HEADROOM = 1.25


@dataclass(frozen=True)
class Floor:
    """The least time in microseconds with its cause; 0 with the reason if no limit is known."""

    us: float
    why: str

    def __str__(self) -> str:
        return f"{self.us:.3g} µs ({self.why})" if self.us else self.why


def compute_floor(device: DeviceInfo | None, work: Mapping[str, int], written: int, *, cold: bool) -> Floor:
    """Return the least time that the device needs for one launch.

    work: minima of the problem (``least_work``): matrix_flops, global_load_bytes and global_store_bytes count.
    written: bytes of the outputs that every launch must write. cold: whether loads come from device memory.
    Inputs count if least_work has their bytes, because not every kernel has to read all of them.
    """
    if device is None or not (device.sm_count and device.sm_clock_mhz):
        return Floor(0.0, "no floor: the device's multiprocessors and clock are not known")
    clocks = device.sm_count * device.sm_clock_mhz * 1e6
    near = clocks * _BYTES_PER_CLOCK
    far = device.memory_gb_s * 1e9 if cold and device.memory_gb_s else near
    flops = clocks * _MATRIX_OPERATIONS.get(device.capability, 0)
    stored = max(written, work.get("global_store_bytes", 0))
    needs = [
        (work.get("matrix_flops", 0), flops, "FLOP"),
        (work.get("global_load_bytes", 0), far, "B loaded"),
        (stored, near, "B stored"),
    ]
    known = [(amount / rate, amount, rate, unit_text) for amount, rate, unit_text in needs if amount and rate]
    if not known:
        return Floor(0.0, f"no floor: no least work, or no peak of compute capability {device.compute_capability}")
    seconds, amount, rate, unit_text = max(known)
    unit, _, done = unit_text.partition(" ")
    why = f"{_short(amount)}{unit}{done and f' {done}'} at {_short(rate)}{unit}/s"
    return Floor(seconds * 1e6 / _HEADROOM, why)


def _short(value: float) -> str:
    """Format a number with the prefix of its size, such as "4.29 G"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"
