"""From interleaved block medians to a speedup with its interval, a noise floor and a verdict.

All times are microseconds, all speedups are baseline time over candidate time (1.10: the candidate is 10 % faster).
Blocks are nested ``[process][block]``; the two sides ran in random order inside each block, so block ``[p][b]`` of
one side is paired with block ``[p][b]`` of the other. Processes may hold different numbers of blocks, where some were
discarded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit  # scipy.stats would take a second more to import

from greenfast.judge.record_schema import SpeedVerdict

Samples: TypeAlias = Sequence[float] | npt.NDArray[np.floating]
Blocks: TypeAlias = Sequence[Samples] | npt.NDArray[np.floating]
_Floats: TypeAlias = npt.NDArray[np.float64]

#: No effect below half a percent is claimed, however quiet the machine (fraction).
MIN_NOISE_FLOOR = 0.005
#: NO EFFECT claims a speedup within 1 / 1.01 and 1.01. Fixed: the noisier the machine, the harder the claim.
EQUIVALENCE_MARGIN = 0.01
_NOISE_QUANTILE = 0.95
_LEAST_STEP_US = 0.001


@dataclass(frozen=True)
class Interval:
    """A speedup (baseline over candidate) with the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Location and spread of timed iterations; ``std_us`` has n - 1 in the denominator, the rate is 1 / mean."""

    p50_us: float
    p90_us: float
    mean_us: float
    std_us: float
    iters_per_sec: float


def speedup_interval(
    baseline: Blocks, candidate: Blocks, *, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> Interval:
    """The speedup and its two-sided interval: exp(median log ratio -+ t * bootstrap standard error).

    The standard error comes from a hierarchical bootstrap (processes, then blocks within them); t is Student's with
    ``processes - 1`` degrees of freedom, because the spread between processes is known from that few values. Swapping
    the sides inverts the interval. The same input and ``seed`` give the same interval.

    Measured coverage of the 95 % interval in %, in brackets with the plain percentile bootstrap on the same
    resamples (Monte Carlo, 2000 trials a cell, so +-0.5; 21 blocks, 0.5 % drift per process, 0.3 % noise per block
    and side, 3 % of blocks slow by 3 % on average; the ratio differs between processes with the standard deviation
    that heads the column):

    ===========  ===========  ===========  ===========  ===========
    processes    0            0.2 %        0.5 %        2 %
    ===========  ===========  ===========  ===========  ===========
    3            100 (98)     99.8 (89)    97.5 (80)    95.7 (77)
    5            99.5 (98)    97.5 (92)    95.8 (88)    96.2 (90)
    ===========  ===========  ===========  ===========  ===========

    So it is conservative where processes agree (the hierarchical bootstrap counts block noise twice) and nominal
    where they do not. Where they agree half its width is 0.4 % with 3 processes and 0.2 % with 5: more processes
    narrow it faster than more blocks. One process gives normal quantiles and an interval of that process only: it
    supports no claim.

    Raises ValueError for empty, unpaired, non-finite or non-positive times, a confidence outside (0, 1), or resamples
    < 2.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    ratios = _log_ratios(baseline, candidate)
    centre = float(np.median([x for process in ratios for x in process]))
    error = float(np.std(_resampled_medians(ratios, resamples, seed)))
    half = _two_sided_quantile(confidence, degrees=len(ratios) - 1) * error
    return Interval(float(np.exp(centre)), float(np.exp(centre - half)), float(np.exp(centre + half)))


def noise_floor(a: Blocks, a2: Blocks, *, resamples: int = 4000, seed: int = 0) -> float:
    """How large a speedup the protocol reports between two identical kernels, as a fraction (0.005: half a percent).

    delta = max(0.5 %, 95th percentile of |A/A|), where A/A is the *estimate* of a run of this size: the percentile is
    taken over the hierarchical bootstrap of the A/A run's median log ratio. Not over single blocks: the floor is
    compared with the interval of an estimate, from some 60 blocks, which is several times quieter than one block. A
    per-block floor (0.8 % at 0.3 % noise) would never shrink with more blocks and would hide a well-resolved effect of
    0.7 %. What remains in the estimate's floor is what the interval of A/B cannot see for itself: a bias of the
    protocol and spread between processes.

    Run the A/A with as many processes and blocks as the comparison. Raises ValueError as ``speedup_interval`` does.
    """
    replicates = np.abs(_resampled_medians(_log_ratios(a, a2), resamples, seed))
    return max(MIN_NOISE_FLOOR, float(np.expm1(np.quantile(replicates, _NOISE_QUANTILE))))


def resolution_us(samples_us: Samples) -> float:
    """The step of the clock that timed launches were measured with; 0 if all took the same.

    That is the smallest difference between two of the times, from a nanosecond on: of a clock without visible steps a
    nanosecond or little more.
    """
    gaps = np.diff(np.unique(np.round(np.asarray(samples_us, np.float64), 4)))
    gaps = gaps[gaps >= _LEAST_STEP_US]
    return float(gaps.min()) if len(gaps) else 0.0


def resolved_floor(floor: float, resolution: float, time_us: float) -> float:
    """A noise floor that also covers the clock's step: medians of times in steps move by whole steps.

    Rounded up to the four decimals that speedups are rounded to.
    """
    return max(floor, math.ceil(1e4 * resolution / time_us) / 1e4)


def verdict(interval: Interval, *, noise_floor: float, required: float) -> SpeedVerdict:
    """What the interval says; the definitions stand at ``greenfast.judge.record_schema.SpeedVerdict``.

    required: the least speedup as a ratio (1.15 for +15 %), or 0 for any speedup beyond the noise.
    noise_floor: a fraction; the noise band runs from 1 / (1 + floor) to 1 + floor, ends included, so that swapping the
    sides swaps FAST and SLOWER. FAST always needs the whole interval above the band too, whatever is required.
    NO EFFECT needs the whole interval within ``EQUIVALENCE_MARGIN``, ends included, and a floor no larger than it:
    where the protocol reports more than the margin between identical kernels, it cannot tell equivalence.

    Raises ValueError for an interval out of order, a floor that is negative, or a requirement between 0 and 1 (a margin
    such as 0.15 where 1.15 was meant).
    """
    if not 0 < interval.low <= interval.estimate <= interval.high < np.inf:
        raise ValueError(f"not an interval of speedups: {interval}")
    if not 0 <= noise_floor < np.inf:
        raise ValueError(f"noise floor must be a fraction >= 0, got {noise_floor}")
    if required != 0 and not 1 <= required < np.inf:
        raise ValueError(f"required speedup must be 0 or a ratio >= 1 such as 1.15, got {required}")
    top = 1 + noise_floor
    bottom = 1 / top
    if interval.low > top and interval.low >= required:
        return "FAST"
    if interval.low > top and interval.high < required:
        return "SHORT"
    if interval.high < bottom:
        return "SLOWER"
    margin = 1 + EQUIVALENCE_MARGIN
    if noise_floor <= EQUIVALENCE_MARGIN and 1 / margin <= interval.low and interval.high <= margin:
        return "NO EFFECT"
    return "INCONCLUSIVE"


def summary(samples_us: Samples) -> Summary:
    """p50, p90, mean, standard deviation and rate of timed iterations in microseconds.

    Raises ValueError for empty, non-finite or non-positive samples.
    """
    samples = _positive(samples_us, "samples_us")
    mean = float(np.mean(samples))
    return Summary(
        p50_us=float(np.quantile(samples, 0.5)),
        p90_us=float(np.quantile(samples, 0.9)),
        mean_us=mean,
        std_us=float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0,
        iters_per_sec=1e6 / mean,
    )


def pool_seeds(per_seed: Sequence[Blocks]) -> list[list[float]]:
    """Join the blocks of several seeds process by process, for seeds that ran in the same processes.

    A process stays one unit of resampling, so that more seeds do not pass for more processes. Where every seed had
    its own processes, concatenate the outer lists instead. Raises ValueError where the seeds differ in their number
    of processes, or there are none.
    """
    if not per_seed:
        raise ValueError("no seeds to pool")
    counts = {len(blocks) for blocks in per_seed}
    if len(counts) != 1:
        raise ValueError(f"seeds must have run in the same processes, got {sorted(counts)} processes")
    return [[float(t) for blocks in per_seed for t in blocks[p]] for p in range(counts.pop())]


def _log_ratios(baseline: Blocks, candidate: Blocks) -> tuple[tuple[float, ...], ...]:
    """log(baseline / candidate) of each block, by process."""
    if len(baseline) == 0 or len(candidate) == 0:
        raise ValueError("no processes to compare")
    if len(baseline) != len(candidate):
        raise ValueError(f"sides differ in processes: {len(baseline)} and {len(candidate)}")
    ratios = []
    for p, (base_row, cand_row) in enumerate(zip(baseline, candidate, strict=True)):
        base = _positive(base_row, f"baseline, process {p}")
        cand = _positive(cand_row, f"candidate, process {p}")
        if len(base) != len(cand):
            raise ValueError(f"sides differ in blocks of process {p}: {len(base)} and {len(cand)}")
        ratios.append(tuple((np.log(base) - np.log(cand)).tolist()))
    return tuple(ratios)


def _positive(values: Samples, what: str) -> _Floats:
    """The values as a flat array of positive, finite float64."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{what}: expected a flat list of times, got {array.ndim} dimensions")
    if len(array) == 0:
        raise ValueError(f"{what}: no times")
    if not bool(np.all(np.isfinite(array) & (array > 0))):
        raise ValueError(f"{what}: times must be finite and positive")
    return array


@functools.lru_cache(maxsize=1024)
def _resampled_medians(ratios: tuple[tuple[float, ...], ...], resamples: int, seed: int) -> _Floats:
    """Median of all ratios in each of ``resamples`` hierarchical resamples: processes, then blocks within each.

    Kept, as a run reads the records that it may quote several times.
    """
    if resamples < 2:
        raise ValueError(f"resamples must be at least 2, got {resamples}")
    lengths = np.array([len(r) for r in ratios])
    widest = int(lengths.max())
    padded = np.full((len(ratios), widest), np.inf)  # np.inf sorts after every block and so is never drawn or read
    for p, r in enumerate(ratios):
        padded[p, : len(r)] = r
    rng = np.random.default_rng(seed)
    process = rng.integers(len(ratios), size=(resamples, len(ratios)))[:, :, None]
    block = (rng.random((resamples, len(ratios), widest)) * lengths[process]).astype(np.intp)
    drawn = np.where(np.arange(widest) < lengths[process], padded[process, block], np.inf)
    drawn = np.sort(drawn.reshape(resamples, -1), axis=1)
    count = lengths[process].sum(axis=(1, 2))
    row = np.arange(resamples)
    middle = (drawn[row, (count - 1) // 2] + drawn[row, count // 2]) / 2
    middle.flags.writeable = False
    return np.asarray(middle, dtype=np.float64)


def _two_sided_quantile(confidence: float, *, degrees: int) -> float:
    """The t that |T| of Student stays below with probability ``confidence``; the normal quantile for 0 degrees."""
    share = (1 + confidence) / 2
    return float(stdtrit(degrees, share) if degrees else ndtri(share))
