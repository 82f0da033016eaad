// In place of PyTorch's header, whose library the CPU build lacks.
#pragma once
#include <ATen/cuda/CUDAContext.h>
