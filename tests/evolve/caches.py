"""A made-up cache of 432 kernels, whose times have no source but the formula below."""

from __future__ import annotations

import itertools
import math
import random

from benchmarks.tuning_cache import Cache
from greenfast.evolve import t4

PARAMETERS = {"tile": (32, 64, 96, 128), "stages": (2, 3, 4), "warps": (2, 4, 8), "unroll": (1, 2, 4), "layout": (0, 1)}


def synthetic(seed: int = 0) -> t4.T4Results:
    """Times of an effect for each parameter, two interactions and 2 % of noise; what needs many registers fails."""
    rng = random.Random(seed)
    rows = []
    for values in itertools.product(*PARAMETERS.values()):
        tile, stages, warps, unroll, layout = values
        registers, smem = 24 * unroll + 2 * tile // warps + 32, tile * stages * 512
        if tile * stages > 384:
            continue
        builds = registers <= 160
        time = 1.0 + 0.3 * abs(math.log2(tile / 96)) + 0.1 * (4 - stages) + 0.1 * abs(math.log2(warps / 4))
        time *= (1.1 - 0.05 * unroll if warps > 2 else 1.0 + 0.05 * unroll) * (0.93 if layout == (tile > 64) else 1.0)
        time *= 1 + 0.02 * rng.random()
        found = {t4.TIME: time, t4.PIPE: "tensor" if tile > 64 else "issue", t4.SMEM: smem, t4.REGISTERS: registers}
        rows.append(
            t4.T4Result(
                configuration=dict(zip(PARAMETERS, values, strict=True)),
                times=t4.T4Times(),
                invalidity="correct" if builds else "compile",
                correctness=float(builds),
                measurements=[t4.T4Measurement(name=n, value=v) for n, v in found.items()] if builds else [],
            )
        )
    return t4.T4Results(results=rows)


def cache(seed: int = 0) -> Cache:
    """The same as a cache."""
    return Cache(synthetic(seed), "synthetic")
