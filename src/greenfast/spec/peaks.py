"""Peak rates of GPUs, to compare measured times with.

Rates per multiprocessor and clock follow from the architecture (dense products, fused multiply-adds counted as two
operations); bandwidths are from the vendor's data sheets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from greenfast.spec.facts import DeviceInfo

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


def peaks_of(device: DeviceInfo | None, fmt: str) -> Peaks | None:
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
