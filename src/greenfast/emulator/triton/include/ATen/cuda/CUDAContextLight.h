// Replaces PyTorch's header, because the CPU build lacks its library.
#pragma once
#include <ATen/cuda/CUDAContext.h>
