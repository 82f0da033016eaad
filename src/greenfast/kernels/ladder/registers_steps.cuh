// What the multiplying warps of Stage 3B do with their query rows, however the tiles of K and V come to them.
#pragma once

#include <math_constants.h>

#include "common/conditional.cuh"
#include "common/phase_clock.cuh"
#include "ladder/registers_codes.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace greenfast {

__device__ __forceinline__ unsigned pack_half2(float low, float high) {
  const half2 packed = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(packed);
}

// Attention of a warp's 16 rows to its group's keys; then the groups' partial results are added up and written.
//
// ready(tile, group, k_at, v_at) waits for a tile; release(k_at, v_at) says that its codes have been loaded: K's at
// once and V's before the softmax or, for fewer registers, as `kLate` as can be. One of the two moves the places of the
// thread's codes, at first in the stage at byte `first_stage`, to the next stage. After finish() nothing uses
// `partial`; meet() is a barrier of the kThreads threads that have rows.
template <class Cfg, bool kLate, class Clock, class Ready, class Release, class Finish, class Meet>
__device__ __forceinline__ void attend(const LadderParams& params, const RegistersWork<Cfg>& work,
                                       const RegistersThread<Cfg>& thread, const RegistersQueries<Cfg>& queries,
                                       const unsigned char* smem, int first_stage,
                                       typename RegistersStorage<Cfg>::Partial& partial, Clock& clock, Ready ready,
                                       Release release, Finish finish, Meet meet) {
  using Shape = RegistersShape<Cfg>;
  using Storage = RegistersStorage<Cfg>;
  using Tile = typename Storage::Tile;
  using Phase = RegistersPhase;
  constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys;
  constexpr int kSteps = RegistersQueries<Cfg>::kSteps;
  constexpr int kKeySteps = kKeys / 16;    // of P V, of 16 keys
  constexpr int kOwn = kHeadDim / 8;       // columns of O whose codes of V a thread loads, and 8-column tiles of O
  constexpr int kPasses = kHeadDim / 64;   // in which the partial results are combined
  constexpr float kSlack = 8.0f;           // a weight may be up to 2^8: half rounds it as it rounds one below 1
  constexpr unsigned kOnes = 0x3c003c00u;  // two halves
  constexpr int kAtOnce = kLate ? 2 : kKeys / 8;  // 8-key columns of scores whose codes of K are loaded together
  using VCodes = conditional_t<kHeadDim == 64, uint2, uint4>;

  unsigned q[kSteps][4];
  queries.unpack(q);
  clock.mark(Phase::kQLoad);
  const int g = thread.g, t = thread.t, warp = thread.warp, group = thread.group;

  // Columns of B operands: of K, key g of eight. Of V, thread g owns columns kOwn * g on, column c of them in tile c of
  // O; its keys are 2t and 2t + 1 of eight. Both places move on with the stage: the compiler would work them out anew
  // for every tile otherwise.
  int k_at = first_stage + Tile::place(g, t);
  int v_at = first_stage + sizeof(Tile) + Tile::place(2 * t, kOwn * g / 16) + kOwn * g % 16;

  float o[kOwn][4] = {};
  float sum[4] = {};                             // of the weights as rounded: a column of O for a V of ones
  float bias[2] = {CUDART_INF_F, CUDART_INF_F};  // minus the base of a row's weights, as an exponent of two

#pragma unroll 1
  for (int tile = group; tile < work.tiles; tile += Shape::kKeyGroups) {
    ready(tile, group, k_at, v_at);
    clock.mark(Phase::kKvPrefetch);

    float scores[kKeys / 8][4] = {};
#pragma unroll
    for (int first = 0; first < kKeys / 8; first += kAtOnce) {
      alignas(16) unsigned codes[kAtOnce][kSteps];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int i = 0; i < kSteps / 4; ++i) {
          *reinterpret_cast<uint4*>(codes[n] + 4 * i) = *reinterpret_cast<const uint4*>(
              smem + (i == 0 ? k_at : Tile::fourth(k_at)) + 8 * (first + n) * kHeadDim);
        }
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          unsigned b[2];
          operand_of<Cfg::kFormat>(codes[n][i], b[0], b[1]);
          ptx::mma_m16n8k16(scores[first + n], q[i], b[0], b[1]);
        }
      }
    }
    // Of V, 16 keys a step: [0] keys 2t and 2t + 1, [1] those 8 further on.
    alignas(16) unsigned v_codes[kKeySteps][2][2][kOwn / 4];
    const auto load_v = [&] {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<VCodes*>(v_codes[n / 2][n % 2][i]) =
              *reinterpret_cast<const VCodes*>(smem + (i == 0 ? v_at : Tile::odd(v_at)) + 8 * n * kHeadDim);
        }
      }
      release(k_at, v_at);
    };
    if constexpr (!kLate) load_v();  // so that the softmax hides it
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
    const float largest = fmaxf(fmaf(top[0], work.scale_log2, bias[0]), fmaf(top[1], work.scale_log2, bias[1]));
    if (__any_sync(0xffffffffu, largest > kSlack)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
        const float moved = fminf(bias[r], -top[r] * work.scale_log2);
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
        weights[n / 2][n % 2 * 2 + r] = pack_half2(ptx::ex2(fmaf(scores[n][2 * r], work.scale_log2, bias[r])),
                                                   ptx::ex2(fmaf(scores[n][2 * r + 1], work.scale_log2, bias[r])));
      }
    }
    clock.mark(Phase::kSoftmax);

    if constexpr (kLate) load_v();
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
      if (work.first_row == 0 && work.head == 0 && threadIdx.x % Shape::kGroupThreads == 0) {
        printf("tile %d: keys %d, row 0 base %.6f (exponent), sum %.6f, p[0] %.6f\n", tile,
               min(params.seq_len - tile * kKeys, kKeys), -bias[0], sum[0],
               __low2float(reinterpret_cast<const half2&>(weights[0][0])));
      }
    }
  }

  finish();
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
    if (pass > 0) meet();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 4, c = 8 * pass + i % 2 * 4, e = i / 2 % 2 + 2 * r;
      *reinterpret_cast<float4*>(partial.o[warp] + Storage::unit(g + 8 * r, 4 * t + i % 4)) =
          make_float4(o[c][e], o[c + 1][e], o[c + 2][e], o[c + 3][e]);
    }
    meet();
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
      const float factor = __fdividef(work.v_scale, total);
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
  if (work.first_row + row < params.seq_len) {
    half* out = params.out + work.head_offset + static_cast<size_t>(work.first_row + row) * kHeadDim + kOwn * piece;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      __stwb(reinterpret_cast<uint4*>(out + 8 * pass),
             make_uint4(values[pass][0], values[pass][1], values[pass][2], values[pass][3]));
    }
  }
  clock.mark(Phase::kStore);
}

}  // namespace greenfast
