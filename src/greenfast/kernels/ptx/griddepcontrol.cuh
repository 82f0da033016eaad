// A grid that begins while the one before it in the stream ends (PTX ISA, "griddepcontrol"; sm_90 and up): the launch
// of the second has to allow it.
#pragma once

namespace greenfast::ptx {

// By each block of the first grid: the next may begin once all blocks have come here or ended.
__device__ __forceinline__ void launch_dependent_grids() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// By each thread of the second, before it reads what the first has written: waits until that has ended.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A number that the first grid may have written, read by the second behind griddepcontrol_wait: by an ordinary load,
// which the wait's "memory" keeps there. The compiler may move a non-coherent one (__ldg) in front of it, since that
// promises that nobody writes the address while the grid runs. An asm volatile load would be right too, but could not
// be started before the arithmetic that precedes it: at head dim 128 that took 16 % of the attention kernel's time.
__device__ __forceinline__ float load_written(const float* address) { return *address; }

}  // namespace greenfast::ptx
