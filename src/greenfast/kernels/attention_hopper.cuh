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
#include "hopper_plan.cuh"
#include "ptx/tma.cuh"

namespace greenfast {

template <class Cfg>
__device__ __forceinline__ void produce(const FlashParams& p, FlashStorage<Cfg>& shared, const ptx::TensorMap& q_map,
                                        const ptx::TensorMap& k_map, const ptx::TensorMap& v_map, int pieces) {
  using Shape = FlashShape<Cfg>;
  Ring<Shape::kStages> ring;
  unsigned q_parity = 0;
  for (int round = 0; round * static_cast<int>(gridDim.x) < pieces; ++round) {
    const int piece = piece_of(round);
    if (piece >= pieces) continue;
    const Work<Cfg> work(p, piece);
    const int kv_head = work.head / p.heads_per_kv;
    for (int w = 0; w < Shape::kConsumers; ++w) {
      shared.q_empty[w].wait(q_parity ^ 1);
      shared.q_full[w].arrive_expect(sizeof(shared.q[w]));
      for (int i = 0; i < Shape::kDimPanels; ++i) {
        ptx::tma_load_3d(shared.q[w][i], q_map, shared.q_full[w], i * Shape::kDimPanel,
                         work.first_row + w * Shape::kRows, work.head);
      }
    }
    q_parity ^= 1;
    for (int tile = 0; tile < work.tiles; ++tile, ring.advance()) {
      const int s = ring.stage, key = tile * Shape::kBlockN;
      shared.k_empty[s].wait(ring.parity ^ 1);
      shared.k_full[s].arrive_expect(sizeof(shared.k[s]));
      for (int i = 0; i < Shape::kDimPanels; ++i) {
        ptx::tma_load_3d(shared.k[s][i], k_map, shared.k_full[s], i * Shape::kDimPanel, key, kv_head);
      }
      shared.v_empty[s].wait(ring.parity ^ 1);
      shared.v_full[s].arrive_expect(Shape::kHeadDim * Shape::kBlockN);
      for (int i = 0; i < Shape::kKeyPanels; ++i) {
        ptx::tma_load_3d(shared.v[s][i], v_map, shared.v_full[s], key + i * Shape::kKeyPanel, 0, kv_head);
      }
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void consume(const FlashParams& p, FlashStorage<Cfg>& shared, int warpgroup, int pieces) {
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

    self.start(p, kv_head, p.q_scale[work.head] * p.softmax_scale * log2_e);
    shared.q_full[warpgroup].wait(q_parity);
    q_parity ^= 1;
    self.run(whole, mine - whole, end);
    self.arrive(shared.q_empty[warpgroup]);
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

// Grid: at most one block per multiprocessor. Block: 128 threads per consumer and 128 for the copies. Dynamic shared
// memory: sizeof(FlashStorage<Cfg>) and up to 1024 bytes of alignment.
template <class Cfg>
__device__ __forceinline__ void attention_hopper(const FlashParams& p, const ptx::TensorMap& q_map,
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
    consume<Cfg>(p, shared, warpgroup, pieces);
  }
}

}  // namespace greenfast
