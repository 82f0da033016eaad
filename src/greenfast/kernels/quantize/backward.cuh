// Quantizes the inputs of a backward pass to the layouts that attention/sm90/backward.cuh reads.
//
// sum_keys adds the rows of K, and finds the largest numbers and norms of V's rows after the rotation. measure_keys
// finds the largest numbers of K minus its mean. encode_backward writes the codes and the tables. A block takes
// kTileRows rows: it rotates them for the int8 codes (rows_transform.cuh), and reads them again, without a rotation, for
// the transposed E4M3 codes. The mean of K is exact: rounding of dO V^T adds nearly the same number to a whole row of
// dP, and in dQ = dS K that number is multiplied by the part of the mean that is left in K.
#pragma once

#include "attention/sm90/backward.cuh"
#include "quantize/rows_transform.cuh"

namespace greenfast {

struct BackwardInputs {
  QuantizeInput q, k, v, out, grad;
  const float2* row_stats;  // (batch x heads, q_len): log-sum-exp and largest of the scores with keys minus lse_mean
  // (batch x kv_heads, kHeadDim), rotated as by build_rotation, and that matrix, (kHeadDim, kHeadDim).
  const float *lse_mean, *rotation;
  int batch, heads, kv_heads, q_len, kv_len;
  float softmax_scale;
  const int* kv_lengths;  // with kLengths: (batch)
};

// The keys of a sequence. Those after them do not count: their codes are zeros, whatever they hold.
template <class Cfg>
__device__ __forceinline__ int count_keys(const BackwardInputs& p, int sequence) {
  if constexpr (Cfg::kLengths) return max(0, min(p.kv_lengths[sequence], p.kv_len));
  return p.kv_len;
}

struct BackwardCodes {
  unsigned char *q, *k, *v, *grad;    // int8 (batch x heads or kv_heads, length, kHeadDim)
  unsigned char *q_t, *k_t, *grad_t;  // E4M3 (batch x heads or kv_heads, kHeadDim, length rounded up to 16)
  QueryTable* tables;                 // (batch x heads, tiles of 64 queries)
  float* factors;                     // (batch x kv_heads, 3)
  float* row_factors;                 // (batch x heads, q_len)
  float* k_sums;                      // (batch x kv_heads, chunks, kHeadDim), see KeySums
  float *k_mean, *mean_shift;         // (batch x kv_heads, kHeadDim): of K, and that minus lse_mean
  float *k_amax, *v_amax, *v_norm;    // (batch x kv_heads, tiles of keys): largest numbers and norms / Rows::kFactor
};

// The configuration of the quantizer's parts. Cfg: kHeadDim; kTileRows, 64 or 128, of a block; In; kThreads; kLengths,
// whether sequences have lengths of keys.
template <class Cfg>
struct BackwardRows : Cfg {
  static constexpr int kColumns = Cfg::kHeadDim;
  static constexpr bool kInt8 = true, kRotate = true, kKeyMean = true, kSampled = false, kFineScales = false,
                        kGathered = false, kPrologue = false, kParts = false;
};

// For the transposed codes, a thread holds eight adjacent columns of every kRows-th row.
template <class Cfg>
struct BackwardColumns {
  static constexpr int kRowThreads = Cfg::kHeadDim / kVector;  // that hold a row
  static constexpr int kRows = Cfg::kThreads / kRowThreads;    // at a time
  static constexpr int kSteps = Cfg::kTileRows / kRows;
};

template <class Cfg>
struct BackwardStorage {
  unsigned tile[Cfg::kTileRows * Cfg::kHeadDim / 4];           // of E4M3 codes, as BackwardTile::word_index orders them
  float of_rows[Cfg::kHeadDim > 128 ? 2 : 1][Cfg::kTileRows];  // a number of each row, by the warps that share it
  float q_factor[Cfg::kTileRows], grad_factor[Cfg::kTileRows];  // of E4M3 codes
  float warp_max[2][Cfg::kThreads / 32];
  float delta[Cfg::kTileRows], mean_score[Cfg::kTileRows];  // rowsum(dO O), and Q times mean_shift
};

// Eight columns of a row, as pairs of bfloat16. As pairs, because 16-bit values are taken apart and joined again.
struct EightColumns {
  unsigned pairs[kVector / 2];

  __device__ __forceinline__ float operator[](int c) const {
    return __uint_as_float(c % 2 == 0 ? pairs[c / 2] << 16 : pairs[c / 2] & 0xffff0000u);
  }
};

// The sum of a row for write_transposed, if none is needed.
struct NoRowSum {
  __device__ __forceinline__ float operator()(int, const EightColumns&) const { return 0.0f; }
};

// A tile of kTileRows rows of one head.
template <class Cfg>
struct BackwardTile {
  using RowsCfg = BackwardRows<Cfg>;
  using Rows = RowsTransform<RowsCfg>;
  using Head = HeadRows<RowsCfg>;
  using In = typename Cfg::In;
  using Columns = BackwardColumns<Cfg>;
  static constexpr int kWarps = Cfg::kThreads / 32;
  // For the E4M3 codes: a row can have a number that is sqrt(kHeadDim) times larger than any after the rotation.
  static constexpr float kFactor = Cfg::kHeadDim <= 128 ? 0.25f : 0.125f;
  static_assert(kWarps * kQueryBlock == Cfg::kTileRows * Rows::kSplit, "kSplit warps rotate 16 rows");

  BackwardStorage<Cfg>& shared;
  const Rows rows;
  const int first;   // row of the head
  const int row[2];  // of the head, that this thread rotates

  __device__ __forceinline__ BackwardTile(BackwardStorage<Cfg>& shared, int tile)
      : shared(shared),
        first(tile * Cfg::kTileRows),
        row{first + static_cast<int>(threadIdx.x) / 32 / Rows::kSplit * kQueryBlock + Rows::row_of_warp(),
            first + static_cast<int>(threadIdx.x) / 32 / Rows::kSplit * kQueryBlock + Rows::row_of_warp() + 8} {}

  // The word of four columns of a row. Words of a row are exchanged, so that threads that read 16 keys each have fewer
  // bank conflicts. Unsigned, so that divisions are shifts.
  __device__ __forceinline__ static unsigned word_index(unsigned key, unsigned word) {
    constexpr unsigned kChunks = Cfg::kTileRows / 16, kWords = 32 / kChunks, kMost = Cfg::kHeadDim / 4 / kWords;
    return key * Cfg::kHeadDim / 4 + (word ^ kWords * (key / 16 % (kMost < kChunks ? kMost : kChunks)));
  }

  __device__ __forceinline__ static EightColumns load(const In* address, bool inside) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (inside) x = *reinterpret_cast<const uint4*>(address);
    return {{x.x, x.y, x.z, x.w}};
  }

  // Prefetches the tile to L2.
  __device__ __forceinline__ void prefetch(const Head& head) const {
    constexpr unsigned kLine = 64, kLines = Cfg::kHeadDim / kLine;  // columns per prefetch; prefetches per row
    for (unsigned i = threadIdx.x; i < Cfg::kTileRows * kLines; i += Cfg::kThreads) {
      head.prefetch(first + i / kLines, i % kLines * kLine);
    }
  }

  // Subtracts the mean, and rounds to the input's type.
  __device__ __forceinline__ static void center(EightColumns& x, const float (&mean)[kVector], bool inside) {
#pragma unroll
    for (int m = 0; m < kVector / 2; ++m) {
      const Pack<In, 2> pair = {static_cast<In>(x[2 * m] - mean[2 * m]),
                                static_cast<In>(x[2 * m + 1] - mean[2 * m + 1])};
      x.pairs[m] = inside ? reinterpret_cast<const unsigned&>(pair) : 0;
    }
  }

  __device__ __forceinline__ static void read_mean(const float* from, float (&mean)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      mean[i] = four.x, mean[i + 1] = four.y, mean[i + 2] = four.z, mean[i + 3] = four.w;
    }
  }

  // Loads and rotates this thread's rows; with kCentered minus the mean.
  template <bool kCentered>
  __device__ __forceinline__ void rotate(const Head& head, typename Rows::Values& x,
                                         const float* head_mean = nullptr) const {
    const In* const address[2] = {head.address(row[0], 0), head.address(row[1], 0)};
    rows.transform(
        [&](int r, int column) {
          EightColumns eight = load(address[r] + column, row[r] < head.length);
          if constexpr (kCentered) {
            float mean[kVector];
            read_mean(head_mean + column, mean);
            center(eight, mean, row[r] < head.length);
          }
          return reinterpret_cast<const typename Rows::Loaded&>(eight);
        },
        x);
  }

  // Writes int8 codes of the rotated rows below stop_row. true_scales: of the thread's two rows, at least their largest
  // magnitude / 127, so that no code needs a limit. Sums with kMagic have the rounded number in their lowest bits.
  __device__ __forceinline__ void write_int8(int stop_row, const typename Rows::Values& x,
                                             const float (&true_scales)[2], unsigned char* codes) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = true_scales[r] * (1.0f / Rows::kFactor), inverse = __frcp_rn(scale);
      const unsigned finite_mask = scale == scale ? ~0u : 0u;
      unsigned char* const to = codes + static_cast<long long>(row[r]) * Cfg::kHeadDim;
#pragma unroll
      for (int i = 0; i < Rows::kWarpParts * 2; ++i) {
        unsigned out[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float (&four)[4] = x[i / 2][r][i % 2 * 2 + h];
          unsigned bits[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) bits[e] = __float_as_uint(fmaf(four[e], inverse, kMagic));
          out[h] = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
          out[h] &= finite_mask;
        }
        if (row[r] < stop_row) {
          *reinterpret_cast<uint2*>(to + rows.column_of(i / 2, i % 2 * 2)) = make_uint2(out[0], out[1]);
        }
      }
    }
  }

  // Returns the sums of (x inverse)^2 over this thread's two rows. Lanes and warps that share a row get the same sum.
  __device__ __forceinline__ void sum_squares(const typename Rows::Values& x, const float (&inverse)[2],
                                              float (&sums)[2]) const {
    const int warp = threadIdx.x / 32;
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < Rows::kWarpParts * 32; ++i) {
      const int r = i / 16 % 2;
      const float value = x[i / 32][r][i / 4 % 4][i % 4] * inverse[r];
      sums[r] = fmaf(value, value, sums[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 1);
      sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 2);
    }
    if constexpr (Rows::kSplit > 1) {
      __syncthreads();  // of_rows was read
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (threadIdx.x % 4 == 0) shared.of_rows[warp % Rows::kSplit][row[r] - first] = sums[r];
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 2; ++r) sums[r] = shared.of_rows[0][row[r] - first] + shared.of_rows[1][row[r] - first];
    }
  }

  // Returns the largest norm of the tile's rows. amax: their largest magnitude.
  __device__ __forceinline__ float largest_norm(const typename Rows::Values& x, float amax) const {
    const float inverse = amax > 0.0f ? __frcp_rn(amax) : 0.0f;
    float sums[2];
    sum_squares(x, {inverse, inverse}, sums);
    return block_max_nan<Cfg::kThreads>(shared.warp_max[1], sqrtf(ptx::max_nan(sums[0], sums[1]))) * amax;
  }

  // Writes the E4M3 codes of the tile's columns, (kHeadDim, stop_row rounded up to 16) of the head. factor(i): of the
  // tile's row i. sum(step, values): a thread's part of a sum over the row, for eight columns; the sums are written to
  // row_sums.
  template <bool kKeys, class Factor, class Sum = NoRowSum>
  __device__ __forceinline__ void write_transposed(const Head& head, int stop_row, unsigned char* codes, Factor factor,
                                                   Sum sum = {}, float* row_sums = nullptr,
                                                   const float* head_mean = nullptr) const {
    const int column = threadIdx.x % Columns::kRowThreads * kVector, first_row = threadIdx.x / Columns::kRowThreads;
    const In* address = head.address(first + first_row, column);
    float mean[kVector], sums[Columns::kSteps];
    if constexpr (kKeys) read_mean(head_mean + column, mean);
#pragma unroll
    for (int step = 0; step < Columns::kSteps; ++step) {
      const int i = step * Columns::kRows + first_row;
      const bool inside = first + i < head.length;
      EightColumns x = load(address, inside);
      address += Columns::kRows * head.row_stride;
      if constexpr (kKeys) center(x, mean, inside);
      const float row_factor = factor(i);
      unsigned out[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float four[4] = {x[4 * h] * row_factor, x[4 * h + 1] * row_factor, x[4 * h + 2] * row_factor,
                               x[4 * h + 3] * row_factor};
        out[h] = encode_four<Format::kE4M3>(four);
      }
      *reinterpret_cast<uint2*>(shared.tile + word_index(i, column / 4)) = make_uint2(out[0], out[1]);
      sums[step] = sum(step, x);
    }
    if (row_sums != nullptr) {
      const int step = sum_over_lanes(sums);
      if (threadIdx.x % kRowLanes == 0) row_sums[step * Columns::kRows + first_row] = sums[0];
    }
    __syncthreads();
    const int padded = (stop_row + 15) / 16 * 16;
    constexpr unsigned kChunks = Cfg::kTileRows / 16;
#pragma unroll
    for (unsigned i = threadIdx.x; i < kChunks * Cfg::kHeadDim / 4; i += Cfg::kThreads) {
      const unsigned key = i % kChunks * 16, word = i / kChunks;
      if (first + static_cast<int>(key) >= padded) continue;
      const unsigned* from = shared.tile + word_index(key, word);  // the keys of a chunk are exchanged alike
      const auto code = [&](int offset) { return from[offset * Cfg::kHeadDim / 4]; };
      unsigned words[4][4];  // word m of column c in [m][c]
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int second = kKeys ? 8 : 1, third = 9 - second;
        const unsigned keys[4] = {code(2 * m), code(2 * m + second), code(2 * m + third), code(2 * m + 9)};
        transpose_bytes(keys, words[m]);
      }
      unsigned char* to = codes + 4ll * word * padded + first + key;
#pragma unroll
      for (int c = 0; c < 4; ++c, to += padded) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0][c], words[1][c], words[2][c], words[3][c]);
      }
    }
  }

  static constexpr int kRowLanes = Columns::kRowThreads / Columns::kSteps;

  // Adds the sums of a row's lanes. Returns the step of the row that this lane's sums[0] belongs to. Lanes exchange half
  // of their rows until kRowLanes have one.
  __device__ __forceinline__ static int sum_over_lanes(float (&sums)[Columns::kSteps]) {
    int count = Columns::kSteps;
#pragma unroll
    for (int lanes = Columns::kRowThreads / 2; lanes >= kRowLanes; lanes /= 2) {
      count /= 2;
      const bool upper = threadIdx.x & lanes;
#pragma unroll
      for (int i = 0; i < Columns::kSteps / 2; ++i) {
        if (i >= count) break;
        const float sent = upper ? sums[i] : sums[i + count];
        sums[i] = (upper ? sums[i + count] : sums[i]) + __shfl_xor_sync(0xffffffffu, sent, lanes);
      }
    }
#pragma unroll
    for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], lanes);
    return threadIdx.x % Columns::kRowThreads / kRowLanes;
  }

  // The largest of the numbers of a head's tiles. Each warp computes it.
  __device__ __forceinline__ static float head_max(const float* of_tiles, int tiles) {
    float largest = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < tiles; i += 32) largest = ptx::max_nan(largest, of_tiles[i]);
    return warp_max_nan(largest);
  }

  // The scale of a head of K or V from the maxima of its tiles.
  __device__ __forceinline__ static float head_scale(const float* amax, int tiles) {
    return Rows::scale_for(head_max(amax, tiles));
  }

  // A bound of |dP - delta| in units of the codes: twice the product of the largest norms, and a margin of 1/16. A row
  // of codes of dO has at most 127 in each column.
  __device__ __forceinline__ static float difference_bound(float v_norm, float v_scale) {
    return ptx::max_nan(1.0f, 2.125f * 127.0f * Rows::kRoot * Rows::kFactor * v_norm / v_scale);
  }

  // log2 of the factor of a row's P before its rounding, 0 to 7. log2_weight: of the row's largest weight m.
  // norm: the norm of its codes of dO over that of a row of 127. A weight is at most m, and all but the largest one at
  // most 1 - m. So |dS| is at most min(m, 1 - m) norm times the bound of differences, and the second number keeps codes
  // of dS, times 224 over that bound, below 448. The first one leaves sqrt(m) to the codes of Q^T and dO^T, so that
  // queries with one large weight do not make those of flat ones too small.
  __device__ __forceinline__ static float weight_exponent(float log2_weight, float norm) {
    const float m = ptx::ex2(log2_weight);
    const float largest_slope = norm * fminf(1.0f, fmaxf(1.0f - m, 0.0f) / m);
    return fminf(fmaxf(fminf(7.0f + 0.5f * log2_weight, 1.0f - log2f(largest_slope)), 0.0f), 7.0f);
  }

  // The least multiple of 6 whose power of 2 exceeds a number; kNoUnit for 0. A coarse grid, because the dK/dV kernel
  // multiplies its sums whenever the unit changes from one tile to the next.
  __device__ __forceinline__ static int find_unit(float largest) {
    if (largest == 0.0f) return kNoUnit;
    if (!(largest < CUDART_INF_F)) return 6;
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 126, -120), 126);
    return (exponent + 126 + 5) / 6 * 6 - 126;
  }

  // kFactor / 2^unit.
  __device__ __forceinline__ static float code_factor(int unit) {
    return unit == kNoUnit ? 0.0f : __uint_as_float((127 - unit) << 23) * kFactor;
  }
};

// Sums over the rows of K, for at most kMostChunks chunks of a head. Chunks are whole tiles.
struct KeySums {
  static constexpr int kMostChunks = 32, kLeastRows = 1024;
  const int rows, chunks;

  __device__ __forceinline__ explicit KeySums(int kv_len)
      : rows(max(kLeastRows, (kv_len + kMostChunks * kRowBlock - 1) / (kMostChunks * kRowBlock) * kRowBlock)),
        chunks((kv_len + rows - 1) / rows) {}
};

// Grid: the chunks of all heads of K, then the tiles of all heads of V. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void sum_keys(const BackwardInputs& p, const BackwardCodes& codes) {
  __shared__ BackwardStorage<Cfg> shared;
  using Tile = BackwardTile<Cfg>;
  using Columns = typename Tile::Columns;
  const KeySums sums(p.kv_len);
  const int head_count = p.batch * p.kv_heads, key_blocks = head_count * sums.chunks;
  if (static_cast<int>(blockIdx.x) >= key_blocks) {
    const int tiles = (p.kv_len + Cfg::kTileRows - 1) / Cfg::kTileRows, item = blockIdx.x - key_blocks;
    const int head_index = item / tiles, tile = item % tiles;
    const Tile rows(shared, tile);
    const int b = head_index / p.kv_heads;
    const typename Tile::Head head(p.v, b, head_index % p.kv_heads, count_keys<Cfg>(p, b));
    typename Tile::Rows::Values x;
    rows.template rotate<false>(head, x);
    const float amax = block_max_nan<Cfg::kThreads>(shared.warp_max[0], Tile::Rows::largest(x));
    const float norm = rows.largest_norm(x, amax);
    if (threadIdx.x == 0) {
      codes.v_amax[item] = amax;
      codes.v_norm[item] = norm;
    }
    return;
  }
  const int head_index = blockIdx.x / sums.chunks, chunk = blockIdx.x % sums.chunks;
  const int b = head_index / p.kv_heads;
  const typename Tile::Head head(p.k, b, head_index % p.kv_heads, count_keys<Cfg>(p, b));
  const int column = threadIdx.x % Columns::kRowThreads * kVector, first_row = threadIdx.x / Columns::kRowThreads;
  const int first = chunk * sums.rows + first_row, stop = min(head.length, (chunk + 1) * sums.rows);
  const typename Cfg::In* address = head.address(first, column);
  float sum[kVector] = {};
#pragma unroll 8
  for (int row = first; row < stop; row += Columns::kRows) {
    const EightColumns x = Tile::load(address, true);
    address += Columns::kRows * head.row_stride;
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum[c] += x[c];
  }
  float* const of_rows = reinterpret_cast<float*>(shared.tile);  // (kRows, kHeadDim)
#pragma unroll
  for (int c = 0; c < kVector; ++c) of_rows[first_row * Cfg::kHeadDim + column + c] = sum[c];
  __syncthreads();
  if (threadIdx.x < Cfg::kHeadDim) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < Columns::kRows; ++i) total += of_rows[i * Cfg::kHeadDim + threadIdx.x];
    codes.k_sums[static_cast<int>(blockIdx.x) * Cfg::kHeadDim + threadIdx.x] = total;
  }
}

// Grid: heads of K x tiles. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void measure_keys(const BackwardInputs& p, const BackwardCodes& codes) {
  __shared__ BackwardStorage<Cfg> shared;
  __shared__ float mean[Cfg::kHeadDim];
  using Tile = BackwardTile<Cfg>;
  const int head_index = blockIdx.x, tiles = gridDim.y;
  const Tile rows(shared, blockIdx.y);
  const int b = head_index / p.kv_heads;
  const typename Tile::Head head(p.k, b, head_index % p.kv_heads, count_keys<Cfg>(p, b));
  if (threadIdx.x < Cfg::kHeadDim) {
    const int chunks = KeySums(p.kv_len).chunks;
    const float* sums = codes.k_sums + head_index * chunks * Cfg::kHeadDim + threadIdx.x;
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < chunks; ++i) total += sums[i * Cfg::kHeadDim];
    mean[threadIdx.x] = __fdividef(total, static_cast<float>(Cfg::kLengths ? max(1, head.length) : p.kv_len));
    if (blockIdx.y == 0) {
      const int column = head_index * Cfg::kHeadDim + threadIdx.x;
      const float* rotated = p.lse_mean + head_index * Cfg::kHeadDim;
      float of_lse = 0.0f;
      // Without a key there is no lse_mean.
#pragma unroll 4
      for (int i = 0; i < (Cfg::kLengths && head.length == 0 ? 0 : Cfg::kHeadDim); ++i) {
        of_lse = fmaf(rotated[i], p.rotation[threadIdx.x * Cfg::kHeadDim + i], of_lse);
      }
      codes.k_mean[column] = mean[threadIdx.x];
      codes.mean_shift[column] = mean[threadIdx.x] - of_lse;
    }
  }
  __syncthreads();
  typename Tile::Rows::Values x;
  rows.template rotate<true>(head, x, mean);
  const float amax = block_max_nan<Cfg::kThreads>(shared.warp_max[0], Tile::Rows::largest(x));
  if (threadIdx.x == 0) codes.k_amax[head_index * tiles + blockIdx.y] = amax;
}

// Grid: (heads of K, of V, then of Q) x tiles, as many as the longer tensor has. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void encode_backward(const BackwardInputs& p, const BackwardCodes& codes) {
  __shared__ BackwardStorage<Cfg> shared;
  using Tile = BackwardTile<Cfg>;
  using Rows = typename Tile::Rows;
  constexpr float kLog2e = 1.4426950408889634f, kLargestSlope = 224.0f;  // see weight_exponent
  const int kv_tiles = (p.kv_len + Cfg::kTileRows - 1) / Cfg::kTileRows, tile = blockIdx.y;
  const int head_count = p.batch * p.kv_heads;
  const int kind = blockIdx.x < head_count ? 0 : blockIdx.x < 2 * head_count ? 1 : 2;
  const int head_index = blockIdx.x - kind * head_count, heads = kind < 2 ? p.kv_heads : p.heads;
  if (tile * Cfg::kTileRows >= (kind < 2 ? p.kv_len : p.q_len)) return;
  const int b = head_index / heads, h = head_index % heads;
  const int kv_index = kind < 2 ? head_index : head_index / (p.heads / p.kv_heads);
  const long long kv_first = static_cast<long long>(kv_index) * p.kv_len * Cfg::kHeadDim;
  const long long q_first = static_cast<long long>(head_index) * p.q_len * Cfg::kHeadDim;
  const Tile rows(shared, tile);
  const float* k_amax = codes.k_amax + kv_index * kv_tiles;
  const float *v_amax = codes.v_amax + kv_index * kv_tiles, *v_norm = codes.v_norm + kv_index * kv_tiles;
  const float* mean = codes.k_mean + kv_index * Cfg::kHeadDim;
  const float v_scale = Tile::head_scale(v_amax, kv_tiles);
  typename Rows::Values x;

  if (kind == 0) {
    const typename Tile::Head head(p.k, b, h, count_keys<Cfg>(p, b));
    rows.template rotate<true>(head, x, mean);
    const float k_scale = Tile::head_scale(k_amax, kv_tiles);
    if (threadIdx.x < 32 && tile == 0) {
      const float bound = Tile::difference_bound(Tile::head_max(v_norm, kv_tiles), v_scale);
      const float factors[3] = {kLargestSlope / bound,
                                v_scale * bound * (p.softmax_scale / kLargestSlope) / Tile::kFactor,
                                1.0f / Tile::kFactor};
      if (threadIdx.x < 3) codes.factors[3 * head_index + threadIdx.x] = factors[threadIdx.x];
    }
    rows.write_int8(p.kv_len, x, {k_scale, k_scale}, codes.k + kv_first);
    const long long padded = (p.kv_len + 15) / 16 * 16;
    const float factor = __fdividef(Tile::kFactor, k_scale);
    rows.template write_transposed<true>(
        head, p.kv_len, codes.k_t + head_index * Cfg::kHeadDim * padded, [&](int) { return factor; }, NoRowSum(),
        nullptr, mean);
    return;
  }
  if (kind == 1) {
    const typename Tile::Head head(p.v, b, h, count_keys<Cfg>(p, b));
    rows.template rotate<false>(head, x);
    rows.write_int8(p.kv_len, x, {v_scale, v_scale}, codes.v + kv_first);
    return;
  }

  // Q and dO. A warp has 16 rows, four warps a table's 64.
  constexpr int kTables = Cfg::kTileRows / kBackwardRows, kTableWarps = Tile::kWarps / kTables;
  constexpr float kLeastFactor = 1.0f / 65536.0f;  // see kMagicBits: a start is less than 2^22 away from it
  const int warp = threadIdx.x / 32, table_of_warp = warp / kTableWarps;
  const typename Tile::Head q(p.q, b, h, p.q_len), grad(p.grad, b, h, p.q_len), out(p.out, b, h, p.q_len);
  rows.prefetch(q);  // Q and O are read after the work on dO
  rows.prefetch(out);
  const auto max_of_table = [&](const float (&warp_max)[Tile::kWarps]) {
    float largest = warp_max[table_of_warp * kTableWarps];
#pragma unroll
    for (int i = 1; i < kTableWarps; ++i) largest = ptx::max_nan(largest, warp_max[table_of_warp * kTableWarps + i]);
    return largest;
  };

  // dO. NaN or infinity in a row of dO, or in its log-sum-exp, makes the gradients of the table's queries NaN.
  const long long first_of_head = static_cast<long long>(head_index) * p.q_len;
  rows.template rotate<false>(grad, x);
  // weights: the weight with the code 1, 0 without a gradient. top: the score of that weight, in log2.
  float row_max[2], scales[2], weights[2], top[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_max[r] = quad_max_nan(Rows::largest(x, r));
    if (Rows::kSplit > 1 && threadIdx.x % 4 == 0) {
      shared.of_rows[warp % Rows::kSplit][rows.row[r] - rows.first] = row_max[r];
    }
  }
  if constexpr (Rows::kSplit > 1) __syncthreads();
  float2 stats[2];
  float inverse[2];
  bool has_weights[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = rows.row[r] - rows.first;
    if constexpr (Rows::kSplit > 1) row_max[r] = ptx::max_nan(shared.of_rows[0][i], shared.of_rows[1][i]);
    scales[r] = Rows::scale_for(row_max[r]);
    const bool inside = rows.row[r] < p.q_len;
    stats[r] = inside ? p.row_stats[first_of_head + rows.row[r]] : make_float2(0.0f, 0.0f);
    has_weights[r] = inside && row_max[r] > 0.0f && stats[r].x > -CUDART_INF_F;
    inverse[r] = row_max[r] > 0.0f ? __frcp_rn(row_max[r]) : 0.0f;
  }
  float squares[2];
  rows.sum_squares(x, inverse, squares);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float log2_weight = fminf((stats[r].y - stats[r].x) * kLog2e, 0.0f);
    const float exponent = Tile::weight_exponent(log2_weight, sqrtf(squares[r]) * (1.0f / Rows::kRoot));
    weights[r] = has_weights[r] ? ptx::ex2(log2_weight - exponent) : 0.0f;
    if (scales[r] != scales[r] || !(stats[r].x < CUDART_INF_F)) weights[r] = CUDART_NAN_F;
    top[r] = stats[r].y * kLog2e - exponent;
  }
  rows.write_int8(p.q_len, x, scales, codes.grad + q_first);
  const float warp_weight = warp_max_nan(ptx::max_nan(weights[0] * scales[0], weights[1] * scales[1]));
  if (threadIdx.x % 32 == 0) shared.warp_max[1][warp] = warp_weight;

  rows.template rotate<false>(q, x);
  const float k_scale = Tile::head_scale(k_amax, kv_tiles), of_scores = k_scale * (p.softmax_scale * kLog2e);
  const float warp_max = warp_max_nan(Rows::largest(x));
  if (threadIdx.x % 32 == 0) shared.warp_max[0][warp] = warp_max;
  __syncthreads();
  const float q_scale = Rows::scale_for(max_of_table(shared.warp_max[0]));
  const float largest = max_of_table(shared.warp_max[1]);
  const float int8_scale = ptx::max_nan(q_scale, kLeastFactor / of_scores), score_factor = int8_scale * of_scores;
  rows.write_int8(p.q_len, x, {int8_scale, int8_scale}, codes.q + q_first);
  const int key_unit = Tile::find_unit(largest * q_scale), value_unit = Tile::find_unit(largest);
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = rows.row[r] - rows.first;
      shared.q_factor[i] = weights[r] * scales[r] * Tile::code_factor(key_unit);
      shared.grad_factor[i] = weights[r] * Tile::code_factor(value_unit);
    }
  }
  __syncthreads();
  const long long padded = (p.q_len + 15) / 16 * 16, columns_first = head_index * Cfg::kHeadDim * padded;
  const int column = threadIdx.x % Tile::Columns::kRowThreads * kVector;
  float mean_of_columns[kVector];
  Tile::read_mean(codes.mean_shift + kv_index * Cfg::kHeadDim + column, mean_of_columns);
  rows.template write_transposed<false>(
      q, p.q_len, codes.q_t + columns_first, [&](int i) { return shared.q_factor[i]; },
      [&](int, const EightColumns& eight) {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < kVector; ++c) sum = fmaf(eight[c], mean_of_columns[c], sum);
        return sum;
      },
      shared.mean_score);
  __syncthreads();  // all threads have read the tile's codes of Q
  const typename Cfg::In* other = out.address(rows.first + threadIdx.x / Tile::Columns::kRowThreads, column);
  rows.template write_transposed<false>(
      grad, p.q_len, codes.grad_t + columns_first, [&](int i) { return shared.grad_factor[i]; },
      [&](int step, const EightColumns& eight) {
        const int i = step * Tile::Columns::kRows + threadIdx.x / Tile::Columns::kRowThreads;
        const EightColumns of_out = Tile::load(other, rows.first + i < p.q_len);
        other += Tile::Columns::kRows * out.row_stride;
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < kVector; ++c) sum = fmaf(eight[c], of_out[c], sum);
        return sum;
      },
      shared.delta);

  // The table. Queries after the last one, and those without a gradient, have P = 0 and delta = 0.
  const int tables = (p.q_len + kBackwardRows - 1) / kBackwardRows, index = rows.first / kBackwardRows + table_of_warp;
  if (index >= tables) return;
  QueryTable& table = codes.tables[head_index * tables + index];
  constexpr float kRange = 4194304.0f;  // 2^22
  const float bound = Tile::difference_bound(Tile::head_max(v_norm, kv_tiles), v_scale);
  const float of_rows = v_scale * bound * (p.softmax_scale / kLargestSlope) * k_scale * (1.0f / Tile::kFactor);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (threadIdx.x % 4 != 0 || warp % Rows::kSplit != 0) break;
    const int i = rows.row[r] - rows.first, in_table = i % kBackwardRows;
    int score = kMagicBits - static_cast<int>(kRange), weight = kMagicBits;
    if (rows.row[r] < p.q_len) {
      codes.row_factors[first_of_head + rows.row[r]] = weights[r] * scales[r] * of_rows;
      const float start = (top[r] - shared.mean_score[i] * (p.softmax_scale * kLog2e)) / score_factor;
      if (weights[r] > 0.0f) score = kMagicBits - __float2int_rn(fminf(fmaxf(start, -kRange), kRange));
      // Without a gradient delta is 0.
      weight = kMagicBits - __float2int_rn(fminf(fmaxf(shared.delta[i] / (scales[r] * v_scale), -kRange), kRange));
    }
    table.score[QueryTable::word_of(in_table)] = score;
    table.weight[QueryTable::word_of(in_table)] = weight;
  }
  if (threadIdx.x % (32 * kTableWarps) == 0) {
    table.score_factor = largest < CUDART_INF_F ? score_factor : CUDART_NAN_F;
    table.key_unit = key_unit;
    table.value_unit = value_unit;
    table.padding = 0;
  }
}

}  // namespace greenfast
