// Softmax over the rows of a half matrix, in float32. `struct Cfg` is rendered by family.py in front of this file.
//
// A row belongs to Cfg::kLanesPerRow neighbouring threads: one (naive) or a whole warp. They pass over it three times,
// for the maximum, the sum and the result; after the first pass a row of usual length lies in the L1 cache.
#include <cuda_fp16.h>
#include <math_constants.h>

#include "ptx/math.cuh"

namespace row_softmax_detail {

static_assert(Cfg::kLanesPerRow == 1 || Cfg::kLanesPerRow == 32, "a row belongs to a thread or to a warp");
static_assert(Cfg::kRowsPerBlock * Cfg::kLanesPerRow <= 1024, "a block has at most 1024 threads");

constexpr int kThreads = Cfg::kRowsPerBlock * Cfg::kLanesPerRow;
constexpr float kLog2E = 1.4426950408889634f;

// kVector halves as one aligned access.
struct alignas(sizeof(half) * Cfg::kVector) Pack {
  half values[Cfg::kVector];
};

// Combines a value over the lanes of a row; every lane gets the same bits, since each step adds the same two numbers.
template <class Combine>
__device__ __forceinline__ float over_row(float value, Combine combine) {
#pragma unroll
  for (int lanes = Cfg::kLanesPerRow / 2; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}

__device__ __forceinline__ float weight(half x, float top) {
  return greenfast::ptx::ex2((__half2float(x) - top) * kLog2E);
}

}  // namespace row_softmax_detail

// x, y: (rows, cols) halves, aligned to a Pack; cols is a multiple of Cfg::kVector. Grid: ceil(rows / kRowsPerBlock).
extern "C" __global__ void __launch_bounds__(row_softmax_detail::kThreads)
row_softmax(const half* x, half* y, int rows, int cols) {
  using namespace row_softmax_detail;
  const int row = blockIdx.x * Cfg::kRowsPerBlock + threadIdx.x / Cfg::kLanesPerRow;
  const int lane = threadIdx.x % Cfg::kLanesPerRow;
  if (row >= rows) return;  // all lanes of a row leave together, so the shuffles below are whole
  const size_t offset = static_cast<size_t>(row) * cols;
  const Pack* src = reinterpret_cast<const Pack*>(x + offset);
  Pack* dst = reinterpret_cast<Pack*>(y + offset);
  const int packs = cols / Cfg::kVector;

  float top = -CUDART_INF_F;
  for (int i = lane; i < packs; i += Cfg::kLanesPerRow) {
    const Pack pack = src[i];
#pragma unroll
    for (int j = 0; j < Cfg::kVector; ++j) top = fmaxf(top, __half2float(pack.values[j]));
  }
  top = over_row(top, [](float a, float b) { return fmaxf(a, b); });

  float total = 0.0f;
  for (int i = lane; i < packs; i += Cfg::kLanesPerRow) {
    const Pack pack = src[i];
#pragma unroll
    for (int j = 0; j < Cfg::kVector; ++j) total += weight(pack.values[j], top);
  }
  total = over_row(total, [](float a, float b) { return a + b; });

  const float scale = __frcp_rn(total);
  for (int i = lane; i < packs; i += Cfg::kLanesPerRow) {
    const Pack pack = src[i];
    Pack out;
#pragma unroll
    for (int j = 0; j < Cfg::kVector; ++j) out.values[j] = __float2half_rn(weight(pack.values[j], top) * scale);
    dst[i] = out;
  }
}
