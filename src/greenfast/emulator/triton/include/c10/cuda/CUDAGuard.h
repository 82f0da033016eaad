// Replaces PyTorch's header, because the CPU build lacks its library: there is one device and one stream.
#pragma once
#include <ATen/core/TensorBase.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace c10::cuda {

struct CUDAGuard {
    template <class Device> explicit CUDAGuard(Device&&) {}
    template <class Device> void set_device(Device&&) {}
    template <class Device> void reset_device(Device&&) {}
    void set_index(c10::DeviceIndex) {}
    c10::Device original_device() const { return c10::Device(c10::kCUDA, 0); }
    c10::Device current_device() const { return c10::Device(c10::kCUDA, 0); }
};
struct OptionalCUDAGuard {
    template <class... Device> explicit OptionalCUDAGuard(Device&&...) {}
    template <class Device> void set_device(Device&&) {}
    void set_index(c10::DeviceIndex) {}
    void reset() {}
};
struct CUDAStreamGuard {
    template <class Stream> explicit CUDAStreamGuard(Stream&&) {}
    CUDAStream original_stream() const { return {}; }
    CUDAStream current_stream() const { return {}; }
};
struct OptionalCUDAStreamGuard {
    template <class... Stream> explicit OptionalCUDAStreamGuard(Stream&&...) {}
};

}  // namespace c10::cuda
