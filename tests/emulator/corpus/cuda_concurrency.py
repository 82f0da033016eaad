"""Threads, warps and blocks that wait for one another: locks, flags, barriers, divergence, early return."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.corpus.entry import F32, I32, Args, InOut, Out, Rng, Scratch, cuda

LOCKED = r"""
__device__ int lock = 0;
extern "C" __global__ void k(int* count, int* order) {
  bool done = false;
  while (!done) {
    if (atomicCAS(&lock, 0, 1) == 0) {
      __threadfence();
      int n = *(volatile int*)count;
      order[n] = blockIdx.x * blockDim.x + threadIdx.x;
      *(volatile int*)count = n + 1;
      __threadfence();
      atomicExch(&lock, 0);
      done = true;
    }
  }
}"""


def _locked(threads: int) -> Args:
    def every_thread_once(result: NDArray[Any]) -> str:
        return "" if sorted(result.tolist()) == list(range(threads)) else "a thread's turn is lost"

    order = Out(np.zeros(threads, I32), check=every_thread_once)
    return InOut(np.zeros(1, I32), Out(np.array([threads], I32))), order


@cuda(LOCKED, grid=2, block=48)
def spin_lock_within_warps(rng: Rng) -> Args:
    return _locked(96)


@cuda(
    r"""
__device__ unsigned next_ticket, serving;
extern "C" __global__ void k(int* sum, int* order) {
  if (threadIdx.x % 32 == 0) {
    unsigned mine = atomicAdd(&next_ticket, 1);
    while (atomicAdd(&serving, 0) != mine) __nanosleep(20);
    __threadfence();
    order[mine] = *(volatile int*)sum;
    *(volatile int*)sum += 1 + threadIdx.x / 32;
    __threadfence();
    atomicAdd(&serving, 1);
  }
}""",
    grid=3,
    block=64,
)
def ticket_lock(rng: Rng) -> Args:
    def grows(result: NDArray[Any]) -> str:
        return "" if sorted(np.diff([*result.tolist(), 9])) == [1, 1, 1, 2, 2, 2] and result[0] == 0 else f"{result}"

    return InOut(np.zeros(1, I32), Out(np.array([9], I32))), Out(np.zeros(6, I32), check=grows)


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y, int rounds) {
  __shared__ volatile int full;
  __shared__ volatile int slot;
  if (threadIdx.x == 0) full = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < rounds; ++i) {
      while (full) {}
      slot = x[i] * 2;
      __threadfence_block();
      full = 1;
    }
  } else if (threadIdx.x == 32) {
    for (int i = 0; i < rounds; ++i) {
      while (!full) {}
      __threadfence_block();
      y[i] = slot + 1;
      full = 0;
    }
  }
}""",
    block=64,
)
def flag_between_warps(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 6, I32)
    return x, Out(x * 2 + 1), I32(6)


@cuda(
    r"""
#include <cuda/atomic>
extern "C" __global__ void k(const float* x, float* data, int* flag, float* y, int n) {
  cuda::atomic_ref<int, cuda::thread_scope_device> ready(*flag);
  if (blockIdx.x == 1) {  // the producer comes last
    for (int i = threadIdx.x; i < n; i += blockDim.x) data[i] = x[i] * 3;
    __syncthreads();
    if (threadIdx.x == 0) ready.store(1, cuda::memory_order_release);
  } else {
    if (threadIdx.x == 0) while (ready.load(cuda::memory_order_acquire) == 0) {}
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = data[n - 1 - i];
  }
}""",
    grid=2,
    block=64,
)
def producer_block_comes_second(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 90).astype(F32)
    return x, Scratch(np.zeros(90, F32)), Scratch(np.zeros(1, I32)), Out(x[::-1] * 3), I32(90)


@cuda(
    r"""
__device__ volatile unsigned sense;
__device__ unsigned count;
__device__ void grid_barrier(unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before = sense;
    __threadfence();
    if (atomicAdd(&count, 1) == blocks - 1) {
      count = 0;
      __threadfence();
      sense = before + 1;
    } else {
      while (sense == before) {}
    }
    __threadfence();
  }
  __syncthreads();
}
extern "C" __global__ void k(int* a, int* b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (int step = 1; step < n; step *= 2) {
    b[i] = ((volatile int*)a)[i] + (i >= step ? ((volatile int*)a)[i - step] : 0);
    grid_barrier(gridDim.x);
    a[i] = ((volatile int*)b)[i];
    grid_barrier(gridDim.x);
  }
}""",
    grid=4,
    block=32,
)
def grid_barrier_by_hand(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 128, I32)
    return InOut(x, Out(x.cumsum(dtype=I32))), Scratch(np.zeros(128, I32)), I32(128)


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y, int n) {
  __shared__ int s[64];
  int t = threadIdx.x;
  if (t >= n) return;
  s[t] = x[t];
  __syncthreads();
  y[t] = s[n - 1 - t];
}""",
    block=64,
)
def early_return_before_a_barrier(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 41, I32)
    return x, Out(x[::-1]), I32(41)


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int s[32];
  int t = threadIdx.x;
  if (t % 2) {
    s[t] = x[t] * 3;
    __syncwarp();
  } else {
    s[t] = x[t] - 1;
    __syncwarp();
  }
  y[t] = s[t ^ 1];
}"""
)
def branches_that_meet_at_syncwarp(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 32, I32)
    odd = np.arange(32) % 2 == 1
    return x, Out(np.where(odd, x * 3, x - 1)[np.arange(32) ^ 1])


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int s[64];
  int t = threadIdx.x;
  s[t] = 0;
  __syncwarp();
  if (t % 32 < 8) {
    for (int i = 0; i < t % 4; ++i) s[t] += x[t];
    __syncwarp(0xff);
    if (t % 32 == 0) for (int i = 1; i < 8; ++i) s[t] += s[t + i];
    __syncwarp(0xff);
    y[t / 32 * 8 + t % 32] = s[t / 32 * 32] + t;
  }
}""",
    block=64,
)
def syncwarp_of_eight(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 64, I32)
    parts = (x * (np.arange(64) % 4)).reshape(2, 32)[:, :8].sum(1)
    return x, Out((np.repeat(parts, 8) + np.concatenate([np.arange(8), np.arange(32, 40)])).astype(I32))


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y, int rounds) {
  __shared__ int s[2][64];
  int t = threadIdx.x % 64;
  if (threadIdx.x < 64) {
    for (int i = 0; i < rounds; ++i) {
      asm volatile("bar.sync %0, 128;" :: "r"(3 + i % 2) : "memory");   // the slot is free
      s[i % 2][t] = x[i * 64 + t];
      __threadfence_block();
      asm volatile("bar.arrive %0, 128;" :: "r"(1 + i % 2) : "memory"); // the slot is full
    }
  } else {
    for (int i = 0; i < 2; ++i) asm volatile("bar.arrive %0, 128;" :: "r"(3 + i) : "memory");
    int sum = 0;
    for (int i = 0; i < rounds; ++i) {
      asm volatile("bar.sync %0, 128;" :: "r"(1 + i % 2) : "memory");
      sum += s[i % 2][63 - t];
      if (i + 2 < rounds) asm volatile("bar.arrive %0, 128;" :: "r"(3 + i % 2) : "memory");
    }
    y[t] = sum;
  }
}""",
    block=128,
)
def named_barriers_producer_consumer(rng: Rng) -> Args:
    x = rng.integers(-99, 99, (5, 64), I32)
    return x, Out(x[:, ::-1].sum(0, dtype=I32)), I32(5)


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y, int n) {
  int t = threadIdx.x, v = t < n ? x[t] : 0;
  int many = __syncthreads_count(v > 0);
  int all = __syncthreads_and(v > -100), any = __syncthreads_or(v == 1234);
  y[t] = many * 100 + all * 10 + any;
}""",
    block=80,
)
def barriers_that_count(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 77, I32)
    return x, Out(np.full(80, (x > 0).sum() * 100 + 10, I32)), I32(77)


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  int t = threadIdx.x, v = x[t];
  if (v > 0) {
    int all = __all_sync(__activemask(), v < 50), any = __any_sync(__activemask(), v > 90);
    y[t] = all * 2 + any;
  } else {
    unsigned ballot = __ballot_sync(__activemask(), v < -50);
    y[t] = -(int)__popc(ballot);
  }
}"""
)
def votes_in_branches(rng: Rng) -> Args:
    x = rng.permutation(np.arange(-96, 96, 6)).astype(I32)
    assert (x > 90).sum() == 0
    return x, Out(np.where(x > 0, 0, -(x < -50).sum()).astype(I32))


@cuda(
    r"""
#include <cuda/atomic>
extern "C" __global__ void k(int* total, long long* top, float* sum, int n) {
  __shared__ cuda::atomic<int, cuda::thread_scope_block> inside;
  if (threadIdx.x == 0) new (&inside) cuda::atomic<int, cuda::thread_scope_block>(0);
  __syncthreads();
  inside.fetch_add(threadIdx.x, cuda::memory_order_relaxed);
  cuda::atomic_ref<long long, cuda::thread_scope_device>(*top).fetch_max(threadIdx.x * 3ll + blockIdx.x);
  cuda::atomic_ref<float, cuda::thread_scope_device> s(*sum);
  s.fetch_add(1.0f, cuda::memory_order_acq_rel);
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<int, cuda::thread_scope_device> t(*total);
    int expected = t.load();
    while (!t.compare_exchange_weak(expected, expected + inside.load())) {}
  }
}""",
    grid=3,
    block=32,
)
def libcu_atomics(rng: Rng) -> Args:
    return (
        InOut(np.zeros(1, I32), Out(np.array([3 * 496], I32))),
        InOut(np.zeros(1, np.int64), Out(np.array([95]))),
        InOut(np.zeros(1, F32), Out(np.array([96], F32))),
        I32(3),
    )


@cuda(
    r"""
// dynamic work: blocks take items from a queue until it is empty
extern "C" __global__ void k(const int* cost, int* y, int* next, int n) {
  __shared__ int item;
  while (true) {
    if (threadIdx.x == 0) item = atomicAdd(next, 1);
    __syncthreads();
    int mine = item;
    __syncthreads();
    if (mine >= n) break;
    int sum = 0;
    for (int i = 0; i < cost[mine]; ++i) sum += i * (threadIdx.x + 1);
    y[mine * 32 + threadIdx.x] = sum;
  }
}""",
    grid=3,
)
def persistent_work_queue(rng: Rng) -> Args:
    cost = rng.integers(0, 12, 10, I32)
    y = (cost * (cost - 1) // 2)[:, None] * (np.arange(32) + 1)
    return cost, Out(y.astype(I32)), InOut(np.zeros(1, I32), Out(np.array([13], I32))), I32(10)


@cuda(
    r"""
// all blocks write the same value to the same place, and to neighbouring bytes of a word
extern "C" __global__ void k(int* found, unsigned char* bytes) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t % 5 == 0) *found = 1;
  bytes[t] = t;
}""",
    grid=3,
    block=50,
)
def benign_equal_writes(rng: Rng) -> Args:
    return Out(np.ones(1, I32)), Out(np.arange(150).astype(np.uint8))
