"""The doubling problem: y = 2 x in float32, where the kernel may keep the product in half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Case, OutputSpec, References


def make_case(dims: Mapping[str, int], seed: int, fmt: str) -> Case:
    """Input x and output y, float32 of (N,)."""
    x = np.random.Generator(np.random.PCG64(seed)).standard_normal(dims["N"], dtype=np.float32)
    return Case({"x": x}, {"y": OutputSpec(x.shape, "float32")})


def references(dims: Mapping[str, int], seed: int, fmt: str) -> References:
    """Twice the input; the bound is the rounding of a half, so that not only the right bits are right."""
    exact = 2.0 * make_case(dims, seed, fmt).inputs["x"].astype(np.float64)
    return References(full=exact, exact=exact, bound=2.0**-11 * np.abs(exact) + 2.0**-25)


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64."""
    return outputs["y"].astype(np.float64)
