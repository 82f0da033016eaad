// A tile of 128 rows of V to codes with one scale, transposed: read once. A thread owns eight neighbouring columns of
// every so many-th row.
//
// Of each 16 keys the order is 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
#pragma once

#include "quantize/common.cuh"

namespace greenfast {

template <class Cfg>
struct ValuesStorage {
  unsigned tile[kRowBlock * Cfg::kHeadDim / 4];  // of codes, as ValuesQuantizer::place orders them
  float amax[Cfg::kThreads / 32];
};

template <class Cfg>
struct ValuesQuantizer {
  static constexpr int kRowThreads = Cfg::kHeadDim / kVector;  // that hold a row
  static constexpr int kRows = Cfg::kThreads / kRowThreads;    // at a time
  static constexpr int kSteps = kRowBlock / kRows;
  static constexpr float kCodeMax = 448.0f;
  static_assert(kRowBlock % kRows == 0, "whole steps in a tile");

  // Words of a tile's row are exchanged among each other so that threads that read 16 keys each meet in fewer banks.
  __device__ __forceinline__ static int place(int key, int word) {
    constexpr int kTurns = Cfg::kHeadDim / 16 < 8 ? Cfg::kHeadDim / 16 : 8;
    return key * Cfg::kHeadDim / 4 + (word ^ 4 * (key / 16 % kTurns));
  }

  // codes: (kHeadDim, padded) of the head; scales: of its tiles.
  __device__ __forceinline__ static void run(ValuesStorage<Cfg>& shared, const HeadRows<Cfg>& head, int tile,
                                             unsigned char* codes, float* scales) {
    const int row = threadIdx.x / kRowThreads, column = threadIdx.x % kRowThreads * kVector;
    typename HeadRows<Cfg>::Loaded x[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) x[i] = head.load(tile * kRowBlock + i * kRows + row, column);
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const unsigned(&pairs)[kVector / 2] = reinterpret_cast<const unsigned(&)[kVector / 2]>(x[i]);
#pragma unroll
      for (int c = 0; c < kVector / 2; ++c) most = largest_pair(most, pairs[c]);
    }
    const float amax = larger<typename Cfg::In>(most);
    const float scale = scale_of(over_block<Cfg::kThreads>(shared.amax, amax), kCodeMax), inverse = __frcp_rn(scale);
    const unsigned known = scale == scale ? ~0u : 0u;
    if (threadIdx.x == 0) scales[tile] = scale;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      unsigned out[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float four[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) four[c] = divide(static_cast<float>(x[i].values[4 * h + c]), scale, inverse);
        out[h] = encode_four<Format::kE4M3>(four) & known;
      }
      *reinterpret_cast<uint2*>(shared.tile + place(i * kRows + row, column / 4)) = make_uint2(out[0], out[1]);
    }
    __syncthreads();
    const int padded = (head.length + 15) / 16 * 16, first = tile * kRowBlock;
    constexpr int kChunks = kRowBlock / 16;
#pragma unroll
    for (int i = threadIdx.x; i < kChunks * Cfg::kHeadDim / 4; i += Cfg::kThreads) {
      const int key = i % kChunks * 16, word = i / kChunks;
      if (first + key >= padded) continue;
      unsigned codes_of[4][4];  // word m of column c in [m][c]
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int even = key + 2 * m;
        const unsigned keys[4] = {shared.tile[place(even, word)], shared.tile[place(even + 1, word)],
                                  shared.tile[place(even + 8, word)], shared.tile[place(even + 9, word)]};
        transpose_bytes(keys, codes_of[m]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        *reinterpret_cast<uint4*>(codes + (4ll * word + c) * padded + first + key) =
            make_uint4(codes_of[0][c], codes_of[1][c], codes_of[2][c], codes_of[3][c]);
      }
    }
  }
};

}  // namespace greenfast
