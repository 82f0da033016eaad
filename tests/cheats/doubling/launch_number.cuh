// How often a kernel has been launched, for those that behave as long as they are watched.
#pragma once

#include "element.cuh"

// More launches than CORRECTNESS makes, fewer than PERFORMANCE does.
constexpr unsigned kGoodLaunches = 16;

__device__ unsigned launches_before;

// The launch's number, from 0, in this process. It may change by one while the blocks of a launch read it, so it tells
// early launches from late ones and nothing finer.
__device__ __forceinline__ unsigned launch_number() {
  const unsigned number = *reinterpret_cast<volatile unsigned*>(&launches_before);
  if (element() == 0) atomicAdd(&launches_before, 1u);
  return number;
}
