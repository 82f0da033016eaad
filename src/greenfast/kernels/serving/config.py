"""What is compiled into attention over a paged FP8 cache: row tiles, blocks on a multiprocessor, shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from greenfast.spec.errors import UsageError

HEAD_DIMS = (64, 128, 256)
VALUE_LAYOUTS = ("grouped", "rows")
FEW_ROWS = (8, 16)  # of a row tile of decoding
NARROW_ROWS = 64  # of a row tile that is not wide
TILE = 128  # keys
#: Sizes of the kernel's Work, Rows, Sums, and of two Pieces and their number.
_WORK_BYTES, _ROWS_BYTES, _SUMS_BYTES, _PIECES_BYTES = 52, 4 * (13 + 3 + 3 * 64), 4 * 4 * 64, 4 * (2 * (13 + 9) + 1)
#: Shared memory of a multiprocessor of Hopper, and what each block takes of it besides its own.
_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10


def few_rows(rows: int) -> int:
    """The row tile of decoding that has so many rows, or 0 where none has."""
    return next((n for n in FEW_ROWS if rows <= n), 0)


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """What is compiled into the kernel.

    head_dim: 64, 128 or 256. query: "float16", "bfloat16" or "e4m3". out: "float16" or "bfloat16". wide: row tiles of
    128 or 192 rows, for prefill, instead of 64. few_rows: row tiles of 8 or 16 rows instead, for decoding; 0 otherwise.
    token_scales: each token and head of K and V has a scale. softcap: whether there is one. value_layout: "grouped",
    or "rows" as K.
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
    def row_parts(self) -> int:
        """Warpgroups that do not share their rows: as many as their registers and sums let reside."""
        return (2 if self.head_dim == 256 else 3) if self.wide else 1

    @property
    def column_parts(self) -> int:
        """Warpgroups that share rows."""
        return 2 if self.head_dim == 256 and not self.wide and not self.few_rows else 1

    @property
    def overlap(self) -> bool:
        """Whether P V of a tile runs during the softmax of the next one. Three warpgroups at 128 lack the registers."""
        return not (self.wide and self.head_dim == 128)

    @property
    def ping_pong(self) -> bool:
        """Whether warpgroups start their products one after the other. At head dim 64 three are as fast without."""
        return self.wide and self.head_dim > 64

    @property
    def turns_values(self) -> bool:
        """Whether rows of V are turned in shared memory."""
        return self.value_layout == "rows" and not self.few_rows

    @property
    def shared_totals(self) -> bool:
        """Whether sums over chunks are in shared memory."""
        return self.wide

    @property
    def rows(self) -> int:
        """Rows of a row tile."""
        return self.few_rows or 64 * self.row_parts

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.row_parts * self.column_parts

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor: two have not enough stages at head dim 256."""
        return 2 if self.consumers == 1 and self.head_dim < 256 else 1

    @property
    def sorted_keys(self) -> int:
        """Row tiles are dealt in the order of how many runs of that many keys they have, longest first.

        At head dim 256, which waits for each tile of K and V, more row tiles of a sequence stay side by side instead.
        """
        return 2 * TILE if self.head_dim == 256 else TILE

    @property
    def raw_rows(self) -> int:
        """Rows of Q that are fetched ahead: as many as cost no stage. None of a wide row tile, as copies take long."""
        return self._raw_rows_and_stages()[0]

    @property
    def stages(self) -> int:
        """Tiles of K and V in flight: as many as let ``blocks`` blocks reside on a multiprocessor, and at most 8.

        Blocks wait for each other at their end, so all of a launch have to be resident.
        """
        return self._raw_rows_and_stages()[1]

    @property
    def smem_bytes(self) -> int:
        """The size of the kernel's Storage."""
        return self._smem_bytes(self.stages, self.raw_rows)

    def _raw_rows_and_stages(self) -> tuple[int, int]:
        if self.wide:
            return 0, self._stages(0)
        most = self._stages(0)
        return next((rows, most) for rows in (16, 8, 0) if self._stages(rows) == most)

    def _stages(self, raw_rows: int) -> int:
        most = _SHARED_BYTES // self.blocks - _RESERVED_BYTES
        return next((n for n in range(8, 0, -1) if self._smem_bytes(n, raw_rows) <= most), 0)

    def _smem_bytes(self, stages: int, raw_rows: int) -> int:
        queries = -(-self.rows * self.head_dim // 1024) * 1024
        tiles = queries + stages * 2 * TILE * self.head_dim
        raw = max(16, raw_rows * self.head_dim * (1 if self.query == "e4m3" else 2))
        factors = 12 * TILE * (max(stages, 2) if self.token_scales else 1)
        # At head dim 256 a thread holds four of its sums in registers.
        totals = self.consumers * 256 * (self.head_dim - 8 * (self.head_dim == 256)) if self.shared_totals else 16
        few = self.few_rows * (TILE + 4 * (TILE + 4) + 4 * 8)
        rest = raw + totals + factors + _WORK_BYTES + 8 + _ROWS_BYTES * self.row_parts
        rest = -(-(rest + _SUMS_BYTES * self.consumers) // 16) * 16 + few + _PIECES_BYTES
        rest = -(-rest // 8) * 8 + 32 * stages + 8 * max(stages, 2) + 16
        if self.turns_values and stages > 1:
            rest += 12 * stages  # of the rows' stages, which with one the consumers turn themselves
        if self.wide and self.value_layout == "grouped":
            rest += 8  # of the copies of values that are cleared
        return tiles + -(-rest // 1024) * 1024
