"""How far one array is from another."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from greenfast.judge.record_schema import ErrorStats, Histogram, WorstElement
from greenfast.spec.problem import NORMAL

Floats = NDArray[np.float64]
_T = TypeVar("_T")
#: Elements that are measured at a time.
_PART = 1 << 17

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
    if not all(_by_parts(lambda a, r: bool(np.isfinite(a).all() and np.isfinite(r).all()), actual, reference)):
        raise ValueError("error statistics of arrays with NaN or infinity")
    most = _largest(np.abs, reference)

    def measured(actual: Floats, reference: Floats) -> tuple[float, ...]:
        err, size = np.abs(actual - reference), np.abs(reference)
        large = size > 1e-3 * most
        with np.errstate(over="ignore"):  # squares of huge values
            sums = float(err.sum()), float(np.dot(err, err)), float(np.dot(size, size))
        largest = float(err.max()), float((err[large] / size[large]).max(initial=0.0))
        return *largest, *sums, float(np.count_nonzero(err > bad_abs_err))

    parts = np.reshape(_by_parts(measured, actual, reference), (-1, 6))
    max_abs, max_rel = map(float, parts[:, :2].max(axis=0, initial=0.0))
    with np.errstate(over="ignore"):
        total, squares, reference_squares, bad = map(float, parts[:, 2:].sum(axis=0))
    norm, err_norm = math.sqrt(reference_squares), math.sqrt(squares)
    return ErrorStats(
        max_abs_err=max_abs,
        mean_abs_err=total / actual.size if actual.size else 0.0,
        max_rel_err=max_rel,
        relative_error=err_norm / norm if norm > 0 else (0.0 if err_norm == 0 else float("inf")),
        pct_bad=100.0 * bad / actual.size if actual.size else 0.0,
    )


def worst_bound_ratio(
    actual: Floats, exact: Floats, bound: Floats, *, matched: float = 1.0, most: float = math.inf
) -> float:
    """The largest |actual - exact| / bound over all elements; no error is 0, an error beyond a zero bound infinity.

    matched: the share of elements that counts, the others being the worst. most: an error above it is infinity.
    """
    if _largest(lambda a, e: np.abs(a - e), actual, exact) > most:
        return math.inf
    if matched == 1.0:
        return _largest(_bound_ratios, actual, exact, bound)
    ratios = np.concatenate(_by_parts(_bound_ratios, actual, exact, bound) or [np.zeros(1)])
    counted = max(1, math.ceil(matched * len(ratios)))
    ratios.partition(counted - 1)
    return float(ratios[counted - 1])


def worst_element(
    actual: Floats, exact: Floats, allowed: Floats, outputs: Mapping[str, NDArray[Any]]
) -> WorstElement | None:
    """Find the element with the largest |actual - exact| / allowed; the first that is not finite comes before all.

    outputs: the buffers that were decoded to ``actual``, in their order, to name the element's place in them.
    Return None if there are no elements.
    """
    if actual.size == 0:
        return None

    def measured(actual: Floats, exact: Floats, allowed: Floats) -> tuple[int, float, int]:
        """Return the number of wrong elements, the largest ratio and its place; infinity for what is not finite."""
        finite = np.isfinite(actual)
        ratios = _bound_ratios(actual, exact, allowed)
        ratios = np.where(finite, np.minimum(ratios, np.finfo(np.float64).max), np.inf)
        place = int(np.argmax(ratios))
        return int(np.count_nonzero(~finite | ~(np.abs(actual - exact) <= allowed))), float(ratios[place]), place

    parts = _by_parts(measured, actual, exact, allowed)
    part = max(range(len(parts)), key=lambda n: parts[n][1])
    place = part * _PART + parts[part][2]
    name, index = _place_in_outputs(place, actual, outputs)
    got, expected, limit = (float(x.reshape(-1)[place]) for x in (actual, exact, allowed))
    return WorstElement(
        output=name,
        index=index,
        got=got if math.isfinite(got) else None,
        expected=expected,
        allowed=limit if math.isfinite(limit) else None,
        wrong=sum(count for count, _, _ in parts) / actual.size,
    )


def _place_in_outputs(place: int, actual: Floats, outputs: Mapping[str, NDArray[Any]]) -> tuple[str, list[int]]:
    """Return the buffer and the index of an element of the decoded array; those of the array itself if in doubt."""

    def indices(shape: tuple[int, ...], flat: int) -> list[int]:
        return [int(i) for i in np.unravel_index(flat, shape)]

    arrays = [(name, array) for name, array in outputs.items() if array.size]
    if len(arrays) == 1 and arrays[0][1].size == actual.size:
        return arrays[0][0], indices(arrays[0][1].shape, place)
    if sum(array.size for _, array in arrays) == actual.size:
        first = 0
        for name, array in arrays:
            if place < first + array.size and array.dtype.kind in "fiub":
                value, got = float(array.reshape(-1)[place - first]), float(actual.reshape(-1)[place])
                if value == got or (math.isnan(value) and math.isnan(got)):
                    return name, indices(array.shape, place - first)
                break
            first += array.size
    return "output", indices(actual.shape, place)


def error_histogram(actual: Floats, exact: Floats) -> Histogram:
    """Of |actual - exact|, from 1e-9 to 100."""
    return _histogram(lambda a, e: np.abs(a - e), _ERROR_BINS, actual, exact)


def bound_histogram(actual: Floats, exact: Floats, bound: Floats) -> Histogram:
    """Of |actual - exact| / bound, from 1e-5 to 100."""
    return _histogram(_bound_ratios, _BOUND_BINS, actual, exact, bound)


def nearer_of(actual: Floats, one: Floats, other: Floats) -> Floats:
    """Of each element the one of two values that is nearer to ``actual``, the other where neither is (NaN)."""
    parts = _by_parts(lambda a, o, x: np.where(np.abs(a - o) < np.abs(a - x), o, x), actual, one, other)
    return np.concatenate([*parts, np.empty(0)]).reshape(actual.shape)


def relative_error_factor(elements: int, variant: str) -> float:
    """What the limit on the relative error is multiplied by in drawn cases and variants.

    elements: of the output. variant: of the inputs.
    """
    return (1 + _FEW_ELEMENTS / elements) * (1 if variant == NORMAL else _IN_VARIANTS)


def _bound_ratios(actual: Floats, exact: Floats, bound: Floats) -> Floats:
    err = np.abs(actual - exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(err == 0, 0.0, err / bound)


def _largest(values: Callable[..., Floats], *arrays: Floats) -> float:
    """The largest of some values that are at least 0; NaN where one is, which Python's max would pass over."""
    return float(np.max(_by_parts(lambda *parts: values(*parts).max(), *arrays), initial=0.0))


def _histogram(values: Callable[..., Floats], bins: tuple[int, int, int], *arrays: Floats) -> Histogram:
    first, last, per_decade = bins
    edges = 10.0 ** (first + np.arange((last - first) * per_decade + 1) / per_decade)

    def counted(*parts: Floats) -> NDArray[np.int64]:
        return np.bincount(np.searchsorted(edges, values(*parts), side="right"), minlength=len(edges) + 1)

    counts = sum(_by_parts(counted, *arrays), np.zeros(len(edges) + 1, np.int64))
    return Histogram(first=first, per_decade=per_decade, counts=counts.tolist())


def _by_parts(function: Callable[..., _T], *arrays: Floats) -> list[_T]:
    """What a function gives of each part of flat arrays of one size: parts that a core's cache holds, on all cores."""
    flat = [array.reshape(-1) for array in arrays]
    starts = range(0, flat[0].size, _PART)
    work = ([array[start : start + _PART] for array in flat] for start in starts)
    if len(starts) <= 1:
        return [function(*parts) for parts in work]
    with ThreadPoolExecutor(min(len(starts), len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda parts: function(*parts), work))
