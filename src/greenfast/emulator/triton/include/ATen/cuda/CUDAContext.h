// Replaces PyTorch's header, because the CPU build lacks its library.
#pragma once
#include <ATen/core/TensorBase.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace at::cuda {

inline const cudaDeviceProp* getDeviceProperties(c10::DeviceIndex) {
    static const cudaDeviceProp properties = [] {
        cudaDeviceProp p;
        cudaGetDeviceProperties(&p, 0);
        return p;
    }();
    return &properties;
}
inline const cudaDeviceProp* getCurrentDeviceProperties() { return getDeviceProperties(0); }
inline int warp_size() { return 32; }
inline bool is_available() { return true; }

}  // namespace at::cuda
