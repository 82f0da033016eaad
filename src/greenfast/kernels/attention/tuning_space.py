"""The Hopper kernel with tiles set by toggles, for searches; ``family`` chooses tiles by heuristics and rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenfast.kernels.attention import hopper
from greenfast.kernels.attention.config import ROW_BLOCK, AttentionConfig, read_dims
from greenfast.kernels.attention.heuristics import Tiling
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.limits import most_shared

#: Toggle -> the field of Tiling that it sets.
TOGGLES = {
    "BLOCK_N": "block_n",
    "CONSUMERS": "consumers",
    "STAGES": "stages",
    "OUT_COLUMNS": "out_columns",
    "PING_PONG": "ping_pong",
    "POLYNOMIALS": "polynomials",
    "OVERLAP": "overlap",
    "TWO_LEVELS": "two_levels",
}
_FLAGS = ("ping_pong", "overlap", "two_levels")


def parse_tiles(toggles: Mapping[str, int], config: AttentionConfig) -> Tiling:
    """Return the tiles that toggles set. Raises UsageError, naming the rule, for tiles that the kernel rejects."""
    fields: dict[str, Any] = {field: toggles[name] for name, field in TOGGLES.items()}
    tiles = Tiling(**{field: bool(value) if field in _FLAGS else value for field, value in fields.items()})
    limit = most_shared(hopper.TARGET)
    broken = [
        (tiles.block_n < 128 or tiles.block_n % 128 != 0, "BLOCK_N is no multiple of 128"),
        (tiles.consumers not in (1, 2, 4), "CONSUMERS is not 1, 2 or 4"),
        (config.head_dim % tiles.out_columns != 0, f"OUT_COLUMNS does not divide head dim {config.head_dim}"),
        (tiles.overlap and tiles.out_columns != config.head_dim, "OVERLAP=1 needs OUT_COLUMNS of a whole row of O"),
        (not tiles.overlap and not tiles.two_levels, "TWO_LEVELS=0 needs OVERLAP=1"),
        (tiles.ping_pong and tiles.consumers == 1, "PING_PONG=1 needs two or more CONSUMERS"),
        (
            tiles.polynomials > 0 and (config.sum_unrounded_p or tiles.out_columns == 256),
            "POLYNOMIALS above 0 exclude OUT_COLUMNS=256 and an exact log-sum-exp",
        ),
        (
            tiles.block_n != ROW_BLOCK and (config.value_scales == "block" or config.key_scales == "fine"),
            f"scales of blocks of V and fine ones of K need BLOCK_N={ROW_BLOCK}",
        ),
    ]
    for is_broken, rule in broken:
        if is_broken:
            raise UsageError(f"{rule}; got {dict(toggles)}")
    if tiles.smem_bytes(config) > limit:
        raise UsageError(f"{tiles.smem_bytes(config)} bytes of shared memory, at most {limit}; got {dict(toggles)}")
    return tiles


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Render the kernel. Raises UsageError for tiles or a shape that it does not support."""
    if instrumented:
        raise UsageError("the Hopper kernel has no phases to count: its warpgroups are in different ones at a time")
    config, sizes = read_dims(dims, fmt)
    return hopper.kernel(config, sizes, tiles=parse_tiles(toggles, config))


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """Return the grid and arguments of that kernel."""
    config, sizes = read_dims(dims, fmt)
    return hopper.launch(config, sizes, tiles=parse_tiles(toggles, config))
