"""Render and launch the kernel that quantizes Q, K and V for attention, ``kernels/quantize/qkv.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from greenfast.kernels import CUDA_TYPES, FLOAT_TYPES, make_source
from greenfast.kernels.attention.config import (
    QUERY_BLOCK,
    ROW_BLOCK,
    AttentionConfig,
    Sizes,
    Strides,
    contiguous_strides,
)
from greenfast.spec.kernel import Argument, KernelSource, Launch

ENTRY = "quantize_qkv"
#: A head's mean is the median of the means of groups of MEAN_GROUP keys, out of MEAN_KEYS keys spread over the head.
MEAN_KEYS, MEAN_GROUP = 32, 4
#: Head dim -> blocks per multiprocessor for __launch_bounds__, if that is more than one.
_BLOCKS = {64: 3, 128: 2}
#: Threads of a block that computes norms of rows.
_NORM_THREADS = 256
#: With this number of tiles of K, a block takes several.
_MANY_TILES = 1024
#: Multiprocessors that a launch should keep busy.
_MULTIPROCESSORS = 132
#: Tiles per resident block, at least -> the most tiles of K, heads of K and heads of Q for a block, if heads share a
#: tile's angles: the fastest values measured on an H100.
_SHARES = {80: (4, 8, 16), 16: (4, 4, 8), 8: (2, 4, 8)}
#: Most bytes of a tile's angles in shared memory.
_ANGLE_BYTES = 80 * 1024


@dataclass(frozen=True)
class Sharing:
    """The work of a block: tiles of K of some heads of K, or a tile of some heads of Q.

    several_heads: whether several heads share a tile's angles in shared memory. If each head has tables of its own, the
    work is tiles of one head of K and of its head of Q, with the same tables.
    """

    key_tiles: int
    key_heads: int
    query_heads: int
    several_heads: bool


@dataclass(frozen=True, kw_only=True)
class SecondPart:
    """The second part of a sequence in two parts, such as image tokens after text tokens.

    Its tensors are the buffers ``second_q``, ``second_k`` and ``second_v``, the weights of its norms
    ``second_q_weight`` and ``second_k_weight``. q_rows, kv_rows: its rows, any number. strides: of its tensors.
    has_tables: for each part, whether it has tables of its own; the second part's are the buffers ``second_cos`` and
    ``second_sin``. A part without is not rotated. None if one pair of tables spans the sequence. table_strides: of the
    second part's tables, as in ``Prologue``.
    """

    q_rows: int
    kv_rows: int
    strides: tuple[tuple[int, ...], ...]
    has_tables: tuple[bool, bool] | None = None
    table_strides: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Prologue:
    """RMSNorm or LayerNorm and rotary embedding of Q and K, before their quantization in the same kernel.

    norm: "" for none, "plain" for one without weights, or the dtype of the weights, buffers ``q_weight`` and
    ``k_weight``, (columns,). centered: it is LayerNorm, else RMSNorm. biased: it has biases like the weights, buffers
    ``q_bias`` and ``k_bias``. across_heads: the norm is over all heads, weights are (heads, columns), and the buffers
    ``q_moments`` and ``k_moments``, float32 (batch, length), with ``centered`` (batch, length, 2), come from
    ``norms_kernel``. eps: added to the mean of the squares. rotary_dim: columns that are rotated, even; 0 for none.
    interleaved: columns 2 j and 2 j + 1 are rotated together, else j and j + rotary_dim / 2. table: the dtype of the
    buffers ``cos`` and ``sin``. angle_step: distance of a row's angles in a table, 1 or 2. table_strides: of batch and
    row, in elements; the addresses of the tables are multiples of 16 bytes. table_head: the stride of head; 0 if heads
    share tables. Otherwise Q has as many heads as K. second: the second part of the sequences, if they have two; not
    with biased, across_heads and table_head.
    """

    norm: str = ""
    centered: bool = False
    biased: bool = False
    across_heads: bool = False
    eps: float = 0.0
    rotary_dim: int = 0
    interleaved: bool = False
    table: str = "float32"
    angle_step: int = 1
    table_strides: tuple[int, int] = (0, 0)
    table_head: int = 0
    second: SecondPart | None = None

    @property
    def angle_vector(self) -> int:
        """The number of angles in an aligned access of at most 16 bytes: a power of two that divides all strides."""
        count = 4 if self.table == "float32" else 8
        strides = (*self.table_strides, self.table_head, *(self.second.table_strides if self.second else ()))
        while any(stride % count for stride in strides):
            count //= 2
        return count

    def constants(self) -> str:
        """Return the members of Cfg."""
        weighted = self.norm not in ("", "plain")
        flags = {"Norm": bool(self.norm), "Weighted": weighted, "Interleaved": self.interleaved}
        flags |= {"Centered": self.centered, "Biased": self.biased, "AcrossHeads": self.across_heads}
        flags["HeadTables"] = self.table_head != 0
        flags["OwnTables"] = self.second is not None and self.second.has_tables is not None
        numbers = {"RotaryDim": self.rotary_dim, "AngleStep": self.angle_step, "AngleVector": self.angle_vector}
        numbers["AngleRowBytes"] = self._count_row_bytes(self.tile_angle)
        lines = [f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items()]
        lines += [f"  static constexpr int k{name} = {value};" for name, value in numbers.items()]
        lines += [f"  using Weight = {FLOAT_TYPES[self.norm if weighted else 'float32']};"]
        lines += [f"  using Table = {FLOAT_TYPES[self.table]};", f"  using TileAngle = {FLOAT_TYPES[self.tile_angle]};"]
        return "\n".join(lines)

    def _count_row_bytes(self, dtype: str) -> int:
        """Return the distance of two rows of angles in shared memory.

        Four lanes read a row, 16 or 32 bytes apart and 16 at a time. Lanes of the next row use the banks between.
        """
        size = 4 if dtype == "float32" else 2
        row = 2 * (-(-self.rotary_dim // 16) * 8) * size
        step = size * (4 if self.interleaved else 8)  # from lane to lane
        return (row + 111) // 128 * 128 + 16 if step == 32 else (row + 63) // 128 * 128 + 64

    @property
    def tile_angle(self) -> str:
        """The dtype of a tile's angles in shared memory: float32 if there is room, so that each is converted once."""
        return "float32" if ROW_BLOCK * self._count_row_bytes("float32") <= _ANGLE_BYTES else self.table

    @property
    def tile_angle_bytes(self) -> int:
        """The bytes of a tile's angles in shared memory."""
        return ROW_BLOCK * self._count_row_bytes(self.tile_angle)

    def shared_bytes(self, head_dim: int, sharing: Sharing) -> int:
        """Return the bytes of RowsPrologue's dynamic shared memory.

        They are a thread's next rows, the rows of head dim 256 that two warps share, and the angles of a tile or,
        before them, group means.
        """
        warps = block_threads(head_dim)[0] // 32
        exchanged = ROW_BLOCK * head_dim * 2 + warps * QUERY_BLOCK * 4 if head_dim > 128 else 0
        if not sharing.several_heads:
            return exchanged
        means = sharing.key_heads * MEAN_KEYS // MEAN_GROUP * head_dim * 4
        return ROW_BLOCK * head_dim * 2 + exchanged + max(self.tile_angle_bytes, means)

    def buffers(self) -> tuple[str, ...]:
        """Return the names of its buffers: weights, biases, tables, then a second part's tensors and buffers."""
        weights = () if self.norm in ("", "plain") else ("q_weight", "k_weight")
        tables = ("cos", "sin") if self.rotary_dim else ()
        if self.second is None:
            return (*weights, *(("q_bias", "k_bias") if self.biased else ()), *tables)
        has_first, has_second = self.second.has_tables or (True, False)
        of_second = (*weights, *(tables if has_second else ()))
        return (
            *weights, *(tables if has_first else ()), *("second_q", "second_k", "second_v"),
            *(f"second_{name}" for name in of_second),
        )  # fmt: skip

    def arguments(self, sizes: Sizes) -> tuple[Argument, ...]:
        """Return the kernel's arguments."""
        names = self.buffers()

        def point_to(*buffers: str) -> tuple[Argument, ...]:
            return tuple(name if name in names else np.int64(0) for name in buffers)

        moments: tuple[Argument, ...] = (np.int64(0), np.int64(0))
        if self.across_heads:
            moments = ("q_moments", "k_moments")
        strides = (np.int64(n) for n in self.table_strides)
        weights, tables = point_to("q_weight", "k_weight"), point_to("cos", "sin")
        own: tuple[Argument, ...] = (*weights, np.float32(self.eps), *tables, *strides, *moments)
        own = (*own, *(("q_bias", "k_bias") if self.biased else ()))
        own = (*own, *((np.int64(self.table_head),) if self.table_head else ()))
        if self.second is None:
            return own
        second = self.second
        return (
            *own,
            *point_to("second_q_weight", "second_k_weight", "second_cos", "second_sin"),
            *(np.int64(n) for n in second.table_strides),
            *("second_q", "second_k", "second_v"),
            *(np.int64(n) for tensor in second.strides for n in tensor),
            *(np.int32(n) for n in (sizes.q_len - second.q_rows, sizes.kv_len - second.kv_rows)),
        )


_PROLOGUE_PARAMETERS = (
    ", const void* q_weight, const void* k_weight, float eps, const void* cos, const void* sin, long long table_batch, "
    "long long table_row, const float* q_moments, const float* k_moments"
)
_SECOND_PARAMETERS = (
    ", const void* second_q_weight, const void* second_k_weight, const void* second_cos, const void* second_sin, "
    "long long second_table_batch, long long second_table_row, const void* second_q, const void* second_k, "
    "const void* second_v, long long second_q_batch, long long second_q_head, long long second_q_row, "
    "long long second_k_batch, long long second_k_head, long long second_k_row, long long second_v_batch, "
    "long long second_v_head, long long second_v_row, int q_boundary, int kv_boundary"
)


def block_threads(head_dim: int) -> tuple[int, int]:
    """Return the threads of a block, and the blocks per multiprocessor for ``__launch_bounds__``.

    One warp per 16 rows of a tile, or two that share them (``rows_transform.cuh``).
    """
    return 256 if head_dim <= 128 else 512, _BLOCKS.get(head_dim, 1)


def key_tiles(sizes: Sizes) -> int:
    """Return the tiles of K of one head per block: several if there are many, because each computes the mean first."""
    return 4 if sizes.batch * sizes.kv_heads * _tiles(sizes.kv_len) >= _MANY_TILES else 1


def choose_sharing(config: AttentionConfig, sizes: Sizes, prologue: Prologue | None = None) -> Sharing:
    """Choose the tiles and heads of a block.

    Without rotary embedding ``key_tiles`` of one head. With it several heads, because the angles of a row are the same
    for all: read once for each head they would be most of the traffic. With tables of each head one head of K and of Q.
    """
    tiles = sizes.batch * sizes.kv_heads * _tiles(sizes.kv_len)
    all_tiles = 2 * tiles + sizes.batch * sizes.heads * _tiles(sizes.q_len)
    per_place = all_tiles // (_MULTIPROCESSORS * block_threads(config.head_dim)[1])
    share = next((share for least, share in _SHARES.items() if per_place >= least), None)
    if prologue is None or not prologue.rotary_dim or prologue.tile_angle_bytes > _ANGLE_BYTES or share is None:
        return Sharing(key_tiles(sizes), 1, 1, False)
    most_tiles, key_heads, query_heads = share if prologue.table_head == 0 else (share[0], 1, 1)
    return Sharing(
        most_tiles, _largest_divisor(sizes.kv_heads, key_heads), _largest_divisor(sizes.heads, query_heads), True
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(most, 0, -1) if number % n == 0)


def sample_places(length: int) -> list[int]:
    """Return the indices of the sampled keys: one in each 32nd of the keys, at offsets without a period."""
    return [(i * MEAN_KEYS + i * 19 % MEAN_KEYS) * length // MEAN_KEYS**2 for i in range(MEAN_KEYS)]


def _tiles(length: int) -> int:
    return -(-length // ROW_BLOCK)


def kernel(
    config: AttentionConfig, sizes: Sizes, *, sampled: bool = False, lengths: bool = False, gathered: bool = False,
    prologue: Prologue | None = None,
) -> KernelSource:  # fmt: skip
    """Render the kernel that quantizes the tensors of an attention, with block scales.

    sampled: the mean of K is taken from MEAN_KEYS keys in a separate buffer. Needed if K is a shard of the keys, since
    all shards must subtract the same mean. lengths: only the first keys of each sequence are quantized. gathered: only
    the keys in a list. prologue: of Q and K; not with the other options. If it has a second part,
    ``sizes`` are of the whole sequence.
    """
    threads, blocks = block_threads(config.head_dim)
    sharing = choose_sharing(config, sizes, prologue)
    flags = {
        "Int8": config.format == "int8",
        "KeyMean": config.key_mean,
        "Rotate": config.rotate,
        "Sampled": sampled,
        "FineScales": config.key_scales == "fine",
        "Lengths": lengths,
        "Gathered": gathered,
        "Prologue": prologue is not None,
        "SeveralHeads": sharing.several_heads,
        "Parts": prologue is not None and prologue.second is not None,
    }
    constants = "\n".join(f"  static constexpr bool k{name} = {str(value).lower()};" for name, value in flags.items())
    if prologue is not None:
        constants = f"{constants}\n{prologue.constants()}"
    more, samples, chosen = "", "{}", ""
    if sampled:
        line = MEAN_KEYS * config.columns
        more, samples = ", const void* samples", f"{{samples, {line}LL * kv_heads, {line}, {config.columns}}}"
    if lengths:
        more, chosen = f"{more}, const int* kv_lengths", ", kv_lengths"
    if gathered:
        more, chosen = f"{more}, const int* kv_rows", f"{chosen}, kv_rows"
    if prologue is not None:
        more = f"{more}{_PROLOGUE_PARAMETERS}"
        members = "q_weight, k_weight, eps, cos, sin, table_batch, table_row, q_moments, k_moments"
        if prologue.biased:
            more = f"{more}, const void* q_bias, const void* k_bias"
        if prologue.table_head:
            more = f"{more}, long long table_head"
        members = f"{members}, {'q_bias, k_bias' if prologue.biased else 'nullptr, nullptr'}"
        members = f"{members}, {'table_head' if prologue.table_head else '0'}"
        if prologue.second is not None:
            more = f"{more}{_SECOND_PARAMETERS}"
            members = f"{members}, second_q_weight, second_k_weight, second_cos, second_sin"
            members = f"{members}, second_table_batch, second_table_row"
        chosen = f"{chosen}, nullptr, nullptr, {{{members}}}"
        if prologue.second is not None:
            inputs = (f"{{second_{x}, second_{x}_batch, second_{x}_head, second_{x}_row}}" for x in "qkv")
            chosen = f"{chosen}, {{{', '.join(inputs)}, q_boundary, kv_boundary}}"
    source = f"""#include "quantize/qkv.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {config.head_dim};
  static constexpr int kColumns = {config.columns};
  static constexpr int kKeyTiles = {sharing.key_tiles};
  static constexpr int kKeyHeads = {sharing.key_heads};
  static constexpr int kQueryHeads = {sharing.query_heads};
  static constexpr int kThreads = {threads};
{constants}
  using In = {CUDA_TYPES[config.dtype]};
}};

extern "C" __global__ void __launch_bounds__({threads}, {blocks})
{ENTRY}(const void* q, const void* k, const void* v, long long q_batch, long long q_head, long long q_row,
        long long k_batch, long long k_head, long long k_row, long long v_batch, long long v_head, long long v_row,
        unsigned char* q_codes, unsigned char* k_codes, unsigned char* v_codes, float* q_scale, float* k_scale,
        float* v_scale, float* k_mean, int batch, int heads, int kv_heads, int q_len, int kv_len{more}) {{
  greenfast::quantize_qkv<Cfg>({{{{q, q_batch, q_head, q_row}}, {{k, k_batch, k_head, k_row}},
                                {{v, v_batch, v_head, v_row}}, q_codes, k_codes, v_codes, q_scale, k_scale,
                                v_scale, k_mean, batch, heads, kv_heads, q_len, kv_len, {samples}{chosen}}});
}}
"""
    return make_source(
        ENTRY,
        source,
        threads,
        dynamic_smem_bytes=0 if prologue is None else prologue.shared_bytes(config.head_dim, sharing),
    )


def launch(
    config: AttentionConfig,
    sizes: Sizes,
    strides: Strides = Strides(),  # noqa: B008
    *,
    sampled: bool = False,
    lengths: bool = False,
    gathered: bool = False,
    prologue: Prologue | None = None,
) -> Launch:
    """Return the launch: one block per work tile. Buffers are named as in the task fp8_attention, and k_mean.

    Q is not quantized if ``config.fuse_q_quant``. strides: of query, key and value; contiguous by default.
    sampled, lengths, gathered, prologue: as for ``kernel``; the buffer ``samples`` is (batch, kv_heads, MEAN_KEYS,
    columns), contiguous, ``kv_lengths`` int32 (batch,), ``kv_rows`` int32 (batch, kv_len).
    """
    queries = not config.fuse_q_quant
    q_len = sizes.q_len if queries else 0
    sharing = choose_sharing(config, sizes, prologue)
    kv_heads, runs = sizes.batch * sizes.kv_heads, -(-_tiles(sizes.kv_len) // sharing.key_tiles)
    blocks = kv_heads // sharing.key_heads * runs + kv_heads * _tiles(sizes.kv_len)
    if not (sharing.several_heads and prologue is not None and prologue.table_head):  # else the blocks of K take Q too
        blocks += sizes.batch * sizes.heads * _tiles(q_len) // sharing.query_heads
    of_keys = contiguous_strides(sizes.kv_heads, sizes.kv_len, config.columns)
    tensor_strides = (
        *(strides.query or contiguous_strides(sizes.heads, sizes.q_len, config.columns)),
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
            *(() if prologue is None else prologue.arguments(sizes)),
        ),
    )


def norms_kernel(config: AttentionConfig, *, centered: bool = False) -> KernelSource:
    """Render the kernel that computes the moments of the rows of Q and K over all heads.

    centered: of LayerNorm, else of RMSNorm.
    """
    source = f"""#include "quantize/row_norms.cuh"

struct Cfg {{
  static constexpr int kColumns = {config.columns};
  static constexpr bool kCentered = {str(centered).lower()}, kGathered = false, kParts = false;
  using In = {CUDA_TYPES[config.dtype]};
}};

extern "C" __global__ void __launch_bounds__({_NORM_THREADS})
compute_row_norms(const void* q, const void* k, long long q_batch, long long q_head, long long q_row,
                  long long k_batch, long long k_head, long long k_row, float* q_moments, float* k_moments, float eps,
                  int batch, int heads, int kv_heads, int q_len, int kv_len) {{
  greenfast::compute_row_norms<Cfg>({{{{q, q_batch, q_head, q_row}}, {{k, k_batch, k_head, k_row}}, q_moments,
                                     k_moments, eps, batch, heads, kv_heads, q_len, kv_len}});
}}
"""
    return make_source("compute_row_norms", source, _NORM_THREADS)


def norms_launch(config: AttentionConfig, sizes: Sizes, strides: Strides, eps: float) -> Launch:
    """Return the launch of ``norms_kernel``: a warp per row of Q, then of K."""
    rows = sizes.batch * (sizes.q_len + sizes.kv_len)
    tensor_strides = (
        *(strides.query or contiguous_strides(sizes.heads, sizes.q_len, config.columns)),
        *(strides.key or contiguous_strides(sizes.kv_heads, sizes.kv_len, config.columns)),
    )
    return Launch(
        grid=(-(-rows // (_NORM_THREADS // 32)), 1, 1),
        args=(
            *("q", "k"),
            *(np.int64(stride) for stride in tensor_strides),
            *("q_moments", "k_moments"),
            np.float32(eps),
            *(np.int32(n) for n in (sizes.batch, sizes.heads, sizes.kv_heads, sizes.q_len, sizes.kv_len)),
        ),
    )
