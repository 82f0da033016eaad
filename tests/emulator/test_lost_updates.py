"""Updates of one place by several threads: lost updates are found, correct kernels pass."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.emulator.grid import run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.kernel import Launch
from greenfast.spec.problem import OutputSpec
from tests.emulator.kernels import SEEDS
from tests.emulator.test_races import X, result

SHARED = "__shared__ __align__(16) float s[4]; if (threadIdx.x < 4) s[threadIdx.x] = 0; __syncthreads();\n"
END = "\n__syncthreads(); y[threadIdx.x] = s[0];"
FIRST = "if (threadIdx.x % 32 == 0) "
ADDS = r"(this read and the write|this write and the (read|write)) at k\.cu:"
MIXED = r"(this write and the atomic access|this atomic access and the write) at k\.cu:"


@SEEDS
@pytest.mark.parametrize(
    ("body", "blocks", "message"),
    [
        pytest.param(f"{SHARED}{FIRST}s[0] += x[threadIdx.x];{END}", 1, f"shared .*{ADDS}2", id="of four warps"),
        pytest.param(f"{SHARED}{FIRST}s[0] += 1;{END}", 1, f"shared .*{ADDS}2", id="by the same number"),
        pytest.param(f"{SHARED}s[0] += 1;{END}", 1, f"shared .*{ADDS}2", id="of all threads"),
        pytest.param(f"{FIRST}y[0] += 1;", 1, f"'y' .*{ADDS}1", id="of warps in global memory"),
        pytest.param("if (threadIdx.x == 0) y[0] += 1;", 4, f"'y' .*{ADDS}1", id="of blocks"),
        pytest.param("if (threadIdx.x == 0) y[0] += 1;", 300, f"'y' .*{ADDS}1", id="of more blocks than run at once"),
        pytest.param(
            f"{SHARED}{FIRST}*(float4*)s = make_float4(x[threadIdx.x], 1, 2, 3);{END}",
            1,
            r"shared .*this write and the write at k\.cu:2",
            id="vector stores",
        ),
        pytest.param(
            "if (threadIdx.x == 0) *(float4*)y = make_float4(1, 2, 3, 4);\nif (threadIdx.x == 32) y[2] = 9;",
            1,
            r"'y' .*this write and the write at k\.cu:[12]",
            id="a vector store and a scalar one",
        ),
        pytest.param(
            f"{SHARED}if (threadIdx.x == 32) atomicAdd(s, 1.f);\nif (threadIdx.x == 64) s[0] = 7;{END}",
            1,
            rf"shared .*{MIXED}[23]",
            id="an atomic access and a write",
        ),
        pytest.param(
            "if (threadIdx.x == 0 && blockIdx.x) atomicAdd(y, 1.f);\nif (threadIdx.x == 0 && !blockIdx.x) y[0] = 7;",
            3,
            f"'y' .*{MIXED}[12]",
            id="an atomic access and a write of another block",
        ),
        pytest.param(
            "__shared__ float s[1]; if (threadIdx.x == 64) s[0] = 3;\natomicAdd(s, 1.f);" + END,
            1,
            rf"shared .*{MIXED}[12]|nothing has written",
            id="no barrier after the first value",
        ),
    ],
)
def test_an_update_that_can_be_lost_is_a_race_in_every_order(body: str, blocks: int, message: str, seed: int) -> None:
    with pytest.raises(KernelFaultError, match=message):
        result(body, blocks=blocks, seed=seed)


@SEEDS
@pytest.mark.parametrize(
    ("body", "blocks", "first"),
    [
        pytest.param(f"{SHARED}{FIRST}atomicAdd(s, 1.f);{END}", 1, 4, id="atomics after a barrier"),
        pytest.param(f"{SHARED}{FIRST}s[0] = 5;{END}", 1, 5, id="the same value"),
        pytest.param(f"{SHARED}s[0] = threadIdx.x / 128 + 2;{END}", 1, 2, id="the same value from all"),
        pytest.param(
            "if (threadIdx.x == 0 && atomicAdd(z, 1) == gridDim.x - 1) { z[0] = 0; y[0] = 3; }",
            4,
            3,
            id="the last resets",
        ),
        pytest.param(
            "__shared__ int most; most = 0; __syncthreads(); int mine = threadIdx.x;"
            "if (most < mine) atomicMax(&most, mine); __syncthreads(); y[0] = most;",
            1,
            127,
            id="a look before an atomic access",
        ),
        pytest.param(
            "if (threadIdx.x == 0) { while (atomicExch(z, 1)); __threadfence(); y[0] += 2;"
            "__threadfence(); *(volatile int*)z = 0; }",
            3,
            6,
            id="a lock that a volatile write releases",
        ),
        pytest.param(
            "__shared__ int lock; __shared__ float v; lock = 0; v = 0; __syncthreads(); if (threadIdx.x % 32 == 0) {"
            "while (atomicCAS(&lock, 0, 1)); __threadfence_block(); v += 1; __threadfence_block(); lock = 0; }"
            "__syncthreads(); y[0] = v;",
            1,
            4,
            id="a lock that an ordinary write releases",
        ),
        pytest.param(
            "if (threadIdx.x == 0) { if (blockIdx.x) { __threadfence(); atomicAdd(z, 1); } else {"
            "while (atomicAdd(z, 0) < 2); z[0] = 0; y[0] = 5; } }",
            3,
            5,
            id="a counter of blocks that an ordinary write resets after a wait",
        ),
        pytest.param(
            "__shared__ int count; count = 0; __syncthreads(); if (threadIdx.x > 31) atomicAdd(&count, 1);"
            "else if (threadIdx.x == 0) { while (*(volatile int*)&count < blockDim.x - 32); count = 0; }"
            "__syncthreads(); y[0] = count + 3;",
            1,
            3,
            id="a counter of warps that an ordinary write resets after a wait",
        ),
    ],
)
def test_a_right_update_is_not_accused(body: str, blocks: int, first: float, seed: int) -> None:
    assert result(body, blocks=blocks, seed=seed)[0] == np.float32(first)


@SEEDS
@pytest.mark.parametrize("memory", ["__shared__ int n;", "int& n = z[0];"], ids=["shared", "global"])
@pytest.mark.parametrize(
    "body",
    [
        "if (threadIdx.x == 5) n = 0; SYNC y[threadIdx.x] = atomicAdd(&n, 1); __syncwarp();",
        "if (threadIdx.x == 0) n = 0; __syncwarp(); atomicAdd(&n, 1); SYNC if (threadIdx.x == 7) n = 3;",
    ],
    ids=["atomic access after a write", "write after atomic accesses"],
)
def test_an_ordinary_write_and_an_atomic_access_within_a_warp_need_a_syncwarp(
    body: str, memory: str, seed: int
) -> None:
    result(memory + body.replace("SYNC", "__syncwarp();"), threads=32, seed=seed)
    with pytest.raises(KernelFaultError, match=r"data race .* (atomic access and the write|write and the atomic)"):
        result(memory + body.replace("SYNC", ""), threads=32, seed=seed)


@SEEDS
@pytest.mark.parametrize("threads", [32, 128])
def test_a_read_of_shared_memory_after_atomic_accesses_needs_a_barrier(threads: int, seed: int) -> None:
    body = (
        "__shared__ int n[4]; if (threadIdx.x < 4) n[threadIdx.x] = 0; __syncthreads();"
        "atomicAdd(n + threadIdx.x % 4, 1); SYNC y[threadIdx.x] = n[x[threadIdx.x] > 5];"
    )
    right = result(body.replace("SYNC", "__syncthreads();"), threads=threads, seed=seed)
    assert (right[:threads] == threads / 4).all()
    with pytest.raises(KernelFaultError, match=r"data race on .* this read and the atomic access at k\.cu:1"):
        result(body.replace("SYNC", ""), threads=threads, seed=seed)


@pytest.mark.parametrize(
    "update",
    ["volatile float* v = y; v[0] = v[0] + 1;", "float v = atomicAdd(y, 0.f); atomicExch(y, v + 1);"],
    ids=["volatile", "atomic"],
)
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_lost_update_through_volatile_or_atomic_accesses_shows_in_another_order(update: str, blocks: int) -> None:
    values = [result(f"{FIRST}{{ {update} }}", blocks=blocks, seed=seed)[0] for seed in range(2)]
    assert min(values) < 4 * blocks
    assert len(set(values)) == 2


RACE = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y)
{
  .reg .b32 %t; .reg .b64 %a; .reg .f32 %v; .reg .pred %p;
  .shared .align 4 .f32 s;
  mov.u32 %t, %tid.x;
  setp.ne.u32 %p, %t, 0;
  @!%p st.shared.f32 [s], 0f00000000;
  bar.sync 0;
  and.b32 %t, %t, 31;
  setp.ne.u32 %p, %t, 0;
  @%p bra JOIN;
  ld.shared.f32 %v, [s];
  add.f32 %v, %v, 0f3F800000;
  st.shared.f32 [s], %v;
JOIN:
  bar.sync 0;
  ld.shared.f32 %v, [s];
  ld.param.u64 %a, [y];
  st.global.f32 [%a], %v;
  ret;
}
"""


@SEEDS
@pytest.mark.parametrize("threads", [32, 128])
def test_the_race_of_four_warps_in_ptx(threads: int, seed: int) -> None:
    def run() -> float:
        grid = run_grid(
            RACE, "k", (threads, 1, 1), 0, Launch((1, 1, 1), ("x", "y")), {"x": X},
            {"y": OutputSpec((1,), "float32")}, seed=seed,
        )  # fmt: skip
        return float(grid.outputs["y"][0])

    if threads == 32:
        assert run() == 1
    else:
        with pytest.raises(KernelFaultError, match=r"data race on byte 0 of shared memory \(s \+ 0\): .* at ptx:1[57]"):
            run()
