"""A second launch in the same memory: reads of state from the first launch are found."""

from __future__ import annotations

import re

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.device.session import Executable, KernelImage, RunResult
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.judge.emulator_session import EmulatorSession
from tests.emulator.kernels import request

X = np.arange(128, dtype=np.float32)
HERE = r"at k\.cu:1, block \(\d, 0, 0\), thread \(\d+, 0, 0\)"


def run(body: str, before: str = "", *, blocks: int = 2, in_place: bool = False) -> RunResult:
    """A case as CORRECTNESS runs it: y[i] = 2 x[i] is right; ``i`` is the thread of the grid, of 64 in each block."""
    asked = request(
        f"int i = blockIdx.x * blockDim.x + threadIdx.x % 64; {body}",
        {"x": np.resize(X, 64 * blocks), **({"y": np.ones(64 * blocks, np.float32)} if in_place else {})},
        {"y": (64 * blocks, "float32")},
        parameters="float* x, float* y",
        args=("x", "y"),
        threads=64,
        blocks=blocks,
        before=before,
    )
    ptx = to_ptx(asked.kernel, asked.target, assemble=False)
    image = KernelImage(b"", "k", (64, 1, 1), 0, (), ptx)
    return EmulatorSession().run(Executable.single(image, asked.plan), asked.case, 2)


@pytest.mark.parametrize(
    ("before", "body", "message"),
    [
        pytest.param(
            "__device__ float sum;",
            "y[i] = 2 * x[i]; __syncthreads(); if (i == 0) sum += 1;",
            rf"4-byte read of what an earlier launch left: byte 0 of 'variable sum' \(4 bytes\) {HERE}",
            id="adds up",
        ),
        pytest.param(
            "__device__ unsigned launches;",
            "y[i] = 2 * x[i]; if (i == 0) atomicAdd(&launches, 1u);",
            rf"4-byte atomic access of what an earlier launch left: byte 0 of 'variable launches' \(4 bytes\) {HERE}",
            id="counts its launches",
        ),
        pytest.param(
            "__device__ float kept[128]; __device__ const float* of;",
            "if (*(const float* volatile*)&of != x) kept[i] = 2 * x[i]; y[i] = kept[i]; if (i == 0)"
            "*(const float* volatile*)&of = x;",
            rf"8-byte read of what an earlier launch left: byte 0 of 'variable of' \(8 bytes\) {HERE}",
            id="keeps results by address",
        ),
        pytest.param(
            "",
            "__shared__ float kept[65]; if (kept[64] != 7) kept[i % 64] = 2 * x[i]; __syncthreads();"
            "y[i] = kept[i % 64]; kept[64] = 7;",
            rf"read of an element that nothing has written: byte 256 of 260 of shared memory \(kept \+ 256\) {HERE}",
            id="stashes in shared memory for its next launch",
        ),
        pytest.param(
            "",
            "if (y[i] == 2 * x[i]) return; y[i] = 2 * x[i];",
            rf"4-byte read of an element that nothing has written: byte \d+ of 'y' \(512 bytes\) {HERE}",
            id="returns early if the output is there",
        ),
    ],
)
def test_what_an_earlier_launch_left_is_refused_with_line_and_thread(before: str, body: str, message: str) -> None:
    with pytest.raises(KernelFaultError, match=message):
        run(body, before)


@pytest.mark.parametrize(
    ("before", "body"),
    [
        pytest.param("__device__ float scratch[5120];", "scratch[i] = x[i]; y[i] = 2 * scratch[i];", id="scratch"),
        pytest.param(
            "__device__ unsigned done;",
            "y[i] = 2 * x[i]; if (threadIdx.x == 0) atomicInc(&done, gridDim.x - 1);",
            id="a counter that returns to zero",
        ),
        pytest.param("__device__ const float two[2] = {1, 2};", "y[i] = two[1 + i / 10000] * x[i];", id="a table"),
    ],
)
@pytest.mark.parametrize("blocks", [2, 80])  # the latter is too large to be repeated for its order alone
def test_memory_that_a_launch_leaves_as_it_was_or_writes_first_is_none_of_it(
    before: str, body: str, blocks: int
) -> None:
    result = run(body, before, blocks=blocks)
    assert (result.violations, result.repeatable) == ([], True)
    assert (result.outputs["y"] == 2 * np.resize(X, 64 * blocks)).all()


def test_a_large_case_that_leaves_something_runs_again() -> None:
    with pytest.raises(KernelFaultError, match="what an earlier launch left"):
        run("y[i] = 2 * x[i]; if (i == 0) sum += 1;", "__device__ float sum;", blocks=80)


def test_an_output_in_place_begins_each_launch_with_its_input() -> None:
    result = run("y[i] += 2 * x[i];", in_place=True)
    assert (result.violations, result.repeatable) == ([], True)
    assert (result.outputs["y"] == 1 + 2 * X).all()


def test_what_only_a_later_launch_leaves_unwritten_is_found() -> None:
    first = "if (*(volatile int*)&launches == 0) y[i] = 2 * x[i];"
    last = "if (threadIdx.x == 0) *(volatile int*)&launches = 0x40000000;"
    with pytest.raises(KernelFaultError, match=re.escape("of 'variable launches'")):
        run(first + last, "__device__ int launches;", blocks=1)
