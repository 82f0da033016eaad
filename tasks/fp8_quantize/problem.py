"""The quantization problem: half tensors to 8-bit codes and a scale per head, bit for bit as the format defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from greenfast.numerics.formats import dequantize, quantize
from greenfast.numerics.inputs import VARIANTS as VARIANTS
from greenfast.numerics.inputs import standard_normal, varied
from greenfast.spec.problem import Case, OutputSpec, References


def _tensor(dims: Mapping[str, int], seed: int, variant: str) -> Tensor:
    return varied(standard_normal((dims["B"] * dims["H"], dims["S"], dims["D"]), 1, seed), variant, seed)[0]


def make_case(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> Case:
    """Input x (float16, (B*H, S, D)); outputs codes (uint8, same shape) and scale (float32, (B*H,))."""
    x = _tensor(dims, seed, variant).numpy()
    return Case({"x": x}, {"codes": OutputSpec(x.shape, "uint8"), "scale": OutputSpec(x.shape[:1], "float32")})


def references(dims: Mapping[str, int], seed: int, fmt: str, variant: str = "normal") -> References:
    """The tensor itself, and its exact quantization: the kernel may not round differently (bound 0)."""
    x = _tensor(dims, seed, variant)
    codes, scale = quantize(x, fmt)
    exact = _with_scale(dequantize(codes, scale, fmt), scale)
    return References(full=_with_scale(x.double(), scale), exact=exact, bound=np.zeros_like(exact))


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """Per head the S * D values of the codes, and the scale: (B*H, S*D + 1)."""
    codes, scale = torch.from_numpy(outputs["codes"]), torch.from_numpy(outputs["scale"])
    return _with_scale(dequantize(codes, scale, fmt), scale)


def _with_scale(values: Tensor, scale: Tensor) -> NDArray[np.float64]:
    # Codes twice as large with half the scale have the same values, so the scale is compared too.
    joined: NDArray[np.float64] = torch.cat([values.flatten(1), scale.double().view(-1, 1)], dim=1).numpy()
    return joined
