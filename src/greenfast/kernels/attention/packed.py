"""Attention of packed sequences of several lengths: sizes, buffers, and the launches before the attention kernel.

The lengths are on the device. The schedule kernel (``schedule.cuh``) makes the list of work tiles from them, and places
the codes of K and V. The quantizer and the attention kernel read its output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenfast.kernels import CUDA_TYPES, make_source
from greenfast.kernels.attention import schedule
from greenfast.kernels.attention.config import KEY_GROUPS, ROW_BLOCK, AttentionConfig, Sizes
from greenfast.kernels.attention.heuristics import Tiling, tiling
from greenfast.kernels.quantize import qkv
from greenfast.spec.kernel import Argument, KernelSource, Launch

_KEYS_WORDS = 4  # of a PackedKeys


@dataclass(frozen=True)
class PackedSizes:
    """The sizes of packed tensors: Q is (q_rows, heads, columns), K and V are (k_rows, kv_heads, columns).

    batch: sequences. max_q, max_k: about the longest sequence's lengths. They choose the tiles, and limit nothing.
    """

    batch: int
    heads: int
    kv_heads: int
    q_rows: int
    k_rows: int
    max_q: int
    max_k: int

    @property
    def key_blocks(self) -> int:
        """Blocks of ROW_BLOCK keys in the codes of each head, including gaps between sequences."""
        return (self.k_rows + self.batch * ROW_BLOCK) // ROW_BLOCK

    @property
    def code_rows(self) -> int:
        """Rows of the codes of each head."""
        return self.key_blocks * ROW_BLOCK

    def max_tiles(self, tiles: Tiling) -> int:
        """Return the largest number of work tiles per head."""
        return self.q_rows // tiles.block_m + self.batch

    def tiling(self, config: AttentionConfig, multiprocessors: int) -> Tiling:
        """Return the tiles of the attention kernel, as for a batch of as many sequences of the mean length."""
        length = max(1, -(-self.q_rows // max(1, self.batch)))
        count = max(1, self.q_rows // length)
        return tiling(config, Sizes(count, self.heads, self.kv_heads, length, max(1, self.max_k)), multiprocessors)[0]

    def as_sizes(self) -> Sizes:
        """Return the sizes that the attention kernel sees: one batch of all rows."""
        return Sizes(1, self.heads, self.kv_heads, self.q_rows, self.code_rows)


def buffer_shapes(config: AttentionConfig, sizes: PackedSizes, tiles: Tiling) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each buffer between the launches."""
    fine = (KEY_GROUPS,) if config.key_scales == "fine" else ()
    return {
        "k_codes": ("uint8", (sizes.kv_heads, sizes.code_rows, config.head_dim)),
        "v_codes": ("uint8", (sizes.kv_heads, config.head_dim, sizes.code_rows)),
        "k_scale": ("float32", (sizes.kv_heads, sizes.key_blocks, *fine)),
        "v_scale": ("float32", (sizes.kv_heads, sizes.key_blocks)),
        "k_mean": ("float32", (sizes.batch, sizes.kv_heads, config.head_dim)),
        "tiles": ("int32", (sizes.max_tiles(tiles), schedule.TILE_WORDS)),
        "tile_count": ("int32", (2,)),
        "sequences": ("int32", (sizes.batch, _KEYS_WORDS)),
        "block_sequence": ("int32", (sizes.key_blocks,)),
    }


def schedule_arguments(sizes: PackedSizes, *, used: bool) -> tuple[Argument, ...]:
    """Return the arguments of ``schedule.packed_kernel`` for ``schedule.launch``.

    used: whether there is a buffer ``seqused_k``.
    """
    return (
        *("cu_seqlens_q", "cu_seqlens_k"),
        "seqused_k" if used else np.int64(0),
        *(np.int32(n) for n in (sizes.q_rows, sizes.k_rows)),
        *("sequences", "block_sequence"),
        np.int32(sizes.key_blocks),
    )


def quantize_kernel(config: AttentionConfig, sizes: PackedSizes) -> KernelSource:
    """Render the kernel that quantizes packed K and V."""
    threads, blocks = qkv.block_threads(config.head_dim)
    flags = {
        "Int8": config.format == "int8",
        "KeyMean": config.key_mean,
        "Rotate": config.rotate,
        "FineScales": config.key_scales == "fine",
        "Gathered": False,
        "Parts": False,
        "Prologue": False,
        "SeveralHeads": False,
    }
    constants = "\n".join(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items())
    source = f"""#include "quantize/packed_kv.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {config.head_dim};
  static constexpr int kColumns = {config.columns};
  static constexpr int kKeyTiles = {_key_tiles(sizes)};
  static constexpr int kThreads = {threads};
{constants}
  using In = {CUDA_TYPES[config.dtype]};
}};

extern "C" __global__ void __launch_bounds__({threads}, {blocks})
quantize_packed_kv(const void* k, const void* v, long long k_head, long long k_row, long long v_head, long long v_row,
                   unsigned char* k_codes, unsigned char* v_codes, float* k_scale, float* v_scale, float* k_mean,
                   const greenfast::PackedKeys* sequences, const int* block_sequence, int kv_heads, int key_blocks) {{
  greenfast::quantize_packed_kv<Cfg>({{{{k, k_row, k_head, k_row}}, {{v, v_row, v_head, v_row}}, k_codes, v_codes,
                                      k_scale, v_scale, k_mean, sequences, block_sequence, kv_heads, key_blocks}});
}}
"""
    return make_source("quantize_packed_kv", source, threads)


def quantize_launch(sizes: PackedSizes, k_strides: tuple[int, int], v_strides: tuple[int, int]) -> Launch:
    """Return the launch of the quantizer. k_strides, v_strides: of rows and heads, in elements."""
    runs = -(-sizes.key_blocks // _key_tiles(sizes))
    strides = (k_strides[1], k_strides[0], v_strides[1], v_strides[0])
    return Launch(
        grid=(sizes.kv_heads * (runs + sizes.key_blocks), 1, 1),
        args=(
            *("k", "v"),
            *(np.int64(stride) for stride in strides),
            *("k_codes", "v_codes", "k_scale", "v_scale", "k_mean", "sequences", "block_sequence"),
            np.int32(sizes.kv_heads),
            np.int32(sizes.key_blocks),
        ),
        early=True,
    )


def _key_tiles(sizes: PackedSizes) -> int:
    """Return the blocks of K per block of threads, as ``qkv.key_tiles`` does."""
    return qkv.key_tiles(Sizes(1, sizes.heads, sizes.kv_heads, sizes.q_rows, sizes.code_rows))
