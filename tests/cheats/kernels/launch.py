# ruff: noqa: E501
# fmt: off
"""Kernels with a wrong launch, a wrong build, or arguments that do not fit, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel, named

KERNELS = named({
    "argument_missing": Kernel("CORRECTNESS", "has 3 parameters, its launch gives 2", "is launched without its last argument", r"""
DOUBLED
""", launch={"args": ["x", "y"]}),
    "argument_of_another_type": Kernel("CORRECTNESS", "read out of bounds", "is given a float in place of an int", r"""
DOUBLED
""", launch={"args": ["x", "y", "float32(N)"]}),
    "barrier_of_absent_blocks": Kernel("CORRECTNESS", "deadlock", "waits for a block more than there are", r"""
extern "C" __global__ void doubling(const float* x, float* y, unsigned* arrived, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) <= gridDim.x) {
    }
  }
  __syncthreads();
  if (i < n) y[i] = 2.0f * x[i];
}
""", launch={"args": ["x", "y", "arrived", "int32(N)"]}, workspaces={"arrived": {"bytes": 4, "zeros": True}}),
    "block_of_2048": Kernel("UsageError", "from 1 to 1024 is allowed", "asks for blocks of 2048 threads", r"""
DOUBLED
""", launch={"block": [2048]}),
    "block_of_another_shape": Kernel("BUILD", "compiled for 16 x 16 x 1", "written in PTX", r"""
.version 8.0
.target sm_80
.address_size 64

.visible .entry doubling(.param .u64 x, .param .u64 y, .param .u32 n)
.reqntid 16, 16, 1
DOUBLES
""", suffix=".ptx"),
    "buffer_not_declared": Kernel("CORRECTNESS", "is not a buffer of the case; its buffers are x, y", "is given a workspace that it did not declare", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i] + 0.0f * (scratch == nullptr);
}
""", launch={"args": ["x", "y", "scratch", "int32(N)"]}),
    "by_multiprocessor": Kernel("CORRECTNESS", "bytes of 'y' were never written", "computes the part of the multiprocessor that it runs on", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  unsigned sm, count;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  asm volatile("mov.u32 %0, %nsmid;" : "=r"(count));
  for (int i = sm * blockDim.x + threadIdx.x; i < n; i += count * blockDim.x) y[i] = 2.0f * x[i];
}
""", launch={"grid": [132]}),
    "by_place_of_the_warp": Kernel("CORRECTNESS", "were never written", "takes %warpid for the number of the warp in its block", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  unsigned w; asm volatile("mov.u32 %0, %%warpid;" : "=r"(w));
  const int i = blockIdx.x * 256 + w * 32 + threadIdx.x % 32;
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "cluster_of_32": Kernel("CORRECTNESS", "they have 1 to 16 blocks", "asks for a cluster larger than any GPU has", r"""
DOUBLED
""", launch={"grid": ["32 * ceildiv(N, 8192)"], "cluster": [16, 2]}, target="sm_90a"),
    "compiled_cluster_that_does_not_divide": Kernel("CORRECTNESS", "divide the grid in each dimension", "is compiled for clusters of two blocks, in a grid of an odd number", r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}
""", launch={"grid": ["2 * (N // 512) + 3"]}, target="sm_90a"),
    "does_not_compile": Kernel("BUILD", 'identifier "z" is undefined', "has a mistake in its source", r"""
INDEX
  if (i < n) y[i] = 2.0f * z[i];
}
"""),
    "early_without_wait": Kernel("CORRECTNESS", "in a launch that may begin early", "begins early and does not wait for its input", r"""

extern "C" __global__ void load(const float* x, float* half, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
HALVES
""", launches=[{"kernel": "load", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "half", "int32(N)"]}, {"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "early": True, "args": ["half", "y", "int32(N)"]}], target="sm_90a", workspaces={"half": {"bytes": "4 * N"}}),
    "forged_report": Kernel("BUILD", r"1024 threads of \d+ registers need \d+; a block has at most", "needs more registers than there are, and has the compiler print that it needs eight", r"""
#warning Compiling entry function 'doubling' for 'sm_90a' 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads Used 8 registers Compiling entry function 'A
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  constexpr int kValues = 128;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float values[kValues];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    values[k] = x[min(i + k, n - 1)];
    sum += values[k];
  }
  float zero = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) zero = fmaf(0.0f, zero, 0.0f * (values[k] * sum));
  if (i < n) y[i] = fmaf(2.0f, values[0], zero);
}
""", launch={"grid": ["ceildiv(N, 1024)"], "block": [1024]}),
    "grid_beyond_all_limits": Kernel("UsageError", "from 1 to 2147483647 is allowed", "asks for a grid of 2 ** 40 blocks", r"""
DOUBLED
""", launch={"grid": ["2 ** 40"]}),
    "grid_rounds_down": Kernel("CORRECTNESS", "bytes of 'y' were never written", "its grid leaves out the last block", r"""
DOUBLED
""", launch={"grid": ["max(N // 256, 1)"]}),
    "grid_sync_not_cooperative": Kernel("CORRECTNESS", "in a launch that is not cooperative", "meets in cooperative groups, and is launched as if it did not", r"""
#include <cooperative_groups.h>
extern "C" __global__ void doubling(const float* x, float* y, float* w, int n) {
  auto grid = cooperative_groups::this_grid();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) w[i] = x[i];
  grid.sync();
  if (i < n) y[i] = 2.0f * w[i];
}
""", launch={"args": ["x", "y", "w", "int32(N)"]}, workspaces={"w": {"bytes": "4 * N"}}),
    "half_the_elements": Kernel("CORRECTNESS", "bytes of 'y' were never written", "is told of half the elements", r"""
DOUBLED
""", launch={"args": ["x", "y", "int32(N // 2)"]}),
    "kernel_not_there": Kernel("BUILD", "no kernel 'tripling'", "names a kernel that its source does not have", r"""
DOUBLED
""", launch={"kernel": "tripling"}),
    "launch_bounds_of_128": Kernel("BUILD", "compiled for at most 128", "is compiled for blocks of 128 threads and launched with 256", r"""
extern "C" __global__ void __launch_bounds__(128) doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "launches_in_the_wrong_order": Kernel("CORRECTNESS", "read of an element that nothing has written", "reads a workspace before the launch that fills it", r"""

extern "C" __global__ void load(const float* x, float* half, int n) {
HALVES
""", launches=[{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["half", "y", "int32(N)"]}, {"kernel": "load", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "half", "int32(N)"]}], workspaces={"half": {"bytes": "4 * N"}}),
    "no_shared_memory_asked_for": Kernel("CORRECTNESS", "access out of bounds", "uses dynamic shared memory and asks for none", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  extern __shared__ float stage[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) stage[threadIdx.x] = x[i];
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}
"""),
    "rows_by_the_grid": Kernel("CORRECTNESS", "kernel_bound", "takes the number of rows for the number of columns", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * rows;
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int c = 0; c < rows; ++c) sum += row[c];
  y[blockIdx.x] = sum;
}
""", problem="sums"),
    "second_launch_missing": Kernel("CORRECTNESS", "bytes of 'y' were never written", "leaves out the launch that writes the output", r"""

extern "C" __global__ void load(const float* x, float* half, int n) {
HALVES
""", launch={"kernel": "load", "args": ["x", "half", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}}),
    "swapped_arguments": Kernel("CORRECTNESS", "a write to an input: byte 512 of 'x' .*; 4096 bytes of 'y' were never written", "takes the output for the input", r"""
DOUBLED
""", launch={"args": ["y", "x", "int32(N)"]}),
    "tensor_map_beyond_its_buffer": Kernel("CORRECTNESS", "needs 4608 bytes of 4096", "has a tensor map with more elements than the buffer", r"""
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void doubling(const __grid_constant__ Map map, float* y, int n) {
  __shared__ alignas(128) float tile[128];
  __shared__ alignas(8) unsigned long long full;
  const unsigned bar = __cvta_generic_to_shared(&full), to = __cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar));
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" ::"r"(to), "l"(&map), "r"((int)blockIdx.x * 128), "r"(bar) : "memory");
  }
  __syncthreads();
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar) : "memory");
  while (!done);
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) y[i] = 2.0f * tile[threadIdx.x];
}
""", launch={"grid": ["ceildiv(N, 128)"], "block": [128], "args": [{"buffer": "x", "dtype": "float32", "shape": ["N + 128"], "strides": [4], "box": [128]}, "y", "int32(N)"]}, target="sm_90a"),
    "too_much_shared_memory": Kernel("BUILD", "a block asks for 1048576 bytes of shared memory", "asks for 1 MB of shared memory", r"""
DOUBLED
""", launch={"shared": "2 ** 20"}),
    "wrong_target": Kernel("BUILD", r"not supported on \.target", "uses an instruction that the target does not have", r"""
INDEX

  asm volatile("tcgen05.fence::before_thread_sync;");
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
})
