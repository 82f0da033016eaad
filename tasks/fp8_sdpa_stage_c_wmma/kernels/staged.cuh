// The staged kernels of the attention ladder: one template, a rung per setting of its policies.
//
// Each block of four warps computes 32 query rows of one head and iterates over tiles of 32 keys. K and V are
// dequantized to half in shared memory; scores and P pass through shared memory; O stays in registers. Online softmax
// (Milakov and Gimelshein, 2018) in base 2. The scales of Q and K are applied to the scores, that of V at the end.
#pragma once

#include <math_constants.h>

#include "common/conditional.cuh"
#include "common/formats.cuh"
#include "common/phase_clock.cuh"
#include "params.cuh"
#include "products.cuh"
#include "tiles.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// Phases that an instrumented build measures.
enum Phase { kQLoad, kKvPrefetch, kDequantize, kQK, kSoftmax, kPV, kStore, kPhaseCount };

template <class Cfg>
struct LadderShape {
  static constexpr int kHeadDim = Cfg::kHeadDim;
  static constexpr int kBlockM = 32;
  static constexpr int kBlockN = 32;
  static constexpr int kThreads = 128;
  static constexpr int kThreadsPerRow = kThreads / kBlockM;
  static constexpr int kStages = 2;
  static constexpr int kScoreStride = kBlockN + 4;
  // A separate P tile is padded like every tile; the fused one overlays the rows of the score tile.
  static constexpr int kPStride = Cfg::kFusedSoftmaxPv ? 2 * kScoreStride : kBlockN + 8;
  using QLayout = PaddedLayout<kHeadDim>;
  using KvLayout = conditional_t<Cfg::kXorSwizzle, XorSwizzledLayout<kHeadDim>, PaddedLayout<kHeadDim>>;
};

// The shared-memory map. Members that a rung does not use shrink to 16 bytes.
template <class Cfg>
struct SharedStorage {
  using Shape = LadderShape<Cfg>;
  static constexpr int kKvElements = Shape::kBlockN * Shape::KvLayout::kStride;

  alignas(128) half q[Shape::kBlockM * Shape::QLayout::kStride];
  alignas(128) half kv[2 * kKvElements];  // K, then V; at the end the fp32 tile of O
  alignas(128) float scores[Shape::kBlockM * Shape::kScoreStride];
  alignas(16) half own_p[Cfg::kFusedSoftmaxPv ? 8 : Shape::kBlockM * Shape::kPStride];
  alignas(16) float row_scale[Shape::kBlockM];
  alignas(16) unsigned char stage[Cfg::kCpAsync ? Shape::kStages * 2 * Shape::kBlockN * Shape::kHeadDim : 16];
  alignas(16) half lut[Cfg::kKvLut ? 256 : 8];

  __device__ half* k() { return kv; }
  __device__ half* v() { return kv + kKvElements; }
  __device__ half* p() { return Cfg::kFusedSoftmaxPv ? reinterpret_cast<half*>(scores) : own_p; }
  __device__ float* o() { return reinterpret_cast<float*>(kv); }
  __device__ unsigned char* stage_of(int tile, int operand) {
    return stage + (tile % Shape::kStages * 2 + operand) * Shape::kBlockN * Shape::kHeadDim;
  }
};

// A row's running maximum of raw scores, equal in the row's four threads, and its row sum over this thread's columns.
// The four sums are added once, at the end.
struct RowState {
  float max = -CUDART_INF_F;
  float sum = 0.0f;
};

// Reduces over the adjacent lanes of a row.
template <int kLanes, class Op>
__device__ __forceinline__ float reduce_row(float x, Op op) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}

// Computes P (half) from this thread's raw scores and updates the row's state; writes to row_scale the factor for
// earlier O. Columns from `valid_cols` (>= 1) on get P = 0. scale_log2 must be positive, so that the largest raw score
// has the largest exponent.
template <class Shape>
__device__ __forceinline__ void softmax_tile(const float* scores, half* p, float* row_scale, RowState& state,
                                             float scale_log2, int valid_cols) {
  constexpr int kCols = Shape::kBlockN / Shape::kThreadsPerRow;
  static_assert(kCols == 8, "a thread reads its scores as two float4 and writes its p_half as one uint4");
  const int row = threadIdx.x / Shape::kThreadsPerRow;
  const int col = threadIdx.x % Shape::kThreadsPerRow * kCols;
  const float4* src = reinterpret_cast<const float4*>(scores + row * Shape::kScoreStride + col);
  const float4 lo = src[0], hi = src[1];
  float x[kCols] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};

  float tile_max = -CUDART_INF_F;
  if (valid_cols < Shape::kBlockN) {
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      if (col + i >= valid_cols) x[i] = -CUDART_INF_F;
    }
  }
#pragma unroll
  for (int i = 0; i < kCols; ++i) tile_max = fmaxf(tile_max, x[i]);
  const float new_max =
      fmaxf(state.max, reduce_row<Shape::kThreadsPerRow>(tile_max, [](float a, float b) { return fmaxf(a, b); }));

  // The row sum is over the rounded P, so that the P that multiply V add up to the divisor.
  alignas(16) half p_half[kCols];
  float tile_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    p_half[i] = __float2half_rn(ptx::ex2(fmaf(x[i], scale_log2, -new_max * scale_log2)));
    tile_sum += __half2float(p_half[i]);
  }

  const float rescale = ptx::ex2((state.max - new_max) * scale_log2);  // 0 on the first tile
  state.sum = state.sum * rescale + tile_sum;
  state.max = new_max;
  // P may overlay the score tile: all lanes of the row read their scores before any lane writes.
  __syncwarp();
  *reinterpret_cast<uint4*>(p + row * Shape::kPStride + col) = *reinterpret_cast<const uint4*>(p_half);
  if (col == 0) row_scale[row] = rescale;
}

// Grid: (ceil(seq_len / 32), heads). Block: 128 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ void attention_staged(const LadderParams& params) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(!Cfg::kFusedSoftmaxPv || Cfg::kWmmaPv, "the fused score tile holds the P of a tensor-core P V");
  static_assert(!Cfg::kXorSwizzle || (Cfg::kWmmaQk && Cfg::kWmmaPv), "swizzled tiles are read by tensor-core loads");

  using Shape = LadderShape<Cfg>;
  using Storage = SharedStorage<Cfg>;
  using Map = ChunkMap<Shape::kBlockN, Shape::kHeadDim, Shape::kThreads>;
  using Converter = ConvertDequantizer<Cfg::kFormat>;
  using Dequantizer = conditional_t<Cfg::kKvLut, LutDequantizer<Cfg::kFormat>, Converter>;
  using TensorScores = conditional_t<Cfg::kXorSwizzle, MmaScores<Shape>, WmmaScores<Shape>>;
  using TensorOutput = conditional_t<Cfg::kXorSwizzle, MmaOutput<Shape>, WmmaOutput<Shape>>;
  using Scores = conditional_t<Cfg::kWmmaQk, TensorScores, ScalarScores<Shape>>;
  using Output = conditional_t<Cfg::kWmmaPv, TensorOutput, ScalarOutput<Shape>>;
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");
  static_assert(Shape::kBlockM * Shape::kHeadDim * 4 <= sizeof(Storage::kv), "O reuses the K/V tiles");

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
  if constexpr (Cfg::kCpAsync) {
    prefetch(0);
    prefetch(1);
  }

  // Read long before their use, to hide the latency.
  const float log2_e = 1.4426950408889634f;
  const float scale_log2 = params.q_scale[head] * params.k_scale[head] * params.softmax_scale * log2_e;
  const float v_scale = params.v_scale[head];

  if constexpr (Cfg::kKvLut) LutDequantizer<Cfg::kFormat>::fill(shared.lut);
  const Dequantizer dequantizer(shared.lut);
  load_tile_direct<ChunkMap<Shape::kBlockM, Shape::kHeadDim, Shape::kThreads>, typename Shape::QLayout>(
      Converter(nullptr), params.q + head_offset + static_cast<size_t>(first_row) * Shape::kHeadDim, Shape::kHeadDim,
      params.seq_len - first_row, shared.q);
  Output::prepare(shared.scores);
  __syncthreads();
  Output output(shared.scores);
  RowState state;
  const Scores product(shared.q);
  clock.mark(kQLoad);
  if constexpr (Cfg::kCpAsync) {
    ptx::cp_async_wait<1>();
    clock.mark(kKvPrefetch);
    dequantize_tile<Map, typename Shape::KvLayout>(dequantizer, shared.stage_of(0, 0), shared.k());
    __syncthreads();
    clock.mark(kDequantize);
  }

  for (int tile = 0; tile < tiles; ++tile) {
    const int valid = min(params.seq_len - tile * Shape::kBlockN, Shape::kBlockN);
    if constexpr (!Cfg::kCpAsync) {
      const size_t offset = static_cast<size_t>(tile) * Shape::kBlockN * Shape::kHeadDim;
      load_tile_direct<Map, typename Shape::KvLayout>(dequantizer, k + offset, Shape::kHeadDim, valid, shared.k());
      load_tile_direct<Map, typename Shape::KvLayout>(dequantizer, v + offset, Shape::kHeadDim, valid, shared.v());
      __syncthreads();
      clock.mark(kDequantize);
    }

    product.compute(shared.k(), shared.scores);
    clock.mark(kQK);
    if constexpr (Cfg::kCpAsync) {
      // Dequantization of V (needed by P V) and of the next K hides the latency of the scores and the softmax, and
      // needs no extra barrier.
      dequantize_tile<Map, typename Shape::KvLayout>(dequantizer, shared.stage_of(tile, 1), shared.v());
      clock.mark(kDequantize);
      prefetch(tile + 2);
      clock.mark(kKvPrefetch);
    }
    __syncthreads();

    if constexpr (Cfg::kCpAsync) {
      ptx::cp_async_wait<1>();
      clock.mark(kKvPrefetch);
    }
    softmax_tile<Shape>(shared.scores, shared.p(), shared.row_scale, state, scale_log2, valid);
    clock.mark(kSoftmax);
    if constexpr (Cfg::kCpAsync) {
      dequantize_tile<Map, typename Shape::KvLayout>(dequantizer, shared.stage_of(tile + 1, 0), shared.k());
      clock.mark(kDequantize);
    }
    __syncthreads();

    if constexpr (Cfg::kDebugPrint) {
      if (blockIdx.x == 0 && head == 0 && threadIdx.x == 0) {
        printf("tile %d: keys %d, row 0 max %.6f (raw), sum of 8 columns %.6f, rescale %.6f, p[0] %.6f\n", tile, valid,
               state.max, state.sum, shared.row_scale[0], __half2float(shared.p()[0]));
      }
    }

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
