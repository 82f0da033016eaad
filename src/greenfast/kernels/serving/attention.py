"""Render and launch attention over a paged FP8 cache on Hopper, and the kernel that plans its work.

The CUDA sources are attention.cuh and plan.cuh in this folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from greenfast.kernels import CUDA_TYPES, make_source
from greenfast.kernels.attention.config import KEY_GROUP
from greenfast.kernels.serving.config import NARROW_ROWS, ServingConfig, few_rows
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch, Struct, TensorMap

ENTRY, PLAN_ENTRY = "paged_attention", "plan_attention"
TARGET = Target("sm_90a")
CHUNK = 512  # keys; O stays in the wgmma accumulators for so many
OPEN = 2**30  # no limit on this side of the window
#: Blocks with narrow row tiles that share a multiprocessor -> time of a block per row of a narrow tile, relative to a
#: wide one, for full and partial tiles alike; measured with 69 batches on an H100 (docs/performance-log.md).
_NARROW_ROW_TIME = {2: 2.6, 1: 1.5}
_HEADER = 8  # words of a plan before its arrays
_RANGE_WORDS, _TILE_WORDS = 12, 8  # WorkRange, RowTile
_PLAN_THREADS = 1024
#: Limit on the partial results of one launch with full row tiles, in bytes.
_MOST_PARTIAL_BYTES = 128 << 20


@dataclass(frozen=True)
class ServingSizes:
    """Sizes of a batch.

    tokens: query tokens of all sequences. max_q_len: an upper bound on the query tokens of a sequence; the rows of a
    longer sequence are dropped. pages: of the cache, ``page`` tokens each. table_entries: of a sequence in the block
    table. A plan does not depend on pages, page and table_entries, and on tokens only through the kind of row tiles.
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
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def max_tiles(self, rows: int) -> int:
        """Return an upper bound on the row tiles of one KV head."""
        return max(1, self.sequences * -(-self.max_q_len * self.group // rows))

    def expected_tiles(self, rows: int) -> int:
        """Return a tighter bound by the number of ``tokens``, because sequences may be shorter than max_q_len."""
        return min(self.max_tiles(rows), self.sequences + self.tokens * self.group // rows)

    def slot_rows(self, rows: int) -> int:
        """Return the rows of a partial result: an even number, so that each is aligned to 16 bytes."""
        return max(2, min(rows, -(-self.max_q_len * self.group // 2) * 2))

    def most_slots(self, config: ServingConfig, blocks: int) -> int:
        """Return the limit on chunks that a block may write as partial results, for any lengths."""
        slot_bytes = 4 * self.slot_rows(config.rows) * (config.head_dim + 2)
        return max(1, _MOST_PARTIAL_BYTES // (slot_bytes * blocks))

    def slots(self, config: ServingConfig, blocks: int) -> int:
        """Return the same limit for sequences of up to ``table_entries`` pages."""
        return max(1, min(-(-self.table_entries * self.page // CHUNK), self.most_slots(config, blocks)))


def row_tiles(head_dim: int, sizes: ServingSizes, multiprocessors: int) -> tuple[bool, int]:
    """Choose ``wide`` and ``few_rows`` of the ServingConfig for a batch. All choices give the same output bits.

    Wide row tiles read K and V least often. Narrow ones are faster if a batch has too few wide tiles to occupy all
    blocks, or if most of its tiles have few rows.
    """
    rows = sizes.max_q_len * sizes.group
    if rows <= NARROW_ROWS:
        return False, few_rows(rows)

    def rounds(config: ServingConfig) -> int:
        return -(-sizes.expected_tiles(config.rows) * sizes.kv_heads // grid_blocks(config, sizes, multiprocessors))

    wide, narrow = (ServingConfig(head_dim=head_dim, wide=wide) for wide in (True, False))
    of_narrow = rounds(narrow) * NARROW_ROWS * _NARROW_ROW_TIME[narrow.blocks]
    return of_narrow >= rounds(wide) * wide.rows, 0


def grid_blocks(config: ServingConfig, sizes: ServingSizes, multiprocessors: int) -> int:
    """Return the grid size: as many blocks as are resident.

    For decoding, slightly fewer if that makes it a multiple of the KV heads. Neighbouring blocks then read the same
    keys of all heads, adjacent in memory; decoding is bound by memory bandwidth.
    """
    resident = config.blocks * multiprocessors
    multiple = resident - resident % sizes.kv_heads
    return multiple if config.few_rows and 16 * multiple >= 15 * resident else resident


def parallel_heads(sizes: ServingSizes, blocks: int) -> int:
    """Return the number of neighbouring blocks that process the same keys, each for another KV head."""
    return math.gcd(sizes.kv_heads, blocks)


def plan_words(config: ServingConfig, sizes: ServingSizes, blocks: int) -> int:
    """Return the size of a plan in int32: an even number."""
    tiles = sizes.max_tiles(config.rows)
    words = _HEADER + blocks * _RANGE_WORDS + tiles * (_TILE_WORDS + sizes.kv_heads)
    return words + words % 2


def partial_words(config: ServingConfig, sizes: ServingSizes, blocks: int) -> int:
    """Return the size of the workspace for partial results, in float32."""
    return blocks * (sizes.slots(config, blocks) + 1) * sizes.slot_rows(config.rows) * (config.head_dim + 2)


_BATCH = "{q_begins, kv_lens, sequences, group, left, right, group_inverse}"


def plan_kernel(config: ServingConfig) -> KernelSource:
    """Render the kernel that makes the plan of a batch."""
    source = f"""#include "serving/plan.cuh"

extern "C" __global__ void __launch_bounds__({_PLAN_THREADS}, 1)
{PLAN_ENTRY}(const int* q_begins, const int* kv_lens, int* plan, int sequences, int group, int left, int right,
             unsigned group_inverse, int blocks, int kv_heads, int max_tiles, int parallel_heads, int slots) {{
  greenfast::serving::make_plan<{config.rows}, {config.sorted_keys}>({_BATCH}, plan, blocks, kv_heads, max_tiles,
                                                                     parallel_heads, slots);
}}
"""
    return make_source(PLAN_ENTRY, source, _PLAN_THREADS)


def plan_launch(
    config: ServingConfig, sizes: ServingSizes, window: tuple[int, int], multiprocessors: int = TARGET.multiprocessors
) -> Launch:
    """Return the launch of the plan, one block. window: (left, right), -1 for an open side; causal is right = 0."""
    blocks = grid_blocks(config, sizes, multiprocessors)
    return Launch(
        grid=(1, 1, 1),
        args=(
            *("cu_seqlens_q", "seqused_k", "plan"),
            *_batch(sizes, window),
            *_ints(blocks, sizes.kv_heads, sizes.max_tiles(config.rows), parallel_heads(sizes, blocks)),
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
  static constexpr int kWarpgroupsM = {config.warpgroups_m};
  static constexpr int kWarpgroupsN = {config.warpgroups_n};
  static constexpr int kDecodeRows = {config.few_rows};
  static constexpr int kStages = {config.stages};
  static constexpr int kBlocksPerSm = {config.blocks};
  static constexpr int kConsumerRegisters = {consumer};
  static constexpr int kProducerRegisters = {producer};
  static constexpr int kStagedQRows = {config.staged_q_rows};
  static constexpr bool kOverlap = {str(config.overlap).lower()};
  static constexpr bool kPingPong = {str(config.ping_pong).lower()};
  static constexpr bool kSharedTotals = {str(config.shared_totals).lower()};
  static constexpr int kSmemBytes = {config.smem_bytes};
  static constexpr bool kTokenScales = {str(config.token_scales).lower()};
  static constexpr bool kRowMajorV = {str(rows).lower()};
  static constexpr bool kSoftcap = {str(config.softcap).lower()};
  static constexpr bool kQuantizedQ = {str(config.query == "e4m3").lower()};
  using In = {CUDA_TYPES["float16" if config.query == "e4m3" else config.query]};
  using Out = {CUDA_TYPES[config.out]};
}};

extern "C" __global__ void __launch_bounds__({threads}, {config.blocks})
{ENTRY}({parameters}) {{
  greenfast::serving::attention<Cfg>(p, k, {"v" if rows else "k"});
}}
"""
    return make_source(ENTRY, source, threads, dynamic_smem_bytes=config.smem_bytes, requires=TARGET.name)


def _registers(config: ServingConfig) -> tuple[int, int]:
    """Return the registers of a consumer thread and of a producer thread."""
    if config.few_rows:
        return 184, 72
    two = (240, 24) if config.wide else (232, 40)  # both at head dim 256
    return {1: (216, 40), 2: two, 3: (160, 32)}[config.consumers]


@dataclass(frozen=True)
class ServingStrides:
    """Strides in elements.

    q: (token, head). k: (page, token of the page, head), multiples of 16. v: (page, head), or row-major like k.
    table: row stride of the block table. q_scale, k_scale, v_scale: (sequence, head), or (page, head) for token scales.
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
    """Return the launch. optional: the existing ones of "q_scale", "sinks", "lse". window: as in ``plan_launch``."""
    blocks = grid_blocks(config, sizes, multiprocessors)
    panel = min(config.head_dim, 128)
    scale = 1.0 / math.sqrt(config.head_dim) if softmax_scale is None else softmax_scale
    pointers = {name: name if name in optional else np.int64(0) for name in ("q_scale", "sinks", "lse")}
    batch = Struct(("cu_seqlens_q", "seqused_k", *_batch(sizes, window)))
    params = Struct(
        (
            *("q", pointers["q_scale"], "v_cache", "k_scale", "v_scale"),
            *(pointers["sinks"], "block_table", "plan", "partials", "out", pointers["lse"], batch),
            *_ints(sizes.kv_heads, sizes.tokens, sizes.pages, sizes.page, sizes.table_entries, strides.table),
            *_ints(*strides.q_scale, *strides.k_scale, *strides.v_scale),
            *_ints(sizes.slot_rows(config.rows), sizes.slots(config, blocks), sizes.max_tiles(config.rows)),
            *_ints(parallel_heads(sizes, blocks)),
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
        # The transpose in place needs both panels of 16 keys side by side.
        keys = KEY_GROUP if config.transposes_v and panel < config.head_dim else sizes.page
        maps.append(rows("v_cache", strides.v, keys))
    # Blocks wait for each other, so the launch must fail if they cannot all be resident: cooperative.
    return Launch(grid=(blocks, 1, 1), args=(params, *maps), early=True, cooperative=True)


def _batch(sizes: ServingSizes, window: tuple[int, int]) -> tuple[np.generic, ...]:
    """Return the scalar fields of the kernels' Batch."""
    left, right = (OPEN if side < 0 else min(side, OPEN) for side in window)
    inverse = np.uint32(0 if sizes.group == 1 else -(-(2**32) // sizes.group))
    return (*_ints(sizes.sequences, sizes.group, left, right), inverse)


def _ints(*numbers: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(n) for n in numbers)
