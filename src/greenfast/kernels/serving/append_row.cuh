// A row of a head, shared by D / 16 threads: load, QK-norm, RoPE, quantization, store.
#pragma once

#include "ptx/e4m3.cuh"
#include "ptx/store.cuh"
#include "quantize/common.cuh"

namespace greenfast {

constexpr int kAppendColumns = 16;  // columns per thread

struct AppendInput {
  const void* data;
  long long token_stride, head_stride;  // in elements, multiples of 16 bytes
};

// The cache of K or V: codes and scales.
struct AppendPages {
  unsigned char* codes;
  long long page_stride, slot_stride, head_stride;  // in bytes, multiples of 16; slot_stride is unused for grouped V
  float* scale;            // per token: (kv_heads, kPageSize) in each page; else per head, an input
  long long scale_stride;  // of pages; or of heads: 1, or 0 if all heads share one
};

struct AppendParams {
  AppendInput q, k, v;
  void* q_out;  // (tokens, heads, kHeadDim)
  AppendPages k_pages, v_pages;
  const long long* slots;           // (tokens,)
  long long slot_count;             // slots of the cache
  const void *q_weight, *k_weight;  // (kHeadDim,)
  float eps;
  const void *cos, *sin;  // (max_position, kRotaryDim / 2)
  long long cos_stride, sin_stride;
  const void* positions;  // (tokens,)
  long long max_position;
  int tokens, heads, kv_heads, chunk;
};

// amax / 448 and its inverse, both rounded to nearest, like scale_of (quantize/common.cuh). In the range of scales of
// finite rows the compiler's slow path for division, a call that costs registers, is not needed.
struct RowScale {
  float scale, inverse;

  __device__ __forceinline__ explicit RowScale(float amax) : scale(1.0f), inverse(1.0f) {
    constexpr float kMinScale = 1.88079096e-37f;  // 2^-122
    if (amax == 0.0f) return;
    scale = amax < CUDART_INF_F ? fmaxf(divide(amax, 448.0f, 1.0f / 448.0f), kMinScale) : CUDART_NAN_F;
    inverse = ptx::inverse(scale);
    inverse = __fmaf_rn(__fmaf_rn(-scale, inverse, 1.0f), inverse, inverse);
  }
};

// The location of a token in the cache.
template <class Cfg>
struct AppendSlot {
  long long page;
  int slot_in_page;
  bool in_cache;  // false for slots outside the cache

  __device__ __forceinline__ AppendSlot(long long slot, long long slot_count)
      : page(slot / Cfg::kPageSize),
        slot_in_page(static_cast<int>(slot % Cfg::kPageSize)),
        in_cache(slot >= 0 && slot < slot_count) {}

  __device__ __forceinline__ unsigned char* row(const AppendPages& pages, int head) const {
    return pages.codes + page * pages.page_stride + slot_in_page * pages.slot_stride + head * pages.head_stride;
  }
  __device__ __forceinline__ float* scale(const AppendPages& pages, int head) const {
    return pages.scale + page * pages.scale_stride + head * Cfg::kPageSize + slot_in_page;
  }
};

template <class Cfg>
struct AppendRow {
  static constexpr int kLanes = Cfg::kHeadDim / kAppendColumns;  // threads per row
  static constexpr int kRows = Cfg::kThreads / kLanes;           // rows per block
  static constexpr int kRotaryLanes = Cfg::kRotaryDim / kAppendColumns;
  static constexpr bool kHalves = Cfg::kRotaryDim > 0 && !Cfg::kInterleaved;
  static_assert(kLanes <= 32 && Cfg::kRotaryDim % kAppendColumns == 0 && Cfg::kRotaryDim <= Cfg::kHeadDim,
                "a row in a warp, and a thread's columns rotated or not");

  using In = typename Cfg::In;
  struct Loaded {
    Pack<In, kVector> low, high;
  };

  __device__ __forceinline__ static const In* row(const AppendInput& input, int token, int head) {
    return static_cast<const In*>(input.data) + token * input.token_stride + head * input.head_stride;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int index() { return threadIdx.x / kLanes; }

  // A thread's first and second eight columns: adjacent, or RoPE partners if the halves are rotated together.
  __device__ __forceinline__ static int low() {
    return kHalves && lane() < kRotaryLanes ? lane() * kVector : lane() * kAppendColumns;
  }
  __device__ __forceinline__ static int high() {
    return low() + (kHalves && lane() < kRotaryLanes ? Cfg::kRotaryDim / 2 : kVector);
  }

  // Loads a thread's columns of a row; zeros if it is not present.
  __device__ __forceinline__ static Loaded load(const In* row, bool present) {
    Loaded x = {};
    if (present) {
      x.low = *reinterpret_cast<const Pack<In, kVector>*>(row + low());
      x.high = *reinterpret_cast<const Pack<In, kVector>*>(row + high());
    }
    return x;
  }

  __device__ __forceinline__ static void widen(const Loaded& x, float (&out)[kAppendColumns]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      out[i] = static_cast<float>(x.low.values[i]);
      out[kVector + i] = static_cast<float>(x.high.values[i]);
    }
  }

  // Quantizes a row with the given scale, or computes and returns its own. If the scale is NaN, codes are 0.
  __device__ __forceinline__ static float quantize(const float (&x)[kAppendColumns], const float* given,
                                                   unsigned (&codes)[kAppendColumns / 4]) {
    float scale, inverse;
    if constexpr (Cfg::kTokenScales) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kAppendColumns; ++i) amax = ptx::max_nan(amax, fabsf(x[i]));
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
      }
      const RowScale row_scale(amax);
      scale = row_scale.scale, inverse = row_scale.inverse;
    } else {
      scale = *given, inverse = __frcp_rn(scale);
    }
#pragma unroll
    for (int i = 0; i < kAppendColumns / 4; ++i) {
      codes[i] =
          ptx::pack_e4m3({x[4 * i] * inverse, x[4 * i + 1] * inverse, x[4 * i + 2] * inverse, x[4 * i + 3] * inverse});
      if (Cfg::kTokenScales && scale != scale) codes[i] = 0;
    }
    return scale;
  }

  // Stores to a row in global or shared memory.
  __device__ __forceinline__ static void write(const unsigned (&codes)[kAppendColumns / 4], unsigned char* row) {
    if constexpr (kHalves) {
      *reinterpret_cast<uint2*>(row + low()) = make_uint2(codes[0], codes[1]);
      *reinterpret_cast<uint2*>(row + high()) = make_uint2(codes[2], codes[3]);
    } else {
      *reinterpret_cast<uint4*>(row + low()) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    }
  }
  __device__ __forceinline__ static void write(const float (&x)[kAppendColumns], In* row) {
    Loaded out;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      out.low.values[i] = static_cast<In>(x[i]);
      out.high.values[i] = static_cast<In>(x[kVector + i]);
    }
    *reinterpret_cast<Pack<In, kVector>*>(row + low()) = out.low;
    *reinterpret_cast<Pack<In, kVector>*>(row + high()) = out.high;
  }
};

// QK-norm and RoPE of a token's rows. Each sum and product is rounded separately, for reproducibility on any machine.
template <class Cfg>
struct AppendTransform {
  using Row = AppendRow<Cfg>;
  static constexpr bool kNorm = Cfg::kNorm, kRotates = Cfg::kRotaryDim > 0;

  Pack<typename Cfg::Weight, kVector> weight_low, weight_high;
  float cos[kVector], sin[kVector];

  __device__ __forceinline__ void read(const AppendParams& p, const void* weights, int token, bool present) {
    if constexpr (kNorm) {
      const auto* weight = static_cast<const typename Cfg::Weight*>(weights);
      weight_low = *reinterpret_cast<const decltype(weight_low)*>(weight + Row::low());
      weight_high = *reinterpret_cast<const decltype(weight_high)*>(weight + Row::high());
    }
    if constexpr (kRotates) {
      long long position = -1;
      if (present) position = static_cast<const typename Cfg::Position*>(p.positions)[token];
      const bool finite_mask = position >= 0 && position < p.max_position && Row::lane() < Row::kRotaryLanes;
      const int column = Row::lane() * kVector;
      read_angles(p.cos, p.cos_stride, position, column, finite_mask, cos);
      read_angles(p.sin, p.sin_stride, position, column, finite_mask, sin);
    }
  }

  // Loads angles; NaN if the table has no such row, and in threads without rotated columns.
  __device__ __forceinline__ static void read_angles(const void* table, long long stride, long long position,
                                                     int column, bool finite_mask, float (&out)[kVector]) {
    using Angles = Pack<typename Cfg::Table, kVector>;
    Angles row;
    if (finite_mask) {
      row =
          *reinterpret_cast<const Angles*>(static_cast<const typename Cfg::Table*>(table) + position * stride + column);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = finite_mask ? static_cast<float>(row.values[i]) : CUDART_NAN_F;
  }

  __device__ __forceinline__ void apply(float (&x)[kAppendColumns], float eps) const {
    if constexpr (kNorm) normalize(x, eps);
    if constexpr (kRotates) {
      if (Row::lane() < Row::kRotaryLanes) rotate(x);
    }
  }

  __device__ __forceinline__ void normalize(float (&x)[kAppendColumns], float eps) const {
    float sums[kAppendColumns];
#pragma unroll
    for (int i = 0; i < kAppendColumns; ++i) sums[i] = __fmul_rn(x[i], x[i]);
#pragma unroll
    for (int distance = 1; distance < kAppendColumns; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kAppendColumns; i += 2 * distance) sums[i] = __fadd_rn(sums[i], sums[i + distance]);
    }
    float sum = sums[0];
#pragma unroll
    for (int lanes = 1; lanes < Row::kLanes; lanes *= 2) {
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
    }
    const float inverse = __frcp_rn(__fsqrt_rn(__fadd_rn(__fmul_rn(sum, 1.0f / Cfg::kHeadDim), eps)));
#pragma unroll
    for (int i = 0; i < kAppendColumns; ++i) {
      const auto weight = i < kVector ? weight_low.values[i] : weight_high.values[i - kVector];
      x[i] = __fmul_rn(__fmul_rn(x[i], inverse), static_cast<float>(weight));
    }
  }

  __device__ __forceinline__ void rotate(float (&x)[kAppendColumns]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float& a = x[Cfg::kInterleaved ? 2 * i : i];
      float& b = x[Cfg::kInterleaved ? 2 * i + 1 : kVector + i];
      const float first = __fsub_rn(__fmul_rn(a, cos[i]), __fmul_rn(b, sin[i]));
      b = __fadd_rn(__fmul_rn(b, cos[i]), __fmul_rn(a, sin[i]));
      a = first;
    }
  }
};

}  // namespace greenfast
