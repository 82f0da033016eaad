// A mask by tiles of kMaskTile queries x kMaskTile keys: pack_mask writes the bits and the class of each tile, list_tiles
// makes the lists of partial and of full tiles of each block of rows.
#pragma once

namespace greenfast {

constexpr int kMaskTile = 128;
constexpr int kMaskThreads = 256, kListThreads = 128;
constexpr int kFullTile = -1, kEmptyTile = -2;  // in a table of tiles; other numbers are an index of bits

struct MaskParams {
  int q_len, kv_len;
  int* tiles;      // (heads of all sequences, row blocks, key tiles)
  unsigned* bits;  // (tiles, kMaskTile, 4)
};

// A lane packs 16 columns of kPasses rows at once; the rows are kRows apart. Eight lanes hold a row of a tile.
constexpr int kColumns = 16, kRows = kMaskThreads / 8, kPasses = kMaskTile / kRows;
static_assert(kPasses * kRows == kMaskTile && 8 * kColumns == kMaskTile);

// A mask of booleans, (batch, heads, q_len, kv_len): any byte except 0 is true.
struct BoolSource {
  const unsigned char* mask;
  long long batch_stride, head_stride, row_stride, column_stride;
  int heads;

  // Loads bytes of rows from `row` and columns from `column` on; zeros outside the mask.
  __device__ __forceinline__ void load(const MaskParams& p, int head, int row, int column, uint4 (&x)[kPasses]) const {
    const unsigned char* const rows = mask + head / heads * batch_stride + head % heads * head_stride;
    const unsigned long long alignment = reinterpret_cast<unsigned long long>(rows) | row_stride;
    if (column_stride == 1 && alignment % 16 == 0 && column + kColumns <= p.kv_len) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i, row += kRows) {
        if (row < p.q_len) x[i] = *reinterpret_cast<const uint4*>(rows + row * row_stride + column);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPasses; ++i, row += kRows) {
        if (row < p.q_len) x[i] = load_bytes(rows + row * row_stride, column, p.kv_len);
      }
    }
  }

  // Loads columns of any stride and alignment.
  __device__ __forceinline__ uint4 load_bytes(const unsigned char* row, int column, int kv_len) const {
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i < kv_len && row[(column + i) * column_stride] != 0) words[i / 4] |= 1u << i % 4 * 8;
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

// Segments: a query attends to the keys with its own number, unless it is negative.
template <class Index>
struct SegmentSource {
  const Index* q_segments;   // (batch, q_len)
  const Index* kv_segments;  // (batch, kv_len)
  int causal;                // whether a query attends to no later key

  // See BoolSource::load.
  __device__ __forceinline__ void load(const MaskParams& p, int head, int row, int column, uint4 (&x)[kPasses]) const {
    const Index* const queries = q_segments + static_cast<long long>(head) * p.q_len;
    const Index* const keys = kv_segments + static_cast<long long>(head) * p.kv_len;
    Index segments[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) segments[i] = column + i < p.kv_len ? keys[column + i] : -1;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, row += kRows) {
      if (row >= p.q_len) continue;
      const Index own = queries[row];
      const int end = own < 0 ? 0 : causal ? row + 1 - column : kColumns;
      unsigned words[4] = {};
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i < end && segments[i] == own) words[i / 4] |= 1u << i % 4 * 8;
      }
      x[pass] = {words[0], words[1], words[2], words[3]};
    }
  }
};

// Replaces each byte except 0 by 1.
__device__ __forceinline__ unsigned normalize_bytes(unsigned x) {
  return ((((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) >> 7) & 0x01010101u;
}

// Packs the bytes of 16 columns: four bits of each quad, quads 0, 2, 1, 3 in the low halves of bytes 0 to 3.
__device__ __forceinline__ unsigned pack_columns(const uint4& x) {
  const unsigned low = normalize_bytes(x.x) | normalize_bytes(x.z) << 2;
  const unsigned high = normalize_bytes(x.y) | normalize_bytes(x.w) << 2;
  return ((low | low >> 7) & 0x000f000fu) | ((high | high >> 7) & 0x000f000fu) << 8;
}

// Exchanges the columns of a row among its eight lanes: lanes 2 q and 2 q + 1 receive the 32 bits of quad q.
__device__ __forceinline__ unsigned gather_quad(unsigned x, int lane) {
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

// Classifies a tile and packs its bits. Grid: tiles. Block: kMaskThreads.
template <class Source>
__device__ __forceinline__ void pack_mask(const Source& source, const MaskParams& p) {
  constexpr unsigned kAllColumns = 0x0f0f0f0fu;  // pack_columns of 16 true columns
  const int row_blocks = (p.q_len + kMaskTile - 1) / kMaskTile, key_tiles = (p.kv_len + kMaskTile - 1) / kMaskTile;
  const int tile = blockIdx.x, block = tile / key_tiles;
  const int lane = threadIdx.x % 32, tile_row = threadIdx.x / 8;
  const int row = block % row_blocks * kMaskTile + tile_row;
  uint4 loaded[kPasses] = {};
  source.load(p, block / row_blocks, row, tile % key_tiles * kMaskTile + lane % 8 * kColumns, loaded);
  bool any = false, all = true;
  unsigned* const bits = p.bits + static_cast<long long>(tile) * kMaskTile * 4;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const unsigned columns = pack_columns(loaded[i]), quad = gather_quad(columns, lane);
    any |= columns != 0;
    all &= columns == kAllColumns || row + i * kRows >= p.q_len;
    if (lane % 2 == 0) bits[(tile_row + i * kRows) * 4 + lane % 8 / 2] = quad;
  }
  any = __syncthreads_or(any);
  all = __syncthreads_and(all);
  if (threadIdx.x == 0) p.tiles[tile] = all ? kFullTile : any ? tile : kEmptyTile;
}

// The lists of a block of rows, made by a warp: partial tiles, then full ones, each in the order of their addition.
struct TileLists {
  int2* const entries;  // (key_tiles): {key tile, index of bits}
  const int lane;
  int partial_end, full_end;

  // partial: the number of partial tiles.
  __device__ __forceinline__ TileLists(int2* entries, int lane, int partial)
      : entries(entries), lane(lane), partial_end(0), full_end(partial) {}

  // Adds the tiles of all lanes, each with a number as in a table of tiles.
  __device__ __forceinline__ void add(int key_tile, int tile) {
    const unsigned partials = __ballot_sync(0xffffffffu, tile >= 0);
    const unsigned fulls = __ballot_sync(0xffffffffu, tile == kFullTile);
    const unsigned before = (1u << lane) - 1;
    if (tile >= 0) entries[partial_end + __popc(partials & before)] = {key_tile, tile};
    if (tile == kFullTile) entries[full_end + __popc(fulls & before)] = {key_tile, kFullTile};
    partial_end += __popc(partials);
    full_end += __popc(fulls);
  }

  // Writes zeros after the lists, and the numbers of tiles.
  __device__ __forceinline__ void finish(int key_tiles, int* counts) const {
    for (int k = full_end + lane; k < key_tiles; k += 32) entries[k] = {0, 0};
    if (lane == 0) counts[0] = partial_end;
    if (lane == 0) counts[1] = full_end - partial_end;
  }
};

struct ListParams {
  const int* tiles;  // (blocks, key_tiles)
  int blocks, key_tiles;
  int* counts;    // (blocks, 2): partial and full tiles
  int2* entries;  // (blocks, key_tiles)
};

// Makes the lists of a table of tiles, with a warp for each block of rows. Grid: blocks / (kListThreads / 32), rounded up.
__device__ __forceinline__ void list_tiles(const ListParams& p) {
  const int block = blockIdx.x * (kListThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (block >= p.blocks) return;
  const int* const tiles = p.tiles + static_cast<long long>(block) * p.key_tiles;
  int partial = 0;
  for (int first = 0; first < p.key_tiles; first += 32) {
    const int k = first + lane;
    partial += __popc(__ballot_sync(0xffffffffu, k < p.key_tiles && tiles[k] >= 0));
  }
  TileLists lists(p.entries + static_cast<long long>(block) * p.key_tiles, lane, partial);
  for (int first = 0; first < p.key_tiles; first += 32) {
    const int k = first + lane;
    lists.add(k, k < p.key_tiles ? tiles[k] : kEmptyTile);
  }
  lists.finish(p.key_tiles, p.counts + 2 * block);
}

template <class Index>
struct BlockListParams {
  const Index* list_counts;  // (blocks)
  const Index* indices;      // (blocks, width)
  int blocks, width, kv_len;
  int* counts;     // as in ListParams
  int2* entries;   // as in ListParams
  unsigned* bits;  // (1, kMaskTile, 4): of a last tile that reaches beyond kv_len
};

// Makes the lists from indices of full tiles for each block of rows. Indices may be in any order, repeated or out of
// range. Grid: as for list_tiles.
template <class Index>
__device__ __forceinline__ void list_blocks(const BlockListParams<Index>& p) {
  constexpr int kWindow = 1024;  // key tiles of a bitmap
  __shared__ unsigned bitmaps[kListThreads / 32][kWindow / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int last_columns = p.kv_len % kMaskTile;
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < kMaskTile * 4; i += kListThreads) {
      const int whole = last_columns / 8, more = max(0, min(last_columns % 8 - i % 4 * 2, 2));
      p.bits[i] = (1u << 2 * whole) - 1 | ((1u << more) - 1) << 2 * whole;
    }
  }
  const int block = blockIdx.x * (kListThreads / 32) + warp;
  if (block >= p.blocks) return;
  const int key_tiles = (p.kv_len + kMaskTile - 1) / kMaskTile;
  const Index count = min(p.list_counts[block], static_cast<Index>(p.width));
  const Index* const indices = p.indices + static_cast<long long>(block) * p.width;
  bool last = false;  // whether the last tile is listed
  for (int i = lane; i < count; i += 32) last |= indices[i] == key_tiles - 1;
  const bool partial = __any_sync(0xffffffffu, last) && last_columns > 0;
  TileLists lists(p.entries + static_cast<long long>(block) * key_tiles, lane, partial);
  for (int first = 0; first < key_tiles; first += kWindow) {
    bitmaps[warp][lane] = 0;
    __syncwarp();
    for (int i = lane; i < count; i += 32) {
      const Index k = indices[i];
      if (k >= first && k < min(first + kWindow, key_tiles)) atomicOr(&bitmaps[warp][(k - first) / 32], 1u << k % 32);
    }
    __syncwarp();
    for (int word = 0; word < kWindow / 32 && first + word * 32 < key_tiles; ++word) {
      const int k = first + word * 32 + lane;
      const bool listed = bitmaps[warp][word] >> lane & 1;
      lists.add(k, !listed ? kEmptyTile : partial && k == key_tiles - 1 ? 0 : kFullTile);
    }
    __syncwarp();
  }
  lists.finish(key_tiles, p.counts + 2 * block);
}

}  // namespace greenfast
