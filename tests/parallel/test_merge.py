"""The kernel that merges partial results, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.merge import merge
from greenfast.spec.problem import Case, OutputSpec
from tests.emulator.kernels import run_source


def exact(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, first: int) -> tuple[Any, Any]:
    """The merge in float64, by weights that are shares of the sum of exponentials."""
    weight_a, weight_b = lse_a.double().exp(), torch.zeros_like(lse_a, dtype=torch.float64)
    weight_b[..., first:] = lse_b.double().exp()
    whole_b = torch.zeros_like(a, dtype=torch.float64)
    whole_b[:, :, first:] = b.double()
    total = weight_a + weight_b
    shares = [torch.where(total > 0, w / total, 0.0).unsqueeze(-1) for w in (weight_a, weight_b)]
    return (shares[0] * a.double() + shares[1] * whole_b).numpy(), total.log().numpy()


@pytest.mark.parametrize(
    ("dtypes", "columns", "first", "in_place"),
    [
        (("float16", "float16", "float16"), 24, 3, True),
        (("float16", "float16", "float32"), 64, 3, False),
        (("float32", "float16", "float32"), 8, 0, True),
        (("float32", "float16", "float16"), 64, 5, False),
    ],
)
def test_merge(dtypes: tuple[str, str, str], columns: int, first: int, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(columns)
    a, b = (torch.randn(2, 3, rows, columns, generator=generator) for rows in (9, 9 - first))
    a, b = a.to(getattr(torch, dtypes[0])), b.to(getattr(torch, dtypes[1]))
    lse_a, lse_b = (3 * torch.randn(2, 3, rows, generator=generator) for rows in (9, 9 - first))
    lse_a[0, 0, first], lse_b[0, 0, :2] = -torch.inf, -torch.inf  # a row without any key, and one with keys in a alone
    wanted, sums = exact(a, lse_a, b, lse_b, first)
    inputs = {"b": b.numpy(), "lse_a": lse_a.numpy(), "lse_b": lse_b.numpy()}
    outputs = {"lse_out": OutputSpec((2, 3, 9), "float32")}
    strides = [x.stride()[:3] for x in (a, b, a)]
    launch = merge.launch((2, 3, 9, columns), first, *strides)
    inputs["a"] = a.numpy()
    outputs["out"] = OutputSpec((2, 3, 9, columns), dtypes[2])
    result = run_source(merge.kernel(columns, *dtypes, in_place=in_place), launch, Case(inputs, outputs)).outputs
    assert np.allclose(result["lse_out"], sums, atol=1e-5)
    rows = slice(first, None) if in_place else slice(None)  # in place, the rows before are not written
    tolerance = 2e-6 if dtypes[2] == "float32" else 2e-3
    assert np.allclose(result["out"][:, :, rows].astype(float), wanted[:, :, rows], atol=tolerance)
