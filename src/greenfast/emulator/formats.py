"""The number formats of matrix operands."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.convert import E4M3_VALUES, E5M2_VALUES
from greenfast.emulator.machine import Values

FORMATS = ("e4m3", "e5m2", "s8", "u8", "f16", "bf16")


def decode(data: NDArray[np.uint8], kind: str) -> Values:
    """float32 values of the elements that lie in the last axis of bytes; each of them is exact."""
    if kind == "e4m3":
        return np.asarray(E4M3_VALUES[data])
    if kind == "e5m2":
        return np.asarray(E5M2_VALUES[data])
    if kind in ("s8", "u8"):
        return data.view(np.int8 if kind == "s8" else np.uint8).astype(np.float32)
    if kind == "f16":
        return data.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise ValueError(f"format {kind!r}; known are {', '.join(FORMATS)}")
