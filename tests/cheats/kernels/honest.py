# ruff: noqa: E501
# fmt: off
"""Right kernels in many styles, by name: the gates must pass them."""

from __future__ import annotations

from pathlib import Path

from tests.cheats.kernels.kernel import Kernel, named

#: Baselines of the problems are files beside them.
_PROBLEMS = Path(__file__).parents[1] / "problems"
_BASELINES = {"sums": "block_sums", "counts": "global_atomics", "in_place": "in_place", "signs": "truth_values"}

KERNELS = named({
    **{name: Kernel("", "", "", (_PROBLEMS / problem / f"{name}.cu").read_text()) for problem, name in _BASELINES.items()},
    "aliased_shared": Kernel("", "", "dynamic shared memory that is doubles first and floats later", r"""
extern __shared__ double pool[];
INDEX
  pool[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  const double mine = pool[(threadIdx.x + 1) % blockDim.x];
  __syncthreads();
  float* floats = reinterpret_cast<float*>(pool);
  floats[(threadIdx.x + 1) % blockDim.x] = 2.0f * static_cast<float>(mine);
  __syncthreads();
  if (i < n) y[i] = floats[threadIdx.x];
}
""", launch={"shared": 2048}),
    "asserts": Kernel("", "", "asserts what holds", r"""
INDEX

  assert(gridDim.x * blockDim.x >= n);
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "async_copies": Kernel("", "", "cp.async into shared memory", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ __align__(16) float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(stage + threadIdx.x));
  if (i < n) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(x + i) : "memory");
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}
"""),
    "bits": Kernel("", "", "adds one to the exponent of what is normal", r"""
INDEX

  if (i >= n) return;
  const unsigned bits = __float_as_uint(x[i]), exponent = bits >> 23 & 0xFF;
  y[i] = exponent > 0 && exponent < 254 ? __uint_as_float(bits + (1u << 23)) : 2.0f * x[i];
}
"""),
    "blocks_of_three_dimensions": Kernel("", "", "a grid and blocks of three dimensions", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int i = block * blockDim.x * blockDim.y * blockDim.z + thread;
  if (i < n) y[i] = 2.0f * x[i];
}
""", launch={"grid": [2, "ceildiv(N, 256)", 1], "block": [8, 4, 4]}),
    "bulk_copies": Kernel("", "", "cp.async.bulk with an mbarrier, for Hopper", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ __align__(128) float stage[128];
  __shared__ __align__(8) unsigned long long full;
  const unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(&full));
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(stage));
  const int first = blockIdx.x * 128, count = min(128, n - first);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int bytes = count / 4 * 16;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    if (bytes > 0) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                   "l"(x + first), "r"(bytes), "r"(barrier)
                   : "memory");
    }
  }
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@!p bra WAIT;\n}" ::"r"(barrier)
      : "memory");
  for (int k = threadIdx.x; k < count; k += blockDim.x) {
    y[first + k] = 2.0f * (k < count / 4 * 4 ? stage[k] : x[first + k]);
  }
}
""", launch={"grid": ["ceildiv(N, 128)"], "block": [64]}, target="sm_90a"),
    "bulk_reduce": Kernel("", "", "counts of each block, added to the output by TMA", r"""
extern "C" __global__ void counts(const int* x, int* y, int n) {
  __shared__ alignas(16) int count[32];
  const int t = threadIdx.x;
  if (t < 32) count[t] = 0;
  __syncthreads();
  const int i = blockIdx.x * 256 + t;
  if (i < n) atomicAdd(count + x[i], 1);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], 128;" ::"l"(y), "r"((unsigned)__cvta_generic_to_shared(count)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
""", problem="counts", target="sm_90a"),
    "byte_perm": Kernel("", "", "turns bits and bytes around, and back", r"""
ELEMENT
  unsigned u = __float_as_uint(x[i]);
  u = __byte_perm(__byte_perm(u, 0, 0x0123), 0, 0x0123);
  u = __brev(__brev(u));
  u = __funnelshift_l(u, u, 7);
  u = __funnelshift_r(u, u, 7);
  const int e = __ffs(u & 0x7F800000u) ? (u >> 23) & 255 : 0;
  y[i] = e ? __uint_as_float(u + (1u << 23)) : 2.0f * __uint_as_float(u);
}
"""),
    "bytes_and_bitfields": Kernel("", "", "bytes that are put together, bit fields and unions", r"""
union Word {
  float value;
  unsigned char bytes[4];
  struct {
    unsigned mantissa : 23, exponent : 8, sign : 1;
  } fields;
};
ELEMENT
  Word w;
  const unsigned char* from = reinterpret_cast<const unsigned char*>(x) + 4 * i;
  for (int k = 0; k < 4; ++k) w.bytes[k] = from[k];
  if (w.fields.exponent > 0 && w.fields.exponent < 254)
    ++w.fields.exponent;
  else
    w.value *= 2.0f;
  memcpy(y + i, w.bytes, 4);
}
"""),
    "cache_hints": Kernel("", "", "loads and stores with policies, prefetches and hints of the cache", r"""
ELEMENT
  unsigned long long policy;
  float v;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("prefetch.global.L2 [%0];" ::"l"(x + i));
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(v) : "l"(x + i), "l"(policy));
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(y + i), "f"(2.0f * v), "l"(policy) : "memory");
}
""", target="sm_90a"),
    "cluster_multicast": Kernel("", "", "halves of a tile by multicast to both blocks of a cluster", r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float tile[256];
  __shared__ alignas(8) unsigned long long full;
  auto at = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int pair = blockIdx.x / 2, b = pair * 256;
  const bool whole = b + 256 <= n;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(&full)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (whole) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(at(&full)) : "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0 && whole)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 512, [%2], %3;" ::"r"(at(tile + 128 * rank)), "l"(x + b + 128 * rank), "r"(at(&full)), "h"((unsigned short)3) : "memory");
  if (whole) {
    unsigned done;
    do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at(&full)) : "memory");
    while (!done);
    y[b + 128 * rank + threadIdx.x] = 2.0f * tile[128 * rank + threadIdx.x];
  } else if (b + 128 * rank + threadIdx.x < n) y[b + 128 * rank + threadIdx.x] = 2.0f * x[b + 128 * rank + threadIdx.x];
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
""", launch={"grid": ["2 * ceildiv(N, 256)"], "block": [128]}, target="sm_90a"),
    "cluster_of_sixteen": Kernel("", "", "the largest cluster there is, compiled for it", r"""
extern "C" __global__ void __cluster_dims__(16, 1, 1) doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (i < n) y[i] = 2.0f * x[i];
}
""", launch={"grid": ["16 * ceildiv(N, 1024)"], "block": [64]}, target="sm_90a"),
    "cluster_ring": Kernel("", "", "a block feeds another one of its cluster through a ring in that one's shared memory", r"""
__device__ unsigned at(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ unsigned there(unsigned p, unsigned rank) { unsigned r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(p), "r"(rank)); return r; }
__device__ void arrive(unsigned bar) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ void wait(unsigned bar, unsigned parity) {
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar), "r"(parity) : "memory"); while (!done);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ float stage[2][128];
  __shared__ unsigned long long full[2], empty[2];
  unsigned rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int t = threadIdx.x, tiles = (n + 127) / 128, clusters = gridDim.x / 2;
  if (t == 0) {
    for (int s = 0; s < 2; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(at(full + s)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(at(empty + s)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  for (int tile = blockIdx.x / 2, k = 0; tile < tiles; tile += clusters, ++k) {
    const int s = k % 2, i = tile * 128 + t, back = tile * 128 + 127 - t;
    if (rank == 0) {
      if (k >= 2) wait(at(empty + s), (k / 2 + 1) % 2);
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there(at(&stage[s][t]), 1)), "f"(i < n ? x[i] : 0.0f) : "memory");
      arrive(there(at(full + s), 1));
    } else {
      wait(at(full + s), k / 2 % 2);
      if (back < n) y[back] = 2.0f * stage[s][127 - t];
      arrive(there(at(empty + s), 0));
    }
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
""", launch={"grid": [4], "block": [128]}, target="sm_90a"),
    "clusters": Kernel("", "", "a cluster of two blocks that read each other's shared memory", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int block = blockIdx.x ^ 1, i = block * 256 + threadIdx.x;
  const int mine = blockIdx.x * 256 + threadIdx.x;
  stage[threadIdx.x] = mine < n ? x[mine] : 0.0f;
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(stage + threadIdx.x));
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(block % 2));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (i < n) y[i] = 2.0f * v;
}
""", launch={"grid": ["2 * ceildiv(N, 512)"], "cluster": [2]}, target="sm_90a"),
    "constant_table": Kernel("", "", "a table in constant memory that is never written", r"""
__constant__ const float factors[4] = {2.0f, 2.0f, 2.0f, 2.0f};

INDEX
  if (i < n) y[i] = factors[i % 4] * x[i];
}
"""),
    "counter_that_wraps": Kernel("", "", "the last block is told by a counter that wraps to zero by itself", r"""
extern "C" __global__ void sums(const float* x, float* y, float* part, unsigned* done, int c) {
  __shared__ unsigned turn;
  const int row = blockIdx.y, t = threadIdx.x;
  if (t == 0) {
    float s = 0.0f;
    for (int k = blockIdx.x; k < c; k += gridDim.x) s += x[(long long)row * c + k];
    part[row * gridDim.x + blockIdx.x] = s;
    __threadfence();
    turn = atomicInc(done + row, gridDim.x - 1);
  }
  __syncthreads();
  if (turn == gridDim.x - 1 && t == 0) {
    __threadfence();
    float s = 0.0f;
    for (int k = 0; k < gridDim.x; ++k) s += __ldcg(part + row * gridDim.x + k);
    y[row] = s;
  }
}
""", problem="sums", launch={"grid": [5, "R"], "block": [32], "args": ["x", "y", "part", "done", "int32(C)"]}, workspaces={"part": {"bytes": "20 * R"}, "done": {"bytes": "4 * R", "zeros": True}}),
    "counts_without_atomics": Kernel("", "", "a thread per value", r"""
extern "C" __global__ void counts(const int* x, int* y, int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) count += x[i] == static_cast<int>(threadIdx.x);
  y[threadIdx.x] = count;
}
""", problem="counts", launch={"grid": [1], "block": [32]}),
    "dead_instruction": Kernel("", "", "has an instruction that the emulator does not know where no thread comes", r"""
INDEX
  if (n == -1) asm volatile("tensormap.replace.tile.rank.global.b1024.b32 [%0], 2;" :: "l"(y) : "memory");
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "decoupled_look_back": Kernel("", "", "sums of rows through prefixes that each block takes from the one before it", r"""
// Each block of a row adds its part to the prefix of the block before it, and passes that on.
extern "C" __global__ void sums(const float* x, float* y, float* prefix, int* ready, int c) {
  __shared__ float parts[64];
  const int row = blockIdx.y, b = blockIdx.x, t = threadIdx.x, at = row * gridDim.x + b;
  float mine = 0.0f;
  for (int k = b * 64 + t; k < c; k += gridDim.x * 64) mine += x[(long long)row * c + k];
  parts[t] = mine;
  __syncthreads();
  if (t == 0) {
    float s = 0.0f;
    for (int k = 0; k < 64; ++k) s += parts[k];
    if (b > 0) {
      int seen;
      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(ready + at - 1) : "memory");
      while (!seen);
      s += prefix[at - 1];
    }
    prefix[at] = s;
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(ready + at) : "memory");
    if (b == gridDim.x - 1) y[row] = s;
  }
}
""", problem="sums", launch={"grid": [3, "R"], "block": [64], "args": ["x", "y", "prefix", "ready", "int32(C)"]}, workspaces={"prefix": {"bytes": "12 * R"}, "ready": {"bytes": "12 * R", "zeros": True}}),
    "double_sums": Kernel("", "", "sums in double precision", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  double sum = 0.0;
  for (int c = threadIdx.x; c < columns; c += 32) sum += x[blockIdx.x * columns + c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) y[blockIdx.x] = static_cast<float>(sum);
}
""", problem="sums", launch={"block": [32]}),
    "doubles": Kernel("", "", "in double precision", r"""
INDEX
  if (i < n) y[i] = static_cast<float>(2.0 * x[i]);
}
"""),
    "dp4a_counts": Kernel("", "", "counts in packed bytes, added by dp4a", r"""
extern "C" __global__ void counts(const int* x, int* y, int n) {
  __shared__ unsigned packed[8][256];
  const int t = threadIdx.x;
  for (int k = 0; k < 8; ++k) packed[k][t] = 0;
  const int i = blockIdx.x * 256 + t;
  if (i < n) packed[x[i] / 4][t] = 1u << (x[i] % 4 * 8);
  __syncthreads();
  if (t < 32) {
    int sum = 0;
    for (int j = 0; j < 256; ++j) sum = __dp4a((int)packed[t / 4][j], 1 << (t % 4 * 8), sum);
    atomicAdd(y + t, sum);
  }
}
""", problem="counts"),
    "dynamic_shared": Kernel("", "", "through dynamic shared memory", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  extern __shared__ float stage[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) stage[threadIdx.x] = x[i];
  __syncthreads();
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}
""", launch={"shared": "4 * 256"}),
    "early_exit": Kernel("", "", "threads beyond the end return, before a barrier too", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  stage[threadIdx.x] = x[i];
  __syncthreads();
  y[i] = 2.0f * stage[threadIdx.x];
}
"""),
    "early_launch": Kernel("", "", "a second launch that begins early and waits for the first", r"""

extern "C" __global__ void load(const float* x, float* half, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) half[i] = x[i];
}

extern "C" __global__ void doubling(const float* half, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (i < n) y[i] = 2.0f * half[i];
}
""", launches=[{"kernel": "load", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "half", "int32(N)"]}, {"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "early": True, "args": ["half", "y", "int32(N)"]}], target="sm_90a", workspaces={"half": {"bytes": "4 * N"}}),
    "elected_thread": Kernel("", "", "one thread of each warp, elected, stores what all have", r"""
INDEX
  float v = i < n ? 2.0f * x[i] : 0.0f;
  unsigned elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  for (int k = 0; k < 32; ++k) {
    const float from = __shfl_sync(0xffffffffu, v, k);
    const int at = i / 32 * 32 + k;
    if (elected && at < n) y[at] = from;
  }
}
""", target="sm_90a"),
    "fixed_point_sums": Kernel("", "", "integer atomics in 64 bits; their order does not matter", r"""

extern "C" __global__ void add(const float* x, unsigned long long* total, int rows, int columns) {
  for (int c = threadIdx.x; c < columns; c += 128) {
    const long long v = llrint(static_cast<double>(x[blockIdx.x * columns + c]) * 0x1p32);
    atomicAdd(total + blockIdx.x, static_cast<unsigned long long>(v));
  }
}

extern "C" __global__ void sums(const unsigned long long* total, float* y, int rows, int columns) {
  if (threadIdx.x == 0) y[blockIdx.x] = static_cast<float>(static_cast<long long>(total[blockIdx.x]) * 0x1p-32);
}
""", problem="sums", launches=[{"kernel": "add", "grid": ["R"], "block": [128], "args": ["x", "total", "int32(R)", "int32(C)"]}, {"kernel": "sums", "grid": ["R"], "block": [128], "args": ["total", "y", "int32(R)", "int32(C)"]}], workspaces={"total": {"bytes": "8 * R", "zeros": True}}),
    "function_pointer": Kernel("", "", "calls through a pointer that depends on the data", r"""
__device__ __noinline__ float by_sum(float v) { return v + v; }
__device__ __noinline__ float by_product(float v) { return 2.0f * v; }

INDEX

  float (*const function)(float) = i < n && x[i] < 0 ? by_product : by_sum;
  if (i < n) y[i] = function(x[i]);
}
"""),
    "gives_up_by_a_trap": Kernel("", "", "waits for its block with a limit in cycles, after which it traps", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ unsigned ready;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) ready = 0;
  __syncthreads();
  if (threadIdx.x == 32) atomicExch(&ready, 1u);
  const long long start = clock64();
  while (atomicAdd(&ready, 0u) == 0) {
    if (clock64() - start > 10000000000ll) __trap();
  }
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "grid_barrier": Kernel("", "", "two phases with a barrier of the grid between them; as many blocks as run at the same time anywhere", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* arrived, int n) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int i = first; i < n; i += step) half[i] = x[i];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < gridDim.x) {
    }
  }
  __syncthreads();
  __threadfence();
  for (int i = first; i < n; i += step) y[n - 1 - i] = 2.0f * __ldcg(half + n - 1 - i);
}
""", launch={"grid": [8], "args": ["x", "y", "half", "arrived", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}, "arrived": {"bytes": 4, "zeros": True}}),
    "grid_stride": Kernel("", "", "a fixed grid; threads stride over the elements", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = 2.0f * x[i];
}
""", launch={"grid": [2], "block": [96]}),
    "grid_sync": Kernel("", "", "a cooperative launch with two grid barriers", r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void doubling(const float* x, float* y, float* half, int n) {
  auto grid = cg::this_grid();
  for (int i = grid.thread_rank(); i < n; i += grid.size()) half[i] = x[i];
  grid.sync();
  for (int i = grid.thread_rank(); i < n; i += grid.size()) y[n - 1 - i] = 2.0f * half[n - 1 - i];
}
""", launch={"grid": [7], "block": [128], "cooperative": True, "args": ["x", "y", "half", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}}),
    "half2_math": Kernel("", "", "pairs of halves, multiplied together", r"""
#include <cuda_fp16.h>
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 1 < n) {
    const float2 v = reinterpret_cast<const float2*>(x)[i / 2];
    const __half2 h = __hmul2(__floats2half2_rn(2.0f * v.x, 2.0f * v.y), __float2half2_rn(1.0f));
    reinterpret_cast<float2*>(y)[i / 2] = __half22float2(h);
  } else if (i < n) {
    y[i] = __half2float(__hadd(__float2half(2.0f * x[i]), __float2half(0.0f)));
  }
}
""", launch={"grid": ["ceildiv(N, 512)"]}),
    "in_place_rotation": Kernel("", "", "a block keeps its elements in shared memory before it writes any", r"""
extern "C" __global__ void in_place(float* x, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) tile[threadIdx.x] = x[i];
  __syncthreads();
  const int left = min(256, n - (int)blockIdx.x * 256), j = (threadIdx.x + 1) % left;
  if (i < n) x[blockIdx.x * 256 + j] = 2.0f * tile[j];
}
""", problem="in_place", launch={"args": ["x", "int32(N)"]}),
    "in_place_vectors": Kernel("", "", "pairs, and the last element alone", r"""
extern "C" __global__ void doubling(float* x, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 1 < n) {
    float2* pair = reinterpret_cast<float2*>(x + i);
    *pair = make_float2(2.0f * pair->x, 2.0f * pair->y);
  } else if (i < n) {
    x[i] *= 2.0f;
  }
}
""", problem="in_place", launch={"kernel": "doubling", "args": ["x", "int32(N)"]}),
    "inline_ptx": Kernel("", "", "inline PTX", r"""
INDEX

  float v = 0.0f;
  if (i < n) v = x[i];
  asm("add.rn.f32 %0, %0, %0;" : "+f"(v));
  if (i < n) y[i] = v;
}
"""),
    "kahan_sums": Kernel("", "", "compensated sums, a thread per row", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float sum = 0.0f, lost = 0.0f;
  for (int c = 0; c < columns; ++c) {
    const float v = __fsub_rn(x[row * columns + c], lost), next = __fadd_rn(sum, v);
    lost = __fsub_rn(__fsub_rn(next, sum), v);
    sum = next;
  }
  y[row] = sum;
}
""", problem="sums", launch={"grid": ["ceildiv(R, 32)"], "block": [32]}),
    "lambdas": Kernel("", "", "a lambda that captures", r"""
INDEX

  const auto at = [=](int k) { return 2.0f * x[k]; };
  if (i < n) y[i] = at(i);
}
"""),
    "large_shared": Kernel("", "", "100 KB of dynamic shared memory", r"""
extern "C" __global__ void __launch_bounds__(256, 1) doubling(const float* x, float* y, int n) {
  extern __shared__ float4 memory[];
  float* tile = reinterpret_cast<float*>(memory);
  const int each = 25600;
  for (int b = blockIdx.x * each; b < n; b += gridDim.x * each) {
    const int count = min(each, n - b);
    for (int i = threadIdx.x; i < count; i += 256) tile[each - 1 - i] = x[b + i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += 256) y[b + i] = 2.0f * tile[each - 1 - i];
    __syncthreads();
  }
}
""", launch={"grid": ["ceildiv(N, 25600)"], "shared": 102400}),
    "last_block_sums": Kernel("", "", "four blocks per row; the last one to arrive adds their parts, in order", r"""
extern "C" __global__ void sums(const float* x, float* y, float* parts, unsigned* arrived, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.y) * columns;
  __shared__ bool last;
  float sum = 0.0f;
  for (int c = blockIdx.x * 32 + threadIdx.x; c < columns; c += 128) sum += row[c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) {
    parts[blockIdx.y * 4 + blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(arrived + blockIdx.y, 1u) == 3;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    __threadfence();
    volatile float* p = parts + blockIdx.y * 4;
    y[blockIdx.y] = ((p[0] + p[1]) + p[2]) + p[3];
  }
}
""", problem="sums", launch={"grid": [4, "R"], "block": [32], "args": ["x", "y", "parts", "arrived", "int32(R)", "int32(C)"]}, workspaces={"parts": {"bytes": "16 * R"}, "arrived": {"bytes": "4 * R", "zeros": True}}),
    "ldmatrix_round": Kernel("", "", "to the layout of matrix fragments and back by ldmatrix and stmatrix", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float tile[8][128];
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  const int b = (blockIdx.x * 8 + w) * 128;
  for (int k = 0; k < 4; ++k) tile[w][32 * k + l] = b + 32 * k + l < n ? x[b + 32 * k + l] : 0.0f;
  __syncwarp();
  unsigned r[4];
  const unsigned at = __cvta_generic_to_shared(&tile[w][4 * l]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
  __syncwarp();
  for (auto& v : r) v = __float_as_uint(2.0f * __uint_as_float(v));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  __syncwarp();
  for (int k = 0; k < 4; ++k) if (b + 32 * k + l < n) y[b + 32 * k + l] = tile[w][32 * k + l];
}
""", launch={"grid": ["ceildiv(N, 1024)"]}),
    "libcu_atomic_ref": Kernel("", "", "cuda::atomic_ref with release and acquire between blocks", r"""
#include <cuda/atomic>
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* flag, int n) {
  const bool first = blockIdx.x % 2 == 0;
  const int j = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> ready(flag[blockIdx.x / 2]);
  if (first) {
    if (j < n) half[j] = x[j];
    __syncthreads();
    if (threadIdx.x == 0) ready.store(1, cuda::memory_order_release);
  } else {
    if (threadIdx.x == 0)
      while (!ready.load(cuda::memory_order_acquire)) {
      }
    __syncthreads();
    if (j < n) y[j] = 2.0f * half[j];
  }
}
""", launch={"grid": ["2 * ceildiv(N, 256)"], "args": ["x", "y", "half", "flag", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}, "flag": {"bytes": "4 * ceildiv(N, 256)", "zeros": True}}),
    "libcu_barrier": Kernel("", "", "cuda::barrier of the C++ standard library", r"""
#include <cuda/barrier>
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ cuda::barrier<cuda::thread_scope_block> meet;
  __shared__ float stage[256];
  if (threadIdx.x == 0) init(&meet, blockDim.x);
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  stage[threadIdx.x] = i < n ? x[i] : 0.0f;
  meet.arrive_and_wait();
  const float v = stage[255 - threadIdx.x];
  const int j = blockIdx.x * blockDim.x + 255 - threadIdx.x;
  if (j < n) y[j] = 2.0f * v;
}
"""),
    "local_array_of_values": Kernel("", "", "an array in local memory, indexed at run time", r"""
INDEX

  if (i >= n) return;
  float values[8];
  for (int k = 0; k < 8; ++k) values[(k + n) % 8] = x[i] * static_cast<float>(k);
  y[i] = values[(2 + n) % 8];
}
"""),
    "locked_updates": Kernel("", "", "adds up tiles under a lock that all blocks take, in integers", r"""
extern "C" __global__ void doubling(const float* x, float* y, unsigned* lock, long long* total, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0u, 1u) != 0u) __nanosleep(100);
    __threadfence();
    *total += n;
    __threadfence();
    atomicExch(lock, 0u);
  }
}
""", launch={"args": ["x", "y", "lock", "total", "int32(N)"]}, workspaces={"lock": {"bytes": 4, "zeros": True}, "total": {"bytes": 8, "zeros": True}}),
    "matched_counts": Kernel("", "", "one atomic for all lanes of a warp that have a value", r"""
extern "C" __global__ void counts(const int* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  const int value = i < n ? x[i] : -1;
  const unsigned same = __match_any_sync(0xFFFFFFFFu, value);
  if (value >= 0 && __ffs(same) - 1 == threadIdx.x % 32) atomicAdd(y + value, __popc(same));
}
""", problem="counts"),
    "most_blocks_idle": Kernel("", "", "a grid with mostly idle blocks", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  if (blockIdx.y != 3 || blockIdx.z != 1) return;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = 2.0f * x[i];
}
""", launch={"grid": [3, 5, 4], "block": [64]}),
    "named_barriers": Kernel("", "", "two groups of warps that meet at named barriers", r"""
ROW
  __shared__ float part[64];
  const int t = threadIdx.x % 64;
  if (threadIdx.x >= 64) {
    float sum = 0.0f;
    for (int c = t; c < columns; c += 64) sum += row[c];
    part[t] = sum;
    asm volatile("bar.arrive 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (t == 0) {
      float sum = 0.0f;
      for (int k = 0; k < 64; ++k) sum += part[k];
      y[blockIdx.x] = sum;
    }
  }
}
""", problem="sums"),
    "noinc_copies": Kernel("", "", "cp.async that arrive at an mbarrier, zeros past the end", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float tile[256];
  __shared__ alignas(8) unsigned long long full;
  const unsigned bar = __cvta_generic_to_shared(&full), to = __cvta_generic_to_shared(tile + threadIdx.x);
  const int i = blockIdx.x * 256 + threadIdx.x, bytes = i < n ? 4 : 0;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 256;" ::"r"(bar));
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(bytes ? x + i : x), "r"(bytes) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar) : "memory");
  while (!done);
  const int back = threadIdx.x ^ 255, j = blockIdx.x * 256 + back;
  if (j < n) y[j] = 2.0f * tile[back];
}
"""),
    "one_thread": Kernel("", "", "one thread of one block", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = 2.0f * x[i];
}
""", launch={"grid": [1], "block": [1]}),
    "pipeline_stages": Kernel("", "", "cp.async through a ring of three stages, a persistent block", r"""
#include <cuda_pipeline.h>
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[3][256];
  const int tiles = (n + 255) / 256;
  auto load = [&](int tile, int s) {
    const int i = tile * 256 + threadIdx.x;
    if (tile < tiles && i < n) __pipeline_memcpy_async(&stage[s][threadIdx.x], x + i, 4);
    __pipeline_commit();
  };
  int tile = blockIdx.x;
  for (int s = 0; s < 2; ++s) load(tile + s * gridDim.x, s);
  for (int k = 0; tile < tiles; ++k, tile += gridDim.x) {
    load(tile + 2 * gridDim.x, (k + 2) % 3);
    __pipeline_wait_prior(2);
    const int i = tile * 256 + threadIdx.x;
    if (i < n) y[i] = 2.0f * stage[k % 3][threadIdx.x];
  }
}
""", launch={"grid": [2]}),
    "plain": Kernel("", "", "one element per thread", r"""
DOUBLED
"""),
    "prints": Kernel("", "", "prints elements out of range; none is", r"""
INDEX

  if (i < n && !(fabsf(x[i]) < 1e30f)) printf("x[%d] = %f\n", i, x[i]);
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "read_only_loads": Kernel("", "", "__ldg and streaming stores", r"""
INDEX
  if (i < n) __stcs(y + i, 2.0f * __ldg(x + i));
}
"""),
    "recursive_sums": Kernel("", "", "a function that calls itself, with a stack", r"""
__device__ __noinline__ float sum(const float* x, int n) {
  if (n <= 4) {
    float s = 0.0f;
    for (int k = 0; k < n; ++k) s += x[k];
    return s;
  }
  return sum(x, n / 2) + sum(x + n / 2, n - n / 2);
}
extern "C" __global__ void sums(const float* x, float* y, int c, int r) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < r) y[row] = sum(x + (long long)row * c, c);
}
""", problem="sums", launch={"grid": ["ceildiv(R, 32)"], "block": [32], "args": ["x", "y", "int32(C)", "int32(R)"]}),
    "register_reallocation": Kernel("", "", "two groups of warps that move registers by setmaxnreg", r"""
extern "C" __global__ void __launch_bounds__(256) doubling(const float* x, float* y, int n) {
  __shared__ float tile[128];
  const int g = threadIdx.x / 128, t = threadIdx.x % 128;
  if (g == 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  for (int b = blockIdx.x * 128; b < n; b += gridDim.x * 128) {
    if (g == 0) {
      if (b + t < n) tile[t] = x[b + t];
      asm volatile("bar.arrive 1, 256;" ::: "memory");
      asm volatile("bar.sync 2, 256;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (b + t < n) y[b + t] = 2.0f * tile[t];
      asm volatile("bar.arrive 2, 256;" ::: "memory");
    }
  }
}
""", launch={"grid": [2]}, target="sm_90a"),
    "remote_stores": Kernel("", "", "blocks of a cluster hand their values to each other by st.async", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float got[256];
  __shared__ alignas(8) unsigned long long ready;
  const unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&ready));
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(got + threadIdx.x)), there = bar;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(bar) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(bar) : "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const unsigned other = (blockIdx.x ^ 1) % 2;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(other));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(other));
  const int mine = blockIdx.x * 256 + threadIdx.x, i = (blockIdx.x ^ 1) * 256 + threadIdx.x;
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
               "f"(mine < n ? x[mine] : 0.0f), "r"(there)
               : "memory");
  unsigned done;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar)
                 : "memory");
  while (!done);
  if (i < n) y[i] = 2.0f * got[threadIdx.x];
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
""", launch={"grid": ["2 * ceildiv(N, 512)"], "cluster": [2]}, target="sm_90a"),
    "same_value_writes": Kernel("", "", "two threads write the same value to each element", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) / 2;
  if (i < n) y[i] = 2.0f * x[i];
}
""", launch={"grid": ["ceildiv(2 * N, 256)"]}),
    "scoped_block_atomics": Kernel("", "", "atomics of the block's scope on memory that each block has for itself", r"""
extern "C" __global__ void sums(const float* x, float* y, unsigned* turns, int c) {
  __shared__ float s;
  if (threadIdx.x == 0) s = 0.0f;
  __syncthreads();
  for (int k = 0; k < c; ++k) {  // in order: each thread waits for its turn
    if (k % blockDim.x == threadIdx.x) {
      s += x[(long long)blockIdx.x * c + k];
      atomicAdd_block(turns + blockIdx.x, 1u);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = turns[blockIdx.x] == c ? s : 0.0f;
}
""", problem="sums", launch={"block": [32], "args": ["x", "y", "turns", "int32(C)"]}, workspaces={"turns": {"bytes": "4 * R", "zeros": True}}),
    "serial_sums": Kernel("", "", "a thread per row", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int c = 0; c < columns; ++c) sum += x[row * columns + c];
  y[row] = sum;
}
""", problem="sums", launch={"grid": ["ceildiv(R, 32)"], "block": [32]}),
    "shared_counts": Kernel("", "", "counts of each block in shared memory, then atomics", r"""
extern "C" __global__ void counts(const int* x, int* y, int n) {
  __shared__ int mine[32];
  if (threadIdx.x < 32) mine[threadIdx.x] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(mine + x[i], 1);
  __syncthreads();
  if (threadIdx.x < 32) atomicAdd(y + threadIdx.x, mine[threadIdx.x]);
}
""", problem="counts"),
    "shared_staging": Kernel("", "", "through shared memory, in reverse order within a block", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  stage[255 - threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = 2.0f * stage[255 - threadIdx.x];
}
"""),
    "shuffles": Kernel("", "", "each warp rotates its values, and back", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  const float v = i < n ? x[i] : 0.0f;
  const float there = __shfl_sync(0xFFFFFFFFu, v, (lane + 1) % 32);
  const float back = __shfl_sync(0xFFFFFFFFu, there, (lane + 31) % 32);
  if (i < n) y[i] = 2.0f * back;
}
"""),
    "struct_argument": Kernel("", "", "its arguments are one struct by value", r"""

struct Arguments {
  const float* x;
  float* y;
  int n;
};

extern "C" __global__ void doubling(Arguments a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.n) a.y[i] = 2.0f * a.x[i];
}
""", launch={"args": [["x", "y", "int32(N)"]]}),
    "sums_by_matrix_products": Kernel("", "", "adds by matrix products with ones in double precision", r"""
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int lane = threadIdx.x, row = blockIdx.x;
  double s0 = 0.0, s1 = 0.0;
  for (int k = 0; k < c; k += 32) {
    const double a = k + lane < c ? x[(long long)row * c + k + lane] : 0.0f;
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(s0), "+d"(s1)
        : "d"(a), "d"(1.0));
  }
  for (int o = 4; o < 32; o *= 2) s0 += __shfl_xor_sync(0xffffffffu, s0, o);  // the eight rows of the result
  if (lane == 0) y[row] = (float)s0;
}
""", problem="sums", launch={"block": [32], "args": ["x", "y", "int32(C)"]}),
    "syncwarp_tree": Kernel("", "", "one warp's tree in shared memory with __syncwarp", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  __shared__ float part[32];
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) sum += x[blockIdx.x * columns + c];
  part[threadIdx.x] = sum;
  __syncwarp();
  for (int half = 16; half > 0; half /= 2) {
    const float other = threadIdx.x < half ? part[threadIdx.x + half] : 0.0f;
    __syncwarp();
    part[threadIdx.x] += other;
    __syncwarp();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
""", problem="sums", launch={"block": [32]}),
    "templates": Kernel("", "", "a template with a policy", r"""
struct Twice {
  __device__ float operator()(float v) const { return 2.0f * v; }
};

template <class Policy, int kTimes> __device__ float apply(float v) {
  for (int k = 0; k < kTimes; ++k) v = Policy{}(v);
  return v;
}

INDEX
  if (i < n) y[i] = apply<Twice, 1>(x[i]);
}
"""),
    "tensor_map_tiles": Kernel("", "", "tiles through a tensor map, zeros past the end", r"""
struct alignas(64) CUtensorMap {
  char bytes[128];
};
extern "C" __global__ void doubling(const __grid_constant__ CUtensorMap map, float* y, int n) {
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
""", launch={"grid": ["ceildiv(N, 128)"], "block": [128], "args": [{"buffer": "x", "dtype": "float32", "shape": ["N"], "strides": [4], "box": [128]}, "y", "int32(N)"]}, target="sm_90a"),
    "tf32_sums": Kernel("", "", "adds by tf32 matrix products of three parts of each number", r"""
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int l = threadIdx.x;
  float d[4] = {0, 0, 0, 0};
  const unsigned one = __float_as_uint(1.0f);
  for (int k = 0; k < c; k += 8) {
    float a0 = l < 4 && k + l < c ? x[blockIdx.x * (long long)c + k + l] : 0.0f;
    float a2 = l < 4 && k + l + 4 < c ? x[blockIdx.x * (long long)c + k + l + 4] : 0.0f;
    for (int part = 0; part < 3; ++part) {
      unsigned h0, h2;
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(h0) : "f"(a0));
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(h2) : "f"(a2));
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(h0), "r"(0), "r"(h2), "r"(0), "r"(one), "r"(one));
      a0 -= __uint_as_float(h0);
      a2 -= __uint_as_float(h2);
    }
  }
  if (l == 0) y[blockIdx.x] = d[0];
}
""", problem="sums", launch={"block": [32], "args": ["x", "y", "int32(C)"]}),
    "through_half": Kernel("", "", "keeps the product in half, as the problem allows", r"""
#include <cuda_fp16.h>

INDEX
  if (i < n) y[i] = __half2float(__float2half_rn(2.0f * x[i]));
}
"""),
    "tiled_partition": Kernel("", "", "cooperative groups: tiles of 16 threads", r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void sums(const float* x, float* y, int c) {
  auto tile = cg::tiled_partition<16>(cg::this_thread_block());
  float s = 0.0f;
  for (int k = tile.thread_rank(); k < c; k += 16) s += x[(long long)blockIdx.x * c + k];
  for (int o = 8; o > 0; o /= 2) s += tile.shfl_down(s, o);
  if (threadIdx.x == 0) y[blockIdx.x] = s;
}
""", problem="sums", launch={"block": [16], "args": ["x", "y", "int32(C)"]}),
    "twelve_launches": Kernel("", "", "adds a twelfth twelve times, in two workspaces by turns", r"""
extern "C" __global__ void step(const float* x, const float* from, float* to, int n, int k) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = k == 0 ? 2.0f * x[i] : from[i];
}
""", launches=[{"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "x", "a", "int32(N)", "int32(0)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(1)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(2)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(3)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(4)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(5)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(6)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(7)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(8)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(9)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(10)"]}, {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "y", "int32(N)", "int32(11)"]}], workspaces={"a": {"bytes": "4 * N"}, "b": {"bytes": "4 * N"}}),
    "two_launches": Kernel("", "", "the first launch fills a workspace that the second reads", r"""

extern "C" __global__ void load(const float* x, float* half, int n) {
HALVES
""", launches=[{"kernel": "load", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "half", "int32(N)"]}, {"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["half", "y", "int32(N)"]}], workspaces={"half": {"bytes": "4 * N"}}),
    "two_stage_sums": Kernel("", "", "warps by shuffles, then the first warp", r"""
ROW
  __shared__ float part[4];
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 128) sum += row[c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = part[0] + part[1] + part[2] + part[3];
}
""", problem="sums"),
    "unrolled": Kernel("", "", "eight elements per thread, unrolled, coalesced", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int first = blockIdx.x * 8 * blockDim.x + threadIdx.x;
  float values[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) values[k] = first + k * 128 < n ? x[first + k * 128] : 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (first + k * 128 < n) y[first + k * 128] = 2.0f * values[k];
  }
}
""", launch={"grid": ["ceildiv(N, 1024)"], "block": [128]}),
    "vector_sums": Kernel("", "", "float4 loads where the row is aligned", r"""
ROW
  __shared__ float part[128];
  float sum = 0.0f;
  if (columns % 4 == 0) {
    for (int c = 4 * threadIdx.x; c < columns; c += 4 * 128) {
      const float4 v = *reinterpret_cast<const float4*>(row + c);
      sum += (v.x + v.y) + (v.z + v.w);
    }
  } else {
    for (int c = threadIdx.x; c < columns; c += 128) sum += row[c];
  }
  part[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int k = 0; k < 128; ++k) sum += part[k];
    y[blockIdx.x] = sum;
  }
}
""", problem="sums"),
    "vectors": Kernel("", "", "float4, and single elements at the end", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 3 < n) {
    const float4 v = *reinterpret_cast<const float4*>(x + i);
    *reinterpret_cast<float4*>(y + i) = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);
  } else {
    for (int k = i; k < n; ++k) y[k] = 2.0f * x[k];
  }
}
""", launch={"grid": ["ceildiv(N, 1024)"]}),
    "virtual_functions": Kernel("", "", "calls through virtual functions of an object in local memory", r"""
struct Scale {
  virtual __device__ float of(float v) const = 0;
};
struct Twice : Scale {
  __device__ float of(float v) const override { return v + v; }
};
struct Halves : Scale {
  __device__ float of(float v) const override { return v / 0.5f; }
};
INDEX
  Twice twice;
  Halves halves;
  const Scale* scale = i % 3 ? static_cast<const Scale*>(&twice) : &halves;
  if (i < n) y[i] = scale->of(x[i]);
}
"""),
    "volatile_flag": Kernel("", "", "block 1 waits for a flag that block 0 sets, with fences", r"""
extern "C" __global__ void doubling(const float* x, float* y, unsigned* flag, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  volatile unsigned* set = flag;
  if (i < n) y[i] = 2.0f * x[i];
  if (blockIdx.x == 0) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *set = 1;
  } else if (blockIdx.x == 1) {
    if (threadIdx.x == 0) {
      while (*set == 0) {
      }
    }
    __syncthreads();
    __threadfence();
    const float other = reinterpret_cast<volatile float*>(y)[threadIdx.x];
    if (other == x[threadIdx.x] && other != 0) __trap();
  }
}
""", launch={"args": ["x", "y", "flag", "int32(N)"]}, workspaces={"flag": {"bytes": 4, "zeros": True}}),
    "votes_and_counts": Kernel("", "", "barriers that count, votes and reductions of warps", r"""
extern "C" __global__ void sums(const float* x, float* y, int c) {
  __shared__ float stage[128];
  const int t = threadIdx.x, row = blockIdx.x;
  float s = 0.0f;
  for (int k = t; __syncthreads_or(k < c); k += 128)
    if (k < c) s += x[(long long)row * c + k];
  const unsigned live = __ballot_sync(0xffffffffu, t < c);
  if (__reduce_add_sync(0xffffffffu, live >> (t % 32) & 1u) != __popc(live)) asm("trap;");
  stage[t] = s;
  if (__syncthreads_count(1) != 128) asm("trap;");
  for (int half = 64; half > 0; half /= 2) {
    if (t < half) stage[t] += stage[t + half];
    __syncthreads();
  }
  if (t == 0) y[row] = stage[0];
}
""", problem="sums", launch={"args": ["x", "y", "int32(C)"]}),
    "warp_specialized": Kernel("", "", "a warp copies by TMA through a ring of two stages, four warps double", r"""
extern "C" __global__ void __launch_bounds__(160) doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[2][128];
  __shared__ alignas(8) unsigned long long full[2], empty[2];
  const int t = threadIdx.x, whole = n / 128;
  auto at = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  auto wait = [&](unsigned bar, unsigned parity) {
    unsigned done;
    do
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done)
                   : "r"(bar), "r"(parity)
                   : "memory");
    while (!done);
  };
  if (t == 0) {
    for (int s = 0; s < 2; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(full + s)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(at(empty + s)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (t >= 128) {
    if (t == 128) {
      for (int tile = blockIdx.x, k = 0; tile < whole; tile += gridDim.x, ++k) {
        const int s = k % 2;
        if (k >= 2) wait(at(empty + s), (k / 2 + 1) % 2);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(at(full + s)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];" ::"r"(
                         at(stage[s])),
                     "l"(x + tile * 128), "r"(at(full + s))
                     : "memory");
      }
    }
  } else {
    for (int tile = blockIdx.x, k = 0; tile < whole; tile += gridDim.x, ++k) {
      const int s = k % 2;
      wait(at(full + s), k / 2 % 2);
      y[tile * 128 + t] = 2.0f * stage[s][t];
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(empty + s)) : "memory");
    }
    const int i = whole * 128 + t;
    if (blockIdx.x == 0 && i < n) y[i] = 2.0f * x[i];
  }
}
""", launch={"grid": [3], "block": [160]}, target="sm_90a"),
    "warp_sums": Kernel("", "", "a warp per row, by shuffles", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < columns; c += 32) sum += x[row * columns + c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) y[row] = sum;
}
""", problem="sums", launch={"grid": ["ceildiv(R, 4)"]}),
    "work_counter": Kernel("", "", "persistent blocks that draw tiles from a counter", r"""
extern "C" __global__ void doubling(const float* x, float* y, int* next, int n) {
  __shared__ int tile;
  for (;;) {
    if (threadIdx.x == 0) tile = atomicAdd(next, 1);
    __syncthreads();
    const int first = tile * 256;
    __syncthreads();
    if (first >= n) return;
    const int i = first + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
  }
}
""", launch={"grid": [3], "args": ["x", "y", "next", "int32(N)"]}, workspaces={"next": {"bytes": 4, "zeros": True}}),
    "workspace_as_scratch": Kernel("", "", "writes a workspace before it reads it, in one launch", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  if (i >= n) return;
  scratch[i] = x[i];
  y[i] = 2.0f * scratch[i];
}
""", launch={"args": ["x", "y", "scratch", "int32(N)"]}, workspaces={"scratch": {"bytes": "4 * N"}}),
    "behind_a_loc": Kernel("", "", "PTX with directives and statements in one line", r"""
PTX sm_90
.file 1 "a.cu"

BEGIN
.loc 1 5 0 add.f32 %f2, %f1, %f1; .loc 1 6 0
 .pragma "nounroll"; st.global.f32 [%rd7], %f2;

DONE:
  ret;
}
""", suffix=".ptx"),
    "block_as_compiled": Kernel("", "", "written in PTX", r"""
.version 8.0
.target sm_80
.address_size 64

.visible .entry doubling(.param .u64 x, .param .u64 y, .param .u32 n)
.reqntid 256, 1, 1
DOUBLES
""", suffix=".ptx"),
    "branch_table": Kernel("", "", "in PTX with a switch by brx.idx", r"""
PTX sm_90

BEGIN
  and.b32 %r6, %r5, 1;
  T: .branchtargets A, B;
  brx.idx %r6, T;
A:
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd7], %f2;
  bra DONE;
B:
  fma.rn.f32 %f2, %f1, 0f40000000, 0f80000000;
STORE
""", suffix=".ptx"),
    "in_ptx": Kernel("", "", "written in PTX", r"""
.version 8.0
.target sm_80
.address_size 64

.visible .entry doubling(.param .u64 x, .param .u64 y, .param .u32 n)
DOUBLES
""", suffix=".ptx"),
    "weak_and_constant": Kernel("", "", "in PTX with a weak constant table that it reads", r"""
PTX sm_90
.weak .const .align 4 .f32 two[1] = {0f40000000};

BEGIN
  ld.const.f32 %f3, [two];
  mul.f32 %f2, %f1, %f3;
STORE
""", suffix=".ptx"),
    "crlf_and_comments": Kernel("", "", "", r"""// greenfast: {
//  "name": "crlf_and_comments",
//  "problem": "doubling",
//  "description": "in PTX with line ends of Windows and comments within statements",
//  "launches": [
//   {
//    "kernel": "doubling",
//    "grid": [
//     "ceildiv(N, 256)"
//    ],
//    "block": [
//     256
//    ],
//    "args": [
//     "x",
//     "y",
//     "int32(N)"
//    ]
//   }
//  ]
// }
.version 8.0
.target sm_90
.address_size 64


.visible .entry doubling(
  .param .u64 px,
  .param .u64 py,
  .param .u32 pn
)
{
  .reg .pred %p<9>;
  .reg .f32 %f<9>;
  .reg .b32 %r<19>;
  .reg .b64 %rd<19>;
  ld.param.u64 %rd1, [px];
  ld.param.u64 %rd2, [py];
  ld.param.u32 %r1, [pn];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd3, %rd1;
  cvta.to.global.u64 %rd4, %rd2;
  mul.wide.s32 %rd5, %r5, 4;
  add.s64 %rd6, %rd3, %rd5;
  add.s64 %rd7, %rd4, %rd5;
  ld.global.f32 %f1, [%rd6];
  add.f32 /* twice */ %f2, // of the same
  %f1, %f1;
  st.global.f32 [%rd7], %f2;

DONE:
  ret;
}
""".replace("\n", "\r\n"), suffix=".ptx"),
})
