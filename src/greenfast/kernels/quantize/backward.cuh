// Quantizes the inputs of a backward pass to the layouts that attention/sm90/backward.cuh reads.
//
// measure_keys finds the largest numbers of K and V after the rotation. encode_backward writes the codes and the tables.
// A block takes 128 rows: it rotates them for the int8 codes (rows_transform.cuh), and reads them again for the
// transposed E4M3 codes, which are not rotated. The mean of K is exact: rounding of dO V^T adds nearly the same number
// to a whole row of dP, and in dQ = dS K that number meets the part of the mean that is left in K.
#pragma once

#include "attention/sm90/backward.cuh"
#include "quantize/rows_transform.cuh"
#include "quantize/values.cuh"

namespace greenfast {

struct BackwardInputs {
  QuantizeInput q, k, v, out, grad;
  const float* lse;  // (batch x heads, q_len), natural logarithms
  int batch, heads, kv_heads, q_len, kv_len;
  float softmax_scale;
};

struct BackwardCodes {
  unsigned char *q, *k, *v, *grad;    // int8 (batch x heads or kv_heads, length, kHeadDim)
  unsigned char *q_t, *k_t, *grad_t;  // E4M3 (batch x heads or kv_heads, kHeadDim, length rounded up to 16)
  QueryTable* tables;                 // (batch x heads, tiles of 64 queries)
  float* factors;                     // (batch x kv_heads, 3)
  const float* k_mean;                // (batch x kv_heads, kHeadDim), given
  float* amax;                        // (2, batch x kv_heads, tiles of 128 keys): of K and V, divided by Rows::kFactor
};

// The configuration of the quantizer's parts. Cfg: kHeadDim (64 or 128), In, kThreads.
template <class Cfg>
struct BackwardRows : Cfg {
  static constexpr int kColumns = Cfg::kHeadDim;
  static constexpr bool kInt8 = true, kRotate = true, kKeyMean = true, kSampled = false, kFineScales = false,
                        kGathered = false, kPrologue = false, kParts = false;
};

template <class Cfg>
struct BackwardStorage {
  unsigned tile[kRowBlock * Cfg::kHeadDim / 4];  // of E4M3 codes, as VQuantizer::word_index orders them
  float mean[Cfg::kHeadDim];
  float row_scale[kRowBlock];  // of E4M3 codes
  float warp_max[Cfg::kThreads / 32];
  float delta[kRowBlock], mean_score[kRowBlock];  // rowsum(dO O), and Q times the mean of K
};

// A tile of 128 rows of one head.
template <class Cfg>
struct BackwardTile {
  using RowsCfg = BackwardRows<Cfg>;
  using Rows = RowsTransform<RowsCfg>;
  using Head = HeadRows<RowsCfg>;
  using Loaded = typename Head::Loaded;
  static constexpr int kWarps = Cfg::kThreads / 32;
  // Of the E4M3 codes: a row can have a number that is sqrt(128) times larger than any after the rotation.
  static constexpr float kFactor = 0.25f;
  static_assert(kWarps * kQueryBlock == kRowBlock, "a warp rotates 16 rows");

  BackwardStorage<Cfg>& shared;
  const Rows rows;
  const int first;   // row of the head
  const int row[2];  // of the head, that this thread rotates

  __device__ __forceinline__ BackwardTile(BackwardStorage<Cfg>& shared, int tile)
      : shared(shared),
        first(tile * kRowBlock),
        row{first + static_cast<int>(threadIdx.x) / 32 * kQueryBlock + Rows::row_of_warp(),
            first + static_cast<int>(threadIdx.x) / 32 * kQueryBlock + Rows::row_of_warp() + 8} {}

  // Loads eight columns of a row; with kCentered minus the mean, rounded to the input's type.
  template <bool kCentered>
  __device__ __forceinline__ Loaded load(const Head& head, int at, int column) const {
    Loaded x = head.load(at, column);
    if constexpr (kCentered) {
      if (at >= head.length) return x;
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        x.values[c] = static_cast<typename Cfg::In>(static_cast<float>(x.values[c]) - shared.mean[column + c]);
      }
    }
    return x;
  }

  template <bool kCentered>
  __device__ __forceinline__ void rotate(const Head& head, typename Rows::Values& x) const {
    rows.transform([&](int r, int column) { return load<kCentered>(head, row[r], column); }, x);
  }

  __device__ __forceinline__ void write_int8(const Head& head, const typename Rows::Values& x, const float (&scales)[2],
                                             unsigned char* codes) const {
    rows.cast(x, scales, [&](int r, int column, const typename Rows::Codes& out) {
      if (row[r] < head.length) {
        *reinterpret_cast<typename Rows::Codes*>(codes + static_cast<long long>(row[r]) * Cfg::kHeadDim + column) = out;
      }
    });
  }

  // Writes the E4M3 codes of the tile's columns, (kHeadDim, padded) of the head, with the scales shared.row_scale.
  // observe(i, column, values): called for eight columns of row i of the tile, by kRowThreads adjacent lanes for a row.
  template <bool kCentered, class Observe>
  __device__ __forceinline__ void write_transposed(const Head& head, unsigned char* codes, Observe observe) const {
    using Values = VQuantizer<RowsCfg>;
    const int column = threadIdx.x % Values::kRowThreads * kVector;
#pragma unroll
    for (int step = 0; step < Values::kSteps; ++step) {
      const int i = step * Values::kRows + threadIdx.x / Values::kRowThreads;
      const Loaded x = load<kCentered>(head, first + i, column);
      const float factor = __fdividef(kFactor, shared.row_scale[i]);
      unsigned out[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float four[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) four[c] = static_cast<float>(x.values[4 * h + c]) * factor;
        out[h] = encode_four<Format::kE4M3>(four);
      }
      *reinterpret_cast<uint2*>(shared.tile + Values::word_index(i, column / 4)) = make_uint2(out[0], out[1]);
      observe(i, column, x);
    }
    __syncthreads();
    const int padded = (head.length + 15) / 16 * 16;
    constexpr int kChunks = kRowBlock / 16;
#pragma unroll
    for (int i = threadIdx.x; i < kChunks * Cfg::kHeadDim / 4; i += Cfg::kThreads) {
      const int key = i % kChunks * 16, word = i / kChunks;
      if (first + key >= padded) continue;
      unsigned words[4][4];  // word m of column c in [m][c]
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int even = key + 2 * m;
        const unsigned keys[4] = {
            shared.tile[Values::word_index(even, word)], shared.tile[Values::word_index(even + 1, word)],
            shared.tile[Values::word_index(even + 8, word)], shared.tile[Values::word_index(even + 9, word)]};
        transpose_bytes(keys, words[m]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        *reinterpret_cast<uint4*>(codes + (4ll * word + c) * padded + first + key) =
            make_uint4(words[0][c], words[1][c], words[2][c], words[3][c]);
      }
    }
  }

  // The scale of a head of K or V from the maxima of its tiles. Contains __syncthreads().
  __device__ __forceinline__ float head_scale(const float* amax, int tiles) const {
    float largest = 0.0f;
    for (int i = threadIdx.x; i < tiles; i += Cfg::kThreads) largest = ptx::max_nan(largest, amax[i]);
    largest = block_max_nan<Cfg::kThreads>(shared.warp_max, largest);
    __syncthreads();
    return Rows::scale_for(largest);
  }
};

// Grid: tiles of K, then of V. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void measure_keys(const BackwardInputs& p, const BackwardCodes& codes) {
  __shared__ BackwardStorage<Cfg> shared;
  using Tile = BackwardTile<Cfg>;
  const int tiles = (p.kv_len + kRowBlock - 1) / kRowBlock, head_count = p.batch * p.kv_heads;
  const int head_index = blockIdx.x / tiles % head_count, tile = blockIdx.x % tiles;
  const bool of_keys = blockIdx.x < head_count * tiles;
  const int b = head_index / p.kv_heads, h = head_index % p.kv_heads;
  const Tile rows(shared, tile);
  const typename Tile::Head head(of_keys ? p.k : p.v, b, h, p.kv_len);
  typename Tile::Rows::Values x;
  if (of_keys) {
    if (threadIdx.x < Cfg::kHeadDim) shared.mean[threadIdx.x] = codes.k_mean[head_index * Cfg::kHeadDim + threadIdx.x];
    __syncthreads();
    rows.template rotate<true>(head, x);
  } else {
    rows.template rotate<false>(head, x);
  }
  const float amax = block_max_nan<Cfg::kThreads>(shared.warp_max, Tile::Rows::largest(x));
  if (threadIdx.x == 0) codes.amax[blockIdx.x] = amax;
}

// Grid: tiles of K, of V, then of the queries. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void encode_backward(const BackwardInputs& p, const BackwardCodes& codes) {
  __shared__ BackwardStorage<Cfg> shared;
  using Tile = BackwardTile<Cfg>;
  using Rows = typename Tile::Rows;
  constexpr float kLog2e = 1.4426950408889634f;
  const int kv_tiles = (p.kv_len + kRowBlock - 1) / kRowBlock, q_tiles = (p.q_len + kRowBlock - 1) / kRowBlock;
  const int head_count = p.batch * p.kv_heads, kind = min(2, static_cast<int>(blockIdx.x) / (head_count * kv_tiles));
  const int item = blockIdx.x - kind * head_count * kv_tiles, tiles = kind < 2 ? kv_tiles : q_tiles;
  const int heads = kind < 2 ? p.kv_heads : p.heads, head_index = item / tiles, tile = item % tiles;
  const int b = head_index / heads, h = head_index % heads;
  const int kv_index = kind < 2 ? head_index : head_index / (p.heads / p.kv_heads);
  const long long kv_first = static_cast<long long>(kv_index) * p.kv_len * Cfg::kHeadDim;
  const long long q_first = static_cast<long long>(head_index) * p.q_len * Cfg::kHeadDim;
  const Tile rows(shared, tile);
  const float* k_amax = codes.amax + kv_index * kv_tiles;
  const float* v_amax = k_amax + head_count * kv_tiles;
  typename Rows::Values x;
  const auto ignore = [](int, int, const typename Tile::Loaded&) {};

  if (kind == 0) {
    const typename Tile::Head head(p.k, b, h, p.kv_len);
    if (threadIdx.x < Cfg::kHeadDim) shared.mean[threadIdx.x] = codes.k_mean[kv_index * Cfg::kHeadDim + threadIdx.x];
    const float k_scale = rows.head_scale(k_amax, kv_tiles), v_scale = rows.head_scale(v_amax, kv_tiles);
    if (threadIdx.x < kRowBlock) shared.row_scale[threadIdx.x] = k_scale;
    if (threadIdx.x == 0 && tile == 0) {
      const float of_keys = v_scale * (p.softmax_scale / Tile::kFactor);
      codes.factors[3 * head_index] = of_keys * k_scale;
      codes.factors[3 * head_index + 1] = of_keys;
      codes.factors[3 * head_index + 2] = 1.0f / Tile::kFactor;
    }
    __syncthreads();
    rows.template rotate<true>(head, x);
    rows.write_int8(head, x, {k_scale, k_scale}, codes.k + kv_first);
    const long long padded = (p.kv_len + 15) / 16 * 16;
    rows.template write_transposed<true>(head, codes.k_t + head_index * Cfg::kHeadDim * padded, ignore);
    return;
  }
  const float v_scale = rows.head_scale(v_amax, kv_tiles);
  if (kind == 1) {
    const typename Tile::Head head(p.v, b, h, p.kv_len);
    rows.template rotate<false>(head, x);
    rows.write_int8(head, x, {v_scale, v_scale}, codes.v + kv_first);
    return;
  }

  // Q. A warp has 16 rows, four warps a table's 64.
  constexpr float kLeastFactor = 1.0f / 65536.0f;  // see kMagicBits: a start is less than 2^22 away from it
  const float of_scores = rows.head_scale(k_amax, kv_tiles) * (p.softmax_scale * kLog2e);
  const int warp = threadIdx.x / 32, warp_of_table = warp / 4 * 4;
  const typename Tile::Head q(p.q, b, h, p.q_len), grad(p.grad, b, h, p.q_len), out(p.out, b, h, p.q_len);
  constexpr int kLine = 64, kLines = Cfg::kHeadDim / kLine;                // columns per prefetch; prefetches per row
  for (int i = threadIdx.x; i < kRowBlock * kLines; i += Cfg::kThreads) {  // dO and O are read after the work on Q
    grad.prefetch(rows.first + i / kLines, i % kLines * kLine);
    out.prefetch(rows.first + i / kLines, i % kLines * kLine);
  }
  const auto max_of_table = [&](float warp_max) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.warp_max[warp] = warp_max;
    __syncthreads();
    return ptx::max_nan(ptx::max_nan(shared.warp_max[warp_of_table], shared.warp_max[warp_of_table + 1]),
                        ptx::max_nan(shared.warp_max[warp_of_table + 2], shared.warp_max[warp_of_table + 3]));
  };
  rows.template rotate<false>(q, x);
  const float q_scale = Rows::scale_for(max_of_table(warp_max_nan(Rows::largest(x))));
  const float int8_scale = fmaxf(q_scale, kLeastFactor / of_scores), score_factor = int8_scale * of_scores;
  rows.write_int8(q, x, {int8_scale, int8_scale}, codes.q + q_first);
  if (threadIdx.x % 32 < kQueryBlock) shared.row_scale[warp * kQueryBlock + threadIdx.x % 32] = q_scale;
  if (threadIdx.x < Cfg::kHeadDim) shared.mean[threadIdx.x] = codes.k_mean[kv_index * Cfg::kHeadDim + threadIdx.x];
  __syncthreads();
  const long long padded = (p.q_len + 15) / 16 * 16, columns_first = head_index * Cfg::kHeadDim * padded;
  const auto sum_row = [&](float* to, int i, float sum) {  // over the lanes of a row
    constexpr int kLanes = VQuantizer<BackwardRows<Cfg>>::kRowThreads;
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % kLanes == 0) to[i] = sum;
  };
  rows.template write_transposed<false>(
      q, codes.q_t + columns_first, [&](int i, int column, const typename Tile::Loaded& eight) {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          sum = fmaf(static_cast<float>(eight.values[c]), shared.mean[column + c], sum);
        }
        sum_row(shared.mean_score, i, sum);
      });

  // dO.
  rows.template rotate<false>(grad, x);
  float row_max[2], scales[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_max[r] = quad_max_nan(Rows::largest(x, r));
    scales[r] = Rows::scale_for(row_max[r]);
  }
  rows.write_int8(grad, x, scales, codes.grad + q_first);
  // An integer greater than log2 of all scales of the table's rows; -126 without a gradient.
  const float largest = max_of_table(warp_max_nan(fmaxf(row_max[0], row_max[1]))) * (Rows::kFactor / Rows::kCodeMax);
  const float grad_exponent =
      largest > 0.0f ? static_cast<float>(static_cast<int>(__float_as_uint(largest) >> 23) - 126) : 0.0f;
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) shared.row_scale[rows.row[r] - rows.first] = scales[r];
  }
  __syncthreads();
  rows.template write_transposed<false>(
      grad, codes.grad_t + columns_first, [&](int i, int column, const typename Tile::Loaded& eight) {
        const typename Tile::Loaded other = out.load(rows.first + i, column);
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          sum = fmaf(static_cast<float>(eight.values[c]), static_cast<float>(other.values[c]), sum);
        }
        sum_row(shared.delta, i, sum);
      });

  // The table. Queries after the last one, and those without a gradient, have P = 0 and delta = 0.
  const int tables = (p.q_len + kBackwardRows - 1) / kBackwardRows, index = rows.first / kBackwardRows + warp / 4;
  if (index >= tables) return;
  QueryTable& table = codes.tables[head_index * tables + index];
  constexpr float kRange = 4194304.0f;  // 2^22
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (threadIdx.x % 4 != 0) break;
    const int i = rows.row[r] - rows.first, in_table = i % kBackwardRows;
    int score = kMagicBits - static_cast<int>(kRange), weight = kMagicBits;
    if (rows.row[r] < p.q_len && row_max[r] > 0.0f) {
      const float lse = p.lse[static_cast<long long>(head_index) * p.q_len + rows.row[r]];
      const float exponent = (lse - shared.mean_score[i] * p.softmax_scale) * kLog2e - log2f(scales[r]) + grad_exponent;
      if (lse > -CUDART_INF_F) {
        score = kMagicBits - __float2int_rn(fminf(fmaxf(exponent / score_factor, -kRange), kRange));
      }
      weight = kMagicBits - __float2int_rn(fminf(fmaxf(shared.delta[i] / (scales[r] * v_scale), -kRange), kRange));
    }
    table.score[QueryTable::word_of(in_table)] = score;
    table.weight[QueryTable::word_of(in_table)] = weight;
  }
  if (threadIdx.x % 128 == 0) {
    table.score_factor = score_factor;
    table.q_scale = q_scale;
    table.grad_exponent = grad_exponent;
    table.padding = 0;
  }
}

}  // namespace greenfast
