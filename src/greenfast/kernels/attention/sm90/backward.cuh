// Attention backward for Hopper: one kernel computes dK and dV and writes the codes of dS, another one dQ = dS K. All
// products are wgmmas of 8-bit operands.
//
// S = Q K^T and dP = dO V^T are products of int8 codes; P^T dO, dS^T Q and dS K are products of E4M3 codes. 8-bit wgmma
// reads both operands along the summed axis. So the dK/dV kernel computes S^T and dP^T (rows are keys), and dS reaches
// global memory with rows of queries: stmatrix transposes pairs of bytes, the keys r and r + 8 of a query. Nothing is
// computed twice, and there are no atomics: the same bits in every run.
//
// Accumulators of int8 products start at integers that are the bits of floats near kMagic = 1.5 * 2^23. So the result
// read as a float is kMagic + (the sum), without a conversion. The start of a score also holds the largest score of its
// query, and the start of dP holds delta = rowsum(dO O), both in the units of the codes.
//
// Codes of P are those of exp(score - the query's largest score) times a factor of the query, 1 to 128. Codes of dS are
// the same numbers times (dP - delta) * slope. The quantizer chooses the factor so that none exceeds 448. The rest of a
// query's scale is in the codes of Q^T and dO^T, and in the factor of its row of dQ. So no code needs a limit or a new
// scale in the loop. The smallest weights become 0, as in a forward pass with P in E4M3.
//
// Members of Cfg:
//   int kHeadDim    64, 128 or 256
//   int kConsumers  consumer warpgroups: of 64 keys each for dK and dV, of 64 queries each for dQ
//   bool kWantsKeys, kWantsValues  of the dK/dV kernel: whether it computes dK (and dS), and dV. One thread has no
//                   registers for both sums at head dim 256, so there are two kernels
//   bool kTurns     of the dK/dV kernel: its two warpgroups issue S in turn
//   int kStages     stages of the loaded tiles
//   int kConsumerRegisters, kProducerRegisters  per thread, after setmaxnreg
//   int kSmemBytes  sizeof(Storage), to check the plan in Python
//   bool kCausal    query i attends to keys 0 .. i, else to all
//   bool kRange     query i attends to keys i + first_shift .. i + last_shift; not with kCausal
//   bool kLengths   only to the first keys of each sequence; with kRange
#pragma once

#include "attention/epilogue.cuh"
#include "attention/sm90/traits.cuh"
#include "common/named_barriers.cuh"
#include "ptx/bulk.cuh"
#include "ptx/load.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_s8.cuh"

namespace greenfast {

constexpr int kBackwardRows = 64;  // of a warpgroup, and queries of a QueryTable
constexpr int kStoredKeys = 128;   // of a tile of the dQ kernel
constexpr int kNoUnit = -10000;    // the unit of codes that are all 0

// Of 64 queries: the starts of the accumulators of S^T and dP^T, and what the queries share.
struct QueryTable {
  // In the order in which a thread of a quad loads them, see word_of. Of S: kMagicBits - (the query's largest score -
  // log2 of the code of its weight) / score_factor; of dP: kMagicBits - delta / (scale of dO's row * scale of V).
  int score[kBackwardRows];
  int weight[kBackwardRows];
  float score_factor;        // scale of Q's int8 codes * scale of K * scale of the scores * log2(e)
  int key_unit, value_unit;  // log2 of the units of dK and of dV from codes of Q^T and dO^T, or kNoUnit
  int padding;

  // The place of a query. Of each 16 queries, lane l of a quad has the accumulators of 2 l, 2 l + 1, 8 + 2 l, 9 + 2 l.
  __device__ __forceinline__ static int word_of(int query) {
    return query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2;
  }
};

struct BackwardParams {
  const QueryTable* tables;  // (heads, query tiles)
  const float* factors;      // (heads / group, 3): the slope of dS, and of the accumulators of dK and dV without units
  const float* row_factors;  // (heads, q_len): of the accumulators of dQ
  __nv_bfloat16 *dq, *dk, *dv;
  int group, q_len, kv_len;  // group: heads of Q that share a head of K and V
  int first_head;            // of K and V, of this launch
  // Codes of dS: (heads of the launch, query tiles, stored_tiles) of tiles of kBackwardRows queries and keys, as they are
  // in shared memory. See stored_key.
  unsigned char* ds;
  int stored_tiles;
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

  // The first key of the stored tiles of dS of kBackwardRows queries from `query` on.
  __device__ __forceinline__ int stored_key(int query) const {
    return Cfg::kRange ? first_key(query) / kStoredKeys * kStoredKeys : 0;
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

// The address of the codes of dS of a tile of queries and the keys from `key` on.
template <class Cfg>
__device__ __forceinline__ unsigned char* stored_address(const BackwardParams& p, const BackwardMask<Cfg>& mask,
                                                         int head, int query_tile, int key) {
  const int query_tiles = (p.q_len + kBackwardRows - 1) / kBackwardRows;
  const int key_tile = (key - mask.stored_key(query_tile * kBackwardRows)) / kBackwardRows;
  const long long row_of_tiles = static_cast<long long>(head) * query_tiles + query_tile;
  return p.ds + (row_of_tiles * p.stored_tiles + key_tile) * (kBackwardRows * kBackwardRows);
}

// With kRange: sets the values of a thread's two rows outside of their columns first .. stop - 1 to -inf.
template <int kCount>
__device__ __forceinline__ void mask_columns(float (&x)[kCount], const int (&first)[2], const int (&stop)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, r = i / 2 % 2;
    if (column < first[r] || column >= stop[r]) x[i] = -CUDART_INF_F;
  }
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

// Rounds values in the order of an accumulator to words of a thread's two rows and two columns: the bytes of a column,
// then those of the next one.
__device__ __forceinline__ void pack_pairs(const float (&x)[kBackwardRows / 2], unsigned (&pairs)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float four[4] = {x[4 * j], x[4 * j + 2], x[4 * j + 1], x[4 * j + 3]};
    pairs[j] = ptx::pack_e4m3(four);
  }
}

// Returns the A operands of pack_codes from the words of pack_pairs.
__device__ __forceinline__ void split_pairs(const unsigned (&pairs)[8], unsigned (&codes)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int first = i / 4 * 4 + i % 4 / 2 * 2;
    codes[i / 4][i % 4] = __byte_perm(pairs[first], pairs[first + 1], i % 2 == 0 ? 0x6420 : 0x7531);
  }
}

// The unit of a sum, and the largest one so far, as exponents of 2.
struct Unit {
  int now = kNoUnit, largest = kNoUnit;
};

// Changes the unit of a sum to that of the next codes. If that is 2^60 times smaller than the largest one so far, the
// codes become 0 instead: the sum could overflow.
template <int kCount, int kSteps>
__device__ __forceinline__ void change_unit(float (&acc)[kCount], Unit& unit, int next, unsigned (&codes)[kSteps][4]) {
  if (next == unit.now || next == kNoUnit) return;
  if (unit.largest - next > 60) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) codes[i / 4][i % 4] = 0;
    return;
  }
  const float factor = ptx::ex2(static_cast<float>(unit.now - next));
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] *= factor;
  unit = {next, max(unit.largest, next)};
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

// The codes of dS of a warpgroup's tile and of the tile before, (query, key).
template <bool kWantsKeys, int kConsumers>
struct StoredSlopes {};
template <int kConsumers>
struct StoredSlopes<true, kConsumers> {
  alignas(1024) unsigned char ds[kConsumers][2][kBackwardRows * kBackwardRows];
};

template <class Cfg>
struct KeyGradientStorage : StoredSlopes<Cfg::kWantsKeys, Cfg::kConsumers> {
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
  // Whether accumulators of dP start at delta. Up to head dim 128 |dP - delta| < 2^22, the range around kMagic; at 256
  // only |dP| is.
  static constexpr bool kStartsAtDelta = Cfg::kHeadDim <= 128;

  float dk[kWantsKeys ? Cfg::kHeadDim / 2 : 1], dv[kWantsValues ? Cfg::kHeadDim / 2 : 1];
  Unit key_unit, value_unit;  // of dk and dv

  // Adds the tiles first_tile .. stop_tile - 1 of p.group heads of Q from `head` on, a head of this launch's dS.
  __device__ __forceinline__ void run(Storage& shared, const BackwardParams& params, const BackwardMask<Cfg>& mask,
                                      int warpgroup, int first_key, int first_tile, int stop_tile, int head) {
#pragma unroll
    for (float& x : dk) x = 0.0f;
#pragma unroll
    for (float& x : dv) x = 0.0f;
    int tile = first_tile, tiles_left = params.group * (stop_tile - first_tile);
    if (tiles_left <= 0) return;
    Ring<Cfg::kStages> ring;
    const ptx::Operand<kPanel<Cfg::kHeadDim>> k(shared.keys[0][warpgroup]);
    const ptx::Operand<kPanel<Cfg::kHeadDim>> v(shared.keys[Storage::kKeyTiles - 1][warpgroup]);
    auto& tiles = shared.stages[0].tiles;
    const ptx::Operand<kPanel<Cfg::kHeadDim>> q(tiles[Storage::kQ]), grad(tiles[Storage::kGrad]);
    const ptx::Operand<64> q_t(tiles[kWantsKeys ? Storage::kQColumns : 0]);
    const ptx::Operand<64> grad_t(tiles[kWantsValues ? Storage::kGradColumns : 0]);
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // and row + 8, of the warpgroup's keys
    const Queries full = find_full_queries(mask, first_key);
    const float slope = params.factors[3 * (params.first_head + head / params.group)];
    const int padding = Cfg::kRange ? kBackwardRows : mask.kv_len - first_key - row;  // rows from here on are no keys
    shared.kv_full.wait(0);
    shared.full[0].wait(0);
    int s[kScores], dp[kScores], last_stage = -1;
    load_starts(s, shared.tables[0].score);
    load_differences(dp, shared.tables[0]);
    if (Cfg::kTurns && warpgroup == 1) end_turn(warpgroup);
    begin_turn(warpgroup);
    pin_all(s, dp);
    start_int8_product<Cfg::kHeadDim>(s, k, q, 0);
    ptx::wgmma_commit();  // in the place of dK
    if constexpr (kWantsKeys) start_int8_product<Cfg::kHeadDim>(dp, v, grad, 0);
    do {  // with `for`, ptxas serializes the products
      const int stage = ring.stage;
      const unsigned offset = stage * sizeof(typename Storage::Stage);
      const QueryTable& table = shared.tables[stage];
      const float score_factor = table.score_factor;
      ptx::wgmma_wait<kWantsKeys ? 2 : 0>();  // S
      ptx::pin(s);

      float (&p)[kScores] = reinterpret_cast<float (&)[kScores]>(s);
      if (Cfg::kCausal && tile * kBackwardRows < first_key + kBackwardRows - 1) {
        // Columns of this thread are queries 8 j + 2 (lane % 4) and the next one of the tile.
        const int key = first_key + row - tile * kBackwardRows, lane_pair = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          const int query = i / 4 * 8 + 2 * lane_pair + i % 2;
          if (query < key + 8 * (i / 2 % 2)) p[i] = -CUDART_INF_F;
        }
      }
      if (Cfg::kRange && (tile * kBackwardRows < full.first || (tile + 1) * kBackwardRows > full.stop)) {
        int first[2], stop[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int key = first_key + row + 8 * r;
          first[r] = mask.first_query(key) - tile * kBackwardRows;
          stop[r] = key < mask.kv_len ? mask.stop_query(key) - tile * kBackwardRows : 0;
        }
        mask_columns(p, first, stop);
      }
      float bias[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bias[r] = 8 * r < padding ? -kMagic * score_factor : -CUDART_INF_F;
      }
#pragma unroll
      for (int i = 0; i < kScores; ++i) p[i] = ptx::ex2(fmaf(p[i], score_factor, bias[i / 2 % 2]));
      end_turn(warpgroup);
      if constexpr (kWantsValues) {
        unsigned p_codes[kSteps][4];
        pack_codes(p, p_codes);
        change_unit(dv, value_unit, table.value_unit, p_codes);
        start_e4m3_product(dv, p_codes, grad_t, offset);
      }
      unsigned ds_codes[kSteps][4];
      if constexpr (kWantsKeys) {
        ptx::wgmma_wait<kWantsValues ? 1 : 0>();  // dP, and dK of the tile before
        ptx::pin(dp);
        ptx::pin(dk);
        const bool is_first = last_stage < 0;
        if (!is_first) arrive_for_warp(shared.empty[last_stage]);
        last_stage = stage;
        float (&dp_raw)[kScores] = reinterpret_cast<float (&)[kScores]>(dp);
        if constexpr (!kStartsAtDelta) subtract_delta(dp_raw, table.weight);
        float ds[kScores];
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          ds[i] = p[i] * (kStartsAtDelta ? fmaf(dp_raw[i], slope, -kMagic * slope) : dp_raw[i] * slope);
        }
        unsigned pairs[8];
        pack_pairs(ds, pairs);
        // After the barrier the buffer of the tile before is complete, and this one was read.
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read();
        ptx::barrier_sync(Sm90Barrier::kWarpgroup + warpgroup, 128);
        if (threadIdx.x % 128 == 0 && !is_first) {
          const bool same_head = tile > first_tile;
          store_codes(shared.ds[warpgroup][~tiles_left & 1], params, mask, first_key,
                      same_head ? tile - 1 : stop_tile - 1, same_head ? head : head - 1);
        }
        write_codes(shared.ds[warpgroup][tiles_left & 1], pairs);
        split_pairs(pairs, ds_codes);
        change_unit(dk, key_unit, table.key_unit, ds_codes);
      }
      // The starts of the next tile, while no product is in flight: ptxas would insert a wait before them. By now dV
      // is usually complete.
      ring.advance();
      if constexpr (kWantsValues) {
        ptx::wgmma_wait<0>();
        ptx::pin(dv);
        if constexpr (!kWantsKeys) arrive_for_warp(shared.empty[stage]);
      }
      if (++tile == stop_tile) {
        tile = first_tile;
        ++head;
      }
      if (--tiles_left == 0) {
        if constexpr (kWantsKeys) {
          ptx::pin(dk);
          start_e4m3_product(dk, ds_codes, q_t, offset);
        }
        break;
      }
      shared.full[ring.stage].wait(ring.parity);
      const QueryTable& next_table = shared.tables[ring.stage];
      const unsigned next_offset = ring.stage * sizeof(typename Storage::Stage);
      load_starts(s, next_table.score);
      load_differences(dp, next_table);
      begin_turn(warpgroup);
      pin_all(s, dp);
      start_int8_product<Cfg::kHeadDim>(s, k, q, next_offset);
      if constexpr (kWantsKeys) {
        start_e4m3_product(dk, ds_codes, q_t, offset);
        start_int8_product<Cfg::kHeadDim>(dp, v, grad, next_offset);
      }
    } while (true);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    ptx::pin(dv);
    if constexpr (kWantsKeys) {
      ptx::barrier_sync(Sm90Barrier::kWarpgroup + warpgroup, 128);
      if (threadIdx.x % 128 == 0) {
        store_codes(shared.ds[warpgroup][1], params, mask, first_key, stop_tile - 1, head - 1);
        ptx::bulk_wait();
      }
    }
  }

  // With kTurns a warpgroup issues S after the exponentials of the other one, whose products then run during its own.
  __device__ __forceinline__ static void begin_turn(int warpgroup) {
    if constexpr (Cfg::kTurns) ptx::barrier_sync(Sm90Barrier::kPingPong + warpgroup, 256);
  }
  __device__ __forceinline__ static void end_turn(int warpgroup) {
    if constexpr (Cfg::kTurns) ptx::barrier_arrive(Sm90Barrier::kPingPong + (warpgroup ^ 1), 256);
  }

  // Keeps the moves that start accumulators before the next wgmma: ptxas serializes products for one between them.
  __device__ __forceinline__ void pin_all(int (&s)[kScores], int (&dp)[kScores]) {
    ptx::pin(s);
    if constexpr (kWantsKeys) ptx::pin(dp);
    ptx::pin(dk);
    ptx::pin(dv);
  }

  __device__ __forceinline__ static void load_differences(int (&dp)[kScores], const QueryTable& table) {
    if constexpr (!kWantsKeys) return;
    if constexpr (kStartsAtDelta) {
      load_starts(dp, table.weight);
    } else {
#pragma unroll
      for (int& x : dp) x = kMagicBits;
    }
  }

  // Writes the words of pack_pairs to a tile of dS, rows of queries in the swizzle of 64 bytes. Of each 16 keys, the
  // bytes are those of keys 0, 8, 1, 9 and so on.
  __device__ __forceinline__ static void write_codes(unsigned char* tile, const unsigned (&pairs)[8]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = 32 * h + threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 ^ query / 2 % 4;
      const unsigned four[4] = {pairs[4 * h], pairs[4 * h + 1], pairs[4 * h + 2], pairs[4 * h + 3]};
      ptx::stmatrix_x4_trans(tile + query * kBackwardRows + chunk * 16, four);
    }
    ptx::fence_proxy_async();
  }

  __device__ __forceinline__ static void store_codes(const unsigned char* tile, const BackwardParams& p,
                                                     const BackwardMask<Cfg>& mask, int first_key, int query_tile,
                                                     int head) {
    ptx::bulk_store(stored_address(p, mask, head, query_tile, first_key), tile, kBackwardRows * kBackwardRows);
    ptx::bulk_commit();
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
      factor[0] = factor[1] = dv_factor * ptx::ex2(static_cast<float>(value_unit.now));
      if constexpr (Cfg::kLengths) clear_rows(dv, factor, padding);
      store_gradient<Cfg::kHeadDim>(dv, factor, p.dv + first, first_key, p.kv_len);
    }
    if constexpr (kWantsKeys) {
      factor[0] = factor[1] = dk_factor * ptx::ex2(static_cast<float>(key_unit.now));
      if constexpr (Cfg::kLengths) clear_rows(dk, factor, padding);
      store_gradient<Cfg::kHeadDim>(dk, factor, p.dk + first, first_key, p.kv_len);
    }
  }
};

// The body of the dK/dV kernel. Grid: (key blocks of 64 kConsumers keys) x heads of K, keys first. Block: 128 threads per
// consumer warpgroup and 128 for the producer. Maps: int8 codes (heads, length, kHeadDim) of K, V, Q and dO, and E4M3
// codes (heads, kHeadDim, length) of Q^T and dO^T, with permuted queries (kernel.cuh).
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
  const int kv_head = p.first_head + blockIdx.x / key_blocks, block_key = blockIdx.x % key_blocks * kBlockKeys;
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
    gradients.run(shared, p, mask, warpgroup, first_key, first_tile, stop_tile, (kv_head - p.first_head) * p.group);
    gradients.store(p, mask, kv_head, first_key);
  }
}

template <class Cfg>
struct QueryGradientStorage {
  struct alignas(1024) Stage {
    unsigned char ds[Cfg::kConsumers][kBackwardRows * kStoredKeys];  // two tiles of keys, one after the other
    unsigned char k_t[Cfg::kHeadDim * kStoredKeys];
  } stages[Cfg::kStages];
  ptx::Mbarrier full[Cfg::kStages], empty[Cfg::kStages];
};

// The tiles first .. stop - 1 of kStoredKeys keys with stored dS of `queries` queries; first >= stop if there are none.
struct StoredTiles {
  int first, stop;

  template <class Cfg>
  __device__ __forceinline__ StoredTiles(const BackwardMask<Cfg>& mask, int first_query, int queries) {
    const int last_query = min(mask.q_len, first_query + queries) - 1;
    first = mask.first_key(first_query) / kStoredKeys;
    const bool any = first_query < mask.q_len && mask.first_key(first_query) < mask.kv_len;
    stop = any ? (mask.stop_key(last_query) + kStoredKeys - 1) / kStoredKeys : 0;
  }
  __device__ __forceinline__ bool contains(int tile) const { return tile >= first && tile < stop; }
};

// Adds a tile of dS K to dq, which is complete after the next wait for all products.
template <class Cfg>
__device__ __forceinline__ void add_product(float (&dq)[Cfg::kHeadDim / 2], ptx::Operand<kBackwardRows> ds,
                                            ptx::Operand<kStoredKeys> k_t, unsigned offset) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStoredKeys; i += 32) {
    const unsigned in_tiles = i / kBackwardRows * kBackwardRows * kBackwardRows + i % kBackwardRows;
    ptx::wgmma_add(dq, ds.at(offset + in_tiles), k_t.at(offset + i));
  }
  ptx::wgmma_commit();
}

// The body of the dQ kernel. Grid: (query blocks of 64 kConsumers queries) x heads, queries first, the last ones first.
// Block: as that of the dK/dV kernel. Map: E4M3 codes of K^T (heads, kHeadDim, length), whose keys are in the order of
// KeyGradients::write_codes.
template <class Cfg>
__device__ __forceinline__ void backward_queries(const BackwardParams& p, const ptx::TensorMap& k_t_map) {
  using Storage = QueryGradientStorage<Cfg>;
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  constexpr int kBlockQueries = kBackwardRows * Cfg::kConsumers;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // makes it uniform for the compiler
  const int query_blocks = (p.q_len + kBlockQueries - 1) / kBlockQueries;
  const int stored_head = blockIdx.x / query_blocks, head = p.first_head * p.group + stored_head;
  const int kv_head = head / p.group;
  const int block_query = (query_blocks - 1 - blockIdx.x % query_blocks) * kBlockQueries;
  const BackwardMask<Cfg> mask(p, kv_head);
  const StoredTiles loaded(mask, block_query, kBlockQueries);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Cfg::kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4 * Cfg::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  Ring<Cfg::kStages> ring;
  if (warpgroup == Cfg::kConsumers) {
    ptx::warpgroup_reg_dealloc<Cfg::kProducerRegisters>();
    if (threadIdx.x % 128 != 0) return;
    const auto wants = [&](int w, int tile) {
      return StoredTiles(mask, block_query + w * kBackwardRows, kBackwardRows).contains(tile);
    };
    for (int tile = loaded.first; tile < loaded.stop; ++tile, ring.advance()) {
      const int s = ring.stage, key = tile * kStoredKeys;
      ptx::Mbarrier& full = shared.full[s];
      shared.empty[s].wait(ring.parity ^ 1);
      unsigned bytes = sizeof(shared.stages[s].k_t);
      for (int w = 0; w < Cfg::kConsumers; ++w) bytes += wants(w, tile) ? sizeof(shared.stages[s].ds[w]) : 0;
      full.arrive_expect(bytes);
      for (int w = 0; w < Cfg::kConsumers; ++w) {
        const int row_tile = block_query / kBackwardRows + w;
        if (!wants(w, tile)) continue;
        ptx::bulk_load(shared.stages[s].ds[w], stored_address(p, mask, stored_head, row_tile, key),
                       sizeof(shared.stages[s].ds[w]), full);
      }
      ptx::tma_load_3d(shared.stages[s].k_t, k_t_map, full, key, 0, kv_head);
    }
    return;
  }
  ptx::warpgroup_reg_alloc<Cfg::kConsumerRegisters>();
  const int first_query = block_query + warpgroup * kBackwardRows;
  const StoredTiles own(mask, first_query, kBackwardRows);
  const auto skip = [&](int tile, int stop) {  // releases tiles that only other warpgroups read
    for (; tile < stop; ++tile, ring.advance()) {
      shared.full[ring.stage].wait(ring.parity);
      arrive_for_warp(shared.empty[ring.stage]);
    }
  };
  const ptx::Operand<kBackwardRows> ds(shared.stages[0].ds[warpgroup]);
  const ptx::Operand<kStoredKeys> k_t(shared.stages[0].k_t);
  float dq[Cfg::kHeadDim / 2];
#pragma unroll
  for (float& x : dq) x = 0.0f;
  const int first = min(max(own.first, loaded.first), loaded.stop), stop = min(own.stop, loaded.stop);
  skip(loaded.first, first);
  int tile = first, last_stage = -1;
  if (tile < stop) {
    do {  // with `for`, ptxas serializes the products
      shared.full[ring.stage].wait(ring.parity);
      add_product<Cfg>(dq, ds, k_t, ring.stage * sizeof(typename Storage::Stage));
      ptx::wgmma_wait<1>();  // the tile before
      if (last_stage >= 0) arrive_for_warp(shared.empty[last_stage]);
      last_stage = ring.stage;
      ring.advance();
    } while (++tile < stop);
    ptx::wgmma_wait<0>();
    ptx::pin(dq);
    arrive_for_warp(shared.empty[last_stage]);
  }
  skip(max(first, stop), loaded.stop);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = first_query + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    factor[r] = query < p.q_len ? p.row_factors[static_cast<long long>(head) * p.q_len + query] : 0.0f;
  }
  store_gradient<Cfg::kHeadDim>(dq, factor, p.dq + static_cast<long long>(head) * p.q_len * Cfg::kHeadDim, first_query,
                                p.q_len);
}

}  // namespace greenfast
