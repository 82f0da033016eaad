"""Matrix descriptors of wgmma: the layout of an operand in shared memory.

Facts: PTX ISA, "Shared Memory Matrix Layout" and "Matrix Descriptor Format".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.memory import CHUNK
from greenfast.emulator.machine.tensormap import swizzled

#: Bits 62-63 of a descriptor -> bytes of the swizzle.
_SWIZZLES = (0, 128, 64, 32)
_ROWS = 8  # of a core matrix


class DescriptorError(Exception):
    """An invalid matrix descriptor; the message gives the reason."""


@dataclass(frozen=True)
class MatrixDescriptor:
    """The fields of a descriptor that the matrices of a wgmma share; offsets and the swizzle are in bytes."""

    leading: int
    stride: int
    base: int
    swizzle: int

    @staticmethod
    def parse(bits: int) -> tuple[int, MatrixDescriptor]:
        """Return the start address in the block's shared memory, and the other fields."""
        address, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return address, MatrixDescriptor(leading, stride, bits >> 49 & 7, _SWIZZLES[bits >> 62])

    def check(self, address: int) -> None:
        """Raise DescriptorError for a base offset.

        With base offset 0, the swizzle pattern begins at multiples of its 8 rows, for any start of the matrix. The
        address alone decides the position of a chunk.
        """
        if self.base:
            raise DescriptorError("a matrix descriptor with a base offset, unknown to the emulator")

    def offsets(self, address: NDArray[np.int64], rows: int, width: int, transposed: bool) -> NDArray[np.int64]:
        """Return (matrices, a, b) offsets of 16-byte chunks in shared memory; ``address``: the starts of the matrices.

        rows: extent in M or N; width: bytes of K that a row has (K-major), or 2 * K (transposed, 16-bit elements).
        K-major: a is the row, b the chunk along K. Transposed: a is k, b the chunk along M or N.
        """
        relative = _transposed(self, rows, width) if transposed else _k_major(self, rows, width)
        return swizzled(address[:, None, None] + relative, self.swizzle)


@lru_cache(maxsize=256)
def _k_major(d: MatrixDescriptor, rows: int, width: int) -> NDArray[np.int64]:
    row, chunk = np.arange(rows)[:, None], np.arange(width // CHUNK)[None, :]
    if d.swizzle:
        return row // _ROWS * d.stride + row % _ROWS * d.swizzle + chunk * CHUNK
    return row // _ROWS * d.stride + row % _ROWS * CHUNK + chunk * d.leading


@lru_cache(maxsize=256)
def _transposed(d: MatrixDescriptor, rows: int, width: int) -> NDArray[np.int64]:
    k, chunk = np.arange(width // 2)[:, None], np.arange(rows * 2 // CHUNK)[None, :]
    if d.swizzle:
        per_row = d.swizzle // CHUNK
        along = chunk // per_row * d.leading + chunk % per_row * CHUNK
        return along + k % _ROWS * d.swizzle + k // _ROWS * d.stride
    return chunk * d.stride + k % _ROWS * CHUNK + k // _ROWS * d.leading
