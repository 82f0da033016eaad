/* greenfast: {
  "name": "plain_matmul",
  "description": "a thread per result, tiles in shared memory",
  "launches": [{"kernel": "matmul", "grid": ["ceildiv(N, 16)", "ceildiv(M, 16)"], "block": [16, 16],
                "args": ["a", "b", "c", "int32(M)", "int32(N)", "int32(K)"]}]
} */

// C (M, N) = A (M, K) B (K, N), halves row by row, summed in float32: a thread per element, tiles in shared memory.
#include <cuda_fp16.h>

namespace matmul_detail {
constexpr int kTile = 16;
}

// Grid: (ceil(N / 16), ceil(M / 16)), blocks of 16 x 16 threads.
extern "C" __global__ void __launch_bounds__(matmul_detail::kTile * matmul_detail::kTile)
matmul(const half* a, const half* b, half* c, int M, int N, int K) {
  using matmul_detail::kTile;
  __shared__ float a_tile[kTile][kTile];
  __shared__ float b_tile[kTile][kTile];
  const int x = threadIdx.x;
  const int y = threadIdx.y;
  const long long row = static_cast<long long>(blockIdx.y) * kTile + y;
  const long long column = static_cast<long long>(blockIdx.x) * kTile + x;

  float sum = 0.0f;
  for (int start = 0; start < K; start += kTile) {
    const bool a_inside = row < M && start + x < K;
    const bool b_inside = start + y < K && column < N;
    a_tile[y][x] = a_inside ? __half2float(a[row * K + start + x]) : 0.0f;
    b_tile[y][x] = b_inside ? __half2float(b[static_cast<long long>(start + y) * N + column]) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum = fmaf(a_tile[y][k], b_tile[k][x], sum);
    __syncthreads();
  }
  if (row < M && column < N) c[row * N + column] = __float2half_rn(sum);
}
