"""The product of two half matrices as a problem: inputs, float64 reference, and what float32 sums can be off by.

The gates in config_forward.json follow from ``rounding_bound`` at the largest shape (K = 2048), where a sum's products
have magnitudes of 29 together and results stay below 6: 2048 * 2^-23 * (29 + 6) / 2 for the sum and 2^-11 * 6 for the
half, together 0.0073. A typical result is below 1, which leaves 0.0041, also relative to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Case, OutputSpec, References

_HALF_ROUNDING = 2.0**-11  # half of the spacing of normal halves, relative
_HALF_SUBNORMAL = 2.0**-25  # half of the spacing of subnormal halves, absolute
_FLOAT_STEP = 2.0**-23  # an addition in float32 that truncates, as tensor cores do


#: Other inputs: a biased A, rows of A that are large or small, and one large element of A.
VARIANTS = ("shifted", "scaled", "outliers")


def _matrices(dims: Mapping[str, int], seed: int, variant: str) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    generator = np.random.Generator(np.random.PCG64(seed))
    a = generator.standard_normal((dims["M"], dims["K"]), dtype=np.float32)
    b = generator.standard_normal((dims["K"], dims["N"]), dtype=np.float32) / np.float32(math.sqrt(dims["K"]))
    if variant == "shifted":
        a += 8
    elif variant == "scaled":
        a[::2] *= 64
        a[1::2] /= 64
    elif variant == "outliers":
        a.flat[generator.integers(a.size)] = 1000
    return a.astype(np.float16), b.astype(np.float16)


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Inputs a (M, K), N(0, 1), and b (K, N), N(0, 1 / K), so that c (M, N) is N(0, 1); all float16, row by row."""
    a, b = _matrices(dims, seed, variant)
    return Case({"a": a, "b": b}, {"c": OutputSpec((dims["M"], dims["N"]), "float16")})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """The product in float64, twice (nothing is quantized), and the bound on each element's error."""
    a, b = (matrix.astype(np.float64) for matrix in _matrices(dims, seed, variant))
    exact = a @ b
    return References(full=exact, exact=exact, bound=rounding_bound(exact, np.abs(a) @ np.abs(b), dims["K"]))


def rounding_bound(exact: NDArray[np.float64], magnitudes: NDArray[np.float64], terms: int) -> NDArray[np.float64]:
    """The largest error of a kernel that sums in float32, in whatever order, and rounds the sum to half.

    exact: the sums. magnitudes: of the products' absolute values. terms: products per sum.
    """
    # A product of two halves is exact in float32. Each of at most K additions rounds by 2^-23 of what is summed so far:
    # a part of the products, so at most the sum of the positive or of the negative ones, whichever is larger.
    largest_part = (magnitudes + np.abs(exact)) / 2
    in_float = 1.01 * terms * _FLOAT_STEP * largest_part
    return np.asarray(in_float + _HALF_ROUNDING * (np.abs(exact) + in_float) + _HALF_SUBNORMAL)


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The product as float64, (M, N)."""
    return outputs["c"].astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """A multiplication and an addition per product."""
    return {"matrix_flops": 2 * dims["M"] * dims["N"] * dims["K"]}
