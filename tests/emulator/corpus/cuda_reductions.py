"""Sums of all styles: shared memory, shuffles, atomics, the last block, cooperative groups, CUB."""

from __future__ import annotations

import numpy as np

from tests.emulator.corpus.entry import F32, I32, U32, Args, Out, Rng, Scratch, cuda


@cuda(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  float v = x[threadIdx.x];
  unsigned mask = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
  for (int offset = 8; offset > 0; offset /= 2) v += __shfl_xor_sync(mask, v, offset, 16);
  y[threadIdx.x] = v;
}"""
)
def reduce_half_warps(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 32).astype(F32)
    return x, Out(np.repeat(x.reshape(2, 16).sum(1), 16))


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  int lane = threadIdx.x % 32;
  if (lane < 16) {
    int v = x[threadIdx.x];
    for (int offset = 8; offset > 0; offset /= 2) v += __shfl_down_sync(0xffffu, v, offset);
    if (lane == 0) y[threadIdx.x / 32] = v;
  }
}""",
    block=96,
)
def reduce_lower_half_alone(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 96, I32)
    return x, Out(x.reshape(3, 32)[:, :16].sum(1, dtype=I32))


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  if (threadIdx.x % 2 == 0) {
    int v = x[threadIdx.x];
    for (int offset = 16; offset > 1; offset /= 2) v = max(v, __shfl_xor_sync(0x55555555u, v, offset));
    y[threadIdx.x / 2] = v;
  }
}"""
)
def reduce_even_lanes(rng: Rng) -> Args:
    x = rng.integers(-99, 99, 32, I32)
    return x, Out(np.full(16, x[::2].max(), I32))


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  unsigned lane = threadIdx.x % 32, mask = lane < 16 ? 0xffffu : 0xffff0000u;
  int v = x[threadIdx.x];
  y[threadIdx.x] = __reduce_add_sync(mask, v);
  y[threadIdx.x + 64] = __reduce_min_sync(mask, v);
  y[threadIdx.x + 128] = __reduce_max_sync(mask, v);
  y[threadIdx.x + 192] = __reduce_and_sync(mask, (unsigned)v);
  y[threadIdx.x + 256] = __reduce_or_sync(mask, (unsigned)v);
  y[threadIdx.x + 320] = __reduce_xor_sync(mask, (unsigned)v);
}""",
    block=64,
)
def redux_of_half_warps(rng: Rng) -> Args:
    x = rng.integers(-(2**31), 2**31, 64).astype(I32)
    rows = x.reshape(4, 16)
    ufuncs = (np.add, np.minimum, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    return x, Out(np.concatenate([np.repeat(f.reduce(rows, axis=1, dtype=I32), 16) for f in ufuncs]))


@cuda(
    r"""
extern "C" __global__ void k(const unsigned* x, unsigned* y) {
  if (threadIdx.x >= 20) return;
  unsigned v = x[threadIdx.x];
  y[threadIdx.x] = __reduce_add_sync(0xfffffu, v);
}"""
)
def redux_after_others_left(rng: Rng) -> Args:
    x = rng.integers(0, 2**32, 32).astype(U32)
    return x, Out(np.full(20, x[:20].sum(dtype=U32), U32))


@cuda(
    r"""
__device__ unsigned arrived = 0;
extern "C" __global__ void k(const float* x, volatile float* partial, float* y, int n) {
  __shared__ float s[64];
  __shared__ bool last;
  float v = 0;
  for (int i = blockIdx.x * 64 + threadIdx.x; i < n; i += gridDim.x * 64) v += x[i];
  s[threadIdx.x] = v;
  __syncthreads();
  for (int step = 32; step; step /= 2) {
    if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = s[0];
    __threadfence();
    last = atomicInc(&arrived, gridDim.x) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += partial[b];
    *y = sum;
    arrived = 0;
  }
}""",
    grid=6,
    block=64,
)
def reduce_last_block(rng: Rng) -> Args:
    x = rng.integers(-50, 50, 777).astype(F32)
    return x, Scratch(np.zeros(6, F32)), Out(np.array([x.sum()], F32)), I32(777)


def _tiles(width: int) -> str:
    return rf"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
extern "C" __global__ void k(const int* x, int* y, int* z) {{
  cg::thread_block block = cg::this_thread_block();
  auto tile = cg::tiled_partition<{width}>(block);
  int i = block.thread_rank(), v = x[i];
  y[i] = cg::reduce(tile, v, cg::plus<int>());
  int w = v;
  for (int step = tile.size() / 2; step > 0; step /= 2) w = max(w, tile.shfl_xor(w, step));
  z[i] = w + tile.meta_group_rank();
}}"""


def _tile_args(rng: Rng, width: int) -> Args:
    x = rng.integers(-1000, 1000, 64, I32)
    rows = x.reshape(-1, width)
    sums, tops = rows.sum(1, dtype=I32), rows.max(1) + np.arange(64 // width, dtype=I32)
    return x, Out(np.repeat(sums, width)), Out(np.repeat(tops, width))


@cuda(_tiles(4), block=64)
def groups_tiles_of_4(rng: Rng) -> Args:
    return _tile_args(rng, 4)


@cuda(_tiles(8), block=64)
def groups_tiles_of_8(rng: Rng) -> Args:
    return _tile_args(rng, 8)


@cuda(_tiles(16), block=64)
def groups_tiles_of_16(rng: Rng) -> Args:
    return _tile_args(rng, 16)


@cuda(_tiles(32), block=64)
def groups_tiles_of_32(rng: Rng) -> Args:
    return _tile_args(rng, 32)


@cuda(
    r"""
#include <cub/block/block_reduce.cuh>
extern "C" __global__ void k(const int* x, int* y, int n) {
  using Reduce = cub::BlockReduce<int, 96>;
  __shared__ typename Reduce::TempStorage storage;
  int i = blockIdx.x * 96 + threadIdx.x;
  int sum = Reduce(storage).Sum(i < n ? x[i] : 0);
  __syncthreads();
  int valid = min(96, n - (int)blockIdx.x * 96);
  int top = Reduce(storage).Reduce(i < n ? x[i] : 0, cuda::maximum<>{}, valid);
  if (threadIdx.x == 0) y[2 * blockIdx.x] = sum, y[2 * blockIdx.x + 1] = top;
}""",
    grid=3,
    block=96,
)
def cub_block_reduce(rng: Rng) -> Args:
    x = rng.integers(-5000, -1, 250, I32)
    parts = [x[a : a + 96] for a in (0, 96, 192)]
    return x, Out(np.array([(p.sum(dtype=I32), p.max()) for p in parts], I32).ravel()), I32(250)


@cuda(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ volatile float s[64];
  unsigned t = threadIdx.x;
  s[t] = x[t] + x[t + 64];
  __syncthreads();
  if (t < 32) {
    float v = s[t] + s[t + 32];
    __syncwarp();
    s[t] = v; __syncwarp();
    for (int step = 16; step; step >>= 1) {
      v += s[t + step]; __syncwarp();
      s[t] = v; __syncwarp();
    }
    if (t == 0) *y = s[0];
  }
}""",
    block=64,
)
def reduce_warp_synchronous(rng: Rng) -> Args:
    x = rng.integers(-9, 9, 128).astype(F32)
    return x, Out(np.array([x.sum()], F32))
