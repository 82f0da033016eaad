// The judge's own kernels. device/helper_kernels.py launches them around each timed launch.

using u64 = unsigned long long;

__device__ __forceinline__ u64 mix(u64 z) {  // the finalizer of splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ __forceinline__ u64 mix(u64 word, u64 key, u64 number) {
  return mix(word ^ (key + number * 0x9E3779B97F4A7C15ull));
}

// Keeps the device busy without touching memory.
extern "C" __global__ void spin(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}

// Overwrites a block's dynamic shared memory, so that no launch finds data of an earlier one there.
extern "C" __global__ void clobber_smem(u64 key, unsigned words) {
  extern __shared__ u64 shared[];
  volatile u64* out = shared;  // or the compiler would leave out stores that nothing reads
  for (unsigned i = threadIdx.x; i < words; i += blockDim.x) out[i] = mix(0, key, u64(blockIdx.x) * words + i);
}

// Overwrites the local memory of all threads that are resident at once.
extern "C" __global__ void fill_local(unsigned value) {
  volatile unsigned words[256];  // or the compiler would leave out stores that nothing reads
  for (int i = 0; i < 256; ++i) words[i] = value;
}

__device__ __forceinline__ ulonglong2 xor_mask(ulonglong2 words, u64 key, u64 pair) {
  return make_ulonglong2(words.x ^ mix(0, key, 2 * pair), words.y ^ mix(0, key, 2 * pair + 1));
}

// Makes memory unreadable without the key. With the same key, makes it readable again.
extern "C" __global__ void apply_mask(ulonglong2* data, u64 pairs, u64 key) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += u64(gridDim.x) * blockDim.x) {
    data[i] = xor_mask(data[i], key, i);
  }
}

// Words of 64 bits in memory: a multiple of two from an address that is a multiple of 16. first: the number of the
// first one. sum: the number that their digest is added to. mask_key: the key of their XOR mask, 0 for none.
struct Range {
  const ulonglong2* data;
  u64 pairs;
  u64 first;
  u64* sum;
  u64 mask_key;
};

// Passed by value: a timed kernel could overwrite ranges in global memory.
struct Ranges {
  Range range[4];
  u64 key;
};

// The sum of a keyed hash of each word and its number, modulo 2^64: it does not depend on the order of additions.
// Row y of the grid reads range y.
extern "C" __global__ void digest(const __grid_constant__ Ranges ranges) {
  const Range r = ranges.range[blockIdx.y];
  u64 sum = 0;
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < r.pairs; i += u64(gridDim.x) * blockDim.x) {
    const ulonglong2 words = r.mask_key == 0 ? r.data[i] : xor_mask(r.data[i], r.mask_key, i);
    sum += mix(words.x, ranges.key, r.first + 2 * i) + mix(words.y, ranges.key, r.first + 2 * i + 1);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, offset);
  if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(r.sum, sum);
}
