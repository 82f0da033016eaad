"""A number that all threads of a block load and one updates: a race only if other threads use their values."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from tests.emulator.kernels import request

MEAN = np.arange(3, dtype=np.float32)
LOAD = "float v = mean[blockIdx.x];\n"


def left(body: str, threads: int) -> tuple[list[float], list[float]]:
    """Return the initialised ``mean`` and the per-thread ``y`` after a kernel of three blocks."""
    outputs = {"mean": (3, "float32"), "y": (3 * threads, "float32")}
    asked = request(
        f"int i = blockIdx.x * blockDim.x + threadIdx.x;\n{LOAD}{body}", {"mean": MEAN}, outputs, threads=threads
    )
    ptx, plan = to_ptx(asked.kernel, asked.target, assemble=False), replace(asked.plan, grid=(3, 1, 1))
    result = run_grid(ptx, "k", asked.kernel.block, 0, plan, asked.case.inputs, asked.case.outputs)
    return result.outputs["mean"].tolist(), result.outputs["y"].tolist()


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize(
    "store",
    [
        "if (threadIdx.x == 0) mean[blockIdx.x] = 0.5f * v + 1; y[i] = 7;",
        "float w = 2 * mean[blockIdx.x]; if (threadIdx.x == 0) { mean[blockIdx.x] = (v + w) / 6 + 1; } y[i] = 7;",
        "if (threadIdx.x == 0) { mean[blockIdx.x] = 0.5f * v + 1; } y[i] = threadIdx.x ? 7 : v * 0 + 7;",
    ],
)
def test_a_value_that_the_others_throw_away_is_no_race(store: str, threads: int) -> None:
    assert left(store, threads) == ((0.5 * MEAN + 1).tolist(), [7] * 3 * threads)


@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize(
    "store",
    [
        "if (threadIdx.x == 0) mean[blockIdx.x] = 0.5f * v + 1; y[i] = v;",
        "if (threadIdx.x == 0) mean[blockIdx.x] = 0.5f * v + 1; y[i] = v > 1;",
        "mean[blockIdx.x] = v + threadIdx.x; y[i] = 7;",
        "if (threadIdx.x == 0) { mean[(blockIdx.x + 1) % 3] = v; } y[i] = 7;",
    ],
)
def test_a_value_that_matters_is_a_race(store: str, threads: int) -> None:
    with pytest.raises(KernelFaultError, match=re.escape("nothing orders this") + "|different values to one place"):
        left(store, threads)
