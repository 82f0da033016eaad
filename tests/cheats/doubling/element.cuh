// What the kernels of this folder share: y = 2 x, one thread per element.
#pragma once

__device__ __forceinline__ int element() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }
