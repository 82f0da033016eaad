// A tile of 128 rows of K to codes with one scale, or of Q with one for each 16: read once.
#pragma once

#include "rows_transform.cuh"

namespace greenfast {

constexpr int kMeanKeys = 32;  // at most, evenly spread, whose mean is taken from all

template <class Cfg>
struct RowsStorage {
  float sum[kMeanKeys / kQueryBlock][Cfg::kHeadDim];  // of 16 keys each
  float mean[Cfg::kHeadDim];
  float amax[Cfg::kThreads / 32];
};

template <class Cfg>
struct RowsQuantizer {
  using Rows = RowsTransform<Cfg>;
  using Values = typename Rows::Values;
  static_assert(Cfg::kThreads / 32 * kQueryBlock == kRowBlock * Rows::kSplit, "a tile of rows for the warps");

  RowsStorage<Cfg>& shared;
  const HeadRows<Cfg> head;
  const Rows rows;
  const int group;  // of the tile's 16 rows, which this warp has

  __device__ __forceinline__ RowsQuantizer(RowsStorage<Cfg>& shared, const HeadRows<Cfg>& head)
      : shared(shared), head(head), group(threadIdx.x / 32 / Rows::kSplit) {}

  __device__ __forceinline__ void read(const int (&row)[2], Values& x) const {
    rows.transform([&](int r, int column) { return head.load(row[r], column); }, x);
  }

  __device__ __forceinline__ void write(const Values& x, float scale, const int (&row)[2], unsigned char* codes) const {
    rows.cast(x, scale, [&](int r, int column, const typename Rows::Codes& out) {
      if (row[r] < head.length) {
        *reinterpret_cast<typename Rows::Codes*>(codes + static_cast<long long>(row[r]) * Cfg::kHeadDim + column) = out;
      }
    });
  }

  // The mean of a few keys of the head, transformed as they will be: all blocks of a head get the same, one stores it.
  __device__ __forceinline__ void find_mean(float* k_mean) const {
    const int length = head.length, count = min(kMeanKeys, length);
    if (group < kMeanKeys / kQueryBlock) {
      int row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = group * kQueryBlock + Rows::row_of_warp() + 8 * r;
        row[r] = i < count ? static_cast<int>(static_cast<long long>(i) * length / count) : length;
      }
      Values x;
      read(row, x);
#pragma unroll
      for (int i = 0; i < Rows::kOwnParts * Rows::kGroups * 4; ++i) {
        const int part = i / 16, m = i / 4 % 4, e = i % 4;
        float sum = x[part][0][m][e] + x[part][1][m][e];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (threadIdx.x % 32 < 4) shared.sum[group][rows.column_of(part, m) + e] = sum;
      }
    }
    __syncthreads();
    if (threadIdx.x < Cfg::kHeadDim) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kMeanKeys / kQueryBlock; ++w) sum += shared.sum[w][threadIdx.x];
      const float mean = __fdiv_rn(sum, count);
      shared.mean[threadIdx.x] = mean;
      if (k_mean != nullptr) k_mean[threadIdx.x] = mean * Rows::kFactor;
    }
    __syncthreads();
  }

  // Tiles `tile` .. `stop` - 1 of K; k_mean: where the mean is stored, if it is subtracted.
  __device__ __forceinline__ void keys(int tile, int stop, unsigned char* codes, float* scales, float* k_mean) const {
    if constexpr (Cfg::kKeyMean) {
      constexpr int kLine = 64, kLines = Cfg::kHeadDim / kLine;  // columns, and how many times so many in a row
      for (int i = threadIdx.x; i < kRowBlock * kLines; i += Cfg::kThreads) {
        head.prefetch(tile * kRowBlock + i / kLines, i % kLines * kLine);
      }
      find_mean(tile == 0 ? k_mean : nullptr);
    }
    for (; tile < stop; ++tile) {
      key_tile(tile, codes, scales);
      if (tile + 1 < stop) __syncthreads();  // all have read what the next tile overwrites
    }
  }

  __device__ __forceinline__ void key_tile(int tile, unsigned char* codes, float* scales) const {
    const int first = tile * kRowBlock + group * kQueryBlock + Rows::row_of_warp(), row[2] = {first, first + 8};
    Values x;
    read(row, x);
    if constexpr (Cfg::kKeyMean) {
#pragma unroll
      for (int i = 0; i < Rows::kOwnParts * Rows::kGroups; ++i) {
        const int part = i / 4, m = i % 4;
        const float4 mean = *reinterpret_cast<const float4*>(shared.mean + rows.column_of(part, m));
        const float four[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& value = x[part][e / 4][m][e % 4];
          value = row[e / 4] < head.length ? value - four[e % 4] : 0.0f;
        }
      }
    }
    const float scale = Rows::scale_for(over_block<Cfg::kThreads>(shared.amax, Rows::largest(x)));
    if (threadIdx.x == 0) scales[tile] = scale;
    write(x, scale, row, codes);
  }

  // A tile of Q.
  __device__ __forceinline__ void queries(int tile, unsigned char* codes, float* scales) const {
    const int block = tile * (kRowBlock / kQueryBlock) + group;
    const int first = block * kQueryBlock + Rows::row_of_warp(), row[2] = {first, first + 8};
    Values x;
    read(row, x);
    float amax = over_warp(Rows::largest(x));
    if constexpr (Rows::kSplit > 1) {
      const int warp = threadIdx.x / 32;
      shared.amax[warp] = amax;
      __syncthreads();
      amax = ptx::max_nan(amax, shared.amax[warp ^ 1]);
    }
    const float scale = Rows::scale_for(amax);
    if (threadIdx.x % (32 * Rows::kSplit) == 0 && block * kQueryBlock < head.length) scales[block] = scale;
    write(x, scale, row, codes);
  }
};

}  // namespace greenfast
