// z = x + y. THREADS and VECTOR are constants of solution.json: macros here, and names in its expressions.
// The kernel is declared extern "C", so that solution.json can call it by its name.

struct alignas(4 * VECTOR) Pack {
  float values[VECTOR];
};

extern "C" __global__ void __launch_bounds__(THREADS) add(const Pack* x, const Pack* y, Pack* z, int n) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n / VECTOR) return;  // n is a multiple of VECTOR
  const Pack a = x[i], b = y[i];
  Pack sum;
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) sum.values[k] = a.values[k] + b.values[k];
  z[i] = sum;
}
