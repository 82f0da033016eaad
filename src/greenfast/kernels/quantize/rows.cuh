// Quantizes a tile of 128 rows of K with one scale, or of Q with a scale per 16 rows, or with fine scales
// (common/scale_blocks.cuh). Inputs are read once.
#pragma once

#include "ptx/store.cuh"
#include "quantize/rows_prologue.cuh"
#include "quantize/rows_transform.cuh"

namespace greenfast {

// A head's mean is estimated from kMeanKeys keys spread over it, as the median of the means of groups of kMeanGroup.
constexpr int kMeanKeys = 32, kMeanGroup = 4, kMeanGroups = kMeanKeys / kMeanGroup;

// Bitonic sort (Batcher, 1968), ascending.
template <int kCount>
__device__ __forceinline__ void sort(float (&x)[kCount]) {
#pragma unroll
  for (int size = 2; size <= kCount; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int j = i ^ distance;
        if (j < i) continue;
        const float low = fminf(x[i], x[j]), high = fmaxf(x[i], x[j]);
        x[i] = i & size ? high : low;
        x[j] = i & size ? low : high;
      }
    }
  }
}

// Heads of K per block.
template <class Cfg, bool kPrologue = Cfg::kPrologue>
constexpr int kHeadsOfBlock = 1;
template <class Cfg>
constexpr int kHeadsOfBlock<Cfg, true> = Cfg::kKeyHeads;

template <class Cfg>
using GroupMeans = float[kMeanGroups][Cfg::kHeadDim];

template <class Cfg>
using GroupMaxima = float[Cfg::kFineScales ? Cfg::kThreads / 32 : 1][kKeyGroups];

template <class Cfg>
struct RowsStorage {
  GroupMeans<Cfg> group_mean;  // of one head
  float mean[kHeadsOfBlock<Cfg>][Cfg::kHeadDim];
  // With kSeveralHeads in turn, so that one barrier between a tile's writes and its reads is enough.
  float amax[Cfg::kSeveralHeads ? 2 : 1][Cfg::kThreads / 32];
  GroupMaxima<Cfg> group_amax[Cfg::kSeveralHeads ? 2 : 1];
  float row_amax[Cfg::kFineScales ? Cfg::kThreads / 32 : 1][kQueryBlock];
};

struct NoNext {
  __device__ __forceinline__ void operator()() const {}
};

template <class Cfg>
struct RowsQuantizer {
  using Rows = RowsTransform<Cfg>;
  using Values = typename Rows::Values;
  static_assert(Cfg::kThreads / 32 * kQueryBlock == kRowBlock * Rows::kSplit, "a tile of rows for the warps");

  RowsStorage<Cfg>& shared;
  const HeadRows<Cfg> head;
  const Rows rows;
  const int group;  // index of this warp's 16 rows in the tile
  const RowsPrologue<Cfg> prologue;

  __device__ __forceinline__ RowsQuantizer(RowsStorage<Cfg>& shared, const HeadRows<Cfg>& head,
                                           const RowsPrologue<Cfg>& prologue = {})
      : shared(shared), head(head), group(threadIdx.x / 32 / Rows::kSplit), prologue(prologue) {}

  // Loads and transforms two rows of each thread. kOfTile: see RowsPrologue::transform.
  template <bool kOfTile = false, class StartNext = NoNext>
  __device__ __forceinline__ void read(const HeadRows<Cfg>& from, const int (&row)[2], Values& x,
                                       StartNext start_next = {}) const {
    if constexpr (Cfg::kPrologue) {
      prologue.template transform<kOfTile && Cfg::kSeveralHeads>(from, row, rows, x, start_next);
    } else {
      rows.transform([&](int r, int column) { return from.load(row[r], column); }, x);
    }
  }

  // Starts to load a tile.
  __device__ __forceinline__ void start_load(int tile) const {
    const int first = tile * kRowBlock + group * kQueryBlock + Rows::row_of_warp();
    prologue.start_load(head, {first, first + 8});
  }

  // codes: of the head.
  __device__ __forceinline__ void write(const Values& x, const float (&scales)[2], const int (&row)[2],
                                        unsigned char* codes) const {
    rows.cast(x, scales, [&](int r, int column, const typename Rows::Codes& out) {
      unsigned char* const to = codes + static_cast<long long>(row[r]) * Cfg::kHeadDim + column;
      if constexpr (Cfg::kSeveralHeads) {
        ptx::store_8_if(row[r] < head.length, to, out);  // the compiler would sink the casts into branches
      } else if (row[r] < head.length) {
        *reinterpret_cast<typename Rows::Codes*>(to) = out;
      }
    });
  }

  // Barrier of the warps that share rows. If a block takes one tile of Q, all of its warps meet.
  __device__ __forceinline__ static void sync_rows() {
    if constexpr (Cfg::kSeveralHeads) {
      RowsPrologue<Cfg>::sync_rows();
    } else {
      __syncthreads();
    }
  }

  // Computes the mean that is subtracted from all keys of the head. A median of means is robust: a single outlier
  // cannot change it much, and it is finite if most keys are. All blocks of a head compute the same; the one with
  // k_mean stores it. from: the head, or kMeanKeys sampled keys.
  __device__ __forceinline__ void compute_mean(const HeadRows<Cfg>& from, float* k_mean) const {
    if (group < kMeanKeys / kQueryBlock) compute_group_means(from, group, shared.group_mean);
    __syncthreads();
    if (threadIdx.x < Cfg::kHeadDim) compute_median(shared.group_mean, 0, threadIdx.x, k_mean);
    __syncthreads();
  }

  // Computes the means of kMeanGroup keys each, by the warps of two groups of rows. part: the group, 0 or 1.
  __device__ __forceinline__ void compute_group_means(const HeadRows<Cfg>& from, int part,
                                                      GroupMeans<Cfg>& group_mean) const {
    // Lanes of rows i and i + 4 hold a group of four adjacent samples. Each sample is at a different offset in its
    // 32nd of the keys, so that periodic keys do not bias the mean.
    const int lane_row = Rows::row_of_warp(), first = (part * 4 + lane_row % 4) * kMeanGroup + lane_row / 4 * 2;
    int row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first + r, offset = i * 19 % kMeanKeys;
      row[r] = static_cast<int>(static_cast<long long>(i * kMeanKeys + offset) * from.length / (kMeanKeys * kMeanKeys));
    }
    Values x;
    read(from, row, x);
#pragma unroll
    for (int i = 0; i < Rows::kWarpParts * Rows::kGroups * 4; ++i) {
      const int part_of_row = i / 16, m = i / 4 % 4, e = i % 4;
      float sum = (x[part_of_row][0][m][e] + x[part_of_row][1][m][e]) * (1.0f / kMeanGroup);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      if (lane_row < 4) group_mean[part * 4 + lane_row][rows.column_of(part_of_row, m) + e] = sum;
    }
  }

  // Computes the median of a column's group means, of the block's head of this number.
  __device__ __forceinline__ void compute_median(const GroupMeans<Cfg>& group_mean, int number, unsigned column,
                                                 float* k_mean) const {
    float means[kMeanGroups];
#pragma unroll
    for (int g = 0; g < kMeanGroups; ++g) {
      const float sample_mean = group_mean[g][column];
      means[g] = fabsf(sample_mean) < CUDART_INF_F ? sample_mean : 0.0f;
    }
    sort(means);
    const float mean = 0.5f * means[kMeanGroups / 2 - 1] + 0.5f * means[kMeanGroups / 2];
    shared.mean[number][column] = mean;
    if (k_mean != nullptr) k_mean[column] = mean * Rows::kFactor;
  }

  // Quantizes tiles `tile` .. `stop` - 1 of K. k_mean: output for the mean of `samples`, with kKeyMean.
  __device__ __forceinline__ void quantize_k(const HeadRows<Cfg>& samples, int tile, int stop, unsigned char* codes,
                                             float* scales, float* k_mean) const {
    if constexpr (Cfg::kKeyMean) {
      constexpr int kLine = 64, kLines = Cfg::kHeadDim / kLine;  // columns per prefetch; prefetches per row
      for (int i = threadIdx.x; i < kRowBlock * kLines; i += Cfg::kThreads) {
        head.prefetch(tile * kRowBlock + i / kLines, i % kLines * kLine);
      }
      compute_mean(samples, tile == 0 ? k_mean : nullptr);
    }
    for (; tile < stop; ++tile) {
      quantize_k_tile(tile, codes, scales);
      if (tile + 1 < stop) __syncthreads();  // all threads have read the shared amax
    }
  }

  // number: of the head's mean. start_next: see RowsPrologue::transform.
  template <class StartNext = NoNext>
  __device__ __forceinline__ void quantize_k_tile(int tile, unsigned char* codes, float* scales, int number = 0,
                                                  StartNext start_next = {}) const {
    const int turn = Cfg::kSeveralHeads ? number % 2 : 0;
    const int first = tile * kRowBlock + group * kQueryBlock + Rows::row_of_warp(), row[2] = {first, first + 8};
    Values x;
    read<true>(head, row, x, start_next);
    if constexpr (Cfg::kKeyMean) {
#pragma unroll
      for (int i = 0; i < Rows::kWarpParts * Rows::kGroups; ++i) {
        const int part = i / 4, m = i % 4;
        const float4 mean = *reinterpret_cast<const float4*>(shared.mean[number] + rows.column_of(part, m));
        const float four[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) x[part][e / 4][m][e % 4] -= four[e % 4];
      }
      Rows::zero_rows_from(x, row, head.length);
    }
    float scale;
    if constexpr (Cfg::kFineScales) {
      scale = scale_of_group(x, scales + tile * kKeyGroups, shared.group_amax[turn]);
    } else {
      scale = Rows::scale_for(block_max_nan<Cfg::kThreads>(shared.amax[turn], Rows::largest(x)));
      if (threadIdx.x == 0) scales[tile] = scale;
    }
    write(x, {scale, scale}, row, codes);
  }

  // Computes the fine scale of this thread's key group; both of its rows are in it. scales: output for the tile. All
  // groups are NaN if the tile has a non-finite value. group_amax: shared memory.
  __device__ __forceinline__ float scale_of_group(const Values& x, float* scales, GroupMaxima<Cfg>& group_amax) const {
    const int lane = threadIdx.x % 32, group = lane / 8;
    float amax = quad_max_nan(Rows::largest(x));
    amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, 4));
    if (lane % 8 == 0) group_amax[threadIdx.x / 32][group] = amax;
    const bool nonfinite = __syncthreads_or(!(amax < CUDART_INF_F));
#pragma unroll
    for (int warp = 0; warp < Cfg::kThreads / 32; ++warp) amax = fmaxf(amax, group_amax[warp][group]);
    const float scale = nonfinite ? CUDART_NAN_F : Rows::scale_for(amax);
    if (threadIdx.x < 32 && lane % 8 == 0) scales[group] = scale;
    return scale;
  }

  // Quantizes a tile of Q. start_next: see RowsPrologue::transform. turn: of the shared amax; 1 after a tile of K, because
  // other warps may still read that tile's amax.
  template <class StartNext = NoNext>
  __device__ __forceinline__ void quantize_q(int tile, unsigned char* codes, float* scales, StartNext start_next = {},
                                             int turn = 0) const {
    const int block = tile * (kRowBlock / kQueryBlock) + group;
    const int first = block * kQueryBlock + Rows::row_of_warp(), row[2] = {first, first + 8};
    Values x;
    read<true>(head, row, x, start_next);
    const int warp = threadIdx.x / 32;
    if constexpr (Cfg::kFineScales) {
      float row_scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) row_scale[r] = quad_max_nan(Rows::largest(x, r));
      if constexpr (Rows::kSplit > 1) {
#pragma unroll
        for (int r = 0; r < 2; ++r) shared.row_amax[warp][Rows::row_of_warp() + 8 * r] = row_scale[r];
        sync_rows();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          row_scale[r] = ptx::max_nan(row_scale[r], shared.row_amax[warp ^ 1][Rows::row_of_warp() + 8 * r]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_scale[r] = Rows::scale_for(row_scale[r]);
        if (threadIdx.x % 4 == 0 && row[r] < head.length) scales[row[r]] = row_scale[r];
      }
      write(x, row_scale, row, codes);
      return;
    }
    float amax = warp_max_nan(Rows::largest(x));
    if constexpr (Rows::kSplit > 1) {
      shared.amax[turn][warp] = amax;
      sync_rows();
      amax = ptx::max_nan(amax, shared.amax[turn][warp ^ 1]);
    }
    const float scale = Rows::scale_for(amax);
    if (threadIdx.x % (32 * Rows::kSplit) == 0 && block * kQueryBlock < head.length) scales[block] = scale;
    write(x, {scale, scale}, row, codes);
  }
};

}  // namespace greenfast
