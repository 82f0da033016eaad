// In place of PyTorch's header: what most extensions use of it, in half of the time to compile. The whole header is used
// where this one does not suffice.
#pragma once
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
