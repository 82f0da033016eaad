// Axis: numbers that are not finite.
//
// The quantizer writes a NaN scale and zero codes for a block of keys that holds such a number, so that it cannot reach
// other rows. NaN scores would not work: the half-precision exp2 loses them.
#pragma once

#include "attention/mask.cuh"
#include "attention/variant.cuh"

namespace greenfast {

// Per row of a thread's two: whether it attends to non-finite K (then O and LSE are NaN) or V (then O is NaN).
struct NonFiniteRows {
  bool scores[2], values[2];
};

// With kScheduled: tells whether any key tile of a work tile is not finite, at one instruction for a tile. Only then
// are the rows looked for.
struct NonFiniteCheck {
  float product;  // NaN if a scale was

  __device__ __forceinline__ void start() { product = 0.0f; }
  __device__ __forceinline__ void add(float k_scale, float v_scale) { product = fmaf(k_scale, v_scale, product); }
  __device__ __forceinline__ bool found() const { return __any_sync(0xffffffffu, product != product); }
};

// Finds them for the 64 rows of a warpgroup from first_row on. A thread has rows t / 4 and t / 4 + 8 of its warp's 16
// (t: its lane).
template <class Traits>
struct NonFiniteRowsFinder {
  const FlashParams& p;
  const typename Traits::Sequence& sequence;
  const typename Traits::Keys& keys;
  const int first_row;

  // The first of the thread's two rows.
  __device__ __forceinline__ int row() const { return first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

  // Returns the flags of this thread's two rows. If one group of a block has a NaN scale, all have.
  __device__ __forceinline__ NonFiniteRows find(const ScoreScales<Traits>& scales) const {
    if constexpr (Traits::kWindow) return find_in_window();
    const typename Traits::Mask mask{sequence};
    const auto limit = [&](int index) { return max(0, mask.col_limit(index)); };
    const int col_end = limit(first_row + Traits::kRows - 1);
    int finite_keys = col_end, finite_values = col_end;  // all keys before it are finite
    if constexpr (Traits::kKeyBlockScales) {
      const size_t first = sequence.first_kv_block(keys);
      for (int block = threadIdx.x % 32; block * kRowBlock < col_end; block += 32) {
        const float k_scale = ptx::load_written(p.k_scale + (first + block) * (Traits::kFineScales ? kKeyGroups : 1));
        const float v_scale = Traits::kValueBlockScales ? ptx::load_written(p.v_scale + first + block) : 0.0f;
        if (k_scale != k_scale) finite_keys = min(finite_keys, block * kRowBlock);
        if (v_scale != v_scale) finite_values = min(finite_values, block * kRowBlock);
      }
      finite_keys = __reduce_min_sync(0xffffffffu, finite_keys);
      finite_values = __reduce_min_sync(0xffffffffu, finite_values);
    }
    NonFiniteRows nonfinite;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float row_factor = scales.row_factor(r);
      nonfinite.scores[r] = limit(row() + 8 * r) > (row_factor != row_factor ? 0 : finite_keys);
      nonfinite.values[r] = limit(row() + 8 * r) > finite_values;
    }
    return nonfinite;
  }

  // The same for the tiles of a list. row: the first of the thread's two rows, in the work tile.
  __device__ __forceinline__ NonFiniteRows find_in_list(const TileList& list, int row) const {
    NonFiniteRows nonfinite = {};
    for (int group = 0; group < list.count; group += 32) {
      const int i = group + threadIdx.x % 32;
      const unsigned tile = i < list.count ? list.tile(p, i) : 0, mask = i < list.masked ? list.mask(p, i) : 0;
      visit(i < list.count, tile, [&](int lane, bool bad_keys, bool bad_values) {
        const unsigned of_lane = __shfl_sync(0xffffffffu, mask, lane);
        typename Traits::Mask::Limits bits = {~0u, ~0u};
        if (group + lane < list.masked) Traits::Mask::load(bits, p.lists, of_lane, row);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          bits[r] |= __shfl_xor_sync(0xffffffffu, bits[r], 1);
          bits[r] |= __shfl_xor_sync(0xffffffffu, bits[r], 2);
          nonfinite.scores[r] |= bits[r] != 0 && bad_keys;
          nonfinite.values[r] |= bits[r] != 0 && bad_values;
        }
      });
    }
    return nonfinite;
  }

 private:
  // Calls visit(lane, bad_keys, bad_values) for each lane with a block of keys that holds a non-finite number.
  template <class Visit>
  __device__ __forceinline__ void visit(bool has_block, int block, Visit visit) const {
    const size_t index = sequence.first_kv_block(keys) + block;
    const float k_scale =
        has_block ? ptx::load_written(p.k_scale + index * (Traits::kFineScales ? kKeyGroups : 1)) : 0.0f;
    const float v_scale = has_block ? ptx::load_written(p.v_scale + index) : 0.0f;
    const unsigned bad_keys = __ballot_sync(0xffffffffu, k_scale != k_scale);
    const unsigned bad_values = __ballot_sync(0xffffffffu, v_scale != v_scale);
    for (unsigned bad = bad_keys | bad_values; bad != 0; bad &= bad - 1) {
      const int lane = __ffs(bad) - 1;
      visit(lane, bad_keys >> lane & 1, bad_values >> lane & 1);
    }
  }

  // The same with a first key of each row.
  __device__ __forceinline__ NonFiniteRows find_in_window() const {
    static_assert(Traits::kKeyBlockScales && Traits::kValueBlockScales, "a window has block scales");
    const typename Traits::Mask mask{sequence};
    NonFiniteRows nonfinite = {};
    const int col_end = mask.col_limit(first_row + Traits::kRows - 1);
    for (int group = mask.col_begin(first_row) / kRowBlock; group * kRowBlock < col_end; group += 32) {
      const int block = group + threadIdx.x % 32;
      visit(block * kRowBlock < col_end, block, [&](int lane, bool bad_keys, bool bad_values) {
        const int key = (group + lane) * kRowBlock;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int begin = mask.col_begin(row() + 8 * r), limit = mask.col_limit(row() + 8 * r);
          const bool attends = key < limit && key + kRowBlock > begin && begin < limit;
          nonfinite.scores[r] |= attends && bad_keys;
          nonfinite.values[r] |= attends && bad_values;
        }
      });
    }
    return nonfinite;
  }
};

}  // namespace greenfast
