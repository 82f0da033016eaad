// A mask by tiles of kMaskTile queries x kMaskTile keys: pack_mask writes the bits and the class of each tile, list_tiles
// makes the lists of partial and of full tiles of each block of rows.
#pragma once

namespace greenfast {

constexpr int kMaskTile = 128;
constexpr int kMaskThreads = 256, kListThreads = 128;
constexpr int kFullTile = -1, kEmptyTile = -2;  // in a table of tiles; other numbers are an index of bits

struct MaskParams {
  const unsigned char* mask;  // (batch, heads, q_len, kv_len): any byte except 0 is true
  long long batch_stride, head_stride, row_stride, column_stride;
  int heads, q_len, kv_len;
  int* tiles;      // (batch, heads, row blocks, key tiles)
  unsigned* bits;  // (tiles, kMaskTile, 4)
};

// Classifies a tile and packs its bits. Eight lanes hold a row, each with 16 columns. Grid: tiles. Block: kMaskThreads.
struct MaskPacker {
  static constexpr int kColumns = 16;                   // per lane
  static constexpr int kRows = kMaskThreads / 8;        // at once
  static constexpr int kPasses = kMaskTile / kRows;     // loads of a lane, all in flight at once
  static constexpr unsigned kAllColumns = 0x0f0f0f0fu;  // pack_columns of 16 true columns
  static constexpr unsigned kOnes = 0x01010101u;        // true in each byte
  static_assert(kPasses * kRows == kMaskTile && 8 * kColumns == kMaskTile);

  const MaskParams& p;

  // 1 in each byte that is not 0.
  __device__ __forceinline__ static unsigned normalize(unsigned x) {
    return ((((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) >> 7) & kOnes;
  }

  // Packs 16 columns: four bits of each quad, quads 0, 2, 1, 3 in the low halves of bytes 0 to 3.
  __device__ __forceinline__ static unsigned pack_columns(const uint4& x) {
    const unsigned low = normalize(x.x) | normalize(x.z) << 2, high = normalize(x.y) | normalize(x.w) << 2;
    return ((low | low >> 7) & 0x000f000fu) | ((high | high >> 7) & 0x000f000fu) << 8;
  }

  // Exchanges the columns of a row among its eight lanes: lanes 2 q and 2 q + 1 receive the 32 bits of quad q.
  __device__ __forceinline__ static unsigned gather_quad(unsigned x, int lane) {
    const auto exchange = [lane](unsigned mine, int distance, unsigned& low, unsigned& high) {
      const unsigned other = __shfl_xor_sync(0xffffffffu, mine, distance);
      low = lane & distance ? other : mine;
      high = lane & distance ? mine : other;
    };
    unsigned low, high;
    exchange(x, 1, low, high);
    exchange(low | high << 4, 2, low, high);                                     // bytes: quads 0, 2, 1, 3
    exchange(__byte_perm(low, high, lane & 2 ? 0x7362 : 0x5140), 4, low, high);  // halves: two quads
    return __byte_perm(low, high, lane & 4 ? 0x7632 : 0x5410);
  }

  // Loads 16 columns of any strides and alignment; zeros outside the mask.
  __device__ __forceinline__ uint4 load_bytes(const unsigned char* row, int column) const {
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i < p.kv_len && row[(column + i) * p.column_stride] != 0) words[i / 4] |= 1u << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }

  __device__ __forceinline__ void run() const {
    const int row_blocks = (p.q_len + kMaskTile - 1) / kMaskTile, key_tiles = (p.kv_len + kMaskTile - 1) / kMaskTile;
    const int tile = blockIdx.x, block = tile / key_tiles, head = block / row_blocks;
    const unsigned char* const mask = p.mask + head / p.heads * p.batch_stride + head % p.heads * p.head_stride;
    const int lane = threadIdx.x % 32, column = tile % key_tiles * kMaskTile + lane % 8 * kColumns;
    const int tile_row = threadIdx.x / 8, first_row = block % row_blocks * kMaskTile + tile_row;
    const unsigned long long alignment = reinterpret_cast<unsigned long long>(mask) | p.row_stride;
    uint4 loaded[kPasses] = {};
    if (p.column_stride == 1 && alignment % 16 == 0 && (tile % key_tiles + 1) * kMaskTile <= p.kv_len) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = first_row + i * kRows;
        if (row < p.q_len) loaded[i] = *reinterpret_cast<const uint4*>(mask + row * p.row_stride + column);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = first_row + i * kRows;
        if (row < p.q_len) loaded[i] = load_bytes(mask + row * p.row_stride, column);
      }
    }
    bool any = false, all = true;
    unsigned* const bits = p.bits + static_cast<long long>(tile) * kMaskTile * 4;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const unsigned columns = pack_columns(loaded[i]), quad = gather_quad(columns, lane);
      any |= columns != 0;
      all &= columns == kAllColumns || first_row + i * kRows >= p.q_len;
      if (lane % 2 == 0) bits[(tile_row + i * kRows) * 4 + lane % 8 / 2] = quad;
    }
    any = __syncthreads_or(any);
    all = __syncthreads_and(all);
    if (threadIdx.x == 0) p.tiles[tile] = all ? kFullTile : any ? tile : kEmptyTile;
  }
};

__device__ __forceinline__ void pack_mask(const MaskParams& p) { MaskPacker{p}.run(); }

struct ListParams {
  const int* tiles;  // (blocks, key_tiles)
  int blocks, key_tiles;
  int* counts;    // (blocks, 2): partial and full tiles
  int2* entries;  // (blocks, key_tiles): {key tile, index of bits}
};

// A warp makes the lists of a block of rows. Grid: blocks of kListThreads / 32 of them.
__device__ __forceinline__ void list_tiles(const ListParams& p) {
  const int block = blockIdx.x * (kListThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (block >= p.blocks) return;
  const int* const tiles = p.tiles + static_cast<long long>(block) * p.key_tiles;
  int2* const entries = p.entries + static_cast<long long>(block) * p.key_tiles;
  int partial = 0;
  for (int first = 0; first < p.key_tiles; first += 32) {
    const int k = first + lane;
    partial += __popc(__ballot_sync(0xffffffffu, k < p.key_tiles && tiles[k] >= 0));
  }
  int partial_end = 0, full_end = partial;
  const unsigned before = (1u << lane) - 1;
  for (int first = 0; first < p.key_tiles; first += 32) {
    const int k = first + lane, tile = k < p.key_tiles ? tiles[k] : kEmptyTile;
    const unsigned partials = __ballot_sync(0xffffffffu, tile >= 0);
    const unsigned fulls = __ballot_sync(0xffffffffu, tile == kFullTile);
    if (tile >= 0) entries[partial_end + __popc(partials & before)] = {k, tile};
    if (tile == kFullTile) entries[full_end + __popc(fulls & before)] = {k, kFullTile};
    partial_end += __popc(partials);
    full_end += __popc(fulls);
  }
  for (int k = full_end + lane; k < p.key_tiles; k += 32) entries[k] = {0, 0};
  if (lane == 0) p.counts[2 * block] = partial;
  if (lane == 0) p.counts[2 * block + 1] = full_end - partial;
}

}  // namespace greenfast
