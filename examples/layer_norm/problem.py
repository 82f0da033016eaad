"""Layer norm of the rows of a half matrix as a problem: inputs, float64 reference, and how far roundings reach.

The gates in config_forward.json follow from ``rounding_bound`` at the longest row of a shape (C = 4096), where results
stay below 14 and means below 8: 2^-11 * 14 for the half, and for the mean, summed by 4096 additions, 4096 * 2^-24 * 8,
which the weights enlarge by up to 3. Together that allows 0.025; on average, and relative to the whole, 0.0015.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Array, Case, OutputSpec, References

#: Added to the variance; solutions pass it as float32.
EPSILON = 1e-5

_HALF_ROUNDING = 2.0**-11  # half of the spacing of normal halves, relative
_HALF_SUBNORMAL = 2.0**-25  # half of the spacing of subnormal halves, absolute
_FLOAT_ROUNDING = 2.0**-24
_DIVISION = 2.0**-22  # 2 ulp, as div.full.f32 has (PTX ISA)
_INVERSE_ROOT = 2.0**-22 + 2.0**-23  # a division by sqrt.approx.f32, or rsqrt.approx.f32 (2^-22.9)


#: Other inputs: a large mean, rows that are wide or narrow, and one element far above all others.
VARIANTS = ("shifted", "scaled", "outliers")


def _inputs(dims: Mapping[str, int], seed: int, variant: str) -> dict[str, Array]:
    """x: rows of N(mean, 1), where the means are N(0, 4), so that a variance of squares minus squared mean is seen."""
    generator = np.random.Generator(np.random.PCG64(seed))
    rows, columns = dims["R"], dims["C"]
    means = 2 * generator.standard_normal((rows, 1), dtype=np.float32)
    x = means + generator.standard_normal((rows, columns), dtype=np.float32)
    if variant == "shifted":
        x += 100
    elif variant == "scaled":
        x[::2] *= 64
        x[1::2] /= 64
    elif variant == "outliers":
        x.flat[generator.integers(x.size)] = 1000
    weight = 1 + generator.standard_normal(columns, dtype=np.float32) / 2
    bias = generator.standard_normal(columns, dtype=np.float32)
    return {name: a.astype(np.float16) for name, a in {"x": x, "weight": weight, "bias": bias}.items()}


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Inputs x (R, C), weight (C,) and bias (C,), output y (R, C), all float16."""
    return Case(_inputs(dims, seed, variant), {"y": OutputSpec((dims["R"], dims["C"]), "float16")})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """The layer norm in float64, twice (nothing is quantized), and the bound on each element's error."""
    x, weight, bias = (a.astype(np.float64) for a in _inputs(dims, seed, variant).values())
    mean = x.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt(x.var(axis=1, keepdims=True) + EPSILON)
    exact = (x - mean) * scale * weight + bias
    return References(full=exact, exact=exact, bound=rounding_bound(x, weight, exact))


def rounding_bound(
    x: NDArray[np.float64], weight: NDArray[np.float64], exact: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The largest error of a kernel that takes the mean, then the mean square of the differences, all in float32.

    x: (R, C). weight: (C,). exact: the layer norm, (R, C).
    """
    columns = x.shape[1]
    sums = columns * _FLOAT_ROUNDING  # C - 1 additions in any order and a multiplication, relative to the magnitudes
    mean = x.mean(axis=1, keepdims=True)
    mean_error = sums * np.abs(x).mean(axis=1, keepdims=True) + _DIVISION * np.abs(mean)
    difference = np.abs(x - mean)
    difference_error = mean_error + _FLOAT_ROUNDING * difference

    # Squares double the error of a difference, and add the error of the mean squared; they and their sum round.
    variance = x.var(axis=1, keepdims=True)
    squares_error = (2 * difference * difference_error + difference_error**2).mean(axis=1, keepdims=True)
    variance_error = squares_error + (sums + _FLOAT_ROUNDING + _DIVISION) * variance
    total = variance + EPSILON
    # EPSILON in float32 and its addition round; the root halves a relative error, and at most C = 1 has large ones.
    scale_error = 0.5 * (variance_error / total + 2 * _FLOAT_ROUNDING) + _INVERSE_ROOT

    # y = difference * scale * weight + bias: two products and a sum round.
    slope = np.abs(weight) / np.sqrt(total)
    product = difference * slope
    in_float = difference_error * slope + product * (scale_error + 2 * _FLOAT_ROUNDING)
    in_float = 1.01 * (in_float + _FLOAT_ROUNDING * np.abs(exact))
    return np.asarray(in_float + _HALF_ROUNDING * (np.abs(exact) + in_float) + _HALF_SUBNORMAL)


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64, (R, C)."""
    return outputs["y"].astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Every input is read once."""
    return {"global_load_bytes": 2 * (dims["R"] * dims["C"] + 2 * dims["C"])}
