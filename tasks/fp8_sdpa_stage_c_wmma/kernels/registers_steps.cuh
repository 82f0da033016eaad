// The main loop and epilogue of Stage 3B's consumer warps, independent of the copies of K and V.
#pragma once

#include <math_constants.h>

#include "common/conditional.cuh"
#include "common/phase_clock.cuh"
#include "registers_codes.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace greenfast {

__device__ __forceinline__ unsigned pack_half2(float low, float high) {
  const half2 packed = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(packed);
}

// Computes attention of a warp's 16 rows over its group's keys, then combines the groups' partial results and writes O.
//
// ready(tile, group, k_at, v_at): waits for a tile. release(k_at, v_at): called when the thread has loaded the tile to
// registers: K at once; V before the softmax, or with kLoadVLate after it, which needs fewer registers. One of the two
// advances k_at and v_at, the thread's offsets in shared memory, to the next stage; they start in the stage at byte
// offset first_stage. finish(): called before `partial` is written. sync_consumers(): barrier of the kThreads consumer
// threads.
template <class Cfg, bool kLoadVLate, class Clock, class Ready, class Release, class Finish, class Meet>
__device__ __forceinline__ void attend(const LadderParams& params, const RegistersWork<Cfg>& work,
                                       const RegistersThread<Cfg>& thread, const RegistersQueries<Cfg>& queries,
                                       const unsigned char* smem, int first_stage,
                                       typename RegistersStorage<Cfg>::Partial& partial, Clock& clock, Ready ready,
                                       Release release, Finish finish, Meet sync_consumers) {
  using Shape = RegistersShape<Cfg>;
  using Storage = RegistersStorage<Cfg>;
  using Tile = typename Storage::Tile;
  using Phase = RegistersPhase;
  constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys;
  constexpr int kSteps = RegistersQueries<Cfg>::kSteps;
  constexpr int kKeySteps = kKeys / 16;         // k-steps of P V, 16 keys each
  constexpr int kThreadColumns = kHeadDim / 8;  // V columns that a thread loads; also 8-column tiles of O
  constexpr int kPasses = kHeadDim / 64;        // passes of the combine
  constexpr float kRescaleThreshold = 8.0f;     // P may be up to 2^8: the relative rounding error in half is the same
  constexpr unsigned kOnes = 0x3c003c00u;       // two halves of 1
  constexpr int kBatch = kLoadVLate ? 2 : kKeys / 8;  // 8-key tiles of scores per batch of K loads
  using VCodes = conditional_t<kHeadDim == 64, uint2, uint4>;

  unsigned q[kSteps][4];
  queries.unpack(q);
  clock.mark(Phase::kQLoad);
  const int g = thread.g, t = thread.t, warp = thread.warp, group = thread.group;

  // Columns of B operands: key g of each eight keys of K. Of V, thread g has columns kThreadColumns * g on, column c in
  // tile c of O, and keys 2t and 2t + 1 of each eight. Both offsets advance with the stage: otherwise the compiler
  // recomputes them for every tile.
  int k_at = first_stage + Tile::chunk_offset(g, t);
  int v_at = first_stage + sizeof(Tile) + Tile::chunk_offset(2 * t, kThreadColumns * g / 16) + kThreadColumns * g % 16;

  float o[kThreadColumns][4] = {};
  float sum[4] = {};                             // row sum of the rounded P: an extra column of O, with V = 1
  float bias[2] = {CUDART_INF_F, CUDART_INF_F};  // minus the base of a row's exponents

#pragma unroll 1
  for (int tile = group; tile < work.tiles; tile += Shape::kKeyGroups) {
    ready(tile, group, k_at, v_at);
    clock.mark(Phase::kKvPrefetch);

    float scores[kKeys / 8][4] = {};
#pragma unroll
    for (int first = 0; first < kKeys / 8; first += kBatch) {
      alignas(16) unsigned codes[kBatch][kSteps];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
#pragma unroll
        for (int i = 0; i < kSteps / 4; ++i) {
          *reinterpret_cast<uint4*>(codes[n] + 4 * i) =
              *reinterpret_cast<const uint4*>(smem + (i == 0 ? k_at : Tile::fourth(k_at)) + 8 * (first + n) * kHeadDim);
        }
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
          unsigned b[2];
          operand_of<Cfg::kFormat>(codes[n][i], b[0], b[1]);
          ptx::mma_m16n8k16(scores[first + n], q[i], b[0], b[1]);
        }
      }
    }
    // V, 16 keys per k-step: [0] keys 2t and 2t + 1, [1] those 8 further on.
    alignas(16) unsigned v_codes[kKeySteps][2][2][kThreadColumns / 4];
    const auto load_v = [&] {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<VCodes*>(v_codes[n / 2][n % 2][i]) =
              *reinterpret_cast<const VCodes*>(smem + (i == 0 ? v_at : Tile::odd_row(v_at)) + 8 * n * kHeadDim);
        }
      }
      release(k_at, v_at);
    };
    if constexpr (!kLoadVLate) load_v();  // the softmax hides the latency
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
    float row_max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float pairs[kKeys / 8];  // a tree: half the latency of a chain
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) pairs[n] = fmaxf(scores[n][2 * r], scores[n][2 * r + 1]);
      row_max[r] = fmaxf(pairs[0], pairs[1]);
      if constexpr (kKeys == 32) row_max[r] = fmaxf(row_max[r], fmaxf(pairs[2], pairs[3]));
    }
    // True for the first tile, whose bias is infinite, and rarely after it. If false, neither a row maximum over the
    // quad nor a rescale of O is needed.
    const float max_exponent =
        fmaxf(fmaf(row_max[0], work.scale_log2, bias[0]), fmaf(row_max[1], work.scale_log2, bias[1]));
    if (__any_sync(0xffffffffu, max_exponent > kRescaleThreshold)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 1));
        row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 2));
        const float new_bias = fminf(bias[r], -row_max[r] * work.scale_log2);
        const float rescale = ptx::ex2(new_bias - bias[r]);
        bias[r] = new_bias;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sum[2 * r + i] *= rescale;
#pragma unroll
          for (int c = 0; c < kThreadColumns; ++c) o[c][2 * r + i] *= rescale;
        }
      }
    }
    // Two adjacent 16 x 8 accumulator tiles, rounded to half, are the A operand of 16 keys.
    unsigned p_frag[kKeySteps][4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p_frag[n / 2][n % 2 * 2 + r] = pack_half2(ptx::ex2(fmaf(scores[n][2 * r], work.scale_log2, bias[r])),
                                                  ptx::ex2(fmaf(scores[n][2 * r + 1], work.scale_log2, bias[r])));
      }
    }
    clock.mark(Phase::kSoftmax);

    if constexpr (kLoadVLate) load_v();
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
      // The row sum is over the rounded P, so that the P that multiply V add up to the divisor.
      ptx::mma_m16n8k16(sum, p_frag[s], kOnes, kOnes);
#pragma unroll
      for (int c = 0; c < kThreadColumns; c += 2) {
        // Two columns of two keys each; their bytes interleaved convert to two registers.
        unsigned b[2][2];
#pragma unroll
        for (int half_step = 0; half_step < 2; ++half_step) {
          const unsigned (&codes)[2][kThreadColumns / 4] = v_codes[s][half_step];
          const unsigned pairs = __byte_perm(codes[0][c / 4], codes[1][c / 4], c % 4 == 0 ? 0x5140 : 0x7362);
          operand_of<Cfg::kFormat>(pairs, b[0][half_step], b[1][half_step]);
        }
        ptx::mma_m16n8k16(o[c], p_frag[s], b[0][0], b[0][1]);
        ptx::mma_m16n8k16(o[c + 1], p_frag[s], b[1][0], b[1][1]);
      }
    }
    clock.mark(Phase::kPV);

    if constexpr (Cfg::kDebugPrint) {
      if (work.first_row == 0 && work.head == 0 && threadIdx.x % Shape::kGroupThreads == 0) {
        printf("tile %d: keys %d, row 0 base %.6f (exponent), sum %.6f, p[0] %.6f\n", tile,
               min(params.seq_len - tile * kKeys, kKeys), -bias[0], sum[0],
               __low2float(reinterpret_cast<const half2&>(p_frag[0][0])));
      }
    }
  }

  finish();
  if (t == 0) {
    partial.rows[warp][g] = make_float2(bias[0], sum[0]);
    partial.rows[warp][g + 8] = make_float2(bias[1], sum[2]);
  }
  // Each thread combines eight adjacent columns of one row per pass. A group without keys has an infinite bias and
  // factor 0; the first group always has keys.
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  unsigned values[kPasses][4];  // as half2
  float group_factor[Shape::kKeyGroups];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (pass > 0) sync_consumers();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 4, c = 8 * pass + i % 2 * 4, e = i / 2 % 2 + 2 * r;
      *reinterpret_cast<float4*>(partial.o[warp] + Storage::unit(g + 8 * r, 4 * t + i % 4)) =
          make_float4(o[c][e], o[c + 1][e], o[c + 2][e], o[c + 3][e]);
    }
    sync_consumers();
    if (pass == 0) {
      clock.mark(Phase::kCombine);
      float2 state[Shape::kKeyGroups];
      float min_bias = CUDART_INF_F, total = 0.0f;
#pragma unroll
      for (int i = 0; i < Shape::kKeyGroups; ++i) {
        state[i] = partial.rows[i * Shape::kRowGroups + row / 16][row % 16];
        min_bias = fminf(min_bias, state[i].x);
      }
#pragma unroll
      for (int i = 0; i < Shape::kKeyGroups; ++i) {
        group_factor[i] = ptx::ex2(min_bias - state[i].x);
        total = fmaf(group_factor[i], state[i].y, total);
      }
      const float factor = __fdividef(work.v_scale, total);
#pragma unroll
      for (int i = 0; i < Shape::kKeyGroups; ++i) group_factor[i] *= factor;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < Shape::kKeyGroups; ++j) {
        const float4 y = *reinterpret_cast<const float4*>(partial.o[j * Shape::kRowGroups + row / 16] +
                                                          Storage::unit(row % 16, 2 * chunk + i));
        x.x = fmaf(group_factor[j], y.x, x.x);
        x.y = fmaf(group_factor[j], y.y, x.y);
        x.z = fmaf(group_factor[j], y.z, x.z);
        x.w = fmaf(group_factor[j], y.w, x.w);
      }
      values[pass][2 * i] = pack_half2(x.x, x.y);
      values[pass][2 * i + 1] = pack_half2(x.z, x.w);
    }
  }
  if (work.first_row + row < params.seq_len) {
    half* out =
        params.out + work.head_offset + static_cast<size_t>(work.first_row + row) * kHeadDim + kThreadColumns * chunk;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      __stwb(reinterpret_cast<uint4*>(out + 8 * pass),
             make_uint4(values[pass][0], values[pass][1], values[pass][2], values[pass][3]));
    }
  }
  clock.mark(Phase::kStore);
}

}  // namespace greenfast
