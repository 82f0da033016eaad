"""Doubling in place: x becomes 2 x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Case, OutputSpec, References


def make_case(dims: Mapping[str, int], seed: int, fmt: str) -> Case:
    """The buffer x, float32 of (N,), input and output."""
    x = np.random.Generator(np.random.PCG64(seed)).standard_normal(dims["N"], dtype=np.float32)
    return Case({"x": x}, {"x": OutputSpec(x.shape, "float32")})


def references(dims: Mapping[str, int], seed: int, fmt: str) -> References:
    """Twice the input, which is exact."""
    exact = 2.0 * make_case(dims, seed, fmt).inputs["x"].astype(np.float64)
    return References(full=exact, exact=exact, bound=2.0**-24 * np.abs(exact))


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64."""
    return outputs["x"].astype(np.float64)
