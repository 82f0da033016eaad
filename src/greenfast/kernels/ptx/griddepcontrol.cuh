// Programmatic dependent launch: a grid that starts while the previous one in the stream ends (PTX ISA,
// "griddepcontrol"; sm_90 and up). The launch attribute of the second grid must allow it.
#pragma once

namespace greenfast::ptx {

// Called by each block of the first grid: the dependent grid may start when all blocks have called it or exited.
__device__ __forceinline__ void launch_dependent_grids() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Called by each thread of the dependent grid before it reads output of the first: waits until that grid has completed.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Loads output of the first grid, after griddepcontrol_wait. An ordinary load: the "memory" clobber of the wait keeps
// it in place. The compiler may hoist a non-coherent load (__ldg) above the wait, because it implies that nobody writes
// the address while the grid runs. A volatile asm load would be correct too, but cannot be hoisted above earlier
// arithmetic: at head dim 128 that cost 16 % of the attention kernel's time.
__device__ __forceinline__ float load_written(const float* address) { return *address; }

}  // namespace greenfast::ptx
