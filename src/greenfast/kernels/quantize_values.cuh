// V to codes, transposed, with a scale for a whole head or for each of its channels: a cluster of kCluster blocks takes a
// head, reads it for the largest magnitudes, which cross the cluster through shared memory, and again, from the L2 cache,
// for the cast. A thread owns eight neighbouring columns of every so many-th row.
//
// Of each 16 keys the order is 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
#pragma once

#include "bytes.cuh"
#include "ptx/cluster.cuh"
#include "quantize_common.cuh"

namespace greenfast {

// Statistics of a block, by column, and a tile of codes; never both at once.
template <class Cfg>
struct ValuesStorage {
  union {
    float partial[Cfg::kThreads / 32][Cfg::kHeadDim];
    unsigned char tile[kTileRows * Cfg::kHeadDim];
  };
  float own[Cfg::kHeadDim];    // of this block, for the others of the cluster
  float total[Cfg::kHeadDim];  // of the cluster
};

template <class Cfg>
struct ValuesQuantizer {
  static constexpr int kRowThreads = Cfg::kHeadDim / kVector;  // that hold a row
  static constexpr int kRows = Cfg::kThreads / kRowThreads;    // at a time
  static constexpr int kSteps = kTileRows / kRows;             // of a tile
  static constexpr int kAhead = kSteps < 8 ? kSteps : 8;       // rows on their way to a thread
  static_assert(kTileRows % kRows == 0, "whole steps in a tile");
  using Columns = float[kVector];

  ValuesStorage<Cfg>& shared;
  const HeadRows<Cfg> head;
  const int row, column;  // of this thread: the first at a time, and of eight
  int first, end;  // rows of this block

  __device__ __forceinline__ ValuesQuantizer(ValuesStorage<Cfg>& shared, const HeadRows<Cfg>& head, int rank)
      : shared(shared), head(head), row(threadIdx.x / kRowThreads), column(threadIdx.x % kRowThreads * kVector) {
    const int share = (head.length + kTileRows * Cfg::kCluster - 1) / (kTileRows * Cfg::kCluster) * kTileRows;
    first = rank * share;
    end = min(head.length, first + share);
  }

  // Calls body(step, x) for this thread's rows of a tile.
  template <class Body>
  __device__ __forceinline__ void each_row(int tile, Body body) const {
#pragma unroll
    for (int begin = 0; begin < kSteps; begin += kAhead) {
      typename HeadRows<Cfg>::Loaded loaded[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) loaded[i] = head.load(tile + (begin + i) * kRows + row, column);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        Columns x;
#pragma unroll
        for (int c = 0; c < kVector; ++c) x[c] = static_cast<float>(loaded[i].values[c]);
        body(begin + i, x);
      }
    }
  }

  // The largest of the block in each column, in shared.own.
  __device__ __forceinline__ void over_rows(Columns& amax) const {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
#pragma unroll
      for (int lanes = kRowThreads; lanes < 32; lanes *= 2) {
        amax[c] = ptx::max_nan(amax[c], __shfl_xor_sync(0xffffffffu, amax[c], lanes));
      }
      if (threadIdx.x % 32 < kRowThreads) shared.partial[threadIdx.x / 32][column + c] = amax[c];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < Cfg::kHeadDim; c += Cfg::kThreads) {
      float value = shared.partial[0][c];
      for (int warp = 1; warp < Cfg::kThreads / 32; ++warp) value = ptx::max_nan(value, shared.partial[warp][c]);
      shared.own[c] = value;
    }
  }

  // The first `count` of shared.own to the largest over the cluster, in shared.total.
  __device__ __forceinline__ void over_cluster(int count) const {
    sync();
    for (int c = threadIdx.x; c < count; c += Cfg::kThreads) {
      float value = shared.own[c];
      if constexpr (Cfg::kCluster > 1) {
        for (int rank = 0; rank < Cfg::kCluster; ++rank) value = ptx::max_nan(value, ptx::load_from(&shared.own[c], rank));
      }
      shared.total[c] = value;
    }
    sync();  // nobody leaves with what another still reads
  }
  __device__ __forceinline__ static void sync() {
    if constexpr (Cfg::kCluster > 1) {
      ptx::cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // The scales of this thread's columns; `found`: those of the head.
  __device__ __forceinline__ void choose_scales(float* found, Columns& scale) const {
    constexpr float kCodeMax = 448.0f;
    Columns amax = {};
    for (int tile = first; tile < end; tile += kTileRows) {
      each_row(tile, [&](int, const Columns& x) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) amax[c] = ptx::max_nan(amax[c], fabsf(x[c]));
      });
    }
    if constexpr (Cfg::kChannels) {
      over_rows(amax);
      over_cluster(Cfg::kHeadDim);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        scale[c] = scale_of(shared.total[column + c], kCodeMax);
        if (first == 0 && row == 0) found[column + c] = scale[c];
      }
    } else {
      float most = amax[0];
#pragma unroll
      for (int c = 1; c < kVector; ++c) most = ptx::max_nan(most, amax[c]);
      most = over_block<Cfg::kThreads>(shared.partial[0], most);
      if (threadIdx.x == 0) shared.own[0] = most;
      over_cluster(1);
#pragma unroll
      for (int c = 0; c < kVector; ++c) scale[c] = scale_of(shared.total[0], kCodeMax);
      if (first == 0 && threadIdx.x == 0) *found = scale[0];
    }
  }

  // Words of a tile's row are exchanged among each other so that threads that read 16 keys each meet in fewer banks.
  __device__ __forceinline__ static int place(int key, int word) {
    constexpr int kTurns = Cfg::kHeadDim / 16 < 8 ? Cfg::kHeadDim / 16 : 8;
    return key * Cfg::kHeadDim / 4 + (word ^ 4 * (key / 16 % kTurns));
  }

  // V^T, a tile of codes at a time through shared memory.
  __device__ __forceinline__ void cast(const Columns& scale, unsigned char* codes) const {
    const int padded = (head.length + 15) / 16 * 16;
    unsigned* words = reinterpret_cast<unsigned*>(shared.tile);
    Columns inverse;
#pragma unroll
    for (int c = 0; c < kVector; ++c) inverse[c] = __frcp_rn(scale[c]);
    for (int tile = first; tile < end; tile += kTileRows) {
      each_row(tile, [&](int step, const Columns& x) {
        Pack<unsigned char, kVector> out;
#pragma unroll
        for (int c = 0; c < kVector; ++c) out.values[c] = encode<Format::kE4M3>(divide(x[c], scale[c], inverse[c]));
        *reinterpret_cast<Pack<unsigned char, kVector>*>(words + place(step * kRows + row, column / 4)) = out;
      });
      __syncthreads();
      constexpr int kChunks = kTileRows / 16;
      for (int i = threadIdx.x; i < kChunks * Cfg::kHeadDim / 4; i += Cfg::kThreads) {
        const int key = i % kChunks * 16, word = i / kChunks;
        if (tile + key >= padded) continue;
        unsigned out[4][4];  // word m of column c in out[m][c]
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int even = key + 2 * m;
          const unsigned keys[4] = {words[place(even, word)], words[place(even + 1, word)],
                                    words[place(even + 8, word)], words[place(even + 9, word)]};
          transpose_bytes(keys, out[m]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          *reinterpret_cast<uint4*>(codes + (4ll * word + c) * padded + tile + key) =
              make_uint4(out[0][c], out[1][c], out[2][c], out[3][c]);
        }
      }
      __syncthreads();
    }
  }
};

}  // namespace greenfast
