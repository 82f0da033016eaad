"""Memory ordering: scopes, fences, synchronization of a part of a warp, warp instructions."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.arch import Target
from tests.emulator.kernels import SEEDS, run

#: Included only for wmma: this header takes most of the time of a small compilation.
WMMA = "#include <mma.h>\nusing namespace nvcuda;\n"
ADDRESS = """__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
"""


def result(body: str, *, threads: int = 32, blocks: int = 1, seed: int = 0, before: str = ADDRESS) -> np.ndarray:
    """Return the 256 floats that a kernel computes; ``z`` are 256 integers, initially zero."""
    return run(
        body,
        {"x": np.arange(256, dtype=np.float32), "y": np.zeros(256, np.float32), "z": np.zeros(256, np.int32)},
        {"y": (256, "float32"), "z": (256, "int32")},
        threads=threads,
        blocks=blocks,
        seed=seed,
        before=(WMMA if "wmma::" in body else "") + before,
        target=Target("sm_90a"),
    ).outputs["y"]


# ---- scopes ---------------------------------------------------------------------------------------------------------

SCOPED = {
    "add": "atomicAdd_block(z, 1);",
    "max": "atomicMax_block(z, (int)blockIdx.x + 1);",
    "reduction": 'asm volatile("red.relaxed.cta.global.add.s32 [%0], 1;" :: "l"(z) : "memory");',
    "compare-and-swap": "atomicCAS_block(z, 0, (int)blockIdx.x + 1);",
    "a store": 'asm volatile("st.relaxed.cta.global.s32 [%0], %1;" :: "l"(z), "r"((int)blockIdx.x) : "memory");',
    "one scope is wide": "if (blockIdx.x) atomicAdd(z, 1); else atomicAdd_block(z, 1);",
    "the other scope is wide": "if (blockIdx.x) atomicAdd_block(z, 1); else atomicAdd(z, 1);",
    "read": 'int v = 0; if (blockIdx.x) asm volatile("st.release.cta.global.s32 [%0], 1;" :: "l"(z) : "memory");'
    'else asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(z) : "memory"); y[blockIdx.x] = v;',
    "cluster": 'asm volatile("red.relaxed.cluster.global.add.s32 [%0], 1;" :: "l"(z) : "memory");',
}


@pytest.mark.parametrize("access", SCOPED.values(), ids=SCOPED)
def test_an_access_whose_scope_is_too_narrow_is_a_race(access: str) -> None:
    with pytest.raises(KernelFaultError, match=r"data race on byte 0 of 'z'.*(block|cluster)-scope"):
        result(f"if (threadIdx.x == 0) {{ {access} }}", blocks=2)


@SEEDS
@pytest.mark.parametrize(
    ("body", "blocks"),
    [
        ("atomicAdd_block(z + blockIdx.x, 1);", 4),
        ("atomicAdd_block(z, 1);", 1),
        ("atomicAdd(z, 1);", 4),
        ("atomicAdd_system(z, 1);", 4),
        # One block after the other, each with the scope of a block for itself.
        (
            "if (threadIdx.x == 0) { while (atomicAdd(z + 1, 0) != blockIdx.x); __threadfence(); atomicAdd_block(z, 1);"
            "__threadfence(); atomicAdd(z + 1, 1); }",
            3,
        ),
    ],
)
def test_a_scope_that_holds_all_threads_is_none(body: str, blocks: int, seed: int) -> None:
    result(body, blocks=blocks, seed=seed)


MESSAGE = """if (threadIdx.x == 0) {
  if (blockIdx.x == 1) { y[1] = x[9]; WRITE }
  if (blockIdx.x == 0) { int v; do { READ } while (v == 0); y[0] = y[1]; }
}"""
WRITE = 'asm volatile("st.release.SCOPE.global.s32 [%0], 1;" :: "l"(z) : "memory");'
FENCED = 'asm volatile("fence.acq_rel.SCOPE; st.relaxed.gpu.global.s32 [%0], 1;" :: "l"(z) : "memory");'
READ = 'asm volatile("ld.acquire.SCOPE.global.s32 %0, [%1];" : "=r"(v) : "l"(z) : "memory");'


@SEEDS
@pytest.mark.parametrize("write", [WRITE, FENCED], ids=["release", "fence"])
@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys"])
def test_a_release_or_fence_reaches_as_far_as_its_scope(scope: str, write: str, seed: int) -> None:
    body = MESSAGE.replace("WRITE", write.replace("SCOPE", scope)).replace("READ", READ.replace("SCOPE", "gpu"))
    if scope in ("gpu", "sys"):
        assert result(body, blocks=2, seed=seed)[0] == 9
    else:
        with pytest.raises(KernelFaultError, match="data race"):
            result(body, blocks=2, seed=seed)


# ---- a part of a warp -----------------------------------------------------------------------------------------------

ACROSS = """__shared__ float s[64]; int t = threadIdx.x;
s[t] = x[t];
SYNC
y[t] = s[t ^ 16];"""


@SEEDS
@pytest.mark.parametrize(
    "sync",
    [
        "if (t < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000u);",
        "__syncwarp(t % 32 < 16 ? 0xffffu : 0xffff0000u);",
        "__syncwarp(1u << t % 32);",
        "if (t % 32 < 16) __syncwarp(0xffff);",
        "__shfl_xor_sync(0xffffffffu, t, 1);",
        "if (__any_sync(0xffffffffu, x[t] < 0)) y[1] = 0;",
        "if (__match_any_sync(0xffffffffu, t) == 0) y[1] = 0;",
        "if (__reduce_add_sync(0xffffffffu, t) == 0) y[1] = 0;",
        "atomicAdd(z, 1);",
        "atomicAdd(z + t, 1);",
        "*(volatile int*)z = t; if (*(volatile int*)z < 0) y[1] = 0;",
    ],
)
def test_what_synchronizes_other_threads_or_none_orders_nothing(sync: str, seed: int) -> None:
    with pytest.raises(KernelFaultError, match=r"data race .* at k\.cu:[24].* found at k\.cu:[24]"):
        result(ACROSS.replace("SYNC", sync), seed=seed)


@SEEDS
@pytest.mark.parametrize(
    "sync",
    [
        "__syncwarp();",
        "__syncthreads();",
        "__syncwarp(0x00010001u << t % 16);",
        "__syncwarp(t & 1 ? 0xaaaaaaaau : 0x55555555u);",
        "__syncwarp(t % 32 / 8 % 2 ? 0xff00ff00u : 0x00ff00ffu);",
        "if (t < 16) __syncwarp(); else __syncwarp();",
        # Through other threads: the lower half, then one of each half, then the upper half.
        "if (t < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000u);"
        "if (t % 16 == 3) __syncwarp(0x80008u); if (t < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000u);",
    ],
)
def test_what_synchronizes_these_threads_orders_them(sync: str, seed: int) -> None:
    assert result(ACROSS.replace("SYNC", sync), seed=seed)[:32].tolist() == [t ^ 16 for t in range(32)]


# ---- instructions of a warp that access memory ----------------------------------------------------------------------

FRAGMENT = "wmma::fragment<wmma::accumulator, 16, 16, 16, float> c; wmma::fill_fragment(c, 1.0f);"
READS = """
SYNC
float sum = 0; for (int i = threadIdx.x; i < 256; i += 32) sum += tile[255 - i];
y[threadIdx.x] = sum;"""
WRITES = """
SYNC
for (int i = threadIdx.x; i < 256; i += 32) tile[255 - i] = 7;
__syncwarp(); y[threadIdx.x] = tile[threadIdx.x] + word;"""
TILE = "__shared__ __align__(128) float tile[256]; unsigned word = 0; for (int i = threadIdx.x; i < 256; i += 32) "
TILE += "tile[i] = i; __syncwarp();\n"
STORE = 'asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(at(tile + threadIdx.x % 8 * 4)), '
STORE += '"r"(threadIdx.x) : "memory");'
LOAD = 'asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(word) : "r"(at(tile + '
LOAD += 'threadIdx.x % 8 * 4)) : "memory"); word &= 1;'
TOGETHER = {
    "wmma.store, loads": f"{FRAGMENT} wmma::store_matrix_sync(tile, c, 16, wmma::mem_row_major);{READS}",
    "wmma.store by columns": f"{FRAGMENT} wmma::store_matrix_sync(tile, c, 16, wmma::mem_col_major);{READS}",
    "wmma.store, one thread loads": f"{FRAGMENT} wmma::store_matrix_sync(tile, c, 16, wmma::mem_row_major);"
    "\nSYNC\nif (threadIdx.x == 0) y[0] = tile[0] + tile[1] + tile[5];",
    "wmma.store, stores": f"{FRAGMENT} wmma::store_matrix_sync(tile, c, 16, wmma::mem_row_major);{WRITES}",
    "wmma.load, stores": f"{FRAGMENT} wmma::load_matrix_sync(c, tile, 16, wmma::mem_row_major); word = c.x[0] < 0;"
    f"{WRITES}",
    "stmatrix, loads": f"{STORE}{READS}",
    "stmatrix, each its own row": f"{STORE}\nSYNC\nif (threadIdx.x < 8) y[threadIdx.x] = tile[threadIdx.x * 4];",
    "stmatrix, stores": f"{STORE}{WRITES}",
    "ldmatrix, stores": f"{LOAD}{WRITES}",
}


@SEEDS
@pytest.mark.parametrize("body", TOGETHER.values(), ids=TOGETHER)
def test_a_matrix_instruction_is_ordered_by_a_syncwarp_after_it(body: str, seed: int) -> None:
    with pytest.raises(KernelFaultError, match=r"data race on byte .* of shared memory"):
        result(TILE + body.replace("SYNC", ""), seed=seed)
    result(TILE + body.replace("SYNC", "__syncwarp();"), seed=seed)


# ---- old values -----------------------------------------------------------------------------------------------------

IN_BLOCK = """__shared__ volatile int flag, data[2]; int t = threadIdx.x;
if (t < 2) data[t] = 0;
if (t == 0) flag = 0;
__syncthreads();
if (t == 32) { WRITE }
if (t == 64) { while (flag == 0); READ y[0] = data[0]; }"""
IN_WARP = IN_BLOCK.replace("t == 64", "t == 33")
OF_BLOCKS = """volatile int* flag = z; volatile int* data = z + 64; int t = threadIdx.x;
if (t == 0 && blockIdx.x == 1) { WRITE }
if (t == 0 && blockIdx.x == 0) { while (flag[0] == 0); READ y[0] = data[0]; }"""
BUFFERS = """volatile int* a = z; volatile int* b = z + 64;
if (threadIdx.x == 0) { *a = 1; y[0] = *b; }
if (threadIdx.x == 32) { *b = 1; y[1] = *a; }"""


def in_all_orders(body: str, threads: int = 96) -> set[float]:
    """Return the first elements that some orders leave."""
    return {float(result(body, threads=threads, blocks=2, seed=seed)[0]) for seed in range(3)}


@pytest.mark.parametrize("body", [IN_BLOCK, IN_WARP, OF_BLOCKS], ids=["warps", "threads of a warp", "blocks"])
@pytest.mark.parametrize(
    ("write", "right"),
    [
        ("data[0] = 5; FENCE flag = 1;", True),
        ("data[0] = 5; flag = 1;", False),
        ("FENCE data[0] = 5; flag = 1;", False),
        ("flag = 1; FENCE data[0] = 5;", False),
        ("atomicAdd((int*)data, 5); FENCE flag = 1;", True),
        ("atomicAdd((int*)data, 5); flag = 1;", False),
        ("data[0] = 5; FENCE atomicExch((int*)&flag, 1);", True),
        ("data[0] = 5; atomicExch((int*)&flag, 1);", False),
        ("data[0] = 3; FENCE data[0] = 5; flag = 1;", False),
    ],
)
def test_a_volatile_value_is_seen_after_its_flag_only_with_a_fence(body: str, write: str, right: bool) -> None:
    fence = "__threadfence();" if body is OF_BLOCKS else "__threadfence_block();"
    if body is OF_BLOCKS:
        write = write.replace("&flag", "flag").replace("flag = ", "flag[0] = ")
    values = in_all_orders(body.replace("WRITE", write.replace("FENCE", fence)).replace("READ", fence))
    assert values == {5} if right else values > {5}


def test_a_fence_of_a_block_is_too_narrow_for_a_volatile_value_of_another() -> None:
    write = "data[0] = 5; __threadfence_block(); flag[0] = 1;"
    assert in_all_orders(OF_BLOCKS.replace("WRITE", write).replace("READ", "__threadfence();")) > {5}


def test_a_volatile_value_before_a_barrier_is_seen_after_it() -> None:
    body = "__shared__ volatile int v[64]; int t = threadIdx.x; v[t] = 0; __syncthreads(); v[t] = t + 1;"
    assert in_all_orders(f"{body} __syncthreads(); y[t] = v[t ^ 33];", 64) == {34}
    assert in_all_orders(f"{body} __syncwarp(); y[t] = v[t ^ 1];", 64) == {2}
    assert in_all_orders(f"{body} y[t] = v[t ^ 1];", 64) > {2}


def test_a_volatile_value_of_the_same_warp_is_seen_after_a_syncwarp() -> None:
    """The oldest way to add up a warp: each thread has read its own value before another one reads it."""
    add = "v[t] += v[t + 16]; SYNC v[t] += v[t + 8]; SYNC y[t] = v[t];"
    body = "__shared__ volatile int v[64]; int t = threadIdx.x; v[t] = 1; v[t + 32] = 0; __syncwarp(); "
    without = {result(body + add.replace("SYNC", ""), seed=seed)[0] for seed in range(3)}
    assert without > {4}
    steps = "for (int d = 16; d > 4; d /= 2) { int a = v[t + d]; __syncwarp(); v[t] += a; __syncwarp(); } y[t] = v[t];"
    assert {result(body + steps, seed=seed)[0] for seed in range(3)} == {4}


def test_no_thread_of_two_may_see_what_the_other_wrote() -> None:
    """Store buffering: each writes one place and reads the other's."""
    without = {tuple(result(BUFFERS, threads=64, seed=seed)[:2]) for seed in range(3)}
    assert (0, 0) in without


# ---- mbarriers ------------------------------------------------------------------------------------------------------

PASSED_ON = """__shared__ float v; __shared__ unsigned long long bar; unsigned done = 0;
if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&bar)) : "memory");
__syncthreads();
if (threadIdx.x == 0) {
  v = x[5];
  BEFORE
  asm volatile("mbarrier.arrive.ARRIVE.cta.shared::cta.b64 _, [%0];" :: "r"(at(&bar)) : "memory");
}
if (threadIdx.x == 32) {
  while (!done) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.WAIT.cta.shared::cta.b64 p, [%1], 0;"
    "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at(&bar)) : "memory");
  AFTER
  y[0] = v;
}"""


@SEEDS
@pytest.mark.parametrize(
    ("arrive", "wait", "before", "after", "right"),
    [
        ("release", "acquire", False, False, True),
        ("relaxed", "acquire", False, False, False),
        ("release", "relaxed", False, False, False),
        ("relaxed", "acquire", True, False, True),
        ("release", "relaxed", False, True, True),
        ("relaxed", "relaxed", True, True, True),
        ("relaxed", "relaxed", True, False, False),
        ("relaxed", "relaxed", False, True, False),
    ],
)
def test_relaxed_arrivals_and_waits_order_with_fences(
    arrive: str, wait: str, before: bool, after: bool, right: bool, seed: int
) -> None:
    fences = ("__threadfence_block();" if fenced else "" for fenced in (before, after))
    body = PASSED_ON.replace("ARRIVE", arrive).replace("WAIT", wait)
    body = body.replace("BEFORE", next(fences)).replace("AFTER", next(fences))
    if right:
        assert result(body, threads=64, seed=seed)[0] == 5
    else:
        with pytest.raises(KernelFaultError, match="data race on byte"):
            result(body, threads=64, seed=seed)


#: Ways in which threads write to their places; then a thread reads one of them without synchronization.
SHARED_PLACES = {
    "quads": "s[t / 4] = q; KEEP y[t] = s[t / 4];",
    "quads of some lanes": "if (t % 2) { s[t / 4] = q; KEEP y[t] = s[t / 4]; } else y[t] = q;",
    "all": "s[0] = 5; KEEP y[t] = s[0];",
    "16 bytes": "*(float4*)(s + t / 4 * 4) = {q, q, q, q}; KEEP y[t] = s[t / 4 * 4 + 2];",
    "bytes": "char* c = (char*)s; c[t / 4] = t / 4; y[t] = c[t / 4];",
    "rows of 16 bytes": "s[t % 8] = t % 8; KEEP y[t] = s[t % 8];",
    "twice": "s[t / 4] = 3; __syncwarp(); s[t / 4] = q; KEEP y[t] = s[t / 4];",
}


@SEEDS
@pytest.mark.parametrize("memory", ["shared", "global"])
@pytest.mark.parametrize("body", SHARED_PLACES.values(), ids=SHARED_PLACES)
def test_what_threads_of_a_warp_write_alike_is_each_ones_own(body: str, memory: str, seed: int) -> None:
    result(_places(body, memory), seed=seed)


@pytest.mark.parametrize("memory", ["shared", "global"])
@pytest.mark.parametrize(
    "body",
    [
        "s[t / 4] = t; KEEP y[t] = s[t / 4];",
        "s[t / 4] = q; KEEP y[t] = s[(t / 4 + 1) % 8];",
        "if (t % 2) s[t / 4] = q; KEEP y[t] = s[t / 4];",
        "s[t / 4] = q; KEEP if (t % 4 == 1) s[t / 4] = q + 1; KEEP y[t] = s[t / 4];",
        "s[t / 4] = q; KEEP if (t % 4 == 1) s[t / 4] = q + 1; __syncwarp(); y[t] = s[t / 4];",
    ],
    ids=["other values", "others' places", "only some write", "a later value", "a later write"],
)
def test_what_they_write_otherwise_is_not(body: str, memory: str) -> None:
    with pytest.raises(KernelFaultError, match=r"a data race|write of different values to one place"):
        result(_places(body, memory))


def _places(body: str, memory: str) -> str:
    """Return a body with the places ``s`` in shared or global memory; the compiler keeps its loads and stores."""
    location = "__shared__ __align__(16) float s0[64];" if memory == "shared" else "float* s0 = y + 64;"
    body = body.replace("KEEP", 'asm volatile("" ::: "memory");')
    return f"{location} float* s = s0; const int t = threadIdx.x; const float q = t / 4; {body}"
