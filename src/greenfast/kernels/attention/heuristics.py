"""Tile sizes of the Hopper kernel: chosen by a cost model, or by rules from measurements."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention.config import AttentionConfig, Mask, Sizes
from greenfast.spec.errors import UsageError

ROWS = 64  # query rows of a warpgroup
_L2_BYTES = 32 * 2**20  # of an H100's 50 MiB, for the codes of K and V that are read at one time
_WIDEST = 256  # columns of the widest wgmma


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and pipeline options of the Hopper kernel.

    block_n: keys of a tile. consumers: consumer warpgroups, of 64 query rows each. stages: of K and of V.
    out_columns: columns of O per wgmma. ping_pong: warpgroups issue their products in turn. polynomials: of 16
    exponentials, the number computed on the FMA pipe. overlap: P V of a tile overlaps with the softmax of the next.
    two_levels: O is summed over tiles in float32, else by the tensor cores.
    """

    block_n: int
    consumers: int
    stages: int
    out_columns: int
    ping_pong: bool = False
    polynomials: int = 0
    overlap: bool = False
    two_levels: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of a block."""
        return ROWS * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a consumer and of the producer warpgroup; in sum at most the registers at launch."""
        return {1: (240, 40), 2: (240, 24), 4: (112, 32)}[self.consumers]

    def smem_bytes(self, config: AttentionConfig) -> int:
        """Return the size of the kernel's Storage; the kernel asserts that it is equal."""
        head_dim = config.head_dim
        ones = 0 if config.sum_unrounded_p or self.out_columns == _WIDEST else 8  # rows after V^T
        tiles = self.consumers * ROWS * head_dim + self.stages * self.block_n * (2 * head_dim + ones)
        size = -(-(tiles + 16 + 8 * (2 * self.consumers + 4 * self.stages)) // 1024) * 1024
        size += 1024 if config.scheduled else 0  # the queue of work tiles
        own_rows = config.fuse_q_quant and not stages_queries(head_dim)
        return size + (self.block_m * head_dim * 2 if own_rows else 0)


def stages_queries(head_dim: int) -> bool:
    """Return whether an unquantized Q is loaded through the stages of K and V, for lack of shared memory."""
    return head_dim == HEAD_DIMS[-1]


def read_batch_invariant(value: str | None) -> bool:
    """Return whether GREENFAST_BATCH_INVARIANT is "1". Raises UsageError unless it is unset, empty, "0" or "1"."""
    if value not in (None, "", "0", "1"):
        raise UsageError(f"GREENFAST_BATCH_INVARIANT={value!r}: allowed are 0, and 1 (fixed tiles)")
    return value == "1"


#: The tiles depend on the options alone: a sequence has the same bits in any batch (docs/masks.md). Plans are kept for
#: the life of a process, so it is read once.
BATCH_INVARIANT = read_batch_invariant(os.environ.get("GREENFAST_BATCH_INVARIANT"))


#: Up to this number of keys, accumulation in the tensor cores has the error of float32 (docs/performance-log.md).
#: Promotion to float32 is free at head dims 64 and 128; at 256 it takes the registers that `overlap` needs.
ONE_LEVEL_KEYS = 16384

#: Consumer warpgroups of a block -> measured time of a block, relative to one warpgroup.
_COST = {1: 1.0, 2: 1.42, 4: 2.75}


def _candidates(config: AttentionConfig, kv_len: int) -> tuple[Tiling, ...]:
    """Return the fastest tiles for each number of warpgroups (docs/performance-log.md).

    Raises UsageError for a head dim that the kernel does not support.
    """
    if config.head_dim not in HEAD_DIMS:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise UsageError(f"head_dim D={config.head_dim}: the Hopper kernel has tiles for {allowed}")
    causal, head_dim = config.causal, config.head_dim
    candidates: tuple[Tiling, ...]
    if head_dim == 64:
        # With block scales of V, a tile is a block. With a mask and block scales, or LSE, four warpgroups spill up to
        # seven registers, but take 0.87 of the time of three without spills.
        wide = (
            Tiling(128, 2, 4, 64, True, 12, overlap=True)
            if config.value_scales == "block"
            else Tiling(256, 2, 3, 64, True, 12)
        )
        four = Tiling(128, 4, 4, 64, not causal, 8 if causal else 4)
        candidates = (Tiling(128, 1, 4, 64, polynomials=12, overlap=True), wide, four)
    elif head_dim == 128:
        candidates = tuple(Tiling(128, n, 4, 128, n > 1 and not causal, 8, overlap=True) for n in (1, 2))
    elif kv_len <= ONE_LEVEL_KEYS:
        candidates = tuple(Tiling(128, n, 3, 256, overlap=True, two_levels=False) for n in (1, 2))
    else:
        candidates = (Tiling(128, 1, 2, 128), Tiling(128, 2, 2, 128, True))
    if config.listed:  # of 128 rows
        candidates = tuple(t for t in candidates if t.consumers == 2)
    if config.sum_unrounded_p:  # exp2 in half is not accurate enough for exact sums
        candidates = tuple(replace(t, polynomials=0) for t in candidates)
    return candidates


def tiling(config: AttentionConfig, sizes: Sizes, multiprocessors: int) -> tuple[Tiling, str]:
    """Return the tiles for an attention on a GPU with this number of multiprocessors, and the reason.

    They come from the cost model, or from a rule if other tiles were measured to be faster. With BATCH_INVARIANT they
    come from the options alone. Raises UsageError for a head dim that the kernel does not support.
    """
    if BATCH_INVARIANT:
        return _fixed_tiling(config), "GREENFAST_BATCH_INVARIANT fixes the tiles"
    chosen, why = planned(config, sizes, multiprocessors)
    rule = _rule(config, sizes.kv_len, chosen)
    if rule is None:
        return chosen, why
    return rule.tiles, f"{why}; {rule.quote}"


def planned(config: AttentionConfig, sizes: Sizes, multiprocessors: int) -> tuple[Tiling, str]:
    """Return the tiles of the cost model, without measured rules, and the reason."""
    candidates = _candidates(config, sizes.kv_len)

    def cost(t: Tiling) -> float:
        heads = sizes.batch * sizes.heads
        waves = -(-sizes.q_len // t.block_m) * heads / multiprocessors
        # Few waves are rounded up. With many waves, a partial last block costs little.
        return _COST[t.consumers] * (
            math.ceil(waves) if waves <= 4 else sizes.q_len / t.block_m * heads / multiprocessors
        )

    chosen = min(candidates, key=cost)
    return chosen, (
        f"of {', '.join(str(t.consumers) for t in candidates)} warpgroups a block, {chosen.consumers} should take the "
        f"least time for {sizes.batch * sizes.heads} heads of {sizes.q_len} queries on {multiprocessors} "
        "multiprocessors"
    )


def _fixed_tiling(config: AttentionConfig) -> Tiling:
    """Return the tiles with the least time per row on a full GPU, and with float32 sums over any number of keys.

    The lengths of packed sequences are on the device, so the number of keys must not choose.
    """
    return min(_candidates(config, ONE_LEVEL_KEYS + 1), key=lambda t: _COST[t.consumers] / t.consumers)


@dataclass(frozen=True)
class Rule:
    """Tiles that were measured to be faster than the cost model's.

    key: head dim, causal, scales of Q, K and V, and the format. keys: minimum kv_len, and maximum kv_len (exclusive).
    instead_of: the tiles of the cost model. quote: the measurement in words.
    """

    key: tuple[Any, ...]
    keys: tuple[int, int | None]
    instead_of: Tiling
    tiles: Tiling
    quote: str


@cache
def rules() -> tuple[Rule, ...]:
    """Load the rules of tilings.json. scripts/update_results.py makes it from records of hopper_tilings.py."""
    table = json.loads(files(__package__).joinpath("tilings.json").read_text(encoding="utf-8"))
    return tuple(
        Rule(
            key=tuple(rule["of"]),
            keys=(rule["keys"][0], rule["keys"][1]),
            instead_of=Tiling(**rule["instead_of"]),
            tiles=Tiling(**rule["tiles"]),
            quote=(
                f"tiles that were measured {rule['faster'][0]:.3f} to {rule['faster'][1]:.3f} times as fast "
                f"there ({table['device']}, {rule['record']})"
            ),
        )
        for rule in table["rules"]
    )


def _rule(config: AttentionConfig, kv_len: int, chosen: Tiling) -> Rule | None:
    if config.sum_unrounded_p or config.softcap or config.listed:  # not measured
        return None
    key = (config.head_dim, config.causal, config.query_scales, config.key_scales, config.value_scales, config.format)
    for rule in rules():
        first, stop = rule.keys
        if (rule.key, rule.instead_of) == (key, chosen) and first <= kv_len and (stop is None or kv_len < stop):
            return rule
    return None


@lru_cache(maxsize=1024)
def head_swizzle(mask: Mask, sizes: Sizes, block_m: int, block_n: int, multiprocessors: int) -> int:
    """Return the heads that are scheduled together: the fewest with causal work balanced almost as well as any.

    Few heads keep K and V in L2. Without a mask all work tiles are equal, and one head is enough.
    """
    if mask == Mask.NONE:
        return 1
    row_blocks, heads = -(-sizes.q_len // block_m), sizes.batch * sizes.heads
    ends = np.minimum(np.arange(row_blocks, 0, -1) * block_m, sizes.q_len) + sizes.shift(mask)
    # + 1 for the prologue and epilogue of a work tile
    tiles = np.clip(-(-np.minimum(ends, sizes.kv_len) // block_n), 0, None) + 1.0
    candidates = [2**n for n in range(heads.bit_length()) if 2**n < heads] + [heads]
    evenness = [_evenness(tiles, heads, width, multiprocessors) for width in candidates]
    chosen: int = next(width for width, even in zip(candidates, evenness, strict=True) if even >= 0.95 * max(evenness))
    return chosen


def scheduled_head_swizzle(config: AttentionConfig, sizes: Sizes) -> int:
    """Return the heads of a schedule's tiles that run together: as many as keep their K and V in L2."""
    in_l2 = _L2_BYTES // max(1, 2 * sizes.kv_len * config.head_dim)
    return min(sizes.heads, sizes.heads // sizes.kv_heads * max(1, in_l2))


def _evenness(tiles: np.ndarray, heads: int, width: int, multiprocessors: int) -> float:
    """Return mean / maximum load of a block, for the alternating static schedule of ``width`` heads at a time."""
    whole_groups, rest = divmod(heads, width)
    loads = np.concatenate([np.tile(np.repeat(tiles, width), whole_groups), np.repeat(tiles, rest)])
    rounds = np.zeros((-(-len(loads) // multiprocessors), multiprocessors))
    rounds.ravel()[: len(loads)] = loads
    rounds[1::2] = rounds[1::2, ::-1]
    totals = rounds.sum(axis=0)
    return float(totals.mean() / totals.max())
