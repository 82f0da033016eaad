// The Hopper attention kernel on codes of quantize_qkv.cuh: attention_hopper.cuh with a scale for each 128 rows of Q, and
// with NaN in the rows that attend to what is no number. It stands apart, consume and set-up written twice, so that the
// kernel without blocks is the one that was measured.
#pragma once

#include "attention_hopper.cuh"

namespace greenfast {

constexpr int kScaleRows = 128;  // of Q or K, that share a scale

// The scale of the rows of a warpgroup. Those behind the last row have that row's.
__device__ __forceinline__ float q_scale_of(const FlashParams& p, int head, int first_row) {
  const int blocks = (p.q_len + kScaleRows - 1) / kScaleRows;
  return p.q_scale[static_cast<size_t>(head) * blocks + min(first_row / kScaleRows, blocks - 1)];
}

// Whether one of the scales of the first `keys` keys of a head is NaN. Scales show a NaN of the input; the scores do not
// always, as the powers of two from the bits of halves lose it.
__device__ __forceinline__ bool any_nan(const FlashParams& p, int kv_head, int keys) {
  const int blocks = (p.kv_len + kScaleRows - 1) / kScaleRows, seen = min(blocks, (keys + kScaleRows - 1) / kScaleRows);
  bool found = false;
  for (int block = threadIdx.x % 32; block < seen; block += 32) {
    const float scale = p.k_scale[static_cast<size_t>(kv_head) * blocks + block];
    found |= scale != scale;
  }
  return __any_sync(0xffffffffu, found);
}

template <class Cfg>
__device__ __forceinline__ void consume_blocks(const FlashParams& p, FlashStorage<Cfg>& shared, int warpgroup,
                                               int pieces) {
  using Shape = FlashShape<Cfg>;
  unsigned q_parity = 0;
  Consumer<Cfg> self(shared, warpgroup);
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

    const float q_scale = q_scale_of(p, work.head, first_row);
    self.start(p, kv_head, q_scale * p.softmax_scale * log2_e);
    shared.q_full[warpgroup].wait(q_parity);
    q_parity ^= 1;
    self.run(whole, mine - whole, end);
    self.arrive(shared.q_empty[warpgroup]);
    const int seen = Cfg::kCausal ? min(p.kv_len, first_row + Shape::kRows + p.causal_shift) : p.kv_len;
    if (q_scale != q_scale || any_nan(p, kv_head, seen)) {  // looked for here, while Q of the next piece comes
      for (float& x : self.o) x = CUDART_NAN_F;
    }
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
    if (first_row < p.q_len) self.store(p, work.head, first_row, kv_head);
  }
  if (warpgroup == 0) self.take_turn();  // no turn stays untaken
}

// Grid, block and shared memory as for attention_hopper.
template <class Cfg>
__device__ __forceinline__ void attention_hopper_blocks(const FlashParams& p, const ptx::TensorMap& q_map,
                                                        const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  using Shape = FlashShape<Cfg>;
  extern __shared__ __align__(1024) unsigned char smem[];
  FlashStorage<Cfg>& shared = *reinterpret_cast<FlashStorage<Cfg>*>(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
  const int pieces = (p.q_len + Shape::kBlockM - 1) / Shape::kBlockM * p.heads;
  static_assert(sizeof(FlashStorage<Cfg>) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4;
    for (int w = 0; w < Shape::kConsumers; ++w) {
      shared.q_full[w].init(1);
      shared.q_empty[w].init(kWarps);
    }
    for (int s = 0; s < Shape::kStages; ++s) {
      shared.k_full[s].init(1);
      shared.v_full[s].init(1);
      shared.k_empty[s].init(kWarps * Shape::kConsumers);
      shared.v_empty[s].init(kWarps * Shape::kConsumers);
    }
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
  if (warpgroup == Shape::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (threadIdx.x % 128 == 0) {
      ptx::prefetch_map(q_map);
      ptx::prefetch_map(k_map);
      ptx::prefetch_map(v_map);
      produce<Cfg>(p, shared, q_map, k_map, v_map, pieces);
    }
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    consume_blocks<Cfg>(p, shared, warpgroup, pieces);
  }
}

}  // namespace greenfast
