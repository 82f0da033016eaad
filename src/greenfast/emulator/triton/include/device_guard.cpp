// Part of each extension: the one CUDA device is always the current one.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using NoGuard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard)
}  // namespace
