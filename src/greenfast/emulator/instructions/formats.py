"""The number formats of matrix operands."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.convert import E4M3_VALUES, E5M2_VALUES
from greenfast.emulator.instructions.rounding import bf16_values
from greenfast.emulator.machine.blocks import Values

#: Bits of an element, by format.
BITS = {"f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
INTEGERS = ("s8", "u8")


def decode(data: NDArray[np.uint8], kind: str) -> Values:
    """Decode the elements in the last axis of bytes to float32 (f64: float64), exactly."""
    if kind == "e4m3":
        return np.asarray(E4M3_VALUES[data])
    if kind == "e5m2":
        return np.asarray(E5M2_VALUES[data])
    if kind in ("s8", "u8"):
        return data.view(np.int8 if kind == "s8" else np.uint8).astype(np.float32)
    if kind == "f16":
        return data.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return bf16_values(data.view(np.uint16))
    if kind == "tf32":  # the matrix units leave the last 13 bits of a float32 out
        return (data.view(np.uint32) & np.uint32(0xFFFF_E000)).view(np.float32)
    if kind == "f64":
        return data.view(np.float64)
    raise ValueError(f"format {kind!r}; known are {', '.join(BITS)}")
