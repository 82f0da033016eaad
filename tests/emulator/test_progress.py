"""Polling loops: they terminate, or the kernel is refused in little time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from greenfast.emulator import scheduler
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.result import GridResult
from greenfast.spec.errors import UnsupportedError
from tests.emulator.kernels import SEEDS, run


def launched(
    body: str, count: int, *, threads: int, blocks: int = 1, seed: int = 0, before: str = "", cooperative: bool = False
) -> GridResult:
    """Return a kernel with ``count`` outputs and 64 integers of scratch memory that are zero at first."""
    return run(
        body,
        {"scratch": np.zeros(64 + 2 * blocks, np.int32)},
        {"y": (count, "int32"), "scratch": (64 + 2 * blocks, "int32")},
        threads=threads,
        blocks=blocks,
        seed=seed,
        before=before,
        cooperative=cooperative,
    )


@SEEDS
def test_a_thread_waits_for_another_of_its_warp(seed: int) -> None:
    body = """volatile int* flag = scratch;
    int t = threadIdx.x;
    if (t > 0) while (flag[0] < t);
    y[t] = flag[0];
    flag[0] = t + 1;"""
    assert (launched(body, 8, threads=8, seed=seed).outputs["y"] == np.arange(8)).all()


@SEEDS
def test_compare_and_swap_loops(seed: int) -> None:
    body = """int old = scratch[0], assumed;
    do { assumed = old; old = atomicCAS(scratch, assumed, assumed + (int)threadIdx.x); } while (old != assumed);
    __syncthreads();
    y[threadIdx.x] = ((volatile int*)scratch)[0];"""
    assert (launched(body, 64, threads=64, seed=seed).outputs["y"] == np.arange(64).sum()).all()


@pytest.mark.parametrize("ticket", ["blockIdx.x", "gridDim.x - 1 - blockIdx.x", "atomicAdd(scratch, 1)"])
def test_blocks_look_back(ticket: str) -> None:
    # One word holds both states: the block's sum is replaced by the inclusive prefix.
    body = """__shared__ int before, mine;
    volatile unsigned* words = (volatile unsigned*)scratch + 64;
    if (threadIdx.x == 0) {
      int b = TICKET, total = 0;
      mine = b;
      if (b > 0) {
        words[b] = (b + 1) << 2 | 1;
        for (int look = b - 1; look >= 0; --look) {
          unsigned w;
          while (((w = words[look]) & 3) == 0);
          total += w >> 2;
          if ((w & 3) == 2) break;
        }
      }
      words[b] = (total + b + 1) << 2 | 2;
      before = total;
    }
    __syncthreads();
    y[mine * blockDim.x + threadIdx.x] = before;""".replace("TICKET", ticket)
    blocks = 40
    for seed in range(2):
        result = launched(body, 32 * blocks, threads=32, blocks=blocks, seed=seed).outputs["y"].reshape(blocks, 32)
        assert (result == np.cumsum(np.arange(blocks))[:, None]).all()


GRID_BARRIER = """__syncthreads();
if (threadIdx.x == 0) {
  __threadfence();
  int target = (atomicAdd(scratch, 1) / gridDim.x + 1) * gridDim.x;
  while (*(volatile int*)scratch < target);
  __threadfence();
}
__syncthreads();"""
ROUNDS = """int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
y[i] = i;
for (int step = 1; step < 4; ++step) {{
  {sync}
  int v = y[(i + blockDim.x) % n];
  {sync}
  y[i] = v + step;
}}"""


@SEEDS
def test_cooperative_groups_synchronize_a_grid(seed: int) -> None:
    blocks, threads = 20, 64
    body = "auto grid = cooperative_groups::this_grid();\n" + ROUNDS.format(sync="grid.sync();")
    how: dict[str, Any] = {"threads": threads, "blocks": blocks, "seed": seed}
    how["before"] = "#include <cooperative_groups.h>"
    result = launched(body, blocks * threads, **how, cooperative=True).outputs["y"]
    assert (result == np.roll(np.arange(blocks * threads), -3 * threads) + 6).all()
    with pytest.raises(KernelFaultError, match="trap was executed"):
        launched(body, blocks * threads, **how)


def test_blocks_that_are_not_resident_never_come_to_a_barrier_of_the_grid() -> None:
    body = f"""__shared__ int most[40 << 10 >> 2];
    most[threadIdx.x] = 1;
    {GRID_BARRIER}
    if (blockIdx.x == 0) y[threadIdx.x] = most[31 - threadIdx.x];"""
    assert (launched(body, 32, threads=32, blocks=660).outputs["y"] == 1).all()
    message = r"in a loop that nothing ends.*40 blocks have not begun, 660 are resident at once"
    with pytest.raises(KernelFaultError, match=message):
        launched(body, 32, threads=32, blocks=700)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("while (true);", r"an endless loop: nothing leads out of it"),
        ("while (true) y[0] = 1;", r"an endless loop: nothing leads out of it"),
        ("for (unsigned i = 0;; ++i) y[i % 64] = 1;", r"an endless loop: nothing leads out of it"),
        ("while (true) atomicAdd(scratch, 1);", r"an endless loop: nothing leads out of it"),
        ("while (*(volatile int*)scratch == 0); y[0] = 1;", r"in a loop that nothing ends"),
        ("while (*(volatile int*)(scratch + threadIdx.x % 2) == 0) scratch[8] = 5; y[0] = 1;", r"that nothing ends"),
        (
            "y[threadIdx.x] = 0; while (((volatile int*)scratch)[threadIdx.x % 2] == 0) y[threadIdx.x]++;",
            r"an endless loop\?",
        ),
        ("while (atomicCAS(scratch, 1, 0) == 0); y[0] = 1;", r"in a loop that nothing ends"),
        (
            "if (threadIdx.x < 32) while (atomicCAS(scratch, 1, 0) == 0); __syncthreads(); y[0] = 1;",
            r"32 threads of warp 0 wait at k\.cu:1 .* in a loop that nothing ends; 32 threads of warp 1 wait at .*bar",
        ),
    ],
)
def test_a_loop_without_end_is_refused(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_SILENT_INSTRUCTIONS", 200_000)
    start = time.process_time()
    with pytest.raises(KernelFaultError, match=message + ".*k\\.cu:1"):
        launched(body, 64, threads=64)
    assert time.process_time() - start < 10


def test_a_long_loop_that_waits_for_nobody_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_SILENT_INSTRUCTIONS", 100_000)
    body = "unsigned v = threadIdx.x + 1; while (v != 0) v = v * 1664525u + 2; y[0] = v;"
    with pytest.raises(UnsupportedError, match=r"waits for no other thread: it may only be long.*k\.cu:1"):
        launched(body, 64, threads=32)


def test_a_wait_that_gives_up_ends() -> None:
    body = """int tries = 0;
    while (*(volatile int*)scratch == 0 && tries < 500) ++tries;
    y[threadIdx.x] = tries;"""
    assert (launched(body, 64, threads=64).outputs["y"] == 500).all()


def test_long_loops_of_arithmetic_end() -> None:
    body = (
        "unsigned v = threadIdx.x; for (int i = 0; i < 20000; ++i) v = v * 1664525u + 1013904223u; y[threadIdx.x] = v;"
    )
    v = np.arange(64, dtype=np.uint32)
    for _ in range(20000):
        v = v * np.uint32(1664525) + np.uint32(1013904223)
    assert (launched(body, 64, threads=64).outputs["y"].view(np.uint32) == v).all()
