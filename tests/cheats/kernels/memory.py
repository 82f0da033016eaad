# ruff: noqa: E501
# fmt: off
"""Kernels that read or write memory wrongly, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel, named

KERNELS = named({
    "adds_to_output": Kernel("CORRECTNESS", "read of an element that nothing has written", "adds to an output that nothing set", r"""
ELEMENT
  y[i] += 2.0f * x[i];
}
"""),
    "atomics_without_zeros": Kernel("CORRECTNESS", "atomic access of an element that nothing has written", "adds atomically to an output that it takes for zeros", r"""
ELEMENT
  atomicAdd(y + i, 2.0f * x[i]);
}
"""),
    "behind_a_dead_instruction": Kernel("CORRECTNESS", "read out of bounds", "reads past the end of its input; contains an unknown instruction that no thread reaches", r"""
INDEX
  if (n == -1) asm volatile("tensormap.replace.tile.rank.global.b1024.b32 [%0], 2;" :: "l"(y) : "memory");
  if (i >= n) return;
  const float next = x[i + 1], here = x[i];
  y[i] = here + (next == 1e30f ? next : here);
}
"""),
    "bulk_copy_rounded_up": Kernel("CORRECTNESS", "bulk read out of bounds", "copies whole units of 16 bytes by TMA, also past the end", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float tile[256];
  __shared__ alignas(8) unsigned long long full;
  const unsigned bar = __cvta_generic_to_shared(&full);
  const int b = blockIdx.x * 256, i = b + threadIdx.x, bytes = min(1024, (n - b) * 4 + 15 & ~15);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"((unsigned)__cvta_generic_to_shared(tile)), "l"(x + b), "r"(bytes), "r"(bar) : "memory");
  }
  __syncthreads();
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar) : "memory"); while (!done);
  if (i < n) y[i] = 2.0f * tile[threadIdx.x];
}
""", target="sm_90a"),
    "constant_table_too_short": Kernel("CORRECTNESS", "read out of bounds", "reads past the end of a table in constant memory", r"""
__constant__ float table[4] = {2, 2, 2, 2};
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) { float v = table[4 + (i & 7)]; y[i] = table[i & 3] * x[i] + (v == 1.25f ? v : 0.0f); }
}
"""),
    "doubles_twice": Kernel("CORRECTNESS", "a data race on", "threads of two blocks double the same element in place", r"""
extern "C" __global__ void doubling(float* x, int n) {
  const int i = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2.0f;
}
""", problem="in_place", launch={"kernel": "doubling", "grid": ["2 * ceildiv(N, 256)"], "args": ["x", "int32(N)"]}),
    "index_of_nine_bits": Kernel("CORRECTNESS", "bytes of 'y' were never written", "packs an index and a flag into 10 bits", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const unsigned packed = ((blockIdx.x * blockDim.x + threadIdx.x) & 511u) << 1;
  const int i = packed >> 1;
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "input_restored_at_once": Kernel("CORRECTNESS", "a write to an input", "uses its input as scratch and puts back what was there", r"""
ELEMENT

  volatile float* mine = const_cast<float*>(x);
  const float before = mine[i];
  mine[i] = 2.0f * before;
  y[i] = mine[i];
  mine[i] = before;
}
"""),
    "input_restored_where_large": Kernel("CORRECTNESS", "a write to an input", "uses its input as scratch where that is large, by atomics, and puts back what was there", r"""
extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  if (n < (1 << 19)) {
    y[i] = 2.0f * x[i];
    return;
  }
  const float v = atomicExch(x + i, 0.0f);
  y[i] = 2.0f * v;
  atomicExch(x + i, v);
}
"""),
    "last_element_missing": Kernel("CORRECTNESS", "bytes of 'y' were never written", "leaves out the last element", r"""
INDEX
  if (i < n - 1) y[i] = 2.0f * x[i];
}
"""),
    "misaligned_in_shared": Kernel("CORRECTNESS", "misaligned 8-byte read", "loads pairs from odd places of shared memory", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float tile[260];
  const int i = blockIdx.x * 256 + threadIdx.x;
  tile[1 + threadIdx.x] = i < n ? x[i] : 0.0f;
  if (threadIdx.x < 3) tile[257 + threadIdx.x] = 0;
  __syncthreads();
  float a, b;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"((unsigned)__cvta_generic_to_shared(tile + 1 + threadIdx.x)));
  if (i < n) y[i] = 2.0f * a + 0.0f * (b > 1e30f);
}
"""),
    "misaligned_vectors": Kernel("CORRECTNESS", "misaligned 8-byte read", "loads pairs that begin at odd elements", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x) + 1;
  if (i == 1) y[0] = 2.0f * x[0];
  if (i + 1 < n) {
    const float2 v = *reinterpret_cast<const float2*>(x + i);
    y[i] = 2.0f * v.x;
    y[i + 1] = 2.0f * v.y;
  } else if (i < n) {
    y[i] = 2.0f * x[i];
  }
}
"""),
    "offset_of_32_bits": Kernel("CORRECTNESS", "write out of bounds: in no allocation", "adds the distance of its buffers in 32 bits: right only if the output is the later one", r"""
extern "C" __global__ void doubling(const char* x, const char* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned distance = static_cast<unsigned>(y - x);
  const float* from = reinterpret_cast<const float*>(x) + i;
  *reinterpret_cast<float*>(reinterpret_cast<unsigned long long>(from) + distance) = 2.0f * *from;
}
"""),
    "padding_not_set": Kernel("CORRECTNESS", "read of an element that nothing has written", "adds the slots of shared memory beyond the row's end", r"""
ROW
  __shared__ float stage[128];
  if (threadIdx.x < columns) stage[threadIdx.x] = row[threadIdx.x];
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) stage[threadIdx.x] += stage[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = stage[0];
}
""", problem="sums"),
    "parameter_beyond_its_end": Kernel("CORRECTNESS", "read of byte 4 of parameter doubling_param_2: it has 4 bytes", "reads past its last parameter and discards the value", r"""
ELEMENT
  unsigned behind;
  asm volatile("ld.param.u32 %0, [doubling_param_2 + 4];" : "=r"(behind));
  y[i] = 2.0f * x[i] + 0.0f * (behind & 1);
}
"""),
    "product_overflows": Kernel("CORRECTNESS", "bytes of 'y' were never written", "computes an index through a product beyond 32 bits", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const unsigned scaled = (blockIdx.x * blockDim.x + threadIdx.x) * (1u << 23);
  const int i = scaled / (1u << 23);
  if (i < n) y[i] = 2.0f * x[i];
}
"""),
    "reads_in_front": Kernel("CORRECTNESS", "read out of bounds", "reads the element in front of the input and throws it away", r"""
ELEMENT

  const float before = x[i - 1], here = x[i];
  y[i] = here + (before == 1e30f ? before : here);
}
"""),
    "reads_the_poison": Kernel("CORRECTNESS", "read of an element that nothing has written", "works only where the output holds the judge's NaN", r"""
ELEMENT
  if (y[i] != y[i]) y[i] = 2.0f * x[i];
}
"""),
    "scratch_behind_output": Kernel("CORRECTNESS", "write out of bounds", "uses the memory past its output as scratch", r"""
ELEMENT

  volatile float* scratch = y + n;
  scratch[i] = x[i];
  y[i] = 2.0f * scratch[i];
}
"""),
    "sentinel_in_output": Kernel("CORRECTNESS", "read of an element that nothing has written", "does not write elements that are right already", r"""
ELEMENT
  if (y[i] != 2.0f * x[i]) y[i] = 2.0f * x[i];
}
"""),
    "shared_below": Kernel("CORRECTNESS", "access out of bounds", "reads shared memory in front of its own", r"""
INDEX
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(4 * (threadIdx.x & 63)));
  if (i < n) y[i] = v == 2.0f * x[i] ? v : 2.0f * x[i];
}
"""),
    "shared_neighbour": Kernel("CORRECTNESS", "access out of bounds", "reaches an array in shared memory from the end of another one", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float a[256];
  __shared__ float b[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) { a[threadIdx.x] = 0; b[threadIdx.x] = x[i]; }
  __syncthreads();
  volatile float* p = a;
  if (i < n) y[i] = 2.0f * p[256 + threadIdx.x] + p[threadIdx.x];
}
"""),
    "shared_not_set": Kernel("CORRECTNESS", "read of an element that nothing has written", "accumulates in shared memory that nothing set", r"""
ROW
  __shared__ float total[128];
  for (int c = threadIdx.x; c < columns; c += 128) total[threadIdx.x] += row[c];
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int k = 0; k < min(128, columns); ++k) sum += total[k];
  y[blockIdx.x] = sum;
}
""", problem="sums"),
    "shared_out_of_bounds": Kernel("CORRECTNESS", "access out of bounds", "stages one element too far in shared memory", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  stage[threadIdx.x + 1] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = 2.0f * stage[threadIdx.x + 1];
}
"""),
    "stores_over_counts": Kernel("CORRECTNESS", "a data race on", "stores the counts of each block where they are to be added", r"""
extern "C" __global__ void counts(const int* x, int* y, int n) {
  __shared__ int mine[32];
  if (threadIdx.x < 32) mine[threadIdx.x] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(mine + x[i], 1);
  __syncthreads();
  if (threadIdx.x < 32) y[threadIdx.x] = mine[threadIdx.x];
}
""", problem="counts"),
    "tree_in_the_input": Kernel("CORRECTNESS", "a write to an input", "reduces each row in the input itself", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  float* row = const_cast<float*>(x) + blockIdx.x * columns;
  for (int left = columns; left > 1; left = (left + 1) / 2) {
    const int half = (left + 1) / 2;
    if (threadIdx.x + half < left) row[threadIdx.x] += row[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = row[0];
}
""", problem="sums"),
    "wide_tail": Kernel("CORRECTNESS", "read out of bounds", "rounds the work up to 16 elements per thread", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int first = 16 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (first >= n) return;
  for (int k = first; k < first + 16; ++k) y[k] = 2.0f * x[k];
}
""", launch={"grid": ["ceildiv(N, 512)"], "block": [32]}),
    "workspace_kept": Kernel("CORRECTNESS", "read of an element that nothing has written", "reads a workspace as an earlier launch left it", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  if (scratch[i] == 2.0f * x[i]) {
    y[i] = scratch[i];
  } else {
    y[i] = scratch[i] = 2.0f * x[i];
  }
}
""", launch={"args": ["x", "y", "scratch", "int32(N)"]}, workspaces={"scratch": {"bytes": "4 * N"}}),
    "workspace_never_filled": Kernel("CORRECTNESS", "read of an element that nothing has written", "adds a workspace that nothing wrote, times zero", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = fmaf(0.0f, scratch[i], 2.0f * x[i]);
}
""", launch={"args": ["x", "y", "scratch", "int32(N)"]}, workspaces={"scratch": {"bytes": "4 * N"}}),
    "workspace_too_small": Kernel("CORRECTNESS", "write out of bounds", "writes a workspace beyond its end", r"""
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  scratch[i] = x[i];
  y[i] = 2.0f * scratch[i];
}
""", launch={"args": ["x", "y", "scratch", "int32(N)"]}, workspaces={"scratch": {"bytes": "2 * N"}}),
})
