"""The kernel that quantizes Q, K and V for the fast attention kernels, ``kernels/quantize_qkv.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenfast.kernels import CUDA_TYPES, KERNEL_DIR
from greenfast.kernels.attention.config import ROW_BLOCK
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "quantize_qkv"
#: Keys, spread over a head, by which its mean is estimated, as the median of the means of groups of so many.
MEAN_KEYS, MEAN_GROUP = 32, 4
#: Threads of a block, by head dim of the codes: a warp, or two, for each 16 rows of a tile.
_THREADS = {64: 256, 128: 256, 256: 512}
#: Blocks that a multiprocessor holds, by head dim of the codes: a limit on registers.
_BLOCKS = {64: 3, 128: 2, 256: 1}
#: Tiles of K that are many times what a GPU works on at once.
_MANY_TILES = 1024


@dataclass(frozen=True)
class Quantization:
    """What is computed, for one kernel.

    head_dim: that of the input, a multiple of 8. padded_dim: that of the codes. dtype: that of the input, "float16" or
    "bfloat16". fmt: format of Q and K, "e4m3" or "int8". key_mean: whether a mean of K is subtracted. rotate: that of Q
    and K. Each QUERY_BLOCK rows of Q and each ROW_BLOCK of K and V have a scale.
    """

    head_dim: int
    padded_dim: int
    dtype: str
    fmt: str
    key_mean: bool = False
    rotate: bool = False


@dataclass(frozen=True)
class Tensors:
    """Shapes of one call: q (batch, heads, q_len, head_dim), k and v (batch, kv_heads, kv_len, head_dim).

    q_len: 0 where Q is not to be quantized.
    strides: in elements, those of batch, head and row of q, then of k and of v; columns are neighbours, and rows begin
    at multiples of 16 bytes.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    strides: tuple[int, ...]


def key_tiles(tensors: Tensors) -> int:
    """How many tiles of K a block takes: it finds the mean of some keys first, where there are many for several."""
    tiles = tensors.batch * tensors.kv_heads * _tiles(tensors.kv_len)
    return 4 if tiles >= _MANY_TILES else 1


def _tiles(length: int) -> int:
    return -(-length // ROW_BLOCK)


def kernel(wanted: Quantization, tensors: Tensors) -> KernelSource:
    """Render the quantizer."""
    threads = _THREADS[wanted.padded_dim]
    flags = {
        "Int8": wanted.fmt == "int8",
        "KeyMean": wanted.key_mean,
        "Rotate": wanted.rotate,
    }
    constants = "\n".join(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items())
    source = f"""#include "quantize_qkv.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {wanted.padded_dim};
  static constexpr int kColumns = {wanted.head_dim};
  static constexpr int kKeyTiles = {key_tiles(tensors)};
  static constexpr int kThreads = {threads};
{constants}
  using In = {CUDA_TYPES[wanted.dtype]};
}};

extern "C" __global__ void __launch_bounds__({threads}, {_BLOCKS[wanted.padded_dim]})
{ENTRY}(const void* q, const void* k, const void* v, long long q_batch, long long q_head, long long q_row,
        long long k_batch, long long k_head, long long k_row, long long v_batch, long long v_head, long long v_row,
        unsigned char* q_codes, unsigned char* k_codes, unsigned char* v_codes, float* q_scale, float* k_scale,
        float* v_scale, float* k_mean, int batch, int heads, int kv_heads, int q_len, int kv_len) {{
  greenfast::quantize_qkv<Cfg>({{{{q, q_batch, q_head, q_row}}, {{k, k_batch, k_head, k_row}},
                                {{v, v_batch, v_head, v_row}}, q_codes, k_codes, v_codes, q_scale, k_scale,
                                v_scale, k_mean, batch, heads, kv_heads, q_len, kv_len}});
}}
"""
    return KernelSource(
        entry=ENTRY, source=source, name=f"{ENTRY}.cu", include_dirs=(KERNEL_DIR,), block=(threads, 1, 1)
    )


def launch(wanted: Quantization, tensors: Tensors) -> Launch:
    """A block for each piece of work; buffers are named as in ``fast_problem``, and k_mean."""
    kv_heads, runs = tensors.batch * tensors.kv_heads, -(-_tiles(tensors.kv_len) // key_tiles(tensors))
    blocks = kv_heads * (runs + _tiles(tensors.kv_len)) + tensors.batch * tensors.heads * _tiles(tensors.q_len)
    no_queries = tensors.q_len == 0
    return Launch(
        grid=(blocks, 1, 1),
        args=(
            *("q", "k", "v"),
            *(np.int64(stride) for stride in tensors.strides),
            np.int64(0) if no_queries else "q_codes",
            *("k_codes", "v_codes"),
            np.int64(0) if no_queries else "q_scale",
            *("k_scale", "v_scale"),
            "k_mean" if wanted.key_mean else np.int64(0),
            *(np.int32(n) for n in (tensors.batch, tensors.heads, tensors.kv_heads, tensors.q_len, tensors.kv_len)),
        ),
    )
