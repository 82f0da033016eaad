"""The attention problem: scaled-dot-product attention on quantized Q, K and V with a scale per head, output in half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from greenfast.numerics.attention import attention, attention_with_bounds
from greenfast.numerics.formats import dequantize, quantize
from greenfast.numerics.inputs import VARIANTS as VARIANTS
from greenfast.numerics.inputs import standard_normal, varied
from greenfast.spec.problem import Case, OutputSpec, References


def _tensors(dims: Mapping[str, int], seed: int, variant: str) -> tuple[Tensor, Tensor, Tensor]:
    """Unquantized q, k, v: float16 (B * H, S, D)."""
    q, k, v = varied(standard_normal((dims["B"] * dims["H"], dims["S"], dims["D"]), 3, seed), variant, seed)
    return q, k, v


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Codes q, k, v (uint8, (B*H, S, D)) with q_scale, k_scale, v_scale (float32, (B*H,)); output out (float16)."""
    inputs = {}
    for name, x in zip("qkv", _tensors(dims, seed, variant), strict=True):
        codes, scale = quantize(x, fmt)
        inputs[name] = codes.numpy()
        inputs[f"{name}_scale"] = scale.numpy()
    return Case(inputs, {"out": OutputSpec(inputs["q"].shape, "float16")})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """Attention on the unquantized and on the dequantized inputs, and the error bound for P in half."""
    scale = 1.0 / math.sqrt(dims["D"])
    unquantized = _tensors(dims, seed, variant)
    q, k, v = (dequantize(*quantize(x, fmt), fmt) for x in unquantized)
    exact, (bound,) = attention_with_bounds(q, k, v, scale)
    return References(full=attention(*unquantized, scale).numpy(), exact=exact.numpy(), bound=bound.numpy())


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """The output as float64, (B*H, S, D)."""
    return outputs["out"].astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Two products of 2 S^2 D operations and one exponential per score, for every head."""
    scores = dims["B"] * dims["H"] * dims["S"] ** 2
    return {"matrix_flops": 4 * scores * dims["D"], "exponentials": scores}
