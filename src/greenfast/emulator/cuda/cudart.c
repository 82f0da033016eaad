// A CUDA runtime library without a GPU: it forwards calls to the emulator, one message per call.
//
// The emulator of a program is another process (server.py), and messages go over a socket. Device memory is a shared
// mapping at one fixed address in both processes, so that pointers inside structs are valid in both. The program's own
// mapping of device memory is inaccessible, as on a GPU; copies use a second mapping of the same memory. An extension
// of Python is in one process with the emulator: a function takes the messages (gf_attach), and device memory is the
// memory of PyTorch's CPU tensors. Functions that are not here are stubs (library.py) that call
// gf_refuse. Streams need no queue: every call is complete when it returns, an order that every stream allows.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CALLER __builtin_return_address(0)
#define EXPORT __attribute__((visibility("default")))
#define OK cudaSuccess

// Operations and the form of messages: as in server.py.
enum { MODULE, FUNCTION, VARIABLE, ALLOCATE, RELEASE, COPY, FILL, SYMBOL, LAYOUT, LAUNCH, ATTRIBUTES, LOOKUP, REFUSE,
       TENSORMAP, REGISTER };
enum { DEVICE, PINNED, MANAGED };
typedef struct { uint32_t operation, bytes; uint64_t values[14]; } Request;
typedef struct { int32_t error; uint32_t bytes; uint64_t values[6]; } Reply;

#include "generated.h"  // GF_BASE, GF_CAPACITY, error_names, properties

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int channel = -1;
static char *alias;  // device memory, accessible
static __thread cudaError_t last_error;
static cudaError_t sticky;  // an error of a kernel: every later call returns it
static uint64_t next_handle = 0x1000;
static void (*handler)(const Request *, const void *, Reply *, const char **);

// Let a function of this process take the messages, and forget errors. Its reply's payload is valid until the next call.
EXPORT void gf_attach(void (*function)(const Request *, const void *, Reply *, const char **)) {
    handler = function, sticky = last_error = cudaSuccess;
}

static cudaError_t set(cudaError_t error) { if (error) last_error = error; return error; }

static void stop(const char *why) { fprintf(stderr, "greenfast: %s\n", why); _exit(3); }

static void transfer(int writes, void *data, size_t bytes) {
    while (bytes) {
        ssize_t n = writes ? write(channel, data, bytes) : read(channel, data, bytes);
        if (n <= 0) stop("the emulator has ended");
        data = (char *)data + n, bytes -= n;
    }
}

// A program that reads device memory on the host ends here, as with a GPU, but with a reason.
static void segfault(int number, siginfo_t *info, void *context) {
    (void)context;
    uintptr_t address = (uintptr_t)info->si_addr;
    signal(number, SIG_DFL);
    if (address - GF_BASE < GF_CAPACITY) {
        static const char text[] = "host code reads or writes device memory";
        Request request = {REFUSE, sizeof text - 1, {1, address}};
        Reply reply;
        transfer(1, &request, sizeof request);
        transfer(1, (void *)text, sizeof text - 1);
        transfer(0, &reply, sizeof reply);
    }
}

static void begin(void) {
    if (channel >= 0) return;
    const char *text = getenv("GREENFAST_CHANNEL");
    int memory;
    if (!text || sscanf(text, "%d,%d", &channel, &memory) != 2) stop("start this program by `greenfast run`");
    void *place = mmap((void *)GF_BASE, GF_CAPACITY, PROT_NONE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, memory, 0);
    alias = mmap(NULL, GF_CAPACITY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory, 0);
    if (place != (void *)GF_BASE || alias == MAP_FAILED) stop("device memory cannot be mapped at its address");
    struct sigaction action = {.sa_sigaction = segfault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
}

// Send a request with its payload. Print the output of kernels, or store the reply's payload (freed by the caller).
static Reply call(Request request, const void *payload, char **received) {
    Reply reply = {0};
    if (handler) {  // Python's lock orders its calls
        const char *data = NULL;
        handler(&request, payload, &reply, &data);
        if (reply.bytes && received) memcpy(*received = malloc(reply.bytes), data, reply.bytes);
        return reply;
    }
    pthread_mutex_lock(&lock);
    begin();
    transfer(1, &request, sizeof request);
    transfer(1, (void *)payload, request.bytes);
    transfer(0, &reply, sizeof reply);
    if (reply.bytes) {
        char *data = malloc(reply.bytes);
        transfer(0, data, reply.bytes);
        if (received) *received = data;
        else fwrite(data, 1, reply.bytes, stdout), free(data);
    }
    pthread_mutex_unlock(&lock);
    return reply;
}

// Name a function that the emulator lacks, at its caller; return an error.
EXPORT int gf_refuse(const char *name, void *caller) {
    call((Request){REFUSE, strlen(name), {0, (uintptr_t)caller}}, name, NULL);
    return set(cudaErrorNotSupported);
}
#define REFUSED(text) (cudaError_t)gf_refuse(text, CALLER)

static int is_device(const void *p) { return (uintptr_t)p - GF_BASE < GF_CAPACITY; }
static char *reachable(const void *p) { return is_device(p) ? alias + ((uintptr_t)p - GF_BASE) : (char *)p; }

// ---- registration ---------------------------------------------------------------------------------------------------

typedef struct { int magic, version; const uint32_t *data; void *file; } Wrapper;

EXPORT void **__cudaRegisterFatBinary(Wrapper *wrapper) {
    uint64_t *handle = malloc(sizeof *handle);
    uint64_t bytes;
    memcpy(&bytes, (const char *)wrapper->data + 8, 8);
    bytes += *(const uint16_t *)((const char *)wrapper->data + 6);
    *handle = call((Request){MODULE, bytes, {wrapper->version}}, wrapper->data, NULL).values[0];
    return (void **)handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
EXPORT char __cudaInitModule(void **handle) { (void)handle; return 1; }
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a,
                                   void *b, void *c, void *d, int *e) {
    (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
    call((Request){FUNCTION, strlen(name), {*(uint64_t *)handle, (uintptr_t)host}}, name, NULL);
}
static Reply declare(void **handle, void *host, const char *name, size_t size, int managed) {
    return call((Request){VARIABLE, strlen(name), {*(uint64_t *)handle, (uintptr_t)host, size, managed}}, name, NULL);
}
static void open_pages(uint64_t address, uint64_t size) {
    if (handler) return;
    uint64_t end = (address + size + 4095) & ~4095ull;
    mprotect((void *)(address & ~4095ull), end - (address & ~4095ull), PROT_READ | PROT_WRITE);
}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t size, int c, int g) {
    (void)device, (void)ext, (void)c, (void)g;
    declare(handle, host, name, size, 0);
}
EXPORT void __cudaRegisterManagedVar(void **handle, void **host, char *device, const char *name, int ext, size_t size,
                                     int c, int g) {
    (void)device, (void)ext, (void)c, (void)g;
    Reply reply = declare(handle, host, name, size, 1);
    if (reply.error) _exit(3);  // host code would read it without a call
    if (reply.values[0]) open_pages(reply.values[0], size), *host = (void *)reply.values[0];
}

// ---- launches -------------------------------------------------------------------------------------------------------

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed[16];
static __thread int depth;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    if (depth == 16) return 1;
    pushed[depth].grid = grid, pushed[depth].block = block, pushed[depth].shared = shared;
    pushed[depth++].stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!depth) return set(cudaErrorMissingConfiguration);
    *grid = pushed[--depth].grid, *block = pushed[depth].block, *shared = pushed[depth].shared;
    *(void **)stream = pushed[depth].stream;
    return OK;
}

// Work of a stream: it runs at once, or becomes a node of a graph. Nodes run in the order in which they were added, an
// order that their dependencies allow.
enum { KERNEL, MEMCPY, MEMSET, HOST, EMPTY };
typedef struct Node {
    int kind;
    void *caller;
    const void *function;
    dim3 grid, block, cluster;
    size_t shared;
    int cooperative, early;
    char *packed;
    uint32_t bytes;
    void *dst;
    const void *src;
    size_t dst_pitch, dst_slice, src_pitch, src_slice, width, height, planes;
    int value;  // of a fill, or the kind of a copy
    cudaHostFn_t host;
    void *data;
    const struct Node *origin;
    struct Node *next;
} Node;
typedef struct { Node *first, **last; } Graph;

static struct { Graph *graph; void *origin, *streams[64]; int count; enum cudaStreamCaptureMode mode; } capture;

static int is_captured(void *stream) {
    for (int n = 0; n < capture.count; n++) if (capture.streams[n] == stream) return 1;
    return 0;
}
static Node *append(Graph *graph, const Node *node) {
    Node *made = malloc(sizeof *made);
    *made = *node, made->origin = made, made->next = NULL;
    if (node->packed) made->packed = memcpy(malloc(node->bytes + 1), node->packed, node->bytes);
    *graph->last = made, graph->last = &made->next;
    return made;
}
static cudaError_t run(const Node *n);
static cudaError_t submit(const Node *node, void *stream) {
    if (is_captured(stream)) return append(capture.graph, node), OK;
    if (capture.graph && !stream && capture.mode != cudaStreamCaptureModeRelaxed) return set(cudaErrorStreamCaptureImplicit);
    return run(node);
}

// Pack arguments as the kernel takes them.
static cudaError_t pack(Node *node, void **arguments) {
    char *layout = NULL;
    Reply reply = call((Request){LAYOUT, 0, {(uintptr_t)node->function}}, NULL, &layout);
    if (!reply.error) {
        uint32_t (*parameters)[2] = (void *)layout, count = reply.bytes / 8;
        node->bytes = reply.values[0];
        node->packed = calloc(1, node->bytes + 1);
        for (uint32_t n = 0; n < count; n++) memcpy(node->packed + parameters[n][0], arguments[n], parameters[n][1]);
    }
    if (reply.error == cudaErrorNotSupported) sticky = reply.error;  // without this kernel, no later result is right
    free(layout);
    return set(reply.error);
}
static cudaError_t run_kernel(const Node *n) {
    Request request = {LAUNCH, n->bytes, {(uintptr_t)n->function, n->grid.x, n->grid.y, n->grid.z, n->block.x, n->block.y,
                                          n->block.z, n->shared, n->cluster.x, n->cluster.y, n->cluster.z, n->cooperative,
                                          n->early, (uintptr_t)n->caller}};
    Reply reply = call(request, n->packed, NULL);
    if (reply.values[0]) sticky = reply.values[0];
    if (reply.error == cudaErrorNotSupported) sticky = reply.error;
    return set(reply.error);
}
static cudaError_t launch(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, dim3 cluster,
                          int cooperative, int early, void *stream, void *caller) {
    if (sticky) return set(sticky);
    Node node = {.kind = KERNEL, .caller = caller, .function = function, .grid = grid, .block = block, .cluster = cluster,
                 .shared = shared, .cooperative = cooperative, .early = early};
    cudaError_t error = pack(&node, arguments);
    if (!error) error = submit(&node, stream);
    free(node.packed);
    return error;
}
static const dim3 one = {1, 1, 1};

EXPORT cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch(f, g, b, a, s, one, 0, 0, t, CALLER);
}
EXPORT cudaError_t cudaLaunchKernel_ptsz(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch(f, g, b, a, s, one, 0, 0, t, CALLER);
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (void *)function; return OK; }
EXPORT cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (void *)function; return OK; }
EXPORT cudaError_t cudaGetFuncBySymbol(cudaFunction_t *out, const void *function) { *out = (void *)function; return OK; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch(f, g, b, a, s, one, 0, 0, t, CALLER);
}
EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch(f, g, b, a, s, one, 0, 0, t, CALLER);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
    return launch(f, g, b, a, s, one, 1, 0, t, CALLER);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **a) {
    dim3 cluster = one;
    int cooperative = 0, early = 0;
    for (unsigned n = 0; n < config->numAttrs; n++) {
        const cudaLaunchAttribute *attribute = &config->attrs[n];
        if (attribute->id == cudaLaunchAttributeClusterDimension)
            cluster = (dim3){attribute->val.clusterDim.x, attribute->val.clusterDim.y, attribute->val.clusterDim.z};
        else if (attribute->id == cudaLaunchAttributeCooperative) cooperative = attribute->val.cooperative;
        else if (attribute->id == cudaLaunchAttributeProgrammaticStreamSerialization)
            early = attribute->val.programmaticStreamSerializationAllowed;
    }
    return launch(f, config->gridDim, config->blockDim, a, config->dynamicSmemBytes, cluster, cooperative, early,
                  config->stream, CALLER);
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    Reply reply = call((Request){ATTRIBUTES, 0, {(uintptr_t)function}}, NULL, NULL);
    if (reply.error) return set(reply.error);
    memset(out, 0, sizeof *out);
    out->sharedSizeBytes = reply.values[0], out->localSizeBytes = reply.values[1];
    out->maxThreadsPerBlock = reply.values[2], out->constSizeBytes = reply.values[3], out->numRegs = GF_REGISTERS;
    out->maxDynamicSharedSizeBytes = reply.values[4], out->ptxVersion = out->binaryVersion = 90;
    return OK;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    return set(call((Request){ATTRIBUTES, 0, {(uintptr_t)function, 1 + attribute, (uint32_t)value}}, NULL, NULL).error);
}
static cudaError_t occupancy(int *blocks, const void *function, int threads, size_t shared) {
    Reply reply = call((Request){ATTRIBUTES, 0, {(uintptr_t)function}}, NULL, NULL);
    if (reply.error) return set(reply.error);
    if (threads < 1) return set(cudaErrorInvalidValue);
    int warps = (threads + 31) / 32, by_threads = 64 / warps, by_registers = 65536 / (GF_REGISTERS * 32 * warps);
    int by_shared = 233472 / (reply.values[0] + shared + 1024);
    *blocks = by_threads < 32 ? by_threads : 32;
    if (by_registers < *blocks) *blocks = by_registers;
    if (by_shared < *blocks) *blocks = by_shared;
    if (threads > (int)reply.values[2] || reply.values[0] + shared > 232448) *blocks = 0;
    return OK;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) {
    return occupancy(n, f, b, s);
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned x) {
    (void)x; return occupancy(n, f, b, s);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

static cudaError_t allocate(void **out, size_t size, int kind, void *caller) {
    if (sticky) return set(sticky);
    if (!out) return set(cudaErrorInvalidValue);
    if (!size) { *out = NULL; return OK; }
    Reply reply = call((Request){ALLOCATE, 0, {size, kind, (uintptr_t)caller}}, NULL, NULL);
    if (reply.error) return set(reply.error);
    if (kind == PINNED || kind == MANAGED) open_pages(reply.values[0], size);
    *out = (void *)reply.values[0];
    return OK;
}
static cudaError_t release(void *p, int kind, void *caller) {
    if (!p) return sticky ? set(sticky) : OK;
    return set(call((Request){RELEASE, 0, {(uintptr_t)p, kind, (uintptr_t)caller}}, NULL, NULL).error);
}
EXPORT cudaError_t cudaMalloc(void **out, size_t size) { return allocate(out, size, DEVICE, CALLER); }
EXPORT cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t s) {
    if (is_captured(s)) return REFUSED("cudaMallocAsync in a graph");
    return allocate(out, size, DEVICE, CALLER);
}
EXPORT cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t pool, cudaStream_t s) {
    (void)s, (void)pool; return allocate(out, size, DEVICE, CALLER);
}
EXPORT cudaError_t cudaMallocHost(void **out, size_t size) { return allocate(out, size, PINNED, CALLER); }
EXPORT cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
    (void)flags; return allocate(out, size, PINNED, CALLER);
}
EXPORT cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags) {
    (void)flags; return allocate(out, size, MANAGED, CALLER);
}
EXPORT cudaError_t cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height) {
    *pitch = (width + 511) & ~(size_t)511;
    return allocate(out, *pitch * height, DEVICE, CALLER);
}
EXPORT cudaError_t cudaMalloc3D(struct cudaPitchedPtr *out, struct cudaExtent extent) {
    out->pitch = (extent.width + 511) & ~(size_t)511, out->xsize = extent.width, out->ysize = extent.height;
    return allocate(&out->ptr, out->pitch * extent.height * extent.depth, DEVICE, CALLER);
}
EXPORT cudaError_t cudaFree(void *p) { return release(p, DEVICE, CALLER); }
EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t s) {
    return is_captured(s) ? REFUSED("cudaFreeAsync in a graph") : release(p, DEVICE, CALLER);
}
EXPORT cudaError_t cudaFreeHost(void *p) { return release(p, PINNED, CALLER); }
EXPORT cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) {
    (void)flags; return set(call((Request){REGISTER, 0, {(uintptr_t)p, size}}, NULL, NULL).error);
}
EXPORT cudaError_t cudaHostUnregister(void *p) {
    return set(call((Request){REGISTER, 0, {(uintptr_t)p, 0}}, NULL, NULL).error);
}
EXPORT cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned flags) {
    (void)flags;
    if (!is_device(host)) return REFUSED("cudaHostGetDevicePointer of memory of cudaHostRegister (give cudaHostAlloc's)");
    *out = host;
    return OK;
}
EXPORT cudaError_t cudaHostGetFlags(unsigned *flags, void *p) { (void)p; *flags = cudaHostAllocMapped; return OK; }
EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = GF_CAPACITY, *available = GF_CAPACITY - call((Request){LOOKUP, 0, {0}}, NULL, NULL).values[3];
    return OK;
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
    Reply reply = call((Request){LOOKUP, 0, {(uintptr_t)p}}, NULL, NULL);
    static const enum cudaMemoryType types[] = {cudaMemoryTypeDevice, cudaMemoryTypeHost, cudaMemoryTypeManaged};
    memset(out, 0, sizeof *out);
    out->type = reply.values[1] ? types[reply.values[2]] : cudaMemoryTypeUnregistered;
    out->devicePointer = reply.values[1] ? (void *)p : NULL;
    out->hostPointer = reply.values[1] && out->type == cudaMemoryTypeDevice ? NULL : (void *)p;
    return OK;
}

// Copy rows; all sizes in bytes. The emulator checks both ranges, then the bytes are moved here.
static cudaError_t run_copy(const Node *c) {
    Request request = {COPY, 0, {(uintptr_t)c->dst, c->dst_pitch, c->dst_slice, (uintptr_t)c->src, c->src_pitch, c->src_slice,
                                 c->width, c->height, c->planes, c->value, (uintptr_t)c->caller}};
    Reply reply = call(request, NULL, NULL);
    if (reply.error) return set(reply.error);
    char *to = reachable(c->dst);
    const char *from = reachable(c->src);
    for (size_t z = 0; z < c->planes; z++)
        for (size_t y = 0; y < c->height; y++)
            memmove(to + z * c->dst_slice + y * c->dst_pitch, from + z * c->src_slice + y * c->src_pitch, c->width);
    return OK;
}
static Node copy_node(void *dst, size_t dst_pitch, size_t dst_slice, const void *src, size_t src_pitch, size_t src_slice,
                      size_t width, size_t height, size_t planes, enum cudaMemcpyKind kind, void *caller) {
    return (Node){.kind = MEMCPY, .caller = caller, .dst = dst, .src = src, .dst_pitch = dst_pitch, .dst_slice = dst_slice,
                  .src_pitch = src_pitch, .src_slice = src_slice, .width = width, .height = height, .planes = planes,
                  .value = kind};
}
static cudaError_t copy(void *dst, size_t dst_pitch, size_t dst_slice, const void *src, size_t src_pitch, size_t src_slice,
                        size_t width, size_t height, size_t planes, enum cudaMemcpyKind kind, void *stream, void *caller) {
    if (sticky) return set(sticky);
    if (!width || !height || !planes) return OK;
    Node node = copy_node(dst, dst_pitch, dst_slice, src, src_pitch, src_slice, width, height, planes, kind, caller);
    return submit(&node, stream);
}
static cudaError_t copy_2d(void *dst, size_t dp, const void *src, size_t sp, size_t w, size_t h, enum cudaMemcpyKind kind,
                           void *stream, void *caller) {
    if (dp < w || sp < w) return set(cudaErrorInvalidPitchValue);
    return copy(dst, dp, 0, src, sp, 0, w, h, 1, kind, stream, caller);
}
static cudaError_t copy_3d(const struct cudaMemcpy3DParms *p, void *stream, void *caller) {
    if (p->srcArray || p->dstArray) return (cudaError_t)gf_refuse("cudaMemcpy3D with a CUDA array", caller);
    size_t src_slice = p->srcPtr.pitch * p->srcPtr.ysize, dst_slice = p->dstPtr.pitch * p->dstPtr.ysize;
    const char *src = (char *)p->srcPtr.ptr + p->srcPos.z * src_slice + p->srcPos.y * p->srcPtr.pitch + p->srcPos.x;
    char *dst = (char *)p->dstPtr.ptr + p->dstPos.z * dst_slice + p->dstPos.y * p->dstPtr.pitch + p->dstPos.x;
    return copy(dst, p->dstPtr.pitch, dst_slice, src, p->srcPtr.pitch, src_slice, p->extent.width, p->extent.height,
                p->extent.depth, p->kind, stream, caller);
}
EXPORT cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
    return copy(d, 0, 0, s, 0, 0, n, 1, 1, k, NULL, CALLER);
}
EXPORT cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) {
    return copy(d, 0, 0, s, 0, 0, n, 1, 1, k, t, CALLER);
}
EXPORT cudaError_t cudaMemcpyPeer(void *d, int x, const void *s, int y, size_t n) {
    (void)x, (void)y; return copy(d, 0, 0, s, 0, 0, n, 1, 1, cudaMemcpyDeviceToDevice, NULL, CALLER);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *d, int x, const void *s, int y, size_t n, cudaStream_t t) {
    (void)x, (void)y; return copy(d, 0, 0, s, 0, 0, n, 1, 1, cudaMemcpyDeviceToDevice, t, CALLER);
}
EXPORT cudaError_t cudaMemcpy2D(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k) {
    return copy_2d(d, dp, s, sp, w, h, k, NULL, CALLER);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k,
                                     cudaStream_t t) {
    return copy_2d(d, dp, s, sp, w, h, k, t, CALLER);
}
EXPORT cudaError_t cudaMemcpy3D(const struct cudaMemcpy3DParms *p) { return copy_3d(p, NULL, CALLER); }
EXPORT cudaError_t cudaMemcpy3DAsync(const struct cudaMemcpy3DParms *p, cudaStream_t t) { return copy_3d(p, t, CALLER); }

static cudaError_t run_fill(const Node *f) {
    Request request = {FILL, 0, {(uintptr_t)f->dst, f->dst_pitch, f->dst_slice, (uint8_t)f->value, f->width, f->height,
                                 f->planes, (uintptr_t)f->caller}};
    return set(call(request, NULL, NULL).error);
}
static cudaError_t fill(void *p, size_t pitch, size_t slice, int value, size_t width, size_t height, size_t planes,
                        void *stream, void *caller) {
    if (sticky) return set(sticky);
    if (!width || !height || !planes) return OK;
    Node node = {.kind = MEMSET, .caller = caller, .dst = p, .dst_pitch = pitch, .dst_slice = slice, .value = value,
                 .width = width, .height = height, .planes = planes};
    return submit(&node, stream);
}
static cudaError_t run(const Node *n) {
    if (sticky) return set(sticky);
    switch (n->kind) {
        case KERNEL: return run_kernel(n);
        case MEMCPY: return run_copy(n);
        case MEMSET: return run_fill(n);
        case HOST: n->host(n->data); return OK;
        default: return OK;
    }
}
EXPORT cudaError_t cudaMemset(void *p, int v, size_t n) { return fill(p, 0, 0, v, n, 1, 1, NULL, CALLER); }
EXPORT cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t t) {
    return fill(p, 0, 0, v, n, 1, 1, t, CALLER);
}
EXPORT cudaError_t cudaMemset2D(void *p, size_t pitch, int v, size_t w, size_t h) {
    return fill(p, pitch, 0, v, w, h, 1, NULL, CALLER);
}
EXPORT cudaError_t cudaMemset2DAsync(void *p, size_t pitch, int v, size_t w, size_t h, cudaStream_t t) {
    return fill(p, pitch, 0, v, w, h, 1, t, CALLER);
}
EXPORT cudaError_t cudaMemset3D(struct cudaPitchedPtr p, int v, struct cudaExtent e) {
    return fill(p.ptr, p.pitch, p.pitch * p.ysize, v, e.width, e.height, e.depth, NULL, CALLER);
}
EXPORT cudaError_t cudaMemset3DAsync(struct cudaPitchedPtr p, int v, struct cudaExtent e, cudaStream_t t) {
    return fill(p.ptr, p.pitch, p.pitch * p.ysize, v, e.width, e.height, e.depth, t, CALLER);
}

static char *symbol(const void *host, size_t *size) {
    Reply reply = call((Request){SYMBOL, 0, {(uintptr_t)host}}, NULL, NULL);
    set(reply.error);
    if (size) *size = reply.values[1];
    return reply.error ? NULL : (char *)reply.values[0];
}
EXPORT cudaError_t cudaGetSymbolAddress(void **out, const void *host) {
    return (*out = symbol(host, NULL)) ? OK : cudaErrorInvalidSymbol;
}
EXPORT cudaError_t cudaGetSymbolSize(size_t *size, const void *host) {
    return symbol(host, size) ? OK : cudaErrorInvalidSymbol;
}
static cudaError_t copy_symbol(const void *host, void *data, size_t n, size_t offset, int out, enum cudaMemcpyKind kind,
                               void *stream, void *caller) {
    size_t size;
    char *at = symbol(host, &size);
    if (!at) return cudaErrorInvalidSymbol;
    if (offset + n > size) return set(cudaErrorInvalidValue);
    return out ? copy(data, 0, 0, at + offset, 0, 0, n, 1, 1, kind, stream, caller)
               : copy(at + offset, 0, 0, data, 0, 0, n, 1, 1, kind, stream, caller);
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *h, const void *s, size_t n, size_t o, enum cudaMemcpyKind k) {
    return copy_symbol(h, (void *)s, n, o, 0, k, NULL, CALLER);
}
EXPORT cudaError_t cudaMemcpyToSymbolAsync(const void *h, const void *s, size_t n, size_t o, enum cudaMemcpyKind k, cudaStream_t t) {
    return copy_symbol(h, (void *)s, n, o, 0, k, t, CALLER);
}
EXPORT cudaError_t cudaMemcpyFromSymbol(void *d, const void *h, size_t n, size_t o, enum cudaMemcpyKind k) {
    return copy_symbol(h, d, n, o, 1, k, NULL, CALLER);
}
EXPORT cudaError_t cudaMemcpyFromSymbolAsync(void *d, const void *h, size_t n, size_t o, enum cudaMemcpyKind k, cudaStream_t t) {
    return copy_symbol(h, d, n, o, 1, k, t, CALLER);
}

// ---- streams and events: all work is complete when its call returns -------------------------------------------------

#define NOTHING(name, ...) EXPORT cudaError_t name(__VA_ARGS__) { return sticky ? set(sticky) : OK; }
#pragma GCC diagnostic ignored "-Wunused-parameter"
NOTHING(cudaStreamQuery, cudaStream_t s)
NOTHING(cudaStreamDestroy, cudaStream_t s)
NOTHING(cudaStreamAttachMemAsync, cudaStream_t s, void *p, size_t n, unsigned flags)
NOTHING(cudaStreamSetAttribute, cudaStream_t s, cudaStreamAttrID id, const cudaStreamAttrValue *value)
NOTHING(cudaEventSynchronize, cudaEvent_t e)
NOTHING(cudaEventQuery, cudaEvent_t e)
NOTHING(cudaMemAdvise, const void *p, size_t n, enum cudaMemoryAdvise advice, struct cudaMemLocation l)
NOTHING(cudaMemPrefetchAsync, const void *p, size_t n, struct cudaMemLocation l, unsigned flags, cudaStream_t s)
NOTHING(cudaMemPoolSetAttribute, cudaMemPool_t p, enum cudaMemPoolAttr a, void *value)
NOTHING(cudaMemPoolTrimTo, cudaMemPool_t p, size_t n)
NOTHING(cudaFuncSetCacheConfig, const void *f, enum cudaFuncCache c)
NOTHING(cudaFuncSetSharedMemConfig, const void *f, enum cudaSharedMemConfig c)
NOTHING(cudaDeviceSetCacheConfig, enum cudaFuncCache c)
NOTHING(cudaDeviceSetSharedMemConfig, enum cudaSharedMemConfig c)
NOTHING(cudaDeviceSetLimit, enum cudaLimit l, size_t n)
NOTHING(cudaCtxResetPersistingL2Cache, void)
NOTHING(cudaProfilerStart, void)
NOTHING(cudaProfilerStop, void)
NOTHING(cudaSetDeviceFlags, unsigned flags)
NOTHING(cudaInitDevice, int device, unsigned a, unsigned b)
NOTHING(cudaDeviceReset, void)

static cudaError_t new_handle(void *out) { *(uint64_t *)out = next_handle += 16; return sticky ? set(sticky) : OK; }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) { return new_handle(s); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return new_handle(s); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return new_handle(s); }
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int device) { return new_handle(p); }
EXPORT cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *p, int device) { return new_handle(p); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return OK; }
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *f) { *f = 0; return OK; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return OK; }
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
    Node node = {.kind = HOST, .host = f, .data = data};
    return submit(&node, s);
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) {
    f(s, sticky, data);
    return OK;
}

typedef struct { double milliseconds; int recorded; Graph *graph; } Event;  // graph: of the capture that recorded it
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = calloc(1, sizeof(Event)); return OK; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = calloc(1, sizeof(Event)); return OK; }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return OK; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!e) return set(cudaErrorInvalidResourceHandle);
    *(Event *)e = (Event){now.tv_sec * 1e3 + now.tv_nsec * 1e-6, 1, is_captured(s) ? capture.graph : NULL};
    return sticky ? set(sticky) : OK;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    Event *first = (Event *)a, *second = (Event *)b;
    if (!a || !b || !first->recorded || !second->recorded) return set(cudaErrorInvalidResourceHandle);
    *ms = second->milliseconds - first->milliseconds;
    return sticky ? set(sticky) : OK;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    if (!e) return set(cudaErrorInvalidResourceHandle);
    if (capture.graph && ((Event *)e)->graph == capture.graph && !is_captured(s)) {  // the stream joins the capture
        if (capture.count == 64) return REFUSED("a capture of more than 64 streams");
        capture.streams[capture.count++] = s;
    }
    return sticky ? set(sticky) : OK;
}
static cudaError_t synchronize(int captured) {
    return sticky ? set(sticky) : captured ? set(cudaErrorStreamCaptureUnsupported) : OK;
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
    return synchronize(capture.graph && capture.mode != cudaStreamCaptureModeRelaxed);
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) { return synchronize(is_captured(s)); }

// ---- graphs ---------------------------------------------------------------------------------------------------------

static Graph *new_graph(void) {
    Graph *graph = calloc(1, sizeof *graph);
    graph->last = &graph->first;
    return graph;
}
static Graph *clone_graph(const Graph *graph) {
    Graph *made = new_graph();
    for (const Node *n = graph->first; n; n = n->next) append(made, n)->origin = n;
    return made;
}
static cudaError_t destroy(Graph *graph) {
    if (!graph) return set(cudaErrorInvalidValue);
    for (Node *n = graph->first, *next; n; n = next) next = n->next, free(n->packed), free(n);
    free(graph);
    return OK;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    if (!s) return set(cudaErrorStreamCaptureUnsupported);  // the legacy stream
    if (capture.graph) return is_captured(s) ? set(cudaErrorIllegalState) : REFUSED("two captures at the same time");
    capture.graph = new_graph(), capture.origin = capture.streams[0] = s, capture.count = 1, capture.mode = mode;
    return OK;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    if (!capture.graph || capture.origin != s) return set(cudaErrorStreamCaptureUnmatched);
    *(Graph **)graph = capture.graph;
    capture.graph = NULL, capture.count = 0;
    return OK;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = is_captured(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return OK;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = capture.mode;
    capture.mode = *mode, *mode = before;
    return OK;
}
EXPORT cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags) { *(Graph **)graph = new_graph(); return OK; }
EXPORT cudaError_t cudaGraphClone(cudaGraph_t *made, cudaGraph_t graph) { *(Graph **)made = clone_graph((Graph *)graph); return OK; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return destroy((Graph *)graph); }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return destroy((Graph *)exec); }
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    if (!graph) return set(cudaErrorInvalidValue);
    *(Graph **)exec = clone_graph((Graph *)graph);
    return OK;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(exec, graph, flags);
}
EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t s) { return sticky ? set(sticky) : OK; }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
    if (!exec) return set(cudaErrorInvalidValue);
    for (const Node *n = ((Graph *)exec)->first; n; n = n->next) {
        cudaError_t error = submit(n, s);
        if (error) return error;
    }
    return sticky ? set(sticky) : OK;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    size_t total = 0;
    for (Node *n = ((Graph *)graph)->first; n; n = n->next, total++)
        if (nodes && total < *count) nodes[total] = (cudaGraphNode_t)n;
    *count = nodes && *count < total ? *count : total;
    return OK;
}
static cudaError_t add(cudaGraphNode_t *out, cudaGraph_t graph, const Node *node) {
    if (!graph) return set(cudaErrorInvalidValue);
    *(Node **)out = append((Graph *)graph, node);
    return OK;
}
static cudaError_t make_kernel(Node *node, const struct cudaKernelNodeParams *p, void *caller) {
    *node = (Node){.kind = KERNEL, .caller = caller, .function = p->func, .grid = p->gridDim, .block = p->blockDim,
                   .cluster = one, .shared = p->sharedMemBytes};
    return p->kernelParams ? pack(node, p->kernelParams) : (cudaError_t)gf_refuse("a kernel node with extra parameters", caller);
}
EXPORT cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *out, cudaGraph_t graph, const cudaGraphNode_t *from, size_t n,
                                          const struct cudaKernelNodeParams *p) {
    Node node;
    cudaError_t error = make_kernel(&node, p, CALLER);
    if (!error) error = add(out, graph, &node);
    free(node.packed);
    return error;
}
EXPORT cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                                    const struct cudaKernelNodeParams *p) {
    for (Node *n = ((Graph *)exec)->first; n; n = n->next)
        if (n->origin == (Node *)node && n->kind == KERNEL) {
            Node made;
            cudaError_t error = make_kernel(&made, p, CALLER);
            if (error) return error;
            free(n->packed);
            made.origin = n->origin, made.next = n->next, *n = made;
            return OK;
        }
    return set(cudaErrorInvalidValue);
}
EXPORT cudaError_t cudaGraphAddMemcpyNode1D(cudaGraphNode_t *out, cudaGraph_t graph, const cudaGraphNode_t *from, size_t n,
                                            void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind) {
    Node node = copy_node(dst, 0, 0, src, 0, 0, bytes, 1, 1, kind, CALLER);
    return add(out, graph, &node);
}
EXPORT cudaError_t cudaGraphAddMemsetNode(cudaGraphNode_t *out, cudaGraph_t graph, const cudaGraphNode_t *from, size_t n,
                                          const struct cudaMemsetParams *p) {
    if (p->elementSize != 1 && p->value != 0) return REFUSED("a memset node of elements of several bytes");
    Node node = {.kind = MEMSET, .caller = CALLER, .dst = p->dst, .dst_pitch = p->pitch, .value = p->value,
                 .width = p->width * p->elementSize, .height = p->height, .planes = 1};
    return add(out, graph, &node);
}
EXPORT cudaError_t cudaGraphAddHostNode(cudaGraphNode_t *out, cudaGraph_t graph, const cudaGraphNode_t *from, size_t n,
                                        const struct cudaHostNodeParams *p) {
    Node node = {.kind = HOST, .host = p->fn, .data = p->userData};
    return add(out, graph, &node);
}
EXPORT cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *out, cudaGraph_t graph, const cudaGraphNode_t *from, size_t n) {
    Node node = {.kind = EMPTY};
    return add(out, graph, &node);
}

// ---- the device and errors ------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaGetLastError(void) { cudaError_t e = sticky ? sticky : last_error; last_error = OK; return e; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return sticky ? sticky : last_error; }
static const Named *find_error(int number) {
    for (const Named *e = error_names; e->name; e++) if (e->number == number) return e;
    return NULL;
}
EXPORT const char *cudaGetErrorName(cudaError_t e) { const Named *n = find_error(e); return n ? n->name : "unrecognized error code"; }
EXPORT const char *cudaGetErrorString(cudaError_t e) { const Named *n = find_error(e); return n ? n->text : "unrecognized error code"; }
EXPORT cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return OK; }
EXPORT cudaError_t cudaGetDevice(int *n) { *n = 0; return OK; }
EXPORT cudaError_t cudaSetDevice(int n) { return n ? set(cudaErrorInvalidDevice) : OK; }
EXPORT cudaError_t cudaSetValidDevices(int *devices, int n) { return OK; }
EXPORT cudaError_t cudaGetDeviceFlags(unsigned *f) { *f = cudaDeviceScheduleAuto | cudaDeviceMapHost; return OK; }
EXPORT cudaError_t cudaChooseDevice(int *n, const struct cudaDeviceProp *p) { *n = 0; return OK; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return OK; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned f) { return set(cudaErrorInvalidDevice); }
EXPORT cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
EXPORT cudaError_t cudaDeviceGetLimit(size_t *n, enum cudaLimit l) {
    *n = l == cudaLimitStackSize ? 1024 : l == cudaLimitPrintfFifoSize ? 7 << 20 : l == cudaLimitMallocHeapSize ? 8 << 20 : 0;
    return OK;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int n, int device) { snprintf(text, n, "0000:01:00.0"); return OK; }
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device) return set(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    set_properties(p);
    return OK;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    if (device) return set(cudaErrorInvalidDevice);
    struct cudaDeviceProp p;
    memset(&p, 0, sizeof p);
    set_properties(&p);
    switch (attribute) {
#define CASE(name, from) case name: *value = from; return OK
        CASE(cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock); CASE(cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]);
        CASE(cudaDevAttrMaxBlockDimY, p.maxThreadsDim[1]); CASE(cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2]);
        CASE(cudaDevAttrMaxGridDimX, p.maxGridSize[0]); CASE(cudaDevAttrMaxGridDimY, p.maxGridSize[1]);
        CASE(cudaDevAttrMaxGridDimZ, p.maxGridSize[2]); CASE(cudaDevAttrMaxSharedMemoryPerBlock, p.sharedMemPerBlock);
        CASE(cudaDevAttrTotalConstantMemory, p.totalConstMem); CASE(cudaDevAttrWarpSize, p.warpSize);
        CASE(cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock); CASE(cudaDevAttrClockRate, 1980000);
        CASE(cudaDevAttrMultiProcessorCount, p.multiProcessorCount); CASE(cudaDevAttrIntegrated, 0);
        CASE(cudaDevAttrCanMapHostMemory, 1); CASE(cudaDevAttrConcurrentKernels, 1); CASE(cudaDevAttrEccEnabled, 1);
        CASE(cudaDevAttrMemoryClockRate, 2619000); CASE(cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth);
        CASE(cudaDevAttrL2CacheSize, p.l2CacheSize); CASE(cudaDevAttrUnifiedAddressing, 1); CASE(cudaDevAttrAsyncEngineCount, 3);
        CASE(cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor); CASE(cudaDevAttrComputeMode, 0);
        CASE(cudaDevAttrComputeCapabilityMajor, p.major); CASE(cudaDevAttrComputeCapabilityMinor, p.minor);
        CASE(cudaDevAttrStreamPrioritiesSupported, 1); CASE(cudaDevAttrManagedMemory, 1); CASE(cudaDevAttrCooperativeLaunch, 1);
        CASE(cudaDevAttrMaxSharedMemoryPerMultiprocessor, p.sharedMemPerMultiprocessor); CASE(cudaDevAttrKernelExecTimeout, 0);
        CASE(cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor); CASE(cudaDevAttrHostRegisterSupported, 0);
        CASE(cudaDevAttrConcurrentManagedAccess, 1); CASE(cudaDevAttrMaxSharedMemoryPerBlockOptin, p.sharedMemPerBlockOptin);
        CASE(cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor); CASE(cudaDevAttrMemoryPoolsSupported, 1);
        CASE(cudaDevAttrReservedSharedMemoryPerBlock, 1024); CASE(cudaDevAttrClusterLaunch, 1); CASE(cudaDevAttrPciBusId, 1);
        CASE(cudaDevAttrTextureAlignment, 512); CASE(cudaDevAttrTexturePitchAlignment, 32); CASE(cudaDevAttrGpuOverlap, 1);
        CASE(cudaDevAttrComputePreemptionSupported, 1); CASE(cudaDevAttrPciDeviceId, 0); CASE(cudaDevAttrPciDomainId, 0);
        CASE(cudaDevAttrPageableMemoryAccess, 0); CASE(cudaDevAttrHostNativeAtomicSupported, 0); CASE(cudaDevAttrIpcEventSupport, 0);
        CASE(cudaDevAttrPageableMemoryAccessUsesHostPageTables, 0); CASE(cudaDevAttrDirectManagedMemAccessFromHost, 0);
        CASE(cudaDevAttrMaxAccessPolicyWindowSize, 0); CASE(cudaDevAttrMaxPersistingL2CacheSize, 0); CASE(cudaDevAttrMaxPitch, 1 << 30);
        CASE(cudaDevAttrGlobalL1CacheSupported, 1); CASE(cudaDevAttrLocalL1CacheSupported, 1); CASE(cudaDevAttrIsMultiGpuBoard, 0);
        CASE(cudaDevAttrCanUseHostPointerForRegisteredMem, 0); CASE(cudaDevAttrSparseCudaArraySupported, 0);
        CASE(cudaDevAttrSingleToDoublePrecisionPerfRatio, 2); CASE(cudaDevAttrHostRegisterReadOnlySupported, 0);
        default: return (cudaError_t)gf_refuse("cudaDeviceGetAttribute of this attribute", CALLER);
    }
}
EXPORT cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *n, const void *f, int blocks, int threads) {
    Reply reply = call((Request){ATTRIBUTES, 0, {(uintptr_t)f}}, NULL, NULL);
    *n = blocks > 0 ? 233472 / blocks - 1024 - reply.values[0] : 0;
    return set(reply.error);
}
EXPORT struct cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w, enum cudaChannelFormatKind f) {
    return (struct cudaChannelFormatDesc){x, y, z, w, f};
}

// ---- the one driver function that programs fetch through the runtime ------------------------------------------------

static int encode_tiled(void *map, int type, unsigned rank, void *address, const uint64_t *extents, const uint64_t *strides,
                        const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    struct { uint64_t extents[5], strides[5]; uint32_t box[5], steps[5]; } payload;
    memset(&payload, 0, sizeof payload);
    if (rank < 1 || rank > 5) return cudaErrorInvalidValue;
    memcpy(payload.extents, extents, rank * 8), memcpy(payload.strides, strides, (rank - 1) * 8);
    memcpy(payload.box, box, rank * 4), memcpy(payload.steps, steps, rank * 4);
    char *made = NULL;
    Request request = {TENSORMAP, sizeof payload, {type, rank, (uintptr_t)address, interleave, swizzle, fill}};
    Reply reply = call(request, &payload, &made);
    if (!reply.error) memcpy(map, made, 128);
    free(made);
    return reply.error;
}
static cudaError_t entry_point(const char *name, void **out, enum cudaDriverEntryPointQueryResult *result, void *caller) {
    int known = !strcmp(name, "cuTensorMapEncodeTiled");
    *out = known ? (void *)encode_tiled : NULL;
    if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return known ? OK : (cudaError_t)gf_refuse(name, caller);
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, out, result, CALLER);
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, out, result, CALLER);
}
EXPORT int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *extents,
                                  const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                                  int swizzle, int promotion, int fill) {
    return encode_tiled(map, type, rank, address, extents, strides, box, steps, interleave, swizzle, promotion, fill);
}
EXPORT int cuInit(unsigned flags) { return OK; }
EXPORT int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? 101 : OK; }
EXPORT int cuDeviceGetCount(int *n) { *n = 1; return OK; }
EXPORT int cuDriverGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);  // both number attributes alike
}
