// RMSNorm or LayerNorm and rotary embedding (RoPE) of rows of Q and K in registers, between their load and their
// quantization.
//
// Both are computed in float32, and each result is rounded to the input's type, as two separate passes would. A thread
// holds columns 32 i + 8 (t % 4) .. + 7 of rows t / 4 and t / 4 + 8 (t: its lane), for all i as RowsTransform needs
// them. If two warps share rows, each takes half of the i, and both results meet in shared memory.
#pragma once

#include "common/named_barriers.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma_input.cuh"
#include "quantize/common.cuh"

namespace greenfast {

struct PrologueInput {
  const void *q_weight, *k_weight;     // (kColumns,), with kAcrossHeads (heads, kColumns); with kWeighted
  float eps;                           // with kNorm
  const void *cos, *sin;               // (batch, length, columns), with kRotaryDim > 0
  long long table_batch, table_row;    // strides of cos and sin, in elements
  const float *q_moments, *k_moments;  // of rows over all heads, with kAcrossHeads (row_norms.cuh)
  const void *q_bias, *k_bias;         // as the weights, with kBiased
  long long table_head;                // stride of cos and sin, with kHeadTables
  // With kParts: the same of the second part of a sequence. With kOwnTables each part has tables of its own, or null.
  const void *second_q_weight, *second_k_weight;
  const void *second_cos, *second_sin;
  long long second_table_batch, second_table_row;
};

// Two numbers, rounded.
__device__ __forceinline__ void round_pair(float low, float high, half* out) {
  *reinterpret_cast<half2*>(out) = __floats2half2_rn(low, high);
}
__device__ __forceinline__ void round_pair(float low, float high, __nv_bfloat16* out) {
  *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(low, high);
}

// The numbers of a pair as floats. The upper half of a word of two bfloat16 only needs its other bits cleared. From two
// separate numbers the compiler moves it down and up again.
__device__ __forceinline__ float2 unpack_pair(const half* pair) {
  return __half22float2(*reinterpret_cast<const half2*>(pair));
}
__device__ __forceinline__ float2 unpack_pair(const __nv_bfloat16* pair) {
  const unsigned word = *reinterpret_cast<const unsigned*>(pair);
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack_pair(const float* pair) { return make_float2(pair[0], pair[1]); }

// For kernels without it.
template <class Cfg, bool kUsed = Cfg::kPrologue>
struct RowsPrologue {};

// Cfg: kNorm; kCentered, whether it is LayerNorm, else RMSNorm; kAcrossHeads, whether it is over all heads; kWeighted,
// whether the norm has weights, of type Weight; kBiased, whether it has biases of this type; kRotaryDim, columns that are rotated, or 0; kInterleaved, whether columns 2 j and 2 j + 1 share an angle, else j and
// j + kRotaryDim / 2; kAngleStep, the distance of two angles in a table of type Table; kAngleVector, angles at aligned
// addresses; kSeveralHeads, whether a block takes a tile of several heads: it reads the angles once, to shared memory,
// and the rows of the next head early; kHeadTables, whether each head has tables of its own; kParts, whether sequences
// have two parts with weights of their own; kOwnTables, whether these have tables of their own.
template <class Cfg>
struct RowsPrologue<Cfg, true> {
  static constexpr int kSplit = Cfg::kHeadDim <= 128 ? 1 : 2;  // warps that share rows
  static constexpr int kLoads = Cfg::kHeadDim / 32 / kSplit;   // groups of eight columns per thread and row
  static constexpr int kHalf = Cfg::kRotaryDim / 2;
  // Whether a thread holds both columns of each pair, kDistance loads apart.
  static constexpr bool kOwnPairs = kHalf == 32 || kHalf == 64 || kHalf == 128;
  static constexpr int kDistance = kSplit == 1 || kHalf == 32 ? kHalf / 32 : kHalf / 64;
  static_assert(!Cfg::kGathered && !Cfg::kSampled, "rows and angles have the same numbers");
  static_assert(Cfg::kRotaryDim % 2 == 0 && Cfg::kRotaryDim <= Cfg::kColumns, "pairs of columns");
  static_assert(!(Cfg::kParts && Cfg::kAcrossHeads), "row_norms.cuh reads one tensor");
  static_assert(!(Cfg::kParts && (Cfg::kBiased || Cfg::kHeadTables)), "biases and strides of heads are of one tensor");
  static_assert(!Cfg::kHeadTables || (Cfg::kKeyHeads == 1 && Cfg::kQueryHeads == 1),
                "the heads of a block share angles");

  using In = typename Cfg::In;
  using Loaded = typename HeadRows<Cfg>::Loaded;
  using Weight = typename Cfg::Weight;
  using Table = typename Cfg::Table;

  // A row in shared memory: the cosines, then the sines. kAngleRow, the distance of two rows, lets a quarter of a
  // warp read its two rows from different banks.
  static constexpr int kSines = (kHalf + kVector - 1) / kVector * kVector;
  using Angle = typename Cfg::TileAngle;
  static constexpr int kAngleRow = Cfg::kAngleRowBytes / static_cast<int>(sizeof(Angle));
  static_assert(Cfg::kRotaryDim == 0 || kAngleRow >= 2 * kSines, "a row of angles");

  // Dynamic shared memory: with kSeveralHeads a thread's next rows; what two warps that share rows exchange; the angles
  // of a tile, with kSeveralHeads.
  using Slots = Loaded[kLoads][2][Cfg::kThreads];
  struct Exchanged {
    // Words of a thread's two rows in turn, as an mma reads them from four adjacent registers.
    uint4 operands[Cfg::kThreads / 32 / kSplit * kQueryBlock / 2][Cfg::kHeadDim / kVector * 2];
    float sums[Cfg::kThreads / 32][kQueryBlock];

    // The thread's operand of half of the eight columns from `column` on. Halves of odd rows are exchanged, so that the
    // accesses of a quarter of a warp are in different banks.
    __device__ __forceinline__ uint4& operand(int column, int half) {
      const int pair = threadIdx.x / 32 / kSplit * kQueryBlock / 2 + threadIdx.x % 32 / 4;
      return operands[pair][column / kVector * 2 + (half ^ pair % 2)];
    }
  };
  static constexpr int kExchangedAt = Cfg::kSeveralHeads ? sizeof(Slots) : 0;
  static constexpr int kAnglesAt = kExchangedAt + (kSplit > 1 ? sizeof(Exchanged) : 0);

  // The norm of two rows: x becomes (x - mean) * inverse. RMSNorm has no mean.
  struct Moments {
    float mean[2], inverse[2];
  };

  const Weight *weight, *bias;
  const float* row_moments;  // of the sequence, with kAcrossHeads
  float eps;
  const Table *cos, *sin;  // of the sequence
  long long table_row;
  const Weight* second_weight;
  const Table *second_cos, *second_sin;  // with kOwnTables
  long long second_table_row;
  int half_of_row;  // this warp's number among those that share rows

  // weight, bias, second_weight, row_moments: of Q or K. length: rows of a sequence.
  __device__ __forceinline__ RowsPrologue(const PrologueInput& input, const void* weight, const void* bias,
                                          const void* second_weight, const float* row_moments, int batch, int head,
                                          int length)
      : weight(static_cast<const Weight*>(weight) + (Cfg::kAcrossHeads ? head * Cfg::kColumns : 0)),
        bias(static_cast<const Weight*>(bias) + (Cfg::kAcrossHeads ? head * Cfg::kColumns : 0)),
        row_moments(row_moments + static_cast<long long>(batch) * length * (Cfg::kCentered ? 2 : 1)),
        eps(input.eps),
        cos(static_cast<const Table*>(input.cos) + batch * input.table_batch),
        sin(static_cast<const Table*>(input.sin) + batch * input.table_batch),
        table_row(input.table_row),
        second_weight(static_cast<const Weight*>(second_weight)),
        second_cos(static_cast<const Table*>(input.second_cos) + batch * input.second_table_batch),
        second_sin(static_cast<const Table*>(input.second_sin) + batch * input.second_table_batch),
        second_table_row(input.second_table_row),
        half_of_row(kSplit == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / 32 % kSplit, 0)) {
    if constexpr (Cfg::kHeadTables) {
      cos += head * input.table_head;
      sin += head * input.table_head;
    }
  }

  // The first column of load j. With kOwnPairs, both columns of a pair are in the same warp.
  __device__ __forceinline__ int column_of(int j) const {
    int i = j;
    if (kSplit > 1) {
      i = kHalf == 128  ? 2 * half_of_row + j % 2 + j / 2 * 4
          : kHalf == 64 ? half_of_row + 2 * j
                        : kLoads * half_of_row + j;
    }
    return i * 32 + threadIdx.x % 4 * kVector;
  }

  // Whether the columns of load j are in the input.
  __device__ __forceinline__ bool has_columns(int j) const {
    return Cfg::kColumns == Cfg::kHeadDim || column_of(j) < Cfg::kColumns;
  }

  // Starts to load two rows of each thread, for transform<true>.
  __device__ __forceinline__ void start_load(const HeadRows<Cfg>& head, const int (&row)[2]) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = column_of(j);
        const bool present = row[r] < head.length && column < Cfg::kColumns;
        const In* const any = Cfg::kParts ? head.address(0, 0) : head.rows;  // the first part may be empty
        ptx::cp_async_16(&slots()[j][r][threadIdx.x], present ? head.address(row[r], column) : any, present ? 16 : 0);
      }
    }
    ptx::cp_async_commit();
  }

  // Loads two rows of each thread, with norm and RoPE, and transforms them to `values` as rows.transform does.
  // kOfTile: they are the thread's rows of the tile of read_tile_angles, and start_load has loaded them. start_next():
  // may call start_load for other rows.
  template <bool kOfTile, class Rows, class StartNext>
  __device__ __forceinline__ void transform(const HeadRows<Cfg>& head, const int (&row)[2], const Rows& rows,
                                            typename Rows::Values& values, StartNext start_next) const {
    Loaded x[kLoads][2];
    if constexpr (kOfTile) ptx::cp_async_wait<0>();
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kOfTile) {
          x[j][r] = slots()[j][r][threadIdx.x];
        } else {
          x[j][r] = head.load(row[r], column_of(j));
        }
      }
    }
    start_next();  // the slots have been read
    Moments moments = {};
    if constexpr (Cfg::kNorm) normalize(head, row, x, moments);
    if constexpr (Cfg::kRotaryDim > 0) {
      if constexpr (Cfg::kInterleaved) {
        rotate_neighbours<kOfTile>(head, row, x);
      } else if constexpr (kOwnPairs) {
        rotate_halves<kOfTile>(head, row, x);
      } else {
        rotate_distant<kOfTile>(head, row, moments, x);
      }
    }
    if constexpr (kSplit == 1) {
      rows.transform([&](int r, int column) { return x[column / 32][r]; }, values);
    } else {
      Exchanged& shared = exchanged();
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const unsigned (&low)[4] = reinterpret_cast<const unsigned (&)[4]>(x[j][0]);
        const unsigned (&high)[4] = reinterpret_cast<const unsigned (&)[4]>(x[j][1]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int word = 2 * half;
          shared.operand(column_of(j), half) = make_uint4(low[word], high[word], low[word + 1], high[word + 1]);
        }
      }
      sync_rows();
      rows.transform(
          [&](int r, int column) {
            Loaded eight;
            unsigned (&words)[4] = reinterpret_cast<unsigned (&)[4]>(eight);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const uint4 of_both = shared.operand(column, half);
              words[2 * half] = r == 0 ? of_both.x : of_both.y;
              words[2 * half + 1] = r == 0 ? of_both.z : of_both.w;
            }
            return eight;
          },
          values);
    }
  }

  __device__ __forceinline__ static unsigned char* storage() {
    extern __shared__ __align__(16) unsigned char prologue_storage[];
    return prologue_storage;
  }
  __device__ __forceinline__ static Slots& slots() { return *reinterpret_cast<Slots*>(storage()); }
  __device__ __forceinline__ static Exchanged& exchanged() {
    return *reinterpret_cast<Exchanged*>(storage() + kExchangedAt);
  }
  __device__ __forceinline__ static Angle* tile_angles(int row) {
    return reinterpret_cast<Angle*>(storage() + kAnglesAt) + row * kAngleRow;
  }

  // Barrier of the warps that share rows.
  __device__ __forceinline__ static void sync_rows() {
    ptx::barrier_sync(QuantizerBarrier::kRows + threadIdx.x / 32 / kSplit, 32 * kSplit);
  }

  // Computes the rows' moments, and normalizes. Rows after the end and columns from kColumns on stay 0 for any eps.
  __device__ __forceinline__ void normalize(const HeadRows<Cfg>& head, const int (&row)[2], Loaded (&x)[kLoads][2],
                                            Moments& moments) const {
    if constexpr (Cfg::kAcrossHeads) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (Cfg::kCentered) {
          float2 of_row = {};
          if (row[r] < head.length) of_row = reinterpret_cast<const float2*>(row_moments)[row[r]];
          moments.mean[r] = of_row.x;
          moments.inverse[r] = of_row.y;
        } else {
          moments.inverse[r] = row[r] < head.length ? row_moments[row[r]] : 0.0f;
        }
      }
    } else if constexpr (Cfg::kCentered) {
      compute_moments(head, row, x, moments);
    } else {
      compute_inverse(head, row, x, moments.inverse);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      Pack<Weight, kVector> weights = load_weights<kVector>(weight_of(head, row[0]), column_of(j));
      Pack<Weight, kVector> biases = {};
      if constexpr (Cfg::kBiased) biases = load_weights<kVector>(bias, column_of(j));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (Cfg::kParts) {
          // Both rows are in one part, except in one group of rows of a sequence.
          if (r == 1 && weight_of(head, row[1]) != weight_of(head, row[0])) {
            weights = load_weights<kVector>(weight_of(head, row[1]), column_of(j));
          }
        }
#pragma unroll
        for (int c = 0; c < kVector; c += 2) {
          In* const pair = x[j][r].values + c;
          const float2 of_row = unpack_pair(pair), of_weight = unpack_pair(weights.values + c);
          const float2 of_bias = unpack_pair(biases.values + c);
          round_pair(normalized(of_row.x, moments, r, of_weight.x, of_bias.x),
                     normalized(of_row.y, moments, r, of_weight.y, of_bias.y), pair);
        }
        if (Cfg::kCentered && (row[r] >= head.length || !has_columns(j))) x[j][r] = {};
      }
    }
  }

  __device__ __forceinline__ void compute_inverse(const HeadRows<Cfg>& head, const int (&row)[2],
                                                  const Loaded (&x)[kLoads][2], float (&inverse)[2]) const {
    float sum[2];
    sum_squares(x, sum);
    if constexpr (kSplit > 1) {
      const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32 / 4;
      Exchanged& shared = exchanged();
#pragma unroll
      for (int r = 0; r < 2; ++r) shared.sums[warp][in_warp + 8 * r] = sum[r];
      sync_rows();
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] += shared.sums[warp ^ 1][in_warp + 8 * r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float root = __fsqrt_rn(__fmaf_rn(sum[r], 1.0f / Cfg::kColumns, eps));
      inverse[r] = row[r] < head.length ? __frcp_rn(root) : 0.0f;
    }
  }

  // Computes mean and inverse standard deviation in two passes: where the deviation is small beside the mean, a
  // difference of sums would cancel. The terms of the mean are divided by a power of two, so that no sum overflows.
  __device__ __forceinline__ void compute_moments(const HeadRows<Cfg>& head, const int (&row)[2],
                                                  const Loaded (&x)[kLoads][2], Moments& moments) const {
    float (&mean)[2] = moments.mean, sum[2];
    sum_columns(x, [](int, float value, float sum) { return __fmaf_rn(value, 1.0f / Cfg::kHeadDim, sum); }, mean);
    if constexpr (Cfg::kColumns < Cfg::kHeadDim) {
#pragma unroll
      for (int r = 0; r < 2; ++r) mean[r] = __fdiv_rn(mean[r], static_cast<float>(Cfg::kColumns) / Cfg::kHeadDim);
    }
    sum_columns(
        x,
        [&](int r, float value, float sum) {
          const float deviation = __fsub_rn(value, mean[r]);
          return __fmaf_rn(deviation, deviation, sum);
        },
        sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float root = __fsqrt_rn(__fmaf_rn(sum[r], 1.0f / Cfg::kColumns, eps));
      moments.inverse[r] = row[r] < head.length ? __frcp_rn(root) : 0.0f;
    }
  }

  // Sums a function of all columns of two rows. add(r, value, sum): the sum with a value of row r.
  template <class Add>
  __device__ __forceinline__ void sum_columns(const Loaded (&x)[kLoads][2], Add add, float (&sum)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float some[2] = {};  // two chains, for instruction-level parallelism
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (!has_columns(j)) continue;
#pragma unroll
        for (int c = 0; c < kVector; c += 2) {
          const float2 pair = unpack_pair(x[j][r].values + c);
          some[0] = add(r, pair.x, some[0]);
          some[1] = add(r, pair.y, some[1]);
        }
      }
      sum[r] = some[0] + some[1];
#pragma unroll
      for (int lanes = 2; lanes > 0; lanes /= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], lanes);
    }
    if constexpr (kSplit > 1) {
      const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32 / 4;
      Exchanged& shared = exchanged();
#pragma unroll
      for (int r = 0; r < 2; ++r) shared.sums[warp][in_warp + 8 * r] = sum[r];
      sync_rows();
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] += shared.sums[warp ^ 1][in_warp + 8 * r];
      sync_rows();  // the next sums come here
    }
  }

  // Sums the squares of the warp's columns of two rows, in an eighth of the instructions of conversions and additions:
  // an mma multiplies rows by themselves. Adjacent words of eight rows are its 16 rows, because they are in adjacent
  // registers as they were loaded, and one of the two words is its eight columns. Only products of a row by itself count.
  __device__ __forceinline__ static void sum_squares(const Loaded (&x)[kLoads][2], float (&sum)[2]) {
    // A row's product by itself is in the column of the row's number: in the lane of columns row / 2 * 2 and + 1.
    const int row = threadIdx.x % 32 / 4, lane = row * 4 + row / 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float products[2][4] = {};  // by the first and by the second word
#pragma unroll
      for (int i = 0; i < kLoads * 4; ++i) {
        const unsigned (&words)[4] = reinterpret_cast<const unsigned (&)[4]>(x[i / 4][r]);
        const int first = i / 2 % 2 * 2;
        ptx::InputMma<In>::add(products[i % 2], words[first], words[first + 1], words[first + i % 2]);
      }
      sum[r] = row % 2 ? products[0][1] + products[1][3] : products[0][0] + products[1][2];
      sum[r] = __shfl_sync(0xffffffffu, sum[r], lane);
    }
  }

  // The weights of the norm of a row.
  __device__ __forceinline__ const Weight* weight_of(const HeadRows<Cfg>& head, int row) const {
    if constexpr (Cfg::kParts) {
      if (row >= head.boundary) return second_weight;
    }
    return weight;
  }

  template <int kCount>
  __device__ __forceinline__ static Pack<Weight, kCount> load_weights(const Weight* from, int column) {
    Pack<Weight, kCount> weights = {};
    if (Cfg::kWeighted && column < Cfg::kColumns) {
      weights = *reinterpret_cast<const Pack<Weight, kCount>*>(from + column);
    }
    return weights;
  }

  // Before its rounding. r: 0 or 1, the row.
  __device__ __forceinline__ static float normalized(float x, const Moments& moments, int r, float weight, float bias) {
    const float centered = Cfg::kCentered ? __fsub_rn(x, moments.mean[r]) : x;
    float value = __fmul_rn(centered, moments.inverse[r]);
    if (Cfg::kWeighted) value = __fmul_rn(value, weight);
    return Cfg::kBiased ? __fadd_rn(value, bias) : value;
  }

  // Reads the angles of the rows from `first` on; zeros from `length` on. All threads call it, then __syncthreads().
  // boundary: of the parts of the sequence.
  __device__ __forceinline__ void read_tile_angles(int first, int length, int boundary) const {
    constexpr int kMost = 16 / sizeof(Angle);
    constexpr int kCount = kHalf % kMost == 0 ? kMost : kHalf % 4 == 0 ? 4 : kHalf % 2 == 0 ? 2 : 1;
    constexpr int kChunks = kHalf / kCount;
#pragma unroll 8
    for (int i = threadIdx.x; i < kRowBlock * kChunks; i += Cfg::kThreads) {
      const int row = i / kChunks, angle = i % kChunks * kCount;
      Pack<Angle, kCount> cosines, sines;
      load_cosines(boundary, first + row, angle, first + row < length, cosines.values);
      load_sines(boundary, first + row, angle, first + row < length, sines.values);
      *reinterpret_cast<Pack<Angle, kCount>*>(tile_angles(row) + angle) = cosines;
      *reinterpret_cast<Pack<Angle, kCount>*>(tile_angles(row) + kSines + angle) = sines;
    }
  }

  // Loads adjacent angles of row r of the thread's two; zeros if the row is not present.
  template <bool kOfTile, int kCount>
  __device__ __forceinline__ void load_angles(const HeadRows<Cfg>& head, const int (&row)[2], int r, int angle,
                                              bool present, float (&cosines)[kCount], float (&sines)[kCount]) const {
    if constexpr (kOfTile) {
      constexpr int kMost = 16 / sizeof(Angle), kWide = kCount < kMost ? kCount : kMost;
      const int in_tile = threadIdx.x / 32 / kSplit * kQueryBlock + threadIdx.x % 32 / 4 + 8 * r;
      const Angle* const from = tile_angles(in_tile) + angle;
#pragma unroll
      for (int i = 0; i < kCount; i += kWide) {
        const auto of_cos = *reinterpret_cast<const Pack<Angle, kWide>*>(from + i);
        const auto of_sin = *reinterpret_cast<const Pack<Angle, kWide>*>(from + kSines + i);
        if constexpr (kWide == 1) {
          cosines[i] = static_cast<float>(of_cos.values[0]);
          sines[i] = static_cast<float>(of_sin.values[0]);
        }
#pragma unroll
        for (int e = 0; e + 1 < kWide; e += 2) {
          const float2 two_cosines = unpack_pair(of_cos.values + e), two_sines = unpack_pair(of_sin.values + e);
          cosines[i + e] = two_cosines.x;
          cosines[i + e + 1] = two_cosines.y;
          sines[i + e] = two_sines.x;
          sines[i + e + 1] = two_sines.y;
        }
      }
    } else {
      load_cosines(head.boundary, row[r], angle, present, cosines);
      load_sines(head.boundary, row[r], angle, present, sines);
    }
  }

  // Loads the cosines of adjacent angles of a row; zeros if it is not present, 1 if its part has no tables.
  template <class Out, int kCount>
  __device__ __forceinline__ void load_cosines(int boundary, int row, int angle, bool present,
                                               Out (&out)[kCount]) const {
    load_table_of_part(cos, second_cos, boundary, row, angle, present, out);
    if constexpr (Cfg::kOwnTables) {
      const bool rotated = (row < boundary ? cos : second_cos) != nullptr;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = rotated ? out[i] : static_cast<Out>(1.0f);
    }
  }

  // Loads the sines; zeros if the row is not present or its part has no tables.
  template <class Out, int kCount>
  __device__ __forceinline__ void load_sines(int boundary, int row, int angle, bool present, Out (&out)[kCount]) const {
    load_table_of_part(sin, second_sin, boundary, row, angle, present, out);
  }

  template <class Out, int kCount>
  __device__ __forceinline__ void load_table_of_part(const Table* first, const Table* second, int boundary, int row,
                                                     int angle, bool present, Out (&out)[kCount]) const {
    if constexpr (Cfg::kOwnTables) {
      const bool in_second = row >= boundary;
      const Table* const table = in_second ? second : first;
      load_table(table, in_second ? second_table_row : table_row, in_second ? row - boundary : row, angle,
                 present && table != nullptr, out);
    } else {
      load_table(first, table_row, row, angle, present, out);
    }
  }

  // Loads adjacent angles of a row; zeros if it is not present.
  template <class Out, int kCount>
  __device__ __forceinline__ static void load_table(const Table* table, long long stride, int row, int angle,
                                                    bool present, Out (&out)[kCount]) {
    constexpr int kElements = kCount * Cfg::kAngleStep;
    constexpr int kAligned = Cfg::kAngleVector < kElements ? Cfg::kAngleVector : kElements;
    using Vector = Pack<Table, kAligned>;
    Vector loaded[kElements / kAligned] = {};
    if (present) {
      const Table* const from = table + row * stride + angle * Cfg::kAngleStep;
#pragma unroll
      for (int i = 0; i < kElements / kAligned; ++i) loaded[i] = reinterpret_cast<const Vector*>(from)[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int element = i * Cfg::kAngleStep;
      out[i] = static_cast<Out>(loaded[element / kAligned].values[element % kAligned]);
    }
  }

  // The two results of a rotation, before their rounding.
  __device__ __forceinline__ static float first_of(float a, float b, float cos, float sin) {
    return __fmaf_rn(a, cos, -__fmul_rn(b, sin));
  }
  __device__ __forceinline__ static float second_of(float a, float b, float cos, float sin) {
    return __fmaf_rn(b, cos, __fmul_rn(a, sin));
  }

  template <bool kOfTile>
  __device__ __forceinline__ void rotate_neighbours(const HeadRows<Cfg>& head, const int (&row)[2],
                                                    Loaded (&x)[kLoads][2]) const {
    constexpr int kPairs = Cfg::kRotaryDim % kVector == 0 ? kVector / 2 : 1;  // that are all rotated, or not
    constexpr int kParts = kVector / 2 / kPairs;
#pragma unroll
    for (int i = 0; i < kLoads * 2 * kParts; ++i) {
      const int r = i % 2, j = i / 2 / kParts, first = i / 2 % kParts * kPairs * 2;
      const int column = column_of(j) + first;
      if (column >= Cfg::kRotaryDim) continue;
      float cosines[kPairs], sines[kPairs];
      load_angles<kOfTile>(head, row, r, column / 2, row[r] < head.length, cosines, sines);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        In* const pair = x[j][r].values + first + 2 * p;
        const float2 ab = unpack_pair(pair);
        round_pair(first_of(ab.x, ab.y, cosines[p], sines[p]), second_of(ab.x, ab.y, cosines[p], sines[p]), pair);
      }
    }
  }

  template <bool kOfTile>
  __device__ __forceinline__ void rotate_halves(const HeadRows<Cfg>& head, const int (&row)[2],
                                                Loaded (&x)[kLoads][2]) const {
#pragma unroll
    for (int i = 0; i < kDistance * 2; ++i) {
      const int j = i / 2, r = i % 2;
      if (column_of(j) >= kHalf) continue;
      float cosines[kVector], sines[kVector];
      load_angles<kOfTile>(head, row, r, column_of(j), row[r] < head.length, cosines, sines);
#pragma unroll
      for (int c = 0; c < kVector; c += 2) {
        In *const low = x[j][r].values + c, *const high = x[j + kDistance][r].values + c;
        const float2 a = unpack_pair(low), b = unpack_pair(high);
        round_pair(first_of(a.x, b.x, cosines[c], sines[c]), first_of(a.y, b.y, cosines[c + 1], sines[c + 1]), low);
        round_pair(second_of(a.x, b.x, cosines[c], sines[c]), second_of(a.y, b.y, cosines[c + 1], sines[c + 1]), high);
      }
    }
  }

  // For pairs that two threads hold: the other columns are loaded again.
  template <bool kOfTile>
  __device__ __forceinline__ void rotate_distant(const HeadRows<Cfg>& head, const int (&row)[2], const Moments& moments,
                                                 Loaded (&x)[kLoads][2]) const {
    constexpr int kPart = kHalf % 8 == 0 ? 8 : kHalf % 4 == 0 ? 4 : kHalf % 2 == 0 ? 2 : 1;  // columns of one half
#pragma unroll
    for (int i = 0; i < kLoads * 2 * (kVector / kPart); ++i) {
      const int r = i % 2, j = i / 2 / (kVector / kPart), first = i / 2 % (kVector / kPart) * kPart;
      const int column = column_of(j) + first;
      if (column >= Cfg::kRotaryDim || row[r] >= head.length) continue;
      const bool upper = column >= kHalf;
      const int partner_column = upper ? column - kHalf : column + kHalf;
      float cosines[kPart], sines[kPart];
      load_angles<kOfTile>(head, row, r, column % kHalf, true, cosines, sines);
      Pack<In, kPart> partner = *reinterpret_cast<const Pack<In, kPart>*>(head.address(row[r], partner_column));
      if constexpr (Cfg::kNorm) {
        const Pack<Weight, kPart> weights = load_weights<kPart>(weight_of(head, row[r]), partner_column);
        Pack<Weight, kPart> biases = {};
        if constexpr (Cfg::kBiased) biases = load_weights<kPart>(bias, partner_column);
#pragma unroll
        for (int c = 0; c < kPart; ++c) {
          partner.values[c] =
              static_cast<In>(normalized(static_cast<float>(partner.values[c]), moments, r,
                                         static_cast<float>(weights.values[c]), static_cast<float>(biases.values[c])));
        }
      }
#pragma unroll
      for (int c = 0; c < kPart; ++c) {
        In& own = x[j][r].values[first + c];
        const float a = static_cast<float>(own), b = static_cast<float>(partner.values[c]);
        own = static_cast<In>(upper ? second_of(b, a, cosines[c], sines[c]) : first_of(a, b, cosines[c], sines[c]));
      }
    }
  }
};

}  // namespace greenfast
