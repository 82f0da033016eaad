"""Tensor maps, and the swizzle that tensor copies and matrix descriptors share.

Facts: CUDA driver API, "Tensor Map Object Management"; PTX ISA, "Swizzling modes".
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.memory import GlobalMemory
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import MAP_BYTES, TensorMap

#: The emulator's encoding of a map: the tensor's address, a magic mark, rank, element size, swizzle, shape, strides,
#: box, steps between elements. The encoding of a GPU's driver is not documented; its first field is the address too.
_FORM = struct.Struct("<Q8s3B5x5Q5Q5H5B")
#: The place of a field of tensormap.replace in that form, and its NumPy type. Fields by dimension are arrays.
FIELDS = {
    **{"global_address": (0, "<u8"), "rank": (16, "u1"), "elemtype": (17, "u1"), "swizzle_mode": (18, "u1")},
    **{"global_dim": (24, "<u8"), "global_stride": (72, "<u8"), "box_dim": (104, "<u2"), "element_stride": (114, "u1")},
}
#: The place and the bytes of the mark, and the place of the innermost stride: the element's size.
MARK, ELEMENT = (8, b"gf_map\0\3"), 64
#: CUTLASS clears bit 21 of the second word of a map over a small tensor, so the mark does not have it ("_" for "-").
_MARK = MARK[1]
_MADE = "a tensor map that the kernel made"
_LONGEST_BOX, _MOST_DIMENSIONS = 256, 5


def swizzled(offsets: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Permute addresses in a block's shared memory, in chunks of 16 bytes within rows of ``width`` bytes.

    width: 0 (as they are), 32, 64 or 128. Bits 4-6 are XORed with bits 7-9 (128), bits 4-5 with 7-8 (64), bit 4 with
    bit 7 (32).
    """
    if not width:
        return offsets
    return offsets ^ ((offsets >> 7) & (width // 16 - 1)) << 4


@dataclass(frozen=True)
class BoundMap:
    """A tensor map over an allocation that begins at offset ``start`` of global memory. Tuples are innermost first."""

    start: int
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def box_bytes(self) -> int:
        """Bytes of one tile."""
        return math.prod(self.box) * self.item


def bind(layout: TensorMap, memory: GlobalMemory) -> BoundMap:
    """Bind a tensor map to a buffer of the case.

    Raises UsageError for a map that the driver would reject, and for a map that reaches beyond its buffer.
    """
    if layout.buffer not in memory.starts:
        raise UsageError(f"tensor map over {layout.buffer!r}: no buffer of the case")
    tensor, size = lay_out(layout), memory.sizes[layout.buffer]
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
    if min(layout.shape) < 1 or (reach := reach + tensor.item) > size:
        raise _refused(layout, f"shape {layout.shape} with strides {layout.strides} needs {reach} bytes of {size}")
    return replace(tensor, start=memory.starts[layout.buffer])


def lay_out(layout: TensorMap) -> BoundMap:
    """Return a tensor map over memory that begins at offset 0. Raises UsageError if the driver would reject it."""
    item = np.dtype(layout.dtype).itemsize
    if layout.strides[-1] != item:
        raise _refused(layout, f"its innermost stride must be the element's {item} bytes, not {layout.strides[-1]}")
    for extent, stride in zip(layout.shape[:-1], layout.strides[:-1], strict=True):
        if stride % 16 or not 0 <= stride < 1 << 40 or (stride == 0 and extent != 1):
            reason = "strides are multiples of 16 below 2^40, and 0 only for an extent of 1"
            raise _refused(layout, f"a stride of {stride} bytes; {reason}")
    for extent in layout.box:
        if not 1 <= extent <= _LONGEST_BOX:
            raise _refused(layout, f"a box extent of {extent}; extents are 1 to {_LONGEST_BOX}")
    inner = layout.box[-1] * item
    if inner % 16:
        raise _refused(layout, f"its box is {inner} bytes wide; the width must be a multiple of 16 bytes")
    if layout.swizzle and inner > layout.swizzle:
        raise _refused(layout, f"its box is {inner} bytes wide, more than its swizzle of {layout.swizzle}")
    if layout.swizzle and inner < layout.swizzle:
        raise _refused(
            layout, f"its box is {inner} bytes wide, less than its swizzle of {layout.swizzle} (not emulated)"
        )
    inward: Any = lambda values: tuple(reversed(values))  # noqa: E731
    return BoundMap(0, item, inward(layout.shape), inward(layout.strides), inward(layout.box), layout.swizzle)


def encode(tensor: BoundMap, base: int) -> bytes:
    """Return the 128 bytes of a map; base: the address of offset 0 of global memory."""

    def five(extents: tuple[int, ...]) -> list[int]:
        return [*extents, *[0] * (_MOST_DIMENSIONS - len(extents))]

    sizes = (len(tensor.shape), tensor.item, tensor.swizzle)
    extents = (*five(tensor.shape), *five(tensor.strides), *five(tensor.box), *[1] * _MOST_DIMENSIONS)
    return _FORM.pack(base + tensor.start, _MARK, *sizes, *extents).ljust(MAP_BYTES, b"\0")


def decode(data: bytes, base: int) -> BoundMap | None:
    """Return the map of 128 bytes, None if ``encode`` did not make them."""
    address, mark, rank, item, swizzle, *extents = _FORM.unpack_from(data)
    if mark != _MARK:
        return None
    shape, strides, box = (tuple(extents[n : n + rank]) for n in range(0, 15, _MOST_DIMENSIONS))
    return BoundMap(start=address - base, item=item, shape=shape, strides=strides, box=box, swizzle=swizzle)


def check_replaced(data: bytes) -> None:
    """Check a map that a kernel wrote. Raises UsageError if a driver would reject it."""
    _, _, rank, item, swizzle, *extents = _FORM.unpack_from(data)
    if not 1 <= rank <= _MOST_DIMENSIONS or item not in (1, 2, 4, 8):
        raise UsageError(f"{_MADE}: {rank} dimensions, elements of {item} bytes")
    shape, strides, box, steps = (tuple(extents[n : n + rank][::-1]) for n in range(0, 20, _MOST_DIMENSIONS))
    if min(shape) < 1 or set(steps) != {1}:
        raise UsageError(f"{_MADE}: shape {shape}, element strides of {steps}; they are 1 here")
    try:
        lay_out(TensorMap("", f"u{item}", shape, strides, box, swizzle))
    except UsageError as e:
        raise UsageError(f"{_MADE}: {str(e).partition(': ')[2]}") from None


def _refused(layout: TensorMap, why: str) -> UsageError:
    return UsageError(f"tensor map over {layout.buffer!r}: {why}")
