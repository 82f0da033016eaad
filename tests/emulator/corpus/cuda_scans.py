"""Prefix sums, a histogram, sorting and merging."""

from __future__ import annotations

import numpy as np

from tests.emulator.corpus.entry import F32, I32, U64, Args, InOut, Out, Rng, Scratch, cuda


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int s[2][96];
  int t = threadIdx.x, in = 0;
  s[0][t] = x[t];
  __syncthreads();
  for (int step = 1; step < 96; step *= 2) {
    s[1 - in][t] = t >= step ? s[in][t] + s[in][t - step] : s[in][t];
    in = 1 - in;
    __syncthreads();
  }
  y[t] = s[in][t];
}""",
    block=96,
)
def scan_hillis_steele(rng: Rng) -> Args:
    x = rng.integers(-(2**31), 2**31, 96).astype(I32)
    return x, Out(x.cumsum(dtype=I32))


@cuda(
    r"""
// single-pass scan with decoupled look-back (Merrill and Garland, 2016)
struct State { int flag, value; };
__device__ unsigned next_tile;
extern "C" __global__ void k(const int* x, unsigned long long* states, int* y, int n) {
  __shared__ int tile, before, s[64];
  if (threadIdx.x == 0) tile = atomicAdd(&next_tile, 1);
  __syncthreads();
  int i = tile * 64 + threadIdx.x, v = i < n ? x[i] : 0;
  s[threadIdx.x] = v;
  __syncthreads();
  for (int step = 1; step < 64; step *= 2) {
    int other = threadIdx.x >= step ? s[threadIdx.x - step] : 0;
    __syncthreads();
    s[threadIdx.x] += other;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    unsigned sum = s[63], prefix = 0;
    volatile unsigned long long* state = states;
    state[tile] = (unsigned long long)(tile ? 1 : 2) << 32 | sum;
    __threadfence();
    for (int t = tile - 1; t >= 0; --t) {
      unsigned long long found;
      do found = state[t]; while (found >> 32 == 0);
      prefix += (unsigned)found;
      if (found >> 32 == 2) break;
    }
    if (tile) state[tile] = 2ull << 32 | (prefix + sum);
    before = prefix;
  }
  __syncthreads();
  if (i < n) y[i] = before + s[threadIdx.x];
}""",
    grid=7,
    block=64,
)
def scan_decoupled_look_back(rng: Rng) -> Args:
    x = rng.integers(-1000, 1000, 430, I32)
    return x, Scratch(np.zeros(7, U64)), Out(x.cumsum(dtype=I32)), I32(430)


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  unsigned peers = __match_any_sync(~0u, x[threadIdx.x]);
  int leader = __ffs(peers) - 1;
  if (threadIdx.x % 32 == leader) atomicAdd(&y[x[threadIdx.x]], __popc(peers));
}""",
    block=96,
)
def histogram_match_any(rng: Rng) -> Args:
    x = rng.integers(0, 5, 96, I32)
    return x, InOut(np.zeros(5, I32), Out(np.bincount(x, minlength=5).astype(I32)))


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y, int n) {
  int i = threadIdx.x;
  if (i < n) {
    unsigned active = __activemask();
    int pred;
    unsigned all = __match_all_sync(active, x[i] / 100, &pred);
    y[i] = pred ? 1000 + __popc(all) : (int)all;
  }
}""",
    block=64,
)
def match_all_of_active(rng: Rng) -> Args:
    x = rng.integers(0, 99, 50, I32)
    x[7] = 300
    return x, Out(np.where(np.arange(50) < 32, 0, 1000 + 18).astype(I32)), I32(50)


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  int v = x[threadIdx.x], lane = threadIdx.x;
  for (int size = 2; size <= 32; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2) {
      int other = __shfl_xor_sync(~0u, v, stride);
      bool up = (lane & size) == 0 || size == 32, lower = (lane & stride) == 0;
      v = (up == lower) ? min(v, other) : max(v, other);
    }
  y[threadIdx.x] = v;
}"""
)
def sort_bitonic_in_registers(rng: Rng) -> Args:
    x = rng.integers(-(2**31), 2**31, 32).astype(I32)
    return x, Out(np.sort(x))


@cuda(
    r"""
#include <cub/block/block_radix_sort.cuh>
extern "C" __global__ void k(const int* x, int* y, int* order) {
  using Sort = cub::BlockRadixSort<int, 64, 2, int>;
  __shared__ typename Sort::TempStorage storage;
  int key[2], value[2];
  for (int j = 0; j < 2; ++j) value[j] = threadIdx.x * 2 + j, key[j] = x[value[j]];
  Sort(storage).Sort(key, value);
  for (int j = 0; j < 2; ++j) y[threadIdx.x * 2 + j] = key[j], order[threadIdx.x * 2 + j] = value[j];
}""",
    block=64,
)
def cub_block_radix_sort(rng: Rng) -> Args:
    x = rng.integers(-40, 40, 128, I32)
    return x, Out(np.sort(x)), Out(np.argsort(x, kind="stable").astype(I32))


@cuda(
    r"""
#include <cub/block/block_merge_sort.cuh>
struct Less { __device__ bool operator()(float a, float b) const { return a < b; } };
extern "C" __global__ void k(const float* x, float* y) {
  using Sort = cub::BlockMergeSort<float, 64, 3>;
  __shared__ typename Sort::TempStorage storage;
  float v[3];
  for (int j = 0; j < 3; ++j) v[j] = x[threadIdx.x * 3 + j];
  Sort(storage).Sort(v, Less());
  for (int j = 0; j < 3; ++j) y[threadIdx.x * 3 + j] = v[j];
}""",
    block=64,
)
def cub_block_merge_sort(rng: Rng) -> Args:
    x = rng.standard_normal(192).astype(F32)
    return x, Out(np.sort(x))


@cuda(
    r"""
__device__ int path(const int* a, int na, const int* b, int nb, int d) {
  int low = max(0, d - nb), high = min(d, na);
  while (low < high) {
    int mid = (low + high) / 2;
    if (a[mid] <= b[d - 1 - mid]) low = mid + 1; else high = mid;
  }
  return low;
}
extern "C" __global__ void k(const int* a, const int* b, int* y, int na, int nb) {
  int d = (blockIdx.x * blockDim.x + threadIdx.x) * 5, end = min(d + 5, na + nb);
  if (d >= na + nb) return;
  int i = path(a, na, b, nb, d), j = d - i;
  for (; d < end; ++d) y[d] = j >= nb || (i < na && a[i] <= b[j]) ? a[i++] : b[j++];
}""",
    grid=2,
    block=40,
)
def merge_path(rng: Rng) -> Args:
    a, b = np.sort(rng.integers(0, 99, 131, I32)), np.sort(rng.integers(0, 99, 203, I32))
    return a, b, Out(np.sort(np.concatenate([a, b]))), I32(131), I32(203)
