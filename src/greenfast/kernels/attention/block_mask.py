"""Render and launch the kernels that make a ``BlockMask`` on the device, ``block_mask.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenfast.kernels import make_source
from greenfast.spec.kernel import KernelSource, Launch

#: Queries and keys of a tile.
TILE = 128
#: Words of 32 bits for each row of a tile.
ROW_WORDS = 4
#: In a table of tiles; other numbers are an index of bits.
FULL_TILE, EMPTY_TILE = -1, -2
_PACK_THREADS, _LIST_THREADS = 256, 128
_LIST_WARPS = _LIST_THREADS // 32
_INDEX_TYPES = {"int32": "int", "int64": "long long"}


@dataclass(frozen=True)
class MaskSizes:
    """The sizes of a mask, (batch, heads, q_len, kv_len)."""

    batch: int
    heads: int
    q_len: int
    kv_len: int

    @property
    def row_blocks(self) -> int:
        """Blocks of TILE rows of each head."""
        return -(-self.q_len // TILE)

    @property
    def key_tiles(self) -> int:
        """Tiles of each block of rows."""
        return -(-self.kv_len // TILE)

    @property
    def tiles(self) -> int:
        """Tiles of all heads."""
        return self.batch * self.heads * self.row_blocks * self.key_tiles


def pack_kernel() -> KernelSource:
    """Render the kernel that packs the bits of each tile of a boolean mask, and classifies the tile."""
    source = f"""#include "attention/block_mask.cuh"

extern "C" __global__ void __launch_bounds__({_PACK_THREADS})
pack_mask(const unsigned char* mask, long long batch_stride, long long head_stride, long long row_stride,
          long long column_stride, int heads, int q_len, int kv_len, int* tiles, unsigned* bits) {{
  greenfast::pack_mask(greenfast::BoolSource{{mask, batch_stride, head_stride, row_stride, column_stride, heads}},
                       {{q_len, kv_len, tiles, bits}});
}}
"""
    return make_source("pack_mask", source, _PACK_THREADS)


def pack_launch(sizes: MaskSizes, strides: tuple[int, ...]) -> Launch:
    """Return the launch of ``pack_kernel``. strides: the four of the mask, in elements."""
    lengths = (np.int32(n) for n in (sizes.heads, sizes.q_len, sizes.kv_len))
    return Launch((sizes.tiles, 1, 1), ("mask", *(np.int64(n) for n in strides), *lengths, "tiles", "bits"))


def segments_kernel(dtype: str) -> KernelSource:
    """Render the kernel that does the same for the mask of segments. dtype: of the segments, "int32" or "int64"."""
    index = _INDEX_TYPES[dtype]
    source = f"""#include "attention/block_mask.cuh"

extern "C" __global__ void __launch_bounds__({_PACK_THREADS})
pack_segments(const {index}* q_segments, const {index}* kv_segments, int causal, int q_len, int kv_len, int* tiles,
              unsigned* bits) {{
  greenfast::pack_mask(greenfast::SegmentSource<{index}>{{q_segments, kv_segments, causal}},
                       {{q_len, kv_len, tiles, bits}});
}}
"""
    return make_source("pack_segments", source, _PACK_THREADS)


def segments_launch(sizes: MaskSizes, *, causal: bool) -> Launch:
    """Return the launch of ``segments_kernel``; ``sizes`` has one head."""
    numbers = (np.int32(n) for n in (causal, sizes.q_len, sizes.kv_len))
    return Launch((sizes.tiles, 1, 1), ("q_segments", "kv_segments", *numbers, "tiles", "bits"))


def list_kernel() -> KernelSource:
    """Render the kernel that lists the partial and the full tiles of each block of rows."""
    source = f"""#include "attention/block_mask.cuh"

extern "C" __global__ void __launch_bounds__({_LIST_THREADS})
list_tiles(const int* tiles, int blocks, int key_tiles, int* counts, int2* entries) {{
  greenfast::list_tiles({{tiles, blocks, key_tiles, counts, entries}});
}}
"""
    return make_source("list_tiles", source, _LIST_THREADS)


def list_launch(blocks: int, key_tiles: int) -> Launch:
    """Return the launch of ``list_kernel``. blocks: blocks of rows of all heads."""
    return Launch(
        (-(-blocks // _LIST_WARPS), 1, 1), ("tiles", np.int32(blocks), np.int32(key_tiles), "counts", "entries")
    )


def blocks_kernel(dtype: str) -> KernelSource:
    """Render the kernel that sorts lists of full tiles. dtype: of the lists, "int32" or "int64"."""
    index = _INDEX_TYPES[dtype]
    source = f"""#include "attention/block_mask.cuh"

extern "C" __global__ void __launch_bounds__({_LIST_THREADS})
list_blocks(const {index}* list_counts, const {index}* indices, int blocks, int width, int kv_len, int* counts,
            int2* entries, unsigned* bits) {{
  greenfast::list_blocks<{index}>({{list_counts, indices, blocks, width, kv_len, counts, entries, bits}});
}}
"""
    return make_source("list_blocks", source, _LIST_THREADS)


def blocks_launch(blocks: int, width: int, kv_len: int) -> Launch:
    """Return the launch of ``blocks_kernel``. width: the size of each list."""
    sizes = (np.int32(n) for n in (blocks, width, kv_len))
    grid = (max(1, -(-blocks // _LIST_WARPS)), 1, 1)
    return Launch(grid, ("list_counts", "indices", *sizes, "counts", "entries", "bits"))
