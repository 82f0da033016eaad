# ruff: noqa: E501
"""Doubling as a kernel family: KERNEL is the number of the rung's text in KERNELS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import KernelSource, Launch

FOLDER = Path(__file__).parent
#: The texts of the kernels; the place of a rung's kernel is its value of KERNEL.
KERNELS = {
    "good": r"""// The control: nothing is wrong with this kernel.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
}
""",
    "unwritten": r"""// Writes nothing: right wherever the output still holds an earlier answer.
extern "C" __global__ void doubling(float* x, float* y, int n) {
  if (n < 0) y[0] = x[0];
}
""",
    "tail_unwritten": r"""// Leaves the elements after the last whole block unwritten.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  const int whole_blocks = n / static_cast<int>(blockDim.x) * static_cast<int>(blockDim.x);
  if (i < whole_blocks) y[i] = 2.0f * x[i];
}
""",
    "zeros": r"""// Writes zeros, like a kernel without its accumulation.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 0.0f;
}
""",
    "nan": r"""// One element is NaN (another one than the poison): a comparison such as |error| > limit is false for it.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = i == n / 2 ? __int_as_float(0x7fc00000) : 2.0f * x[i];
}
""",
    "infinity": r"""// One element is infinite.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = i == n / 2 ? __int_as_float(0x7f800000) : 2.0f * x[i];
}
""",
    "input_overwritten": r"""// Uses its input as scratch memory.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  x[i] *= 2.0f;
  y[i] = x[i];
}
""",
    "writes_in_front": r"""// Writes one element in front of the output.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
  if (i == 0) y[-1] = 0.0f;
}
""",
    "writes_behind": r"""// Writes one element past the output: the classic <= in place of <.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
  if (i == n - 1) y[n] = 0.0f;
}
""",
    "reads_behind": r"""// Reads one element past the input. Its weight is zero, so only the value there decides.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = fmaf(0.0f, x[i + 1], 2.0f * x[i]);
}
""",
    "remembers": r"""// An accumulator that is not reset: right on the first launch, off by what that left on the next.
#include "element.cuh"

__device__ float sum;

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  y[i] = fmaf(2.0f, x[i], 1e-3f * *reinterpret_cast<volatile float*>(&sum));
  // At the end of the grid, when most of it has read the sum; each later launch reads another one.
  if (i == n - 1) sum += 1.0f;
}
""",
    "later_wrong": r"""// Right on the warm-up and wrong later.
#include "launch_number.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  const bool good = launch_number() < kGoodLaunches;
  if (i < n) y[i] = good ? 2.0f * x[i] : x[i];
}
""",
    "later_idle": r"""// Stops working after some launches; the output still holds the answer of an earlier one.
#include "launch_number.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  const bool good = launch_number() < kGoodLaunches;
  if (i < n && good) y[i] = 2.0f * x[i];
}
""",
    "one_shape": r"""// Right for one shape only.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = n == 1024 ? 2.0f * x[i] : x[i];
}
""",
    "one_seed": r"""// Right for seed 0 only, which it knows by the first element.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  constexpr int kFirstOfSeed0 = 0x3f8f0e3d;
  const int i = element();
  if (i < n) y[i] = __float_as_int(x[0]) == kFirstOfSeed0 ? 2.0f * x[i] : x[i];
}
""",
    "cached_by_shape": r"""// Keeps its result and gives it again wherever the shape is the same.
#include "element.cuh"

__device__ float results[1 << 20];
__device__ int sizes[1 << 20];

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  if (sizes[i] != n) {
    results[i] = 2.0f * x[i];
    sizes[i] = n;
  }
  y[i] = results[i];
}
""",
    "order_dependent": r"""// A result that depends on the order in which blocks arrive, as floating-point atomics and unsynchronized updates give:
// always inside the tolerance, and never twice the same.
#include "element.cuh"

__device__ unsigned arrived;

extern "C" __global__ void doubling(float* x, float* y, int n) {
  __shared__ unsigned place;
  // Wraps at the last block, so that each launch counts from 0.
  if (threadIdx.x == 0) place = atomicInc(&arrived, gridDim.x - 1);
  __syncthreads();
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i] * (place % 2 == 0 ? 1.0f : 1.0f + 0x1p-13f);
}
""",
    "hang": r"""// Waits for a flag that is never set.
#include "element.cuh"

__device__ volatile int flag;

extern "C" __global__ void doubling(float* x, float* y, int n) {
  while (flag == 0) {
  }
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
}
""",
    "wild_pointer": r"""// Writes through a pointer to nowhere.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i + (1ll << 40)] = 2.0f * x[i];
}
""",
    "trap": r"""// Stops the device, as a failed assertion does.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
  if (i == n - 1) __trap();
}
""",
    "too_much_smem": r"""// Right, but family.py asks for more dynamic shared memory than any multiprocessor has.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  extern __shared__ float stage[];
  const int i = element();
  if (i < n) stage[threadIdx.x] = x[i];
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}
""",
    "too_many_registers": r"""// Right, but family.py launches it in blocks of 1024 threads, and a multiprocessor has not the registers for one: there
// are no __launch_bounds__ that would have told the compiler.
#include "many_values.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) { double_with_many_values(x, y, n); }
""",
    "spills": r"""// Right, but the launch bounds leave it so few registers that values are spilled.
#include "many_values.cuh"

extern "C" __global__ void __launch_bounds__(1024, 2) doubling(float* x, float* y, int n) {
  double_with_many_values(x, y, n);
}
""",
    "local_array": r"""// Right, but its array is indexed at run time and so is stored in local memory.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  float values[32];
  for (int k = 0; k < 32; ++k) values[k ^ (n & 31)] = x[i] * static_cast<float>(k);
  y[i] = values[2 ^ (n & 31)];
}
""",
    "no_async_copy": r"""// Right, but without the asynchronous copies that its rung promises.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
}
""",
    "slow": r"""// The control for the two below: right, and the work is done each time.
#include "element.cuh"
#include "work.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  work();
  y[i] = 2.0f * x[i];
}
""",
    "skips_written": r"""// Works only where the output is still poisoned, and finds it written on every timed launch.
#include "element.cuh"
#include "work.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n || y[i] == y[i]) return;
  work();
  y[i] = 2.0f * x[i];
}
""",
    "memoizes": r"""// Keeps its results by the input's address and content, and so works on the first launch of a timed input only.
#include "element.cuh"
#include "work.cuh"

__device__ float arguments[1 << 20];
__device__ float results[1 << 20];
__device__ const float* pointers[1 << 20];

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  if (pointers[i] != x || arguments[i] != x[i]) {
    work();
    results[i] = 2.0f * x[i];
    arguments[i] = x[i];
    pointers[i] = x;
  }
  y[i] = results[i];
}
""",
    "works_on_launches": r"""// Works as long as it is watched, and then on every 341st launch: once the last one, after 1 + 100 and 8 blocks of 30.
#include "counted.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned number = counted(i);
  if (number < kWatched || number % 341 == 340) y[i] = 2.0f * x[i];
}
""",
    "every_second_launch": r"""// Works on every second launch once it is timed.
#include "counted.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned number = counted(i);
  if (number < kWatched || number % 2 == 0) y[i] = 2.0f * x[i];
}
""",
    "first_address": r"""// Once it is timed, works for the first output address that it saw, and for no other.
#include "counted.cuh"

__device__ float* first_of[1 << 20];

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned number = counted(i);
  if (number == 0) first_of[i] = y;
  if (number < kWatched || first_of[i] == y) y[i] = 2.0f * x[i];
}
""",
    "previous_output": r"""// Once it is timed, writes the result of the launch before.
#include "counted.cuh"

__device__ float previous[1 << 20];

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const float result = 2.0f * x[i];
  y[i] = counted(i) < kWatched ? result : previous[i];
  previous[i] = result;
}
""",
    "cached_by_address": r"""// Keeps its results by the output's address (in MiB) once it is timed, whatever the input is by then.
#include "counted.cuh"

constexpr int kKept = 8;
__device__ unsigned long long addresses[kKept][1 << 17];
__device__ float results[kKept][1 << 17];

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned long long address = reinterpret_cast<unsigned long long>(y) >> 20;  // no launch has the very same
  const bool watched = counted(i) < kWatched;
  for (int k = 0; k < kKept && !watched; ++k) {
    if (addresses[k][i] == 0) {
      addresses[k][i] = address;
      results[k][i] = 2.0f * x[i];
    }
    if (addresses[k][i] == address) {
      y[i] = results[k][i];
      return;
    }
  }
  y[i] = 2.0f * x[i];
}
""",
    "input_restored": r"""// Changes an input on every second launch once it is timed, and restores it on the next.
#include "counted.cuh"

__device__ float original[1 << 20];

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned number = counted(i);
  y[i] = 2.0f * x[i];
  if (number < kWatched) return;
  if (number % 2 == 0) {
    original[i] = x[i];
    x[i] = 0.0f;
  } else {
    x[i] = original[i];
  }
}
""",
    "guards_in_between": r"""// Writes past its output on every second launch once it is timed, and restores that on the next.
#include "counted.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned number = counted(i);
  y[i] = 2.0f * x[i];
  if (i == n - 1 && number >= kWatched) reinterpret_cast<unsigned*>(y)[n] = number % 2 == 0 ? 0u : 0xFFFFFFFFu;
}
""",
    "stale_shared": r"""// Leaves its results in shared memory, and finds them there on the next launch with the same input.
#include "element.cuh"
#include "work.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  __shared__ volatile float arguments[256];
  __shared__ volatile float results[256];
  const int i = element();
  if (i >= n) return;
  const int t = threadIdx.x;
  const float found = arguments[t];
  if (found != x[i] || results[t] != 2.0f * found) {
    work();
    arguments[t] = x[i];
    results[t] = 2.0f * x[i];
  }
  y[i] = results[t];
}
""",
}
_THREADS = 256
# (threads, dynamic shared memory in bytes) of the kernels that ask for more than they can get
_LAUNCH_BOUNDS = {"too_much_smem": (_THREADS, 300 * 1024), "too_many_registers": (1024, 0)}


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Render a kernel; all shapes share it."""
    if instrumented:
        raise UsageError("doubling has no instrumented build")
    if fmt != "fp32":
        raise unknown("format", fmt, ["fp32"])
    name = list(KERNELS)[toggles["KERNEL"]]
    threads, smem = _LAUNCH_BOUNDS.get(name, (_THREADS, 0))
    return KernelSource(
        entry="doubling",
        source=KERNELS[name],
        name=f"{name}.cu",
        include_dirs=(FOLDER,),
        block=(threads, 1, 1),
        dynamic_smem_bytes=smem,
    )


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """One thread per element."""
    return Launch(grid=(-(-dims["N"] // _THREADS), 1, 1), args=("x", "y", np.int32(dims["N"])))
