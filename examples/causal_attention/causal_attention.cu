/* greenfast: {
  "name": "plain_causal_attention",
  "description": "a warp per query, 32 keys at a time",
  "constants": {"HEAD_DIM": "D"},
  "launches": [{"kernel": "causal_attention", "grid": ["ceildiv(S, 4)", "B * H"], "block": [128],
                "args": ["q", "k", "v", "out", "int32(S)", "float32(1.4426950408889634 / sqrt(D))"]}]
} */

// Causal attention on half Q, K and V in float32, with an online softmax: a warp per query, 32 keys at a time.
#include <cuda_fp16.h>
#include <math_constants.h>

namespace causal_attention_detail {

constexpr int kQueriesPerBlock = 4;
constexpr int kPerLane = HEAD_DIM / 32;  // elements of the output that a lane sums
constexpr unsigned kAll = 0xffffffffu;
static_assert(HEAD_DIM % 32 == 0, "each lane sums as many elements of the output");

// 2^x to a relative 2^-22; ex2(-inf) is 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace causal_attention_detail

// q, k, v, out: (heads, length, HEAD_DIM). scale_log2: the scale times log2(e).
// Grid: (ceil(length / 4), heads), blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(32 * causal_attention_detail::kQueriesPerBlock)
causal_attention(const half* q, const half* k, const half* v, half* out, int length, float scale_log2) {
  using namespace causal_attention_detail;
  constexpr int D = HEAD_DIM;
  const int query = blockIdx.x * kQueriesPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (query >= length) return;  // all lanes of a query leave together, so the shuffles are whole
  const size_t head = static_cast<size_t>(blockIdx.y) * length * D;
  const half* q_row = q + head + static_cast<size_t>(query) * D;

  float top = -CUDART_INF_F;
  float total = 0.0f;
  float sums[kPerLane] = {};
  for (int start = 0; start <= query; start += 32) {
    // Lane i has the score of key start + i.
    const int key = start + lane;
    float score = -CUDART_INF_F;
    if (key <= query) {
      const half* k_row = k + head + static_cast<size_t>(key) * D;
      float product = 0.0f;
#pragma unroll 8
      for (int d = 0; d < D; ++d) product = fmaf(__half2float(q_row[d]), __half2float(k_row[d]), product);
      score = product * scale_log2;
    }
    float new_top = fmaxf(top, score);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) new_top = fmaxf(new_top, __shfl_xor_sync(kAll, new_top, lanes));
    const float weight = ex2(score - new_top);  // 0 for a key behind the query
    const float shrink = ex2(top - new_top);
    top = new_top;
    total = total * shrink + weight;  // of this lane's keys

#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sums[i] *= shrink;
    const int keys = min(32, query + 1 - start);
    for (int j = 0; j < keys; ++j) {
      const half* v_row = v + head + static_cast<size_t>(start + j) * D;
      const float of_key = __shfl_sync(kAll, weight, j);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sums[i] = fmaf(of_key, __half2float(v_row[lane + 32 * i]), sums[i]);
    }
  }

#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(kAll, total, lanes);
  half* out_row = out + head + static_cast<size_t>(query) * D;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) out_row[lane + 32 * i] = __float2half_rn(sums[i] / total);
}
