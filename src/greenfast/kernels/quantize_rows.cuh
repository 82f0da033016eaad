// A tile of 128 rows of K to codes with one scale, or of Q with one for each 16: read once.
#pragma once

#include "rows_transform.cuh"

namespace greenfast {

constexpr int kMeanKeys = 32;  // at most, evenly spread, whose mean is taken from all

template <class Cfg>
struct KeysStorage {
  float sum[kMeanKeys / 16][Cfg::kHeadDim];  // of 16 keys each
  float mean[Cfg::kHeadDim];
  float amax[Cfg::kThreads / 32];
};

template <class Cfg>
struct KeysQuantizer {
  static_assert(Cfg::kThreads / 32 * 16 == kRowBlock, "a warp takes 16 rows");
  using Rows = RowsTransform<Cfg>;
  using Input = typename Rows::Input;
  using Values = typename Rows::Values;

  KeysStorage<Cfg>& shared;
  const HeadRows<Cfg> head;
  const Rows rows;
  const int length;

  __device__ __forceinline__ KeysQuantizer(KeysStorage<Cfg>& shared, const HeadRows<Cfg>& head)
      : shared(shared), head(head), length(head.length) {}

  // A thread's columns of two rows, which may be any.
  __device__ __forceinline__ void read(const int (&row)[2], Input& x) const {
    Rows::read(x, [&](int r, int column) { return head.load(row[r], column); });
  }

  // The mean of a few keys of the head, transformed as they will be: all blocks of a head get the same, one stores it.
  __device__ __forceinline__ void find_mean(float* k_mean) const {
    const int warp = threadIdx.x / 32, count = min(kMeanKeys, length);
    if (warp < kMeanKeys / 16) {
      int row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = warp * 16 + Rows::row_of_warp() + 8 * r;
        row[r] = i < count ? static_cast<int>(static_cast<long long>(i) * length / count) : length;
      }
      Input input;
      read(row, input);
#pragma unroll
      for (int part = 0; part < Rows::kParts; ++part) {
        Values x;
        rows.transform(input, part, x);
#pragma unroll
        for (int i = 0; i < Rows::kGroups * 4; ++i) {
          float sum = x[0][i / 4][i % 4] + x[1][i / 4][i % 4];
#pragma unroll
          for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
          if (threadIdx.x % 32 < 4) shared.sum[warp][Rows::column_of(part, i / 4) + i % 4] = sum;
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < Cfg::kHeadDim) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kMeanKeys / 16; ++w) sum += shared.sum[w][threadIdx.x];
      const float mean = __fdiv_rn(sum, count);
      shared.mean[threadIdx.x] = mean;
      if (k_mean != nullptr) k_mean[threadIdx.x] = mean * Rows::kFactor;
    }
    __syncthreads();
  }

  // A part of two rows, as it is to be cast: without the mean, and zeros where there is no row.
  __device__ __forceinline__ void prepare(const Input& input, const int (&row)[2], int part, Values& x) const {
    rows.transform(input, part, x);
    if constexpr (Cfg::kKeyMean) {
#pragma unroll
      for (int m = 0; m < Rows::kGroups; ++m) {
        const float4 mean = *reinterpret_cast<const float4*>(shared.mean + Rows::column_of(part, m));
        const float four[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& value = x[i / 4][m][i % 4];
          value = row[i / 4] < length ? value - four[i % 4] : 0.0f;
        }
      }
    }
  }

  // Tiles `tile` .. `stop` - 1; k_mean: where the mean is stored, if it is subtracted.
  __device__ __forceinline__ void run(int tile, int stop, unsigned char* codes, float* scales, float* k_mean) const {
    if constexpr (Cfg::kKeyMean) {
      const int first = tile * kRowBlock + threadIdx.x / 2;
      head.prefetch(first, threadIdx.x % 2 * 64);
      if (Cfg::kHeadDim > 128) head.prefetch(first, threadIdx.x % 2 * 64 + 128);
      find_mean(tile == 0 ? k_mean : nullptr);
    }
    for (; tile < stop; ++tile) {
      cast_tile(tile, codes, scales);
      if (tile + 1 < stop) __syncthreads();  // all have read what the next tile overwrites
    }
  }

  __device__ __forceinline__ void cast_tile(int tile, unsigned char* codes, float* scales) const {
    const int first = tile * kRowBlock + threadIdx.x / 32 * 16 + Rows::row_of_warp(), row[2] = {first, first + 8};
    Input input;
    read(row, input);
    float amax = 0.0f;
    Values x[Rows::kParts];
#pragma unroll
    for (int part = 0; part < Rows::kParts; ++part) {
      prepare(input, row, part, x[part]);
      amax = Rows::largest(x[part], amax);
    }
    const float scale = scale_of(over_block<Cfg::kThreads>(shared.amax, amax) * Rows::kFactor, Rows::kCodeMax);
    if (threadIdx.x == 0) scales[tile] = scale;
    const float unit = scale * Rows::kInverse;
#pragma unroll
    for (int part = 0; part < Rows::kParts; ++part) {
      Rows::cast(x[part], part, unit, [&](int r, int column, const typename Rows::Codes& out) {
        if (row[r] < length) {
          *reinterpret_cast<typename Rows::Codes*>(codes + static_cast<long long>(row[r]) * Cfg::kHeadDim + column) = out;
        }
      });
    }
  }
};

// Rows of Q: each warp takes its own.
template <class Cfg>
__device__ __forceinline__ void quantize_queries(const HeadRows<Cfg>& head, int tile, unsigned char* codes,
                                                 float* scales) {
  using Rows = RowsTransform<Cfg>;
  const int block = tile * (kRowBlock / kQueryBlock) + threadIdx.x / 32;
  const int first = block * kQueryBlock + Rows::row_of_warp(), row[2] = {first, first + 8};
  typename Rows::Input input;
  Rows::read(input, [&](int r, int column) { return head.load(row[r], column); });
  const float scale = Rows().quantize(input, [] {}, [&](int r, int column, const typename Rows::Codes& out) {
    if (row[r] < head.length) {
      *reinterpret_cast<typename Rows::Codes*>(codes + static_cast<long long>(row[r]) * Cfg::kHeadDim + column) = out;
    }
  });
  if (threadIdx.x % 32 == 0 && block * kQueryBlock < head.length) scales[block] = scale;
}

}  // namespace greenfast
