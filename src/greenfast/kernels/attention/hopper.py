"""The Hopper kernel, ``kernels/attention_hopper.cuh``: which tiles a shape gets, by rules that were measured.

This module also renders its configuration, and plans its shared memory and the order of its work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from greenfast.kernels import CUDA_TYPES, KERNEL_DIR
from greenfast.kernels.attention.config import OutputRows, Sizes, padded_keys, sizes_of
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import Argument, KernelSource, Launch, TensorMap

ENTRY = "fp8_attention"
TARGET = "sm_90a"

#: Multiprocessors of an H100 SXM or H200; on a smaller chip the surplus blocks run in a second wave.
MULTIPROCESSORS = 132
_ROWS = 64  # of a warpgroup
_PANEL = 128  # bytes in a row of a tile in shared memory: the widest swizzle
_WIDEST = 256  # columns of a product
HEAD_DIMS = (64, 128, 256)
FORMATS = ("e4m3", "int8")


@dataclass(frozen=True)
class Tiling:
    """How the Hopper kernel cuts its work.

    block_n: keys of a tile. consumers: warpgroups of 64 query rows each that share it. stages: tiles on their way.
    out_columns: columns of O that one product computes. turns: whether warpgroups take turns at the tensor cores.
    polynomials: of 16 exponentials, how many are computed on the FMA pipe. overlap: whether P V of a tile runs beside
    the softmax of the next. two_levels: whether the sums over tiles are float32, not the tensor cores' own. row_stages:
    tiles of a row-major V on their way, which the fetching warpgroup transposes; 0 where V comes transposed.
    """

    block_n: int
    consumers: int
    stages: int
    out_columns: int
    turns: bool = False
    polynomials: int = 0
    overlap: bool = False
    two_levels: bool = True
    row_stages: int = 0

    @property
    def block_m(self) -> int:
        """Query rows of a block."""
        return _ROWS * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a computing and of the fetching warpgroup; no more than a block starts with."""
        if self.row_stages:
            return {1: (240, 96), 2: (224, 56)}[self.consumers]
        return {1: (240, 40), 2: (240, 24), 4: (112, 32)}[self.consumers]

    def smem_bytes(self, head_dim: int, *, lse: bool) -> int:
        """The size of the kernel's FlashStorage or RowMajorStorage; the kernel asserts that it is the same."""
        ones = 0 if lse or self.out_columns == _WIDEST else 8  # rows behind V^T
        tiles = self.consumers * _ROWS * head_dim + self.stages * self.block_n * (2 * head_dim + ones)
        flash = _whole_kilobytes(tiles + 8 * (2 * self.consumers + 4 * self.stages))
        rows = self.row_stages * (self.block_n * head_dim + 16)
        return _whole_kilobytes(flash + rows) if rows else flash


def _whole_kilobytes(size: int) -> int:
    return -(-size // 1024) * 1024


#: Up to so many keys one level of accumulation has the error of two (docs/performance-log.md). Two levels cost nothing
#: at head dims 64 and 128; at 256 their registers are what P V beside the next softmax needs.
ONE_LEVEL_KEYS = 16384

#: How long a block with so many warpgroups takes for its rows, measured; one warpgroup is 1.
_COST = {1: 1.0, 2: 1.42, 4: 2.75}


def _candidates(sizes: Sizes, fmt: str) -> tuple[Tiling, ...]:
    """Tiles with one and more warpgroups that were fastest (docs/performance-log.md)."""
    causal, int8 = bool(sizes.causal), fmt == "int8"
    if sizes.row_major:  # by what fits without spills, not measured yet
        stages, polynomials, row_stages = {64: (4, 8, 2), 128: (3, 8, 2), 256: (2, 0, 1)}[sizes.head_dim]
        common = Tiling(128, 1, stages, min(sizes.head_dim, 128), False, polynomials, row_stages=row_stages)
        two = replace(common, consumers=2, turns=sizes.head_dim > 64, overlap=sizes.head_dim == 64)
        found: tuple[Tiling, ...] = (common,) if causal and sizes.head_dim == 256 else (common, two)
    elif sizes.head_dim == 64:
        # With a scale for each block of V, a tile is a block. With a mask and scales of blocks or the log-sum-exp four
        # warpgroups spill up to seven registers: they take 0.87 of the time of three, which do not.
        wide = Tiling(128, 2, 4, 64, True, 12, overlap=True) if sizes.value_blocks else Tiling(256, 2, 3, 64, True, 12)
        most = Tiling(128, 4, 4, 64, not causal, 8 if causal else 4)
        found = (Tiling(128, 1, 4, 64, polynomials=12, overlap=True), wide, most)
    elif sizes.head_dim == 128:
        found = tuple(Tiling(128, n, 4, 128, n > 1 and not causal, 8, overlap=not int8) for n in (1, 2))
    elif sizes.kv_len <= ONE_LEVEL_KEYS:
        found = tuple(Tiling(128, n, 3, 256, overlap=True, two_levels=False) for n in (1, 2))
    else:
        found = (Tiling(128, 1, 2, 128), Tiling(128, 2, 2, 128, True))
    if sizes.lse:  # sums that a polynomial in half would spoil
        found = tuple(replace(t, polynomials=0) for t in found)
    return found


def tiling(dims: Mapping[str, int], fmt: str = "e4m3") -> tuple[Tiling, str]:
    """The tiles for a shape and format, and why. Raises UsageError for a shape that the kernel does not compute."""
    sizes = sizes_of(dims)
    if sizes.head_dim not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise UsageError(f"head_dim D={sizes.head_dim}: the Hopper kernel has tiles for {allowed}")
    candidates = _candidates(sizes, fmt)

    def cost(t: Tiling) -> float:
        heads = sizes.batch * sizes.heads
        waves = -(-sizes.q_len // t.block_m) * heads / MULTIPROCESSORS
        # Few waves are as long as whole ones; of many, a last block of few rows costs little.
        return _COST[t.consumers] * (
            math.ceil(waves) if waves <= 4 else sizes.q_len / t.block_m * heads / MULTIPROCESSORS
        )

    chosen = min(candidates, key=cost)
    return chosen, (
        f"of {', '.join(str(t.consumers) for t in candidates)} warpgroups a block, {chosen.consumers} should take the "
        f"least time for {sizes.batch * sizes.heads} heads of {sizes.q_len} queries on {MULTIPROCESSORS} "
        "multiprocessors"
    )


@lru_cache(maxsize=1024)
def heads_at_once(sizes: Sizes, block_m: int, block_n: int) -> int:
    """How many heads the blocks work on at a time: the fewest that divide causal work almost as evenly as any do.

    Few heads leave K and V in the L2 cache; without a mask all pieces are equal, and one head at a time will do.
    """
    if not sizes.causal:
        return 1
    row_blocks, heads = -(-sizes.q_len // block_m), sizes.batch * sizes.heads
    ends = np.minimum(np.arange(row_blocks, 0, -1) * block_m, sizes.q_len) + sizes.shift
    tiles = np.clip(-(-np.minimum(ends, sizes.kv_len) // block_n), 0, None) + 1.0  # and the way in and out of a piece
    candidates = [2**n for n in range(heads.bit_length()) if 2**n < heads] + [heads]
    evenness = [_evenness(tiles, heads, width) for width in candidates]
    chosen: int = next(width for width, even in zip(candidates, evenness, strict=True) if even >= 0.95 * max(evenness))
    return chosen


def _evenness(tiles: np.ndarray, heads: int, width: int) -> float:
    """The mean load of a block over the largest: pieces dealt to and fro, `width` heads at a time (see piece_of)."""
    groups = [np.repeat(tiles, min(width, heads - first)) for first in range(0, heads, width)]
    pieces = np.concatenate(groups)
    rounds = np.zeros((-(-len(pieces) // MULTIPROCESSORS), MULTIPROCESSORS))
    rounds.ravel()[: len(pieces)] = pieces
    rounds[1::2] = rounds[1::2, ::-1]
    loads = rounds.sum(axis=0)
    return float(loads.mean() / loads.max())


@dataclass(frozen=True)
class Query:
    """Q as its caller has it, where the kernel quantizes it itself: (batch, heads, q_len, head_dim).

    head_dim: that of the input, up to that of the kernel. dtype: "float16" or "bfloat16". strides: in elements, those
    of batch, head and row; columns are neighbours, and rows begin at multiples of 16 bytes. It is rotated, and each
    QUERY_BLOCK rows get a scale.
    """

    head_dim: int
    dtype: str
    strides: tuple[int, ...]


def quantizes_queries(head_dim: int) -> bool:
    """Whether the kernel can quantize Q: at head dim 256 the tiles leave no shared memory for its rows."""
    return head_dim <= 128


def kernel(
    fmt: str, dims: Mapping[str, int], query: Query | None = None, output: OutputRows | None = None
) -> KernelSource:
    """Render the kernel of a shape, which reads codes of Q, or ``query``, for an ``output``, by default contiguous.

    Raises UsageError for a format or shape that it does not compute.
    """
    if fmt not in FORMATS:
        raise unknown("format of the Hopper kernel", fmt, FORMATS)
    sizes, (tiles, _) = sizes_of(dims), tiling(dims, fmt)
    smem, (registers, fetching) = tiles.smem_bytes(sizes.head_dim, lse=sizes.lse), tiles.registers
    if query is not None:
        smem += tiles.block_m * sizes.head_dim * 2
    columns = output.head_dim if output else sizes.head_dim
    threads = 128 * (tiles.consumers + 1)
    flags = {
        "Turns": tiles.turns,
        "Overlap": tiles.overlap,
        "TwoLevels": tiles.two_levels,
        "Causal": bool(sizes.causal),
        "Lse": sizes.lse,
        "Int8": fmt == "int8",
        "QueryBlockScales": sizes.query_blocks,
        "KeyBlockScales": sizes.key_blocks,
        "ValueBlockScales": sizes.value_blocks,
        "ChannelScales": sizes.channels,
        "FewerColumns": columns < sizes.head_dim,
    }
    constants = "\n".join(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items())
    if tiles.row_stages:
        constants = f"  static constexpr int kRowStages = {tiles.row_stages};\n{constants}"
    if (sizes.query_blocks or sizes.value_blocks) and not sizes.key_blocks:
        raise UsageError("QBLOCK or VBLOCK without KBLOCK: the Hopper kernel has scales of blocks for all, or K alone")
    function, q_parameters, q_argument = "attention_hopper", "const __grid_constant__ TensorMap q", "q"
    if sizes.row_major:
        function = "attention_hopper_row_major"
    if query is not None:
        if sizes.row_major or sizes.query_blocks or not sizes.key_blocks or not quantizes_queries(sizes.head_dim):
            raise UsageError(
                "a Q that the Hopper kernel quantizes: head dims are 64 and 128, with KBLOCK, without QBLOCK and VROWS"
            )
        function = "attention_hopper_input"
        q_parameters, q_argument = f"{q_parameters}, int q_heads", "{q, q_heads}"
        constants += f"\n  static constexpr int kQueryColumns = {query.head_dim};"
        constants += f"\n  using In = {CUDA_TYPES[query.dtype]};"
    source = f"""#include "{function}.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {sizes.head_dim};
  static constexpr int kBlockN = {tiles.block_n};
  static constexpr int kConsumers = {tiles.consumers};
  static constexpr int kStages = {tiles.stages};
  static constexpr int kOutColumns = {tiles.out_columns};
  static constexpr int kPolynomials = {tiles.polynomials};
  static constexpr int kConsumerRegisters = {registers};
  static constexpr int kProducerRegisters = {fetching};
  static constexpr int kSmemBytes = {smem};
{constants}
  using Out = {CUDA_TYPES["bfloat16" if sizes.bfloat16 else "float16"]};
}};

using greenfast::ptx::TensorMap;

extern "C" __global__ void __launch_bounds__({threads}, 1)
{ENTRY}({q_parameters}, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
        const float* q_scale, const float* k_scale, const float* v_scale, void* out, float* lse, int heads,
        int heads_per_kv, int q_len, int kv_len, int causal_shift, int heads_at_once, float softmax_scale,
        long long out_gap, long long out_head, long long out_row, unsigned out_heads, int out_columns) {{
  greenfast::{function}<Cfg>({{q_scale, k_scale, v_scale, out, lse, heads, heads_per_kv, q_len, kv_len,
                                    causal_shift, heads_at_once, softmax_scale,
                                    {{out_gap, out_head, out_row, out_heads, out_columns}}}},
                                   {q_argument}, k, v);
}}
"""
    return KernelSource(
        entry=ENTRY,
        source=source,
        name=f"{ENTRY}.cu",
        include_dirs=(KERNEL_DIR,),
        block=(threads, 1, 1),
        dynamic_smem_bytes=smem,
        requires=TARGET,
    )


def launch(
    fmt: str,
    dims: Mapping[str, int],
    scale: float | None = None,
    query: Query | None = None,
    *,
    output: OutputRows | None = None,
) -> Launch:
    """A block per multiprocessor, or per piece of work where there are fewer; scale: of the scores, > 0."""
    sizes, (tiles, _) = sizes_of(dims), tiling(dims, fmt)
    heads, kv_heads, head_dim = sizes.batch * sizes.heads, sizes.batch * sizes.kv_heads, sizes.head_dim
    panel = min(head_dim, _PANEL)
    padded = padded_keys(sizes.kv_len)
    pieces = -(-sizes.q_len // tiles.block_m) * heads

    def rows(name: str, count: int, length: int, box_rows: int) -> TensorMap:
        strides = (length * head_dim, head_dim, 1)
        return TensorMap(name, "uint8", (count, length, head_dim), strides, (1, box_rows, panel), panel)

    if query is None:
        q: tuple[Argument, ...] = (rows("q", heads, sizes.q_len, _ROWS),)
    else:
        shape = (sizes.batch, sizes.heads, sizes.q_len, query.head_dim)
        # No one reads along a dimension of 1, whose stride may be any.
        strides = [16 if n == 1 else 2 * stride for n, stride in zip(shape, query.strides, strict=False)]
        q = (TensorMap("q", "uint16", shape, (*strides, 2), (1, 1, _ROWS, head_dim), 0), np.int32(sizes.heads))
    return Launch(
        grid=(min(MULTIPROCESSORS, pieces), 1, 1),
        args=(
            *q,
            rows("k", kv_heads, sizes.kv_len, tiles.block_n),
            rows("v", kv_heads, sizes.kv_len, tiles.block_n) if sizes.row_major else TensorMap(
                "v_t", "uint8", (kv_heads, head_dim, padded), (head_dim * padded, padded, 1),
                (1, head_dim, _PANEL), _PANEL,
            ),
            "q_scale" if query is None else np.int64(0),
            *("k_scale", "v_scale", "out"),
            "lse" if sizes.lse else np.int64(0),
            np.int32(heads),
            np.int32(sizes.heads // sizes.kv_heads),
            np.int32(sizes.q_len),
            np.int32(sizes.kv_len),
            np.int32(sizes.shift),
            np.int32(heads_at_once(sizes, tiles.block_m, tiles.block_n)),
            np.float32(1.0 / math.sqrt(head_dim) if scale is None else scale),
            *(output or OutputRows.contiguous(sizes)).arguments(sizes),
        ),
        early=query is not None,
    )  # fmt: skip
