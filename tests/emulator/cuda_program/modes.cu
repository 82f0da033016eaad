// One program for many tests: its first argument selects the test, so that it is compiled once.
#include <cooperative_groups.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>

__constant__ float table[4];
__device__ int counter = 3;
__managed__ int managed = 5;

struct Node {
    int value;
    Node *next;
};

template <class T> __global__ void scale(T *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * table[i % 4];
}
__global__ void count() { atomicAdd(&counter, 1), managed = 7; }
__global__ void walk(const Node *node, int *sum) {
    for (; node; node = node->next) *sum += node->value;
}
__global__ void reverse(int *x) {
    extern __shared__ int tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
__global__ void race(int *x) {
    __shared__ int tile[64];
    tile[threadIdx.x] = threadIdx.x;
    x[threadIdx.x] = tile[63 - threadIdx.x];  // no __syncthreads before it
}
__global__ void beyond(int *x, int n) { x[threadIdx.x + n] = 1; }
__global__ void copy(const int *x, int *y) { y[threadIdx.x] = x[threadIdx.x]; }
__global__ void stop(int n) {
    if (n == 0) __trap();
    printf("thread %d of %s\n", threadIdx.x, "a kernel");
}
__global__ void grid_sum(int *x, int *out) {
    auto grid = cooperative_groups::this_grid();
    atomicAdd(out, x[grid.thread_rank()]);
    grid.sync();
    if (grid.thread_rank() == 0) out[1] = out[0];
}

static int *ints(int n, bool zeros = true) {
    int *x;
    cudaMalloc(&x, n * sizeof(int));
    if (zeros) cudaMemset(x, 0, n * sizeof(int));
    return x;
}
static int end() {
    cudaError_t error = cudaDeviceSynchronize();
    printf("%s: %s\n", cudaGetErrorName(error), cudaGetErrorString(error));
    return error != cudaSuccess;
}

__global__ void same(int *x) {
    x[0] = 5;
    asm volatile("" ::: "memory");
    x[1 + blockIdx.x] = x[0];  // both blocks wrote it
}
__global__ void increase(int *x, int by) { x[threadIdx.x] += by; }
// A capture of two streams: their work runs at each launch of the graph; then a graph of nodes with a new parameter.
static int graph() {
    int *x = ints(4), host[4] = {5, 6, 7, 8}, by = 10, got[4];
    cudaStream_t s, other;
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaStreamCaptureStatus status;
    cudaStreamCreate(&s), cudaStreamCreate(&other), cudaEventCreate(&fork), cudaEventCreate(&join);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal);
    cudaMemcpyAsync(x, host, 16, cudaMemcpyHostToDevice, s);
    cudaEventRecord(fork, s), cudaStreamWaitEvent(other, fork, 0);
    increase<<<1, 3, 0, other>>>(x, by);
    cudaEventRecord(join, other), cudaStreamWaitEvent(s, join, 0);
    cudaMemsetAsync(x + 3, 0, 4, s);
    printf("%s ", cudaGetErrorName(cudaStreamSynchronize(s)));
    increase<<<1, 1>>>(x, by);
    printf("%s ", cudaGetErrorName(cudaGetLastError()));
    cudaStreamIsCapturing(other, &status);
    cudaStreamEndCapture(s, &graph);
    cudaMemcpy(got, x, 16, cudaMemcpyDeviceToHost);
    printf("%d %d\n", status == cudaStreamCaptureStatusActive, got[0]);
    cudaGraphInstantiate(&exec, graph, 0);
    by = 99, host[0] = 1;  // a kernel's arguments are fixed at the capture, the memory that it copies is not
    cudaGraphLaunch(exec, s), cudaGraphLaunch(exec, s), cudaStreamSynchronize(s);
    cudaMemcpy(got, x, 16, cudaMemcpyDeviceToHost);
    printf("%d %d %d %d\n", got[0], got[1], got[2], got[3]);
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);

    cudaGraphNode_t first, second;
    void *arguments[] = {&x, &by};
    cudaKernelNodeParams params = {};
    params.func = (void *)increase, params.gridDim = 1, params.blockDim = 4, params.kernelParams = arguments;
    cudaMemsetParams zero = {};
    zero.dst = x, zero.elementSize = 4, zero.width = 4, zero.height = 1;
    cudaGraphCreate(&graph, 0);
    cudaGraphAddMemsetNode(&first, graph, nullptr, 0, &zero);
    cudaGraphAddKernelNode(&second, graph, &first, 1, &params);
    cudaGraphInstantiate(&exec, graph, 0);
    by = 4;
    cudaGraphExecKernelNodeSetParams(exec, second, &params);
    cudaGraphLaunch(exec, 0), cudaMemcpy(got, x, 16, cudaMemcpyDeviceToHost);
    printf("%d %d\n", got[0], got[3]);
    return end();
}
static int right() {
    float h[100], factors[4] = {1, 2, 3, 4}, *x;
    for (int i = 0; i < 100; i++) h[i] = i;
    cudaMalloc(&x, sizeof h);
    cudaMemcpyToSymbol(table, factors, sizeof factors);
    cudaMemcpy(x, h, sizeof h, cudaMemcpyHostToDevice);
    scale<<<2, 64>>>(x, 100);
    cudaMemcpy(h, x, sizeof h, cudaMemcpyDeviceToHost);
    printf("scale %g %g\n", h[98], h[99]);

    count<<<2, 32>>>();
    int c;
    cudaMemcpyFromSymbol(&c, counter, sizeof c);
    printf("count %d managed %d\n", c, managed);

    Node *nodes;
    cudaMallocManaged(&nodes, 3 * sizeof(Node));  // pointers inside of structs, written by the host
    for (int i = 0; i < 3; i++) nodes[i] = {i + 1, i < 2 ? nodes + i + 1 : nullptr};
    int *sum;
    cudaHostAlloc(&sum, sizeof(int), cudaHostAllocMapped);
    *sum = 0;
    walk<<<1, 1>>>(nodes, sum);
    cudaDeviceSynchronize();
    printf("walk %d\n", *sum);

    int tile[64], *y = ints(64);
    for (int i = 0; i < 64; i++) tile[i] = i;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaEvent_t begin, done;
    cudaEventCreate(&begin), cudaEventCreate(&done);
    cudaEventRecord(begin, stream);
    cudaMemcpyAsync(y, tile, sizeof tile, cudaMemcpyHostToDevice, stream);
    reverse<<<1, 64, sizeof tile, stream>>>(y);
    cudaMemcpy2DAsync(tile, 16, y, 16, 16, 16, cudaMemcpyDeviceToHost, stream);
    cudaEventRecord(done, stream);
    cudaStreamSynchronize(stream);
    float ms = -1;
    cudaEventElapsedTime(&ms, begin, done);
    printf("reverse %d %d, time %s\n", tile[0], tile[63], ms >= 0 ? "passed" : "missing");

    int *out = ints(2), answer[2];
    void *arguments[] = {&y, &out};
    cudaLaunchCooperativeKernel((void *)grid_sum, dim3(2), dim3(32), arguments, 0, stream);
    cudaMemcpy(answer, out, sizeof answer, cudaMemcpyDefault);
    printf("grid %d %d\n", answer[0], answer[1]);

    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    cudaFuncAttributes attributes;
    cudaFuncGetAttributes(&attributes, race);
    printf("device %d.%d with %d, shared %zu\n", properties.major, properties.minor, properties.multiProcessorCount,
           attributes.sharedSizeBytes);
    return end();
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "right";
    auto is = [&](const char *name) { return !strcmp(mode, name); };
    if (is("right")) return right();
    if (is("race")) {
        int *x = ints(64);
        for (int n = 0; n < 3; n++) race<<<1, 64>>>(x);
        int h[64];
        cudaMemcpy(h, x, sizeof h, cudaMemcpyDeviceToHost);
    }
    if (is("beyond")) beyond<<<1, 4>>>(ints(6), 4);
    if (is("unwritten")) copy<<<1, 4>>>(ints(4, false), ints(4));
    if (is("freed")) {
        int *x = ints(4);
        cudaFree(x);
        copy<<<1, 4>>>(x, ints(4));
    }
    if (is("twice")) {
        int *x = ints(4);
        cudaFree(x);
        return cudaFree(x) != cudaErrorInvalidValue;
    }
    if (is("trap")) stop<<<1, 1>>>(0);
    if (is("printf")) stop<<<1, 2>>>(1);
    if (is("host")) printf("%d\n", *ints(4));
    if (is("long")) {
        int h[8], *x = ints(4);
        printf("%d\n", cudaMemcpy(h, x, sizeof h, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    }
    if (is("shared")) {
        reverse<<<1, 64, 100000>>>(ints(64));
        printf("%s\n", cudaGetErrorString(cudaGetLastError()));
    }
    if (is("missing")) {
        cudaIpcMemHandle_t handle;
        printf("%s\n", cudaGetErrorName(cudaIpcGetMemHandle(&handle, ints(1))));
    }
    if (is("same")) same<<<2, 1>>>(ints(3));
    if (is("graph")) return graph();
    if (is("registered")) {
        static int h[4];
        cudaHostRegister(h, sizeof h, cudaHostRegisterMapped);
        copy<<<1, 4>>>(h, ints(4));
        printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    }
    if (is("large")) {
        int *x = ints(1), *out = ints(2);
        void *arguments[] = {&x, &out};
        printf("%d\n", cudaLaunchCooperativeKernel((void *)grid_sum, dim3(265), dim3(1024), arguments));
    }
    if (is("direction")) {
        int values[4];
        puts(cudaGetErrorName(cudaMemcpy(ints(4), values, 16, cudaMemcpyKind(9))));
    }
    if (is("code")) return 7;
    return end();
}
