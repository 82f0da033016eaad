// Replaces PyTorch's header, because the CPU build lacks its library.
#pragma once
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#define C10_CUDA_CHECK(call)                                                                   \
    do {                                                                                       \
        const cudaError_t gf_error = (call);                                                   \
        TORCH_CHECK(gf_error == cudaSuccess, "CUDA error: ", cudaGetErrorString(gf_error)); \
    } while (0)
#define C10_CUDA_CHECK_WARN(call) C10_CUDA_CHECK(call)
#define C10_CUDA_ERROR_HANDLED(call) (call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
#define AT_CUDA_CHECK(call) C10_CUDA_CHECK(call)
#define TORCH_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_KERNEL_LAUNCH_CHECK()
