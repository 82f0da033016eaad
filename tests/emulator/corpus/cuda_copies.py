"""Asynchronous copies, mbarriers, tensor maps, clusters, wgmma."""

from __future__ import annotations

import numpy as np

from tests.emulator.corpus.cuda_products import small
from tests.emulator.corpus.entry import F16, F32, I32, U8, U32, Args, InOut, Map, Out, Rng, cuda

PRELUDE = r"""
typedef unsigned long long u64;
struct alignas(64) CUtensorMap { u64 opaque[16]; };
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, unsigned n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)),
  "r"(n) : "memory"); }
__device__ void expect(u64* b, unsigned n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ void arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
__device__ bool passed(u64* b, unsigned parity) {
  unsigned ok;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
    : "=r"(ok) : "r"(at(b)), "r"(parity) : "memory");
  return ok;
}
__device__ void wait(u64* b, unsigned parity) { while (!passed(b, parity)) {} }
__device__ void bulk_load(void* to, const void* from, unsigned n, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(at(to)), "l"(from), "r"(n), "r"(at(b)) : "memory");
}
__device__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void map_load(void* to, const CUtensorMap* m, int x, int y, u64* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%2, %3}], [%4];"
    :: "r"(at(to)), "l"(m), "r"(x), "r"(y), "r"(at(b)) : "memory");
}
__device__ void map_store(const CUtensorMap* m, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" :: "l"(m), "r"(x),
    "r"(y), "r"(at(from)) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ void stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""


@cuda(
    r"""
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const float* x, float* y, int n) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x, have = max(0, min(16, (n - t * 4) * 4));
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
    :: "r"(at(s + 4 * t)), "l"(have ? x + 4 * t : x), "r"(have), "l"(policy));
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  for (int i = t; i < 128; i += 32) y[i] = s[i];
}"""
)
def cp_async_with_a_cache_hint(rng: Rng) -> Args:
    x = rng.standard_normal(101).astype(F32)
    y = np.zeros(128, F32)
    y[:101] = x
    return x, Out(y), I32(101)


@cuda(
    r"""
#include <cuda/barrier>
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ alignas(16) int s[256];
  using Barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ Barrier bar;
  if (threadIdx.x == 0) init(&bar, blockDim.x);
  __syncthreads();
  Barrier::arrival_token token;
  if (threadIdx.x == 0) {
    cuda::memcpy_async(s, x + blockIdx.x * 256, cuda::aligned_size_t<16>(sizeof(s)), bar);
  }
  token = bar.arrive();
  bar.wait(cuda::std::move(token));
  for (int i = threadIdx.x; i < 256; i += blockDim.x) y[blockIdx.x * 256 + i] = s[255 - i];
}""",
    grid=2,
    block=64,
)
def memcpy_async_of_one_thread(rng: Rng) -> Args:
    x = rng.integers(-99, 99, (2, 256), I32)
    return x, Out(x[:, ::-1].copy())


@cuda(
    r"""
#include <cuda/pipeline>
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void k(const int* x, int* y, int tiles) {
  __shared__ int s[2][64];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  auto block = cg::this_thread_block();
  auto pipe = cuda::make_pipeline(block, &state);
  int sum = 0, ahead = 0;
  for (int i = 0; i < tiles; ++i) {
    for (; ahead < tiles && ahead < i + 2; ++ahead) {
      pipe.producer_acquire();
      cuda::memcpy_async(block, s[ahead % 2], x + ahead * 64, sizeof(int) * 64, pipe);
      pipe.producer_commit();
    }
    pipe.consumer_wait();
    sum += s[i % 2][63 - threadIdx.x] * (i + 1);
    pipe.consumer_release();
  }
  y[threadIdx.x] = sum;
}""",
    block=64,
)
def libcu_pipeline(rng: Rng) -> Args:
    x = rng.integers(-99, 99, (5, 64), I32)
    return x, Out((x[:, ::-1] * np.arange(1, 6, dtype=I32)[:, None]).sum(0, dtype=I32)), I32(5)


@cuda(
    r"""
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
namespace cg = cooperative_groups;
extern "C" __global__ void k(const double* x, double* y) {
  __shared__ double s[96];
  auto block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  int w = warp.meta_group_rank();
  cg::memcpy_async(warp, s + w * 32, x + w * 32, sizeof(double) * 32);
  cg::wait(warp);
  y[threadIdx.x] = s[w * 32 + 31 - warp.thread_rank()];
}""",
    block=96,
)
def groups_memcpy_async(rng: Rng) -> Args:
    x = rng.standard_normal(96)
    return x, Out(np.ascontiguousarray(x.reshape(3, 32)[:, ::-1]).ravel())


@cuda(
    PRELUDE
    + r"""
extern "C" __global__ void k(const float* x, float* y, const int* sizes) {
  __shared__ __align__(128) float s[64];
  __shared__ u64 bar;
  int n = sizes[blockIdx.x];
  if (threadIdx.x == 0) { init(&bar, 1); fence_init(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&bar, n * 4);
    bulk_load(s, x + blockIdx.x * 64, n * 4, &bar);
  }
  wait(&bar, 0);
  for (int i = threadIdx.x; i < 64; i += blockDim.x) y[blockIdx.x * 64 + i] = i < n ? s[i] : 0;
}""",
    grid=5,
)
def bulk_copies_whose_size_differs_per_block(rng: Rng) -> Args:
    x, n = rng.standard_normal((5, 64)).astype(F32), np.array([16, 64, 4, 32, 60], I32)
    return x, Out(np.where(np.arange(64) < n[:, None], x, 0)), n


@cuda(
    PRELUDE
    + r"""
extern "C" __global__ void k(const float* x, float* y, int tiles) {
  __shared__ __align__(128) float s[2][128];
  __shared__ u64 full[2], empty[2];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) { init(&full[i], 1); init(&empty[i], 2); }
    fence_init();
  }
  __syncthreads();
  if (warp == 2) {  // the producer
    if (lane == 0)
      for (int i = 0; i < tiles; ++i) {
        wait(&empty[i % 2], i / 2 % 2 ^ 1);
        expect(&full[i % 2], 512);
        bulk_load(s[i % 2], x + i * 128, 512, &full[i % 2]);
      }
  } else {
    float a = 0, b = 0;
    for (int i = 0; i < tiles; ++i) {
      wait(&full[i % 2], i / 2 % 2);
      a += s[i % 2][warp * 64 + lane];
      b += s[i % 2][warp * 64 + 63 - lane];
      fence_proxy();
      __syncwarp();
      if (lane == 0) arrive(&empty[i % 2]);
    }
    y[warp * 32 + lane] = a * 2 + b;
  }
}""",
    block=96,
)
def warp_specialised_bulk_pipeline(rng: Rng) -> Args:
    x = rng.integers(-9, 9, (7, 2, 64)).astype(F32)
    total = x.sum(0)
    return x, Out((total[:, :32] * 2 + total[:, :31:-1]).ravel()), I32(7)


@cuda(
    PRELUDE
    + r"""
extern "C" __global__ void k(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
  const float* x, float* y) {
  __shared__ __align__(128) float s[8][16], r[8][16];
  __shared__ u64 bar;
  int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); fence_init(); }
  __syncthreads();
  if (t == 0) { expect(&bar, sizeof(s)); map_load(s, &from, blockIdx.x * 16, blockIdx.y * 8, &bar); }
  wait(&bar, 0);
  for (int i = t; i < 128; i += 32) r[i / 16][i % 16] = s[i / 16][15 - i % 16] * 2;
  fence_proxy();
  __syncthreads();
  if (t == 0) { map_store(&to, r, blockIdx.x * 16, blockIdx.y * 8); stored(); }
}""",
    grid=(3, 2),
)
def tensor_map_tiles(rng: Rng) -> Args:
    x = rng.standard_normal((13, 40)).astype(F32)
    padded = np.zeros((16, 48), F32)
    padded[:13, :40] = x
    y = (padded.reshape(16, 3, 16)[:, :, ::-1] * 2).reshape(16, 48)[:13, :40].copy()
    return Map(x, (8, 16)), Map(y, (8, 16)), x, Out(y)


@cuda(
    PRELUDE
    + r"""
extern "C" __global__ void k(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
  const float* x, const float* w, float* y) {
  __shared__ __align__(128) float s[4][8];
  __shared__ u64 bar;
  int t = threadIdx.x;
  if (t == 0) { init(&bar, 1); fence_init(); }
  __syncthreads();
  // each block takes the map of its half
  const CUtensorMap* mine = blockIdx.x % 2 ? &b : &a;
  if (t == 0) { expect(&bar, sizeof(s)); map_load(s, mine, 0, blockIdx.x / 2 * 4, &bar); }
  wait(&bar, 0);
  y[blockIdx.x * 32 + t] = s[t / 8][t % 8];
}""",
    grid=4,
)
def tensor_map_that_differs_per_block(rng: Rng) -> Args:
    x, w = (rng.standard_normal((8, 8)).astype(F32) for _ in range(2))
    y = np.stack([x[:4], w[:4], x[4:], w[4:]])
    return Map(x, (4, 8)), Map(w, (4, 8)), x, w, Out(y)


@cuda(
    PRELUDE
    + r"""
extern "C" __global__ void k(const unsigned char* x, unsigned char* y, unsigned* z) {
  __shared__ __align__(128) unsigned char s[256];
  __shared__ __align__(16) unsigned sums[4];
  int t = threadIdx.x;
  s[t] = x[t] + 1; s[t + 128] = x[t + 128] + 2;
  if (t < 4) sums[t] = t + 1 + blockIdx.x;
  fence_proxy();
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(y + blockIdx.x * 256),
      "r"(at(s)), "r"(256) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" :: "l"(z),
      "r"(at(sums)), "r"(16) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    stored();
  }
}""",
    grid=3,
    block=128,
)
def bulk_store_and_reduce(rng: Rng) -> Args:
    x = rng.integers(0, 256, 256).astype(U8)
    y = x + np.repeat([1, 2], 128).astype(U8)
    return x, Out(np.tile(y, 3)), InOut(np.zeros(4, U32), Out(np.arange(4, dtype=U32) * 3 + 6))


@cuda(
    r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __cluster_dims__(4, 1, 1) k(const int* x, int* y) {
  __shared__ int s[32];
  auto cluster = cg::this_cluster();
  unsigned rank = cluster.block_rank();
  s[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
  cluster.sync();
  int* other = cluster.map_shared_rank(s, (rank + 1) % 4);
  int v = other[31 - threadIdx.x];
  cluster.sync();
  y[blockIdx.x * 32 + threadIdx.x] = v + rank * 1000 + cluster.num_blocks() * 10000;
}""",
    grid=8,
)
def cluster_reads_a_neighbours_shared_memory(rng: Rng) -> Args:
    x = rng.integers(-99, 99, (2, 4, 32), I32)
    y = np.roll(x, -1, axis=1)[:, :, ::-1] + np.arange(4, dtype=I32)[:, None] * 1000 + 40000
    return x, Out(y)


@cuda(
    r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const unsigned char* x, unsigned* y, int n) {
  __shared__ unsigned bins[8];
  auto cluster = cg::this_cluster();
  if (threadIdx.x < 8) bins[threadIdx.x] = 0;
  cluster.sync();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    unsigned* there = cluster.map_shared_rank(bins, x[i] / 8);
    atomicAdd(there + x[i] % 8, 1u);
  }
  cluster.sync();
  if (threadIdx.x < 8) atomicAdd(&y[cluster.block_rank() * 8 + threadIdx.x], bins[threadIdx.x]);
}""",
    grid=4,
    block=64,
)
def cluster_histogram(rng: Rng) -> Args:
    x = rng.integers(0, 16, 700).astype(U8)
    return x, InOut(np.zeros(16, U32), Out(np.bincount(x, minlength=16).astype(U32))), I32(700)


@cuda(
    PRELUDE
    + r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const float* x, float* y) {
  __shared__ __align__(128) float s[32];
  __shared__ u64 bar;
  unsigned rank, there, its;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) { init(&bar, 1); expect(&bar, 128); fence_init(); }
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at(&s[threadIdx.x])), "r"(rank ^ 1));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its) : "r"(at(&bar)), "r"(rank ^ 1));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
    :: "r"(there), "f"(x[blockIdx.x * 32 + threadIdx.x]), "r"(its) : "memory");
  wait(&bar, 0);
  y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}""",
    grid=4,
)
def cluster_store_async(rng: Rng) -> Args:
    x = rng.standard_normal((2, 2, 32)).astype(F32)
    return x, Out(x[:, ::-1].copy())


@cuda(
    r"""
extern "C" __global__ void k(const float* x, const int4* w, float* y, int4* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __ldg(x + i) + __ldcg(x + i) + __ldcs(x + i) + __ldca(x + i) + __ldlu(x + i) + __ldcv(x + i);
  int4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y),
    "=r"(v.z), "=r"(v.w) : "l"(w + i));
  asm volatile("prefetch.global.L2 [%0];" :: "l"(w + i));
  v.x += v.w;
  __stcs(z + i, v);
}""",
    grid=2,
    block=50,
)
def loads_with_cache_hints(rng: Rng) -> Args:
    x, w = rng.integers(-99, 99, 90).astype(F32), rng.integers(-99, 99, (90, 4), I32)
    z = w.copy()
    z[:, 0] += z[:, 3]
    return x, w, Out(x * 6), Out(z), I32(90)


def _wgmma(types: str, depth: int, n: int = 16, out: str = "float") -> str:
    count, letter = n // 2, "f" if out == "float" else "r"
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    tail = ", p, 1, 1, 0, 0;" if depth in (16,) else ", p;" if out == "int" else ", p, 1, 1;"
    return (
        PRELUDE
        + rf"""
// core matrices of 8 rows of 16 bytes, one behind the other: no swizzle
__device__ u64 descriptor(const void* p, unsigned leading, unsigned stride) {{
  return (u64)((at(p) & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32;
}}
extern "C" __global__ void __launch_bounds__(128) k(const uint4* a, const uint4* b, {out}* y) {{
  __shared__ __align__(128) uint4 as[2 * 64], bs[2 * {n}];
  for (int i = threadIdx.x; i < 128; i += 128) as[i % 2 * 64 + i / 2] = a[i];
  for (int i = threadIdx.x; i < {2 * n}; i += 128) bs[i % 2 * {n} + i / 2] = b[i];
  fence_proxy();
  __syncthreads();
  {out} d[{count}] = {{}};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "
    "wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{types} {{{registers}}}, %{count}, %{count + 1}{tail} }}"
    : {outputs} : "l"(descriptor(as, 1024, 128)), "l"(descriptor(bs, {16 * n}, 128)), "r"(0));
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int r = 0; r < {count}; ++r)
    y[(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r / 2 % 2 * 8) * {n}
      + r / 4 * 8 + threadIdx.x % 4 * 2 + r % 2] = d[r];
}}"""
    )


@cuda(_wgmma("f32.f16.f16", 16), block=128)
def wgmma_f16(rng: Rng) -> Args:
    a, b = small(rng, 64, 16), small(rng, 16, 16)
    return a.astype(F16), np.ascontiguousarray(b.T).astype(F16), Out(a @ b)


@cuda(_wgmma("s32.s8.s8", 32, 8, "int"), block=128)
def wgmma_s8(rng: Rng) -> Args:
    a, b = rng.integers(-128, 128, (64, 32)), rng.integers(-128, 128, (32, 8))
    return a.astype(np.int8), np.ascontiguousarray(b.T).astype(np.int8), Out((a @ b).astype(I32))


@cuda(_wgmma("f32.tf32.tf32", 8, 8), block=128)
def wgmma_tf32(rng: Rng) -> Args:
    a, b = small(rng, 64, 8), small(rng, 8, 8)
    return a, np.ascontiguousarray(b.T), Out(a @ b)
