"""A histogram: y[v] = how many of x are v, added to an output that holds zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Case, OutputSpec, References

_VALUES = 32


def make_case(dims: Mapping[str, int], seed: int, fmt: str) -> Case:
    """Input x, int32 of (N,) from 0 to 31, and output y, int32 of (32,)."""
    x = np.random.Generator(np.random.PCG64(seed)).integers(0, _VALUES, dims["N"], dtype=np.int32)
    return Case({"x": x}, {"y": OutputSpec((_VALUES,), "int32", zeros=True)})


def references(dims: Mapping[str, int], seed: int, fmt: str) -> References:
    """The counts, which are exact."""
    exact = np.bincount(make_case(dims, seed, fmt).inputs["x"], minlength=_VALUES).astype(np.float64)
    return References(full=exact, exact=exact, bound=np.full_like(exact, 2.0**-10))


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64."""
    return outputs["y"].astype(np.float64)
