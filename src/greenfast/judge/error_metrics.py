"""Error statistics of an output against a reference."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from greenfast.judge.record_schema import ErrorMap, ErrorStats, Histogram, WorstElement
from greenfast.spec.problem import NORMAL

Floats = NDArray[np.float64]
_T = TypeVar("_T")
#: Number of elements that one task measures; they fit in a core's cache.
_PART = 1 << 17
#: The largest number of rows and columns of an error map, and the values on each side of its worst element.
_MAP_CELLS, _AROUND = (16, 32), 2

# Histograms in records: log10 of the lowest and the highest edge, and the number of edges per decade.
_ERROR_BINS = (-9, 2, 2)
_BOUND_BINS = (-5, 2, 4)

#: The relative error is a mean and has a large variance over few elements. Random cases and variants may have any size,
#: so their limit is multiplied by 1 + this / elements (docs/correctness.md). The bound of each element is not relaxed.
_FEW_ELEMENTS = 1024
#: Further factor in variants: the rounding of one outlier's weight may dominate the norm.
_VARIANT_FACTOR = 3.0


def error_stats(actual: Floats, reference: Floats, bad_abs_err: float) -> ErrorStats:
    """Measure ``actual`` against ``reference`` (equal shapes, all finite).

    pct_bad is the percentage of elements with an absolute error above ``bad_abs_err``. max_rel_err covers only elements
    with |reference| above 1e-3 of the largest, so that zero crossings do not dominate it.
    Raises ValueError for unequal shapes and for values that are not finite.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {reference.shape}")
    if not all(_map_parts(lambda a, r: bool(np.isfinite(a).all() and np.isfinite(r).all()), actual, reference)):
        raise ValueError("error statistics of arrays with NaN or infinity")
    largest_reference = _find_largest(np.abs, reference)

    def measure(actual: Floats, reference: Floats) -> tuple[float, ...]:
        err, size = np.abs(actual - reference), np.abs(reference)
        large = size > 1e-3 * largest_reference
        with np.errstate(over="ignore"):  # Squares of huge values overflow.
            sums = float(err.sum()), float(np.dot(err, err)), float(np.dot(size, size))
        largest = float(err.max()), float((err[large] / size[large]).max(initial=0.0))
        return *largest, *sums, float(np.count_nonzero(err > bad_abs_err))

    parts = np.reshape(_map_parts(measure, actual, reference), (-1, 6))
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
    """Return the largest |actual - exact| / bound over all elements.

    The ratio is 0 for no error, and infinity for an error with a bound of zero.
    matched: the required matched ratio: the worst 1 - matched of the elements are excluded.
    most: the maximum absolute error; if an element exceeds it, the result is infinity.
    """
    if _find_largest(lambda a, e: np.abs(a - e), actual, exact) > most:
        return math.inf
    if matched == 1.0:
        return _find_largest(_compute_bound_ratios, actual, exact, bound)
    ratios = np.concatenate(_map_parts(_compute_bound_ratios, actual, exact, bound) or [np.zeros(1)])
    counted = max(1, math.ceil(matched * len(ratios)))
    ratios.partition(counted - 1)
    return float(ratios[counted - 1])


def worst_element(
    actual: Floats, exact: Floats, allowed: Floats, outputs: Mapping[str, NDArray[Any]]
) -> WorstElement | None:
    """Return the first element that is not finite, else the element with the largest |actual - exact| / allowed.

    outputs: the buffers that were decoded to ``actual``, in this order, to name the element's buffer and index.
    Return None if there are no elements.
    """
    if actual.size == 0:
        return None

    element, wrong = _find_worst(actual, exact, allowed)
    name, first, shape = _find_buffer(element, actual, outputs)
    index = [int(i) for i in np.unravel_index(element - first, shape)]
    got, expected, limit = (float(x.reshape(-1)[element]) for x in (actual, exact, allowed))
    return WorstElement(
        output=name,
        index=index,
        got=got if math.isfinite(got) else None,
        expected=expected,
        allowed=limit if math.isfinite(limit) else None,
        wrong=wrong / actual.size,
    )


def map_errors(actual: Floats, exact: Floats, allowed: Floats, outputs: Mapping[str, NDArray[Any]]) -> ErrorMap | None:
    """Return the map of the buffer with the worst element, and the values around that element.

    outputs: as in ``worst_element``. Return None if no element is wrong.
    """
    element, wrong = _find_worst(actual, exact, allowed) if actual.size else (0, 0)
    if not wrong:
        return None
    name, first, shape = _find_buffer(element, actual, outputs)
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // columns
    part = slice(first, first + rows * columns)
    got, expected, limit = (x.reshape(-1)[part].reshape(rows, columns) for x in (actual, exact, allowed))
    ratios = np.where(np.isfinite(got), _compute_bound_ratios(got, expected, limit), np.inf)
    for axis, most in enumerate(_MAP_CELLS):
        starts = np.arange(min(ratios.shape[axis], most)) * ratios.shape[axis] // min(ratios.shape[axis], most)
        ratios = np.maximum.reduceat(ratios, starts, axis=axis)
    row, column = divmod(element - first, columns)
    top, left = max(0, row - _AROUND), max(0, column - _AROUND)
    around = (slice(top, row + _AROUND + 1), slice(left, column + _AROUND + 1))
    return ErrorMap(
        output=name, rows=rows, columns=columns, cells=_round_finite(ratios, 3), top=top, left=left,
        got=_round_finite(got[around], 7), expected=_round_finite(expected[around], 7),
    )  # fmt: skip


def _round_finite(values: Floats, digits: int) -> list[list[float | None]]:
    """Return rows of numbers with so many significant digits; None for a number that is not finite."""
    return [[float(f"{x:.{digits}g}") if math.isfinite(x) else None for x in row] for row in values.tolist()]


def _find_worst(actual: Floats, exact: Floats, allowed: Floats) -> tuple[int, int]:
    """Return the flat index of the worst element, as ``worst_element`` defines it, and the number of wrong elements."""

    def measure(actual: Floats, exact: Floats, allowed: Floats) -> tuple[int, float, int]:
        """Return the number of wrong elements, the largest ratio (infinity if not finite) and its flat index."""
        finite = np.isfinite(actual)
        ratios = _compute_bound_ratios(actual, exact, allowed)
        ratios = np.where(finite, np.minimum(ratios, np.finfo(np.float64).max), np.inf)
        element = int(np.argmax(ratios))
        return int(np.count_nonzero(~finite | ~(np.abs(actual - exact) <= allowed))), float(ratios[element]), element

    parts = _map_parts(measure, actual, exact, allowed)
    part = max(range(len(parts)), key=lambda n: parts[n][1])
    return part * _PART + parts[part][2], sum(count for count, _, _ in parts)


def _find_buffer(element: int, actual: Floats, outputs: Mapping[str, NDArray[Any]]) -> tuple[str, int, tuple[int, ...]]:
    """Return the name, first flat index and shape of the buffer that has an element of the decoded array.

    If the decoded array is not a concatenation of the buffers: "output", 0, and the shape of the decoded array.
    """
    arrays = [(name, array) for name, array in outputs.items() if array.size]
    if len(arrays) == 1 and arrays[0][1].size == actual.size:
        return arrays[0][0], 0, arrays[0][1].shape
    if sum(array.size for _, array in arrays) == actual.size:
        first = 0
        for name, array in arrays:
            if element < first + array.size and array.dtype.kind in "fiub":
                value, got = float(array.reshape(-1)[element - first]), float(actual.reshape(-1)[element])
                if value == got or (math.isnan(value) and math.isnan(got)):
                    return name, first, array.shape
                break
            first += array.size
    return "output", 0, actual.shape


def error_histogram(actual: Floats, exact: Floats) -> Histogram:
    """Return the histogram of |actual - exact|, from 1e-9 to 100."""
    return _build_histogram(lambda a, e: np.abs(a - e), _ERROR_BINS, actual, exact)


def bound_histogram(actual: Floats, exact: Floats, bound: Floats) -> Histogram:
    """Return the histogram of |actual - exact| / bound, from 1e-5 to 100."""
    return _build_histogram(_compute_bound_ratios, _BOUND_BINS, actual, exact, bound)


def select_closest_reference(actual: Floats, alternative: Floats, exact: Floats) -> Floats:
    """Return, for each element, whichever of ``alternative`` and ``exact`` is closer to ``actual``."""
    parts = _map_parts(lambda a, o, x: np.where(np.abs(a - o) < np.abs(a - x), o, x), actual, alternative, exact)
    return np.concatenate([*parts, np.empty(0)]).reshape(actual.shape)


def relative_error_factor(elements: int, variant: str) -> float:
    """Return the factor for the limit on the relative error in random cases and variants.

    elements: number of elements of the output. variant: name of the inputs' variant.
    """
    return (1 + _FEW_ELEMENTS / elements) * (1 if variant == NORMAL else _VARIANT_FACTOR)


def _compute_bound_ratios(actual: Floats, exact: Floats, bound: Floats) -> Floats:
    err = np.abs(actual - exact)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(err == 0, 0.0, err / bound)


def _find_largest(values: Callable[..., Floats], *arrays: Floats) -> float:
    """Return the largest of some values that are at least 0, or NaN if one is NaN."""
    return float(np.max(_map_parts(lambda *parts: values(*parts).max(), *arrays), initial=0.0))


def _build_histogram(values: Callable[..., Floats], bins: tuple[int, int, int], *arrays: Floats) -> Histogram:
    first, last, per_decade = bins
    edges = 10.0 ** (first + np.arange((last - first) * per_decade + 1) / per_decade)

    def counted(*parts: Floats) -> NDArray[np.int64]:
        return np.bincount(np.searchsorted(edges, values(*parts), side="right"), minlength=len(edges) + 1)

    counts = sum(_map_parts(counted, *arrays), np.zeros(len(edges) + 1, np.int64))
    return Histogram(first=first, per_decade=per_decade, counts=counts.tolist())


def _map_parts(function: Callable[..., _T], *arrays: Floats) -> list[_T]:
    """Apply a function to each part of the flattened arrays, on all cores. Parts fit in a core's cache."""
    flat = [array.reshape(-1) for array in arrays]
    starts = range(0, flat[0].size, _PART)
    work = ([array[start : start + _PART] for array in flat] for start in starts)
    if len(starts) <= 1:
        return [function(*parts) for parts in work]
    with ThreadPoolExecutor(min(len(starts), len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda parts: function(*parts), work))
