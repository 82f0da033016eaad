// Per-phase cycle counts of an instrumented build; an empty type in every other build.
#pragma once

namespace greenfast {

template <bool kEnabled, int kPhases>
struct PhaseClock {
  __device__ explicit PhaseClock(long long*) {}
  __device__ void mark(int) {}
  __device__ void write() {}
};

// Thread 0 of each block attributes the cycles since its last mark to the phase that ends at this mark, waiting at
// barriers included, and writes the sums of its block to `out`[block][kPhases].
template <int kPhases>
struct PhaseClock<true, kPhases> {
  long long* out;
  long long last = clock64();
  long long cycles[kPhases] = {};

  __device__ explicit PhaseClock(long long* out) : out(out) {}

  __device__ __forceinline__ void mark(int phase) {
    const long long now = clock64();
    cycles[phase] += now - last;
    last = now;
  }

  __device__ void write() {
    if (threadIdx.x != 0) return;
    const size_t block = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
#pragma unroll
    for (int i = 0; i < kPhases; ++i) out[block * kPhases + i] = cycles[i];
  }
};

}  // namespace greenfast
