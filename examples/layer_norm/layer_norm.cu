/* greenfast: {
  "name": "plain_layer_norm",
  "description": "a warp per row, which it reads three times",
  "launches": [{"kernel": "layer_norm", "grid": ["ceildiv(R, 4)"], "block": [128],
                "args": ["x", "weight", "bias", "y", "int32(R)", "int32(C)", "float32(0.00001)"]}]
} */

// Layer norm of the rows of a half matrix, in float32: a warp per row, which passes over it three times.
#include <cuda_fp16.h>

namespace layer_norm_detail {

constexpr int kRowsPerBlock = 4;

// The sum over a warp; every lane gets the same bits, since each step adds the same two numbers.
__device__ __forceinline__ float over_row(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

}  // namespace layer_norm_detail

// x, y: (rows, cols); weight, bias: (cols). Grid: ceil(rows / 4), blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(32 * layer_norm_detail::kRowsPerBlock)
layer_norm(const half* x, const half* weight, const half* bias, half* y, int rows, int cols, float epsilon) {
  using namespace layer_norm_detail;
  const int row = blockIdx.x * kRowsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;  // all lanes of a row leave together, so the shuffles are whole
  const half* from = x + static_cast<size_t>(row) * cols;
  half* to = y + static_cast<size_t>(row) * cols;

  float sum = 0.0f;
  for (int i = lane; i < cols; i += 32) sum += __half2float(from[i]);
  const float mean = over_row(sum) / cols;

  float squares = 0.0f;
  for (int i = lane; i < cols; i += 32) {
    const float difference = __half2float(from[i]) - mean;
    squares = fmaf(difference, difference, squares);
  }
  const float scale = rsqrtf(over_row(squares) / cols + epsilon);

  for (int i = lane; i < cols; i += 32) {
    const float normal = (__half2float(from[i]) - mean) * scale;
    to[i] = __float2half_rn(fmaf(normal, __half2float(weight[i]), __half2float(bias[i])));
  }
}
