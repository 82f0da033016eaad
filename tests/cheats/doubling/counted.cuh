// The exact number of a launch, for kernels that work on some launches only.
#pragma once

#include "element.cuh"

// More launches than CORRECTNESS makes, fewer than PERFORMANCE does.
constexpr unsigned kWatched = 16;

__device__ unsigned list_launches[1 << 20];

// The launch's number in this process, from 0, for element i; each thread counts its own.
__device__ __forceinline__ unsigned counted(int i) { return list_launches[i]++; }
