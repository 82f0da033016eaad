"""Render and launch the backward pass of Hopper.

The quantizer is ``kernels/quantize/backward.cuh``, the products are ``kernels/attention/sm90/backward.cuh``.

Heads are counted over the batch; several heads of Q may share one of K and V. Buffers: ``q``, ``grad`` (of the output),
``k`` and ``v``: int8 codes (heads, length, head_dim); ``q_t``, ``grad_t`` and ``k_t``: E4M3 codes (heads, head_dim,
length rounded up to 16), rows permuted in groups of 16: KEY_ORDER, for k_t PAIR_ORDER; ``tables``: QueryTable (heads,
tiles of 64 queries); ``factors``: float32 (kv_heads, 3); ``row_factors``: float32 (heads, q_len); ``ds``: E4M3 codes of
dS between the kernels, see ``stored_shape``; ``dq``, ``dk``, ``dv``: bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from greenfast.kernels import make_source
from greenfast.kernels.attention.config import ROW_BLOCK, Stride3, padded_keys
from greenfast.spec.arch import Target
from greenfast.spec.kernel import Argument, KernelSource, Launch, TensorMap

SUM_ENTRY, MEASURE_ENTRY, ENCODE_ENTRY = "backward_sum_keys", "backward_measure_keys", "backward_encode"
KEYS_ENTRY, QUERIES_ENTRY = "attention_backward_keys", "attention_backward_queries"
TARGET = Target("sm_90a")
#: Rows of a warpgroup, and queries of a table.
ROWS = 64
#: Words of a QueryTable: the starts of S and of dP, and four of the tile.
TABLE_WORDS = 2 * ROWS + 4
#: The unit of codes that are all 0.
NO_UNIT = -10000
#: Keys of a tile of the dQ kernel.
STORED_KEYS = 128
#: Bytes of dS in a launch of several heads of K. At the end of a larger launch a smaller share of the work is left to
#: few multiprocessors.
MOST_STORED_BYTES = 2**30
#: The most bytes of dS of one head of K: one for each query of its heads of Q and key. Larger calls are refused.
MOST_HEAD_BYTES = 2**33
#: The key of each byte of dS and K^T, in groups of 16: pairs of keys that are 8 apart.
PAIR_ORDER = tuple(key for i in range(8) for key in (i, i + 8))
_ALIGNMENT = 1024


@dataclass(frozen=True)
class BackwardTiling:
    """Tiles of a backward kernel.

    head_dim: one of HEAD_DIMS. consumers: warpgroups, of 64 rows each. registers: of a consumer's thread and of a
    producer's. outputs: "dk dv", "dk", "dv" or "dq". turns: whether the two warpgroups of dK and dV issue their
    products in turn.
    """

    head_dim: int
    consumers: int
    stages: int
    registers: tuple[int, int] = (240, 24)
    outputs: str = "dk dv"
    turns: bool = False

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.consumers + 1)


@dataclass(frozen=True)
class BackwardMask:
    """The keys that queries attend to: all by default.

    causal: query i attends to keys 0 .. i. shifts: query i attends to keys i + shifts[0] .. i + shifts[1]; not with
    causal. lengths: only to the first keys of each sequence; their numbers are on the device. With shifts.
    """

    causal: bool = False
    shifts: tuple[int, int] | None = None
    lengths: bool = False


#: Shifts of a mask without limits: sums with rows stay in 32 bits.
NO_LIMITS = (-(2**30), 2**30)
FULL, CAUSAL = BackwardMask(), BackwardMask(causal=True)


def make_mask(alignment: int, left: int, right: int, q_len: int, kv_len: int, *, lengths: bool) -> BackwardMask:
    """Return the mask of a call. alignment, left, right: as in ``MaskSpec`` in ops/masked.py."""
    shift = kv_len - q_len if alignment == 2 else 0
    if left < 0 and not lengths and (right < 0 or (right, shift) == (0, 0)):
        return FULL if right < 0 else CAUSAL
    first, last = NO_LIMITS
    shifts = (first if left < 0 else max(first, shift - left), last if right < 0 else min(last, shift + right))
    return BackwardMask(shifts=shifts, lengths=lengths)


#: Tiles of the dK/dV kernel and of the dQ kernel, by head dim. With three warpgroups of dK and dV a thread would have
#: 160 registers: ptxas serializes the products. At 256 a thread has registers for the sums of dK or of dV, so two
#: kernels compute these.
KEYS_TILINGS = {
    64: (BackwardTiling(64, consumers=2, stages=4),),
    128: (BackwardTiling(128, consumers=2, stages=4, turns=True),),
    256: (
        BackwardTiling(256, consumers=2, stages=3, outputs="dk", turns=True),
        BackwardTiling(256, consumers=2, stages=4, outputs="dv"),
    ),
}
QUERIES_TILINGS = {
    64: BackwardTiling(64, consumers=2, stages=6, outputs="dq"),
    128: BackwardTiling(128, consumers=2, stages=6, outputs="dq"),
    256: BackwardTiling(256, consumers=2, stages=4, outputs="dq"),
}


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def keys_smem_bytes(tiles: BackwardTiling) -> int:
    """Return the size of KeyGradientStorage."""
    loaded = {"dk dv": 4, "dk": 3, "dv": 2}[tiles.outputs]
    keys = (2 if "dk" in tiles.outputs else 1) * tiles.rows * tiles.head_dim
    stored = 2 * tiles.rows * ROWS if "dk" in tiles.outputs else 0
    staged = tiles.stages * (loaded * ROWS * tiles.head_dim + 4 * TABLE_WORDS)
    return _round_up(stored + keys + staged + 8 * (1 + 2 * tiles.stages), _ALIGNMENT)


def queries_smem_bytes(tiles: BackwardTiling) -> int:
    """Return the size of QueryGradientStorage."""
    return _round_up(tiles.stages * (STORED_KEYS * (tiles.rows + tiles.head_dim) + 16), _ALIGNMENT)


_SOURCE = """#include "attention/sm90/backward.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {tiles.head_dim};
  static constexpr int kConsumers = {tiles.consumers};
  static constexpr int kStages = {tiles.stages};
  static constexpr int kConsumerRegisters = {tiles.registers[0]};
  static constexpr int kProducerRegisters = {tiles.registers[1]};
  static constexpr int kSmemBytes = {smem};
  static constexpr bool kCausal = {causal};
  static constexpr bool kRange = {range};
  static constexpr bool kLengths = {lengths};
  static constexpr bool kWantsKeys = {wants_keys};
  static constexpr bool kWantsValues = {wants_values};
  static constexpr bool kTurns = {turns};
}};

using greenfast::ptx::TensorMap;

extern "C" __global__ void __launch_bounds__({tiles.threads}, 1)
{entry}({maps}, const greenfast::QueryTable* tables, const float* factors, const float* row_factors,
        {outputs}, int group, int q_len, int kv_len, int first_head, unsigned char* ds,
        int stored_tiles{limits}) {{
  greenfast::{body}<Cfg>({{tables, factors, row_factors, {fields}, group, q_len, kv_len, first_head, ds,
                          stored_tiles{limit_names}}}, {names});
}}
"""


def _render(
    entry: str, body: str, tiles: BackwardTiling, smem: int, mask: BackwardMask, maps: str, outputs: str
) -> KernelSource:
    names = maps.split()
    limits = ["int first_shift", "int last_shift"] if mask.shifts else []
    limits += ["int kv_heads", "const int* kv_lengths"] if mask.lengths else []
    source = _SOURCE.format(
        tiles=tiles,
        smem=smem,
        causal=str(mask.causal).lower(),
        range=str(mask.shifts is not None).lower(),
        lengths=str(mask.lengths).lower(),
        limits="".join(f", {parameter}" for parameter in limits),
        limit_names="".join(f", {parameter.split()[-1]}" for parameter in limits),
        wants_keys=str("dk" in tiles.outputs).lower(),
        turns=str(tiles.turns).lower(),
        wants_values=str("dv" in tiles.outputs).lower(),
        entry=entry,
        body=body,
        maps=", ".join(f"const __grid_constant__ TensorMap {name}" for name in names),
        names=", ".join(names),
        outputs=", ".join(f"__nv_bfloat16* {name}" for name in outputs.split()),
        fields=", ".join(name if name in outputs.split() else "nullptr" for name in ("dq", "dk", "dv")),
    )
    return make_source(entry, source, tiles.threads, dynamic_smem_bytes=smem, requires=TARGET.name)


def keys_kernel(tiles: BackwardTiling, mask: BackwardMask) -> KernelSource:
    """Render the kernel of dK and dV, or of one of them."""
    smem = keys_smem_bytes(tiles)
    return _render(KEYS_ENTRY, "backward_keys", tiles, smem, mask, "k v q grad q_t grad_t", tiles.outputs)


def queries_kernel(tiles: BackwardTiling, mask: BackwardMask) -> KernelSource:
    """Render the kernel of dQ."""
    smem = queries_smem_bytes(tiles)
    return _render(QUERIES_ENTRY, "backward_queries", tiles, smem, mask, "k_t", tiles.outputs)


def _rows_map(name: str, heads: int, length: int, box_rows: int, dim: int) -> TensorMap:
    panel = min(dim, 128)
    return TensorMap(name, "uint8", (heads, length, dim), (length * dim, dim, 1), (1, box_rows, panel), panel)


def _columns_map(name: str, heads: int, length: int, box: int, dim: int) -> TensorMap:
    padded = padded_keys(length)
    return TensorMap(name, "uint8", (heads, dim, padded), (dim * padded, padded, 1), (1, dim, box), box)


def _list_limits(mask: BackwardMask, kv_heads: int, batch: int) -> tuple[Argument, ...]:
    """Return the arguments of a mask. kv_heads: over the batch."""
    shifts = tuple(np.int32(n) for n in mask.shifts or ())
    return (*shifts, np.int32(kv_heads // batch), "kv_lengths") if mask.lengths else shifts


def stored_shape(heads: int, q_len: int, kv_len: int, mask: BackwardMask) -> tuple[int, int, int, int]:
    """Return the shape of the codes of dS: heads of Q of a launch, tiles of queries, of keys, and bytes of a tile.

    Each 64 queries have the keys that some of them attend to, from a multiple of STORED_KEYS on.
    """
    keys = _round_up(kv_len, STORED_KEYS)
    if mask.shifts is not None:
        keys = min(keys, _round_up(mask.shifts[1] - mask.shifts[0] + ROWS, STORED_KEYS) + STORED_KEYS)
    return heads, -(-q_len // ROWS), keys // ROWS, ROWS * ROWS


def stored_bytes(heads: int, q_len: int, kv_len: int, mask: BackwardMask) -> int:
    """Return the bytes of dS."""
    return math.prod(stored_shape(heads, q_len, kv_len, mask))


def describe_excess(of_head: int) -> str:
    """Return the message for more than MOST_HEAD_BYTES of dS of one head of K. of_head: its bytes."""
    return (
        f"dS takes {of_head} bytes for one head of key, and may take {MOST_HEAD_BYTES >> 30} GiB; backward passes in "
        "16 bits have none"
    )


@dataclass(frozen=True)
class HeadRange:
    """Heads of K and V, counted over the batch: ``first`` .. ``stop`` - 1."""

    first: int
    stop: int


def split_heads(heads: int, kv_heads: int, q_len: int, kv_len: int, mask: BackwardMask) -> list[HeadRange]:
    """Return the heads of each launch: as many as have MOST_STORED_BYTES of dS, but at least one.

    The last launch may have fewer heads than the others.
    """
    most = max(1, MOST_STORED_BYTES // stored_bytes(heads // kv_heads, q_len, kv_len, mask))
    count = -(-kv_heads // -(-kv_heads // most))
    return [HeadRange(first, min(kv_heads, first + count)) for first in range(0, kv_heads, count)]


def keys_launch(
    tiles: BackwardTiling, heads: int, kv_heads: int, q_len: int, kv_len: int, mask: BackwardMask = FULL,
    batch: int = 1, part: HeadRange | None = None,
) -> Launch:  # fmt: skip
    """Return the launch of the kernel of dK and dV. heads, kv_heads: over the batch; kv_heads divides heads.

    With a mask of lengths there is a further input, ``kv_lengths``, int32 (batch,). part: the heads of this launch, by
    default all. ``ds`` has only theirs.
    """
    part = part or HeadRange(0, kv_heads)
    count = part.stop - part.first
    return Launch(
        grid=(-(-kv_len // tiles.rows) * count, 1, 1),
        args=(
            *(_rows_map(name, kv_heads, kv_len, ROWS, tiles.head_dim) for name in ("k", "v")),
            *(_rows_map(name, heads, q_len, ROWS, tiles.head_dim) for name in ("q", "grad")),
            *(_columns_map(name, heads, q_len, ROWS, tiles.head_dim) for name in ("q_t", "grad_t")),
            *("tables", "factors", "row_factors", *tiles.outputs.split()),
            *(np.int32(n) for n in (heads // kv_heads, q_len, kv_len, part.first)),
            "ds" if "dk" in tiles.outputs else np.int64(0),
            np.int32(stored_shape(heads, q_len, kv_len, mask)[2]),
            *_list_limits(mask, kv_heads, batch),
        ),
    )


def queries_launch(
    tiles: BackwardTiling, heads: int, kv_heads: int, q_len: int, kv_len: int, mask: BackwardMask = FULL,
    batch: int = 1, part: HeadRange | None = None,
) -> Launch:  # fmt: skip
    """Return the launch of the kernel of dQ, after that of dK. Arguments and inputs are as for ``keys_launch``."""
    part = part or HeadRange(0, kv_heads)
    count = (part.stop - part.first) * heads // kv_heads
    return Launch(
        grid=(-(-q_len // tiles.rows) * count, 1, 1),
        args=(
            _columns_map("k_t", kv_heads, kv_len, STORED_KEYS, tiles.head_dim),
            *("tables", "factors", "row_factors", *tiles.outputs.split()),
            *(np.int32(n) for n in (heads // kv_heads, q_len, kv_len, part.first)),
            "ds",
            np.int32(stored_shape(heads, q_len, kv_len, mask)[2]),
            *_list_limits(mask, kv_heads, batch),
        ),
    )


_ENCODE_THREADS = 256
_ENCODE_SOURCE = """#include "quantize/backward.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {head_dim};
  static constexpr int kTileRows = {rows};
  static constexpr int kThreads = {threads};
  static constexpr bool kLengths = {lengths};
  using In = __nv_bfloat16;
}};

extern "C" __global__ void __launch_bounds__({threads}, {blocks})
{entry}({inputs}, const float2* row_stats, const float* lse_mean, const float* rotation,
        int batch, int heads, int kv_heads, int q_len, int kv_len, float softmax_scale,
        unsigned char* q_codes, unsigned char* k_codes, unsigned char* v_codes, unsigned char* grad_codes,
        unsigned char* q_t, unsigned char* k_t, unsigned char* grad_t, greenfast::QueryTable* tables, float* factors,
        float* row_factors, float* k_sums, float* k_mean, float* mean_shift, float* k_amax, float* v_amax,
        float* v_norm{kv_lengths}) {{
  greenfast::{body}<Cfg>(
      {{{fields}, row_stats, lse_mean, rotation, batch, heads, kv_heads, q_len, kv_len, softmax_scale,
        {lengths_field}}},
      {{q_codes, k_codes, v_codes, grad_codes, q_t, k_t, grad_t, tables, factors, row_factors, k_sums, k_mean,
       mean_shift, k_amax, v_amax, v_norm}});
}}
"""
#: The quantizer's inputs, in the order of its arguments.
INPUTS = ("query", "key", "value", "out", "grad_out")


def encode_kernels(head_dim: int, *, lengths: bool = False) -> tuple[KernelSource, ...]:
    """Render the kernels that add K and measure V, that measure K, and that write codes and tables.

    lengths: whether sequences have lengths of keys.
    """
    inputs = ", ".join(
        f"const void* {name}, long long {name}_batch, long long {name}_head, long long {name}_row" for name in INPUTS
    )
    fields = ", ".join(f"{{{name}, {name}_batch, {name}_head, {name}_row}}" for name in INPUTS)

    def render(entry: str, body: str, blocks: int) -> KernelSource:
        source = _ENCODE_SOURCE.format(
            head_dim=head_dim,
            rows=_encode_rows(head_dim),
            threads=_ENCODE_THREADS,
            blocks=blocks,
            lengths=str(lengths).lower(),
            kv_lengths=", const int* kv_lengths" if lengths else "",
            lengths_field="kv_lengths" if lengths else "nullptr",
            entry=entry,
            inputs=inputs,
            body=body,
            fields=fields,
        )
        return make_source(entry, source, _ENCODE_THREADS, requires=TARGET.name)

    blocks = {64: (3, 3, 3), 128: (2, 3, 2), 256: (2, 2, 2)}[head_dim]  # of a multiprocessor
    bodies = ((SUM_ENTRY, "sum_keys"), (MEASURE_ENTRY, "measure_keys"), (ENCODE_ENTRY, "encode_backward"))
    return tuple(render(*body, n) for body, n in zip(bodies, blocks, strict=True))


def list_kernels(head_dim: int, mask: BackwardMask) -> tuple[KernelSource, ...]:
    """Render all kernels of the backward pass of a call, in the order of their launches."""
    return (
        *encode_kernels(head_dim, lengths=mask.lengths),
        *(keys_kernel(tiles, mask) for tiles in KEYS_TILINGS[head_dim]),
        queries_kernel(QUERIES_TILINGS[head_dim], mask),
    )


def _encode_rows(head_dim: int) -> int:
    """Return the rows of a block of the quantizer. At 256 two warps share 16 rows, and two blocks have registers."""
    return 64 if head_dim == 256 else ROW_BLOCK


def count_blocks(length: int, head_dim: int) -> int:
    """Return the blocks of the quantizer for the rows of a head."""
    return -(-length // _encode_rows(head_dim))


def count_chunks(kv_len: int) -> int:
    """Return the chunks of KeySums: at most 32, of 1,024 rows or more."""
    return -(-kv_len // max(1024, _round_up(-(-kv_len // 32), ROW_BLOCK)))


def encode_launches(
    head_dim: int,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    scale: float,
    strides: tuple[Stride3, ...],
    *,
    lengths: bool = False,
) -> tuple[Launch, ...]:
    """Return the launches of ``encode_kernels``. strides: of INPUTS, in elements; columns are contiguous.

    lengths: there is a further input, ``kv_lengths``, int32 (batch,). Codes of keys after them are zeros.

    Further inputs, float32: ``row_stats`` (heads, q_len, 2), log-sum-exp and largest of the scores with keys minus
    ``lse_mean``; ``lse_mean`` (kv_heads, head_dim), already rotated by ``rotation`` (head_dim, head_dim). Further
    buffers, float32: ``k_sums`` (kv_heads, chunks, head_dim), ``k_mean`` and ``mean_shift`` (kv_heads, head_dim),
    ``k_amax``, ``v_amax`` and ``v_norm`` (kv_heads, blocks of keys). The first kernel writes k_sums, v_amax and v_norm,
    the second the others.
    """
    inputs: list[Argument] = []
    for name, of_rows in zip(INPUTS, strides, strict=True):
        inputs += [name, *(np.int64(n) for n in of_rows)]
    args: tuple[Argument, ...] = (
        *inputs,
        *("row_stats", "lse_mean", "rotation"),
        *(np.int32(n) for n in (batch, heads, kv_heads, q_len, kv_len)),
        np.float32(scale),
        *(
            "q",
            "k",
            "v",
            "grad",
            "q_t",
            "k_t",
            "grad_t",
            "tables",
            "factors",
            "row_factors",
            "k_sums",
            "k_mean",
            "mean_shift",
            "k_amax",
            "v_amax",
            "v_norm",
        ),
        *(("kv_lengths",) if lengths else ()),
    )
    of_keys, key_blocks = batch * kv_heads, count_blocks(kv_len, head_dim)
    blocks = max(key_blocks, count_blocks(q_len, head_dim))
    return (
        Launch((of_keys * (count_chunks(kv_len) + key_blocks), 1, 1), args),
        Launch((of_keys, key_blocks, 1), args),
        Launch((2 * of_keys + batch * heads, blocks, 1), args),
    )
