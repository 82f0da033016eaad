// In place of PyTorch's header, whose library the CPU build lacks.
#pragma once
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
