// Replaces PyTorch's header, because the CPU build lacks its library: all streams are the default one, in order.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStream {
   public:
    CUDAStream() = default;
    explicit CUDAStream(c10::Stream) {}
    operator cudaStream_t() const { return nullptr; }
    operator c10::Stream() const { return unwrap(); }
    cudaStream_t stream() const { return nullptr; }
    c10::Stream unwrap() const { return c10::Stream(c10::Stream::DEFAULT, device()); }
    c10::Device device() const { return c10::Device(c10::kCUDA, 0); }
    c10::DeviceIndex device_index() const { return 0; }
    c10::StreamId id() const { return 0; }
    void synchronize() const {}
    bool query() const { return true; }
    bool operator==(const CUDAStream&) const { return true; }
    bool operator!=(const CUDAStream&) const { return false; }
};

inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex = -1) { return {}; }
inline CUDAStream getDefaultCUDAStream(c10::DeviceIndex = -1) { return {}; }
inline CUDAStream getStreamFromPool(bool = false, c10::DeviceIndex = -1) { return {}; }
inline CUDAStream getStreamFromExternal(cudaStream_t, c10::DeviceIndex) { return {}; }
inline void setCurrentCUDAStream(CUDAStream) {}
inline c10::DeviceIndex current_device() { return 0; }
inline c10::DeviceIndex device_count() { return 1; }
inline void set_device(c10::DeviceIndex) {}
inline void device_synchronize() {}

}  // namespace c10::cuda

namespace at::cuda {
using namespace c10::cuda;
}
