// What the attention kernels are given, whatever the GPU. Q, K and V are apart: they come as tensor maps or as
// addresses.
#pragma once

namespace greenfast {

// Where a kernel writes the rows of O. Strides in elements, multiples of 8; columns are neighbours.
struct OutputRows {
  long long gap;  // from where a batch's last head ends to the next batch's first
  long long head, row;
  unsigned heads;  // of a batch; a signed division would take registers that some kernels have to spill
  int columns;     // the caller's head_dim: a multiple of 8, up to the kernel's

  // The offset of row 0 of a head, counted over all batches.
  __device__ __forceinline__ long long first(unsigned of_all) const {
    return of_all * head + (gap == 0 ? 0 : of_all / heads * gap);
  }
};

// A scale is what a code is multiplied by. A scale of blocks is NaN where a number of the block is not finite.
struct FlashParams {
  const float* q_scale;  // (batch x heads), or (batch x heads, blocks of kQueryBlock rows) with kQueryBlockScales
  const float* k_scale;  // (batch x kv_heads), or (batch x kv_heads, blocks of kRowBlock keys) with kKeyBlockScales
                         // with kFineScales (batch x heads, q_len) and (batch x kv_heads, blocks, kKeyGroups)
  const float* v_scale;  // the same with kValueBlockScales, or (batch x kv_heads, head_dim) with kChannelScales
  void* out;             // (batch, heads, q_len, columns) of Cfg::Out, as `rows` says
  float* lse;            // (batch x heads, q_len), natural logarithm; unused without kLse
  int heads;             // batch x heads
  int heads_per_kv;      // query heads that share a head of K and V
  int q_len;             // rows of Q in each head
  int kv_len;            // rows of K and V in each head: keys
  int causal_shift;      // with a mask, row i attends to keys 0 .. i + causal_shift
  int heads_at_once;     // heads whose K and V the blocks work on at the same time, so that these stay in the L2 cache
  float softmax_scale;   // of the products of q and k, > 0: 1 / sqrt(head_dim) as a rule
  OutputRows rows;
};

}  // namespace greenfast
