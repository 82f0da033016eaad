// RMSNorm and rotary embedding (RoPE) of rows of Q and K in registers, between their load and their quantization.
//
// Both are computed in float32, and each result is rounded to the input's type, as two separate passes would. A thread
// holds the columns that RowsTransform gives it: 32 i + 8 (t % 4) .. + 7 of two rows for all i. If half of the rotated
// columns are a multiple of 32, a column's partner is in the same thread. Otherwise partners are loaded again.
#pragma once

#include "quantize/common.cuh"

namespace greenfast {

struct PrologueInput {
  const void *q_weight, *k_weight;   // (kColumns,), with kWeighted
  float eps;                         // with kNorm
  const void *cos, *sin;             // (batch, length, columns), with kRotaryDim > 0
  long long table_batch, table_row;  // strides of cos and sin, in elements
};

// For kernels without it.
template <class Cfg, bool kUsed = Cfg::kPrologue>
struct RowsPrologue {};

// Cfg: kNorm; kWeighted, whether the norm has weights, of type Weight; kRotaryDim, columns that are rotated, or 0;
// kInterleaved, whether columns 2 j and 2 j + 1 share an angle, else j and j + kRotaryDim / 2; kAngleStep, the distance
// of two angles in a table of type Table; kAngleVector, angles whose addresses are aligned.
template <class Cfg>
struct RowsPrologue<Cfg, true> {
  static constexpr int kLoads = Cfg::kHeadDim / 32;  // groups of eight columns per thread and row
  static constexpr int kHalf = Cfg::kRotaryDim / 2;
  static_assert(!Cfg::kGathered && !Cfg::kSampled, "a row's number is that of its angles");
  static_assert(Cfg::kRotaryDim % 2 == 0 && Cfg::kRotaryDim <= Cfg::kColumns, "pairs of columns");

  using In = typename Cfg::In;
  using Loaded = typename HeadRows<Cfg>::Loaded;
  using Weight = typename Cfg::Weight;
  using Table = typename Cfg::Table;

  const Weight* weight;
  float eps;
  const Table *cos, *sin;  // of the sequence
  long long table_row;

  __device__ __forceinline__ RowsPrologue(const PrologueInput& input, const void* weight, int batch)
      : weight(static_cast<const Weight*>(weight)),
        eps(input.eps),
        cos(static_cast<const Table*>(input.cos) + batch * input.table_batch),
        sin(static_cast<const Table*>(input.sin) + batch * input.table_batch),
        table_row(input.table_row) {}

  __device__ __forceinline__ static int column_of(int i) { return i * 32 + threadIdx.x % 4 * kVector; }

  // Loads a thread's columns of two rows, and applies norm and RoPE.
  __device__ __forceinline__ void load(const HeadRows<Cfg>& head, const int (&row)[2], Loaded (&x)[kLoads][2]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) x[i][r] = head.load(row[r], column_of(i));
    }
    float inverse[2] = {};
    if constexpr (Cfg::kNorm) normalize(head, row, x, inverse);
    if constexpr (Cfg::kRotaryDim > 0) {
      if constexpr (Cfg::kInterleaved) {
        rotate_neighbours(head, row, x);
      } else if constexpr (kHalf % 32 == 0) {
        rotate_halves(head, row, x);
      } else {
        rotate_distant(head, row, inverse, x);
      }
    }
  }

  // Computes the rows' inverse root mean squares, and multiplies by them. Rows after the end stay 0 for any eps.
  __device__ __forceinline__ void normalize(const HeadRows<Cfg>& head, const int (&row)[2], Loaded (&x)[kLoads][2],
                                            float (&inverse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sums[2] = {};
#pragma unroll
      for (int i = 0; i < kLoads * kVector; ++i) {
        const float value = static_cast<float>(x[i / kVector][r].values[i % kVector]);
        sums[i % 2] = __fmaf_rn(value, value, sums[i % 2]);
      }
      float sum = sums[0] + sums[1];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float root = __fsqrt_rn(__fadd_rn(__fmul_rn(sum, 1.0f / Cfg::kColumns), eps));
      inverse[r] = row[r] < head.length ? __frcp_rn(root) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const Pack<Weight, kVector> weights = load_weights<kVector>(column_of(i));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          x[i][r].values[c] = normalized(x[i][r].values[c], inverse[r], weights.values[c]);
        }
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ Pack<Weight, kCount> load_weights(int column) const {
    Pack<Weight, kCount> weights = {};
    if (Cfg::kWeighted && column < Cfg::kColumns) {
      weights = *reinterpret_cast<const Pack<Weight, kCount>*>(weight + column);
    }
    return weights;
  }

  __device__ __forceinline__ static In normalized(In x, float inverse, Weight weight) {
    const float value = __fmul_rn(static_cast<float>(x), inverse);
    return static_cast<In>(Cfg::kWeighted ? __fmul_rn(value, static_cast<float>(weight)) : value);
  }

  // Loads adjacent angles of a row; zeros if it is not present.
  template <int kCount>
  __device__ __forceinline__ void load_angles(const Table* table, int row, int angle, bool present,
                                              float (&out)[kCount]) const {
    constexpr int kElements = kCount * Cfg::kAngleStep;
    constexpr int kAligned = Cfg::kAngleVector < kElements ? Cfg::kAngleVector : kElements;
    using Vector = Pack<Table, kAligned>;
    Vector loaded[kElements / kAligned] = {};
    if (present) {
      const Table* const from = table + row * table_row + angle * Cfg::kAngleStep;
#pragma unroll
      for (int i = 0; i < kElements / kAligned; ++i) loaded[i] = reinterpret_cast<const Vector*>(from)[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int element = i * Cfg::kAngleStep;
      out[i] = static_cast<float>(loaded[element / kAligned].values[element % kAligned]);
    }
  }

  // The two results of a rotation. Each product and sum is rounded, as in PyTorch.
  __device__ __forceinline__ static In first_of(float a, float b, float cos, float sin) {
    return static_cast<In>(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)));
  }
  __device__ __forceinline__ static In second_of(float a, float b, float cos, float sin) {
    return static_cast<In>(__fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin)));
  }

  __device__ __forceinline__ void rotate_neighbours(const HeadRows<Cfg>& head, const int (&row)[2],
                                                    Loaded (&x)[kLoads][2]) const {
    constexpr int kPairs = Cfg::kRotaryDim % kVector == 0 ? kVector / 2 : 1;  // that are all rotated, or not
#pragma unroll
    for (int i = 0; i < kLoads * 2 * (kVector / 2 / kPairs); ++i) {
      const int r = i % 2, load = i / 2 / (kVector / 2 / kPairs), first = i / 2 % (kVector / 2 / kPairs) * kPairs * 2;
      const int column = column_of(load) + first;
      if (column >= Cfg::kRotaryDim) continue;
      float cosines[kPairs], sines[kPairs];
      load_angles(cos, row[r], column / 2, row[r] < head.length, cosines);
      load_angles(sin, row[r], column / 2, row[r] < head.length, sines);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        In &low = x[load][r].values[first + 2 * j], &high = x[load][r].values[first + 2 * j + 1];
        const float a = static_cast<float>(low), b = static_cast<float>(high);
        low = first_of(a, b, cosines[j], sines[j]);
        high = second_of(a, b, cosines[j], sines[j]);
      }
    }
  }

  __device__ __forceinline__ void rotate_halves(const HeadRows<Cfg>& head, const int (&row)[2],
                                                Loaded (&x)[kLoads][2]) const {
#pragma unroll
    for (int i = 0; i < kHalf / 32 * 2; ++i) {
      const int load = i / 2, r = i % 2;
      float cosines[kVector], sines[kVector];
      load_angles(cos, row[r], column_of(load), row[r] < head.length, cosines);
      load_angles(sin, row[r], column_of(load), row[r] < head.length, sines);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        In &low = x[load][r].values[c], &high = x[load + kHalf / 32][r].values[c];
        const float a = static_cast<float>(low), b = static_cast<float>(high);
        low = first_of(a, b, cosines[c], sines[c]);
        high = second_of(a, b, cosines[c], sines[c]);
      }
    }
  }

  // For halves that are not a multiple of 32 columns.
  __device__ __forceinline__ void rotate_distant(const HeadRows<Cfg>& head, const int (&row)[2],
                                                 const float (&inverse)[2], Loaded (&x)[kLoads][2]) const {
    constexpr int kPart = kHalf % 8 == 0 ? 8 : kHalf % 4 == 0 ? 4 : kHalf % 2 == 0 ? 2 : 1;  // columns of one half
#pragma unroll
    for (int i = 0; i < kLoads * 2 * (kVector / kPart); ++i) {
      const int r = i % 2, load = i / 2 / (kVector / kPart), first = i / 2 % (kVector / kPart) * kPart;
      const int column = column_of(load) + first;
      if (column >= Cfg::kRotaryDim || row[r] >= head.length) continue;
      const bool upper = column >= kHalf;
      const int partner_column = upper ? column - kHalf : column + kHalf;
      float cosines[kPart], sines[kPart];
      load_angles(cos, row[r], column % kHalf, true, cosines);
      load_angles(sin, row[r], column % kHalf, true, sines);
      Pack<In, kPart> partner = *reinterpret_cast<const Pack<In, kPart>*>(head.address(row[r], partner_column));
      if constexpr (Cfg::kNorm) {
        const Pack<Weight, kPart> weights = load_weights<kPart>(partner_column);
#pragma unroll
        for (int c = 0; c < kPart; ++c) {
          partner.values[c] = normalized(partner.values[c], inverse[r], weights.values[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < kPart; ++c) {
        In& own = x[load][r].values[first + c];
        const float a = static_cast<float>(own), b = static_cast<float>(partner.values[c]);
        own = upper ? second_of(b, a, cosines[c], sines[c]) : first_of(a, b, cosines[c], sines[c]);
      }
    }
  }
};

}  // namespace greenfast
