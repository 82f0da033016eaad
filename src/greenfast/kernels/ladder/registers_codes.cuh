// Codes in Stage 3B: where they lie in shared memory, how they come there, and the operands that they become.
#pragma once

#include "common/formats.cuh"
#include "common/named_barriers.cuh"
#include "ladder/registers_plan.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/e4m3.cuh"

namespace greenfast {

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

// A thread's part in the copies of its key group: of the group's tiles, in their order, one piece of every
// kRowsPerCopy-th row. Rows beyond the end become zero and are not read; so do whole tiles, and the counts of the waits
// hold without a branch.
template <class Cfg>
struct GroupCopies {
  using Shape = RegistersShape<Cfg>;
  using Tile = typename RegistersStorage<Cfg>::Tile;
  static constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys;
  static constexpr int kRowsPerCopy = Shape::kGroupThreads / Tile::kPieces;
  static constexpr int kNext = Shape::kKeyGroups * kKeys;  // rows from one tile of the group to the next

  const int copy_row = threadIdx.x % Shape::kGroupThreads / Tile::kPieces, copy_piece = threadIdx.x % Tile::kPieces;
  unsigned char* copy_to;
  const unsigned char* k_next;
  const unsigned char* v_next;
  int rows_left;

  __device__ __forceinline__ GroupCopies(const LadderParams& p, size_t head_offset, int group,
                                         typename RegistersStorage<Cfg>::Stage& first) {
    begin(p, head_offset, group);
    copy_to = first.k.bytes + Tile::place(copy_row, copy_piece);
  }

  // Of a head, from the group's first tile on.
  __device__ __forceinline__ void begin(const LadderParams& p, size_t head_offset, int group) {
    const size_t copy_offset = head_offset + (group * kKeys + copy_row) * kHeadDim + copy_piece * 16;
    k_next = p.k + copy_offset;
    v_next = p.v + copy_offset;
    rows_left = p.seq_len - group * kKeys - copy_row;
  }

  // The next tile, into the stage that begins `at` bytes after the first.
  __device__ __forceinline__ void fetch(int at) {
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
  }

  // Until both of the group's warps have this tile, and have read the one before.
  static __device__ __forceinline__ void wait(int tile, int group) {
    // Behind branches, as the compiler would move a wait up past the products, or past the loads of Q.
    if (tile == group) {
      ptx::cp_async_wait<Cfg::kStages - 1>();
    } else {
      ptx::cp_async_wait<Cfg::kStages - 2>();
    }
    ptx::barrier_sync(RegistersBarrier::kKeyGroup + group, Shape::kGroupThreads);
  }
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

// Codes of a warp's 16 rows of Q: of a thread those of rows g and g + 8. Thread t owns pieces t and t + 4 of a row of Q
// and of K: word i of piece t is its part of step i, of piece t + 4 that of step 4 + i.
template <class Cfg>
struct RegistersQueries {
  using Shape = RegistersShape<Cfg>;
  static constexpr int kSteps = Shape::kHeadDim / 16;  // of Q K^T, of 16 columns
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

  // As A operands.
  __device__ __forceinline__ void unpack(unsigned (&q)[kSteps][4]) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) operand_of<Cfg::kFormat>(codes[r][i], q[i][r], q[i][r + 2]);
    }
  }
};

}  // namespace greenfast
