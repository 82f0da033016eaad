// v0.0, the baseline: both products as scalar FMAs on half tiles; codes of K and V are read and dequantized directly.
// Why: the later rungs have the same tiles, softmax and layouts, so that a speedup is due to their own change alone.
// Measured: 57.9 us at S=512 on an H100 (E4M3; the baseline side of evidence/h100/fp8_sdpa-e4m3-wmma_qk).
//
// A block of four warps computes 32 query rows of one head and iterates over tiles of 32 keys, as in FlashAttention
// (Dao et al., 2022). Scores and P pass through shared memory; O stays in registers. Online softmax (Milakov and
// Gimelshein, 2018) in base 2. The scales of Q and K are applied to the scores, that of V at the end.
//
// The rungs up to Stage 3A replace parts of this kernel. Cfg names the parts:
//   Dequantizer          codes to half: ConvertDequantizer, or LutDequantizer (kv_lut.cuh)
//   KvLayout             tiles of K and V: PaddedLayout, or XorSwizzledLayout (stage3a_swizzle.cuh)
//   PTile                the place of P: OwnPTile, or PInScoreTile (stage3a.cuh)
//   Scores, Output       Q K^T and P V: ScalarScores and ScalarOutput, WmmaScores (wmma_qk.cuh) and WmmaOutput
//                        (stage2.cuh), or MmaScores and MmaOutput (stage3a_swizzle.cuh)
// A score policy is constructed from the Q tile and has compute(k, scores), which writes the raw scores of a tile to
// shared memory. An output policy has O in registers and rescale(row_scale), accumulate(p, v) and store(tile);
// prepare(tile) and a barrier must precede its construction. All threads of the block call them; the caller
// synchronizes before and after.
#pragma once

#include <math_constants.h>

#include "common.cuh"
#include "common/phase_clock.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// Phases that an instrumented build measures.
enum Phase { kQLoad, kKvPrefetch, kDequantize, kQK, kSoftmax, kPV, kStore, kPhaseCount };

struct TileSizes {
  static constexpr int kBlockM = 32;
  static constexpr int kBlockN = 32;
  static constexpr int kThreads = 128;
  static constexpr int kThreadsPerRow = kThreads / kBlockM;
  static constexpr int kScoreStride = kBlockN + 4;
};

// ---- tiles of half rows in shared memory ----------------------------------------------------------------------------

// Rows of kCols halves, padded by 16 bytes: eight rows at one column are then in different groups of four banks, so 8x8
// fragment loads have no bank conflicts.
template <int kCols>
struct PaddedLayout {
  static constexpr bool kOneStride = true;  // between any two adjacent rows of a column
  static constexpr int kStride = kCols + 8;
  static __device__ __forceinline__ int offset(int row, int col) { return row * kStride + col; }
};

// P in a tile of its own, padded like every tile.
struct OwnPTile {
  static constexpr int kStride = TileSizes::kBlockN + 8;
  static constexpr int kElements = TileSizes::kBlockM * kStride;
  static __device__ half* tile(half* own, float*) { return own; }
};

template <class Cfg>
struct LadderShape : TileSizes {
  static constexpr int kHeadDim = Cfg::kHeadDim;
  static constexpr int kPStride = Cfg::PTile::kStride;
  using QLayout = PaddedLayout<kHeadDim>;
  using KvLayout = typename Cfg::KvLayout;
};

// The shared-memory map. Members that a rung does not use shrink to 16 bytes. kStageBytes: 8-bit tiles that were copied
// ahead, from Stage 1 on.
template <class Cfg, int kStageBytes = 16>
struct SharedStorage {
  using Shape = LadderShape<Cfg>;
  using PTile = typename Cfg::PTile;
  static constexpr int kKvElements = Shape::kBlockN * Shape::KvLayout::kStride;

  alignas(128) half q[Shape::kBlockM * Shape::QLayout::kStride];
  alignas(128) half kv[2 * kKvElements];  // K, then V; at the end the fp32 tile of O
  alignas(128) float scores[Shape::kBlockM * Shape::kScoreStride];
  alignas(16) half own_p[PTile::kElements];
  alignas(16) float row_scale[Shape::kBlockM];
  alignas(16) unsigned char stage[kStageBytes];
  alignas(16) half table[Cfg::Dequantizer::kTableHalves];

  __device__ half* k() { return kv; }
  __device__ half* v() { return kv + kKvElements; }
  __device__ half* p() { return PTile::tile(own_p, scores); }
  __device__ float* o() { return reinterpret_cast<float*>(kv); }
};

// ---- loads of K, V and Q --------------------------------------------------------------------------------------------

// Dequantization by conversion instructions.
template <Format kFormat>
struct ConvertDequantizer {
  static constexpr int kTableHalves = 8;  // not used
  static __device__ void fill(half*) {}
  static __device__ __forceinline__ void to_half4(unsigned codes, half2* out) { Codec<kFormat>::to_half4(codes, out); }
  __device__ explicit ConvertDequantizer(const half*) {}
};

// Dequantizes 16 codes to 16 halves in shared memory. lo and hi take eight halves each and are 16-byte aligned.
template <class Dequantizer>
__device__ __forceinline__ void dequantize_16(const Dequantizer& dequantizer, const uint4& codes, half* lo, half* hi) {
  const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
  alignas(16) half2 out[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) dequantizer.to_half4(words[i], out + 2 * i);
  *reinterpret_cast<uint4*>(lo) = reinterpret_cast<const uint4&>(out[0]);
  *reinterpret_cast<uint4*>(hi) = reinterpret_cast<const uint4&>(out[4]);
}

// Divides a tile of kRows x kCols 8-bit values into 16-byte chunks; chunk i belongs to thread i % kThreads.
template <int kRows, int kCols, int kThreads>
struct ChunkMap {
  static constexpr int kChunksPerRow = kCols / 16;
  static constexpr int kChunksPerThread = kRows * kChunksPerRow / kThreads;
  static_assert(kChunksPerThread * kThreads == kRows * kChunksPerRow, "the chunks must divide among the threads");

  static __device__ __forceinline__ int chunk(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }
  static __device__ __forceinline__ int row(int i) { return chunk(i) / kChunksPerRow; }
  static __device__ __forceinline__ int col(int i) { return chunk(i) % kChunksPerRow * 16; }
};

// Loads a tile directly from global memory and dequantizes it. Rows from `valid_rows` on are zeros and not read.
template <class Map, class Layout, class Dequantizer>
__device__ __forceinline__ void load_tile_direct(const Dequantizer& dequantizer, const unsigned char* src, int cols,
                                                 int valid_rows, half* tile) {
  uint4 codes[Map::kChunksPerThread];
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    codes[i] = make_uint4(0, 0, 0, 0);
    if (Map::row(i) < valid_rows) {
      codes[i] = __ldg(reinterpret_cast<const uint4*>(src + static_cast<size_t>(Map::row(i)) * cols + Map::col(i)));
    }
  }
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    dequantize_16(dequantizer, codes[i], tile + Layout::offset(Map::row(i), Map::col(i)),
                  tile + Layout::offset(Map::row(i), Map::col(i) + 8));
  }
}

// ---- online softmax -------------------------------------------------------------------------------------------------

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

// ---- the products ---------------------------------------------------------------------------------------------------

template <class Shape>
struct ScalarScores {
  const half* q;

  __device__ explicit ScalarScores(const half* q) : q(q) {}

  __device__ __forceinline__ void compute(const half* k, float* scores) const {
    const int row = threadIdx.x / Shape::kThreadsPerRow;
    for (int col = threadIdx.x % Shape::kThreadsPerRow; col < Shape::kBlockN; col += Shape::kThreadsPerRow) {
      float sum = 0.0f;
      for (int d = 0; d < Shape::kHeadDim; d += 2) {
        const float2 a = __half22float2(*reinterpret_cast<const half2*>(q + Shape::QLayout::offset(row, d)));
        const float2 b = __half22float2(*reinterpret_cast<const half2*>(k + Shape::KvLayout::offset(col, d)));
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
      }
      scores[row * Shape::kScoreStride + col] = sum;
    }
  }
};

// Each thread has kHeadDim / kThreadsPerRow adjacent columns of one row of O.
template <class Shape>
struct ScalarOutput {
  static constexpr int kCols = Shape::kHeadDim / Shape::kThreadsPerRow;
  float o[kCols] = {};

  static __device__ __forceinline__ int row() { return threadIdx.x / Shape::kThreadsPerRow; }
  static __device__ __forceinline__ int col() { return threadIdx.x % Shape::kThreadsPerRow * kCols; }

  static __device__ void prepare(float*) {}
  __device__ explicit ScalarOutput(const float*) {}

  __device__ __forceinline__ void rescale(const float* row_scale) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) o[c] *= row_scale[row()];
  }

  __device__ __forceinline__ void accumulate(const half* p, const half* v) {
    for (int key = 0; key < Shape::kBlockN; ++key) {
      const float weight = __half2float(p[row() * Shape::kPStride + key]);
#pragma unroll
      for (int c = 0; c < kCols; c += 2) {
        const float2 b = __half22float2(*reinterpret_cast<const half2*>(v + Shape::KvLayout::offset(key, col() + c)));
        o[c] = fmaf(weight, b.x, o[c]);
        o[c + 1] = fmaf(weight, b.y, o[c + 1]);
      }
    }
  }

  __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
    for (int c = 0; c < kCols; ++c) tile[row() * Shape::kHeadDim + col() + c] = o[c];
  }
};

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <class Cfg, class Storage>
__device__ __forceinline__ void check_config() {
  using Shape = LadderShape<Cfg>;
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");
  static_assert(Shape::kBlockM * Shape::kHeadDim * 4 <= sizeof(Storage::kv), "O reuses the K/V tiles");
}

template <class Storage>
__device__ __forceinline__ void print_tile(Storage& shared, const RowState& state, int tile, int valid) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    printf("tile %d: keys %d, row 0 max %.6f (raw), sum of 8 columns %.6f, rescale %.6f, p[0] %.6f\n", tile, valid,
           state.max, state.sum, shared.row_scale[0], __half2float(shared.p()[0]));
  }
}

// Grid: (ceil(seq_len / 32), heads). Block: 128 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ void attention_direct(const LadderParams& params) {
  using Shape = LadderShape<Cfg>;
  using Storage = SharedStorage<Cfg>;
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

  for (int tile = 0; tile < tiles; ++tile) {
    const int valid = min(params.seq_len - tile * Shape::kBlockN, Shape::kBlockN);
    const size_t offset = static_cast<size_t>(tile) * Shape::kBlockN * Shape::kHeadDim;
    load_tile_direct<Map, typename Shape::KvLayout>(dequantizer, k + offset, Shape::kHeadDim, valid, shared.k());
    load_tile_direct<Map, typename Shape::KvLayout>(dequantizer, v + offset, Shape::kHeadDim, valid, shared.v());
    __syncthreads();
    clock.mark(kDequantize);

    product.compute(shared.k(), shared.scores);
    clock.mark(kQK);
    __syncthreads();

    softmax_tile<Shape>(shared.scores, shared.p(), shared.row_scale, state, scale_log2, valid);
    clock.mark(kSoftmax);
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
