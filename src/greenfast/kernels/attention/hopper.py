"""Render and launch the Hopper attention kernel, ``kernels/attention/sm90/``."""

from __future__ import annotations

import math

import numpy as np

from greenfast.kernels import CUDA_TYPES, make_source
from greenfast.kernels.attention.config import (
    AttentionConfig,
    MaskLists,
    Sizes,
    Stride3,
    Strides,
    contiguous_strides,
    output_arguments,
    padded_keys,
    softmax_scale,
)
from greenfast.kernels.attention.heuristics import (
    ROWS,
    Tiling,
    head_swizzle,
    scheduled_head_swizzle,
    stages_queries,
    tiling,
)
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Argument, KernelSource, Launch, TensorMap

ENTRY = "fp8_attention"
TARGET = Target("sm_90a")
_PANEL = 128  # bytes in a row of a tile in shared memory: the widest swizzle


def kernel(
    config: AttentionConfig, sizes: Sizes, multiprocessors: int = TARGET.multiprocessors, *, tiles: Tiling | None = None
) -> KernelSource:
    """Render the kernel of an attention.

    multiprocessors: of the GPU, for the choice of tiles. tiles: overrides that choice.
    Raises UsageError for options that it does not support.
    """
    tiles = tiles or tiling(config, sizes, multiprocessors)[0]
    smem, (registers, fetching) = tiles.smem_bytes(config), tiles.registers
    threads = 128 * (tiles.consumers + 1)
    flags = {
        "PingPong": tiles.ping_pong,
        "Overlap": tiles.overlap,
        "PromoteAccum": tiles.two_levels,
        "Causal": config.causal,
        "Scheduled": config.scheduled,
        "Listed": config.listed,
        "Window": config.window,
        "Skip": config.skip,
        "Sinks": config.sinks,
        "Lse": config.log_sum_exp,
        "ScoreMax": config.score_max,
        "SumUnroundedP": config.sum_unrounded_p,
        "Int8": config.format == "int8",
        "QueryBlockScales": config.query_scales == "block" and not config.fuse_q_quant,
        "KeyBlockScales": config.key_scales != "head",
        "FineScales": config.key_scales == "fine",
        "ValueBlockScales": config.value_scales == "block",
        "ChannelScales": config.value_scales == "channel",
        "FewerColumns": config.columns < config.head_dim,
    }
    constants = "\n".join(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items())
    headers, loaders, q_parameters, q_argument = ["kernel"], "", "const __grid_constant__ TensorMap q", "q"
    if config.fuse_q_quant:
        if config.query_scales == "head":
            raise UsageError("a Q that the Hopper kernel quantizes: scales of Q and K are per block")
        staged = stages_queries(config.head_dim)
        headers.append("load_q_staged" if staged else "load_q_input")
        loaders = f", greenfast::{'QLoadFuseQuantStaged' if staged else 'QLoadFuseQuant'}"
        q_parameters, q_argument = f"{q_parameters}, int q_heads", "{q, q_heads}"
        constants += f"\n  static constexpr int kQColumns = {config.columns};"
        constants += f"\n  using In = {CUDA_TYPES[config.dtype]};"
    includes = "\n".join(f'#include "attention/sm90/{header}.cuh"' for header in headers)
    more_parameters, more_arguments = "", ""
    if config.scheduled:
        more_parameters = (
            ", const greenfast::ScheduledTile* tiles, int* tile_count, int window_shift, const float* sinks"
        )
        more_arguments = ", tiles, tile_count, window_shift, sinks"
    elif config.window or config.sinks or config.listed or config.skip:
        raise UsageError("window, sinks, listed, skip: the Hopper kernel has them with a schedule (scheduled)")
    if config.listed:
        more_parameters += (
            ", const int2* counts, const int2* entries, const unsigned* bits, int masks, int list_heads, int list_step"
        )
        more_arguments += ", {counts, entries, bits, masks, list_heads, list_step}"
    if config.skip:
        more_parameters += ", float skip_log2"
        more_arguments += ", skip_log2" if config.listed else ", {}, skip_log2"
    source = f"""{includes}

struct Cfg {{
  static constexpr int kHeadDim = {config.head_dim};
  static constexpr int kBlockN = {tiles.block_n};
  static constexpr int kConsumers = {tiles.consumers};
  static constexpr int kStages = {tiles.stages};
  static constexpr int kOutColumns = {tiles.out_columns};
  static constexpr int kExp2Emulated = {tiles.polynomials};
  static constexpr int kConsumerRegisters = {registers};
  static constexpr int kProducerRegisters = {fetching};
  static constexpr int kSmemBytes = {smem};
  static constexpr float kSoftcap = {config.softcap}f;
{constants}
  using Out = {CUDA_TYPES[config.dtype]};
}};

using greenfast::ptx::TensorMap;

extern "C" __global__ void __launch_bounds__({threads}, 1)
{ENTRY}({q_parameters}, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
        const float* q_scale, const float* k_scale, const float* v_scale, void* out, float* lse, int heads,
        int heads_per_kv, int q_len, int kv_len, int causal_shift, int head_swizzle, float softmax_scale,
        long long out_gap, long long out_head, long long out_row, unsigned out_heads,
        int out_columns{more_parameters}) {{
  greenfast::attention_sm90<Cfg{loaders}>(
      {{q_scale, k_scale, v_scale, out, lse, heads, heads_per_kv, q_len, kv_len, causal_shift, head_swizzle,
        softmax_scale, {{out_gap, out_head, out_row, out_heads, out_columns}}{more_arguments}}},
      {q_argument}, k, v);
}}
"""
    return make_source(ENTRY, source, threads, dynamic_smem_bytes=smem, requires=TARGET.name)


def launch(
    config: AttentionConfig,
    sizes: Sizes,
    scale: float | None = None,
    strides: Strides = Strides(),  # noqa: B008
    multiprocessors: int = TARGET.multiprocessors,
    *,
    kv_len_allocated: int = 0,
    ctas_per_sm: int = 1,
    tiles: Tiling | None = None,
    max_tiles: int = 0,
    window: tuple[int, int] = (0, 0),
    lists: MaskLists | None = None,
    skip_threshold: float = 0.0,
) -> Launch:
    """Return the launch: one persistent block per multiprocessor, or one per work tile if there are fewer.

    scale: of the scores, > 0; by default 1 / sqrt(head_dim). strides: of out, and of Q with fused quantization;
    tensors are contiguous by default. kv_len_allocated: keys in the buffers of K and V if more than kv_len; the
    first kv_len are read, and have scales. ctas_per_sm: blocks per multiprocessor in the grid; one is resident at a
    time. With several, work moves away from multiprocessors that another kernel occupies. tiles: as
    the kernel was rendered, if not the default. With ``config.scheduled``: max_tiles: the most work tiles of
    a head, over all sequences; packed tensors have ``sizes`` of batch 1, q_len rows of Q and kv_len rows of codes.
    window: the keys that a row attends to before its own place, with ``config.window``, and after it, with a mask.
    lists: the sizes of the tile lists, with ``config.listed``. skip_threshold: above 0, with ``config.skip``: tiles
    with all weights below it, relative to their row's largest so far, are skipped.
    """
    tiles = tiles or tiling(config, sizes, multiprocessors)[0]
    heads, kv_heads, head_dim = sizes.batch * sizes.heads, sizes.batch * sizes.kv_heads, config.head_dim
    panel = min(head_dim, _PANEL)
    padded, allocated = padded_keys(sizes.kv_len), kv_len_allocated or sizes.kv_len
    work_tiles = (max_tiles * sizes.heads) if config.scheduled else -(-sizes.q_len // tiles.block_m) * heads

    schedule_arguments: tuple[Argument, ...] = ()
    if config.scheduled:
        swizzle = scheduled_head_swizzle(config, sizes)
        sinks = "sinks" if config.sinks else np.int64(0)
        schedule_arguments = ("tiles", "tile_count", np.int32(-window[0]), sinks)
        if lists is not None:
            schedule_arguments += lists.arguments()
        if config.skip:
            schedule_arguments += (np.float32(math.log2(skip_threshold)),)
    else:
        swizzle = head_swizzle(config.mask, sizes, tiles.block_m, tiles.block_n, multiprocessors)

    def rows(name: str, count: int, length: int, box_rows: int, allocated: int) -> TensorMap:
        of_rows = (allocated * head_dim, head_dim, 1)
        return TensorMap(name, "uint8", (count, length, head_dim), of_rows, (1, box_rows, panel), panel)

    of_columns = (head_dim * padded_keys(allocated), padded_keys(allocated), 1)
    q: tuple[Argument, ...] = (rows("q", heads, sizes.q_len, ROWS, sizes.q_len),)
    if config.fuse_q_quant:
        q = _queries(config, sizes, strides.query)
    return Launch(
        grid=(min(multiprocessors * ctas_per_sm, work_tiles), 1, 1),
        args=(
            *q,
            rows("k", kv_heads, sizes.kv_len, tiles.block_n, allocated),
            TensorMap("v_t", "uint8", (kv_heads, head_dim, padded), of_columns, (1, head_dim, _PANEL), _PANEL),
            np.int64(0) if config.fuse_q_quant else "q_scale",
            *("k_scale", "v_scale", "out"),
            "lse" if config.log_sum_exp else np.int64(0),
            np.int32(sizes.heads if config.scheduled else heads),
            np.int32(sizes.heads // sizes.kv_heads),
            np.int32(sizes.q_len),
            np.int32(sizes.kv_len),
            np.int32(window[1] if config.scheduled else sizes.shift(config.mask)),
            np.int32(swizzle),
            softmax_scale(config, scale),
            *output_arguments(config, sizes, strides.out),
            *schedule_arguments,
        ),
        early=config.fuse_q_quant,
    )


def _queries(config: AttentionConfig, sizes: Sizes, strides: Stride3 | None) -> tuple[Argument, ...]:
    """Return the arguments of a 16-bit Q: the tensor map of (batch, heads, q_len, columns), and heads."""
    shape = (sizes.batch, sizes.heads, sizes.q_len, config.columns)
    q_strides = strides or contiguous_strides(*shape[1:])
    # A dimension of 1 may have any stride: it is never stepped along.
    in_bytes = [16 if n == 1 else 2 * stride for n, stride in zip(shape, q_strides, strict=False)]
    box = (1, 1, ROWS, config.head_dim)
    return TensorMap("q", "uint16", shape, (*in_bytes, 2), box, 0), np.int32(sizes.heads)
