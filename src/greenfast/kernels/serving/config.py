"""The compile-time configuration of attention over a paged FP8 cache: row tiles, blocks per multiprocessor, smem."""

from __future__ import annotations

from dataclasses import dataclass

from greenfast.kernels import HEAD_DIMS
from greenfast.spec.errors import UsageError

VALUE_LAYOUTS = ("grouped", "rows")
FEW_ROWS = (8, 16)  # rows of a row tile for decoding
NARROW_ROWS = 64  # rows of a row tile that is not wide
TILE = 128  # keys
#: Sizes of the kernel's Work, Rows, RowStats, and of two SplitWorks with their count.
_WORK_BYTES, _ROWS_BYTES, _STATS_BYTES, _SPLITS_BYTES = 52, 4 * (13 + 3 + 3 * 64), 4 * 4 * 64, 4 * (2 * (13 + 9) + 1)
#: Shared memory of a Hopper multiprocessor, and the part that the driver reserves per block.
_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10


def few_rows(rows: int) -> int:
    """Return the smallest decode row tile with at least this many rows, or 0 if there is none."""
    return next((n for n in FEW_ROWS if rows <= n), 0)


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The options that are compiled into the kernel.

    head_dim: 64, 128 or 256. query: "float16", "bfloat16" or "e4m3". out: "float16" or "bfloat16". wide: row tiles of
    128 or 192 rows instead of 64, for prefill. few_rows: row tiles of 8 or 16 rows, for decoding; else 0.
    token_scales: K and V have a scale per token and head, else per head. softcap: whether scores are capped.
    value_layout: "grouped", or "rows" like K.
    """

    head_dim: int
    query: str = "bfloat16"
    out: str = "bfloat16"
    wide: bool = False
    few_rows: int = 0
    token_scales: bool = False
    softcap: bool = False
    value_layout: str = "grouped"

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise UsageError(f"head_dim: {self.head_dim}; allowed are {', '.join(map(str, HEAD_DIMS))}")
        if self.value_layout not in VALUE_LAYOUTS:
            raise UsageError(f"value_layout: {self.value_layout!r}; allowed are {', '.join(VALUE_LAYOUTS)}")

    @property
    def warpgroups_m(self) -> int:
        """Consumer warpgroups along M: as many as registers and shared memory allow."""
        return (2 if self.head_dim == 256 else 3) if self.wide else 1

    @property
    def warpgroups_n(self) -> int:
        """Consumer warpgroups that share rows and split the columns of O."""
        return 2 if self.head_dim == 256 and not self.wide and not self.few_rows else 1

    @property
    def overlap(self) -> bool:
        """Whether P V of a tile overlaps with the softmax of the next. Three warpgroups at 128 lack registers."""
        return not (self.wide and self.head_dim == 128)

    @property
    def ping_pong(self) -> bool:
        """Whether warpgroups issue their products in turn. At head dim 64 three are as fast without."""
        return self.wide and self.head_dim > 64

    @property
    def transposes_v(self) -> bool:
        """Whether row-major V is transposed in shared memory."""
        return self.value_layout == "rows" and not self.few_rows

    @property
    def shared_totals(self) -> bool:
        """Whether O summed over chunks is in shared memory."""
        return self.wide

    @property
    def rows(self) -> int:
        """Rows of a row tile."""
        return self.few_rows or 64 * self.warpgroups_m

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.warpgroups_m * self.warpgroups_n

    @property
    def blocks(self) -> int:
        """Resident blocks per multiprocessor. At head dim 256 two would have too few stages."""
        return 2 if self.consumers == 1 and self.head_dim < 256 else 1

    @property
    def sorted_keys(self) -> int:
        """Granularity, in keys, by which the plan sorts row tiles, longest first.

        Coarser at head dim 256, because its single stage exposes memory latency: row tiles of a sequence stay adjacent.
        """
        return 2 * TILE if self.head_dim == 256 else TILE

    @property
    def staged_q_rows(self) -> int:
        """Rows of Q staged in shared memory: as many as cost no stage. 0 for wide row tiles: the copies take long."""
        return self._staged_q_rows_and_stages()[0]

    @property
    def stages(self) -> int:
        """Stages of K and V: as many as let ``blocks`` blocks be resident on a multiprocessor, and at most 8.

        Blocks wait for each other at the end, so all blocks of a launch must be resident.
        """
        return self._staged_q_rows_and_stages()[1]

    @property
    def smem_bytes(self) -> int:
        """The size of the kernel's Storage."""
        return self._smem_bytes(self.stages, self.staged_q_rows)

    def _staged_q_rows_and_stages(self) -> tuple[int, int]:
        if self.wide:
            return 0, self._stages(0)
        max_stages = self._stages(0)
        return next((rows, max_stages) for rows in (16, 8, 0) if self._stages(rows) == max_stages)

    def _stages(self, staged_q_rows: int) -> int:
        max_bytes = _SHARED_BYTES // self.blocks - _RESERVED_BYTES
        return next((n for n in range(8, 0, -1) if self._smem_bytes(n, staged_q_rows) <= max_bytes), 0)

    def _smem_bytes(self, stages: int, staged_q_rows: int) -> int:
        queries = -(-self.rows * self.head_dim // 1024) * 1024
        tiles = queries + stages * 2 * TILE * self.head_dim
        raw = max(16, staged_q_rows * self.head_dim * (1 if self.query == "e4m3" else 2))
        factors = 12 * TILE * (max(stages, 2) if self.token_scales else 1)
        # At head dim 256 a thread keeps four of its totals in registers (kTotalsInRegs).
        totals = self.consumers * 256 * (self.head_dim - 8 * (self.head_dim == 256)) if self.shared_totals else 16
        few = self.few_rows * (TILE + 4 * (TILE + 4) + 4 * 8)
        rest = raw + totals + factors + _WORK_BYTES + 8 + _ROWS_BYTES * self.warpgroups_m
        rest = -(-(rest + _STATS_BYTES * self.consumers) // 16) * 16 + few + _SPLITS_BYTES
        rest = -(-rest // 8) * 8 + 32 * stages + 8 * max(stages, 2) + 16
        if self.transposes_v and stages > 1:
            rest += 12 * stages  # RowMajorStages
        if self.wide and self.value_layout == "grouped":
            rest += 8  # LoadedV
        return tiles + -(-rest // 1024) * 1024
