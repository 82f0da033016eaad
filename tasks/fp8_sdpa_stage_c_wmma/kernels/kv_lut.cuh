// Stage 2 with K and V dequantized through a table of 256 halves in shared memory, without conversion instructions.
// Why: before sm_89 there is no conversion instruction for E4M3; a table takes one load for each code.
// Measured: SLOWER, 0.832x at S=512 on an H100, which has the instruction (evidence/h100/fp8_sdpa-e4m3-kv_lut).
#pragma once

#include "scalar.cuh"

namespace greenfast {

template <Format kFormat>
struct LutDequantizer {
  static constexpr int kTableHalves = 256;
  const half* table;

  __device__ explicit LutDequantizer(const half* table) : table(table) {}

  __device__ __forceinline__ void to_half4(unsigned codes, half2* out) const {
    out[0] = __halves2half2(table[codes & 0xff], table[(codes >> 8) & 0xff]);
    out[1] = __halves2half2(table[(codes >> 16) & 0xff], table[codes >> 24]);
  }

  // Fills the table with all threads of the block; the caller synchronizes.
  static __device__ void fill(half* table) {
    for (unsigned code = threadIdx.x; code < 256; code += blockDim.x) {
      half2 two[2];
      Codec<kFormat>::to_half4(code, two);
      table[code] = __low2half(two[0]);
    }
  }
};

}  // namespace greenfast
