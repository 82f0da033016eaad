// Appends V of a head, for a tile of new tokens, to groups of 16 slots, transposed.
//
// A group is (kHeadDim, 16) bytes, one byte per slot in KEY_ORDER (quantize/values.cuh). A group that 16 consecutive
// tokens fill is written whole, 16 bytes of a column at a time. Other tokens are written byte by byte, because another
// block or an earlier call may have written their neighbours.
#pragma once

#include "serving/append_row.cuh"

namespace greenfast {

constexpr int kValueTokens = 64;   // tokens of a tile; the tile in which a group begins writes it
constexpr int kGroup = 16;         // tokens of a group
constexpr int kHalo = kGroup - 1;  // halo: tokens of a tile's groups before and after it

template <class Cfg>
struct AppendValuesStorage {
  long long slots[kHalo + kValueTokens + kHalo];
  bool starts_group[kHalo + kValueTokens];  // the 16 tokens from this one on fill a group
  int group_start[kValueTokens / kGroup];   // the token out of each 16 of the tile that starts a group, or -1
  alignas(16) unsigned char codes[kValueTokens + kHalo][Cfg::kHeadDim];
};

template <class Cfg>
struct AppendValues {
  using Row = AppendRow<Cfg>;
  using Storage = AppendValuesStorage<Cfg>;
  static constexpr int kWords = Cfg::kHeadDim / 4;
  static_assert(kValueTokens % Row::kRows == 0 && Row::kRows >= kHalo && Cfg::kThreads >= kHalo * 2 + kValueTokens,
                "whole steps in a tile, one for the tokens after it, and a thread for each slot");

  static constexpr int kNone = kValueTokens;

  __device__ __forceinline__ static void run(Storage& shared, const AppendParams& p, int first, int head) {
    typename Row::Loaded next = load(p, first + Row::index(), head);
    find_groups(shared, p, first);
    for (int token = Row::index(); token < kValueTokens; token += Row::kRows) {
      const typename Row::Loaded loaded = next;
      if (token + Row::kRows < kValueTokens) next = load(p, first + token + Row::kRows, head);
      quantize(shared, p, loaded, token, writes_token(shared, token), head);
    }
    const int token = kValueTokens + Row::index();
    const bool beyond = Row::index() < kHalo && writes_token(shared, token);
    if (__any_sync(0xffffffffu, beyond)) {
      quantize(shared, p, load(p, first + token, head, beyond), token, beyond, head);
    }
    __syncthreads();
    write_groups(shared, p.v_pages, head);
    write_bytes(shared, p.v_pages, head);
  }

  __device__ __forceinline__ static typename Row::Loaded load(const AppendParams& p, int token, int head,
                                                              bool wanted = true) {
    return Row::load(Row::row(p.v, token, head), wanted && token < p.tokens);
  }

  // Finds the groups that are filled whole. From here on tokens are relative to the tile's first.
  __device__ __forceinline__ static void find_groups(Storage& shared, const AppendParams& p, int first) {
    const int thread = threadIdx.x;
    if (thread < kHalo + kValueTokens + kHalo) {
      const int token = first - kHalo + thread;
      const long long slot = token >= 0 && token < p.tokens ? p.slots[token] : -1;
      shared.slots[thread] = slot < p.slot_count ? slot : -1;
    }
    if (thread < kValueTokens / kGroup) shared.group_start[thread] = -1;
    __syncthreads();
    if (thread < kHalo + kValueTokens) {
      const long long slot = shared.slots[thread];
      bool starts_group = slot >= 0 && slot % kGroup == 0;
      for (int i = 1; starts_group && i < kGroup; ++i) starts_group = shared.slots[thread + i] == slot + i;
      shared.starts_group[thread] = starts_group;
      if (starts_group && thread >= kHalo) shared.group_start[(thread - kHalo) / kGroup] = thread - kHalo;
    }
    __syncthreads();
  }

  // The first token of a cached token's group if it is written whole, else kNone.
  __device__ __forceinline__ static int group_of(const Storage& shared, int token) {
    const int group_start = token - static_cast<int>(shared.slots[kHalo + token] % kGroup);
    return group_start < kValueTokens && shared.starts_group[kHalo + group_start] ? group_start : kNone;
  }

  __device__ __forceinline__ static bool in_cache(const Storage& shared, int token) {
    return shared.slots[kHalo + token] >= 0;
  }

  // Whether this tile writes a token: its group begins in this tile, or it is a single token of this tile.
  __device__ __forceinline__ static bool writes_token(const Storage& shared, int token) {
    if (!in_cache(shared, token)) return false;
    const int group_start = group_of(shared, token);
    return group_start == kNone ? token < kValueTokens : group_start >= 0;
  }

  __device__ __forceinline__ static void quantize(Storage& shared, const AppendParams& p,
                                                  const typename Row::Loaded& loaded, int token, bool writes,
                                                  int head) {
    float x[kAppendColumns];
    Row::widen(loaded, x);
    unsigned codes[kAppendColumns / 4];
    const float* const head_scale = Cfg::kTokenScales ? nullptr : p.v_pages.scale + head * p.v_pages.scale_stride;
    const float scale = Row::quantize(x, head_scale, codes);
    if (!writes) return;
    Row::write(codes, shared.codes[token]);
    if (Cfg::kTokenScales && Row::lane() == 0) {
      *AppendSlot<Cfg>(shared.slots[kHalo + token], p.slot_count).scale(p.v_pages, head) = scale;
    }
  }

  // The address of a slot's group in the cache.
  __device__ __forceinline__ static unsigned char* group(const AppendPages& pages, int head, long long slot) {
    return pages.codes + slot / Cfg::kPageSize * pages.page_stride + head * pages.head_stride +
           slot % Cfg::kPageSize / kGroup * (kGroup * Cfg::kHeadDim);
  }

  __device__ __forceinline__ static unsigned word(const Storage& shared, int token, int index) {
    return reinterpret_cast<const unsigned*>(shared.codes[token])[index];
  }

  __device__ __forceinline__ static void write_groups(const Storage& shared, const AppendPages& pages, int head) {
    for (int i = threadIdx.x; i < kValueTokens / kGroup * kWords; i += Cfg::kThreads) {
      const int token = shared.group_start[i / kWords], index = i % kWords;
      if (token < 0) continue;
      unsigned codes[4][4];  // [m][c]: word m of column c
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int even = token + 2 * m;
        const unsigned rows[4] = {word(shared, even, index), word(shared, even + 1, index),
                                  word(shared, even + 8, index), word(shared, even + 9, index)};
        transpose_bytes(rows, codes[m]);
      }
      unsigned char* out = group(pages, head, shared.slots[kHalo + token]) + index * (4 * kGroup);
#pragma unroll
      for (int c = 0; c < 4; ++c) ptx::store_16(out + c * kGroup, {codes[0][c], codes[1][c], codes[2][c], codes[3][c]});
    }
  }

  __device__ __forceinline__ static void write_bytes(const Storage& shared, const AppendPages& pages, int head) {
    for (int i = threadIdx.x; i < kValueTokens * kWords; i += Cfg::kThreads) {
      const int token = i / kWords, index = i % kWords;
      if (!in_cache(shared, token) || group_of(shared, token) != kNone) continue;
      const long long slot = shared.slots[kHalo + token];
      const int slot_in_group = static_cast<int>(slot % kGroup);
      unsigned char* out = group(pages, head, slot) + index * (4 * kGroup) + byte_of(slot_in_group);
      const unsigned codes = word(shared, token, index);
#pragma unroll
      for (int c = 0; c < 4; ++c) out[c * kGroup] = static_cast<unsigned char>(codes >> 8 * c);
    }
  }

  // The byte of a slot in its group: the inverse of KEY_ORDER.
  __device__ __forceinline__ static int byte_of(int slot_in_group) {
    return slot_in_group / 2 % 4 * 4 + slot_in_group / 8 * 2 + slot_in_group % 2;
  }
};

}  // namespace greenfast
