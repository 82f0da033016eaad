"""The least time that a device could need: a measurement below it is an error, not a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from greenfast.spec.facts import DeviceInfo

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
    """The least time in microseconds, and what it follows from; 0 and why not where none is known."""

    us: float
    why: str

    def __str__(self) -> str:
        return f"{self.us:.3g} µs ({self.why})" if self.us else self.why


def floor_of(device: DeviceInfo | None, work: Mapping[str, int], written: int, *, cold: bool) -> Floor:
    """What the device needs at least for one launch.

    work: minima of the problem (``least_work``): matrix_flops, global_load_bytes and global_store_bytes count.
    written: bytes of the outputs that every launch must write. cold: whether what is loaded comes from memory.
    Inputs count where least_work says how much of them is read: not every kernel has to read all of them.
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
    known = [(amount / rate, amount, rate, what) for amount, rate, what in needs if amount and rate]
    if not known:
        return Floor(0.0, f"no floor: no least work, or no peak of compute capability {device.compute_capability}")
    seconds, amount, rate, what = max(known)
    unit, _, done = what.partition(" ")
    why = f"{_short(amount)}{unit}{done and f' {done}'} at {_short(rate)}{unit}/s"
    return Floor(seconds * 1e6 / _HEADROOM, why)


def _short(value: float) -> str:
    """A number with the prefix of its size, such as "4.29 G"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"
