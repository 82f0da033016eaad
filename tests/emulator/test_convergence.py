"""Collective execution: barriers with ended threads, groups of a warp, accesses to several memories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import run_grid
from greenfast.emulator.instructions.convert import E4M3_VALUES
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import OutputSpec
from tests.emulator.hopper import D_STORE, tensor_map, wgmma
from tests.emulator.hopper import run as run_hopper
from tests.emulator.kernels import SEEDS, run

X = np.arange(64, dtype=np.float32)


def output(body: str, *, threads: int = 64, seed: int = 0, before: str = "") -> np.ndarray:
    """Return the 64 floats that a kernel computes from 64 floats."""
    signature: dict[str, Any] = {"parameters": "const float* x, float* y, int n", "args": ("x", "y", np.int32(40))}
    return run(body, {"x": X}, {"y": (64, "float32")}, threads=threads, seed=seed, before=before, **signature).outputs[
        "y"
    ]


def test_a_barrier_is_released_by_threads_that_end_while_others_wait() -> None:
    body = """__shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 32) { __syncthreads(); y[threadIdx.x] = s[threadIdx.x] + 1; }
    else if (threadIdx.x < 48) y[threadIdx.x] = 7;
    else { __syncthreads(); y[threadIdx.x] = s[threadIdx.x] + 2; }"""
    for seed in range(4):
        result = output(body, seed=seed)
        assert (result[:32] == X[:32] + 1).all()
        assert (result[32:48] == 7).all()
        assert (result[48:] == X[48:] + 2).all()


def test_a_warp_without_all_of_its_threads_counts_whole_at_a_named_barrier() -> None:
    body = """__shared__ float s[64];
    if (threadIdx.x >= n) return;
    s[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 32) asm volatile("bar.arrive 3, 64;" ::: "memory");
    else { asm volatile("bar.sync 3, 64;" ::: "memory"); y[threadIdx.x - 32] = s[threadIdx.x - 32]; }"""
    for threads in (64, 48):
        assert (output(body, threads=threads)[:8] == X[:8]).all()
    with pytest.raises(KernelFaultError, match=r"deadlock.*8 threads of warp 1 wait at .*bar\.sync 3, 96"):
        output(body.replace(", 64", ", 96"))


def test_threads_that_arrive_and_end_count_once() -> None:
    body = """__shared__ float s[96];
    s[threadIdx.x] = 1;
    if (threadIdx.x < 32) { asm volatile("bar.arrive 3, 96;" ::: "memory"); return; }
    if (threadIdx.x < 64) { float v = x[0]; for (int i = 0; i < 50; ++i) v = v * 2 + 1;
      s[threadIdx.x] = v; asm volatile("bar.arrive 3, 96;" ::: "memory"); return; }
    asm volatile("bar.sync 3, 96;" ::: "memory");
    y[threadIdx.x - 32] = s[threadIdx.x - 32]; y[threadIdx.x - 64] = 0;"""
    for seed in range(4):
        assert (output(body, threads=96, seed=seed)[32:] == np.float32(2**50)).all()


def test_halves_of_a_warp_synchronize_by_themselves() -> None:
    body = """__shared__ float s[64];
    int t = threadIdx.x;
    unsigned half = t % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
    s[t] = x[t];
    __syncwarp();
    if (t % 32 < 16) {
      for (int i = 0; i < 3; ++i) { float v = s[t ^ 1]; __syncwarp(half); s[t] = v + 1; __syncwarp(half); }
    } else { float v = s[t ^ 8]; __syncwarp(half); s[t] = v; __syncwarp(half); }
    y[t] = s[t];"""
    low = np.arange(64) % 32 < 16
    assert (output(body) == np.where(low, X[np.arange(64) ^ 1] + 3, X[np.arange(64) ^ 8])).all()


def test_a_mask_that_leaves_out_its_own_thread_or_names_one_that_does_not_come() -> None:
    with pytest.raises(KernelFaultError, match=r"a thread that its own membermask 0x0000ffff does not name .*k\.cu:1"):
        output("__syncwarp(0xffff); y[threadIdx.x] = x[threadIdx.x];")
    late = 'if (threadIdx.x < 16) __syncwarp(0x1ffff); else asm volatile("bar.sync 1, 96;"); y[threadIdx.x] = x[0];'
    with pytest.raises(KernelFaultError, match=r"16 threads of warp 0 wait .* of the warp in membermask 0x0001ffff"):
        output(late)


@pytest.mark.parametrize("seed", range(2))
def test_threads_of_one_access_point_to_different_memories(seed: int) -> None:
    body = """__shared__ float s[64];
    __shared__ int count;
    float own[2] = {x[threadIdx.x] + 100, x[threadIdx.x] + 200};
    s[threadIdx.x] = x[threadIdx.x] + 300;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    float* p = threadIdx.x % 3 == 0 ? &own[n & 1] : threadIdx.x % 3 == 1 ? &s[threadIdx.x] : y + threadIdx.x;
    float* q = threadIdx.x % 2 ? p : (float*)x + threadIdx.x;
    *(volatile float*)p = *(const volatile float*)q + 1;
    y[threadIdx.x] = threadIdx.x % 3 == 0 ? own[0] : threadIdx.x % 3 == 1 ? s[threadIdx.x] : 0;"""
    result = run(
        body,
        {"x": X, "y": np.zeros(64, np.float32)},
        {"y": (64, "float32")},
        parameters="const float* x, float* y, int n",
        args=("x", "y", np.int32(40)),
        threads=64,
        seed=seed,
    ).outputs["y"]
    location = np.arange(64)
    saved = np.where(location % 3 == 0, X + 100, X + 300)
    expected = np.where(location % 2, saved, X) + 1
    assert (result == np.where(location % 3 == 2, 0, expected)).all()


def test_atomics_on_different_memories() -> None:
    body = """__shared__ float s[2];
    if (threadIdx.x < 2) s[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(threadIdx.x % 2 ? &s[threadIdx.x / 32] : y, 1.0f);
    __syncthreads();
    if (threadIdx.x < 2) y[1 + threadIdx.x] = s[threadIdx.x];"""
    result = run(body, {"y": np.zeros(4, np.float32)}, {"y": (4, "float32")}, threads=64).outputs["y"]
    assert result.tolist() == [32, 16, 16, 0]


def test_matrices_at_a_generic_address() -> None:
    body = """__shared__ __align__(16) unsigned short s[64], t[64];
    for (int i = threadIdx.x; i < 64; i += 32) s[i] = i;
    __syncthreads();
    unsigned r;
    int row = threadIdx.x % 8 * 8;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.b16 {%0}, [%1];" : "=r"(r) : "l"(s + row) : "memory");
    asm volatile("stmatrix.sync.aligned.m8n8.x1.b16 [%0], {%1};" :: "l"(t + row), "r"(r) : "memory");
    __syncthreads();
    for (int i = threadIdx.x; i < 64; i += 32) y[i] = t[i];"""
    result = run_hopper(body, {}, {"y": ((8, 8), "int32")}, threads=32).outputs["y"]
    assert (result == np.arange(64).reshape(8, 8).T).all()


# ---- copies and mbarriers -------------------------------------------------------------------------------------------


ARRIVE = '  {when} asm volatile("mbarrier.arrive{form};" : "=l"(state) : "r"(at(&bar)) : "memory");'
WAIT = r"""    do asm volatile("{\n.reg .pred p;\nmbarrier.FORM;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done) : "r"(at(&bar)), "OPERAND : "memory"); while (!done);"""
STATES = f"""__shared__ u64 bar;
__shared__ float s[64];
if (threadIdx.x == 0) init(&bar, 64);
__syncthreads();
u64 state; u32 done = 0, left;
for (int round = 0; round < 3; ++round) {{
  s[threadIdx.x] = x[threadIdx.x] + round;
  __syncwarp();  // thread 62 arrives for thread 63
{ARRIVE.format(when="if (threadIdx.x < 8)", form=".noComplete.shared.b64 %0, [%1], 1")}
{ARRIVE.format(when="else if (threadIdx.x < 62)", form=".shared::cta.b64 %0, [%1]")}
{ARRIVE.format(when="else if (threadIdx.x == 62)", form=".shared::cta.b64 %0, [%1], 2")}
  if (threadIdx.x < 63) {{
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(left) : "l"(state));
    if (left < 1 || left > 64) y[64] = -1;
{WAIT.replace("FORM", "test_wait.shared.b64 p, [%1], %2").replace("OPERAND", 'l"(state)')}
  }} else {{
{WAIT.replace("FORM", "try_wait.parity.shared::cta.b64 p, [%1], %2, 1000").replace("OPERAND", 'r"(round & 1)')}
  }}
  y[threadIdx.x] = s[63 - threadIdx.x];
  __syncthreads();
}}
if (threadIdx.x == 0) {{
  asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(&bar)) : "memory");
  bar = 5; y[64] = bar;
}}"""


@SEEDS
def test_an_mbarrier_is_waited_for_by_state_and_by_parity(seed: int) -> None:
    result = run_hopper(STATES, {"x": X}, {"y": ((65,), "float32")}, threads=64, seed=seed).outputs["y"]
    assert (result[:64] == X[::-1] + 2).all()
    assert result[64] == 5


def test_an_arrival_that_may_not_complete_the_phase() -> None:
    body = STATES.replace("threadIdx.x < 8", "threadIdx.x < 64")
    with pytest.raises(KernelFaultError, match=r"\.noComplete that completes the phase .*k\.cu:\d"):
        run_hopper(body, {"x": X}, {"y": ((65,), "float32")}, threads=64)


LIBRARY = """#include <cuda/barrier>
#include <cooperative_groups.h>
using Barrier = cuda::barrier<cuda::thread_scope_block>;"""
ASYNC = """__shared__ __align__(16) float s[64];
#pragma nv_diag_suppress static_var_with_dynamic_init
__shared__ Barrier bar;
auto group = cooperative_groups::this_thread_block();
if (threadIdx.x == 0) init(&bar, 64);
__syncthreads();
for (int half = 0; half < 2; ++half) {
  cuda::memcpy_async(COPY, bar);
  bar.arrive_and_wait();
  y[64 * half + threadIdx.x] = s[63 - threadIdx.x];
  bar.arrive_and_wait();
}"""


@pytest.mark.parametrize(
    ("target", "copy"),
    [
        pytest.param("sm_89", "s + threadIdx.x, x + 64 * half + threadIdx.x, sizeof(float)", marks=pytest.mark.slow),
        ("sm_90a", "group, s, x + 64 * half, cuda::aligned_size_t<16>(256)"),
    ],
)
def test_asynchronous_copies_of_the_standard_library(target: str, copy: str) -> None:
    body = ASYNC.replace("COPY", copy)
    source = f'{LIBRARY}\nextern "C" __global__ void k(const float* x, float* y) {{\n#line 1 "k.cu"\n{body}\n}}'
    # On sm_90 this includes a bulk copy over loaded bytes without a proxy fence; the library guarantees the order.
    ptx = to_ptx(KernelSource("k", source, "k.cu", (), (64, 1, 1)), Target(target), assemble=False)
    x = np.arange(128, dtype=np.float32)
    for seed in range(2):
        result = run_grid(
            ptx,
            "k",
            (64, 1, 1),
            0,
            Launch((2, 1, 1), ("x", "y")),
            {"x": x},
            {"y": OutputSpec((128,), "float32")},
            seed=seed,
        )
        assert (result.outputs["y"] == x.reshape(2, 64)[:, ::-1].ravel()).all()


def test_the_layout_of_a_wgmma_operand_differs_between_blocks() -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0, 40, (rows, 64)).astype(np.uint8) for rows in (64, 8))
    body = (
        """extern __shared__ __align__(1024) u8 s[];
    __shared__ u64 bar;
    u64 swizzle = blockIdx.x ? 64 : 32;
    if (threadIdx.x == 0) {
      init(&bar, 1); init_fence();
      expect(&bar, blockIdx.x ? 72 * 64 : 72 * 32);
      load(s, blockIdx.x ? &wa : &na, &bar, 0, 0);
      load(s + 4096, blockIdx.x ? &wb : &nb, &bar, 0, 0);
    }
    __syncthreads();
    wait(&bar, 0);
    float d[4] = {};
    mma_fence();
    mma(d, descriptor(s, 16, 8 * swizzle, swizzle), descriptor(s + 4096, 16, 8 * swizzle, swizzle), 0);
    mma_commit();
    mma_wait<0>();
    y += blockIdx.x * 512;
    const int N = 8;"""
        + D_STORE
    )
    names = ("na", "nb", "wa", "wb")
    result = run_hopper(
        body,
        {"a": a, "b": b},
        {"y": ((2, 64, 8), "float32")},
        parameters=", ".join([*(f"const __grid_constant__ CUtensorMap {n}" for n in names), "float* y"]),
        args=(
            *(tensor_map(x, {"a": a, "b": b}[x], (rows, w), w) for w in (32, 64) for x, rows in (("a", 64), ("b", 8))),
            "y",
        ),
        blocks=2,
        dynamic=4096 + 512,
        before=wgmma("mma", 8, "k32", "f32.e4m3.e4m3"),
    ).outputs["y"]
    expected = E4M3_VALUES[a[:, :32]] @ E4M3_VALUES[b[:, :32]].T
    assert np.allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_wgmma_in_a_block_of_less_than_a_warpgroup() -> None:
    body = """extern __shared__ __align__(1024) u8 s[];
    float d[4] = {};
    mma_fence();
    mma(d, descriptor(s, 16, 256, 32), descriptor(s + 4096, 16, 256, 32), 0);
    mma_commit(); mma_wait<0>(); y[0] = d[0];"""
    message = r"a warpgroup, 128 threads, in a block of 64 at k\.cu:4 \[mma at hopper\.cuh:\d+, k at k\.cu:4\], .*wgmma"
    with pytest.raises(KernelFaultError, match=message):
        run_hopper(body, {}, {"y": ((4,), "float32")}, threads=64, before=wgmma("mma", 8, "k32", "f32.e4m3.e4m3"))
