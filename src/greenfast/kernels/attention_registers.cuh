// Stage 3B of the attention ladder: full fusion. Scores and weights never leave the registers in which they were made.
//
// A block of eight warps computes 32 query rows of one head. Two warps share a key group (every fourth tile of keys),
// 16 rows each; the four groups do not meet before the end, where shared memory combines their partial results.
// Codes reach shared memory by cp.async and are dequantized from there straight into operands of mma.m16n8k16: both
// products may take the head dim in any order, and the orders here give each thread whole vectors of codes.
// The softmax is online (Milakov and Gimelshein, 2018) in base 2; a base moves only where a weight would outgrow 2^8.
#pragma once

#include <math_constants.h>

#include <cuda/std/type_traits>

#include "formats.cuh"
#include "phase_clock.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/e4m3_to_half.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"

namespace greenfast {

struct RegistersParams {
  const unsigned char* q;  // (heads, seq_len, head_dim) codes, as k and v; heads counts batch x heads
  const unsigned char* k;
  const unsigned char* v;
  const float* q_scale;  // (heads), as k_scale and v_scale
  const float* k_scale;
  const float* v_scale;
  half* out;  // (heads, seq_len, head_dim)
  int seq_len;
  float softmax_scale;
  long long* phase_cycles;  // (blocks, RegistersPhase::kCount) in an instrumented build, else null
};

// Dequantization has no phase of its own: it happens inside the products.
struct RegistersPhase {
  enum { kQLoad, kKvPrefetch, kQK, kSoftmax, kPV, kCombine, kStore, kCount };
};

template <class Cfg>
struct RegistersShape {
  static constexpr int kHeadDim = Cfg::kHeadDim;
  static constexpr int kBlockM = 32;
  static constexpr int kRowGroups = kBlockM / 16;
  static constexpr int kKeyGroups = 4;
  static constexpr int kWarps = kRowGroups * kKeyGroups;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroupThreads = 32 * kRowGroups;  // that share the tiles of a key group
  static constexpr int kKeys = 2048 / kHeadDim;          // of a tile
};

// A tile of K or V: rows of codes in pieces of 16, two rows of 64 codes or one of 128 to the 128 bytes of all banks.
// Pieces trade places so that what eight lanes load together lies in all banks: of K, pieces 0..3 (or 4..7) of rows 2i
// and 2i + 1; of V, two neighbouring pieces of rows 2t or 2t + 1 for t = 0..3. The two pieces of a sector of global
// memory stay together and in order: where they do not lie in 32 aligned bytes, cp.async fetches it twice (Stage 3A).
template <int kRows, int kCols>
struct CodeTile {
  static constexpr int kPieces = kCols / 16;
  static_assert(kPieces == 4 || kPieces == 8, "rows of 64 or 128 codes");
  alignas(128) unsigned char bytes[kRows * kCols];

  // The byte at which a piece begins. Eight rows further on it is 8 * kCols more; below are the places of the piece of
  // the row after an even one, and of the fourth piece after one of the first four.
  static __device__ __forceinline__ int place(int row, int piece) {
    const int turn = ((row ^ row >> 1) & 1) * 4 + (row >> 1 & 2);
    return row * kPieces / 8 * 128 + (piece ^ turn) * 16;
  }
  static __device__ __forceinline__ int odd(int place) { return (place ^ 64) + kPieces / 8 * 128; }
  static __device__ __forceinline__ int fourth(int place) { return place ^ 64; }
};

// The shared-memory map: while the keys are walked over, the stages; then the partial results.
template <class Cfg>
struct RegistersStorage {
  using Shape = RegistersShape<Cfg>;
  using Tile = CodeTile<Shape::kKeys, Shape::kHeadDim>;
  struct Stage {
    Tile k, v;
  };
  struct Partial {
    alignas(128) float o[Shape::kWarps][16 * 64];  // 64 columns at a time, float4 units in the order of unit()
    float2 rows[Shape::kWarps][16];                // bias, sum
  };
  union {
    Stage stages[Shape::kKeyGroups][Cfg::kStages];
    Partial partial;
  };

  // Where unit `i` of a row lies, so that neither the threads that write fragments nor those that read rows conflict.
  static __device__ __forceinline__ int unit(int row, int i) { return row * 64 + (i ^ (i >> 3 | (row & 1) << 1)) * 4; }
};

// Four codes as the two registers of an operand.
template <Format kFormat>
__device__ __forceinline__ void operand_of(unsigned codes, unsigned& first, unsigned& second) {
  if constexpr (kFormat == Format::kE4M3) {
    ptx::unpack_e4m3(codes, first, second);
  } else {
    half2 halves[2];
    Codec<kFormat>::to_half4(codes, halves);
    first = reinterpret_cast<const unsigned&>(halves[0]);
    second = reinterpret_cast<const unsigned&>(halves[1]);
  }
}

__device__ __forceinline__ unsigned pack_half2(float low, float high) {
  const half2 packed = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(packed);
}

// Grid: (ceil(seq_len / 32), heads). Block: 256 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ __forceinline__ void attention_registers(const RegistersParams& params) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(Cfg::kStages == 2 || Cfg::kStages == 3, "two stages or three");

  using Shape = RegistersShape<Cfg>;
  using Storage = RegistersStorage<Cfg>;
  using Tile = typename Storage::Tile;
  using Phase = RegistersPhase;
  constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys;
  constexpr int kSteps = kHeadDim / 16;    // of Q K^T, of 16 columns
  constexpr int kKeySteps = kKeys / 16;    // of P V, of 16 keys
  constexpr int kOwn = kHeadDim / 8;       // columns of O whose codes of V a thread loads, and 8-column tiles of O
  constexpr int kPasses = kHeadDim / 64;   // in which the partial results are combined
  constexpr float kSlack = 8.0f;           // a weight may be up to 2^8: half rounds it as it rounds one below 1
  constexpr unsigned kOnes = 0x3c003c00u;  // two halves
  constexpr int kStageBytes = sizeof(typename Storage::Stage);
  using VCodes = cuda::std::conditional_t<kHeadDim == 64, uint2, uint4>;
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, Phase::kCount> clock(params.phase_cycles);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = threadIdx.x / 32, group = warp / Shape::kRowGroups;
  const int head = blockIdx.y;
  const int first_row = blockIdx.x * Shape::kBlockM;
  const size_t head_offset = static_cast<size_t>(head) * params.seq_len * kHeadDim;
  const int tiles = (params.seq_len + kKeys - 1) / kKeys;

  // The group's two warps copy its tiles in their order, each thread one piece of every kRowsPerCopy-th row. Rows
  // beyond the end become zero and are not read; so do whole tiles, and the counts of the waits hold without a branch.
  constexpr int kRowsPerCopy = Shape::kGroupThreads / Tile::kPieces;
  constexpr int kNext = Shape::kKeyGroups * kKeys;  // rows from one tile of the group to the next
  const int copy_row = threadIdx.x % Shape::kGroupThreads / Tile::kPieces, copy_piece = threadIdx.x % Tile::kPieces;
  const size_t copy_offset = head_offset + (group * kKeys + copy_row) * kHeadDim + copy_piece * 16;
  const unsigned char* k_next = params.k + copy_offset;
  const unsigned char* v_next = params.v + copy_offset;
  int rows_left = params.seq_len - group * kKeys - copy_row;
  unsigned char* const copy_to = shared.stages[group][0].k.bytes + Tile::place(copy_row, copy_piece);
  const auto fetch = [&](int at) {  // into the stage that begins `at` bytes after the group's first
#pragma unroll
    for (int row = 0; row < kKeys; row += kRowsPerCopy) {
      const int bytes = row < rows_left ? 16 : 0;
      unsigned char* const to = copy_to + at + row * kHeadDim;
      ptx::cp_async_16(to, k_next + row * kHeadDim, bytes);
      ptx::cp_async_16(to + sizeof(Tile), v_next + row * kHeadDim, bytes);
    }
    ptx::cp_async_commit();
    k_next += kNext * kHeadDim;
    v_next += kNext * kHeadDim;
    rows_left -= kNext;
  };
#pragma unroll
  for (int i = 0; i < Cfg::kStages; ++i) fetch(i * kStageBytes);

  // Read here, long before their use, so that no thread waits for them.
  const float log2_e = 1.4426950408889634f;
  const float scale_log2 = params.q_scale[head] * params.k_scale[head] * params.softmax_scale * log2_e;
  const float v_scale = params.v_scale[head];

  // Q as A operands, rows g and g + 8 of the warp's 16. Thread t owns pieces t and t + 4 of a row of Q and of K: word i
  // of piece t is its part of step i, of piece t + 4 that of step 4 + i.
  unsigned q[kSteps][4];
  {
    alignas(16) unsigned codes[2][kSteps];
    const int row = first_row + warp % Shape::kRowGroups * 16 + g;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kSteps / 4; ++i) {
        const unsigned char* src =
            params.q + head_offset + static_cast<size_t>(row + 8 * r) * kHeadDim + (t + 4 * i) * 16;
        *reinterpret_cast<uint4*>(codes[r] + 4 * i) =
            row + 8 * r < params.seq_len ? *reinterpret_cast<const uint4*>(src) : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) operand_of<Cfg::kFormat>(codes[r][i], q[i][r], q[i][r + 2]);
    }
  }
  clock.mark(Phase::kQLoad);

  // Columns of B operands: of K, key g of eight. Of V, thread g owns columns kOwn * g on, column c of them in tile c of
  // O; its keys are 2t and 2t + 1 of eight. Both places move on with the stage: the compiler would work them out anew
  // for every tile otherwise.
  const int group_begin = group * sizeof(shared.stages[0]);
  int k_at = group_begin + Tile::place(g, t);
  int v_at = group_begin + sizeof(Tile) + Tile::place(2 * t, kOwn * g / 16) + kOwn * g % 16;

  float o[kOwn][4] = {};
  float sum[4] = {};                             // of the weights as rounded: a column of O for a V of ones
  float bias[2] = {CUDART_INF_F, CUDART_INF_F};  // minus the base of a row's weights, as an exponent of two

  int stage = 0;  // the byte at which it begins
#pragma unroll 1
  for (int tile = group; tile < tiles; tile += Shape::kKeyGroups) {
    // Behind branches, as the compiler would move a wait up past the products, or past the loads of Q.
    if (tile == group) {
      ptx::cp_async_wait<Cfg::kStages - 1>();
    } else {
      ptx::cp_async_wait<Cfg::kStages - 2>();
    }
    ptx::barrier_sync(1 + group, Shape::kGroupThreads);  // both warps have this tile, and have read the one before
    if (tile > group) {
      fetch(stage);
      const int step = stage == (Cfg::kStages - 1) * kStageBytes ? -stage : kStageBytes;
      stage += step;
      k_at += step;
      v_at += step;
    }
    clock.mark(Phase::kKvPrefetch);

    float scores[kKeys / 8][4] = {};
    {
      alignas(16) unsigned codes[kKeys / 8][kSteps];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < kSteps / 4; ++i) {
          *reinterpret_cast<uint4*>(codes[n] + 4 * i) =
              *reinterpret_cast<const uint4*>(smem + (i == 0 ? k_at : Tile::fourth(k_at)) + 8 * n * kHeadDim);
        }
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          unsigned b[2];
          operand_of<Cfg::kFormat>(codes[n][i], b[0], b[1]);
          ptx::mma_m16n8k16(scores[n], q[i], b[0], b[1]);
        }
      }
    }
    // Of V, 16 keys a step: [0] keys 2t and 2t + 1, [1] those 8 further on. Loaded here, so that the softmax hides it.
    alignas(16) unsigned v_codes[kKeySteps][2][2][kOwn / 4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<VCodes*>(v_codes[n / 2][n % 2][i]) =
            *reinterpret_cast<const VCodes*>(smem + (i == 0 ? v_at : Tile::odd(v_at)) + 8 * n * kHeadDim);
      }
    }
    clock.mark(Phase::kQK);

    if (params.seq_len - tile * kKeys < kKeys) {
      const int valid = params.seq_len - tile * kKeys - 2 * t;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * n + i % 2 >= valid) scores[n][i] = -CUDART_INF_F;
        }
      }
    }
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float pairs[kKeys / 8];  // a tree: half the latency of a chain
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) pairs[n] = fmaxf(scores[n][2 * r], scores[n][2 * r + 1]);
      top[r] = fmaxf(pairs[0], pairs[1]);
      if constexpr (kKeys == 32) top[r] = fmaxf(top[r], fmaxf(pairs[2], pairs[3]));
    }
    // True on the first tile, whose rows all have a key: the bias is infinite. Afterwards it is rare, and without it
    // neither the lanes of a row have to agree on a maximum nor has O to be rescaled.
    const float largest = fmaxf(fmaf(top[0], scale_log2, bias[0]), fmaf(top[1], scale_log2, bias[1]));
    if (__any_sync(0xffffffffu, largest > kSlack)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
        const float moved = fminf(bias[r], -top[r] * scale_log2);
        const float rescale = ptx::ex2(moved - bias[r]);  // 0 on the first tile
        bias[r] = moved;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sum[2 * r + i] *= rescale;
#pragma unroll
          for (int c = 0; c < kOwn; ++c) o[c][2 * r + i] *= rescale;
        }
      }
    }
    // Two neighbouring 16 x 8 tiles of the accumulator are, rounded to half, the A operand of 16 keys.
    unsigned weights[kKeySteps][4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        weights[n / 2][n % 2 * 2 + r] = pack_half2(ptx::ex2(fmaf(scores[n][2 * r], scale_log2, bias[r])),
                                                   ptx::ex2(fmaf(scores[n][2 * r + 1], scale_log2, bias[r])));
      }
    }
    clock.mark(Phase::kSoftmax);

#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
      // The sum is taken over the rounded weights, so that the weights that multiply V add up to the divisor.
      ptx::mma_m16n8k16(sum, weights[s], kOnes, kOnes);
#pragma unroll
      for (int c = 0; c < kOwn; c += 2) {
        // Two columns of two keys each: their codes side by side are the codes of two registers.
        unsigned b[2][2];
#pragma unroll
        for (int half_step = 0; half_step < 2; ++half_step) {
          const unsigned(&codes)[2][kOwn / 4] = v_codes[s][half_step];
          const unsigned pairs = __byte_perm(codes[0][c / 4], codes[1][c / 4], c % 4 == 0 ? 0x5140 : 0x7362);
          operand_of<Cfg::kFormat>(pairs, b[0][half_step], b[1][half_step]);
        }
        ptx::mma_m16n8k16(o[c], weights[s], b[0][0], b[0][1]);
        ptx::mma_m16n8k16(o[c + 1], weights[s], b[1][0], b[1][1]);
      }
    }
    clock.mark(Phase::kPV);

    if constexpr (Cfg::kDebugPrint) {
      if (blockIdx.x == 0 && head == 0 && threadIdx.x % Shape::kGroupThreads == 0) {
        printf("tile %d: keys %d, row 0 base %.6f (exponent), sum %.6f, p[0] %.6f\n", tile,
               min(params.seq_len - tile * kKeys, kKeys), -bias[0], sum[0],
               __low2float(reinterpret_cast<const half2&>(weights[0][0])));
      }
    }
  }

  // The partial results take the place of the stages, into which zeros of tiles beyond the end may be still under way.
  ptx::cp_async_wait<0>();
  __syncthreads();
  typename Storage::Partial& partial = shared.partial;
  if (t == 0) {
    partial.rows[warp][g] = make_float2(bias[0], sum[0]);
    partial.rows[warp][g + 8] = make_float2(bias[1], sum[2]);
  }
  // Each thread then adds up eight neighbouring columns of one row per pass. A group without a key has an infinite bias
  // and weighs nothing; the first group always has one.
  const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
  unsigned values[kPasses][4];  // as halves
  float weight[Shape::kKeyGroups];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (pass > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 4, c = 8 * pass + i % 2 * 4, e = i / 2 % 2 + 2 * r;
      *reinterpret_cast<float4*>(partial.o[warp] + Storage::unit(g + 8 * r, 4 * t + i % 4)) =
          make_float4(o[c][e], o[c + 1][e], o[c + 2][e], o[c + 3][e]);
    }
    __syncthreads();
    if (pass == 0) {
      clock.mark(Phase::kCombine);
      float2 state[Shape::kKeyGroups];
      float least = CUDART_INF_F, total = 0.0f;
#pragma unroll
      for (int i = 0; i < Shape::kKeyGroups; ++i) {
        state[i] = partial.rows[i * Shape::kRowGroups + row / 16][row % 16];
        least = fminf(least, state[i].x);
      }
#pragma unroll
      for (int i = 0; i < Shape::kKeyGroups; ++i) {
        weight[i] = ptx::ex2(least - state[i].x);
        total = fmaf(weight[i], state[i].y, total);
      }
      const float factor = __fdividef(v_scale, total);
#pragma unroll
      for (int i = 0; i < Shape::kKeyGroups; ++i) weight[i] *= factor;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < Shape::kKeyGroups; ++j) {
        const float4 y = *reinterpret_cast<const float4*>(partial.o[j * Shape::kRowGroups + row / 16] +
                                                          Storage::unit(row % 16, 2 * piece + i));
        x.x = fmaf(weight[j], y.x, x.x);
        x.y = fmaf(weight[j], y.y, x.y);
        x.z = fmaf(weight[j], y.z, x.z);
        x.w = fmaf(weight[j], y.w, x.w);
      }
      values[pass][2 * i] = pack_half2(x.x, x.y);
      values[pass][2 * i + 1] = pack_half2(x.z, x.w);
    }
  }
  if (first_row + row < params.seq_len) {
    half* out = params.out + head_offset + static_cast<size_t>(first_row + row) * kHeadDim + kOwn * piece;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      __stwb(reinterpret_cast<uint4*>(out + 8 * pass),
             make_uint4(values[pass][0], values[pass][1], values[pass][2], values[pass][3]));
    }
  }
  clock.mark(Phase::kStore);
  clock.write();
}

}  // namespace greenfast
