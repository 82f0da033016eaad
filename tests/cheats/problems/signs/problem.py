"""Truth values: y = x > 0, as bool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Case, OutputSpec, References


def make_case(dims: Mapping[str, int], seed: int, fmt: str) -> Case:
    """Input x, float32 of (N,), and output y, bool of (N,)."""
    x = np.random.Generator(np.random.PCG64(seed)).standard_normal(dims["N"], dtype=np.float32)
    return Case({"x": x}, {"y": OutputSpec(x.shape, "bool")})


def references(dims: Mapping[str, int], seed: int, fmt: str) -> References:
    """0 or 1, which is exact."""
    exact = (make_case(dims, seed, fmt).inputs["x"] > 0).astype(np.float64)
    return References(full=exact, exact=exact, bound=np.full_like(exact, 2.0**-10))


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as 0 and 1."""
    return outputs["y"].astype(np.float64)
