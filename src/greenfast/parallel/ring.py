"""Ring attention: codes of K and V go round the ranks, the next ones while those that are here are attended to.

After Liu et al., "Ring Attention with Blockwise Transformers" (2023); what travels is 8-bit codes and their scales.
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
from greenfast.parallel.blocks import LseMerge, QuantizedKV
from greenfast.parallel.group import RankGroup
from greenfast.parallel.layout import ShardLayout


def gather_samples(group: RankGroup, layout: ShardLayout, key: Tensor) -> Tensor:
    """The keys by which the mean of all keys is estimated, (B, HK, 32, D): those of one GPU, of all ranks."""
    batch, heads, length, head_dim = key.shape
    samples = key.new_zeros(batch, heads, MEAN_KEYS, head_dim)
    indices, rows = _find_local_samples(layout, group.rank, length, key.device)
    if len(indices):
        samples.index_copy_(2, indices, key.index_select(2, rows))
    return group.sum_of_bits(samples)


@lru_cache(maxsize=256)
def _find_local_samples(layout: ShardLayout, rank: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of the samples are a rank's, and where its rows are; kept, as copies to a GPU take longer than they do."""
    owners = [layout.row_of(position, length) for position in sample_places(length * layout.size)]
    mine = [(i, row) for i, (owner, row) in enumerate(owners) if owner == rank]
    indices, rows = synchronized(torch.tensor(mine, dtype=torch.long).view(-1, 2).T.contiguous().to(device))
    return indices, rows


def build_ring_steps(rank: int, layout: ShardLayout, length: int, causal: bool) -> list[tuple[int, int, int] | None]:
    """What a rank computes while it has the keys of rank ``rank - turn``: (first query row, count of keys, masked).

    None where its queries attend to none of them. length: rows of each rank.
    """
    steps: list[tuple[int, int, int] | None] = [(0, length, int(causal))]
    for turn in range(1, layout.size):
        later = turn > rank  # those keys are of a rank behind this one
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
    """The output of this rank's queries over all keys, contiguous, and their log-sum-exp, float32 (B, H, S)."""
    samples = gather_samples(group, layout, key)
    here, there = (QuantizedKV.like(key, precision) for _ in range(2))
    mean = blocks.quantize_keys(key, value, samples, precision, here)
    plan = build_ring_steps(group.rank, layout, key.shape[2], bool(causal))
    merged = LseMerge(of=sum(turn is not None for turn in plan))
    for number, turn in enumerate(plan):
        with group.exchanging(here.buffer, there.buffer) if number + 1 < group.size else nullcontext():
            if turn is not None:
                first, count, masked = turn
                result = blocks.attend(query[:, :, first:], here, count, precision, masked, scale, with_lse)
                merged.add(*result, first)
        here, there = there, here
    lse = merged.lse
    if with_lse:
        lse = lse + torch_ops.MEAN_SCORES(query, mean, True) * scale
    return merged.out, lse
