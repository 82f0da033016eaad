// Replaces PyTorch's header, because the CPU build lacks its library.
#pragma once
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
