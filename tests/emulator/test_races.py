"""Data races: found with both lines in every order of the warps, and correct kernels are not accused of one."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast import emulator
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.facts import ERROR, FORMAL
from tests.emulator.kernels import SEEDS, run

X = np.arange(256, dtype=np.float32)


def result(body: str, *, threads: int = 128, blocks: int = 1, seed: int = 0, before: str = "") -> np.ndarray:
    """Return the 256 floats that a kernel computes; ``z`` are 256 integers, initially zero."""
    return run(
        body,
        {"x": X, "y": np.zeros(256, np.float32), "z": np.zeros(256, np.int32)},
        {"y": (256, "float32"), "z": (256, "int32")},
        threads=threads,
        blocks=blocks,
        seed=seed,
        before=before,
    ).outputs["y"]


LAST_BLOCK = """__shared__ float s[4]; __shared__ bool last;
float v = x[blockIdx.x * blockDim.x % 256 + threadIdx.x];
for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
__syncthreads();
if (threadIdx.x == 0) {
  y[1 + blockIdx.x] = s[0] + s[1] + s[2] + s[3];
  FENCE
  last = atomicAdd(z, 1) == gridDim.x - 1;
}
__syncthreads();
if (last && threadIdx.x == 0) {
  float sum = 0;
  for (int b = 0; b < gridDim.x; ++b) sum += y[1 + b];
  y[0] = sum;
}"""
FLAG = """__shared__ volatile int flag; __shared__ float data;
if (threadIdx.x == 0) flag = 0;
__syncthreads();
if (threadIdx.x == 32) { data = x[7]; FENCE flag = 1; }
if (threadIdx.x == 64) { while (flag == 0); __threadfence_block(); y[0] = data; }"""
BETWEEN = """if (threadIdx.x == 0) {
  volatile int* flag = z;
  if (blockIdx.x == 1) { y[1] = x[9]; FENCE *flag = 1; }
  if (blockIdx.x == 0) { while (*flag == 0); __threadfence(); y[0] = y[1]; }
}"""
LOCK = """if (threadIdx.x % 32 == 0) {
  while (atomicCAS(z, 0, 1) != 0);
  __threadfence();
  y[0] += 1;
  __threadfence();
  atomicExch(z, 0);
}"""


@SEEDS
@pytest.mark.parametrize(
    ("body", "blocks", "message"),
    [
        pytest.param(
            "__shared__ float s; if (threadIdx.x == 0) s = 0;\n__syncthreads();\ns += x[threadIdx.x / 32 + 1];\n"
            "__syncthreads(); y[0] = s;",
            1,
            r"a data race on byte 0 of shared memory \(\S*s\S* \+ 0\): nothing orders this (read|write) and the "
            r"(read|write) at k\.cu:3 \(in: \S+\.shared\S+ .*\) by warp \d of block \(0, 0, 0\), found at k\.cu:3",
            id="lost updates of warps",
        ),
        pytest.param(
            "if (threadIdx.x == 0)\ny[0] += x[blockIdx.x + 1];",
            4,
            r"a data race on byte 0 of 'y' .* (read|write) at k\.cu:2 .*block \(\d, 0, 0\), found at k\.cu:2",
            id="lost updates of blocks",
        ),
        pytest.param(
            "__shared__ float s[128]; s[threadIdx.x] = x[threadIdx.x];\n__syncthreads();\n"
            "float v = s[127 - threadIdx.x];\ns[threadIdx.x] = v + 1;\n"
            "__syncthreads(); y[threadIdx.x] = s[threadIdx.x];",
            1,
            r"data race .* shared .* this read and the write at k\.cu:4 .*found at k\.cu:3|"
            r"data race .* shared .* this write and the read at k\.cu:3 .*found at k\.cu:4",
            id="no barrier between read and write",
        ),
        pytest.param(
            "__shared__ float s[128]; s[threadIdx.x] = 0;\n__syncthreads();\n"
            "s[threadIdx.x] = x[threadIdx.x];\ny[threadIdx.x] = s[threadIdx.x ^ 32];",
            1,
            r"data race .* this read and the write at k\.cu:3 .*found at k\.cu:4|"
            r"data race .* this write and the read at k\.cu:4 .*found at k\.cu:3",
            id="no barrier between write and read",
        ),
        pytest.param(
            "__shared__ unsigned char s[64];\nif (threadIdx.x % 32 == 0) s[5] = threadIdx.x;\n"
            "__syncthreads(); y[0] = s[5];",
            1,
            r"data race on byte \d of shared .* this write and the write at k\.cu:2",
            id="bytes",
        ),
        pytest.param(
            "__shared__ unsigned s[2];\nif (threadIdx.x == 0) s[1] = x[0];\n"
            "if (threadIdx.x == 32) ((unsigned char*)s)[6] = x[9];\n__syncthreads(); y[0] = s[1];",
            1,
            r"data race on byte [46] of shared .* this write and the write at k\.cu:[23]",
            id="a byte in a word",
        ),
        pytest.param(
            "if (blockIdx.x == 1)\ny[7] = 1;\nelse if (blockIdx.x == 2)\ny[7] = x[2];",
            4,
            r"data race on byte 28 of 'y' .* this write and the write at k\.cu:2 .* of block \(1, 0, 0\), found at "
            r"k\.cu:4, block \(2, 0, 0\)|"
            r"data race on byte 28 of 'y' .* this write and the write at k\.cu:4 .* of block \(2, 0, 0\), found "
            r"at k\.cu:2",
            id="two blocks write",
        ),
        pytest.param("y[threadIdx.x] = x[blockIdx.x];", 3, r"data race .* write at k\.cu:1", id="in one instruction"),
        pytest.param(
            "int i = blockIdx.x * 64 + threadIdx.x / 2;\nfloat v = y[(i + 1) % 256];\ny[i] = v + x[i] + 1;",
            4,
            r"data race on byte \d+ of 'y' .* (this write and the read at k\.cu:2|this read and the write at k\.cu:3)",
            id="in place",
        ),
        pytest.param(
            LAST_BLOCK.replace("FENCE", ""),
            2,
            r"data race on byte \d of 'y' .* this read and the write at k\.cu:7 .* found at k\.cu:14",
            id="the last block, no fence",
        ),
        pytest.param(
            BETWEEN.replace("FENCE", ""),
            2,
            r"data race on byte 4 of 'y' .* this read and the write at k\.cu:3",
            id="a flag of another block, no fence",
        ),
        pytest.param(
            LOCK.replace("atomicCAS(z, 0, 1)", "atomicCAS(z + blockIdx.x, 0, 1)"),
            2,
            r"data race on byte 0 of 'y' .* k\.cu:4",
            id="each block has another lock",
        ),
    ],
)
def test_a_race_is_found_in_every_order(body: str, blocks: int, message: str, seed: int) -> None:
    with pytest.raises(KernelFaultError, match=message):
        result(body, blocks=blocks, seed=seed)


@SEEDS
@pytest.mark.parametrize(
    ("body", "blocks", "first"),
    [
        pytest.param("y[0] = 5;", 4, 5, id="all write the same"),
        pytest.param(
            "__shared__ int any; any = 0; __syncthreads(); if (x[threadIdx.x] > 3) any = 1; __syncthreads();"
            "if (threadIdx.x == 0) y[0] = any;",
            1,
            1,
            id="a flag that several set",
        ),
        pytest.param(LAST_BLOCK.replace("FENCE", "__threadfence();"), 2, X.sum(), id="the last block"),
        pytest.param(FLAG.replace("FENCE", "__threadfence_block();"), 1, 7, id="a flag of another warp"),
        pytest.param(BETWEEN.replace("FENCE", "__threadfence();"), 2, 9, id="a flag of another block"),
        pytest.param(LOCK, 1, 4, id="a lock of warps"),
        pytest.param(LOCK, 3, 12, id="a lock of blocks"),
        pytest.param("atomicAdd(y, 1.0f);", 2, 256, id="atomics"),
        pytest.param(
            "if (threadIdx.x == 0)"
            "((unsigned char*)y)[blockIdx.x] = blockIdx.x == 3 ? 0x3f : blockIdx.x == 2 ? 0x80 : 0;",
            4,
            1,
            id="bytes of one word",
        ),
        pytest.param(
            "if (threadIdx.x % 2) y[blockIdx.x * 64 + threadIdx.x / 2] += 1;", 4, 1, id="each its own, in place"
        ),
        pytest.param(
            "__shared__ float s[128]; s[threadIdx.x] = x[threadIdx.x]; __syncwarp(); float v = s[threadIdx.x ^ 1];"
            'if (threadIdx.x < 64) { asm volatile("bar.sync 1, 64;" ::: "memory"); v += s[threadIdx.x ^ 32]; }'
            'else { asm volatile("bar.sync 2, 64;" ::: "memory"); v += s[threadIdx.x ^ 32]; } y[threadIdx.x] = v;',
            1,
            33,
            id="barriers of parts of a block",
        ),
        pytest.param(
            "__shared__ float s[32]; if (threadIdx.x < 32) { s[threadIdx.x] = x[threadIdx.x] + 1;"
            'asm volatile("bar.arrive 1, 64;" ::: "memory"); } else if (threadIdx.x < 64) {'
            'asm volatile("bar.sync 1, 64;" ::: "memory"); y[threadIdx.x - 32] = s[threadIdx.x - 32]; }',
            1,
            1,
            id="arrive and sync",
        ),
        pytest.param(
            "if (threadIdx.x == 0) { int old = z[0];"
            "while (atomicCAS(z, old, old + 1) != old) old = *(volatile int*)z; }"
            "y[0] = 3;",
            3,
            3,
            id="a plain read before a compare and swap",
        ),
    ],
)
def test_a_correct_kernel_is_not_accused(body: str, blocks: int, first: float, seed: int) -> None:
    assert result(body, blocks=blocks, seed=seed)[0] == np.float32(first)


ESCAPE = 'asm volatile("" :: "l"(&s) : "memory");'
RELOAD = 'asm volatile("" ::: "memory");'
# Warp 0 waits for warp 2, so that warp 1 writes between its write and its read.
MEET = RELOAD + 'if (threadIdx.x / 32 % 2 == 0) asm volatile("bar.sync 1, 64;" ::: "memory");'
SAME_VALUE = {
    "warps, shared memory": (
        f"__shared__ int s; {ESCAPE} if (threadIdx.x < 64) s = 5; {MEET} if (threadIdx.x < 32) y[0] = s;",
        1,
    ),
    "warps, global memory": (f"if (threadIdx.x < 64) z[7] = 5; {MEET} if (threadIdx.x < 32) y[0] = z[7];", 1),
    "blocks, global memory": (f"if (threadIdx.x == 0) {{ z[7] = 5; {RELOAD} y[blockIdx.x] = z[7]; }}", 2),
    "threads of a warp": (
        f"__shared__ int s; {ESCAPE} if (threadIdx.x == 1) s = 7; {RELOAD} if (threadIdx.x == 0) s = 7; {RELOAD} "
        "if (threadIdx.x == 1) y[1] = s;",
        1,
    ),
}


@pytest.mark.parametrize(("body", "blocks"), SAME_VALUE.values(), ids=SAME_VALUE.keys())
def test_a_read_of_the_value_that_both_threads_wrote_is_a_formal_finding(body: str, blocks: int) -> None:
    with pytest.raises(KernelFaultError, match="both threads wrote the same value") as raised:
        result(body, blocks=blocks)
    assert raised.value.level == FORMAL


@pytest.mark.parametrize(
    ("body", "blocks"),
    [
        pytest.param(
            f"__shared__ int s; s = 5; {RELOAD} if (threadIdx.x < 32) s = 6; {RELOAD} y[threadIdx.x] = s;",
            1,
            id="two values",
        ),
        pytest.param(
            "__shared__ int s; if (threadIdx.x == 96) s = 0; __syncthreads();"
            f"if (threadIdx.x < 64) s = 5; {RELOAD} if (threadIdx.x >= 64) y[threadIdx.x] = s;",
            1,
            id="a reader that wrote nothing, shared memory",
        ),
        pytest.param(
            f"if (blockIdx.x < 2) z[7] = 5; {RELOAD} if (blockIdx.x == 2) y[threadIdx.x] = z[7];",
            3,
            id="a reader that wrote nothing, global memory",
        ),
    ],
)
def test_a_read_of_a_value_that_depends_on_the_order_is_an_error(body: str, blocks: int) -> None:
    with pytest.raises(KernelFaultError, match="data race") as raised:
        result(body, blocks=blocks)
    assert raised.value.level == ERROR


JOINT = """
extern "C" __global__ void k(float* y) {
    __shared__ float sum[1];
    // Both warps hold 1 and 1 + ulp, as of sums in another order.
    sum[0] = __int_as_float(0x3f800000 + (threadIdx.x % 2) * (threadIdx.x < 32 ? 1 : ODD));
    __syncthreads();
    if (threadIdx.x == 0) y[0] = sum[0];
}
"""


def test_warps_that_store_the_same_several_values_to_one_place_do_not_race() -> None:
    """Triton's reductions store redundant sums so; one of the values remains in any order of the warps."""
    y = np.zeros(1, np.float32)
    emulator.run(JOINT, grid=1, block=64, args=[y], defines=["ODD=1"])
    assert 1 <= y[0] < 1.000001
    for odd in ("0", "2"):
        with pytest.raises(emulator.KernelFaultError, match="data race on byte 0 of shared memory"):
            emulator.run(JOINT, grid=1, block=64, args=[y], defines=[f"ODD={odd}"])
