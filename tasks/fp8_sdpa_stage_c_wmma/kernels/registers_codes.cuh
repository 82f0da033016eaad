// The 8-bit tiles of Stage 3B: layout in shared memory, copies, and conversion to operands.
#pragma once

#include "common/formats.cuh"
#include "common/named_barriers.cuh"
#include "registers_plan.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/e4m3.cuh"

namespace greenfast {

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

}  // namespace greenfast
