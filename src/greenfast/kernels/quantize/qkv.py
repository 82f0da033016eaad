"""Render and launch the kernel that quantizes Q, K and V for attention, ``kernels/quantize/qkv.cuh``."""

from __future__ import annotations

import numpy as np

from greenfast.kernels import CUDA_TYPES, KERNEL_DIR
from greenfast.kernels.attention.config import ROW_BLOCK, AttentionConfig, Sizes, Strides, strides_of
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "quantize_qkv"
#: A head's mean is the median of the means of groups of MEAN_GROUP keys, out of MEAN_KEYS keys spread over the head.
MEAN_KEYS, MEAN_GROUP = 32, 4
#: Head dim -> threads of a block: one or two warps per 16 rows of a tile.
_THREADS = {64: 256, 128: 256, 256: 512}
#: Head dim -> blocks per multiprocessor for __launch_bounds__.
_BLOCKS = {64: 3, 128: 2, 256: 1}
#: With this number of tiles of K, a block takes several.
_MANY_TILES = 1024


def block_threads(head_dim: int) -> tuple[int, int]:
    """Return the threads of a block, and the blocks per multiprocessor for ``__launch_bounds__``."""
    return _THREADS[head_dim], _BLOCKS[head_dim]


def key_tiles(sizes: Sizes) -> int:
    """Return the tiles of K per block: several if there are many tiles, because each block computes the mean first."""
    tiles = sizes.batch * sizes.kv_heads * _tiles(sizes.kv_len)
    return 4 if tiles >= _MANY_TILES else 1


def sample_places(length: int) -> list[int]:
    """Return the indices of the sampled keys: one in each 32nd of the keys, at offsets without a period."""
    return [(i * MEAN_KEYS + i * 19 % MEAN_KEYS) * length // MEAN_KEYS**2 for i in range(MEAN_KEYS)]


def _tiles(length: int) -> int:
    return -(-length // ROW_BLOCK)


def kernel(
    config: AttentionConfig, sizes: Sizes, *, sampled: bool = False, lengths: bool = False, gathered: bool = False
) -> KernelSource:
    """Render the kernel that quantizes the tensors of an attention, with block scales.

    sampled: the mean of K is taken from MEAN_KEYS keys in a separate buffer. Needed if K is a shard of the keys, since
    all shards must subtract the same mean. lengths: only the first keys of each sequence are quantized. gathered: and
    only those keys that a list names.
    """
    threads = _THREADS[config.head_dim]
    flags = {
        "Int8": config.format == "int8",
        "KeyMean": config.key_mean,
        "Rotate": config.rotate,
        "Sampled": sampled,
        "FineScales": config.key_scales == "fine",
        "Lengths": lengths,
        "Gathered": gathered,
    }
    constants = "\n".join(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items())
    more, samples, chosen = "", "{}", ""
    if sampled:
        line = MEAN_KEYS * config.columns
        more, samples = ", const void* samples", f"{{samples, {line}LL * kv_heads, {line}, {config.columns}}}"
    if lengths:
        more, chosen = f"{more}, const int* kv_lengths", ", kv_lengths"
    if gathered:
        more, chosen = f"{more}, const int* kv_rows", f"{chosen}, kv_rows"
    source = f"""#include "quantize/qkv.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {config.head_dim};
  static constexpr int kColumns = {config.columns};
  static constexpr int kKeyTiles = {key_tiles(sizes)};
  static constexpr int kThreads = {threads};
{constants}
  using In = {CUDA_TYPES[config.dtype]};
}};

extern "C" __global__ void __launch_bounds__({threads}, {_BLOCKS[config.head_dim]})
{ENTRY}(const void* q, const void* k, const void* v, long long q_batch, long long q_head, long long q_row,
        long long k_batch, long long k_head, long long k_row, long long v_batch, long long v_head, long long v_row,
        unsigned char* q_codes, unsigned char* k_codes, unsigned char* v_codes, float* q_scale, float* k_scale,
        float* v_scale, float* k_mean, int batch, int heads, int kv_heads, int q_len, int kv_len{more}) {{
  greenfast::quantize_qkv<Cfg>({{{{q, q_batch, q_head, q_row}}, {{k, k_batch, k_head, k_row}},
                                {{v, v_batch, v_head, v_row}}, q_codes, k_codes, v_codes, q_scale, k_scale,
                                v_scale, k_mean, batch, heads, kv_heads, q_len, kv_len, {samples}{chosen}}});
}}
"""
    return KernelSource(
        entry=ENTRY, source=source, name=f"{ENTRY}.cu", include_dirs=(KERNEL_DIR,), block=(threads, 1, 1)
    )


def launch(
    config: AttentionConfig,
    sizes: Sizes,
    strides: Strides = Strides(),  # noqa: B008
    *,
    sampled: bool = False,
    lengths: bool = False,
    gathered: bool = False,
) -> Launch:
    """Return the launch: one block per work tile. Buffers are named as in ``problems.attention``, and k_mean.

    Q is not quantized if ``config.fuse_q_quant``. strides: of query, key and value; contiguous by default.
    sampled, lengths, gathered: as for ``kernel``; the buffer ``samples`` is (batch, kv_heads, MEAN_KEYS, columns),
    contiguous, ``kv_lengths`` int32 (batch,), ``kv_rows`` int32 (batch, kv_len).
    """
    queries = not config.fuse_q_quant
    q_len = sizes.q_len if queries else 0
    kv_heads, runs = sizes.batch * sizes.kv_heads, -(-_tiles(sizes.kv_len) // key_tiles(sizes))
    blocks = kv_heads * (runs + _tiles(sizes.kv_len)) + sizes.batch * sizes.heads * _tiles(q_len)
    of_keys = strides_of(sizes.kv_heads, sizes.kv_len, config.columns)
    tensor_strides = (
        *(strides.query or strides_of(sizes.heads, sizes.q_len, config.columns)),
        *(strides.key or of_keys),
        *(strides.value or of_keys),
    )
    return Launch(
        grid=(blocks, 1, 1),
        args=(
            *("q", "k", "v"),
            *(np.int64(stride) for stride in tensor_strides),
            "q_codes" if queries else np.int64(0),
            *("k_codes", "v_codes"),
            "q_scale" if queries else np.int64(0),
            *("k_scale", "v_scale"),
            "k_mean" if config.key_mean else np.int64(0),
            *(np.int32(n) for n in (sizes.batch, sizes.heads, sizes.kv_heads, q_len, sizes.kv_len)),
            *(name for name, given in (("samples", sampled), ("kv_lengths", lengths), ("kv_rows", gathered)) if given),
        ),
    )
