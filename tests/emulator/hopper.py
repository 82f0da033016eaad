"""CUDA C++ wrappers of the Hopper instructions that the tests use, one per instruction."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenfast.emulator.result import GridResult
from greenfast.spec.arch import Target
from greenfast.spec.kernel import TensorMap
from tests.emulator import kernels
from tests.emulator.kernels import Request

HOPPER = Target("sm_90a")

PREAMBLE = r"""#line 1 "hopper.cuh"
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned char u8;
struct alignas(64) CUtensorMap { u64 opaque[16]; };
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u64* bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u64* bar) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(at(bar)) : "memory");
}
__device__ __forceinline__ void wait(u64* bar, u32 parity) {
  asm volatile("{\n.reg .pred P1;\nLAB_WAIT:\n"
    "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n@P1 bra DONE;\nbra LAB_WAIT;\nDONE:\n}"
    :: "r"(at(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load(void* to, const CUtensorMap* map, u64* bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
    :: "r"(at(to)), "l"(map), "r"(at(bar)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store(const CUtensorMap* map, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
    :: "l"(map), "r"(at(from)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
    :: "r"(at(to)), "l"(from), "r"(bytes), "r"(at(bar)) : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
    :: "l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
__device__ __forceinline__ u64 descriptor(const void* p, u32 leading, u32 stride, u64 swizzle) {
  return (u64)((at(p) & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32
    | (swizzle == 128 ? 1ull : swizzle == 64 ? 2ull : swizzle == 32 ? 3ull : 0ull) << 62;
}
"""


def wgmma(name: str, n: int, shape: str, types: str, *, from_registers: bool = False, tail: str = ", 1, 1") -> str:
    """Return a C++ function ``name(d, a, b, scale_d)`` around one wgmma; ``tail``: the immediates after scale-d."""
    kind, letter = {"s32": ("int", "r"), "f16": ("u32", "r"), "f32": ("float", "f")}[types.split(".")[0]]
    count = n // (4 if types.startswith("f16") else 2)  # of registers; two numbers of 16 bits share one
    registers = ", ".join(f"%{i}" for i in range(count))
    a_count = 4 if from_registers else 1
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if from_registers else f"%{count}"
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if from_registers else '"l"(a)'
    parameter = "const u32 (&a)[4]" if from_registers else "u64 a"
    return (
        f"__device__ __forceinline__ void {name}({kind} (&d)[{count}], {parameter}, u64 b, int scale_d) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + a_count + 1}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{n}{shape}.{types} {{{registers}}}, {a}, %{count + a_count}, '
        f'p{tail};\\n}}\\n"\n'
        f'    : {outputs} : {a_inputs}, "l"(b), "r"(scale_d));\n}}\n'
    )


def request(*args: Any, before: str = "", threads: int = 128, **more: Any) -> Request:
    """Return a kernel for Hopper that may use the wrappers."""
    return kernels.request(*args, before=PREAMBLE + before, threads=threads, target=HOPPER, **more)


def run(*args: Any, before: str = "", threads: int = 128, **more: Any) -> GridResult:
    """Compile a kernel that may use the wrappers for Hopper, and run it on the emulator."""
    return kernels.run(*args, before=PREAMBLE + before, threads=threads, target=HOPPER, **more)


def tensor_map(name: str, array: Any, box: tuple[int, ...], swizzle: int = 0) -> TensorMap:
    """Return the tensor map over a whole array."""
    a = np.asarray(array)
    return TensorMap(name, a.dtype.str, a.shape, a.strides, box, swizzle)


D_STORE = """
#pragma unroll
for (int r = 0; r < N / 2; ++r) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r / 2 % 2 * 8;
  int column = r / 4 * 8 + threadIdx.x % 4 * 2 + r % 2;
  y[row * N + column] = d[r];
}
"""
