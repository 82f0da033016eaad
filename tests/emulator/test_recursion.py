"""Functions that call themselves: each thread has its own frames, however deep and wherever threads part."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.errors import UnsupportedError
from tests.emulator.kernels import run


def output(before: str, body: str, x: np.ndarray, threads: int = 64, seed: int = 0) -> list[int]:
    result = run(body, {"x": x}, {"y": (threads, "int32")}, threads=threads, before=before, seed=seed)
    values: list[int] = result.outputs["y"].tolist()
    return values


MUTUAL = """
__noinline__ __device__ int odd(int n);
__noinline__ __device__ int even(int n) { int kept = n * 3; return n == 0 ? 1 : odd(n - 1) + kept; }
__noinline__ __device__ int odd(int n) { int kept = n * 5; return n == 0 ? -1 : kept - even(n - 1); }
"""


def even(n: int) -> int:
    return 1 if n == 0 else odd(n - 1) + 3 * n


def odd(n: int) -> int:
    return -1 if n == 0 else 5 * n - even(n - 1)


@pytest.mark.parametrize("seed", range(2))
def test_two_functions_that_call_each_other(seed: int) -> None:
    x = np.arange(64, dtype=np.int32) % 11
    result = output(MUTUAL, "int t = threadIdx.x; y[t] = t % 3 ? even(x[t]) : odd(x[t]);", x, seed=seed)
    assert result == [even(int(n)) if t % 3 else odd(int(n)) for t, n in enumerate(x)]


QUICK = """
__noinline__ __device__ int select(int* a, int low, int high, int k) {
  int pivot = a[high], at = low;
  for (int i = low; i < high; ++i)
    if (a[i] < pivot) { int v = a[i]; a[i] = a[at]; a[at++] = v; }
  a[high] = a[at]; a[at] = pivot;
  if (at == k) return a[k];
  return at < k ? select(a, at + 1, high, k) + 0 * pivot : select(a, low, at - 1, k) + 0 * pivot;
}
"""


def test_frames_outlive_deeper_calls_and_shared_memory_is_the_blocks() -> None:
    body = """__shared__ int s[64][9];
int t = threadIdx.x;
for (int i = 0; i < 9; ++i) s[t][i] = x[t * 9 + i];
y[t] = select(s[t], 0, 8, t % 9);"""
    x = np.random.default_rng(3).integers(-99, 99, (64, 9)).astype(np.int32)
    assert output(QUICK, body, x) == [int(np.sort(row)[t % 9]) for t, row in enumerate(x)]


TREE = """__noinline__ __device__ int tree(int n, int d) {
  return d == 0 ? n : tree(2 * n, d - 1) - tree(2 * n + 1, d - 1) * n;
}"""


def tree(n: int, d: int) -> int:
    return n if d == 0 else tree(2 * n, d - 1) - tree(2 * n + 1, d - 1) * n


def test_two_calls_in_one_expression_and_a_shuffle_behind_them() -> None:
    x = np.arange(64, dtype=np.int32) % 4
    body = "int t = threadIdx.x; int v = tree(x[t] + 1, t % 5); y[t] = __shfl_xor_sync(~0u, v, 1);"
    values = [tree(int(n) + 1, t % 5) for t, n in enumerate(x)]
    assert output(TREE, body, x) == [values[t ^ 1] for t in range(64)]


def test_calls_without_an_end_are_a_fault_with_the_line() -> None:
    before = "__noinline__ __device__ int deep(int n) { return n == -7 ? 0 : deep(n | 1) * 3 + 1; }"
    with pytest.raises(KernelFaultError, match=r"calls within each other more than 1024 deep"):
        output(before, "y[threadIdx.x] = deep(x[threadIdx.x]);", np.zeros(64, np.int32))


def test_a_local_variable_whose_address_is_taken_is_refused() -> None:
    before = """__noinline__ __device__ int walk(int* to, int n) {
  int own[4] = {n, n, n, n};
  own[n & 3] += *to;
  return n == 0 ? own[1] : walk(own, n - 1) * 2 + own[n & 1];
}"""
    with pytest.raises(UnsupportedError, match=r"takes the address of its local variable"):
        output(before, "int v = x[threadIdx.x]; y[threadIdx.x] = walk(&v, 3);", np.zeros(64, np.int32))
