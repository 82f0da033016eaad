// A tile of 128 rows of Q or K to codes with one scale: read once, and rotated by the tensor cores.
//
// A warp takes 16 rows. Of row t / 4 and t / 4 + 8 (t: its lane) a thread reads columns 32 i + 8 (t % 4) .. + 7 for all
// i. Written in bits, a column is i, quad lane, half b of eight, element e of four: the Hadamard matrix of Sylvester's
// order is a product over bits. Its 16 x 16 part over (quad lane, e) is a matrix product, exact on 16-bit inputs, whose
// operands and results can be ordered so that each thread gets the columns that it gave; the part over b and the lowest
// bit of i is sums and differences of a thread's own values; and that over the other bits of i is a sum of products with
// signs. So 64 columns are made at a time; where there are more, they are made once for the largest magnitude and once
// more for the cast: a thread keeps its input, not its values, which would be twice as many registers.
#pragma once

#include "ptx/mma_input.cuh"
#include "quantize_common.cuh"

namespace greenfast {

constexpr int kMeanKeys = 32;  // at most, evenly spread, whose mean is taken from all

template <class Cfg>
struct RowsStorage {
  float sum[kMeanKeys / 16][Cfg::kHeadDim];  // of 16 keys each
  float mean[Cfg::kHeadDim];
  float amax[Cfg::kThreads / 32];
};

template <class Cfg>
struct RowsQuantizer {
  static constexpr int kLoads = Cfg::kHeadDim / 32;
  static constexpr int kParts = Cfg::kHeadDim / 64;
  static constexpr int kUnrolled = Cfg::kRotate ? 1 : kParts;  // parts, which without rotation are parts of the input
  static constexpr int kGroups = 4;  // of four columns, in a part
  static constexpr float kCodeMax = Cfg::kInt8 ? 127.0f : 448.0f;
  static_assert(Cfg::kThreads / 32 * 16 == kTileRows, "a warp takes 16 rows");
  using Rows = HeadRows<Cfg>;
  using Mma = ptx::InputMma<typename Cfg::In>;
  using Input = typename Rows::Loaded[2][kLoads];
  using Values = float[2][kGroups][4];  // of a part

  RowsStorage<Cfg>& shared;
  const Rows head;
  unsigned signs[2][2];  // of the 16 x 16 matrix: operand of results e = 0, 1 and of e = 2, 3

  __device__ __forceinline__ RowsQuantizer(RowsStorage<Cfg>& shared, const Rows& head) : shared(shared), head(head) {
    const int column = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int to = 4 * (column / 2) + 2 * side + column % 2, from = 4 * quad + 2 * half;
        const unsigned low = __popc(to & from) & 1, high = __popc(to & (from + 1)) & 1;  // whether negative
        signs[side][half] = Mma::kOnes | low << 15 | high << 31;
      }
    }
  }

  __device__ __forceinline__ static int row_of_warp() { return threadIdx.x % 32 / 4; }
  __device__ __forceinline__ static int column_of(int part, int group) {
    return part * 64 + group / 2 * 32 + threadIdx.x % 4 * 8 + group % 2 * 4;
  }

  // A thread's columns of two rows, which may be any.
  __device__ __forceinline__ void read(const int (&row)[2], Input& x) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) x[r][i] = head.load(row[r], i * 32 + threadIdx.x % 4 * 8);
    }
  }

  // A part in float, times the Hadamard matrix without its factor of 1 / sqrt(head_dim).
  __device__ __forceinline__ void transform(const Input& input, int part, Values& x) const {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      if constexpr (Cfg::kRotate) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float c[4] = {};
#pragma unroll
          for (int from = 0; from < kParts; ++from) {
            const unsigned flip = __popc(part & from) & 1 ? 0x80008000u : 0u;
            const unsigned b[2] = {signs[side][0] ^ flip, signs[side][1] ^ flip};
            const int load = 2 * from + m / 2, word = 2 * (m % 2);
            const unsigned(&low)[4] = reinterpret_cast<const unsigned(&)[4]>(input[0][load]);
            const unsigned(&high)[4] = reinterpret_cast<const unsigned(&)[4]>(input[1][load]);
            const unsigned a[4] = {low[word], high[word], low[word + 1], high[word + 1]};
            Mma::add(c, a, b);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i / 2][m][2 * side + i % 2] = c[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i / 4][m][i % 4] = static_cast<float>(input[i / 4][2 * part + m / 2].values[4 * (m % 2) + i % 4]);
        }
      }
    }
    if constexpr (Cfg::kRotate) {
#pragma unroll
      for (int distance = 1; distance < kGroups; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 2 * kGroups * 4; ++i) {
          const int r = i / (4 * kGroups), m = i / 4 % kGroups, e = i % 4;
          if (m & distance) continue;
          const float a = x[r][m][e], b = x[r][m + distance][e];
          x[r][m][e] = a + b;
          x[r][m + distance][e] = a - b;
        }
      }
    }
  }

  // The factor that transform leaves out.
  __device__ __forceinline__ static float factor() {
    return Cfg::kRotate ? rsqrtf(static_cast<float>(Cfg::kHeadDim)) : 1.0f;
  }

  // The mean of a few keys of the head, transformed as they will be: all blocks of a head get the same, one stores it.
  __device__ __forceinline__ void find_mean(float* k_mean) const {
    const int warp = threadIdx.x / 32, count = min(kMeanKeys, head.length);
    if (warp < kMeanKeys / 16) {
      int row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = warp * 16 + row_of_warp() + 8 * r;
        row[r] = i < count ? static_cast<int>(static_cast<long long>(i) * head.length / count) : head.length;
      }
      Input input;
      read(row, input);
#pragma unroll kUnrolled
      for (int part = 0; part < kParts; ++part) {
        Values x;
        transform(input, part, x);
#pragma unroll
        for (int i = 0; i < kGroups * 4; ++i) {
          float sum = x[0][i / 4][i % 4] + x[1][i / 4][i % 4];
#pragma unroll
          for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
          if (threadIdx.x % 32 < 4) shared.sum[warp][column_of(part, i / 4) + i % 4] = sum;
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
      if (k_mean != nullptr) k_mean[threadIdx.x] = mean * factor();
    }
    __syncthreads();
  }

  // A part of two rows, as it is to be cast: without the mean, and zeros where there is no row.
  template <bool kMean>
  __device__ __forceinline__ void prepare(const Input& input, const int (&row)[2], int part, Values& x) const {
    transform(input, part, x);
    if constexpr (kMean) {
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const float4 mean = *reinterpret_cast<const float4*>(shared.mean + column_of(part, m));
        const float four[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& value = x[i / 4][m][i % 4];
          value = row[i / 4] < head.length ? value - four[i % 4] : 0.0f;
        }
      }
    }
  }

  // What follows cannot be known to be what was computed from the input before, and kept for.
  __device__ __forceinline__ static void forget(Input& x) {
#pragma unroll
    for (int i = 0; i < 2 * kLoads; ++i) {
      unsigned(&words)[4] = reinterpret_cast<unsigned(&)[4]>(x[i / kLoads][i % kLoads]);
      asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
    }
  }

  // Tiles `tile` .. `stop` - 1. kMean: whether these are keys whose mean is to be subtracted; k_mean: where it is stored.
  template <bool kMean>
  __device__ __forceinline__ void run(int tile, int stop, unsigned char* codes, float* scales, float* k_mean) const {
    if constexpr (kMean) {
      const int first = tile * kTileRows + threadIdx.x / 2;
      head.prefetch(first, threadIdx.x % 2 * 64);
      if (Cfg::kHeadDim > 128) head.prefetch(first, threadIdx.x % 2 * 64 + 128);
      find_mean(tile == 0 ? k_mean : nullptr);
    }
    for (; tile < stop; ++tile) {
      cast_tile<kMean>(tile, codes, scales);
      if (tile + 1 < stop) __syncthreads();  // all have read what the next tile overwrites
    }
  }

  template <bool kMean>
  __device__ __forceinline__ void cast_tile(int tile, unsigned char* codes, float* scales) const {
    const int first = tile * kTileRows + threadIdx.x / 32 * 16 + row_of_warp(), row[2] = {first, first + 8};
    Input input;
    read(row, input);
    float amax = 0.0f;
    Values x;
#pragma unroll kUnrolled
    for (int part = 0; part < kParts; ++part) {
      prepare<kMean>(input, row, part, x);
#pragma unroll
      for (int i = 0; i < 2 * kGroups * 4; ++i) {
        amax = ptx::max_nan(amax, fabsf(x[i / (4 * kGroups)][i / 4 % kGroups][i % 4]));
      }
    }
    const float true_scale = scale_of(over_block<Cfg::kThreads>(shared.amax, amax) * factor(), kCodeMax);
    if (threadIdx.x == 0) scales[tile] = true_scale;
    const float scale = true_scale / factor(), inverse = __frcp_rn(scale);
    if constexpr (kParts > 1) forget(input);
#pragma unroll kUnrolled
    for (int part = 0; part < kParts; ++part) {
      if constexpr (kParts > 1) prepare<kMean>(input, row, part, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // eight columns of a row
        const int r = i / 2, group = i % 2 * 2;
        Pack<unsigned char, kVector> out;
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          out.values[c] = encode<Cfg::kInt8 ? Format::kInt8 : Format::kE4M3>(
              divide(x[r][group + c / 4][c % 4], scale, inverse));
        }
        if (row[r] < head.length) {
          *reinterpret_cast<Pack<unsigned char, kVector>*>(
              codes + static_cast<long long>(row[r]) * Cfg::kHeadDim + column_of(part, group)) = out;
        }
      }
    }
  }
};

}  // namespace greenfast
