"""Attention over a paged FP8 cache on Hopper, and the plan of its work: this folder's attention.cuh and plan.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from greenfast.kernels import CUDA_TYPES, KERNEL_DIR
from greenfast.kernels.attention.config import KEY_GROUP
from greenfast.kernels.serving.config import NARROW_ROWS, ServingConfig, few_rows
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch, Struct, TensorMap

ENTRY, PLAN_ENTRY = "paged_attention", "plan_attention"
TARGET = Target("sm_90a")
CHUNK = 512  # keys whose sum stays in the tensor cores' accumulators
OPEN = 2**30  # a side of the window that is open
#: How long a block takes for a row of a narrow tile, if it takes 1 for a row of a wide one, whether tiles are full or
#: not: of 69 batches on an H100 (docs/performance-log.md). Up to head dim 128 two blocks of narrow tiles share a
#: multiprocessor.
_NARROW_ROW_TIME = {64: 2.6, 128: 2.6, 256: 1.5}
_HEADER = 8  # words of a plan before its arrays
_SHARE_WORDS, _TILE_WORDS = 12, 8
_PLAN_THREADS = 1024
#: Partial results that the blocks of one launch may leave, in bytes, where row tiles are full.
_MOST_PARTIAL_BYTES = 128 << 20


@dataclass(frozen=True)
class ServingSizes:
    """Sizes of a batch. tokens: query tokens of all sequences. max_q_len: at least the query tokens of any sequence.

    Of a sequence with more, rows are left out, and partial results hold no more of them than they have room for.
    pages: of the cache, of ``page`` tokens each. table_entries: of a sequence in the block table. A plan does not
    depend on pages, page and table_entries, and on tokens only as its row tiles do.
    """

    sequences: int
    tokens: int
    max_q_len: int
    heads: int
    kv_heads: int
    pages: int
    page: int
    table_entries: int

    @property
    def group(self) -> int:
        """Query heads that share a head of K and V."""
        return self.heads // self.kv_heads

    def most_tiles(self, rows: int) -> int:
        """Row tiles of one head of K and V, at most."""
        return max(1, self.sequences * -(-self.max_q_len * self.group // rows))

    def expected_tiles(self, rows: int) -> int:
        """The same where the batch has ``tokens``, as other sequences may be shorter than the longest."""
        return min(self.most_tiles(rows), self.sequences + self.tokens * self.group // rows)

    def slot_rows(self, rows: int) -> int:
        """Rows of a partial result: an even number, so that each begins at 16 bytes."""
        return max(2, min(rows, -(-self.max_q_len * self.group // 2) * 2))

    def most_slots(self, config: ServingConfig, blocks: int) -> int:
        """Chunks that a block may leave as partial results, whatever the lengths."""
        slot_bytes = 4 * self.slot_rows(config.rows) * (config.head_dim + 2)
        return max(1, _MOST_PARTIAL_BYTES // (slot_bytes * blocks))

    def slots(self, config: ServingConfig, blocks: int) -> int:
        """Those that sequences of up to ``table_entries`` pages may make it leave."""
        return max(1, min(-(-self.table_entries * self.page // CHUNK), self.most_slots(config, blocks)))


def row_tiles(head_dim: int, sizes: ServingSizes, multiprocessors: int) -> tuple[bool, int]:
    """``wide`` and ``few_rows`` of the ServingConfig for a batch; the bits of the output are the same with all.

    Wide tiles read keys least often. Where a batch has too few to keep all blocks at work, or few rows for most of
    them, narrow ones take less time.
    """
    rows = sizes.max_q_len * sizes.group
    if rows <= NARROW_ROWS:
        return False, few_rows(rows)

    def rounds(config: ServingConfig) -> int:
        return -(-sizes.expected_tiles(config.rows) * sizes.kv_heads // grid_blocks(config, sizes, multiprocessors))

    wide, narrow = (ServingConfig(head_dim=head_dim, wide=wide) for wide in (True, False))
    of_narrow = rounds(narrow) * NARROW_ROWS * _NARROW_ROW_TIME[head_dim]
    return of_narrow >= rounds(wide) * wide.rows, 0


def grid_blocks(config: ServingConfig, sizes: ServingSizes, multiprocessors: int) -> int:
    """Blocks of a launch: as many as reside.

    Or for decoding a few less, a multiple of the heads of K and V: neighbouring blocks then have the same keys of all
    heads, which lie side by side in memory, and memory is what they all wait for.
    """
    most = config.blocks * multiprocessors
    even = most - most % sizes.kv_heads
    return even if config.few_rows and 16 * even >= 15 * most else most


def abreast(sizes: ServingSizes, blocks: int) -> int:
    """Neighbouring blocks that work on the same keys at a time, each on its own heads of K and V."""
    return math.gcd(sizes.kv_heads, blocks)


def plan_words(config: ServingConfig, sizes: ServingSizes, blocks: int) -> int:
    """Size of a plan, in int32: an even number."""
    most = sizes.most_tiles(config.rows)
    words = _HEADER + blocks * _SHARE_WORDS + most * (_TILE_WORDS + sizes.kv_heads)
    return words + words % 2


def partial_words(config: ServingConfig, sizes: ServingSizes, blocks: int) -> int:
    """Size of the memory for partial results, in float32."""
    return blocks * (sizes.slots(config, blocks) + 1) * sizes.slot_rows(config.rows) * (config.head_dim + 2)


_BATCH = "{q_begins, kv_lens, sequences, group, left, right, group_inverse}"


def plan_kernel(config: ServingConfig) -> KernelSource:
    """Render the kernel that makes the plan of a batch."""
    source = f"""#include "serving/plan.cuh"

extern "C" __global__ void __launch_bounds__({_PLAN_THREADS}, 1)
{PLAN_ENTRY}(const int* q_begins, const int* kv_lens, int* plan, int sequences, int group, int left, int right,
             unsigned group_inverse, int blocks, int kv_heads, int most_tiles, int abreast, int slots) {{
  greenfast::serving::make_plan<{config.rows}, {config.sorted_keys}>({_BATCH}, plan, blocks, kv_heads, most_tiles,
                                                                     abreast, slots);
}}
"""
    return KernelSource(
        entry=PLAN_ENTRY,
        source=source,
        name=f"{PLAN_ENTRY}.cu",
        include_dirs=(KERNEL_DIR,),
        block=(_PLAN_THREADS, 1, 1),
    )


def plan_launch(
    config: ServingConfig, sizes: ServingSizes, window: tuple[int, int], multiprocessors: int = TARGET.multiprocessors
) -> Launch:
    """One block. window: (left, right), -1 for an open side; causal is right = 0."""
    blocks = grid_blocks(config, sizes, multiprocessors)
    return Launch(
        grid=(1, 1, 1),
        args=(
            *("cu_seqlens_q", "seqused_k", "plan"),
            *_batch(sizes, window),
            *_ints(blocks, sizes.kv_heads, sizes.most_tiles(config.rows), abreast(sizes, blocks)),
            *_ints(sizes.most_slots(config, blocks)),
        ),
    )


def kernel(config: ServingConfig) -> KernelSource:
    """Render the attention kernel."""
    threads, rows = 128 * (config.consumers + 1), config.value_layout == "rows"
    consumer, producer = _registers(config)
    maps = [f"const __grid_constant__ greenfast::ptx::TensorMap {name}" for name in ("k", "v")[: 1 + rows]]
    parameters = ",\n        ".join(("const __grid_constant__ greenfast::serving::AttentionParams p", *maps))
    source = f"""#include "serving/attention.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {config.head_dim};
  static constexpr int kRowParts = {config.row_parts};
  static constexpr int kColumnParts = {config.column_parts};
  static constexpr int kFewRows = {config.few_rows};
  static constexpr int kStages = {config.stages};
  static constexpr int kBlocks = {config.blocks};
  static constexpr int kConsumerRegisters = {consumer};
  static constexpr int kProducerRegisters = {producer};
  static constexpr int kRawRows = {config.raw_rows};
  static constexpr bool kOverlap = {str(config.overlap).lower()};
  static constexpr bool kPingPong = {str(config.ping_pong).lower()};
  static constexpr bool kSharedTotals = {str(config.shared_totals).lower()};
  static constexpr int kSmemBytes = {config.smem_bytes};
  static constexpr bool kTokenScales = {str(config.token_scales).lower()};
  static constexpr bool kRowValues = {str(rows).lower()};
  static constexpr bool kSoftcap = {str(config.softcap).lower()};
  static constexpr bool kCodedQueries = {str(config.query == "e4m3").lower()};
  using In = {CUDA_TYPES["float16" if config.query == "e4m3" else config.query]};
  using Out = {CUDA_TYPES[config.out]};
}};

extern "C" __global__ void __launch_bounds__({threads}, {config.blocks})
{ENTRY}({parameters}) {{
  greenfast::serving::attention<Cfg>(p, k, {"v" if rows else "k"});
}}
"""
    return KernelSource(
        entry=ENTRY,
        source=source,
        name=f"{ENTRY}.cu",
        include_dirs=(KERNEL_DIR,),
        block=(threads, 1, 1),
        dynamic_smem_bytes=config.smem_bytes,
        requires=TARGET.name,
    )


def _registers(config: ServingConfig) -> tuple[int, int]:
    """Of a thread that computes and of one of the producer."""
    if config.few_rows:
        return 184, 72
    two = (240, 24) if config.wide else (232, 40)  # both at head dim 256
    return {1: (216, 40), 2: two, 3: (160, 32)}[config.consumers]


@dataclass(frozen=True)
class ServingStrides:
    """Strides in elements. q: of tokens and heads. k: of pages, tokens of a page, and heads; multiples of 16.

    v: of pages and heads, in rows as k. table: of the block table's sequences. q_scale, k_scale, v_scale: of sequences
    and heads, or where tokens have scales of pages and heads.
    """

    q: tuple[int, int]
    k: tuple[int, int, int]
    v: tuple[int, ...]
    table: int
    q_scale: tuple[int, int] = (0, 0)
    k_scale: tuple[int, int] = (0, 0)
    v_scale: tuple[int, int] = (0, 0)


def launch(
    config: ServingConfig,
    sizes: ServingSizes,
    strides: ServingStrides,
    window: tuple[int, int],
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    optional: frozenset[str] = frozenset(),
    multiprocessors: int = TARGET.multiprocessors,
) -> Launch:
    """optional: which of the buffers "q_scale", "sinks" and "lse" there are. window: as in ``plan_launch``."""
    blocks = grid_blocks(config, sizes, multiprocessors)
    panel = min(config.head_dim, 128)
    scale = 1.0 / math.sqrt(config.head_dim) if softmax_scale is None else softmax_scale
    given = {name: name if name in optional else np.int64(0) for name in ("q_scale", "sinks", "lse")}
    batch = Struct(("cu_seqlens_q", "seqused_k", *_batch(sizes, window)))
    params = Struct(
        (
            *("q", given["q_scale"], "v_cache", "k_scale", "v_scale"),
            *(given["sinks"], "block_table", "plan", "partials", "out", given["lse"], batch),
            *_ints(sizes.kv_heads, sizes.tokens, sizes.pages, sizes.page, sizes.table_entries, strides.table),
            *_ints(*strides.q_scale, *strides.k_scale, *strides.v_scale),
            *_ints(sizes.slot_rows(config.rows), sizes.slots(config, blocks), sizes.most_tiles(config.rows)),
            *_ints(abreast(sizes, blocks)),
            *(np.int64(stride) for stride in (*strides.q, strides.v[0], strides.v[-1])),
            *(np.float32(scale), np.float32(softcap)),
        )
    )

    def rows(buffer: str, strides: tuple[int, ...], keys: int) -> TensorMap:
        of_page, of_token, of_head = strides
        dims = (sizes.pages, sizes.kv_heads, sizes.page, config.head_dim)
        return TensorMap(buffer, "uint8", dims, (of_page, of_head, of_token, 1), (1, 1, keys, panel), panel)

    maps = [rows("k_cache", strides.k, sizes.page)]
    if config.value_layout == "rows":
        # Where rows of 16 keys are turned in place, both panels of them lie side by side.
        keys = KEY_GROUP if config.turns_values and panel < config.head_dim else sizes.page
        maps.append(rows("v_cache", strides.v, keys))
    # Blocks wait for each other: a launch that the GPU cannot hold whole is to be refused, and none to hold half of it.
    return Launch(grid=(blocks, 1, 1), args=(params, *maps), early=True, cooperative=True)


def _batch(sizes: ServingSizes, window: tuple[int, int]) -> tuple[np.generic, ...]:
    """The numbers of the kernels' Batch."""
    left, right = (OPEN if side < 0 else min(side, OPEN) for side in window)
    inverse = np.uint32(0 if sizes.group == 1 else -(-(2**32) // sizes.group))
    return (*_ints(sizes.sequences, sizes.group, left, right), inverse)


def _ints(*numbers: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(n) for n in numbers)
