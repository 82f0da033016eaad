# ruff: noqa: E501, W293
# fmt: off
"""Kernels with threads, blocks or copies that do not wait for each other, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel, named

KERNELS = named({
    "accumulator_not_awaited": Kernel("CORRECTNESS", "accumulator before a wgmma.wait_group", "reads an accumulator of wgmma before it waits", r"""
#include <cuda_bf16.h>
extern "C" __global__ void sums(const float* x, float* y, int c) {
  __shared__ alignas(128) __nv_bfloat16 a[64 * 16], one[8 * 16];
  const int t = threadIdx.x;
  float d[4] = {0, 0, 0, 0};
  auto desc = [](const void* p) { unsigned long long s = (unsigned long long)((unsigned)__cvta_generic_to_shared(p) & 0x3FFFF) >> 4; return s | (8ull << 16) | (16ull << 32); };
  for (int i = t; i < 1024; i += 128) a[i] = __float2bfloat16(0.0f);
  if (t < 128) one[t] = __float2bfloat16(1.0f);
  __syncthreads();
  if (t == 0) for (int i = 0; i < 8; ++i) a[i] = __float2bfloat16(1.0f);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  float got;
  asm volatile("{wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %5, %6, 1, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\nmul.f32 %4, %0, 0f3F800000;\nwgmma.wait_group.sync.aligned 0;}" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "=f"(got) : "l"(desc(a)), "l"(desc(one)));
  float s = 0;
  if (t == 0) { for (int i = 0; i < c; ++i) s += x[blockIdx.x * (long long)c + i]; y[blockIdx.x] = s + 0 * (got > 100.0f); }
}
""", problem="sums", launch={"args": ["x", "y", "int32(C)"]}, target="sm_90a"),
    "arrivals_of_half_the_threads": Kernel("CORRECTNESS", "read of an element that nothing has written", "initialises an mbarrier for half of the threads that arrive", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  __shared__ unsigned long long bar;
  const unsigned at = __cvta_generic_to_shared(&bar);
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 255);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 128;" ::"r"(at));
  __syncthreads();
  if (i < n) tile[threadIdx.x] = x[i];
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 1; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at) : "memory"); while (!done);
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 255];
}
"""),
    "atomic_of_a_block": Kernel("CORRECTNESS", "a data race on", "counts blocks with an atomic of the block's scope", r"""
extern "C" __global__ void sums(const float* x, float* y, float* part, unsigned* done, int c) {
  __shared__ bool last;
  const int row = blockIdx.y, t = threadIdx.x;
  if (t == 0) {
    float s = 0;
    for (int k = blockIdx.x; k < c; k += gridDim.x) s += x[row * (long long)c + k];
    part[row * 4 + blockIdx.x] = s;
    __threadfence();
    last = atomicAdd_block(done + row, 1u) == gridDim.x - 1;
    if (last) {
      __threadfence();
      const float* p = part + row * 4;
      y[row] = ((p[0] + p[1]) + p[2]) + p[3];
    }
  }
}
""", problem="sums", launch={"grid": [4, "R"], "block": [32], "args": ["x", "y", "part", "done", "int32(C)"]}, workspaces={"part": {"bytes": "16 * R"}, "done": {"bytes": "4 * R", "zeros": True}}),
    "barrier_in_a_branch": Kernel("CORRECTNESS", "deadlock", "half of the warps wait at a barrier that the others do not reach", r"""
INDEX

  if (threadIdx.x < 128) {
    __syncthreads();
  } else {
    asm volatile("bar.sync 1, 256;" ::: "memory");
  }
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "barrier_too_late": Kernel("CORRECTNESS", "a data race on", "thread 0 adds up before the others have stored", r"""
ROW
  __shared__ float part[128];
  part[threadIdx.x] = threadIdx.x < columns ? row[threadIdx.x] : 0.0f;
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int k = 0; k < 128; ++k) sum += part[k];
    y[blockIdx.x] = sum;
  }
  __syncthreads();
}
""", problem="sums"),
    "bulk_store_not_awaited": Kernel("CORRECTNESS", "ended while a bulk store may still read shared memory", "ends while a bulk store may still read its shared memory", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[256];
  const int first = blockIdx.x * 256, i = first + threadIdx.x;
  stage[threadIdx.x] = i < n ? 2.0f * x[i] : 0.0f;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (first + 256 <= n) {
    if (threadIdx.x == 0) {
      unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
      asm volatile(
          "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;\ncp.async.bulk.commit_group;" ::"l"(y + first),
          "r"(at)
          : "memory");
    }
  } else if (i < n)
    y[i] = stage[threadIdx.x];
}
""", target="sm_90a"),
    "bulk_store_not_awaited_where_large": Kernel("CORRECTNESS", "no path from it to the end of the kernel waits for it", "stores by TMA where the input is large, and waits for all groups but this one", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ __align__(16) float tile[512];
  const int first = blockIdx.x * 512;
  if (n < (1 << 19) || n % 512 != 0) {
    for (int i = first + threadIdx.x; i < min(n, first + 512); i += 128) y[i] = 2.0f * x[i];
    return;
  }
  for (int i = threadIdx.x; i < 512; i += 128) tile[i] = 2.0f * x[first + i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x != 0) return;
  const unsigned source = __cvta_generic_to_shared(tile);
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 2048;" ::"l"(y + first), "r"(source) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // one group may still be in flight: this one
}
""", launch={"grid": ["ceildiv(N, 512)"], "block": [128]}, target="sm_90a"),
    "bulk_store_overwritten": Kernel("CORRECTNESS", "write to where an asynchronous operation still reads", "writes over the shared memory that a bulk store still reads", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[256];
  for (int first = blockIdx.x * 512, k = 0; k < 2; ++k, first += 256) {
    const int i = first + threadIdx.x;
    stage[threadIdx.x] = i < n ? 2.0f * x[i] : 0.0f;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (first + 256 <= n) {
      if (threadIdx.x == 0) {
        unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;\ncp.async.bulk.commit_group;" ::"l"(
                         y + first),
                     "r"(at)
                     : "memory");
      }
    } else if (i < n)
      y[i] = stage[threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
""", launch={"grid": ["ceildiv(N, 512)"]}, target="sm_90a"),
    "cluster_ends_early": Kernel("CORRECTNESS", "which has ended or may have", "a block of a cluster may end while the other still reads its shared memory", r"""
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
  if (i < n) y[i] = 2.0f * v;
}
""", launch={"grid": ["2 * ceildiv(N, 512)"], "cluster": [2]}, target="sm_90a"),
    "cluster_not_awaited": Kernel("CORRECTNESS", "so this block may not have begun", "writes into the shared memory of a block that may not have begun", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int mine = blockIdx.x * 256 + threadIdx.x;
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(stage + threadIdx.x));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"((blockIdx.x ^ 1) % 2));
  const float v = mine < n ? 2.0f * x[mine] : 0.0f;
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const int i = (blockIdx.x ^ 1) * 256 + threadIdx.x;
  if (i < n) y[i] = stage[threadIdx.x];
}
""", launch={"grid": ["2 * ceildiv(N, 512)"], "cluster": [2]}, target="sm_90a"),
    "copies_awaited_behind_the_barrier": Kernel("CORRECTNESS", "an asynchronous copy has not delivered", "waits for its cp.async after the barrier, so not for other threads' copies", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 255);
  if (i < n) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(tile + threadIdx.x)), "l"(x + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  __syncthreads();
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 255];
}
"""),
    "copy_not_awaited": Kernel("CORRECTNESS", "an asynchronous copy has not delivered", "reads what cp.async has not delivered", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ __align__(16) float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(stage + threadIdx.x));
  if (i < n) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(x + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  __syncthreads();
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}
"""),
    "counts_without_atomics_at_all": Kernel("CORRECTNESS", "a data race on", "increments counts with ++", r"""
extern "C" __global__ void counts(const int* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) ++y[x[i]];
}
""", problem="counts"),
    "expects_too_little": Kernel("CORRECTNESS", "deadlock", "expects fewer bytes than it copies", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[256];
  __shared__ alignas(8) unsigned long long ready;
  const int first = blockIdx.x * 256, i = first + threadIdx.x;
  unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&ready)),
           at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
  if (first + 256 > n) {
    if (i < n) y[i] = 2.0f * x[i];
    return;
  }
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(bar) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(at),
                 "l"(x + first), "r"(bar)
                 : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar)
                 : "memory");
  while (!done);
  y[i] = 2.0f * stage[threadIdx.x];
}
""", target="sm_90a"),
    "fence_of_a_block": Kernel("CORRECTNESS", "a data race on", "orders its parts with a fence of the block's scope", r"""
extern "C" __global__ void sums(const float* x, float* y, float* part, unsigned* done, int c) {
  const int row = blockIdx.y, t = threadIdx.x;
  if (t == 0) {
    float s = 0;
    for (int k = blockIdx.x; k < c; k += gridDim.x) s += x[row * (long long)c + k];
    part[row * 4 + blockIdx.x] = s;
    __threadfence_block();
    if (atomicAdd(done + row, 1u) == gridDim.x - 1) {
      __threadfence_block();
      const float* p = part + row * 4;
      y[row] = ((p[0] + p[1]) + p[2]) + p[3];
    }
  }
}
""", problem="sums", launch={"grid": [4, "R"], "block": [32], "args": ["x", "y", "part", "done", "int32(C)"]}, workspaces={"part": {"bytes": "16 * R"}, "done": {"bytes": "4 * R", "zeros": True}}),
    "four_warps_one_float": Kernel("CORRECTNESS", "a data race on", "four warps add to one float in shared memory with +=", r"""
ROW
  __shared__ float total;
  if (threadIdx.x == 0) total = 0.0f;
  __syncthreads();
  float sum = threadIdx.x < columns ? row[threadIdx.x] : 0.0f;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) total += sum;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}
""", problem="sums"),
    "lanes_out_of_step": Kernel("CORRECTNESS", "deadlock", "votes without the lanes that have left", r"""
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int t = threadIdx.x;
  x += (long long)blockIdx.x * c;
  float s = 0;
  for (int k = t; k < c; k += 32) {
    s += x[k];
    __syncwarp();
  }
  for (int o = 16; o > 0; o /= 2) s += __shfl_down_sync(0xffffffffu, s, o);
  if (t == 0) y[blockIdx.x] = s;
}
""", problem="sums", launch={"block": [32], "args": ["x", "y", "int32(C)"]}),
    "last_block_without_fence": Kernel("CORRECTNESS", "a data race on", "the last block reads parts that no fence has made visible", r"""
extern "C" __global__ void sums(const float* x, float* y, float* parts, unsigned* arrived, int rows, int columns) {
  const float* row = x + blockIdx.y * columns;
  float sum = 0.0f;
  for (int c = blockIdx.x * 32 + threadIdx.x; c < columns; c += 128) sum += row[c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x != 0) return;
  float* p = parts + blockIdx.y * 4;
  p[blockIdx.x] = sum;
  if (atomicAdd(arrived + blockIdx.y, 1u) == 3) y[blockIdx.y] = ((p[0] + p[1]) + p[2]) + p[3];
}
""", problem="sums", launch={"grid": [4, "R"], "block": [32], "args": ["x", "y", "parts", "arrived", "int32(R)", "int32(C)"]}, workspaces={"parts": {"bytes": "16 * R"}, "arrived": {"bytes": "4 * R", "zeros": True}}),
    "missing_barrier": Kernel("CORRECTNESS", "a data race on", "a tree in shared memory without barriers", r"""
ROW
  __shared__ float part[128];
  part[threadIdx.x] = threadIdx.x < columns ? row[threadIdx.x] : 0.0f;
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
""", problem="sums"),
    "named_barrier_of_half": Kernel("CORRECTNESS", "a data race on", "names half of the threads of a named barrier", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 128);
  if (i < n) tile[threadIdx.x] = x[i];
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 128];
}
"""),
    "no_barrier_in_a_cluster": Kernel("CORRECTNESS", "a data race on", "reads what other warps store, with no barrier, in a cluster", r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 255);
  tile[threadIdx.x] = 0.0f;
  __syncthreads();
  if (i < n) tile[threadIdx.x] = x[i];
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 255];
}
""", launch={"grid": ["2 * ceildiv(N, 512)"]}, target="sm_90a"),
    "no_fence_before_a_bulk_store": Kernel("CORRECTNESS", "with no fence.proxy.async since", "stores shared memory by TMA, without a proxy fence after its own writes", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float tile[256];
  const int b = blockIdx.x * 256, i = b + threadIdx.x;
  if (i < n) tile[threadIdx.x] = 2.0f * x[i];
  __syncthreads();
  if (b + 256 > n) { if (i < n) y[i] = tile[threadIdx.x]; return; }
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(y + b), "r"((unsigned)__cvta_generic_to_shared(tile)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
""", target="sm_90a"),
    "operand_changed_under_wgmma": Kernel("CORRECTNESS", "write to where an asynchronous operation still reads", "changes an operand of wgmma in shared memory before it waits", r"""
#include <cuda_bf16.h>
extern "C" __global__ void sums(const float* x, float* y, int c) {
  __shared__ alignas(128) __nv_bfloat16 a[64 * 16], one[8 * 16];
  const int t = threadIdx.x;
  float d[4] = {0, 0, 0, 0};
  auto desc = [](const void* p) { unsigned long long s = (unsigned long long)((unsigned)__cvta_generic_to_shared(p) & 0x3FFFF) >> 4; return s | (8ull << 16) | (16ull << 32); };
  for (int i = t; i < 1024; i += 128) a[i] = __float2bfloat16(0.0f);
  if (t < 128) one[t] = __float2bfloat16(1.0f);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;}" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(desc(a)), "l"(desc(one)));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  a[t] = __float2bfloat16(3.0f);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  float s = 0;
  if (t == 0) { for (int i = 0; i < c; ++i) s += x[blockIdx.x * (long long)c + i]; y[blockIdx.x] = s + 0 * (d[0] > 100.0f); }
}
""", problem="sums", launch={"args": ["x", "y", "int32(C)"]}, target="sm_90a"),
    "order_of_blocks": Kernel("CORRECTNESS", "gave different bits", "adds the parts of blocks by atomics to a workspace, and the last block reads it", r"""
extern "C" __global__ void sums(const float* x, float* y, float* parts, unsigned* arrived, int rows, int columns) {
  const float* row = x + blockIdx.y * columns;
  float sum = 0.0f;
  for (int c = blockIdx.x * 32 + threadIdx.x; c < columns; c += 256) sum += row[c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x != 0) return;
  atomicAdd(parts + blockIdx.y, sum);
  __threadfence();
  if (atomicAdd(arrived + blockIdx.y, 1u) == 7) y[blockIdx.y] = atomicAdd(parts + blockIdx.y, 0.0f);
}
""", problem="sums", launch={"grid": [8, "R"], "block": [32], "args": ["x", "y", "parts", "arrived", "int32(R)", "int32(C)"]}, workspaces={"parts": {"bytes": "4 * R", "zeros": True}, "arrived": {"bytes": "4 * R", "zeros": True}}),
    "order_of_float_atomics": Kernel("CORRECTNESS", "gave different bits", "adds floats by atomics, in whatever order they arrive", r"""
ROW
  __shared__ float total;
  if (threadIdx.x == 0) total = 0.0f;
  __syncthreads();
  if (threadIdx.x < columns) atomicAdd(&total, row[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}
""", problem="sums"),
    "read_only_loads_of_own_writes": Kernel("CORRECTNESS", "a read by ld.global.nc of .* written in this launch", "reads through the read-only cache what another block wrote in the same launch", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* flag, int n) {
  const bool first = blockIdx.x % 2 == 0;
  const int j = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (first) {
    if (j < n) half[j] = x[j];
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag + blockIdx.x / 2) : "memory");
  } else {
    unsigned seen = 0;
    if (threadIdx.x == 0) do
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag + blockIdx.x / 2) : "memory");
      while (!seen);
    __syncthreads();
    float v;
    if (j < n) {
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(half + j));
      y[j] = 2.0f * v;
    }
  }
}
""", launch={"grid": ["2 * ceildiv(N, 256)"], "args": ["x", "y", "half", "flag", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}, "flag": {"bytes": "4 * ceildiv(N, 256)", "zeros": True}}),
    "relaxed_flag": Kernel("CORRECTNESS", "a data race on", "hands over through a flag without release or fence", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* flag, int n) {
  const bool first = blockIdx.x % 2 == 0;
  const int j = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (first) {
    if (j < n) half[j] = x[j];
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag + blockIdx.x / 2) : "memory");
  } else {
    unsigned seen = 0;
    if (threadIdx.x == 0) do
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag + blockIdx.x / 2) : "memory");
      while (!seen);
    __syncthreads();
    if (j < n) y[j] = 2.0f * half[j];
  }
}
""", launch={"grid": ["2 * ceildiv(N, 256)"], "args": ["x", "y", "half", "flag", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}, "flag": {"bytes": "4 * ceildiv(N, 256)", "zeros": True}}),
    "release_of_a_block": Kernel("CORRECTNESS", "a data race on", "releases a flag to its own block only", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* flag, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  // block 2k fills what block 2k + 1 doubles
  const bool first = blockIdx.x % 2 == 0;
  const int j = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (first) {
    if (j < n) half[j] = x[j];
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.cta.global.u32 [%0], 1;" ::"l"(flag + blockIdx.x / 2) : "memory");
  } else {
    unsigned seen = 0;
    if (threadIdx.x == 0) do
        asm volatile("ld.acquire.cta.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag + blockIdx.x / 2) : "memory");
      while (!seen);
    __syncthreads();
    if (j < n) y[j] = 2.0f * half[j];
  }
}
""", launch={"grid": ["2 * ceildiv(N, 256)"], "args": ["x", "y", "half", "flag", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}, "flag": {"bytes": "4 * ceildiv(N, 256)", "zeros": True}}),
    "remote_stage_overwritten": Kernel("CORRECTNESS", "deadlock", "refills a stage in the shared memory of another block of its cluster while that still reads it", r"""
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
""", launch={"grid": [2], "block": [128]}, target="sm_90a"),
    "remote_store_not_awaited": Kernel("CORRECTNESS", "a data race on", "reads what the other block of its cluster stores, between arriving and waiting", r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  unsigned rank, there; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const int i = blockIdx.x * 256 + threadIdx.x, j = (blockIdx.x ^ 1) * 256 + threadIdx.x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(tile + threadIdx.x)), "r"(rank ^ 1));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(i < n ? x[i] : 0.0f) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  if (j < n) y[j] = 2.0f * tile[threadIdx.x];
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
""", launch={"grid": ["2 * ceildiv(N, 512)"]}, target="sm_90a"),
    "shuffle_of_absent_lanes": Kernel("CORRECTNESS", "deadlock", "a shuffle's mask names lanes that took another branch", r"""
ROW
  __shared__ float part[128];
  part[threadIdx.x] = 0.0f;
  if (threadIdx.x < columns) {
    float sum = row[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    part[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = part[0] + part[32] + part[64] + part[96];
}
""", problem="sums"),
    "spin_flag_not_volatile": Kernel("CORRECTNESS", "a data race on", "spins on a plain load that the compiler may keep in a register", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* flag, int n) {
  const bool first = blockIdx.x % 2 == 0;
  const int j = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (first) {
    if (j < n) half[j] = x[j];
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      flag[blockIdx.x / 2] = 1;
    }
  } else {
    if (threadIdx.x == 0) {
      while (!flag[blockIdx.x / 2]) __nanosleep(20);
      __threadfence();
    }
    __syncthreads();
    if (j < n) y[j] = 2.0f * half[j];
  }
}
""", launch={"grid": ["2 * ceildiv(N, 256)"], "args": ["x", "y", "half", "flag", "int32(N)"]}, workspaces={"half": {"bytes": "4 * N"}, "flag": {"bytes": "4 * ceildiv(N, 256)", "zeros": True}}),
    "stage_overwritten": Kernel("CORRECTNESS", "a data race on", "refills a stage in shared memory while others still read it", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  for (int first = 0; first < n; first += 256) {
    const int i = first + threadIdx.x;
    stage[255 - threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) y[i] = 2.0f * stage[255 - threadIdx.x];
    if (i < n && stage[threadIdx.x] == 1e30f) y[i] = 0.0f;
  }
}
""", launch={"grid": [1]}),
    "two_unordered_writers": Kernel("CORRECTNESS", "a data race on", "two blocks write each element, one of them with another rounding", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i] * (blockIdx.x % 2 == 0 ? 1.0f : 1.0f + 0x1p-13f);
}
""", launch={"grid": ["2 * ceildiv(N, 256)"]}),
    "volatile_plus_equals": Kernel("CORRECTNESS", "gave different bits", "four warps add to one volatile float with +=", r"""
ROW
  __shared__ volatile float total;
  if (threadIdx.x == 0) total = 0.0f;
  __syncthreads();
  float sum = threadIdx.x < columns ? row[threadIdx.x] : 0.0f;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) total = total + sum;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}
""", problem="sums"),
    "warp_in_step": Kernel("CORRECTNESS", "read of an element that nothing has written", "the last steps of a tree rely on the warp running in step", r"""
ROW
  __shared__ float part[64];
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) sum += row[c];
  part[threadIdx.x] = sum;
  part[threadIdx.x + 32] = 0.0f;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) part[threadIdx.x] += part[threadIdx.x + half];
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
""", problem="sums", launch={"block": [32]}),
    "wrong_phase": Kernel("CORRECTNESS", "an asynchronous copy has not delivered", "waits for the phase of a barrier that has passed already", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[256];
  __shared__ alignas(8) unsigned long long ready;
  const int first = blockIdx.x * 256, i = first + threadIdx.x;
  unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&ready)),
           at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
  if (first + 256 > n) {
    if (i < n) y[i] = 2.0f * x[i];
    return;
  }
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(bar) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(at),
                 "l"(x + first), "r"(bar)
                 : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 1; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar)
                 : "memory");
  while (!done);
  y[i] = 2.0f * stage[threadIdx.x];
}
""", target="sm_90a"),
})
