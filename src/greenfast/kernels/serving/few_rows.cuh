// Attention for row tiles of at most 16 rows, which decoding has: the same bits as consumer.cuh's, with rows as columns.
//
// S^T = K Q^T and O^T = V^T P^T, so that 8 or 16 rows are not padded to the 64 of a product's left operand, and all
// threads of a warpgroup share their softmax. P^T goes through shared memory. A row's sum of weights is added up in the
// order in which the threads of Consumer do it. V in rows is read into the registers of the left operand, whose row i of
// 16 is then column 2 i, or 2 i - 15 from 8 on: no product depends on it.
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
#include "serving/value_rows.cuh"

namespace greenfast::serving {

// The warpgroup that computes. A thread holds, of each 64 keys of S^T (or columns of O^T), those at 16 w + t / 4 and 8
// further on (w: its warp, t: its lane), of rows 8 n + 2 (t % 4) and the next one for all n: registers 4 n + 2 h + e.
template <class T>
struct FewRows {
  static constexpr int kRows = T::kFewRows, kOwn = kRows / 4;  // rows, and how many of them a thread holds
  static constexpr int kScores = kRows / 2;                    // registers of 64 keys, or of 64 columns
  static constexpr int kKeyParts = kTile / 64, kColumnParts = T::kHeadDim / 64;
  static constexpr int kSums = kRows / 8;                // rows to whose sum a thread contributes
  using Values = unsigned[kTile / 32][kColumnParts][4];  // left operands: of each 32 keys and 64 columns

  Consumer<T> c;
  Few<kRows>& few;
  float o[kColumnParts][kScores], all_o[kColumnParts][kScores];  // of the present chunk, and of those before it
  float max[kOwn], all_max[kOwn];
  float sum[kSums], sum_max[kSums], all_sum[kSums], all_sum_max[kSums];  // of rows sum_row(n), and their maxima

  __device__ __forceinline__ FewRows(const AttentionParams& p, Storage<T>& shared) : c(p, shared, 0), few(shared.few) {}

  // Register i is of the thread's own row `own(i)`, which is row(own(i)) of the tile.
  __device__ __forceinline__ static constexpr int own(int i) { return i / 4 * 2 + i % 2; }
  __device__ __forceinline__ static int row(int own) { return own / 2 * 8 + threadIdx.x % 4 * 2 + own % 2; }
  // The key, or column, of register i of 64.
  __device__ __forceinline__ static int place(int i) {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
  }
  // The column of register i of 64.
  __device__ __forceinline__ static int column(int i) {
    if constexpr (!T::kRowValues) return place(i);
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 * 2 + i / 2 % 2;
  }
  // Sums: sixteen threads share a row; a thread adds up keys 8 j + 2 (t % 4) and the next one for j = t / 4 % 4, + 4 ...
  __device__ __forceinline__ static int sum_row(int n) { return n * 8 + threadIdx.x % 128 / 16; }

  __device__ __forceinline__ void start_scores(float (&s)[kKeyParts][kScores]) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int m = 0; m < kKeyParts; ++m) {
#pragma unroll
      for (int i = 0; i < T::kHeadDim / 32; ++i) {
        const int panel = i * 32 / T::kPanel, within = i * 32 % T::kPanel;
        const unsigned long long q = c.q_tile.at(panel * sizeof(c.shared.q[0][0]) + within);
        const unsigned long long k = c.k_tiles.at(c.k_ring.stage * sizeof(c.shared.k[0]) +
                                                  panel * sizeof(c.shared.k[0][0]) + m * 64 * T::kPanel + within);
        i == 0 ? ptx::wgmma_set(s[m], k, q) : ptx::wgmma_add(s[m], k, q);
      }
    }
    ptx::wgmma_commit();
  }

  // values: with kRowValues.
  __device__ __forceinline__ void start_output([[maybe_unused]] Values& values) {
    constexpr unsigned kKeysStep = sizeof(few.weights[0]) / 16, kRowsStep = 128 / 16;
    const unsigned low = ptx::shared_address(few.weights) >> 4 | kKeysStep << 16;
    if constexpr (T::kRowValues) {
#pragma unroll
      for (int t = 0; t < kTile / 32; ++t) {
#pragma unroll
        for (int n = 0; n < kColumnParts; ++n) ptx::pin(values[t][n]);
      }
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kTile / 32; ++t) {
      const unsigned long long weights = static_cast<unsigned long long>(kRowsStep) << 32 | (low + 2 * t * kKeysStep);
#pragma unroll
      for (int n = 0; n < kColumnParts; ++n) {
        if constexpr (T::kRowValues) {
          ptx::wgmma_add(o[n], values[t][n], weights);
        } else {
          const unsigned at = c.v_ring.stage * sizeof(c.shared.v[0]) + 2 * t * T::kGroupBytes + n * 64 * 16;
          ptx::wgmma_add(o[n], c.v_tiles.at(at), weights);
        }
      }
    }
    ptx::wgmma_commit();
  }

  // Of V's rows.
  __device__ __forceinline__ void load_values(Values& values) const {
    const unsigned char* const stage = c.shared.v[c.v_ring.stage][0];
#pragma unroll
    for (int t = 0; t < kTile / 32; ++t) {
#pragma unroll
      for (int n = 0; n < kColumnParts; ++n) {
        const int column = n * 64 + threadIdx.x / 32 % 4 * 16;
        const unsigned char* const panel = stage + column / T::kPanel * kTile * T::kPanel;
        unsigned x[4];
        ptx::ldmatrix_x4_trans(x, panel + swizzled<T::kPanel>(t * 32 + threadIdx.x % 32, column % T::kPanel / 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[t][n][i] = __byte_perm(x[i / 2 * 2], x[i / 2 * 2 + 1], i % 2 == 0 ? kEvenColumn : kOddColumn);
        }
      }
    }
  }

  // Turns raw scores into weights, in shared memory as codes and as numbers, and the chunk's maxima into those with
  // this tile; gives the factors for what came before.
  __device__ __forceinline__ void weigh(float (&s)[kKeyParts][kScores], const KeyFactors& keys, int first_key,
                                        float (&tops)[4][kRows], bool masked, float (&rescale)[kOwn]) {
    float factor[kOwn], top[kOwn], bias[kOwn];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      factor[r] = c.rows.factor[row(r)];
      top[r] = -CUDART_INF_F;
    }
#pragma unroll
    for (int m = 0; m < kKeyParts; ++m) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int key = m * 64 + place(i), r = own(i);
        float& x = s[m][i];
        if constexpr (T::kExponents) {
          const float log2_value = T::kTokenScales ? keys.log2_value[key] : 0.0f;
          if constexpr (T::kTokenScales) x *= keys.scale[key];
          x = T::kSoftcap ? fmaf(ptx::tanh(x * factor[r]), c.p.softcap * kLog2E, log2_value)
                          : fmaf(x, factor[r], log2_value);
        }
        if (masked) {
          const int at = first_key + key;
          x = at >= c.rows.begin[row(r)] && at < c.rows.end[row(r)] ? x : -CUDART_INF_F;
        }
        top[r] = fmaxf(top[r], x);
      }
    }
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      if constexpr (!T::kExponents) top[r] *= factor[r];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], step));
      if (lane < 4) tops[threadIdx.x / 32 % 4][row(r)] = top[r];
    }
    c.sync_rows();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      top[r] = fmaxf(fmaxf(tops[0][row(r)], tops[1][row(r)]), fmaxf(tops[2][row(r)], tops[3][row(r)]));
      rescale[r] = rescale_for(max[r], top[r]);
      bias[r] = kOffset - (max[r] == -CUDART_INF_F ? 0.0f : max[r]);
    }
#pragma unroll
    for (int m = 0; m < kKeyParts; ++m) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int r = own(i);
        float& x = s[m][i];
        x = ptx::ex2(T::kExponents ? x + bias[r] : fmaf(x, factor[r], bias[r]));
        few.numbers[row(r)][m * 64 + place(i)] = x;
      }
#pragma unroll
      for (int n = 0; n < kScores; n += 4) store_codes(m, n / 4, s[m] + n);
    }
    ptx::fence_proxy_async();
    c.sync_rows();
  }

  // The factor for what came before a tile with that maximum, which max then follows.
  __device__ __forceinline__ static float rescale_for(float& max, float top) {
    top = top > max + kSlack ? top : max;
    const float factor = ptx::ex2(max - (top == -CUDART_INF_F ? 0.0f : top));
    max = top;
    return factor;
  }

  // Two keys of two rows: with the neighbour's, four bytes of a row's 16 keys, in the order in which V has them.
  __device__ __forceinline__ void store_codes(int m, int n, const float* x) const {
    const unsigned mine = ptx::pack_e4m3({x[0], x[2], x[1], x[3]});
    const unsigned other = __shfl_xor_sync(0xffffffffu, mine, 4);
    const int lane = threadIdx.x % 32, odd = lane / 4 % 2;
    const unsigned word = __byte_perm(mine, other, odd ? 0x3726 : 0x5140);
    unsigned char* const to = few.weights[m * 4 + threadIdx.x / 32 % 4][n * 8 + lane % 4 * 2 + odd];
    *reinterpret_cast<unsigned*>(to + lane / 8 * 4) = word;
  }

  // Adds the tile's weights to the sums of rows.
  __device__ __forceinline__ void add_weights(const KeyFactors& keys, const float (&tops)[4][kRows]) {
    const int chain = threadIdx.x / 4 % 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      const int r = sum_row(n);
      const float top = fmaxf(fmaxf(tops[0][r], tops[1][r]), fmaxf(tops[2][r], tops[3][r]));
      const float before = sum[n] * rescale_for(sum_max[n], top);
      float x = chain == 0 ? before : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = (chain + 4 * j) * 8 + column;
        const float2 w = *reinterpret_cast<const float2*>(&few.numbers[r][key]);
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
    for (int r = 0; r < kOwn; ++r) max[r] = -CUDART_INF_F;
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      sum[n] = 0.0f;
      sum_max[n] = -CUDART_INF_F;
    }
#pragma unroll
    for (int n = 0; n < kColumnParts; ++n) {
#pragma unroll
      for (float& x : o[n]) x = 0.0f;
    }
  }

  // Adds a chunk to those before it, or leaves it as a partial result. chunk: of the sequence.
  __device__ __forceinline__ void end_chunk(int chunk) {
    float total[kSums];
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      total[n] = sum[n] + __shfl_xor_sync(0xffffffffu, sum[n], 1);
      total[n] += __shfl_xor_sync(0xffffffffu, total[n], 2);
    }
    const Work& work = c.rows.work;
    if (work.begin > 0) {
      leave(chunk - work.tile.first_chunk() - work.begin, o, sum_max, total);
    } else {
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        const Merge merge(all_sum_max[n], sum_max[n]);
        all_sum[n] = merge(all_sum[n], total[n]);
      }
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        const Merge merge(all_max[r], max[r]);
#pragma unroll
        for (int n = 0; n < kColumnParts; ++n) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) {
            if (own(i) == r) all_o[n][i] = merge(all_o[n][i], o[n][i]);
          }
        }
      }
    }
    start_chunk();
  }

  // Kept in L2, out of which the next tiles of K and V would push it before its merge. of_max, of_sum: of rows sum_row(n).
  __device__ __forceinline__ void leave(int slot, const float (&x)[kColumnParts][kScores], const float (&of_max)[kSums],
                                        const float (&of_sum)[kSums]) const {
    float* const to = c.partial(blockIdx.x * (c.p.slots + 1) + min(slot, c.p.slots));  // more only with a wrong plan
    float* const first = to + row(0) * T::kHeadDim + column(0);  // from which all others have constant distances
    const int stop = c.partial_rows(c.rows.work.tile);
    const ptx::CacheHint kept = ptx::evict_last();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      if (row(r) >= stop) continue;
      float* const of_row = first + (row(r) - row(0)) * T::kHeadDim;
#pragma unroll
      for (int j = 0; j < kColumnParts * kScores; ++j) {
        const int n = j / kScores, i = j % kScores;
        if (own(i) == r) ptx::store(of_row + (n * 64 + column(i) - column(0)), x[n][i], kept);
      }
    }
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      if (threadIdx.x % 16 != 0 || sum_row(n) >= stop) continue;
      to[c.p.slot_rows * T::kHeadDim + sum_row(n)] = of_max[n];
      to[c.p.slot_rows * (T::kHeadDim + 1) + sum_row(n)] = of_sum[n];
    }
  }

  // Writes the rows of a tile that this block has worked on alone.
  __device__ __forceinline__ void store() {
    const Work& work = c.rows.work;
    const int stop = work.tile.rows(kRows, c.p.batch.group);
    const float unit = T::kScalesAhead ? c.rows.unit : c.unit_of(work);
    c.sync_rows();  // sums of weights are over, and with them few.numbers
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      if (threadIdx.x % 16 == 0) few.tops[0][0][sum_row(n)] = all_sum[n];
    }
    c.sync_rows();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int at = row(r);
      if (at >= stop) continue;
      const typename Consumer<T>::Finish finish(c.p, work, at, all_max[r], few.tops[0][0][at],
                                                threadIdx.x % 128 < 32 && threadIdx.x % 32 < 4, unit);
      typename T::Out* const out = c.out_row(work, at);
#pragma unroll
      for (int n = 0; n < kColumnParts; ++n) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          if (own(i) == r) out[n * 64 + column(i)] = static_cast<typename T::Out>(finish(all_o[n][i]));
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    while (c.begin_work()) {
      start_chunk();
#pragma unroll
      for (int r = 0; r < kOwn; ++r) all_max[r] = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        all_sum[n] = 0.0f;
        all_sum_max[n] = -CUDART_INF_F;
      }
#pragma unroll
      for (int n = 0; n < kColumnParts; ++n) {
#pragma unroll
        for (float& x : all_o[n]) x = 0.0f;
      }
      c.find_ranges();
      const int first = __shfl_sync(0xffffffffu, c.rows.work.first_tile(), 0);
      const int stop = __shfl_sync(0xffffffffu, c.rows.work.stop_tile(), 0);
      for (int tile = first; tile < stop; ++tile) {
        float s[kKeyParts][kScores], rescale[kOwn];
        const int stage = c.k_ring.stage;
        c.shared.k_full[stage].wait(c.k_ring.parity);
        start_scores(s);
        ptx::wgmma_wait<0>();  // and P V of the tile before it
#pragma unroll
        for (int m = 0; m < kKeyParts; ++m) ptx::pin(s[m]);
        pin_output();
        c.arrive(c.shared.k_empty[stage]);
        if (tile > first) {
          if constexpr (!T::kRowValues) c.release_values();
          if (tile % (kChunk / kTile) == 0) end_chunk((tile - 1) / (kChunk / kTile));
        }
        if constexpr (T::kTokenScales) c.shared.factors_full[stage].wait(c.k_ring.parity);
        c.k_ring.advance();
        const KeyFactors& keys = c.shared.factors[T::kTokenScales ? stage : 0];
        float (&tops)[4][kRows] = few.tops[tile % 2];
        weigh(s, keys, tile * kTile, tops, tile < c.whole_first || tile >= c.whole_stop, rescale);
        bool same = true;
#pragma unroll
        for (int r = 0; r < kOwn; ++r) same = same && rescale[r] == 1.0f;
        if (__any_sync(0xffffffffu, !same)) {
#pragma unroll
          for (int n = 0; n < kColumnParts; ++n) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[n][i] *= rescale[own(i)];
          }
        }
        if (!c.prepare_values(tile)) c.await_values();
        [[maybe_unused]] Values values;
        if constexpr (T::kRowValues) load_values(values);
        start_output(values);
        add_weights(keys, tops);
        if constexpr (T::kRowValues) c.release_values();  // V is in registers, and the tile's factors were read
      }
      if (first < stop) {
        ptx::wgmma_wait<0>();
        pin_output();
        if constexpr (!T::kRowValues) c.release_values();
        end_chunk((stop - 1) / (kChunk / kTile));
      }
      if (c.rows.work.whole()) {
        store();
      } else {
        if (c.rows.work.begin == 0) leave(c.p.slots, all_o, all_sum_max, all_sum);
        c.end_piece(plan_of(c.p));
      }
    }
    ptx::launch_dependent_grids();
    c.merge_pieces(plan_of(c.p));
  }

  __device__ __forceinline__ void pin_output() {
#pragma unroll
    for (int n = 0; n < kColumnParts; ++n) ptx::pin(o[n]);
  }
};

}  // namespace greenfast::serving
