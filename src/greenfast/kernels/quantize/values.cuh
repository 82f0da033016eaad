// Quantizes a tile of 128 rows of V with one scale, and transposes it. Inputs are read once. A thread holds eight
// adjacent columns of every kRows-th row.
#pragma once

#include "quantize/common.cuh"

namespace greenfast {

template <class Cfg>
struct VStorage {
  unsigned tile[kRowBlock * Cfg::kHeadDim / 4];  // of codes, as VQuantizer::place orders them
  float amax[Cfg::kThreads / 32];
};

template <class Cfg>
struct VQuantizer {
  static constexpr int kRowThreads = Cfg::kHeadDim / kVector;  // that hold a row
  static constexpr int kRows = Cfg::kThreads / kRowThreads;    // at a time
  static constexpr int kSteps = kRowBlock / kRows;
  static constexpr float kCodeMax = 448.0f;
  static_assert(kRowBlock % kRows == 0, "whole steps in a tile");

  // Words of a tile's row are exchanged among each other so that threads that read 16 keys each meet in fewer banks.
  __device__ __forceinline__ static int word_index(int key, int word) {
    constexpr int kTurns = Cfg::kHeadDim / 16 < 8 ? Cfg::kHeadDim / 16 : 8;
    return key * Cfg::kHeadDim / 4 + (word ^ 4 * (key / 16 % kTurns));
  }

  // codes: (kHeadDim, padded) of the head; scales: of its tiles.
  __device__ __forceinline__ static void run(VStorage<Cfg>& shared, const HeadRows<Cfg>& head, int tile,
                                             unsigned char* codes, int padded, float* scales) {
    const int row = threadIdx.x / kRowThreads, column = threadIdx.x % kRowThreads * kVector;
    typename HeadRows<Cfg>::Loaded x[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) x[i] = head.load(tile * kRowBlock + i * kRows + row, column);
    unsigned max_pair = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const unsigned (&pairs)[kVector / 2] = reinterpret_cast<const unsigned (&)[kVector / 2]>(x[i]);
#pragma unroll
      for (int c = 0; c < kVector / 2; ++c) max_pair = max_abs_pair(max_pair, pairs[c]);
    }
    const float amax = max_of_pair<typename Cfg::In>(max_pair);
    const float scale = scale_of(block_max_nan<Cfg::kThreads>(shared.amax, amax), kCodeMax), inverse = __frcp_rn(scale);
    const unsigned finite_mask = scale == scale ? ~0u : 0u;
    if (threadIdx.x == 0) scales[tile] = scale;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      unsigned out[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float four[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) four[c] = divide(static_cast<float>(x[i].values[4 * h + c]), scale, inverse);
        out[h] = encode_four<Format::kE4M3>(four) & finite_mask;
      }
      *reinterpret_cast<uint2*>(shared.tile + word_index(i * kRows + row, column / 4)) = make_uint2(out[0], out[1]);
    }
    __syncthreads();
    const int first = tile * kRowBlock;
    constexpr int kChunks = kRowBlock / 16;
#pragma unroll
    for (int i = threadIdx.x; i < kChunks * Cfg::kHeadDim / 4; i += Cfg::kThreads) {
      const int key = i % kChunks * 16, word = i / kChunks;
      if (first + key >= padded) continue;
      unsigned words[4][4];  // word m of column c in [m][c]
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int even = key + 2 * m;
        const unsigned keys[4] = {shared.tile[word_index(even, word)], shared.tile[word_index(even + 1, word)],
                                  shared.tile[word_index(even + 8, word)], shared.tile[word_index(even + 9, word)]};
        transpose_bytes(keys, words[m]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        *reinterpret_cast<uint4*>(codes + (4ll * word + c) * padded + first + key) =
            make_uint4(words[0][c], words[1][c], words[2][c], words[3][c]);
      }
    }
  }
};

}  // namespace greenfast
