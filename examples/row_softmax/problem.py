"""Row softmax as a problem: inputs, float64 references, and how far the kernel's roundings can take it from them.

The kernel keeps the format of its input, so ``full`` and ``exact`` are one reference and the format error is zero.

The gates in config_forward.json follow from ``rounding_bound`` at the longest row of a shape (C = 1024; with these
inputs no element lies further than 60 below its row's maximum, so float32 outside the sum accounts for 2.2e-5):

- no element, being at most 1, is off by more than 2^-11 (half) + 1024 * 2^-24 (the sum) + 2.2e-5, together 5.7e-4:
  ``max_abs_err`` and ``bad_abs_err`` 0.0006, and no element beyond it; the mean over a single column can be as large;
- relative to the whole, subnormal halves add at most 1024 * 2^-25, together 6.1e-4: ``relative_error`` 0.0007.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Case, OutputSpec, References

#: Rows of N(0, 16) reach from almost one-hot to evenly spread, and their small weights into the subnormal halves.
_SPREAD = 4.0

_HALF_ROUNDING = 2.0**-11  # half of the spacing of normal halves, relative
_HALF_SUBNORMAL = 2.0**-25  # half of the spacing of subnormal halves, absolute
_FLOAT_ROUNDING = 2.0**-24
_EX2_ERROR = 2.0**-22  # PTX ISA, ex2.approx.ftz.f32, relative


#: Inputs for values that the normal ones do not reach: a biased mean, rows that are very flat or very steep, and one
#: element far above all others.
VARIANTS = ("shifted", "scaled", "outliers")


def _matrix(dims: Mapping[str, int], seed: int, variant: str) -> NDArray[np.float16]:
    generator = np.random.Generator(np.random.PCG64(seed))
    x = _SPREAD * generator.standard_normal((dims["R"], dims["C"]), dtype=np.float32)
    if variant == "shifted":
        x += 1000
    elif variant == "scaled":
        x[::2] *= 16
        x[1::2] /= 64
    elif variant == "outliers":
        x.flat[generator.integers(x.size)] = 200
    return x.astype(np.float16)


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Input x and output y, both float16 of (R, C)."""
    x = _matrix(dims, seed, variant)
    return Case({"x": x}, {"y": OutputSpec(x.shape, "float16")})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """The softmax in float64, twice, and the bound on each element's error."""
    x = _matrix(dims, seed, variant).astype(np.float64)
    below = x.max(axis=1, keepdims=True) - x
    weights = np.exp(-below)
    exact = weights / weights.sum(axis=1, keepdims=True)
    return References(full=exact, exact=exact, bound=rounding_bound(exact, below))


def rounding_bound(exact: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest error of a kernel that rounds as row_softmax.cu does, for each element.

    exact: the softmax. below: how far each input lies below its row's maximum.
    """
    # The difference, log2(e) and their product round once each; ex2 turns that absolute error of its argument into a
    # relative one of its result, and adds its own.
    weight = 3 * _FLOAT_ROUNDING * below + _EX2_ERROR
    # The sum has the mean error of its weights, and C - 1 additions round in whatever order they are done.
    total = (exact * weight).sum(axis=1, keepdims=True) + (exact.shape[1] - 1) * _FLOAT_ROUNDING
    # Its reciprocal and the product with it round too; second-order terms are below a hundredth.
    relative = 1.01 * (weight + total + 2 * _FLOAT_ROUNDING)
    return np.asarray(exact * (relative + _HALF_ROUNDING * (1 + relative)) + _HALF_SUBNORMAL)


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64."""
    return outputs["y"].astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """A power per element."""
    return {"exponentials": dims["R"] * dims["C"]}
