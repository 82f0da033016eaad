"""The kernel that quantizes Q, K and V for the fast attention kernels, ``kernels/quantize_qkv.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenfast.families.fast_problem import ROW_BLOCK
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "quantize_qkv"
#: Keys, evenly spread, whose mean is subtracted from all.
MEAN_KEYS = 32
_THREADS = 256  # a warp for each 16 rows of a tile
#: Blocks that a multiprocessor holds, by head dim of the codes: a limit on registers.
_BLOCKS = {64: 4, 128: 3, 256: 2}
#: Blocks of a cluster that any GPU with clusters can hold (CUDA C++ Programming Guide, "Thread Block Clusters").
_MOST_BLOCKS = 8
#: Tiles of K that are many times what a GPU works on at once.
_MANY_TILES = 2048
_INPUTS = {"float16": "half", "bfloat16": "__nv_bfloat16"}


@dataclass(frozen=True)
class Quantization:
    """What is computed, for one kernel.

    head_dim: that of the input, a multiple of 8. padded_dim: that of the codes. dtype: that of the input, "float16" or
    "bfloat16". fmt: format of Q and K, "e4m3" or "int8", which have a scale for each ROW_BLOCK rows. channels: whether
    each channel of V has a scale, or each head. key_mean: whether a mean of K is subtracted. rotate: that of Q and K.
    """

    head_dim: int
    padded_dim: int
    dtype: str
    fmt: str
    channels: bool = False
    key_mean: bool = False
    rotate: bool = False


@dataclass(frozen=True)
class Tensors:
    """Shapes of one call: q (batch, heads, q_len, head_dim), k and v (batch, kv_heads, kv_len, head_dim).

    strides: in elements, those of batch, head and row of q, then of k and of v; columns are neighbours, and rows begin
    at multiples of 16 bytes.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Division:
    """How the work is divided: cluster: blocks that share a head of V; key_tiles: tiles of K that a block takes."""

    cluster: int
    key_tiles: int


def division(tensors: Tensors, *, clusters: bool) -> Division:
    """Clusters that leave each block two tiles of V or more; one block a head where the GPU has no clusters.

    Blocks of K find the mean of some keys first; where there are many tiles, a block takes several for it.
    """
    cluster, tiles = 1, -(-tensors.kv_len // ROW_BLOCK)
    while clusters and cluster < _MOST_BLOCKS and 4 * cluster <= tiles:
        cluster *= 2
    many = tensors.batch * tensors.kv_heads * tiles >= _MANY_TILES
    return Division(cluster, 4 if many else 1)


def kernel(wanted: Quantization, divided: Division) -> KernelSource:
    """Render the quantizer."""
    cluster = divided.cluster
    flags = {
        "Int8": wanted.fmt == "int8",
        "Channels": wanted.channels,
        "KeyMean": wanted.key_mean,
        "Rotate": wanted.rotate,
    }
    constants = "\n".join(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items())
    attribute = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    source = f"""#include "quantize_qkv.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {wanted.padded_dim};
  static constexpr int kColumns = {wanted.head_dim};
  static constexpr int kCluster = {cluster};
  static constexpr int kKeyTiles = {divided.key_tiles};
  static constexpr int kThreads = {_THREADS};
{constants}
  using In = {_INPUTS[wanted.dtype]};
}};

extern "C" __global__ void {attribute}__launch_bounds__({_THREADS}, {_BLOCKS[wanted.padded_dim]})
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
        entry=ENTRY, source=source, name=f"{ENTRY}.cu", include_dirs=(KERNEL_DIR,), block=(_THREADS, 1, 1)
    )


def launch(wanted: Quantization, tensors: Tensors, divided: Division) -> Launch:
    """A cluster for each head of V, and as many for K and Q; buffers are named as in ``fast_problem``, and k_mean."""
    cluster, kv_heads = divided.cluster, tensors.batch * tensors.kv_heads
    of_keys = kv_heads * -(-tensors.kv_len // (ROW_BLOCK * divided.key_tiles))
    of_queries = tensors.batch * tensors.heads * -(-tensors.q_len // ROW_BLOCK)
    tile_clusters = -(-(of_keys + of_queries) // cluster)
    return Launch(
        grid=((kv_heads + max(kv_heads, tile_clusters)) * cluster, 1, 1),
        args=(
            *("q", "k", "v"),
            *(np.int64(stride) for stride in tensors.strides),
            *("q_codes", "k_codes", "v_codes", "q_scale", "k_scale", "v_scale"),
            "k_mean" if wanted.key_mean else np.int64(0),
            *(np.int32(n) for n in (tensors.batch, tensors.heads, tensors.kv_heads, tensors.q_len, tensors.kv_len)),
        ),
    )
