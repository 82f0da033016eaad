// Attention backward for Hopper: dK and dV by one kernel, dQ by another, both by wgmma on 8-bit operands.
//
// S = Q K^T and dP = dO V^T are products of int8 codes; P^T dO, dS^T Q and dS K are products of E4M3 codes. 8-bit wgmma
// reads both operands along the summed axis. So the dK/dV kernel computes S^T and dP^T (rows are keys), the dQ kernel S
// and dP (rows are queries): seven products, no transposition of P or dS, no atomics, the same bits in every run.
//
// Accumulators of int8 products start at integers that are the bits of floats near kMagic = 1.5 * 2^23. So the result
// read as a float is kMagic + (the sum), without a conversion. In the dK/dV kernel the start of a score also holds the
// log-sum-exp of its query, and the start of dP holds delta = rowsum(dO O), both in the units of the codes.
//
// P and dS have a scale for each row that is not summed over: a power of two that begins too large and shrinks when a
// code reaches 32 (RowScale). E4M3 has a floating point, so that a row needs no new scale for later, smaller values.
//
// Members of Cfg:
//   int kHeadDim    64, 128 or 256
//   int kConsumers  consumer warpgroups: of 64 keys each for dK and dV, of 64 queries each for dQ
//   int kBlockN     keys of a tile of the dQ kernel: 64 or 128
//   bool kWantsKeys, kWantsValues  of the dK/dV kernel: whether it computes dK, and dV. One thread has no registers for
//                   both sums at head dim 256, so there are two kernels
//   int kStages     stages of the loaded tiles
//   int kConsumerRegisters, kProducerRegisters  per thread, after setmaxnreg
//   int kSmemBytes  sizeof(Storage), to check the plan in Python
//   bool kCausal    query i attends to keys 0 .. i, else to all
//   bool kRange     query i attends to keys i + first_shift .. i + last_shift; not with kCausal
//   bool kLengths   only to the first keys of each sequence; with kRange
#pragma once

#include "attention/epilogue.cuh"
#include "attention/sm90/traits.cuh"
#include "ptx/bulk.cuh"
#include "ptx/load.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_s8.cuh"

namespace greenfast {

constexpr int kBackwardRows = 64;  // of a warpgroup, and queries of a QueryTable

// Of 64 queries: the starts of the accumulators of S^T and dP^T, and what the queries share.
struct QueryTable {
  // In the order in which a thread of a quad loads them, see word_of. Of S: kMagicBits - (lse log2(e) - log2(scale of
  // dO's row) + grad_exponent) / score_factor; of dP: kMagicBits - delta / (scale of dO's row * scale of V). So P
  // contains the scale of dO's row, relative to the tile's.
  int score[kBackwardRows];
  int weight[kBackwardRows];
  float score_factor;   // scale of Q's int8 codes * scale of K * scale of the scores * log2(e)
  float q_scale;        // of the codes of Q^T, times 1/4
  float grad_exponent;  // an integer: 2^grad_exponent exceeds all scales of dO's rows
  int padding;

  // The place of a query. Of each 16 queries, lane l of a quad has the accumulators of 2 l, 2 l + 1, 8 + 2 l, 9 + 2 l.
  __device__ __forceinline__ static int word_of(int query) {
    return query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2;
  }
};

struct BackwardParams {
  const QueryTable* tables;  // (heads, query tiles)
  const float* factors;  // (heads / group, 3): of the accumulators of dQ, dK and dV, without the scales in the tables
  __nv_bfloat16 *dq, *dk, *dv;
  int group, q_len, kv_len;  // group: heads of Q that share a head of K and V
  // With kRange.
  int first_shift, last_shift;
  // With kLengths: heads of K of a sequence, and the lengths of sequences, (batch).
  int kv_heads;
  const int* kv_lengths;
};

constexpr int kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23

// The mask: the keys of a query, and the queries of a key.
template <class Cfg>
struct BackwardMask {
  static_assert(!(Cfg::kCausal && Cfg::kRange) && (Cfg::kRange || !Cfg::kLengths), "one kind of mask");
  const int q_len, kv_len;  // of the sequence
  const int first_shift, last_shift;

  __device__ __forceinline__ BackwardMask(const BackwardParams& p, int kv_head)
      : q_len(p.q_len), kv_len(read_length(p, kv_head)), first_shift(p.first_shift), last_shift(p.last_shift) {}

  __device__ __forceinline__ static int read_length(const BackwardParams& p, int kv_head) {
    if constexpr (Cfg::kLengths) return max(0, min(p.kv_lengths[kv_head / p.kv_heads], p.kv_len));
    return p.kv_len;
  }

  // The keys first_key(query) .. stop_key(query) - 1; neither falls with the query.
  __device__ __forceinline__ int first_key(int query) const { return Cfg::kRange ? max(0, query + first_shift) : 0; }
  __device__ __forceinline__ int stop_key(int query) const {
    if constexpr (Cfg::kRange) return min(kv_len, query + last_shift + 1);
    return Cfg::kCausal ? min(kv_len, query + 1) : kv_len;
  }

  // The queries first_query(key) .. stop_query(key) - 1 of a key below kv_len.
  __device__ __forceinline__ int first_query(int key) const {
    if constexpr (Cfg::kRange) return max(0, key - last_shift);
    return Cfg::kCausal ? key : 0;
  }
  __device__ __forceinline__ int stop_query(int key) const {
    return Cfg::kRange ? min(q_len, key - first_shift + 1) : q_len;
  }
};

// With kRange: sets the values of a thread's two rows outside of their columns first .. stop - 1 to -inf.
template <int kCount>
__device__ __forceinline__ void mask_columns(float (&x)[kCount], const int (&first)[2], const int (&stop)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, r = i / 2 % 2;
    if (column < first[r] || column >= stop[r]) x[i] = -CUDART_INF_F;
  }
}

// The power-of-two scale of a thread's two rows of P or dS, for E4M3 codes. It shrinks so that the largest magnitude is
// below 2 when one reaches 32. So later tiles rarely exceed the limit again: rows of 16,384 standard normal scores have
// maxima about 5 times as large as those of their first 64.
struct RowScale {
  // Returns whether some code of a warp has a magnitude of at least 32: those with two bits of the exponent set.
  template <int kSteps>
  __device__ __forceinline__ static bool exceeds(const unsigned (&codes)[kSteps][4]) {
    unsigned any = 0;
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) any |= codes[i / 4][i % 4] & codes[i / 4][i % 4] << 1;
    return __any_sync(0xffffffffu, (any & 0x40404040u) != 0);
  }

  // Returns for each row the power of two that brings its largest magnitude below 2, at most 1.
  template <int kCount>
  __device__ __forceinline__ static void find_shrink(const float (&x)[kCount], float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = 0.0f;
#pragma unroll
      for (int i = 2 * r; i < kCount; i += 4) row_max = fmaxf(row_max, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
      const int exponent = max(0, static_cast<int>(__float_as_uint(row_max) >> 23) - 127);
      shrink[r] = __uint_as_float((127u - min(exponent, 126)) << 23);
    }
  }

  template <int kCount>
  __device__ __forceinline__ static void multiply(float (&x)[kCount], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] *= factor[i / 2 % 2];
  }
};

// The float 2^exponent of a power of two as an integer exponent.
__device__ __forceinline__ int exponent_of(float power) { return static_cast<int>(__float_as_uint(power) >> 23) - 127; }

// Starts all accumulators of an int8 product at kMagic.
template <int kCount>
__device__ __forceinline__ void start_at_magic(int (&acc)[kCount], const int (&magic)[4]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) ptx::load_shared_again(reinterpret_cast<int (&)[4]>(acc[i]), magic);
}

// Starts the accumulators of S^T or dP^T by the queries of their columns. Both rows of a thread have the same start.
__device__ __forceinline__ void load_starts(int (&acc)[kBackwardRows / 2], const int (&starts)[kBackwardRows]) {
#pragma unroll
  for (int i = 0; i < kBackwardRows / 2; i += 8) {
    int four[4];
    ptx::load_shared_again(four, reinterpret_cast<const int (&)[4]>(starts[2 * i + threadIdx.x % 4 * 4]));
#pragma unroll
    for (int c = 0; c < 8; ++c) acc[i + c] = four[c / 4 * 2 + c % 2];
  }
}

// Tiles of int8 rows have panels of up to 128 columns, one after another.
template <int kHeadDim>
constexpr int kPanel = kHeadDim < 128 ? kHeadDim : 128;

// Issues acc += a b of int8 tiles with rows of kHeadDim bytes; a has kBackwardRows rows.
template <int kHeadDim, int kCount>
__device__ __forceinline__ void start_int8_product(int (&acc)[kCount], ptx::Operand<kPanel<kHeadDim>> a,
                                                   ptx::Operand<kPanel<kHeadDim>> b, unsigned b_offset) {
  constexpr int kWidth = kPanel<kHeadDim>, kSteps = kWidth / 32, kRowsOfB = 2 * kCount;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i) {
    const int panel = i / kSteps * kWidth, column = i % kSteps * 32;
    ptx::wgmma_add(acc, a.at(panel * kBackwardRows + column), b.at(b_offset + panel * kRowsOfB + column));
  }
  ptx::wgmma_commit();
}

// Loads a tile of int8 rows.
template <int kHeadDim, int kRows>
__device__ __forceinline__ void load_rows(unsigned char* tile, const ptx::TensorMap& map, ptx::Mbarrier& barrier,
                                          int row, int head) {
#pragma unroll
  for (int column = 0; column < kHeadDim; column += kPanel<kHeadDim>) {
    ptx::tma_load_3d(tile + column * kRows, map, barrier, column, row, head);
  }
}

// Issues acc += codes b, where b is transposed: rows of columns of the result, kSwizzle bytes each.
template <int kCount, int kSwizzle, int kSteps>
__device__ __forceinline__ void start_e4m3_product(float (&acc)[kCount], unsigned (&codes)[kSteps][4],
                                                   ptx::Operand<kSwizzle> b, unsigned b_offset) {
  static_assert(kSwizzle == kSteps * 32, "a tile is one panel");
  ptx::wgmma_fence();
#pragma unroll
  for (int t = 0; t < kSteps; ++t) ptx::wgmma_add(acc, codes[t], b.at(b_offset + t * 32));
  ptx::wgmma_commit();
}

// Rounds values in the order of an accumulator to A operands; the summed index of the other operand is permuted
// (kernel.cuh).
template <int kCount, int kSteps>
__device__ __forceinline__ void pack_codes(const float (&x)[kCount], unsigned (&codes)[kSteps][4]) {
  static_assert(kCount == 16 * kSteps, "32 columns of two rows");
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // row i % 2, columns from 16 (i / 2)
      const int first = 16 * t + 8 * (i / 2) + 2 * (i % 2), second = first + 4;
      const float four[4] = {x[first], x[first + 1], x[second], x[second + 1]};
      codes[t][i] = ptx::pack_e4m3(four);
    }
  }
}

// Writes acc * factor to the rows below stop_row of a (rows, kHeadDim) tensor.
template <int kHeadDim>
__device__ __forceinline__ void store_gradient(const float (&acc)[kHeadDim / 2], const float (&factor)[2],
                                               __nv_bfloat16* out, int first_row, int stop_row) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; j += 4) {
      unsigned x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = acc + 4 * (j + i) + 2 * r;
        x[i] = pack_out(pair[0] * factor[r], pair[1] * factor[r], static_cast<__nv_bfloat16*>(nullptr));
      }
      transpose_quad(x);
      if (row < stop_row) ptx::store_16(out + static_cast<long long>(row) * kHeadDim + 8 * (j + quad), x);
    }
  }
}

// Sets the results of a thread's rows from first_row on to 0, whatever they are.
template <int kCount>
__device__ __forceinline__ void clear_rows(float (&acc)[kCount], float (&factor)[2], int first_row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (static_cast<int>(threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r) < first_row) continue;
    factor[r] = 0.0f;
#pragma unroll
    for (int i = 2 * r; i < kCount; i += 4) acc[i] = acc[i + 1] = 0.0f;
  }
}

// Arrives for a warp. Its other lanes have passed the same wgmma wait.
__device__ __forceinline__ void arrive_for_warp(ptx::Mbarrier& barrier) {
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

template <class Cfg>
struct KeyGradientStorage {
  using Tile = unsigned char[kBackwardRows * Cfg::kHeadDim];
  // The tiles of keys, K and for dK also V, and those of a stage: Q, for dK also dO and Q^T, for dV also dO^T.
  static constexpr int kKeyTiles = Cfg::kWantsKeys ? 2 : 1;
  static constexpr int kQ = 0, kGrad = 1, kQColumns = 2, kGradColumns = Cfg::kWantsKeys ? 3 : 1;
  static constexpr int kTiles = 1 + (Cfg::kWantsKeys ? 2 : 0) + (Cfg::kWantsValues ? 1 : 0);
  alignas(1024) Tile keys[kKeyTiles][Cfg::kConsumers];
  struct alignas(1024) Stage {
    Tile tiles[kTiles];
  } stages[Cfg::kStages];
  QueryTable tables[Cfg::kStages];
  ptx::Mbarrier kv_full, full[Cfg::kStages], empty[Cfg::kStages];
};

// dK and dV of 64 keys of a consumer warpgroup.
template <class Cfg>
struct KeyGradients {
  using Storage = KeyGradientStorage<Cfg>;
  static constexpr int kScores = kBackwardRows / 2, kSteps = kBackwardRows / 32;
  static constexpr bool kWantsKeys = Cfg::kWantsKeys, kWantsValues = Cfg::kWantsValues;
  // The first scales, of P and of dS, relative to those of the first tile. P <= 1 and |dP - delta| < 2^23, so no
  // product overflows.
  static constexpr int kWeightExponent = 100, kSlopeExponent = 40;
  // Whether accumulators of dP start at delta. Up to head dim 128 |dP - delta| < 2^22, the range around kMagic; at 256
  // only |dP| is.
  static constexpr bool kStartsAtDelta = Cfg::kHeadDim <= 128;

  float dk[kWantsKeys ? Cfg::kHeadDim / 2 : 1], dv[kWantsValues ? Cfg::kHeadDim / 2 : 1];
  int weight_exponent[2];  // log2 of the scales of P's rows
  float slope[2];          // scales of dS's rows / those of P's

  // Adds the tiles first_tile .. stop_tile - 1 of `group` heads of Q.
  __device__ __forceinline__ void run(Storage& shared, const BackwardMask<Cfg>& mask, int warpgroup, int first_key,
                                      int first_tile, int stop_tile, int group) {
#pragma unroll
    for (float& x : dk) x = 0.0f;
#pragma unroll
    for (float& x : dv) x = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight_exponent[r] = kWeightExponent;
      slope[r] = 0.0f;
    }
    int tile = first_tile, tiles_left = group * (stop_tile - first_tile);
    if (tiles_left <= 0) return;
    Ring<Cfg::kStages> ring;
    const ptx::Operand<kPanel<Cfg::kHeadDim>> k(shared.keys[0][warpgroup]);
    const ptx::Operand<kPanel<Cfg::kHeadDim>> v(shared.keys[Storage::kKeyTiles - 1][warpgroup]);
    auto& tiles = shared.stages[0].tiles;
    const ptx::Operand<kPanel<Cfg::kHeadDim>> q(tiles[Storage::kQ]), grad(tiles[Storage::kGrad]);
    const ptx::Operand<64> q_t(tiles[kWantsKeys ? Storage::kQColumns : 0]);
    const ptx::Operand<64> grad_t(tiles[kWantsValues ? Storage::kGradColumns : 0]);
    const int lane_pair = threadIdx.x % 4;
    const Queries full = find_full_queries(mask, first_key);
    shared.kv_full.wait(0);
    shared.full[ring.stage].wait(ring.parity);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const QueryTable& table = shared.tables[ring.stage];
      weight_exponent[r] -= static_cast<int>(table.grad_exponent);
      slope[r] = __fdividef(__uint_as_float((127u + kSlopeExponent - kWeightExponent) << 23), table.q_scale);
    }
    int s[kScores], dp[kScores], last_stage = -1;
    load_starts(s, shared.tables[ring.stage].score);
    do {  // with `for`, ptxas serializes the products
      const int stage = ring.stage;
      const unsigned offset = stage * sizeof(typename Storage::Stage);
      const QueryTable& table = shared.tables[stage];
      start_int8_product<Cfg::kHeadDim>(s, k, q, offset);
      const float score_factor = table.score_factor;
      ptx::wgmma_wait<0>();  // S, and all products of the tile before
      ptx::pin(s);
      ptx::pin(dv);
      ptx::pin(dk);
      if (last_stage >= 0) arrive_for_warp(shared.empty[last_stage]);
      last_stage = stage;

      float (&p)[kScores] = reinterpret_cast<float (&)[kScores]>(s);
      if (Cfg::kCausal && tile * kBackwardRows < first_key + kBackwardRows - 1) {
        // Columns of this thread are queries 8 j + 2 (lane % 4) and the next one of the tile.
        const int key = first_key + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 - tile * kBackwardRows;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          const int query = i / 4 * 8 + 2 * lane_pair + i % 2;
          if (query < key + 8 * (i / 2 % 2)) p[i] = -CUDART_INF_F;
        }
      }
      if (Cfg::kRange && (tile * kBackwardRows < full.first || (tile + 1) * kBackwardRows > full.stop)) {
        const int row = first_key + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        int first[2], stop[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int key = row + 8 * r;
          first[r] = mask.first_query(key) - tile * kBackwardRows;
          stop[r] = key < mask.kv_len ? mask.stop_query(key) - tile * kBackwardRows : 0;
        }
        mask_columns(p, first, stop);
      }
      if constexpr (kWantsKeys) {
        if constexpr (kStartsAtDelta) {
          load_starts(dp, table.weight);
        } else {
#pragma unroll
          for (int& x : dp) x = kMagicBits;
        }
        start_int8_product<Cfg::kHeadDim>(dp, v, grad, offset);
      }
      float bias[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bias[r] = fmaf(-kMagic, score_factor, static_cast<float>(weight_exponent[r]) + table.grad_exponent);
      }
#pragma unroll
      for (int i = 0; i < kScores; ++i) p[i] = ptx::ex2(fmaf(p[i], score_factor, bias[i / 2 % 2]));
      if constexpr (kWantsValues) {
        unsigned p_codes[kSteps][4];
        pack_codes(p, p_codes);
        if (RowScale::exceeds(p_codes)) {
          float shrink[2];
          RowScale::find_shrink(p, shrink);
          RowScale::multiply(p, shrink);
          RowScale::multiply(dv, shrink);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            weight_exponent[r] += exponent_of(shrink[r]);
            slope[r] = __fdividef(slope[r], shrink[r]);
          }
          pack_codes(p, p_codes);
        }
        start_e4m3_product(dv, p_codes, grad_t, offset);
      }
      unsigned ds_codes[kSteps][4];
      if constexpr (kWantsKeys) {
        ptx::wgmma_wait<kWantsValues ? 1 : 0>();  // dP
        ptx::pin(dp);
        float (&dp_raw)[kScores] = reinterpret_cast<float (&)[kScores]>(dp);
        if constexpr (!kStartsAtDelta) subtract_delta(dp_raw, table.weight);
        float ds[kScores];
        const float tile_slope[2] = {slope[0] * table.q_scale, slope[1] * table.q_scale};
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          const float a = tile_slope[i / 2 % 2];
          ds[i] = p[i] * (kStartsAtDelta ? fmaf(dp_raw[i], a, -kMagic * a) : dp_raw[i] * a);
        }
        pack_codes(ds, ds_codes);
        if (RowScale::exceeds(ds_codes)) {
          float shrink[2];
          RowScale::find_shrink(ds, shrink);
          RowScale::multiply(ds, shrink);
          RowScale::multiply(dk, shrink);
#pragma unroll
          for (int r = 0; r < 2; ++r) slope[r] *= shrink[r];
          pack_codes(ds, ds_codes);
        }
      }
      // The starts of the next tile, while no product is in flight: ptxas would insert a wait before them. By now dV
      // is usually complete.
      ring.advance();
      if constexpr (kWantsValues) {
        ptx::wgmma_wait<0>();
        ptx::pin(dv);
      }
      if (++tile == stop_tile) tile = first_tile;
      if (--tiles_left > 0) {
        shared.full[ring.stage].wait(ring.parity);
        load_starts(s, shared.tables[ring.stage].score);
      }
      if constexpr (kWantsKeys) start_e4m3_product(dk, ds_codes, q_t, offset);
    } while (tiles_left > 0);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    ptx::pin(dv);
  }

  // With kRange: the queries that attend to all of the warpgroup's keys.
  struct Queries {
    int first, stop;
  };
  __device__ __forceinline__ static Queries find_full_queries(const BackwardMask<Cfg>& mask, int first_key) {
    const int last_key = first_key + kBackwardRows - 1;
    if (!Cfg::kRange || last_key >= mask.kv_len) return {0, 0};
    return {mask.first_query(last_key), mask.stop_query(first_key)};
  }

  // Subtracts delta and kMagic from accumulators that started at kMagic.
  __device__ __forceinline__ static void subtract_delta(float (&dp)[kScores], const int (&weights)[kBackwardRows]) {
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      int four[4];
      ptx::load_shared_again(four, reinterpret_cast<const int (&)[4]>(weights[2 * i + threadIdx.x % 4 * 4]));
      float shift[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) shift[c] = __int_as_float(four[c]) - 2.0f * kMagic;
#pragma unroll
      for (int c = 0; c < 8; ++c) dp[i + c] += shift[c / 4 * 2 + c % 2];
    }
  }

  // Writes the rows below p.kv_len: zeros after those of the sequence.
  __device__ __forceinline__ void store(const BackwardParams& p, const BackwardMask<Cfg>& mask, int head,
                                        int first_key) {
    const int padding = mask.kv_len - first_key;  // the first such row
    const float dk_factor = p.factors[3 * head + 1], dv_factor = p.factors[3 * head + 2];
    const long long first = static_cast<long long>(head) * p.kv_len * Cfg::kHeadDim;
    float factor[2];
    if constexpr (kWantsValues) {
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[r] = dv_factor * ptx::ex2(static_cast<float>(-weight_exponent[r]));
      if constexpr (Cfg::kLengths) clear_rows(dv, factor, padding);
      store_gradient<Cfg::kHeadDim>(dv, factor, p.dv + first, first_key, p.kv_len);
    }
    if constexpr (kWantsKeys) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Without a query the sum is 0 and there is no slope.
        factor[r] = slope[r] == 0.0f ? 0.0f : dk_factor / slope[r] * ptx::ex2(static_cast<float>(-weight_exponent[r]));
      }
      if constexpr (Cfg::kLengths) clear_rows(dk, factor, padding);
      store_gradient<Cfg::kHeadDim>(dk, factor, p.dk + first, first_key, p.kv_len);
    }
  }
};

// The body of the dK/dV kernel. Grid: (key blocks of 64 kConsumers keys) x heads of K, keys first. Block: 128 threads per
// consumer warpgroup and 128 for the producer. Maps: int8 codes (heads, length, kHeadDim) of K, V, Q and dO, and E4M3 codes
// (heads, kHeadDim, length) of Q^T and dO^T, with permuted queries (kernel.cuh).
template <class Cfg>
__device__ __forceinline__ void backward_keys(const BackwardParams& p, const ptx::TensorMap& k_map,
                                              const ptx::TensorMap& v_map, const ptx::TensorMap& q_map,
                                              const ptx::TensorMap& grad_map, const ptx::TensorMap& q_t_map,
                                              const ptx::TensorMap& grad_t_map) {
  using Storage = KeyGradientStorage<Cfg>;
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  constexpr int kBlockKeys = kBackwardRows * Cfg::kConsumers;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // makes it uniform for the compiler
  const int key_blocks = (p.kv_len + kBlockKeys - 1) / kBlockKeys;
  const int kv_head = blockIdx.x / key_blocks, block_key = blockIdx.x % key_blocks * kBlockKeys;
  const int tiles = (p.q_len + kBackwardRows - 1) / kBackwardRows;
  const BackwardMask<Cfg> mask(p, kv_head);
  const int first_tile = Cfg::kCausal || Cfg::kRange ? min(tiles, mask.first_query(block_key) / kBackwardRows) : 0;
  int stop_tile = tiles;
  if constexpr (Cfg::kRange) {
    const int stop_query = mask.stop_query(min(block_key + kBlockKeys, mask.kv_len) - 1);
    stop_tile = block_key < mask.kv_len ? (stop_query + kBackwardRows - 1) / kBackwardRows : 0;
    stop_tile = max(first_tile, stop_tile);
  }
  if (threadIdx.x == 0) {
    shared.kv_full.init(1);
    for (int s = 0; s < Cfg::kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4 * Cfg::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == Cfg::kConsumers) {
    ptx::warpgroup_reg_dealloc<Cfg::kProducerRegisters>();
    if (threadIdx.x % 128 != 0) return;
    constexpr int kHeadDim = Cfg::kHeadDim, kRows = kBackwardRows;
    // Without a query no thread waits for K and V: a block must not end before its copies.
    if ((Cfg::kCausal || Cfg::kRange) && first_tile >= stop_tile) return;
    shared.kv_full.arrive_expect(sizeof(shared.keys));
    for (int w = 0; w < Cfg::kConsumers; ++w) {
      load_rows<kHeadDim, kRows>(shared.keys[0][w], k_map, shared.kv_full, block_key + w * kRows, kv_head);
      if constexpr (Cfg::kWantsKeys) {
        load_rows<kHeadDim, kRows>(shared.keys[1][w], v_map, shared.kv_full, block_key + w * kRows, kv_head);
      }
    }
    Ring<Cfg::kStages> ring;
    for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
      for (int tile = first_tile; tile < stop_tile; ++tile, ring.advance()) {
        const int s = ring.stage, query = tile * kRows;
        ptx::Mbarrier& full = shared.full[s];
        auto& loaded = shared.stages[s].tiles;
        shared.empty[s].wait(ring.parity ^ 1);
        full.arrive_expect(sizeof(loaded) + sizeof(QueryTable));
        load_rows<kHeadDim, kRows>(loaded[Storage::kQ], q_map, full, query, head);
        ptx::bulk_load(&shared.tables[s], p.tables + head * tiles + tile, sizeof(QueryTable), full);
        if constexpr (Cfg::kWantsKeys) load_rows<kHeadDim, kRows>(loaded[Storage::kGrad], grad_map, full, query, head);
        if constexpr (Cfg::kWantsValues) {
          ptx::tma_load_3d(loaded[Storage::kGradColumns], grad_t_map, full, query, 0, head);
        }
        if constexpr (Cfg::kWantsKeys) ptx::tma_load_3d(loaded[Storage::kQColumns], q_t_map, full, query, 0, head);
      }
    }
  } else {
    ptx::warpgroup_reg_alloc<Cfg::kConsumerRegisters>();
    const int first_key = block_key + warpgroup * kBackwardRows;
    KeyGradients<Cfg> gradients;
    gradients.run(shared, mask, warpgroup, first_key, first_tile, stop_tile, p.group);
    gradients.store(p, mask, kv_head, first_key);
  }
}

template <class Cfg>
struct QueryGradientStorage {
  alignas(1024) unsigned char q[Cfg::kConsumers][kBackwardRows * Cfg::kHeadDim];
  alignas(1024) unsigned char grad[Cfg::kConsumers][kBackwardRows * Cfg::kHeadDim];
  struct alignas(1024) Stage {
    unsigned char k[Cfg::kBlockN * Cfg::kHeadDim], v[Cfg::kBlockN * Cfg::kHeadDim], k_t[Cfg::kHeadDim * Cfg::kBlockN];
  } stages[Cfg::kStages];
  ptx::Mbarrier q_full, full[Cfg::kStages], empty[Cfg::kStages];
  alignas(16) int magic[4];  // kMagicBits, four times
};

// dQ of 64 queries of a consumer warpgroup.
template <class Cfg>
struct QueryGradients {
  using Storage = QueryGradientStorage<Cfg>;
  static constexpr int kBlockN = Cfg::kBlockN, kScores = kBlockN / 2, kSteps = kBlockN / 32;
  static constexpr int kFirstExponent = 60;  // P <= 1 and |dP - delta| < 2^23, so no product overflows

  float dq[Cfg::kHeadDim / 2];
  int exponent[2];  // log2 of the scales of dS's rows, relative to the table's grad_exponent
  float grad_exponent;

  // Adds the tiles of keys first_tile .. stop_tile - 1.
  __device__ __forceinline__ void run(const BackwardParams& params, const BackwardMask<Cfg>& mask, Storage& shared,
                                      int warpgroup, int head, int first_query, int first_tile, int stop_tile,
                                      Ring<Cfg::kStages>& ring) {
#pragma unroll
    for (int i = 0; i < Cfg::kHeadDim / 2; ++i) dq[i] = 0.0f;
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int query_tiles = (params.q_len + kBackwardRows - 1) / kBackwardRows;
    const QueryTable& table = params.tables[head * query_tiles + min(first_query / kBackwardRows, query_tiles - 1)];
    const float score_factor = table.score_factor;
    grad_exponent = table.grad_exponent;
    float score_shift[2], weight_shift[2];  // that replace 2 kMagic by the row's start: see QueryTable
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int word = QueryTable::word_of(row + 8 * r);
      score_shift[r] = (__int_as_float(table.score[word]) - 2.0f * kMagic) * score_factor;
      weight_shift[r] = __int_as_float(table.weight[word]) - 2.0f * kMagic;
      exponent[r] = kFirstExponent;
    }
    const ptx::Operand<kPanel<Cfg::kHeadDim>> q(shared.q[warpgroup]), grad(shared.grad[warpgroup]);
    const ptx::Operand<kPanel<Cfg::kHeadDim>> k(shared.stages[0].k), v(shared.stages[0].v);
    const ptx::Operand<kBlockN> k_t(shared.stages[0].k_t);
    shared.q_full.wait(0);
    int last_stage = -1;
    int tile = first_tile;
    if (tile == stop_tile) return;
    do {  // with `for`, ptxas serializes the products
      const int stage = ring.stage;
      const unsigned offset = stage * sizeof(typename Storage::Stage);
      shared.full[stage].wait(ring.parity);
      int s[kScores], dp[kScores];
      start_at_magic(s, shared.magic);
      start_int8_product<Cfg::kHeadDim>(s, q, k, offset);
      ptx::wgmma_wait<0>();  // S, and the dQ product of the tile before
      ptx::pin(s);
      ptx::pin(dq);
      if (last_stage >= 0) arrive_for_warp(shared.empty[last_stage]);
      last_stage = stage;

      float (&p)[kScores] = reinterpret_cast<float (&)[kScores]>(s);
      if constexpr (Cfg::kRange) {
        if ((tile + 1) * kBlockN > mask.stop_key(first_query) ||
            tile * kBlockN < mask.first_key(first_query + kBackwardRows - 1)) {
          int first[2], stop[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            first[r] = mask.first_key(first_query + row + 8 * r) - tile * kBlockN;
            stop[r] = mask.stop_key(first_query + row + 8 * r) - tile * kBlockN;
          }
          mask_columns(p, first, stop);
        }
      } else if ((tile + 1) * kBlockN > mask.stop_key(first_query)) {
        const int quad = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          const int key = tile * kBlockN + i / 4 * 8 + 2 * quad + i % 2;
          const int last =
              Cfg::kCausal ? min(params.kv_len - 1, first_query + row + 8 * (i / 2 % 2)) : params.kv_len - 1;
          if (key > last) p[i] = -CUDART_INF_F;
        }
      }
      start_at_magic(dp, shared.magic);
      start_int8_product<Cfg::kHeadDim>(dp, grad, v, offset);
      float bias[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) bias[r] = score_shift[r] + static_cast<float>(exponent[r]);
#pragma unroll
      for (int i = 0; i < kScores; ++i) p[i] = ptx::ex2(fmaf(p[i], score_factor, bias[i / 2 % 2]));
      ptx::wgmma_wait<0>();  // dP
      ptx::pin(dp);
      const float (&dp_raw)[kScores] = reinterpret_cast<const float (&)[kScores]>(dp);
#pragma unroll
      for (int i = 0; i < kScores; ++i) p[i] *= dp_raw[i] + weight_shift[i / 2 % 2];
      unsigned codes[kSteps][4];
      pack_codes(p, codes);
      if (RowScale::exceeds(codes)) {
        float shrink[2];
        RowScale::find_shrink(p, shrink);
        RowScale::multiply(p, shrink);
        RowScale::multiply(dq, shrink);
#pragma unroll
        for (int r = 0; r < 2; ++r) exponent[r] += exponent_of(shrink[r]);
        pack_codes(p, codes);
      }
      start_e4m3_product(dq, codes, k_t, offset);
      ring.advance();
    } while (++tile < stop_tile);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
  }

  // Releases the tiles that only other warpgroups read: those from `tile` on, at which the ring is.
  __device__ __forceinline__ static void skip(Storage& shared, int tile, int stop_tile, Ring<Cfg::kStages>& ring) {
    for (; tile < stop_tile; ++tile, ring.advance()) {
      shared.full[ring.stage].wait(ring.parity);
      arrive_for_warp(shared.empty[ring.stage]);
    }
  }

  __device__ __forceinline__ void store(const BackwardParams& p, int head, int first_query) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = p.factors[3 * (head / p.group)] * ptx::ex2(grad_exponent - static_cast<float>(exponent[r]));
    }
    store_gradient<Cfg::kHeadDim>(dq, factor, p.dq + static_cast<long long>(head) * p.q_len * Cfg::kHeadDim,
                                  first_query, p.q_len);
  }
};

// The body of the dQ kernel. Grid: (query blocks of 64 kConsumers queries) x heads, queries first, the last ones first.
// Block: as that of the dK/dV kernel. Maps: int8 codes (heads, length, kHeadDim) of Q, dO, K and V, and E4M3 codes
// (heads, kHeadDim, length) of K^T, with permuted keys (kernel.cuh).
template <class Cfg>
__device__ __forceinline__ void backward_queries(const BackwardParams& p, const ptx::TensorMap& q_map,
                                                 const ptx::TensorMap& grad_map, const ptx::TensorMap& k_map,
                                                 const ptx::TensorMap& v_map, const ptx::TensorMap& k_t_map) {
  using Storage = QueryGradientStorage<Cfg>;
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  constexpr int kBlockQueries = kBackwardRows * Cfg::kConsumers;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // makes it uniform for the compiler
  const int query_blocks = (p.q_len + kBlockQueries - 1) / kBlockQueries;
  const int head = blockIdx.x / query_blocks, kv_head = head / p.group;
  const int block_query = (query_blocks - 1 - blockIdx.x % query_blocks) * kBlockQueries;
  const BackwardMask<Cfg> mask(p, kv_head);
  struct Tiles {
    int first, stop;
  };
  const auto find_tiles = [&](int first_query, int queries) {  // of keys; first = stop if there are none
    const int stop_query = min(p.q_len, first_query + queries);
    const int stop = (mask.stop_key(stop_query - 1) + Cfg::kBlockN - 1) / Cfg::kBlockN;
    const int first = Cfg::kRange ? mask.first_key(first_query) / Cfg::kBlockN : 0;
    return Tiles{first, Cfg::kRange ? max(first, stop) : stop};
  };
  const Tiles loaded = find_tiles(block_query, kBlockQueries);
  if (threadIdx.x < 4) shared.magic[threadIdx.x] = kMagicBits;
  if (threadIdx.x == 0) {
    shared.q_full.init(1);
    for (int s = 0; s < Cfg::kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4 * Cfg::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warpgroup == Cfg::kConsumers) {
    ptx::warpgroup_reg_dealloc<Cfg::kProducerRegisters>();
    if (threadIdx.x % 128 != 0) return;
    shared.q_full.arrive_expect(2 * kBlockQueries * Cfg::kHeadDim);
    for (int w = 0; w < Cfg::kConsumers; ++w) {
      const int query = block_query + w * kBackwardRows;
      load_rows<Cfg::kHeadDim, kBackwardRows>(shared.q[w], q_map, shared.q_full, query, head);
      load_rows<Cfg::kHeadDim, kBackwardRows>(shared.grad[w], grad_map, shared.q_full, query, head);
    }
    Ring<Cfg::kStages> ring;
    for (int tile = loaded.first; tile < loaded.stop; ++tile, ring.advance()) {
      const int s = ring.stage, key = tile * Cfg::kBlockN;
      ptx::Mbarrier& full = shared.full[s];
      shared.empty[s].wait(ring.parity ^ 1);
      full.arrive_expect(3 * Cfg::kBlockN * Cfg::kHeadDim);
      load_rows<Cfg::kHeadDim, Cfg::kBlockN>(shared.stages[s].k, k_map, full, key, kv_head);
      load_rows<Cfg::kHeadDim, Cfg::kBlockN>(shared.stages[s].v, v_map, full, key, kv_head);
      ptx::tma_load_3d(shared.stages[s].k_t, k_t_map, full, key, 0, kv_head);
    }
  } else {
    ptx::warpgroup_reg_alloc<Cfg::kConsumerRegisters>();
    const int first_query = block_query + warpgroup * kBackwardRows;
    Tiles own = {loaded.first, loaded.first};
    if (first_query < p.q_len) own = find_tiles(first_query, kBackwardRows);
    if (Cfg::kRange && own.first == own.stop) own = {loaded.first, loaded.first};
    QueryGradients<Cfg> gradients;
    Ring<Cfg::kStages> ring;
    if constexpr (Cfg::kRange) gradients.skip(shared, loaded.first, own.first, ring);
    gradients.run(p, mask, shared, warpgroup, head, first_query, own.first, own.stop, ring);
    if (own.first < own.stop && own.stop < loaded.stop) {
      arrive_for_warp(shared.empty[(ring.stage + Cfg::kStages - 1) % Cfg::kStages]);  // of the last tile
    }
    gradients.skip(shared, own.stop, loaded.stop, ring);
    gradients.store(p, head, first_query);
  }
}

}  // namespace greenfast
