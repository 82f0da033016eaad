// Stage 3B, full fusion: scores and P stay in registers.
// Why: scores, P and half tiles no longer pass through shared memory, and the barriers around them go.
// Measured: FAST, 1.685x over Stage 2 at S=512 on an H100 (evidence/h100/fp8_sdpa-e4m3-stage3b).
//
// With kStages = 3 it is the rung stage3b_pipe3: no faster, 0.988x (evidence/h100/fp8_sdpa-e4m3-stage3b_pipe3).
//
// A block of eight warps computes 32 query rows of one head. Two warps, with 16 rows each, share a key group (every
// fourth tile of keys). The four groups combine their partial results in shared memory at the end. K and V are copied
// by cp.async in 8 bits and dequantized on the way to the operands of mma.m16n8k16. The head dim may be permuted in
// both products; the order here gives each thread whole vectors of 8-bit values. Online softmax (Milakov and
// Gimelshein, 2018) in base 2; the base of a row changes only if P would exceed 2^8.
#pragma once

#include <math_constants.h>

#include "common.cuh"
#include "common/phase_clock.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace greenfast {

// ---- phases, and the division of the work among blocks and threads --------------------------------------------------

// Dequantization has no phase of its own: it is part of the products.
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
  static constexpr int kGroupThreads = 32 * kRowGroups;  // threads that share the tiles of a key group
  static constexpr int kKeys = 2048 / kHeadDim;          // keys of a tile
};

// A thread's position: its warp and key group, and in the warp row g and column pair t of the mma fragments.
template <class Cfg>
struct RegistersThread {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = threadIdx.x / 32, group = warp / RegistersShape<Cfg>::kRowGroups;
};

// A work item: kBlockM query rows of a head, with all its keys.
template <class Cfg>
struct RegistersWork {
  using Shape = RegistersShape<Cfg>;
  int head, first_row;
  size_t head_offset;  // offset of the head in q, k and v
  int tiles;
  float scale_log2, v_scale;  // scale_log2: score scale times log2(e)

  __device__ __forceinline__ RegistersWork(const LadderParams& p, int head, int first_row)
      : head(head),
        first_row(first_row),
        head_offset(static_cast<size_t>(head) * p.seq_len * Shape::kHeadDim),
        tiles((p.seq_len + Shape::kKeys - 1) / Shape::kKeys) {}

  // Called long before their use, to hide the latency.
  __device__ __forceinline__ void read_scales(const LadderParams& p) {
    const float log2_e = 1.4426950408889634f;
    scale_log2 = p.q_scale[head] * p.k_scale[head] * p.softmax_scale * log2_e;
    v_scale = p.v_scale[head];
  }
};

// The use of the block's named barriers. Barrier 0 is that of __syncthreads().
struct RegistersBarrier {
  enum {
    kBlock,
    kKeyGroup  // 4 barriers: the warps that share a key group's tiles
  };
};

// ---- the 8-bit tiles: layout in shared memory, copies, and conversion to operands -----------------------------------

// A tile of K or V: rows of 16-byte chunks. Two rows of 64 bytes, or one of 128, span the 128 bytes of all banks. The
// swizzle avoids bank conflicts of the chunks that eight lanes load together: of K, chunks 0..3 (or 4..7) of rows 2i
// and 2i + 1; of V, two adjacent chunks of rows 2t or 2t + 1 for t = 0..3. The two chunks of a 32-byte sector of global
// memory stay adjacent and in order: otherwise cp.async fetches the sector twice (Stage 3A).
template <int kRows, int kCols>
struct CodeTile {
  static constexpr int kChunksPerRow = kCols / 16;
  static_assert(kChunksPerRow == 4 || kChunksPerRow == 8, "rows of 64 or 128 codes");
  alignas(128) unsigned char bytes[kRows * kCols];

  // The byte offset of a chunk. The same chunk eight rows below is at + 8 * kCols. odd_row: the same chunk of the next
  // row, for an even row. fourth: the chunk four further on, for one of the first four.
  static __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    const int swizzle = ((row ^ row >> 1) & 1) * 4 + (row >> 1 & 2);
    return row * kChunksPerRow / 8 * 128 + (chunk ^ swizzle) * 16;
  }
  static __device__ __forceinline__ int odd_row(int chunk_offset) {
    return (chunk_offset ^ 64) + kChunksPerRow / 8 * 128;
  }
  static __device__ __forceinline__ int fourth(int chunk_offset) { return chunk_offset ^ 64; }
};

// The shared-memory map: the stages during the main loop, then the partial results.
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

  // The swizzled offset of float4 unit `i` of a row; free of conflicts for writing fragments and for reading rows.
  static __device__ __forceinline__ int unit(int row, int i) { return row * 64 + (i ^ (i >> 3 | (row & 1) << 1)) * 4; }
};

// A thread's part of the copies of its key group: one chunk of every kRowsPerCopy-th row of the group's tiles, in
// order. Rows beyond the end are zero-filled without a read. So are tiles beyond the end, so that cp.async group counts
// hold without a branch.
template <class Cfg>
struct GroupCopies {
  using Shape = RegistersShape<Cfg>;
  using Tile = typename RegistersStorage<Cfg>::Tile;
  static constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys;
  static constexpr int kRowsPerCopy = Shape::kGroupThreads / Tile::kChunksPerRow;
  static constexpr int kNext = Shape::kKeyGroups * kKeys;  // rows between tiles of the group

  const int copy_row = threadIdx.x % Shape::kGroupThreads / Tile::kChunksPerRow,
            copy_chunk = threadIdx.x % Tile::kChunksPerRow;
  unsigned char* copy_to;
  const unsigned char* k_next;
  const unsigned char* v_next;
  int rows_left;

  __device__ __forceinline__ GroupCopies(const LadderParams& p, size_t head_offset, int group,
                                         typename RegistersStorage<Cfg>::Stage& first) {
    begin(p, head_offset, group);
    copy_to = first.k.bytes + Tile::chunk_offset(copy_row, copy_chunk);
  }

  // Starts at the group's first tile of a head.
  __device__ __forceinline__ void begin(const LadderParams& p, size_t head_offset, int group) {
    const size_t copy_offset = head_offset + (group * kKeys + copy_row) * kHeadDim + copy_chunk * 16;
    k_next = p.k + copy_offset;
    v_next = p.v + copy_offset;
    rows_left = p.seq_len - group * kKeys - copy_row;
  }

  // Copies the next tile to the stage at byte offset stage_offset from the first.
  __device__ __forceinline__ void fetch(int stage_offset) {
#pragma unroll
    for (int row = 0; row < kKeys; row += kRowsPerCopy) {
      const int bytes = row < rows_left ? 16 : 0;
      unsigned char* const dst = copy_to + stage_offset + row * kHeadDim;
      ptx::cp_async_16(dst, k_next + row * kHeadDim, bytes);
      ptx::cp_async_16(dst + sizeof(Tile), v_next + row * kHeadDim, bytes);
    }
    ptx::cp_async_commit();
    k_next += kNext * kHeadDim;
    v_next += kNext * kHeadDim;
    rows_left -= kNext;
  }

  // Waits until both warps of the group have this tile and have read the previous one.
  static __device__ __forceinline__ void wait(int tile, int group) {
    // In branches: otherwise the compiler moves the wait ahead of the products or of the loads of Q.
    if (tile == group) {
      ptx::cp_async_wait<Cfg::kStages - 1>();
    } else {
      ptx::cp_async_wait<Cfg::kStages - 2>();
    }
    ptx::barrier_sync(RegistersBarrier::kKeyGroup + group, Shape::kGroupThreads);
  }
};

// Four codes as the two registers of an operand (half).
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

// The quantized Q of a warp's 16 rows; a thread has rows g and g + 8. Thread t has chunks t and t + 4 of a row of Q and
// of K: word i of chunk t belongs to k-step i, of chunk t + 4 to k-step 4 + i.
template <class Cfg>
struct RegistersQueries {
  using Shape = RegistersShape<Cfg>;
  static constexpr int kSteps = Shape::kHeadDim / 16;  // k-steps of Q K^T, 16 columns each
  alignas(16) unsigned codes[2][kSteps];

  __device__ __forceinline__ void load(const LadderParams& p, const RegistersWork<Cfg>& work,
                                       const RegistersThread<Cfg>& thread) {
    const int row = work.first_row + thread.warp % Shape::kRowGroups * 16 + thread.g;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kSteps / 4; ++i) {
        const unsigned char* src =
            p.q + work.head_offset + static_cast<size_t>(row + 8 * r) * Shape::kHeadDim + (thread.t + 4 * i) * 16;
        *reinterpret_cast<uint4*>(codes[r] + 4 * i) =
            row + 8 * r < p.seq_len ? *reinterpret_cast<const uint4*>(src) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Converts it to A operands.
  __device__ __forceinline__ void unpack(unsigned (&q)[kSteps][4]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) operand_of<Cfg::kFormat>(codes[r][i], q[i][r], q[i][r + 2]);
    }
  }
};

// ---- the main loop and epilogue of the warps that multiply, independent of the copies of K and V --------------------

// Words of codes as one vector.
template <int kWords>
struct CodeVector;
template <>
struct CodeVector<2> {
  using type = uint2;
};
template <>
struct CodeVector<4> {
  using type = uint4;
};

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
  using VCodes = typename CodeVector<kThreadColumns / 4>::type;

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

// ---- the kernel -----------------------------------------------------------------------------------------------------

// Grid: (ceil(seq_len / 32), heads). Block: 256 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ __forceinline__ void attention_registers(const LadderParams& params) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(Cfg::kStages == 2 || Cfg::kStages == 3, "two stages or three");

  using Shape = RegistersShape<Cfg>;
  using Storage = RegistersStorage<Cfg>;
  using Phase = RegistersPhase;
  constexpr int kStageBytes = sizeof(typename Storage::Stage);
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, Phase::kCount> clock(params.phase_cycles);

  const RegistersThread<Cfg> thread;
  RegistersWork<Cfg> work(params, blockIdx.y, blockIdx.x * Shape::kBlockM);
  GroupCopies<Cfg> copies(params, work.head_offset, thread.group, shared.stages[thread.group][0]);
#pragma unroll
  for (int i = 0; i < Cfg::kStages; ++i) copies.fetch(i * kStageBytes);
  work.read_scales(params);
  RegistersQueries<Cfg> queries;
  queries.load(params, work, thread);

  int stage = 0;  // byte offset of the current stage
  const auto ready = [&](int tile, int group, int& k_at, int& v_at) {
    copies.wait(tile, group);
    if (tile > group) {
      copies.fetch(stage);
      const int step = stage == (Cfg::kStages - 1) * kStageBytes ? -stage : kStageBytes;
      stage += step;
      k_at += step;
      v_at += step;
    }
  };
  const auto finish = [] {  // zero-fills beyond the last tile may be in flight
    ptx::cp_async_wait<0>();
    __syncthreads();
  };
  attend<Cfg, false>(
      params, work, thread, queries, smem, thread.group * sizeof(shared.stages[0]), shared.partial, clock, ready,
      [](int&, int&) {}, finish, [] { __syncthreads(); });
  clock.write();
}

}  // namespace greenfast
