"""A read of shared memory that nothing has written is a fault where its value matters, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.rerun import UninitFill
from greenfast.spec.errors import UnsupportedError
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


#: An instruction that the emulator does not know.
UNKNOWN = 'long long r; asm volatile("stacksave.u64 %0;" : "=l"(r)); y[threadIdx.x] = r;'


def test_an_unknown_instruction_after_the_read_is_named_instead() -> None:
    with pytest.raises(UnsupportedError, match=r"stacksave\.u64 is not known to the emulator at k\.cu:5"):
        output(f"y[threadIdx.x] = threadIdx.x == 63 ? 7.f : v; {UNKNOWN}")


def test_a_read_that_decides_whether_an_unknown_instruction_runs_is_a_fault() -> None:
    with pytest.raises(KernelFaultError, match="nothing has written: byte 252"):
        output(f"y[threadIdx.x] = 0; if (threadIdx.x == 63 && v == 0.f) {{ {UNKNOWN} }}")


@pytest.mark.parametrize("broken", [1, 3])
def test_a_bug_of_the_emulator_in_a_further_run_is_no_fault_of_the_kernel(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0
    begin = UninitFill.begin

    def fail(fill: UninitFill, launch: int, machine: ResidentBlocks) -> None:
        nonlocal runs
        runs += 1
        if runs == broken:
            raise RuntimeError("no memory for the fill")
        begin(fill, launch, machine)

    monkeypatch.setattr(UninitFill, "begin", fail)
    with pytest.raises(UnsupportedError, match="a bug in the emulator: RuntimeError: no memory for the fill"):
        output("y[threadIdx.x] = threadIdx.x == 63 ? 7.f : v;")
