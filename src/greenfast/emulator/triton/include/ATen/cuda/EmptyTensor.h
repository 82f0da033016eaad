// Replaces PyTorch's header, because the CPU build lacks its library.
#pragma once
#include <ATen/Functions.h>

namespace at::detail {

inline TensorBase empty_cuda(IntArrayRef size, const TensorOptions& options) {
    return at::empty(size, options.device(c10::kCUDA));
}
inline TensorBase empty_cuda(IntArrayRef size, ScalarType dtype, std::optional<Device>,
                             std::optional<c10::MemoryFormat> format) {
    return at::empty(size, TensorOptions(dtype).device(c10::kCUDA), format);
}
inline TensorBase empty_cuda(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                             std::optional<Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    return at::empty(size, TensorOptions().dtype(dtype).device(c10::kCUDA), format);
}
inline TensorBase empty_strided_cuda(IntArrayRef size, IntArrayRef stride, const TensorOptions& options) {
    return at::empty_strided(size, stride, options.device(c10::kCUDA));
}
inline TensorBase empty_strided_cuda(IntArrayRef size, IntArrayRef stride, ScalarType dtype, std::optional<Device>) {
    return at::empty_strided(size, stride, TensorOptions(dtype).device(c10::kCUDA));
}
inline TensorBase empty_strided_cuda(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                                     std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
    return at::empty_strided(size, stride, TensorOptions().dtype(dtype).device(c10::kCUDA));
}

}  // namespace at::detail
