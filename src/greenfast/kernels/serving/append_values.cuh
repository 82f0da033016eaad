// V of a head of new tokens to groups of 16 slots, transposed.
//
// A group is (kHeadDim, 16) bytes, one for each slot, in the order of values.cuh. Where 16 tokens in a row fill one, it
// is written whole: 16 bytes of a column at a time. Other tokens' bytes are written one by one, since another block, or
// an earlier call, may have written their neighbours.
#pragma once

#include "serving/append_row.cuh"

namespace greenfast {

constexpr int kValueTokens = 64;     // of a tile: each token is written by the tile in which its group begins
constexpr int kGroup = 16;           // tokens
constexpr int kBeyond = kGroup - 1;  // tokens before and behind a tile that its groups may have

template <class Cfg>
struct AppendValuesStorage {
  long long slots[kBeyond + kValueTokens + kBeyond];
  bool begins[kBeyond + kValueTokens];  // whether 16 tokens from this one on fill a group
  int begin[kValueTokens / kGroup];     // the token among each 16 of the tile that begins one, or -1
  alignas(16) unsigned char codes[kValueTokens + kBeyond][Cfg::kHeadDim];
};

template <class Cfg>
struct AppendValues {
  using Row = AppendRow<Cfg>;
  using Storage = AppendValuesStorage<Cfg>;
  static constexpr int kWords = Cfg::kHeadDim / 4;
  static_assert(kValueTokens % Row::kRows == 0 && Row::kRows >= kBeyond && Cfg::kThreads >= kBeyond * 2 + kValueTokens,
                "whole steps in a tile, one for the tokens behind it, and a thread for each slot");

  static constexpr int kNone = kValueTokens;

  __device__ __forceinline__ static void run(Storage& shared, const AppendParams& p, int first, int head) {
    typename Row::Loaded next = load(p, first + Row::index(), head);
    find_groups(shared, p, first);
    for (int token = Row::index(); token < kValueTokens; token += Row::kRows) {
      const typename Row::Loaded loaded = next;
      if (token + Row::kRows < kValueTokens) next = load(p, first + token + Row::kRows, head);
      quantize(shared, p, loaded, token, owned(shared, token), head);
    }
    const int token = kValueTokens + Row::index();
    const bool beyond = Row::index() < kBeyond && owned(shared, token);
    if (__any_sync(0xffffffffu, beyond)) {
      quantize(shared, p, load(p, first + token, head, beyond), token, beyond, head);
    }
    __syncthreads();
    write_groups(shared, p.v_pages, head);
    write_bytes(shared, p.v_pages, head);
  }

  __device__ __forceinline__ static typename Row::Loaded load(const AppendParams& p, int token, int head,
                                                              bool asked = true) {
    return Row::load(Row::row(p.v, token, head), asked && token < p.tokens);
  }

  // Tokens are counted from the tile's first from here on.
  __device__ __forceinline__ static void find_groups(Storage& shared, const AppendParams& p, int first) {
    const int thread = threadIdx.x;
    if (thread < kBeyond + kValueTokens + kBeyond) {
      const int token = first - kBeyond + thread;
      const long long slot = token >= 0 && token < p.tokens ? p.slots[token] : -1;
      shared.slots[thread] = slot < p.slot_count ? slot : -1;
    }
    if (thread < kValueTokens / kGroup) shared.begin[thread] = -1;
    __syncthreads();
    if (thread < kBeyond + kValueTokens) {
      const long long slot = shared.slots[thread];
      bool begins = slot >= 0 && slot % kGroup == 0;
      for (int i = 1; begins && i < kGroup; ++i) begins = shared.slots[thread + i] == slot + i;
      shared.begins[thread] = begins;
      if (begins && thread >= kBeyond) shared.begin[(thread - kBeyond) / kGroup] = thread - kBeyond;
    }
    __syncthreads();
  }

  // Where the group of a kept token begins if it is written whole, else kNone.
  __device__ __forceinline__ static int group_of(const Storage& shared, int token) {
    const int begin = token - static_cast<int>(shared.slots[kBeyond + token] % kGroup);
    return begin < kValueTokens && shared.begins[kBeyond + begin] ? begin : kNone;
  }

  __device__ __forceinline__ static bool kept(const Storage& shared, int token) {
    return shared.slots[kBeyond + token] >= 0;
  }

  // Whether this tile writes a token: one of a group that begins in it, or a single one that lies in it.
  __device__ __forceinline__ static bool owned(const Storage& shared, int token) {
    if (!kept(shared, token)) return false;
    const int begin = group_of(shared, token);
    return begin == kNone ? token < kValueTokens : begin >= 0;
  }

  __device__ __forceinline__ static void quantize(Storage& shared, const AppendParams& p,
                                                  const typename Row::Loaded& loaded, int token, bool writes,
                                                  int head) {
    float x[kAppendColumns];
    Row::widen(loaded, x);
    unsigned codes[kAppendColumns / 4];
    const float* const given = Cfg::kTokenScales ? nullptr : p.v_pages.scale + head * p.v_pages.scale_stride;
    const float scale = Row::quantize(x, given, codes);
    if (!writes) return;
    Row::write(codes, shared.codes[token]);
    if (Cfg::kTokenScales && Row::lane() == 0) {
      *AppendSlot<Cfg>(shared.slots[kBeyond + token], p.slot_count).scale(p.v_pages, head) = scale;
    }
  }

  // A slot's group in the cache.
  __device__ __forceinline__ static unsigned char* group(const AppendPages& pages, int head, long long slot) {
    return pages.codes + slot / Cfg::kPageSize * pages.page_stride + head * pages.head_stride +
           slot % Cfg::kPageSize / kGroup * (kGroup * Cfg::kHeadDim);
  }

  __device__ __forceinline__ static unsigned word(const Storage& shared, int token, int index) {
    return reinterpret_cast<const unsigned*>(shared.codes[token])[index];
  }

  __device__ __forceinline__ static void write_groups(const Storage& shared, const AppendPages& pages, int head) {
    for (int i = threadIdx.x; i < kValueTokens / kGroup * kWords; i += Cfg::kThreads) {
      const int token = shared.begin[i / kWords], index = i % kWords;
      if (token < 0) continue;
      unsigned codes[4][4];  // word m of column c in [m][c]
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int even = token + 2 * m;
        const unsigned rows[4] = {word(shared, even, index), word(shared, even + 1, index),
                                  word(shared, even + 8, index), word(shared, even + 9, index)};
        transpose_bytes(rows, codes[m]);
      }
      unsigned char* out = group(pages, head, shared.slots[kBeyond + token]) + index * (4 * kGroup);
#pragma unroll
      for (int c = 0; c < 4; ++c) ptx::store_16(out + c * kGroup, {codes[0][c], codes[1][c], codes[2][c], codes[3][c]});
    }
  }

  __device__ __forceinline__ static void write_bytes(const Storage& shared, const AppendPages& pages, int head) {
    for (int i = threadIdx.x; i < kValueTokens * kWords; i += Cfg::kThreads) {
      const int token = i / kWords, index = i % kWords;
      if (!kept(shared, token) || group_of(shared, token) != kNone) continue;
      const long long slot = shared.slots[kBeyond + token];
      const int place = static_cast<int>(slot % kGroup);
      unsigned char* out = group(pages, head, slot) + index * (4 * kGroup) + byte_of(place);
      const unsigned codes = word(shared, token, index);
#pragma unroll
      for (int c = 0; c < 4; ++c) out[c * kGroup] = static_cast<unsigned char>(codes >> 8 * c);
    }
  }

  // The byte of a group's slot: KEY_ORDER's inverse.
  __device__ __forceinline__ static int byte_of(int place) { return place / 2 % 4 * 4 + place / 8 * 2 + place % 2; }
};

}  // namespace greenfast
