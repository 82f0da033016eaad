"""``observe``: counts by source line, watched values, a warp's trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast import emulator
from greenfast.emulator import Observe
from greenfast.emulator.machine.observed import LineAccesses, LineCounts, Observed, format_step, format_values
from greenfast.spec.errors import CompileError, UsageError
from greenfast.spec.facts import KernelCounts

KERNEL = """#include <cuda_fp16.h>
__device__ float scale(float a) {
  return 2 * a + 1;
}
extern "C" __global__ void k(const float* x, float* y, int n, int stride) {
  __shared__ float s[64];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  s[2 * threadIdx.x] = 1;
  __syncwarp();
  if (i < n)
    y[i] = scale(x[i * stride]) + s[2 * threadIdx.x];
  else if (i == 12345)
    y[0] = 3;
  for (int j = 0; j < i % 4; j++) {
    y[i] += x[j];
  }
}
"""
X = np.random.default_rng(0).normal(0, 1, 512).astype(np.float32)


def run(
    observe: Observe, *, source: str = KERNEL, n: int = 60, stride: int = 4, orders: int = 1, check: bool = True
) -> tuple[Observed, np.ndarray[Any, Any], KernelCounts | None]:
    y = np.zeros(64, np.float32)
    report = emulator.run(
        source, grid=2, block=32, args=[emulator.In(X), y, n, stride], observe=observe, orders=orders, check=check
    )
    assert report.observed is not None
    return report.observed, y, report.counts


def expect() -> np.ndarray[Any, Any]:
    y = np.zeros(64, np.float32)
    for i in range(64):
        if i < 60:
            y[i] = np.float32(2) * X[4 * i] + np.float32(1) + np.float32(1)
        for j in range(i % 4):
            y[i] += X[j]
    return y


def by_line(observed: Observed) -> dict[int, LineCounts]:
    return {line.line: line for line in observed.lines if line.file == "kernel.cu"}


def test_lines_have_threads_sectors_and_conflicts() -> None:
    observed, y, counts = run(Observe(lines=True))
    assert np.allclose(y, expect())
    lines = by_line(observed)
    assert [lines[n].threads for n in (3, 8, 11, 12, 13, 15)] == [60, 64, 60, 4, 0, 48]
    assert (lines[13].instructions, lines[13].executed_code) == (0, 0)
    assert lines[13].code > 0
    # Every fourth float: a warp's 32 floats are in 16 sectors, its 28 floats in 14; adjacent they would be in 4.
    assert lines[11].global_loads == LineAccesses(requests=2, transactions=30, ideal=8)
    assert lines[11].global_stores == LineAccesses(requests=2, transactions=8, ideal=8)
    # Every second word of shared memory: two passes.
    assert lines[8].shared_stores == LineAccesses(requests=2, transactions=4, ideal=2)
    assert lines[11].shared_loads == LineAccesses(requests=2, transactions=4, ideal=2)
    assert lines[8].global_stores == LineAccesses()
    assert counts is not None
    assert sum(line.instructions for line in observed.lines) <= counts.warp_instructions
    assert sum(line.global_loads.transactions for line in observed.lines) == counts.global_load_sectors
    assert sum(line.global_stores.transactions for line in observed.lines) == counts.global_store_sectors
    passes = sum(line.shared_loads.transactions + line.shared_stores.transactions for line in observed.lines)
    assert passes == counts.shared_passes


def test_a_broadcast_needs_one_sector() -> None:
    observed, _, _ = run(Observe(lines=True), stride=0)
    assert by_line(observed)[11].global_loads == LineAccesses(requests=2, transactions=2, ideal=2)


def test_sides_of_branches_and_inline_stacks() -> None:
    lines = by_line(run(Observe(lines=True))[0])
    assert {side.to_line: side.threads for side in lines[10].sides} == {11: 60, 12: 4}
    assert {side.to_line: side.threads for side in lines[12].sides} == {13: 0, 14: 4}
    assert [[(call.file, call.line, call.function) for call in stack] for stack in lines[3].stacks] == [
        [("kernel.cu", 11, "k")]
    ]
    assert (lines[3].function, lines[11].function) == ("scale", "k")


def test_threads_of_several_batches_of_blocks_are_counted_once() -> None:
    source = 'extern "C" __global__ void k(int* y) {\n  if (threadIdx.x == 5)\n    atomicAdd(y, 1);\n}'
    y = np.zeros(1, np.int32)
    report = emulator.run(source, grid=60, block=512, args=[y], observe=Observe(lines=True))
    assert y[0] == 60
    assert report.observed is not None
    assert by_line(report.observed)[3].threads == 60


def test_counts_and_results_are_those_of_a_run_that_nobody_observes() -> None:
    y = np.zeros(64, np.float32)
    plain = emulator.run(KERNEL, grid=2, block=32, args=[emulator.In(X), y, 60, 4], orders=1)
    assert plain.observed is None
    _, observed_y, counts = run(Observe(lines=True, trace=((0, 0, 0), 0)))
    assert counts == plain.counts
    assert observed_y.tobytes() == y.tobytes()


def test_watched_values_are_those_where_the_line_begins() -> None:
    # Lines 11 and 13 are bodies without braces: the marker must not take their place.
    observed, y, _ = run(Observe(watch=["11:i, x[i * stride], i & 1", "kernel.cu:15:j,y[i]", "13:y"]), orders=2)
    assert np.allclose(y, expect())
    values: dict[int, list[Any]] = {}
    for step in observed.watched:
        for n, thread in enumerate(t for t in range(32) if step.mask >> t & 1):
            row = tuple(column[n] for column in step.values.values())
            values.setdefault(step.line, []).append((32 * step.block[0] + 32 * step.warp + thread, *row))
    assert sorted(values[11]) == [(i, i, float(X[4 * i]), i & 1) for i in range(60)]
    assert sorted(row[:2] for row in values[15]) == [(i, j) for i in range(64) for j in range(i % 4)]
    partial = {(i, j): float(v) for i, j, v in values[15]}
    assert partial[63, 0] == 0
    assert np.isclose(partial[62, 1], X[0])
    assert 13 not in values
    assert observed.watched[0].function == "k"
    assert list(observed.watched[0].values) == ["i", "x[i * stride]", "i & 1"]


def test_values_of_every_type() -> None:
    source = """#include <cuda_fp16.h>
    #include <cuda_bf16.h>
    extern "C" __global__ void k(int* y) {
      signed char a = -3; unsigned char b = 200; short c = -300; unsigned d = 4000000000u; long long e = -5000000000ll;
      unsigned long long f = 1ull << 63; float g = 0.1f; double h = 0.1; bool i = threadIdx.x & 1;
      __half j = __float2half(-1.5f); __nv_bfloat16 l = __float2bfloat16(3.5f);
      y[threadIdx.x] = a + b + c + d + e + f + g + h + i + (int)__half2float(j) + (int)__bfloat162float(l);
    }"""
    names = "a,b,c,d,e,f,g,h,i,j,l"
    y = np.zeros(2, np.int32)
    report = emulator.run(source, grid=1, block=2, args=[y], observe=Observe(watch=[f"7:{names},y"]), orders=1)
    assert report.observed is not None
    (step,) = report.observed.watched
    assert step.mask == 3
    assert [step.values[name][1] for name in names.split(",")] == [
        -3, 200, -300, 4000000000, -5000000000, 1 << 63, np.float32(0.1), 0.1, True, -1.5, 3.5
    ]  # fmt: skip
    assert step.values["i"] == [False, True]
    assert step.values["y"][0] > 1 << 32


@pytest.mark.parametrize(
    ("watch", "message"),
    [
        ("i", "give LINE:EXPRESSION"),
        ("0:i", "give LINE:EXPRESSION"),
        ("3:i,,j", "an expression is empty"),
        ("99:i", "has 17 lines"),
        ("other.cuh:3:i", r"lines of kernel\.cu can be watched, not of other\.cuh"),
        ("1:i", "directive of the preprocessor"),
        ("12:i", "begins with 'else'"),
    ],
)
def test_a_wrong_watch_is_named(watch: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(Observe(watch=[watch]))


@pytest.mark.parametrize(
    ("line", "message"),
    [(3, "is inside a comment"), (5, "continues the statement"), (7, "follows a #pragma"), (9, "begins with 'case'")],
)
def test_a_line_that_begins_no_statement_is_refused(line: int, message: str) -> None:
    source = """extern "C" __global__ void k(int* y) {
      /* a comment
      y[0] = 1; */
      int i = threadIdx.x +
          1;
      #pragma unroll
      for (int n = 0; n < 3; n++) i += n;
      switch (i) {
        case 4: y[0] = 2;
      }
    }"""
    with pytest.raises(UsageError, match=f"line {line} {message}"):
        emulator.run(source, grid=1, block=1, args=[np.zeros(1, np.int32)], observe=Observe(watch=[f"{line}:i"]))


def test_an_unknown_name_in_a_watch_is_an_error_of_the_compiler() -> None:
    with pytest.raises(CompileError, match=r"(?s)kernel\.cu\(11\).*nothing.*with --watch"):
        run(Observe(watch=["11:nothing"]))


def test_a_trace_has_each_instruction_of_one_warp() -> None:
    observed, _, _ = run(Observe(lines=True, trace=((1, 0, 0), 0)))
    assert {(step.block, step.warp) for step in observed.trace} == {((1, 0, 0), 0)}
    stores = [step for step in observed.trace if step.instruction.startswith("st.global") and step.line == 11]
    assert [step.mask for step in stores] == [(1 << 28) - 1]
    stored = list(stores[0].values.values())[-1]
    assert np.allclose(stored, 2 * X[4 * np.arange(32, 60)] + 2)
    index = next(step for step in observed.trace if step.instruction.startswith("mad.lo.s32"))
    assert next(iter(index.values.values())) == list(range(32, 64))
    assert "32..63" in format_step(index)
    with pytest.raises(UsageError, match=r"--trace-warp 2,0,0:0: the grid is 2,1,1, and a block has 1 warps"):
        run(Observe(trace=((2, 0, 0), 0)))


def test_values_in_short() -> None:
    assert format_values([7, 7, 7]) == "7"
    assert format_values([1, 2, 3]) == "1..3"
    assert format_values([0.5, 1.0, 1.5]) == "0.5..1.5 step 0.5"
    assert format_values([1, 2, 4]) == "1 2 4"
    assert format_values([float("nan"), float("nan")]) == "nan"
    assert format_values([True, False, True]) == "1 0 1"


def test_a_fault_has_the_observations_before_it() -> None:
    with pytest.raises(emulator.KernelFaultError, match="out of bounds") as caught:
        run(Observe(lines=True, watch=["11:i"], trace=((0, 0, 0), 0)), stride=400)
    observed = caught.value.observed
    assert observed is not None
    assert by_line(observed)[8].threads == 64
    assert observed.watched[0].values["i"] == list(range(32))
    assert observed.trace[-1].line in (10, 11)
    again, _, _ = run(Observe(lines=True), stride=400, check=False)
    assert by_line(again)[8].threads == 64


def test_reruns_leave_the_observations_of_one_run() -> None:
    # A read of uninitialised memory that does not matter: the kernel runs again with several fills.
    source = """extern "C" __global__ void k(float* y) {
      __shared__ float s[33];
      s[threadIdx.x] = threadIdx.x;
      __syncthreads();
      float next = s[threadIdx.x + 1];
      y[threadIdx.x] = threadIdx.x < 31 ? next : 0;
    }"""
    y = np.zeros(32, np.float32)
    report = emulator.run(source, grid=1, block=32, args=[y], observe=Observe(lines=True), orders=1)
    assert np.array_equal(y, [*range(1, 32), 0])
    assert report.observed is not None
    assert by_line(report.observed)[6].global_stores == LineAccesses(requests=1, transactions=4, ideal=4)
