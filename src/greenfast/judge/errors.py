"""How far one array is from another."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from greenfast.judge.record import ErrorStats, Histogram
from greenfast.spec.problem import NORMAL

Floats = NDArray[np.float64]

# log10 of the lowest and the highest edge, and edges per decade, of the histograms that records hold.
_ERROR_BINS = (-9, 2, 2)
_BOUND_BINS = (-5, 2, 4)

#: The relative error is a mean, which scatters over few elements. In drawn cases and variants, which may have any size,
#: its limit is multiplied by 1 + this over their number (docs/correctness.md); each element has its bound all the same.
_FEW_ELEMENTS = 1024
#: And in variants by this: a single rounding, of the weight of an outlier, may be most of the norm.
_IN_VARIANTS = 3.0


def error_stats(actual: Floats, reference: Floats, bad_abs_err: float) -> ErrorStats:
    """Measure ``actual`` against ``reference`` (equal shapes, all finite).

    pct_bad is the percentage of elements whose absolute error exceeds ``bad_abs_err``; max_rel_err looks only at
    elements with |reference| above 1e-3 of the largest, so that a zero crossing does not decide it.
    Raises ValueError for unequal shapes or values that are not finite: no statistic of those means anything.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {reference.shape}")
    if not (np.isfinite(actual).all() and np.isfinite(reference).all()):
        raise ValueError("error statistics of arrays with NaN or infinity")
    err = np.abs(actual - reference)
    size = np.abs(reference)
    large = size > 1e-3 * size.max(initial=0.0)
    norm = float(np.linalg.norm(reference))
    err_norm = float(np.linalg.norm(err))
    return ErrorStats(
        max_abs_err=float(err.max(initial=0.0)),
        mean_abs_err=float(err.mean()) if err.size else 0.0,
        max_rel_err=float((err[large] / size[large]).max(initial=0.0)),
        relative_error=err_norm / norm if norm > 0 else (0.0 if err_norm == 0 else float("inf")),
        pct_bad=100.0 * float((err > bad_abs_err).mean()) if err.size else 0.0,
    )


def worst_bound_ratio(
    actual: Floats, exact: Floats, bound: Floats, *, matched: float = 1.0, most: float = math.inf
) -> float:
    """The largest |actual - exact| / bound over all elements; no error is 0, an error beyond a zero bound infinity.

    matched: the share of elements that counts, the others being the worst. most: an error above it is infinity.
    """
    if float(np.abs(actual - exact).max(initial=0.0)) > most:
        return math.inf
    ratios = _bound_ratios(actual, exact, bound).ravel()
    counted = math.ceil(matched * len(ratios))
    if counted < len(ratios):
        ratios = np.sort(ratios)[:counted]
    return float(ratios.max(initial=0.0))


def error_histogram(actual: Floats, exact: Floats) -> Histogram:
    """Of |actual - exact|, from 1e-9 to 100."""
    return _histogram(np.abs(actual - exact), *_ERROR_BINS)


def bound_histogram(actual: Floats, exact: Floats, bound: Floats) -> Histogram:
    """Of |actual - exact| / bound, from 1e-5 to 100."""
    return _histogram(_bound_ratios(actual, exact, bound), *_BOUND_BINS)


def relative_error_factor(elements: int, variant: str) -> float:
    """What the limit on the relative error is multiplied by in drawn cases and variants.

    elements: of the output. variant: of the inputs.
    """
    return (1 + _FEW_ELEMENTS / elements) * (1 if variant == NORMAL else _IN_VARIANTS)


def _bound_ratios(actual: Floats, exact: Floats, bound: Floats) -> Floats:
    err = np.abs(actual - exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(err == 0, 0.0, err / bound)


def _histogram(values: Floats, first: int, last: int, per_decade: int) -> Histogram:
    edges = 10.0 ** (first + np.arange((last - first) * per_decade + 1) / per_decade)
    bins = np.searchsorted(edges, values.ravel(), side="right")
    return Histogram(first=first, per_decade=per_decade, counts=np.bincount(bins, minlength=len(edges) + 1).tolist())
