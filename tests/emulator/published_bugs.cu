// The forms of bugs in published kernels, in few lines each: docs/published-bugs.md, run by test_published_bugs.py.

// Off by one: thread n passes the check.
extern "C" __global__ void off_by_one(float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i > n) return;
  y[i] = 1;
}

// The last tile is loaded whole, although its rows beyond n are skipped later.
extern "C" __global__ void whole_last_tile(const float* x, float* y, int n) {
  __shared__ float tile[32];
  float sum = 0;
  for (int start = 0; start < n; start += 32) {
    tile[threadIdx.x] = x[start + threadIdx.x];
    __syncthreads();
    for (int k = 0; k < 32 && start + k < n; k++) sum += tile[k];
    __syncthreads();
  }
  y[threadIdx.x] = sum;
}

// A padded block: its state beyond n is 0, but the load of the gate has no mask (in Triton a tl.load without mask).
extern "C" __global__ void unmasked_load(const float* gate, float* y, int n) {
  float state = threadIdx.x < n ? 1 : 0;
  state *= expf(gate[threadIdx.x]);  // 0 times infinity is NaN
  for (int d = 16; d; d /= 2) state += __shfl_xor_sync(~0u, state, d);
  if (threadIdx.x == 0) *y = state;
}

// The accumulator is the output, which nothing has written: 0 times its NaN is NaN.
extern "C" __global__ void unwritten_accumulator(const float* x, float* y, int n) {
  float old_weight = 0;
  for (int k = 0; k < n; k++) {
    y[threadIdx.x] = old_weight * y[threadIdx.x] + x[k];
    old_weight = 1;
  }
}

// Each block writes its own slab, and forgets the offset of its columns: half of each slab is never written.
extern "C" __global__ void partial_slab(const float* x, float* partial, int n) {
  int slab = blockIdx.x * n;
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  partial[slab + threadIdx.x] = x[column];
}

// Shared memory that all warps read is written again without a barrier between.
extern "C" __global__ void reused_without_barrier(const float* x, float* y) {
  __shared__ float s[4];
  int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) s[warp] = x[warp];
  __syncthreads();
  float first = s[0];
  // missing: __syncthreads();
  if (threadIdx.x % 32 == 0) s[warp] = first + 1;
  __syncthreads();
  y[threadIdx.x] = s[warp];
}

// A tile is loaded while slower warps still read the one before it.
extern "C" __global__ void tiles_without_second_barrier(const float* x, float* y, int n) {
  __shared__ float tile[64];
  float sum = 0;
  for (int start = 0; start < n; start += 64) {
    tile[threadIdx.x] = x[start + threadIdx.x];
    __syncthreads();
    for (int k = 0; k < 64; k++) sum += tile[k];
    // missing: __syncthreads();
  }
  y[threadIdx.x] = sum;
}

// Threads outside of the image leave before they have loaded their part of the tile.
extern "C" __global__ void left_before_load(const float* x, float* y, int width) {
  __shared__ float tile[64];
  if (threadIdx.x >= width) return;
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float sum = 0;
  for (int k = 0; k < 64; k++) sum += tile[k];
  y[threadIdx.x] = sum;
}

// A sum over the block, called by a part of its warps: it adds what the others have not written.
__device__ float sum_of_block(float value) {
  __shared__ float sums[4];
  for (int d = 16; d; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  return sums[0] + sums[1] + sums[2] + sums[3];
}
extern "C" __global__ void collective_in_branch(const float* x, float* y, int n) {
  if (threadIdx.x < n) y[threadIdx.x] = sum_of_block(x[threadIdx.x]);
}

// The last block adds the sums of all blocks. No fence orders a sum before its block's count.
extern "C" __global__ void last_block_without_fence(const float* x, float* sums, unsigned* blocks, float* y) {
  __shared__ bool last;
  sums[blockIdx.x * blockDim.x + threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  // missing: __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(blocks, gridDim.x) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  float sum = 0;
  for (int block = 0; block < gridDim.x; block++) sum += sums[block * blockDim.x + threadIdx.x];
  y[threadIdx.x] = sum;
}

// One thread of a warp writes, the others read: no __syncwarp between.
extern "C" __global__ void warp_without_sync(const float* x, float* y) {
  __shared__ float s;
  if (threadIdx.x == 0) s = 0;
  __syncwarp();
  if (threadIdx.x == 0) s = x[0];
  // missing: __syncwarp();
  y[threadIdx.x] = s;
}

// The same through global memory. A shuffle before the write orders nothing.
extern "C" __global__ void warp_through_global(const float* x, float* scores, float* y) {
  float sum = x[threadIdx.x];
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (threadIdx.x == 0) scores[0] = sum;
  // missing: __syncwarp();
  y[threadIdx.x] = scores[0];
}

// A reduction for warps in lockstep, as before sm_70: volatile does not make the threads wait for each other.
extern "C" __global__ void lockstep_reduction(const int* x, int* y) {
  __shared__ volatile int s[32];
  s[threadIdx.x] = x[threadIdx.x];
  for (int d = 16; d; d /= 2) {
    // missing: __syncwarp();
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
  }
  if (threadIdx.x == 0) *y = s[0];
}
