// A grid that begins while the one before it in the stream ends (PTX ISA, "griddepcontrol"; sm_90 and up): the launch of
// the second has to allow it.
#pragma once

namespace greenfast::ptx {

// By each block of the first grid: the next may begin once all blocks have come here or ended.
__device__ __forceinline__ void let_next_grid_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// By each thread of the second, before it reads what the first has written: waits until that has ended.
__device__ __forceinline__ void wait_for_grid_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace greenfast::ptx
