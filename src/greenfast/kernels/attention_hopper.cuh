// Attention forward for Hopper: tiles by TMA, both products by wgmma on E4M3, softmax and P in registers.
//
// One warp fetches, and each of kConsumers warpgroups computes 64 query rows: S = Q K^T into registers, online softmax
// in base 2, P packed to E4M3 where it lies, O_tile = P V from zero, O = O * rescale + O_tile. The last step is fp32
// accumulation over the tiles (kTwoLevels), where the tensor cores' own keeps about 14 bits. The division into a
// fetching warp and computing warpgroups with turns, and P V beside the next softmax (kOverlap), are those of
// FlashAttention-3 (Shah et al., 2024).
//
// V comes transposed, (heads, head_dim, keys), its keys in the order in which the accumulators of S are the A operand
// of P V as they lie: of each 16 keys 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
#pragma once

#include "hopper_consumer.cuh"
#include "hopper_producer.cuh"
#include "hopper_queries.cuh"

namespace greenfast {

// Which of this thread's two rows attend to a block of keys or values whose scale is NaN: a quantizer leaves that, and codes
// of 0, where a number of the block is not finite, so that nothing of it reaches other rows. A NaN in scores would not do:
// the powers of two from the bits of halves lose it. `row` is the first of the two, `last` the last of the warpgroup.
template <class Cfg>
__device__ __forceinline__ UnknownRows unknown_rows(const Consumer<Cfg>& self, const FlashParams& p, int kv_head, int row,
                                                    int last) {
  const auto end = [&](int of) { return max(0, Cfg::kCausal ? min(p.kv_len, of + 1 + p.causal_shift) : p.kv_len); };
  const int seen = end(last);
  int keys = seen, values = seen;  // up to which all is known
  float scale;                     // of scores
  if constexpr (Cfg::kKeyBlockScales) {
    scale = self.q_scale_log2;
    const size_t first = static_cast<size_t>(kv_head) * ((p.kv_len + kRowBlock - 1) / kRowBlock);
    for (int block = threadIdx.x % 32; block * kRowBlock < seen; block += 32) {
      const float of_keys = ptx::load_written(p.k_scale + first + block);
      const float of_values = Cfg::kValueBlockScales ? ptx::load_written(p.v_scale + first + block) : 0.0f;
      if (of_keys != of_keys) keys = min(keys, block * kRowBlock);
      if (of_values != of_values) values = min(values, block * kRowBlock);
    }
    keys = __reduce_min_sync(0xffffffffu, keys);
    values = __reduce_min_sync(0xffffffffu, values);
  } else {
    scale = self.scale_log2[0];
  }
  if (scale != scale) keys = 0;
  UnknownRows unknown;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    unknown.scores[r] = end(row + 8 * r) > keys;
    unknown.values[r] = end(row + 8 * r) > values;
  }
  return unknown;
}

template <class Cfg, class Storage, class Queries>
__device__ __forceinline__ void consume(const FlashParams& p, Storage& shared, Queries& queries,
                                        int warpgroup, int pieces) {
  using Shape = FlashShape<Cfg>;
  Consumer<Cfg> self(p, shared, warpgroup);
  if (warpgroup == Shape::kConsumers - 1) self.pass_turn();  // the first warpgroup begins
  for (int round = 0; round * static_cast<int>(gridDim.x) < pieces; ++round) {
    const int piece = piece_of(round);
    if (piece >= pieces) continue;
    const Work<Cfg> work(p, piece);
    const int first_row = work.first_row + warpgroup * Shape::kRows;
    const int kv_head = work.head / p.heads_per_kv;
    const float log2_e = 1.4426950408889634f;
    // Tiles that any of this warpgroup's rows attends to, and those that all of them attend to whole.
    const int mine = first_row < p.q_len ? Work<Cfg>::tiles_up_to(p, min(first_row + Shape::kRows, p.q_len)) : 0;
    const int whole_keys = Cfg::kCausal ? min(p.kv_len, first_row + 1 + p.causal_shift) : p.kv_len;
    const int whole = min(mine, max(0, whole_keys) / Shape::kBlockN);
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    int end[2];  // of the keys of this thread's rows, counted from the tile's first
    for (int r = 0; r < 2; ++r) {
      end[r] = (Cfg::kCausal ? min(p.kv_len, row + 8 * r + 1 + p.causal_shift) : p.kv_len) - whole * Shape::kBlockN;
    }

    const float q_scale = queries.prepare(p, shared, warpgroup, work.head, first_row);
    self.start(kv_head, q_scale * p.softmax_scale * log2_e);
    queries.wait(shared, warpgroup);
    self.run(whole, mine - whole, end);
    queries.release(shared, warpgroup);
    const UnknownRows unknown = unknown_rows(self, p, kv_head, row, first_row + Shape::kRows - 1);
    for (int tile = mine; tile < work.tiles; ++tile) {  // tiles that only later rows of the block need
      self.take_turn();
      self.pass_turn();
      shared.k_full[self.k_ring.stage].wait(self.k_ring.parity);
      self.arrive(shared.k_empty[self.k_ring.stage]);
      self.k_ring.advance();
      shared.v_full[self.v_ring.stage].wait(self.v_ring.parity);
      self.arrive(shared.v_empty[self.v_ring.stage]);
      self.v_ring.advance();
    }
    if (first_row < p.q_len) self.store(work.head, first_row, kv_head, unknown);
  }
  if (warpgroup == 0) self.take_turn();  // no turn stays untaken
}

// Q comes from `q`: a tensor map of its codes, or what else Queries reads. Grid: at most one block per multiprocessor.
// Block: 128 threads per consumer and 128 for the copies. Dynamic shared memory: sizeof(Storage) and up to 1024 bytes of
// alignment.
template <class Cfg, class Queries = CodedQueries<Cfg>, class Values = TransposedValues<Cfg>>
__device__ __forceinline__ void attention_hopper(const FlashParams& p, const typename Queries::Source& q,
                                                 const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  using Shape = FlashShape<Cfg>;
  using Storage = typename Queries::template Storage<typename Values::Storage>;
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
  const int pieces = (p.q_len + Shape::kBlockM - 1) / Shape::kBlockM * p.heads;
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4;
    for (int w = 0; w < Shape::kConsumers; ++w) {
      shared.q_full[w].init(1);
      shared.q_empty[w].init(kWarps);
    }
    for (int s = 0; s < Shape::kStages; ++s) {
      shared.k_full[s].init(1);
      shared.v_full[s].init(Values::kArrivals);
      shared.k_empty[s].init(kWarps * Shape::kConsumers);
      shared.v_empty[s].init(kWarps * Shape::kConsumers);
    }
    Values::init(shared);
    ptx::fence_mbarrier_init();
  }
  if constexpr (Shape::kSumColumns > 0) {
    constexpr int kEnd = Shape::kHeadDim * Shape::kKeyPanel, kWords = Shape::kSumColumns * Shape::kKeyPanel / 4;
    for (int i = threadIdx.x; i < Shape::kStages * Shape::kKeyPanels * kWords; i += Shape::kThreads) {
      unsigned char* panel = shared.v[0][0] + i / kWords * sizeof(shared.v[0][0]);
      reinterpret_cast<unsigned*>(panel + kEnd)[i % kWords] = 0x38383838;  // 1 in E4M3
    }
    ptx::fence_proxy_async();
  }
  __syncthreads();
  Queries queries(q);
  if (warpgroup == Shape::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    Values values;
    if (warp > 0) {
      values.transpose(p, shared, warp - 1, pieces);
    } else if (threadIdx.x % 32 == 0) {
      queries.begin();
      ptx::prefetch_map(k_map);
      ptx::prefetch_map(v_map);
      produce<Cfg>(p, shared, queries, values, k_map, v_map, pieces);
    }
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    consume<Cfg>(p, shared, queries, warpgroup, pieces);
  }
}

}  // namespace greenfast
