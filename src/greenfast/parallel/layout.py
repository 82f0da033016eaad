"""The distribution of the rows of a sequence over ranks.

Balanced, as torch.distributed.tensor.experimental.context_parallel shards it: in 2 * size chunks. Rank r has chunk r
and then chunk 2 * size - 1 - r, so that a causal mask gives all ranks the same work (Llama 3, Llama Team 2024, section
3.3.2). Otherwise rank r has the r-th of ``size`` chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a sequence on ``size`` ranks."""

    size: int
    balanced: bool

    @property
    def parts(self) -> int:
        """Chunks per rank."""
        return 2 if self.balanced else 1

    def get_chunks(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of the whole sequence on a rank, in its order."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def get_chunk_order(self) -> list[int]:
        """Return, for each chunk of the sequence, its index among the chunks of all ranks in rank order."""
        order = [chunk for rank in range(self.size) for chunk in self.get_chunks(rank)]
        return [order.index(chunk) for chunk in range(len(order))]

    def locate_row(self, position: int, length: int) -> tuple[int, int]:
        """Return the rank, and the row on it, of a position of the sequence. length: rows per rank."""
        chunk = length // self.parts
        index = self.get_chunk_order()[position // chunk]
        return index // self.parts, index % self.parts * chunk + position % chunk

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's rows of a whole tensor. Raises ValueError for a length that the layout does not divide."""
        count = self.size * self.parts
        if x.shape[dim] % count:
            raise ValueError(
                f"dim {dim}: {x.shape[dim]} rows; a multiple of {count} is needed, {self.parts} chunks for each of "
                f"{self.size} ranks. Pad the sequence"
            )
        chunks = x.chunk(count, dim) if x.shape[dim] else (x,) * count
        return torch.cat([chunks[i] for i in self.get_chunks(rank)], dim)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor from the shards of all ranks. Raises ValueError for rows that are no whole chunks."""
        rows = shards[0].shape[dim]
        if rows % self.parts:
            raise ValueError(
                f"dim {dim}: {rows} rows of a rank; with load_balance two chunks of the same length are needed"
            )
        chunks = [part for shard in shards for part in shard.chunk(self.parts, dim)]
        return torch.cat([chunks[index] for index in self.get_chunk_order()], dim)
