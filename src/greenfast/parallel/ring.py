"""Ring attention: ranks pass codes of K and V around a ring, and overlap each exchange with attention.

After Liu et al., "Ring Attention with Blockwise Transformers" (2023). The ranks exchange 8-bit codes and their scales.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from greenfast.kernels.quantize.qkv import MEAN_KEYS, sample_places
from greenfast.ops import torch_ops
from greenfast.ops.layout import synchronized
from greenfast.parallel import blocks
from greenfast.parallel.blocks import LseMerge
from greenfast.parallel.group import RankGroup
from greenfast.parallel.layout import ShardLayout
from greenfast.parallel.quantized_kv import QuantizedKV


def gather_samples(group: RankGroup, layout: ShardLayout, key: Tensor) -> Tensor:
    """Return the keys for the estimate of the mean, (B, HK, 32, D). All ranks get the samples of the whole sequence."""
    batch, heads, length, head_dim = key.shape
    samples = key.new_zeros(batch, heads, MEAN_KEYS, head_dim)
    indices, rows = _find_local_samples(layout, group.rank, length, key.device)
    if len(indices):
        samples.index_copy_(2, indices, key.index_select(2, rows))
    return group.all_reduce_bits(samples)


@lru_cache(maxsize=256)
def _find_local_samples(layout: ShardLayout, rank: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of the samples on this rank, and their rows. Cached, because copies to a GPU are slow."""
    owners = [layout.locate_row(position, length) for position in sample_places(length * layout.size)]
    mine = [(i, row) for i, (owner, row) in enumerate(owners) if owner == rank]
    indices, rows = synchronized(torch.tensor(mine, dtype=torch.long).view(-1, 2).T.contiguous().to(device))
    return indices, rows


def build_ring_steps(rank: int, layout: ShardLayout, length: int, causal: bool) -> list[tuple[int, int, int] | None]:
    """Return the work of a rank for the keys of rank ``rank - step``: (first query row, count of keys, masked).

    A step is None if its queries attend to none of its keys. length: rows of each rank.
    """
    steps: list[tuple[int, int, int] | None] = [(0, length, int(causal))]
    for step in range(1, layout.size):
        later = step > rank  # these keys follow this rank's rows
        if not causal:
            steps.append((0, length, 0))
        elif layout.balanced:
            half = length // 2
            steps.append((half, length, 0) if later else (0, half, 0))
        else:
            steps.append(None if later else (0, length, 0))
    return steps


def forward(
    group: RankGroup, layout: ShardLayout, query: Tensor, key: Tensor, value: Tensor, precision: str, causal: int,
    scale: float, with_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output of this rank's queries over all keys, contiguous, and their log-sum-exp, float32 (B, H, S)."""
    samples = gather_samples(group, layout, key)
    here, there = (QuantizedKV.allocate_like(key, precision) for _ in range(2))
    mean = blocks.quantize_keys(key, value, samples, precision, here)
    plan = build_ring_steps(group.rank, layout, key.shape[2], bool(causal))
    merged = LseMerge(count=sum(step is not None for step in plan))
    for number, step in enumerate(plan):
        with group.exchange(here.buffer, there.buffer) if number + 1 < group.size else nullcontext():
            if step is not None:
                first, count, masked = step
                result = blocks.attend(query[:, :, first:], here, count, precision, masked, scale, with_lse)
                merged.add(*result, first)
        here, there = there, here
    lse = merged.lse
    if with_lse:
        lse = lse + torch_ops.MEAN_SCORES(query, mean, True) * scale
    return merged.out, lse
