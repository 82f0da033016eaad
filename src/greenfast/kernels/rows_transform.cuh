// Rows of Q or K, as threads hold them to quantize them: rotated by the tensor cores, and cast.
//
// A warp takes kQueryBlock rows. Of row t / 4 and t / 4 + 8 (t: its lane) a thread reads columns 32 i + 8 (t % 4) .. + 7 for all
// i. Written in bits, a column is i, quad lane, half b of eight, element e of four: the Hadamard matrix of Sylvester's
// order is a product over bits. Its 16 x 16 part over (quad lane, e) is a matrix product, exact on 16-bit inputs, whose
// operands and results can be ordered so that each thread gets the columns that it gave; the part over b and the lowest
// bit of i is sums and differences of a thread's own values; and that over the other bits of i is a sum of products with
// signs.
#pragma once

#include "ptx/mma_input.cuh"
#include "quantize_common.cuh"

namespace greenfast {

// Cfg: kHeadDim; kColumns, those of the input; kRotate; kInt8, whether codes are int8, or E4M3; In, the input's type.
template <class Cfg>
struct RowsTransform {
  static constexpr int kLoads = Cfg::kHeadDim / 32;
  static constexpr int kParts = Cfg::kHeadDim / 64;
  static constexpr int kGroups = 4;  // of four columns, in a part
  static constexpr float kCodeMax = Cfg::kInt8 ? 127.0f : 448.0f;
  using Mma = ptx::InputMma<typename Cfg::In>;
  using Loaded = typename HeadRows<Cfg>::Loaded;
  using Input = Loaded[2][kLoads];
  using Values = float[2][kGroups][4];  // of a part
  using Codes = Pack<unsigned char, kVector>;

  // Of the 16 x 16 matrix: a column's signs of two neighbouring rows, on ones. Result e and row e' add the sign of
  // (e & e'), the same for all threads.
  unsigned signs;

  __device__ __forceinline__ RowsTransform() {
    const int column = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const unsigned low = __popc(column / 2 & quad) & 1, high = low ^ column & 1;  // whether negative
    signs = Mma::kOnes | low << 15 | high << 31;
  }

  __device__ __forceinline__ static int row_of_warp() { return threadIdx.x % 32 / 4; }
  __device__ __forceinline__ static int column_of(int part, int group) {
    return part * 64 + group / 2 * 32 + threadIdx.x % 4 * 8 + group % 2 * 4;
  }

  // A thread's columns of its two rows: load(r, column) gives eight of row r.
  template <class Load>
  __device__ __forceinline__ static void read(Input& x, Load load) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) x[r][i] = load(r, i * 32 + threadIdx.x % 4 * 8);
    }
  }

  // A part in float, times the Hadamard matrix without its factor of 1 / sqrt(head_dim).
  __device__ __forceinline__ void transform(const Input& input, int part, Values& x) const {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      if constexpr (Cfg::kRotate) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float c[4] = {};
#pragma unroll
          for (int from = 0; from < kParts; ++from) {
            const unsigned flip = __popc(part & from) & 1 ? 0x80008000u : 0u;
            const unsigned b[2] = {signs ^ flip, signs ^ flip ^ (side == 0 ? 0u : 0x80008000u)};
            const int load = 2 * from + m / 2, word = 2 * (m % 2);
            const unsigned(&low)[4] = reinterpret_cast<const unsigned(&)[4]>(input[0][load]);
            const unsigned(&high)[4] = reinterpret_cast<const unsigned(&)[4]>(input[1][load]);
            const unsigned a[4] = {low[word], high[word], low[word + 1], high[word + 1]};
            Mma::add(c, a, b);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i / 2][m][2 * side + i % 2] = c[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i / 4][m][i % 4] = static_cast<float>(input[i / 4][2 * part + m / 2].values[4 * (m % 2) + i % 4]);
        }
      }
    }
    if constexpr (Cfg::kRotate) {
#pragma unroll
      for (int distance = 1; distance < kGroups; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 2 * kGroups * 4; ++i) {
          const int r = i / (4 * kGroups), m = i / 4 % kGroups, e = i % 4;
          if (m & distance) continue;
          const float a = x[r][m][e], b = x[r][m + distance][e];
          x[r][m][e] = a + b;
          x[r][m + distance][e] = a - b;
        }
      }
    }
  }

  // What transform leaves out, and its inverse.
  static constexpr float kRoot = Cfg::kHeadDim == 64 ? 8.0f : Cfg::kHeadDim == 128 ? 11.313708499f : 16.0f;
  static constexpr float kFactor = Cfg::kRotate ? 1.0f / kRoot : 1.0f, kInverse = Cfg::kRotate ? kRoot : 1.0f;

  // `amax` or the largest magnitude of a part, if that is larger; NaN where there is one.
  __device__ __forceinline__ static float largest(const Values& x, float amax) {
    float some[4] = {amax};  // four at a time, each waits for its own
#pragma unroll
    for (int i = 0; i < 2 * kGroups * 4; ++i) {
      some[i % 4] = ptx::max_nan(some[i % 4], fabsf(x[i / (4 * kGroups)][i / 4 % kGroups][i % 4]));
    }
    return ptx::max_nan(ptx::max_nan(some[0], some[1]), ptx::max_nan(some[2], some[3]));
  }

  // Calls store(r, column, codes) for each eight columns that this thread has of a part: codes of x / scale, of row r of
  // its two.
  template <class Store>
  __device__ __forceinline__ static void cast(const Values& x, int part, float scale, Store store) {
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i / 2, group = i % 2 * 2;
      Codes out;
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        const float value = x[r][group + c / 4][c % 4];
        // Rotated values are sums, and as near to those of the reference with a product as with a quotient.
        const float quotient = Cfg::kRotate ? value * inverse : divide(value, scale, inverse);
        out.values[c] = encode<Cfg::kInt8 ? Format::kInt8 : Format::kE4M3>(quotient);
      }
      store(r, column_of(part, group), out);
    }
  }

  // A warp's 16 rows to codes, which `store` gets as from cast, with one scale, which all its threads return. `ready` is
  // called before the first code.
  template <class Ready, class Store>
  __device__ __forceinline__ float quantize(const Input& input, Ready ready, Store store) const {
    Values x[kParts];
    float amax = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      transform(input, part, x[part]);
      amax = largest(x[part], amax);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
    const float scale = scale_of(amax * kFactor, kCodeMax), unit = scale * kInverse;
    ready();
#pragma unroll
    for (int part = 0; part < kParts; ++part) cast(x[part], part, unit, store);
    return scale;
  }
};

}  // namespace greenfast
