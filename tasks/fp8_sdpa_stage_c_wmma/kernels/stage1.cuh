// Stage 1: the codes of K and V are copied by cp.async into two stages of shared memory, and dequantized from there.
// Why: in wmma_qk.cuh every tile begins with a load whose latency nothing hides.
// Measured: SHORT, 1.071x at S=512 with a warm L2 on an H100, 1.1x required (evidence/h100/fp8_sdpa-e4m3-stage1).
#pragma once

#include "ptx/cp_async.cuh"
#include "scalar.cuh"

namespace greenfast {

// Starts the cp.async of a quantized tile to a stage. Each thread copies the chunks that it later dequantizes, so its
// own cp.async wait is the only synchronization. Rows from `valid_rows` on are zero-filled.
template <class Map>
__device__ __forceinline__ void prefetch_tile(const unsigned char* src, int cols, int valid_rows,
                                              unsigned char* stage) {
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    const bool valid = Map::row(i) < valid_rows;
    const size_t offset = valid ? static_cast<size_t>(Map::row(i)) * cols + Map::col(i) : 0;
    ptx::cp_async_16(stage + Map::chunk(i) * 16, src + offset, valid ? 16 : 0);
  }
}

template <class Map, class Layout, class Dequantizer>
__device__ __forceinline__ void dequantize_tile(const Dequantizer& dequantizer, const unsigned char* stage,
                                                half* tile) {
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    const uint4 codes = *reinterpret_cast<const uint4*>(stage + Map::chunk(i) * 16);
    dequantize_16(dequantizer, codes, tile + Layout::offset(Map::row(i), Map::col(i)),
                  tile + Layout::offset(Map::row(i), Map::col(i) + 8));
  }
}

constexpr int kPrefetchStages = 2;

template <class Cfg>
struct PrefetchedStorage : SharedStorage<Cfg, kPrefetchStages * 2 * TileSizes::kBlockN * Cfg::kHeadDim> {
  __device__ unsigned char* stage_of(int tile, int operand) {
    return this->stage + (tile % kPrefetchStages * 2 + operand) * TileSizes::kBlockN * Cfg::kHeadDim;
  }
};

// Grid: (ceil(seq_len / 32), heads). Block: 128 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ void attention_prefetched(const LadderParams& params) {
  using Shape = LadderShape<Cfg>;
  using Storage = PrefetchedStorage<Cfg>;
  using Map = ChunkMap<Shape::kBlockN, Shape::kHeadDim, Shape::kThreads>;
  using Dequantizer = typename Cfg::Dequantizer;
  using Scores = typename Cfg::template Scores<Shape>;
  using Output = typename Cfg::template Output<Shape>;
  check_config<Cfg, Storage>();

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, kPhaseCount> clock(params.phase_cycles);

  const int head = blockIdx.y;
  const int first_row = blockIdx.x * Shape::kBlockM;
  const size_t head_offset = static_cast<size_t>(head) * params.seq_len * Shape::kHeadDim;
  const unsigned char* k = params.k + head_offset;
  const unsigned char* v = params.v + head_offset;
  const int tiles = (params.seq_len + Shape::kBlockN - 1) / Shape::kBlockN;

  // cp.async loads tiles two ahead, and a thread dequantizes only chunks that it copied itself. Tiles beyond the last
  // are zero-filled without a read, so that the loop has no branch and cp.async group counts hold.
  const auto prefetch = [&](int tile) {
    const size_t offset = static_cast<size_t>(tile) * Shape::kBlockN * Shape::kHeadDim;
    const int valid = params.seq_len - tile * Shape::kBlockN;
    prefetch_tile<Map>(k + offset, Shape::kHeadDim, valid, shared.stage_of(tile, 0));
    prefetch_tile<Map>(v + offset, Shape::kHeadDim, valid, shared.stage_of(tile, 1));
    ptx::cp_async_commit();
  };
  prefetch(0);
  prefetch(1);

  // Read long before their use, to hide the latency.
  const float log2_e = 1.4426950408889634f;
  const float scale_log2 = params.q_scale[head] * params.k_scale[head] * params.softmax_scale * log2_e;
  const float v_scale = params.v_scale[head];

  Dequantizer::fill(shared.table);
  const Dequantizer dequantizer(shared.table);
  load_tile_direct<ChunkMap<Shape::kBlockM, Shape::kHeadDim, Shape::kThreads>, typename Shape::QLayout>(
      ConvertDequantizer<Cfg::kFormat>(nullptr),
      params.q + head_offset + static_cast<size_t>(first_row) * Shape::kHeadDim, Shape::kHeadDim,
      params.seq_len - first_row, shared.q);
  Output::prepare(shared.scores);
  __syncthreads();
  Output output(shared.scores);
  RowState state;
  const Scores product(shared.q);
  clock.mark(kQLoad);
  ptx::cp_async_wait<1>();
  clock.mark(kKvPrefetch);
  dequantize_tile<Map, typename Shape::KvLayout>(dequantizer, shared.stage_of(0, 0), shared.k());
  __syncthreads();
  clock.mark(kDequantize);

  for (int tile = 0; tile < tiles; ++tile) {
    const int valid = min(params.seq_len - tile * Shape::kBlockN, Shape::kBlockN);
    product.compute(shared.k(), shared.scores);
    clock.mark(kQK);
    // Dequantization of V (needed by P V) and of the next K hides the latency of the scores and the softmax, and needs
    // no extra barrier.
    dequantize_tile<Map, typename Shape::KvLayout>(dequantizer, shared.stage_of(tile, 1), shared.v());
    clock.mark(kDequantize);
    prefetch(tile + 2);
    clock.mark(kKvPrefetch);
    __syncthreads();

    ptx::cp_async_wait<1>();
    clock.mark(kKvPrefetch);
    softmax_tile<Shape>(shared.scores, shared.p(), shared.row_scale, state, scale_log2, valid);
    clock.mark(kSoftmax);
    dequantize_tile<Map, typename Shape::KvLayout>(dequantizer, shared.stage_of(tile + 1, 0), shared.k());
    clock.mark(kDequantize);
    __syncthreads();
    if constexpr (Cfg::kDebugPrint) print_tile(shared, state, tile, valid);

    output.rescale(shared.row_scale);
    output.accumulate(shared.p(), shared.v());
    __syncthreads();
    clock.mark(kPV);
  }

  output.store(shared.o());
  const int row = threadIdx.x / Shape::kThreadsPerRow;
  const float sum = reduce_row<Shape::kThreadsPerRow>(state.sum, [](float a, float b) { return a + b; });
  if (threadIdx.x % Shape::kThreadsPerRow == 0) shared.row_scale[row] = v_scale / sum;
  __syncthreads();

  half* out = params.out + head_offset + static_cast<size_t>(first_row) * Shape::kHeadDim;
  for (int i = threadIdx.x * 8; i < Shape::kBlockM * Shape::kHeadDim; i += Shape::kThreads * 8) {
    const int out_row = i / Shape::kHeadDim;
    if (first_row + out_row >= params.seq_len) break;
    alignas(16) half values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = __float2half_rn(shared.o()[i + j] * shared.row_scale[out_row]);
    *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(values);
  }
  clock.mark(kStore);
  clock.write();
}

}  // namespace greenfast
