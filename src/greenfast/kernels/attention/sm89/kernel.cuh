// Attention forward for Ada (sm_89): mma.m16n8k32 on 8-bit operands, scores and P in registers. Q and K are E4M3 or
// int8; V and P are E4M3. Unlike the Hopper kernel it has no TMA, no warp specialization, and one scale per head.
//
// A block of four warps computes 64 query rows of one head, 16 per warp, and iterates over tiles of 64 keys. cp.async
// loads them one tile ahead, as in FlashAttention-2 (Dao, 2023). V is transposed and its keys are permuted, so that the
// accumulators of Q K^T are the A operand of P V (sm90/kernel.cuh). Online softmax in base 2.
#pragma once

#include <cuda_fp16.h>
#include <math_constants.h>

#include "attention/params.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace greenfast {

struct AdaParams {
  const unsigned char* q;    // (batch x heads, q_len, head_dim), quantized
  const unsigned char* k;    // (batch x kv_heads, kv_len, head_dim)
  const unsigned char* v_t;  // (batch x kv_heads, head_dim, kv_padded), keys permuted
  const float* q_scale;      // (batch x heads)
  const float* k_scale;      // (batch x kv_heads), as v_scale
  const float* v_scale;
  half* out;         // (batch, heads, q_len, columns), as `rows` says
  int heads_per_kv;  // query heads per KV head
  int q_len;
  int kv_len;
  int kv_padded;     // kv_len rounded up to 16
  int causal_shift;  // with a mask, row i attends to keys 0 .. i + causal_shift
  float softmax_scale;
  OutputRows rows;
};

// A tile of kRows rows of kRowBytes bytes in 16-byte chunks, swizzled so that eight rows of one chunk have no bank
// conflicts.
template <int kRows, int kRowBytes>
struct AdaTile {
  static constexpr int kChunks = kRowBytes / 16;
  static_assert(kChunks >= 4, "rows of 64 bytes or more");
  alignas(128) unsigned char bytes[kRows * kRowBytes];

  __device__ __forceinline__ unsigned char* chunk(int row, int i) {
    // Two rows of 64 bytes share the 128 bytes of all banks, so the swizzle changes every other row.
    const int swizzle = kChunks == 4 ? row / 2 % 4 : row % 8;
    return bytes + row * kRowBytes + (i ^ swizzle) * 16;
  }

  // Starts the cp.async of rows at `src`, `pitch` bytes apart. Chunks from row `rows` or byte `valid_bytes` on are
  // zero-filled.
  __device__ __forceinline__ void prefetch(const unsigned char* src, size_t pitch, int rows, int valid_bytes) {
    for (int i = threadIdx.x; i < kRows * kChunks; i += blockDim.x) {
      const int row = i / kChunks, p = i % kChunks;
      const bool inside = row < rows && p * 16 < valid_bytes;
      ptx::cp_async_16(chunk(row, p), inside ? src + row * pitch + p * 16 : src, inside ? 16 : 0);
    }
  }

  // Loads B operands of 16 columns (rows of this tile from `row` on) and 32 k (from byte 32 `step` on): {b0, b1} twice.
  __device__ __forceinline__ void operand_b(unsigned (&b)[4], int row, int step) {
    const int lane = threadIdx.x % 32;
    ptx::ldmatrix_x4(b, chunk(row + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
  }

  // Loads the A operand of 16 rows.
  __device__ __forceinline__ void operand_a(unsigned (&a)[4], int row, int step) {
    const int lane = threadIdx.x % 32;
    ptx::ldmatrix_x4(a, chunk(row + lane % 16, step * 2 + lane / 16));
  }
};

template <class Cfg>
struct AdaStorage {
  static constexpr int kStages = 2;
  AdaTile<64, Cfg::kHeadDim> q;
  AdaTile<64, Cfg::kHeadDim> k[kStages];
  AdaTile<Cfg::kHeadDim, 64> v[kStages];
};

// Grid: (ceil(q_len / 64), batch x heads). Block: 128 threads. Dynamic shared memory: sizeof(AdaStorage<Cfg>).
template <class Cfg>
__device__ __forceinline__ void attention_ada(const AdaParams& p) {
  constexpr int kHeadDim = Cfg::kHeadDim, kBlock = 64, kSteps = kHeadDim / 32;
  using Score = typename Cfg::Score;  // float of E4M3 codes, int of int8
  constexpr float kMaxOffset =
      8.0f;  // P is scaled by 2^8 (E4M3's maximum is 448), so that small values keep their precision
  static_assert(sizeof(AdaStorage<Cfg>) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  extern __shared__ __align__(128) unsigned char smem[];
  AdaStorage<Cfg>& shared = *reinterpret_cast<AdaStorage<Cfg>*>(smem);

  const int head = blockIdx.y, kv_head = head / p.heads_per_kv;
  const int first_row = (Cfg::kCausal ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * kBlock;  // the longest first
  const int warp_row = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
  const int row = first_row + warp_row + lane / 4;  // of this thread, and that + 8
  const unsigned char* q = p.q + (static_cast<size_t>(head) * p.q_len + first_row) * kHeadDim;
  const unsigned char* k = p.k + static_cast<size_t>(kv_head) * p.kv_len * kHeadDim;
  const unsigned char* v = p.v_t + static_cast<size_t>(kv_head) * kHeadDim * p.kv_padded;
  const int row_end = min(first_row + kBlock, p.q_len);
  const int keys = max(0, Cfg::kCausal ? min(p.kv_len, row_end + p.causal_shift) : p.kv_len);
  const int tiles = (keys + kBlock - 1) / kBlock;
  int col_limit[2];  // one past the last key of this thread's rows
  for (int r = 0; r < 2; ++r) col_limit[r] = Cfg::kCausal ? min(p.kv_len, row + 8 * r + 1 + p.causal_shift) : p.kv_len;

  const auto prefetch = [&](int tile) {
    const int key = tile * kBlock, s = tile % AdaStorage<Cfg>::kStages;
    if (tile < tiles) {
      shared.k[s].prefetch(k + static_cast<size_t>(key) * kHeadDim, kHeadDim, p.kv_len - key, kHeadDim);
      shared.v[s].prefetch(v + key, p.kv_padded, kHeadDim, p.kv_padded - key);
    }
    ptx::cp_async_commit();
  };
  shared.q.prefetch(q, kHeadDim, p.q_len - first_row, kHeadDim);
  prefetch(0);

  const float log2_e = 1.4426950408889634f;
  const float scale = p.q_scale[head] * p.k_scale[kv_head] * p.softmax_scale * log2_e;
  const float scale_log2 = scale < 1.17549435e-38f ? 1.17549435e-38f : scale;  // not 0: 0 times -inf is NaN
  unsigned q_operand[kSteps][4];
  float o[kHeadDim / 8][4] = {};
  float max_score[2] = {-CUDART_INF_F, -CUDART_INF_F}, sum[2] = {};

  for (int tile = 0; tile < tiles; ++tile) {
    prefetch(tile + 1);
    ptx::cp_async_wait<1>();
    __syncthreads();
    const int s = tile % AdaStorage<Cfg>::kStages;
    if (tile == 0) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) shared.q.operand_a(q_operand[i], warp_row, i);
    }

    Score raw[kBlock / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kBlock / 16; ++n) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        unsigned b[4];
        shared.k[s].operand_b(b, 16 * n, i);
        ptx::mma_m16n8k32(raw[2 * n], q_operand[i], b[0], b[1]);
        ptx::mma_m16n8k32(raw[2 * n + 1], q_operand[i], b[2], b[3]);
      }
    }

    const int first_key = tile * kBlock + lane % 4 * 2;
    float scores[kBlock / 8][4];
    float new_max[2] = {max_score[0], max_score[1]}, bias[2], rescale[2];
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = first_key + 8 * n + i % 2 >= col_limit[i / 2] ? -CUDART_INF_F : static_cast<float>(raw[n][i]);
        new_max[i / 2] = fmaxf(new_max[i / 2], scores[n][i]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(0xffffffffu, new_max[r], 1));
      new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(0xffffffffu, new_max[r], 2));
      const float base = new_max[r] == -CUDART_INF_F ? 0.0f : new_max[r];  // no key so far: any base gives P = 0
      rescale[r] = ptx::ex2((max_score[r] - base) * scale_log2);
      bias[r] = fmaf(-base, scale_log2, kMaxOffset);
      max_score[r] = new_max[r];
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= rescale[i / 2];
    }

#pragma unroll
    for (int t = 0; t < kBlock / 32; ++t) {
      unsigned p_frag[4];  // the A operand: row i % 2, columns from 16 (i / 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float p_values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int r = i % 2;
          p_values[j] = ptx::ex2(fmaf(scores[4 * t + i / 2 * 2 + j / 2][2 * r + j % 2], scale_log2, bias[r]));
          sum[r] += p_values[j];
        }
        p_frag[i] = ptx::pack_e4m3(p_values);
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 16; ++n) {
        unsigned b[4];
        shared.v[s].operand_b(b, 16 * n, t);
        ptx::mma_m16n8k32(o[2 * n], p_frag, b[0], b[1]);
        ptx::mma_m16n8k32(o[2 * n + 1], p_frag, b[2], b[3]);
      }
    }
    __syncthreads();
  }
  ptx::cp_async_wait<0>();

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = sum[r];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (row + 8 * r >= p.q_len) continue;
    const float factor = total > 0.0f ? p.v_scale[kv_head] / total : 0.0f;
    half* out = p.out + p.rows.first(head) + (row + 8 * r) * p.rows.row + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      if (8 * n >= p.rows.columns) break;
      *reinterpret_cast<half2*>(out + 8 * n) = __floats2half2_rn(o[n][2 * r] * factor, o[n][2 * r + 1] * factor);
    }
  }
}

}  // namespace greenfast
