"""A read of shared memory that nothing has written is a fault where its value matters, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from tests.emulator.kernels import run

X = np.arange(64, dtype=np.float32)
READ = """__shared__ float s[64];
if (threadIdx.x < 63) s[threadIdx.x] = x[threadIdx.x];
__syncthreads();
float v = s[threadIdx.x];
"""


def output(use: str) -> list[float]:
    result = run(READ + use, {"x": X}, {"y": (64, "float32")}, threads=64)
    values: list[float] = result.outputs["y"].tolist()
    return values


@pytest.mark.parametrize(
    "use",
    [
        "y[threadIdx.x] = threadIdx.x == 63 ? 7.f : v;",
        "y[threadIdx.x] = __shfl_sync(~0u, v, threadIdx.x % 32 == 31 ? 30 : threadIdx.x % 32) * 0 + 7 * (v == v || 1);",
        "s[threadIdx.x] = v; __syncthreads(); y[threadIdx.x] = threadIdx.x == 63 ? 7.f : s[threadIdx.x];",
    ],
)
def test_a_value_that_is_thrown_away_is_no_fault(use: str) -> None:
    assert output(use)[63] == 7


@pytest.mark.parametrize(
    "use",
    [
        "y[threadIdx.x] = v;",
        "y[threadIdx.x] = v > 0.5f;",
        "y[threadIdx.x] = v != v;",
        "y[threadIdx.x] = fminf(fmaxf(v, 0.f), 1.f);",
        "y[threadIdx.x] = 0; __syncthreads(); for (int i = 0; i < ((int)(4 * v) & 3); ++i) atomicAdd(y, 0.f);",
        'y[threadIdx.x] = 0; if (threadIdx.x == 63) printf("%f", v);',
        "y[threadIdx.x] = x[(int)(80 * v) % 64];",
    ],
)
def test_a_value_that_matters_is_a_fault_with_its_line(use: str) -> None:
    with pytest.raises(
        KernelFaultError, match=r"nothing has written: byte 252 of 256 of shared memory \(s \+ 252\) at k\.cu:4"
    ):
        output(use)
