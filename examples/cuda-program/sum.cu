// A program with a data race: greenfast run sum.cu (docs/cuda-programs.md)
#include <cstdio>

__global__ void sum(const float* x, float* out) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x == 0)  // no __syncthreads() before it
        for (int i = 0; i < 64; i++) *out += tile[i];
}

int main() {
    float *x, *out;
    cudaMallocManaged(&x, 64 * sizeof(float));
    cudaMallocManaged(&out, sizeof(float));
    for (int i = 0; i < 64; i++) x[i] = i;
    sum<<<1, 64>>>(x, out);
    cudaDeviceSynchronize();
    printf("%g\n", *out);
}
