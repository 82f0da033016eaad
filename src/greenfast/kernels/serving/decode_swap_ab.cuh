// Attention for row tiles of at most 16 rows, for decoding. Unlike consumer.cuh it swaps the operands: S^T = K Q^T and
// O^T = V^T P^T, with rows as the N dimension. So 8 or 16 rows are not padded to the 64 of wgmma's M, and all threads
// of the warpgroup share their softmax. The results have the same bits as consumer.cuh's.
//
// P^T goes through shared memory. A row sum is added up in the order of Softmax. Row-major V is read into registers as
// the A operand; row i of 16 is then column 2 i, or 2 i - 15 from 8 on. No product depends on this order.
#pragma once

#include <math_constants.h>

#include "ptx/e4m3.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/store.cuh"
#include "ptx/wgmma.cuh"
#include "serving/consumer.cuh"
#include "serving/merge.cuh"
#include "serving/transpose_v.cuh"

namespace greenfast::serving {

// Run by the single consumer warpgroup. Of each 64 keys of S^T (or columns of O^T), a thread holds those at 16 w + t /
// 4 and 8 below (w: its warp, t: its lane), for rows 8 n + 2 (t % 4) and the next one for all n: registers 4 n + 2 h +
// e.
template <class T>
struct DecodeSwapAB {
  static constexpr int kRows = T::kDecodeRows, kThreadRows = kRows / 4;  // rows, and rows per thread
  static constexpr int kScores = kRows / 2;                              // registers per 64 keys, or 64 columns
  static constexpr int kKeyBlocks = kBlockN / 64, kColumnBlocks = T::kHeadDim / 64;
  static constexpr int kThreadSums = kRows / 8;                 // row sums that a thread contributes to
  using VFragments = unsigned[kBlockN / 32][kColumnBlocks][4];  // A operands, per 32 keys and 64 columns

  Consumer<T> c;
  DecodeStorage<kRows>& decode;
  float o[kColumnBlocks][kScores], total_o[kColumnBlocks][kScores];  // of the current chunk, and over earlier chunks
  float max[kThreadRows], total_max[kThreadRows];
  float sum[kThreadSums], sum_max[kThreadSums], total_sum[kThreadSums],
      total_sum_max[kThreadSums];  // row sums of rows sum_row(n), and their maxima

  __device__ __forceinline__ DecodeSwapAB(const AttentionParams& p, Storage<T>& shared)
      : c(p, shared, 0), decode(shared.decode) {}

  // Register i belongs to the thread's row thread_row(i). In the tile this is row(thread_row(i)).
  __device__ __forceinline__ static constexpr int thread_row(int i) { return i / 4 * 2 + i % 2; }
  __device__ __forceinline__ static int row(int thread_row) {
    return thread_row / 2 * 8 + threadIdx.x % 4 * 2 + thread_row % 2;
  }
  // The key of register i, out of 64.
  __device__ __forceinline__ static int key_of(int i) {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
  }
  // The column of register i, out of 64.
  __device__ __forceinline__ static int column(int i) {
    if constexpr (!T::kRowMajorV) return key_of(i);
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2 + i / 2 % 2;
  }
  // Row sums: 16 threads share a row. A thread adds keys 8 j + 2 (t % 4) and the next one for j = t / 4 % 4, + 4 ...
  __device__ __forceinline__ static int sum_row(int n) { return n * 8 + threadIdx.x % 128 / 16; }

  __device__ __forceinline__ void start_qk(float (&s)[kKeyBlocks][kScores]) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < T::kHeadDim / 32; ++i) {
        const int panel = i * 32 / T::kPanel, panel_offset = i * 32 % T::kPanel;
        const unsigned long long q = c.q_operand.at(panel * sizeof(c.shared.q[0][0]) + panel_offset);
        const unsigned long long k =
            c.k_operands.at(c.k_ring.stage * sizeof(c.shared.k[0]) + panel * sizeof(c.shared.k[0][0]) +
                            m * 64 * T::kPanel + panel_offset);
        i == 0 ? ptx::wgmma_set(s[m], k, q) : ptx::wgmma_add(s[m], k, q);
      }
    }
    ptx::wgmma_commit();
  }

  // v: with kRowMajorV, else unused.
  __device__ __forceinline__ void start_pv([[maybe_unused]] VFragments& v) {
    constexpr unsigned kKeysStep = sizeof(decode.p_codes[0]) / 16, kRowsStep = 128 / 16;
    const unsigned low = ptx::shared_address(decode.p_codes) >> 4 | kKeysStep << 16;
    if constexpr (T::kRowMajorV) {
#pragma unroll
      for (int t = 0; t < kBlockN / 32; ++t) {
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) ptx::pin(v[t][n]);
      }
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kBlockN / 32; ++t) {
      const unsigned long long p_codes = static_cast<unsigned long long>(kRowsStep) << 32 | (low + 2 * t * kKeysStep);
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        if constexpr (T::kRowMajorV) {
          ptx::wgmma_add(o[n], v[t][n], p_codes);
        } else {
          const unsigned offset = c.v_ring.stage * sizeof(c.shared.v[0]) + 2 * t * T::kGroupBytes + n * 64 * 16;
          ptx::wgmma_add(o[n], c.v_operands.at(offset), p_codes);
        }
      }
    }
    ptx::wgmma_commit();
  }

  // Loads row-major V to registers, transposed.
  __device__ __forceinline__ void load_v(VFragments& v) const {
    const unsigned char* const stage = c.shared.v[c.v_ring.stage][0];
#pragma unroll
    for (int t = 0; t < kBlockN / 32; ++t) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
        const int column = n * 64 + threadIdx.x / 32 % 4 * 16;
        const unsigned char* const panel = stage + column / T::kPanel * kBlockN * T::kPanel;
        unsigned x[4];
        ptx::ldmatrix_x4_trans(x, panel + swizzled<T::kPanel>(t * 32 + threadIdx.x % 32, column % T::kPanel / 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[t][n][i] = __byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], i % 2 == 0 ? kEvenColumn : kOddColumn);
        }
      }
    }
  }

  // Writes P of raw scores to shared memory, as E4M3 and fp32; updates the chunk's row maxima; returns in `rescale` the
  // factors for earlier tiles.
  __device__ __forceinline__ void online_softmax(float (&s)[kKeyBlocks][kScores], const KeyScales& keys, int first_key,
                                                 float (&warp_max)[4][kRows], bool masked,
                                                 float (&rescale)[kThreadRows]) {
    float factor[kThreadRows], tile_max[kThreadRows], bias[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      factor[r] = c.rows.scale_log2[row(r)];
      tile_max[r] = -CUDART_INF_F;
    }
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int key = m * 64 + key_of(i), r = thread_row(i);
        float& x = s[m][i];
        if constexpr (T::kScaledScores) {
          const float log2_value = T::kTokenScales ? keys.log2_value[key] : 0.0f;
          if constexpr (T::kTokenScales) x *= keys.scale[key];
          x = T::kSoftcap ? fmaf(ptx::tanh(x * factor[r]), c.p.softcap * kLog2E, log2_value)
                          : fmaf(x, factor[r], log2_value);
        }
        if (masked) {
          const int key_index = first_key + key;
          x = key_index >= c.rows.begin[row(r)] && key_index < c.rows.end[row(r)] ? x : -CUDART_INF_F;
        }
        tile_max[r] = fmaxf(tile_max[r], x);
      }
    }
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      if constexpr (!T::kScaledScores) tile_max[r] *= factor[r];
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xffffffffu, tile_max[r], step));
      if (lane < 4) warp_max[threadIdx.x / 32 % 4][row(r)] = tile_max[r];
    }
    c.sync_rows();
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      tile_max[r] =
          fmaxf(fmaxf(warp_max[0][row(r)], warp_max[1][row(r)]), fmaxf(warp_max[2][row(r)], warp_max[3][row(r)]));
      rescale[r] = update_max(max[r], tile_max[r]);
      bias[r] = kMaxOffset - (max[r] == -CUDART_INF_F ? 0.0f : max[r]);
    }
#pragma unroll
    for (int m = 0; m < kKeyBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int r = thread_row(i);
        float& x = s[m][i];
        x = ptx::ex2(T::kScaledScores ? x + bias[r] : fmaf(x, factor[r], bias[r]));
        decode.p_fp32[row(r)][m * 64 + key_of(i)] = x;
      }
#pragma unroll
      for (int n = 0; n < kScores; n += 4) store_p(m, n / 4, s[m] + n);
    }
    ptx::fence_proxy_async();
    c.sync_rows();
  }

  // Updates max with a tile's maximum (lazily, see kRescaleThreshold) and returns the factor for earlier tiles.
  __device__ __forceinline__ static float update_max(float& max, float tile_max) {
    tile_max = tile_max > max + kRescaleThreshold ? tile_max : max;
    const float factor = ptx::ex2(max - (tile_max == -CUDART_INF_F ? 0.0f : tile_max));
    max = tile_max;
    return factor;
  }

  // Packs two keys of two rows; with the neighbour lane's, four bytes of a row's group of 16 keys, in KEY_ORDER.
  __device__ __forceinline__ void store_p(int m, int n, const float* x) const {
    const unsigned mine = ptx::pack_e4m3({x[0], x[2], x[1], x[3]});
    const unsigned other = __shfl_xor_sync(0xffffffffu, mine, 4);
    const int lane = threadIdx.x % 32, odd = lane / 4 % 2;
    const unsigned word = __byte_perm(mine, other, odd ? 0x3726 : 0x5140);
    unsigned char* const dst = decode.p_codes[m * 4 + threadIdx.x / 32 % 4][n * 8 + lane % 4 * 2 + odd];
    *reinterpret_cast<unsigned*>(dst + lane / 8 * 4) = word;
  }

  // Adds the tile's P to the row sums.
  __device__ __forceinline__ void add_to_row_sums(const KeyScales& keys, const float (&warp_max)[4][kRows]) {
    const int chain = threadIdx.x / 4 % 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kThreadSums; ++n) {
      const int r = sum_row(n);
      const float tile_max = fmaxf(fmaxf(warp_max[0][r], warp_max[1][r]), fmaxf(warp_max[2][r], warp_max[3][r]));
      const float before = sum[n] * update_max(sum_max[n], tile_max);
      float x = chain == 0 ? before : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = (chain + 4 * j) * 8 + column;
        const float2 w = *reinterpret_cast<const float2*>(&decode.p_fp32[r][key]);
        if constexpr (T::kTokenScales) {
          x = fmaf(w.x, keys.inverse_value[key], x);
          x = fmaf(w.y, keys.inverse_value[key + 1], x);
        } else {
          x += w.x;
          x += w.y;
        }
      }
      x += __shfl_xor_sync(0xffffffffu, x, 4);
      sum[n] = x + __shfl_xor_sync(0xffffffffu, x, 8);
    }
  }

  __device__ __forceinline__ void start_chunk() {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) max[r] = -CUDART_INF_F;
#pragma unroll
    for (int n = 0; n < kThreadSums; ++n) {
      sum[n] = 0.0f;
      sum_max[n] = -CUDART_INF_F;
    }
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (float& x : o[n]) x = 0.0f;
    }
  }

  // Adds the finished chunk to the totals, or writes it as a partial result. chunk: its index in the sequence.
  __device__ __forceinline__ void flush_chunk(int chunk) {
    float total[kThreadSums];
#pragma unroll
    for (int n = 0; n < kThreadSums; ++n) {
      total[n] = sum[n] + __shfl_xor_sync(0xffffffffu, sum[n], 1);
      total[n] += __shfl_xor_sync(0xffffffffu, total[n], 2);
    }
    const Work& work = c.rows.work;
    if (work.begin > 0) {
      write_partial(chunk - work.tile.first_chunk() - work.begin, o, sum_max, total);
    } else {
#pragma unroll
      for (int n = 0; n < kThreadSums; ++n) {
        const Merge merge(total_sum_max[n], sum_max[n]);
        total_sum[n] = merge(total_sum[n], total[n]);
      }
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const Merge merge(total_max[r], max[r]);
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) {
            if (thread_row(i) == r) total_o[n][i] = merge(total_o[n][i], o[n][i]);
          }
        }
      }
    }
    start_chunk();
  }

  // Writes a partial result. evict_last keeps it in L2 until the merge; the next tiles of K and V would evict it.
  // row_max, row_sum: of rows sum_row(n).
  __device__ __forceinline__ void write_partial(int slot, const float (&x)[kColumnBlocks][kScores],
                                                const float (&row_max)[kThreadSums],
                                                const float (&row_sum)[kThreadSums]) const {
    float* const dst =
        c.partial(blockIdx.x * (c.p.slots + 1) + min(slot, c.p.slots));  // the clamp matters only for an invalid plan
    float* const first = dst + row(0) * T::kHeadDim + column(0);  // all other addresses are constant offsets from it
    const int stop = c.partial_rows(c.rows.work.tile);
    const ptx::CacheHint kept = ptx::evict_last();
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      if (row(r) >= stop) continue;
      float* const row_dst = first + (row(r) - row(0)) * T::kHeadDim;
#pragma unroll
      for (int j = 0; j < kColumnBlocks * kScores; ++j) {
        const int n = j / kScores, i = j % kScores;
        if (thread_row(i) == r) ptx::store(row_dst + (n * 64 + column(i) - column(0)), x[n][i], kept);
      }
    }
#pragma unroll
    for (int n = 0; n < kThreadSums; ++n) {
      if (threadIdx.x % 16 != 0 || sum_row(n) >= stop) continue;
      dst[c.p.slot_rows * T::kHeadDim + sum_row(n)] = row_max[n];
      dst[c.p.slot_rows * (T::kHeadDim + 1) + sum_row(n)] = row_sum[n];
    }
  }

  // Writes O and LSE of a row tile that only this block worked on.
  __device__ __forceinline__ void store() {
    const Work& work = c.rows.work;
    const int stop = work.tile.rows(kRows, c.p.batch.group);
    const float v_scale = T::kPrefetchScales ? c.rows.v_scale : c.v_scale_of(work);
    c.sync_rows();  // all warps have finished the row sums
#pragma unroll
    for (int n = 0; n < kThreadSums; ++n) {
      if (threadIdx.x % 16 == 0) decode.warp_max[0][0][sum_row(n)] = total_sum[n];
    }
    c.sync_rows();
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const int row_index = row(r);
      if (row_index >= stop) continue;
      const typename Consumer<T>::RowFinalizer finalize(c.p, work, row_index, total_max[r],
                                                        decode.warp_max[0][0][row_index],
                                                        threadIdx.x % 128 < 32 && threadIdx.x % 32 < 4, v_scale);
      typename T::Out* const out = c.out_row(work, row_index);
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          if (thread_row(i) == r) out[n * 64 + column(i)] = static_cast<typename T::Out>(finalize(total_o[n][i]));
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    while (c.load_work()) {
      start_chunk();
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) total_max[r] = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < kThreadSums; ++n) {
        total_sum[n] = 0.0f;
        total_sum_max[n] = -CUDART_INF_F;
      }
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
        for (float& x : total_o[n]) x = 0.0f;
      }
      c.find_unmasked();
      const int first = __shfl_sync(0xffffffffu, c.rows.work.n_block_min(), 0);
      const int stop = __shfl_sync(0xffffffffu, c.rows.work.n_block_max(), 0);
      for (int tile = first; tile < stop; ++tile) {
        float s[kKeyBlocks][kScores], rescale[kThreadRows];
        const int stage = c.k_ring.stage;
        c.shared.k_full[stage].wait(c.k_ring.parity);
        start_qk(s);
        ptx::wgmma_wait<0>();  // and for P V of the previous tile
#pragma unroll
        for (int m = 0; m < kKeyBlocks; ++m) ptx::pin(s[m]);
        pin_output();
        c.arrive(c.shared.k_empty[stage]);
        if (tile > first) {
          if constexpr (!T::kRowMajorV) c.release_v();
          if (tile % (kChunk / kBlockN) == 0) flush_chunk((tile - 1) / (kChunk / kBlockN));
        }
        if constexpr (T::kTokenScales) c.shared.scales_full[stage].wait(c.k_ring.parity);
        c.k_ring.advance();
        const KeyScales& keys = c.shared.key_scales[T::kTokenScales ? stage : 0];
        float (&warp_max)[4][kRows] = decode.warp_max[tile % 2];
        online_softmax(s, keys, tile * kBlockN, warp_max,
                       tile < c.n_block_unmasked_min || tile >= c.n_block_unmasked_max, rescale);
        bool same = true;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) same = same && rescale[r] == 1.0f;
        if (__any_sync(0xffffffffu, !same)) {
#pragma unroll
          for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[n][i] *= rescale[thread_row(i)];
          }
        }
        if (!c.prepare_v(tile)) c.wait_v();
        [[maybe_unused]] VFragments v;
        if constexpr (T::kRowMajorV) load_v(v);
        start_pv(v);
        add_to_row_sums(keys, warp_max);
        if constexpr (T::kRowMajorV) c.release_v();  // V is in registers, and the tile's scales have been read
      }
      if (first < stop) {
        ptx::wgmma_wait<0>();
        pin_output();
        if constexpr (!T::kRowMajorV) c.release_v();
        flush_chunk((stop - 1) / (kChunk / kBlockN));
      }
      if (c.rows.work.covers_tile()) {
        store();
      } else {
        if (c.rows.work.begin == 0) write_partial(c.p.slots, total_o, total_sum_max, total_sum);
        c.signal_split_done(plan_of(c.p));
      }
    }
    ptx::launch_dependent_grids();
    c.combine_splits(plan_of(c.p));
  }

  __device__ __forceinline__ void pin_output() {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) ptx::pin(o[n]);
  }
};

}  // namespace greenfast::serving
