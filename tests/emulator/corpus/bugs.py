"""Kernels with one bug each. The fault must describe the bug and name one of the lines marked ``// <-``."""

from __future__ import annotations

import numpy as np

from tests.emulator.corpus.cuda_copies import PRELUDE
from tests.emulator.corpus.entry import F32, I32, U32, Args, InOut, Map, Out, Rng, Scratch, bug

ANY = r"(?i)race|not ordered|unordered|nothing has written|out of bounds"
RACE = r"(?i)race|unordered|not ordered|nothing has written|written by another"


def floats(rng: Rng, n: int) -> np.ndarray:
    return rng.standard_normal(n).astype(F32)


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i] * 2; // <-
}""",
    r"out of bounds",
    grid=4,
    block=64,
)
def no_check_of_the_end(rng: Rng) -> Args:
    return floats(rng, 200), Out(np.zeros(200, F32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i <= n) y[i] = x[i]; // <-
}""",
    r"out of bounds",
)
def off_by_one_at_the_end(rng: Rng) -> Args:
    return floats(rng, 20), Out(np.zeros(20, F32)), I32(20)


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y, int n) {
  int i = threadIdx.x;
  y[i] = x[i] + x[i - 1]; // <-
}""",
    r"out of bounds",
)
def stencil_without_its_left_edge(rng: Rng) -> Args:
    return floats(rng, 32), Out(np.zeros(32, F32)), I32(32)


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[32];
  s[threadIdx.x] = x[threadIdx.x]; // <-
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x]; // <-
}""",
    r"out of bounds",
    block=64,
)
def shared_array_too_small(rng: Rng) -> Args:
    return floats(rng, 64), Out(np.zeros(64, F32))


@bug(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  int bins[8] = {};
  for (int i = 0; i < 16; ++i) bins[x[threadIdx.x * 16 + i]]++; // <-
  for (int i = 0; i < 8; ++i) y[threadIdx.x * 8 + i] = bins[i];
}""",
    r"out of bounds|of local memory",
)
def local_array_overrun(rng: Rng) -> Args:
    x = rng.integers(0, 8, 512, I32)
    x[200] = 4000
    return x, Out(np.zeros(256, I32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float4* y) {
  y[threadIdx.x] = *(const float4*)(x + 2 + threadIdx.x * 4); // <-
}""",
    r"misaligned",
    block=16,
)
def vector_load_that_is_misaligned(rng: Rng) -> Args:
    return floats(rng, 100), Out(np.zeros((16, 4), F32))


@bug(
    r"""
extern "C" __global__ void k(const unsigned char* x, int* y) {
  __shared__ unsigned char s[132];
  for (int i = threadIdx.x; i < 132; i += 32) s[i] = x[i];
  __syncthreads();
  y[threadIdx.x] = *(int*)(s + threadIdx.x * 4 + 1); // <-
}""",
    r"misaligned",
)
def shared_word_that_is_misaligned(rng: Rng) -> Args:
    return rng.integers(0, 256, 132).astype(np.uint8), Out(np.zeros(32, I32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y, int n) {
  __shared__ float s[64];
  if (threadIdx.x < n) s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x]; // <-
}""",
    r"nothing has written",
    block=64,
)
def shared_memory_that_is_not_initialised(rng: Rng) -> Args:
    return floats(rng, 64), Out(np.zeros(64, F32)), I32(50)


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  y[threadIdx.x] += x[threadIdx.x]; // <-
}""",
    r"nothing has written",
)
def output_read_before_it_is_written(rng: Rng) -> Args:
    return floats(rng, 32), Out(np.zeros(32, F32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[128];
  s[threadIdx.x] = x[threadIdx.x]; // <-
  y[threadIdx.x] = s[127 - threadIdx.x]; // <-
}""",
    ANY,
    block=128,
)
def no_barrier_between_write_and_read(rng: Rng) -> Args:
    return floats(rng, 128), Out(np.zeros(128, F32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[64];
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    s[threadIdx.x] = x[i * 64 + threadIdx.x]; // <-
    __syncthreads();
    sum += s[63 - threadIdx.x]; // <-
  }
  y[threadIdx.x] = sum;
}""",
    RACE,
    block=64,
)
def no_barrier_before_the_next_tile(rng: Rng) -> Args:
    return floats(rng, 256), Out(np.zeros(64, F32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  for (int step = 32; step; step /= 2)
    if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step]; // <-
  if (threadIdx.x == 0) *y = s[0]; // <-
}""",
    RACE,
    block=64,
)
def reduction_without_barriers_in_a_warp(rng: Rng) -> Args:
    return floats(rng, 64), Out(np.zeros(1, F32))


@bug(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int s[32];
  s[threadIdx.x] = x[threadIdx.x]; // <-
  y[threadIdx.x] = s[threadIdx.x ^ 1] + s[threadIdx.x ^ 16]; // <-
}""",
    RACE,
)
def exchange_within_a_warp_without_syncwarp(rng: Rng) -> Args:
    return rng.integers(0, 9, 32, I32), Out(np.zeros(32, I32))


@bug(
    r"""
extern "C" __global__ void k(const int* x, int* count) {
  if (x[threadIdx.x] > 0) *count += 1; // <-
}""",
    RACE,
)
def lost_update_within_a_warp(rng: Rng) -> Args:
    return np.ones(32, I32), InOut(np.zeros(1, I32), Out(np.array([32], I32)))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* sum) {
  float v = x[blockIdx.x * 32 + threadIdx.x];
  for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
  if (threadIdx.x == 0) *sum = *sum + v; // <-
}""",
    RACE,
    grid=4,
)
def lost_update_between_blocks(rng: Rng) -> Args:
    return floats(rng, 128), InOut(np.zeros(1, F32), Out(np.zeros(1, F32)))


@bug(
    r"""
extern "C" __global__ void k(const int* x, int* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[x[i]] = i; // <-
}""",
    RACE,
    grid=3,
    block=40,
)
def scatter_to_the_same_places(rng: Rng) -> Args:
    return rng.integers(0, 20, 100, I32), InOut(np.zeros(20, I32), Out(np.zeros(20, I32))), I32(100)


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* data, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  data[i] = x[i] * 2; // <-
  __syncthreads();
  y[i] = data[n - 1 - i]; // <-
}""",
    RACE,
    grid=4,
    block=32,
)
def barrier_of_a_block_taken_for_one_of_the_grid(rng: Rng) -> Args:
    return floats(rng, 128), Scratch(np.zeros(128, F32)), Out(np.zeros(128, F32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* data, volatile int* flag, float* y) {
  if (blockIdx.x == 0) {
    data[threadIdx.x] = x[threadIdx.x] * 2; // <-
    if (threadIdx.x == 0) *flag = 1; // <- neither fence nor barrier before it
  } else {
    if (threadIdx.x == 0) while (*flag == 0) {}
    __syncthreads();
    y[threadIdx.x] = data[threadIdx.x]; // <-
  }
}""",
    RACE,
    grid=2,
    block=64,
)
def flag_without_a_fence(rng: Rng) -> Args:
    return floats(rng, 64), Scratch(np.zeros(64, F32)), Scratch(np.zeros(1, I32)), Out(np.zeros(64, F32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y, int n) {
  __shared__ float s[64];
  if (threadIdx.x < n) {
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads(); // <-
    y[threadIdx.x] = s[n - 1 - threadIdx.x];
  } else {
    s[threadIdx.x] = 0;
    __syncthreads(); // <-
    y[threadIdx.x] = s[threadIdx.x] + 1;
    __syncthreads(); // <-
  }
}""",
    r"(?i)barrier|deadlock",
    block=64,
)
def barriers_in_two_branches_of_a_warp(rng: Rng) -> Args:
    return floats(rng, 64), Out(np.zeros(64, F32)), I32(41)


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;"); // <-
  else asm volatile("bar.sync 2, 64;"); // <-
  y[threadIdx.x] = x[threadIdx.x];
}""",
    r"(?i)deadlock",
    block=64,
)
def two_barriers_that_wait_for_each_other(rng: Rng) -> Args:
    return floats(rng, 64), Out(np.zeros(64, F32))


@bug(
    r"""
__device__ int lock[2];
extern "C" __global__ void k(int* y) {
  if (threadIdx.x == 0) {
    int mine = blockIdx.x, other = 1 - mine;
    while (atomicCAS(&lock[mine], 0, 1)) {} // <-
    __threadfence();
    for (int i = 0; i < 40; ++i) __nanosleep(100);
    while (atomicCAS(&lock[other], 0, 1)) {} // <-
    y[blockIdx.x] = 1;
    atomicExch(&lock[other], 0);
    atomicExch(&lock[mine], 0);
  }
}""",
    r"(?i)deadlock|no end|for ever|forever|nothing can go on|livelock",
    grid=2,
)
def two_locks_in_opposite_order(rng: Rng) -> Args:
    return (Out(np.zeros(2, I32)),)


@bug(
    r"""
extern "C" __global__ void k(volatile int* flag, int* y) {
  while (*flag == 0) {} // <-
  y[threadIdx.x] = 1;
}""",
    r"(?i)deadlock|no end|for ever|forever|nothing can go on|never",
)
def flag_that_is_never_set(rng: Rng) -> Args:
    return Scratch(np.zeros(1, I32)), Out(np.zeros(32, I32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y, int n) {
  float v = x[threadIdx.x];
  for (int i = threadIdx.x; i != n; i += 2) { // <-
    v = v * 0.5f + *(volatile const float*)x; // <-
  } // <-
  y[threadIdx.x] = v; // <-
}""",
    r"(?i)no end|endless|never ends",
    block=32,
    limit=120,  # it counts as endless after half a million instructions
)
def loop_that_steps_over_its_end(rng: Rng) -> Args:
    return floats(rng, 32), Out(np.zeros(32, F32)), I32(40)


@bug(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  if (threadIdx.x < 16) {
    int v = x[threadIdx.x];
    y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, v, 1); // <- the others wait at the barrier
  }
  __syncthreads(); // <-
  if (threadIdx.x >= 16) y[threadIdx.x] = y[threadIdx.x - 16];
}""",
    r"(?i)mask|deadlock|shuffle|only some",
)
def shuffle_mask_names_threads_that_do_not_come(rng: Rng) -> Args:
    return rng.integers(0, 9, 32, I32), InOut(np.zeros(32, I32), Out(np.zeros(32, I32)))


@bug(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  int v = x[threadIdx.x];
  y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, v, 1); // <-
}""",
    r"(?i)mask",
)
def shuffle_by_threads_that_the_mask_does_not_name(rng: Rng) -> Args:
    return rng.integers(0, 9, 32, I32), Out(np.zeros(32, I32))


@bug(
    r"""
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const float4* x, float4* y) {
  __shared__ float4 s[2][32];
  for (int i = 0; i < 2; ++i) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(&s[i][threadIdx.x])),
      "l"(x + i * 32 + threadIdx.x));
    asm volatile("cp.async.commit_group;");
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  y[threadIdx.x] = s[1][threadIdx.x]; // <-
}""",
    r"asynchronous copy has not delivered",
)
def cp_async_waits_for_one_group_too_few(rng: Rng) -> Args:
    return rng.standard_normal((64, 4)).astype(F32), Out(np.zeros((32, 4), F32))


@bug(
    r"""
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const float4* x, float4* y) {
  __shared__ float4 s[64];
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(s + threadIdx.x)), "l"(x + threadIdx.x)); // <-
  asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory"); // <-
  y[threadIdx.x] = s[63 - threadIdx.x]; // <- its own copies have landed, not the copies of the others
}""",
    RACE + "|asynchronous copy has not delivered",
    block=64,
)
def cp_async_without_a_barrier(rng: Rng) -> Args:
    return rng.standard_normal((64, 4)).astype(F32), Out(np.zeros((64, 4), F32))


@bug(
    PRELUDE
    + r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ __align__(128) float s[128];
  __shared__ u64 bar;
  if (threadIdx.x == 0) { init(&bar, 1); fence_init(); }
  __syncthreads();
  if (threadIdx.x == 0) { expect(&bar, 512); bulk_load(s, x, 512, &bar); }
  wait(&bar, 1); // the phase before: it has passed at once
  y[threadIdx.x] = s[threadIdx.x]; // <-
}""",
    r"asynchronous copy has not delivered|nothing has written",
)
def mbarrier_wait_for_the_wrong_phase(rng: Rng) -> Args:
    return floats(rng, 128), Out(np.zeros(32, F32))


@bug(
    PRELUDE
    + r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ __align__(128) float s[128];
  __shared__ u64 bar;
  if (threadIdx.x == 0) { init(&bar, 1); fence_init(); }
  __syncthreads();
  if (threadIdx.x == 0) { expect(&bar, 1024); bulk_load(s, x, 512, &bar); } // <-
  while (!passed(&bar, 0)) {} // <-
  y[threadIdx.x] = s[threadIdx.x];
}""",
    r"(?i)deadlock.*mbarrier",
    inside="passed",
)
def mbarrier_expects_more_bytes_than_come(rng: Rng) -> Args:
    return floats(rng, 128), Out(np.zeros(32, F32))


@bug(
    PRELUDE
    + r"""
extern "C" __global__ void k(const float* x, float* y, int tiles) {
  __shared__ __align__(128) float s[2][32];
  __shared__ u64 full[2];
  if (threadIdx.x == 0) { init(&full[0], 1); init(&full[1], 1); fence_init(); }
  __syncthreads();
  float sum = 0;
  if (threadIdx.x == 32) {
    for (int i = 0; i < tiles; ++i) { // nothing says that a stage may be overwritten
      expect(&full[i % 2], 128); // <-
      bulk_load(s[i % 2], x + i * 32, 128, &full[i % 2]); // <-
    }
  } else if (threadIdx.x < 32) {
    for (int i = 0; i < tiles; ++i) {
      wait(&full[i % 2], i / 2 % 2); // <-
      sum += s[i % 2][threadIdx.x]; // <-
    }
    y[threadIdx.x] = sum;
  }
}""",
    r"(?i)race|not ordered|asynchronous|deadlock|mbarrier|phase",
    block=64,
    inside="expect|bulk_load|passed",
)
def stage_overwritten_before_it_was_read(rng: Rng) -> Args:
    return floats(rng, 256), Out(np.zeros(32, F32)), I32(8)


@bug(
    PRELUDE
    + r"""
extern "C" __global__ void k(const float* x, float* y, int tiles) {
  __shared__ __align__(128) float s[32];
  __shared__ u64 full, empty;
  if (threadIdx.x == 0) { init(&full, 1); init(&empty, 1); fence_init(); }
  __syncthreads();
  float sum = 0;
  if (threadIdx.x == 32) {
    for (int i = 0; i < tiles; ++i) {
      wait(&empty, i % 2 ^ 1);
      expect(&full, 128);
      bulk_load(s, x + i * 32, 128, &full); // <-
    }
  } else if (threadIdx.x < 32) {
    for (int i = 0; i < tiles; ++i) {
      wait(&full, i % 2);
      sum += s[threadIdx.x]; // <-
      __syncwarp(); // no fence.proxy.async after the loads
      if (threadIdx.x == 0) arrive(&empty);
    }
    y[threadIdx.x] = sum;
  }
}""",
    r"over what a load read with no fence\.proxy\.async",
    block=64,
    inside="bulk_load",
)
def stage_released_without_a_proxy_fence(rng: Rng) -> Args:
    return floats(rng, 256), Out(np.zeros(32, F32)), I32(8)


@bug(
    PRELUDE
    + r"""
extern "C" __global__ void k(const __grid_constant__ CUtensorMap to, const float* x, float* y) {
  __shared__ __align__(128) float s[8][32];
  for (int i = threadIdx.x; i < 256; i += 32) s[i / 32][i % 32] = x[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    map_store(&to, s, 0, 0); // <- no fence.proxy.async after the stores
    stored();
  }
}""",
    r"fence\.proxy\.async",
    inside="map_store",
)
def tensor_store_without_a_proxy_fence(rng: Rng) -> Args:
    y = np.zeros((8, 32), F32)
    return Map(y, (8, 32)), floats(rng, 256), Out(y)


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[64];
  int warp = threadIdx.x / 32;
  if (warp == 0) {
    s[threadIdx.x] = x[threadIdx.x]; // <-
    asm volatile("bar.arrive 1, 64;" ::: "memory");
    s[threadIdx.x] = 0; // <-
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    y[threadIdx.x - 32] = s[threadIdx.x - 32]; // <-
  }
}""",
    RACE,
    block=64,
)
def write_after_arrive(rng: Rng) -> Args:
    return floats(rng, 32), Out(np.zeros(32, F32))


@bug(
    r"""
#include <cub/block/block_reduce.cuh>
extern "C" __global__ void k(const int* x, int* y) {
  using Reduce = cub::BlockReduce<int, 128>;
  __shared__ typename Reduce::TempStorage storage;
  int a = Reduce(storage).Sum(x[threadIdx.x]); // <-
  int b = Reduce(storage).Reduce(x[threadIdx.x], cuda::maximum<>{}); // <- no barrier before the storage is used again
  if (threadIdx.x == 0) y[0] = a, y[1] = b;
}""",
    RACE,
    block=128,
)
def cub_storage_used_again_without_a_barrier(rng: Rng) -> Args:
    return rng.integers(0, 99, 128, I32), Out(np.zeros(2, I32))


@bug(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  if (x[threadIdx.x] < 0) __trap(); // <-
  y[threadIdx.x] = x[threadIdx.x];
}""",
    r"trap",
)
def trap_that_is_reached(rng: Rng) -> Args:
    x = rng.integers(0, 99, 32, I32)
    x[21] = -1
    return x, Out(np.zeros(32, I32))


@bug(
    r"""
#include <cuda/std/cassert>
extern "C" __global__ void k(const int* x, int* y) {
  assert(x[threadIdx.x] < 90); // <-
  y[threadIdx.x] = x[threadIdx.x];
}""",
    r"(?i)assert",
)
def assertion_that_fails(rng: Rng) -> Args:
    x = rng.integers(0, 89, 32, I32)
    x[5] = 90
    return x, Out(np.zeros(32, I32))


@bug(
    r"""
extern "C" __global__ void k(const float* const* rows, float* y) {
  y[threadIdx.x] = rows[threadIdx.x] ? *rows[threadIdx.x] : 0; // <-
}""",
    r"is in no memory|out of bounds|no allocation",
)
def pointer_of_the_host(rng: Rng) -> Args:
    return np.full(32, 0x5555_1234_5670, np.uint64), Out(np.zeros(32, F32))


@bug(
    r"""
__noinline__ __device__ int deep(int n) { return n <= 0 ? 0 : 1 + deep(n + 1) * 2; } // <-
extern "C" __global__ void k(int* y) { y[threadIdx.x] = deep(threadIdx.x + 1); }
""",
    r"(?i)stack|recursion|deep|calls|no end",
)
def recursion_without_an_end(rng: Rng) -> Args:
    return (Out(np.zeros(32, I32)),)


@bug(
    r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const int* x, int* y) {
  __shared__ int s[32];
  auto cluster = cg::this_cluster();
  s[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
  cluster.sync();
  int v = cluster.map_shared_rank(s, cluster.block_rank() ^ 1)[threadIdx.x]; // <- its block may have ended
  y[blockIdx.x * 32 + threadIdx.x] = v;
}""",
    r"(?i)ended|exited|exit",
    grid=2,
)
def shared_memory_of_a_block_that_has_ended(rng: Rng) -> Args:
    return rng.integers(0, 9, 64, I32), Out(np.zeros(64, I32))


@bug(
    r"""
extern "C" __global__ void k(const unsigned* x, unsigned* y) {
  __shared__ unsigned flag;
  if (threadIdx.x == 0) flag = 0; // <-
  if (x[threadIdx.x] > 5) flag = 1; // <-
  __syncthreads();
  y[threadIdx.x] = flag;
}""",
    RACE,
    block=96,
)
def initialisation_that_races_with_its_use(rng: Rng) -> Args:
    return rng.integers(0, 9, 96).astype(U32), Out(np.zeros(96, U32))


@bug(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  extern __shared__ float s[];
  s[threadIdx.x] = x[threadIdx.x]; // <- the launch asks for 64 bytes
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x ^ 1];
}""",
    r"out of bounds",
    smem=64,
)
def dynamic_shared_memory_too_small(rng: Rng) -> Args:
    return floats(rng, 32), Out(np.zeros(32, F32))
