// A row of a head, shared by D / 16 threads, on its way to the cache: loads, QK-norm and RoPE, codes, stores.
#pragma once

#include "ptx/e4m3.cuh"
#include "ptx/store.cuh"
#include "quantize/common.cuh"

namespace greenfast {

constexpr int kAppendColumns = 16;  // of a row, that a thread holds

struct AppendInput {
  const void* data;
  long long token_stride, head_stride;  // in elements, multiples of 16 bytes
};

// Codes and scales of K or V in the cache.
struct AppendPages {
  unsigned char* codes;
  long long page_stride, slot_stride, head_stride;  // in bytes, multiples of 16; V in groups has no slots
  float* scale;            // by token, in each page (kv_heads, kPageSize), or given ones of heads
  long long scale_stride;  // of pages, or of given ones: 1, or 0 for one that all heads share
};

struct AppendParams {
  AppendInput q, k, v;
  void* q_out;  // (tokens, heads, kHeadDim)
  AppendPages k_pages, v_pages;
  const long long* slots;           // (tokens,)
  long long slot_count;             // of the cache
  const void *q_weight, *k_weight;  // (kHeadDim,)
  float eps;
  const void *cos, *sin;  // (max_position, kRotaryDim / 2)
  long long cos_stride, sin_stride;
  const void* positions;  // (tokens,)
  long long max_position;
  int tokens, heads, kv_heads, chunk;
};

// amax / 448 and its inverse, both rounded to nearest, as scale_of has the first (quantize/common.cuh): the scales of
// finite rows lie where neither needs the compiler's slow path, whose calls would cost registers.
struct RowScale {
  float scale, inverse;

  __device__ __forceinline__ explicit RowScale(float amax) : scale(1.0f), inverse(1.0f) {
    constexpr float kLeast = 1.88079096e-37f;  // 2^-122
    if (amax == 0.0f) return;
    scale = amax < CUDART_INF_F ? fmaxf(divide(amax, 448.0f, 1.0f / 448.0f), kLeast) : CUDART_NAN_F;
    inverse = ptx::inverse(scale);
    inverse = __fmaf_rn(__fmaf_rn(-scale, inverse, 1.0f), inverse, inverse);
  }
};

// Where a token goes.
template <class Cfg>
struct AppendSlot {
  long long page;
  int place;  // in the page
  bool kept;  // slots outside the cache are not

  __device__ __forceinline__ AppendSlot(long long slot, long long slot_count)
      : page(slot / Cfg::kPageSize),
        place(static_cast<int>(slot % Cfg::kPageSize)),
        kept(slot >= 0 && slot < slot_count) {}

  __device__ __forceinline__ unsigned char* row(const AppendPages& pages, int head) const {
    return pages.codes + page * pages.page_stride + place * pages.slot_stride + head * pages.head_stride;
  }
  __device__ __forceinline__ float* scale(const AppendPages& pages, int head) const {
    return pages.scale + page * pages.scale_stride + head * Cfg::kPageSize + place;
  }
};

template <class Cfg>
struct AppendRow {
  static constexpr int kLanes = Cfg::kHeadDim / kAppendColumns;  // threads that hold a row
  static constexpr int kRows = Cfg::kThreads / kLanes;           // at a time
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

  // A thread's first and second eight columns: neighbours, or the partners of RoPE's halves.
  __device__ __forceinline__ static int low() {
    return kHalves && lane() < kRotaryLanes ? lane() * kVector : lane() * kAppendColumns;
  }
  __device__ __forceinline__ static int high() {
    return low() + (kHalves && lane() < kRotaryLanes ? Cfg::kRotaryDim / 2 : kVector);
  }

  // Zeros where there is no row.
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

  // Codes of a row with the given scale, or the one that it returns; where that is NaN codes are 0.
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
      const RowScale of_row(amax);
      scale = of_row.scale, inverse = of_row.inverse;
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

  // To a row in global or shared memory.
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

// QK-norm and RoPE of a token's rows. Sums and products are rounded one by one, so that they can be repeated anywhere.
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
      const bool known = position >= 0 && position < p.max_position && Row::lane() < Row::kRotaryLanes;
      const int column = Row::lane() * kVector;
      read_angles(p.cos, p.cos_stride, position, column, known, cos);
      read_angles(p.sin, p.sin_stride, position, column, known, sin);
    }
  }

  // NaN where the table has no such row, and in threads whose columns are not rotated.
  __device__ __forceinline__ static void read_angles(const void* table, long long stride, long long position,
                                                     int column, bool known, float (&out)[kVector]) {
    using Angles = Pack<typename Cfg::Table, kVector>;
    Angles row;
    if (known) {
      row =
          *reinterpret_cast<const Angles*>(static_cast<const typename Cfg::Table*>(table) + position * stride + column);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = known ? static_cast<float>(row.values[i]) : CUDART_NAN_F;
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
