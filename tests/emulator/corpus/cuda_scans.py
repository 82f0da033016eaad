"""Prefix sums, histograms, compaction, sorting, merging and searching."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.corpus.entry import F32, I32, U8, U32, U64, Args, InOut, Out, Rng, Scratch, cuda


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
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int s[128];
  int t = threadIdx.x;
  s[2 * t] = x[2 * t]; s[2 * t + 1] = x[2 * t + 1];
  int offset = 1;
  for (int d = 64; d > 0; d >>= 1) {
    __syncthreads();
    if (t < d) s[offset * (2 * t + 2) - 1] += s[offset * (2 * t + 1) - 1];
    offset *= 2;
  }
  if (t == 0) s[127] = 0;
  for (int d = 1; d < 128; d *= 2) {
    offset >>= 1;
    __syncthreads();
    if (t < d) {
      int a = offset * (2 * t + 1) - 1, b = offset * (2 * t + 2) - 1, v = s[a];
      s[a] = s[b];
      s[b] += v;
    }
  }
  __syncthreads();
  y[2 * t] = s[2 * t]; y[2 * t + 1] = s[2 * t + 1];
}""",
    block=64,
)
def scan_blelloch(rng: Rng) -> Args:
    x = rng.integers(-100, 100, 128, I32)
    return x, Out((x.cumsum() - x).astype(I32))


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y, int n) {
  __shared__ int sums[32];
  int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  int v = t < n ? x[t] : 0;
  for (int step = 1; step < 32; step <<= 1) {
    int other = __shfl_up_sync(~0u, v, step);
    if (lane >= step) v += other;
  }
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int s = lane < blockDim.x / 32 ? sums[lane] : 0;
    for (int step = 1; step < 32; step <<= 1) {
      int other = __shfl_up_sync(~0u, s, step);
      if (lane >= step) s += other;
    }
    sums[lane] = s;
  }
  __syncthreads();
  if (t < n) y[t] = v + (warp ? sums[warp - 1] : 0);
}""",
    block=256,
)
def scan_warps_then_block(rng: Rng) -> Args:
    x = rng.integers(-100, 100, 250, I32)
    return x, Out(x.cumsum(dtype=I32)), I32(250)


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
#include <cub/block/block_scan.cuh>
extern "C" __global__ void k(const int* x, int* y, int* total) {
  using Scan = cub::BlockScan<int, 64>;
  __shared__ typename Scan::TempStorage storage;
  int v[3], sum;
  for (int j = 0; j < 3; ++j) v[j] = x[threadIdx.x * 3 + j];
  Scan(storage).ExclusiveSum(v, v, sum);
  for (int j = 0; j < 3; ++j) y[threadIdx.x * 3 + j] = v[j];
  if (threadIdx.x == 0) *total = sum;
}""",
    block=64,
)
def cub_block_scan(rng: Rng) -> Args:
    x = rng.integers(-1000, 1000, 192, I32)
    return x, Out((x.cumsum() - x).astype(I32)), Out(np.array([x.sum()], I32))


@cuda(
    r"""
#include <cub/warp/warp_scan.cuh>
extern "C" __global__ void k(const int* x, int* y) {
  using Scan = cub::WarpScan<int>;
  __shared__ typename Scan::TempStorage storage[2];
  int v;
  Scan(storage[threadIdx.x / 32]).InclusiveScan(x[threadIdx.x], v, cuda::maximum<>{});
  y[threadIdx.x] = v;
}""",
    block=64,
)
def cub_warp_scan_max(rng: Rng) -> Args:
    x = rng.integers(-1000, 1000, 64, I32)
    return x, Out(np.maximum.accumulate(x.reshape(2, 32), axis=1).ravel())


@cuda(
    r"""
extern "C" __global__ void k(const unsigned char* x, unsigned* y, int n) {
  __shared__ unsigned bins[256];
  for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1u);
  __syncthreads();
  for (int b = threadIdx.x; b < 256; b += blockDim.x) if (bins[b]) atomicAdd(&y[b], bins[b]);
}""",
    grid=3,
    block=96,
)
def histogram_shared_atomics(rng: Rng) -> Args:
    x = np.minimum(rng.geometric(0.05, 1999), 255).astype(U8)
    return x, InOut(np.zeros(256, U32), Out(np.bincount(x, minlength=256).astype(U32))), I32(1999)


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
extern "C" __global__ void k(const float* x, float* y, int* count, int n) {
  __shared__ int sums[4], base;
  int i = blockIdx.x * 128 + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  bool keep = i < n && x[i] > 0;
  unsigned ballot = __ballot_sync(~0u, keep);
  if (lane == 0) sums[warp] = __popc(ballot);
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0;
    for (int w = 0; w < 4; ++w) { int c = sums[w]; sums[w] = total; total += c; }
    base = atomicAdd(count, total);
  }
  __syncthreads();
  if (keep) y[base + sums[warp] + __popc(ballot & ((1u << lane) - 1))] = x[i];
}""",
    grid=3,
    block=128,
)
def compaction_by_ballot(rng: Rng) -> Args:
    x = rng.standard_normal(333).astype(F32)
    saved = x[x > 0]

    def same(result: NDArray[Any]) -> str:
        return "" if np.array_equal(np.sort(result[: len(saved)]), np.sort(saved)) else f"kept {result[: len(saved)]}"

    count = InOut(np.zeros(1, I32), Out(np.array([len(saved)], I32)))
    return x, InOut(np.zeros(333, F32), Out(np.zeros(333, F32), check=same)), count, I32(333)


@cuda(
    r"""
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float s[128];
  int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  for (int size = 2; size <= 128; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2) {
      int other = t ^ stride;
      if (other > t) {
        bool up = (t & size) == 0;
        float a = s[t], b = s[other];
        if ((a > b) == up) { s[t] = b; s[other] = a; }
      }
      __syncthreads();
    }
  y[t] = s[t];
}""",
    block=128,
)
def sort_bitonic(rng: Rng) -> Args:
    x = rng.standard_normal(128).astype(F32)
    return x, Out(np.sort(x))


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
extern "C" __global__ void k(const unsigned* x, unsigned* y) {
  __shared__ unsigned s[64];
  __shared__ int zeros[64];
  int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  for (int bit = 0; bit < 32; ++bit) {
    unsigned v = s[t];
    int zero = !(v >> bit & 1);
    zeros[t] = zero;
    __syncthreads();
    for (int step = 1; step < 64; step *= 2) {
      int other = t >= step ? zeros[t - step] : 0;
      __syncthreads();
      zeros[t] += other;
      __syncthreads();
    }
    int place = zero ? zeros[t] - 1 : zeros[63] + t - zeros[t];
    s[place] = v;
    __syncthreads();
  }
  y[t] = s[t];
}""",
    block=64,
)
def sort_radix_one_bit(rng: Rng) -> Args:
    x = rng.integers(0, 2**32, 64).astype(U32)
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
#include <cub/block/block_histogram.cuh>
extern "C" __global__ void k(const unsigned char* x, unsigned* y) {
  using Histogram = cub::BlockHistogram<unsigned char, 64, 4, 32>;
  __shared__ typename Histogram::TempStorage storage;
  __shared__ unsigned bins[32];
  unsigned char v[4];
  for (int j = 0; j < 4; ++j) v[j] = x[threadIdx.x * 4 + j];
  Histogram(storage).Histogram(v, bins);
  __syncthreads();
  if (threadIdx.x < 32) y[threadIdx.x] = bins[threadIdx.x];
}""",
    block=64,
)
def cub_block_histogram(rng: Rng) -> Args:
    x = rng.integers(0, 32, 256).astype(U8)
    return x, Out(np.bincount(x, minlength=32).astype(U32))


@cuda(
    r"""
#include <cub/block/block_load.cuh>
#include <cub/block/block_store.cuh>
#include <cub/block/block_exchange.cuh>
extern "C" __global__ void k(const int* x, int* y, int n) {
  using Load = cub::BlockLoad<int, 64, 4, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
  using Store = cub::BlockStore<int, 64, 4, cub::BLOCK_STORE_TRANSPOSE>;
  __shared__ union { typename Load::TempStorage load; typename Store::TempStorage store; } s;
  int v[4];
  Load(s.load).Load(x, v, n, -1);
  for (int j = 0; j < 4; ++j) v[j] = v[j] * 2 + j;
  __syncthreads();
  Store(s.store).Store(y, v, n);
}""",
    block=64,
)
def cub_block_load_store(rng: Rng) -> Args:
    x = rng.integers(-(2**20), 2**20, 251, I32)
    return x, Out(x * 2 + np.arange(251, dtype=I32) % 4), I32(251)


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


@cuda(
    r"""
extern "C" __global__ void k(const int* table, const int* x, int* y, int n, int m) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m) return;
  int low = 0, high = n;
  while (low < high) {
    int mid = low + (high - low) / 2;
    if (table[mid] < x[i]) low = mid + 1; else high = mid;
  }
  y[i] = low;
}""",
    grid=3,
    block=50,
)
def binary_search(rng: Rng) -> Args:
    table, x = np.sort(rng.integers(0, 500, 99, I32)), rng.integers(-5, 505, 140, I32)
    return table, x, Out(np.searchsorted(table, x).astype(I32)), I32(99), I32(140)


@cuda(
    r"""
__constant__ char needle[] = "abca";
extern "C" __global__ void k(const char* text, int* hits, int* count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i + 4 > n) return;
  for (int j = 0; j < 4; ++j)
    if (text[i + j] != needle[j]) return;
  hits[atomicAdd(count, 1)] = i;
}""",
    grid=4,
    block=64,
)
def string_search(rng: Rng) -> Args:
    text = "".join("abc"[i] for i in rng.integers(0, 3, 240)) + "abca"
    hits = [i for i in range(len(text) - 3) if text[i : i + 4] == "abca"]

    def same(result: NDArray[Any]) -> str:
        return "" if sorted(result[: len(hits)].tolist()) == hits else f"{sorted(result.tolist())} in place of {hits}"

    count = InOut(np.zeros(1, I32), Out(np.array([len(hits)], I32)))
    out = InOut(np.zeros(244, I32), Out(np.zeros(244, I32), check=same))
    return np.frombuffer(text.encode(), np.int8), out, count, I32(244)


@cuda(
    r"""
extern "C" __global__ void k(const unsigned char* x, unsigned* y, int rows, int width) {
  __shared__ unsigned table[256];
  for (unsigned b = threadIdx.x; b < 256; b += blockDim.x) {
    unsigned c = b;
    for (int j = 0; j < 8; ++j) c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
    table[b] = c;
  }
  __syncthreads();
  if (threadIdx.x >= rows) return;
  unsigned crc = ~0u;
  for (int i = 0; i < width; ++i) crc = table[(crc ^ x[threadIdx.x * width + i]) & 255] ^ crc >> 8;
  y[threadIdx.x] = ~crc;
}""",
    block=64,
)
def crc32_by_table(rng: Rng) -> Args:
    x = rng.integers(0, 256, (41, 37)).astype(U8)
    return x, Out(np.array([zlib.crc32(row.tobytes()) for row in x], U32)), I32(41), I32(37)


@cuda(
    r"""
// open addressing, linear probing
extern "C" __global__ void k(const unsigned* keys, unsigned* table, unsigned* y, int n) {
  int i = threadIdx.x;
  unsigned key = keys[i], at = key * 2654435761u >> 24;
  while (true) {
    unsigned before = atomicCAS(&table[at], 0xffffffffu, key);
    if (before == 0xffffffffu || before == key) break;
    at = at + 1 & 255;
  }
  __syncthreads();
  at = key * 2654435761u >> 24;
  int steps = 0;
  while (table[at] != key) at = at + 1 & 255, ++steps;
  y[i] = steps >= 0 && table[at] == key;
}""",
    block=160,
)
def hash_table(rng: Rng) -> Args:
    keys = rng.integers(0, 300, 160).astype(U32)

    def same(result: NDArray[Any]) -> str:
        left = sorted(result[result != 0xFFFFFFFF].tolist())
        return "" if left == sorted(set(keys.tolist())) else "the table holds other keys"

    table = InOut(np.full(256, 0xFFFFFFFF, U32), Out(np.zeros(256, U32), check=same))
    return keys, table, Out(np.ones(160, U32)), I32(160)


@cuda(
    r"""
extern "C" __global__ void k(const int* start, const int* edges, int* distance, int nodes) {
  __shared__ int changed;
  int v = threadIdx.x;
  for (int level = 0; ; ++level) {
    __syncthreads();
    if (v == 0) changed = 0;
    __syncthreads();
    if (v < nodes && distance[v] == level)
      for (int e = start[v]; e < start[v + 1]; ++e)
        if (atomicCAS(&distance[edges[e]], -1, level + 1) == -1) changed = 1;
    __syncthreads();
    if (!changed) break;
  }
}""",
    block=96,
)
def breadth_first_search(rng: Rng) -> Args:
    nodes = 90
    edges = [rng.integers(0, nodes, rng.integers(0, 4), I32) for _ in range(nodes)]
    start = np.cumsum([0, *map(len, edges)]).astype(I32)
    distance = np.full(nodes, -1, I32)
    first = distance.copy()
    first[0] = distance[0] = 0
    front = [0]
    while front:
        following = []
        for v in front:
            for w in edges[v]:
                if distance[w] < 0:
                    distance[w] = distance[v] + 1
                    following.append(int(w))
        front = following
    return start, np.concatenate(edges), InOut(first, Out(distance)), I32(nodes)
