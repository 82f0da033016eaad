"""Causal attention on half Q, K and V as a problem: inputs, float64 reference, and how far roundings reach.

The gates in config_forward.json follow from ``rounding_bound``: the output, the weights and their sum round by 2^-11 of
results that stay below 4.5, together 0.0066, and adding 2048 keys costs a fifth of that. On average, and relative to
the whole, results are smaller than what they are summed from: 0.0015 and 0.009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Array, Case, OutputSpec, References

_HALF_ROUNDING = 2.0**-11  # half of the spacing of normal halves, relative
_HALF_SUBNORMAL = 2.0**-25  # half of the spacing of subnormal halves, absolute
_FLOAT_STEP = 2.0**-23  # an operation in float32; tensor cores truncate
_EX2_ERROR = 2.0**-21  # ex2.approx.f32 (2^-22, PTX ISA) and the rounding of its argument's last step


#: Other inputs: keys and values with a large mean, queries of steep and of flat weights, and one large key and value.
VARIANTS = ("shifted", "scaled", "outliers")


def _inputs(dims: Mapping[str, int], seed: int, variant: str) -> dict[str, Array]:
    generator = np.random.Generator(np.random.PCG64(seed))
    shape = (dims["B"] * dims["H"], dims["S"], dims["D"])
    q, k, v = (generator.standard_normal(shape, dtype=np.float32) for _ in range(3))
    if variant == "shifted":
        k += 4
        v += 16
    elif variant == "scaled":
        q[:, ::2] *= 8
        q[:, 1::2] /= 8
    elif variant == "outliers":
        k.flat[generator.integers(k.size)] = 50
        v.flat[generator.integers(v.size)] = 1000
    return {name: a.astype(np.float16) for name, a in {"q": q, "k": k, "v": v}.items()}


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Inputs q, k and v, N(0, 1), and the output out, all float16 of (B * H, S, D)."""
    inputs = _inputs(dims, seed, variant)
    return Case(inputs, {"out": OutputSpec(inputs["q"].shape, "float16")})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """Attention with the scale 1 / sqrt(D) in float64, twice (nothing is quantized), and the bound on each error.

    A query attends to the keys up to its position.
    """
    q, k, v = (a.astype(np.float64) for a in _inputs(dims, seed, variant).values())
    exact, bound = np.empty_like(q), np.empty_like(q)
    for head in range(len(q)):  # one at a time, for memory
        exact[head], bound[head] = _head(q[head], k[head], v[head])
    return References(full=exact, exact=exact, bound=bound)


def _head(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The attention of one head, (S, D), and the largest error of a kernel with weights in half, all else in float32.

    A kernel whose weights p_j are off by e_j, and that divides by the sum of the weights, is off by at most
    sum_j e_j (|v_j| + |out|) / sum_j p_j.
    """
    length, head_dim = q.shape
    scale = 1 / math.sqrt(head_dim)
    scores = np.where(np.tri(length, dtype=bool), scale * (q @ k.T), -np.inf)
    top = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=1, keepdims=True)
    out = p @ v / total

    # A score has D additions of exact products; the scale, log2(e), their product and the maximum round 4 times.
    sizes = np.where(p > 0, np.abs(scores), 0)
    score_error = _FLOAT_STEP * (head_dim * scale * (np.abs(q) @ np.abs(k).T) + 4 * (sizes + np.abs(top)))
    weight_error = p * (_HALF_ROUNDING + _EX2_ERROR + score_error) + _HALF_SUBNORMAL * (p > 0)
    from_weights = (weight_error @ np.abs(v) + weight_error.sum(axis=1, keepdims=True) * np.abs(out)) / total
    # S additions, and a rescale by a rounded power of two for each block of at least 16 keys.
    steps = _FLOAT_STEP * (length + 4 * -(-length // 16))
    from_sums = steps * (p @ np.abs(v) / total + np.abs(out))
    in_float = 1.01 * (from_weights + from_sums + 4 * _FLOAT_STEP * np.abs(out))
    return out, in_float + _HALF_ROUNDING * (np.abs(out) + in_float) + _HALF_SUBNORMAL


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64, (B * H, S, D)."""
    return outputs["out"].astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Two products of 2 D operations and one exponential for each pair of a query and a key up to it."""
    pairs = dims["B"] * dims["H"] * dims["S"] * (dims["S"] + 1) // 2
    return {"matrix_flops": 4 * pairs * dims["D"], "exponentials": pairs}
