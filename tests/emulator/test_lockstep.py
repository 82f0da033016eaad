"""Warps in lockstep: the results, counts and faults of warps that run one after the other."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from greenfast.device.compiler import to_ptx
from greenfast.emulator.grid import load_program, run_grid
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch
from greenfast.spec.problem import OutputSpec

ROOMS = "__shared__ float s[1024]; const int t = threadIdx.x, n = blockDim.x, b = blockIdx.x, g = b * n + t;"
#: Bodies of kernels without races: x holds 4096 floats, y the results of all threads.
PLAIN = {
    "tiles": "for (int k = 0; k < 3; k++) { s[t] = x[(g + k * 7) & 4095]; __syncthreads(); float v = 0;"
    "for (int i = 0; i < 8; i++) v += s[(t + i * 33) % n]; __syncthreads(); y[g] = v + (k ? y[g] : 0); }",
    "tree": "s[t] = x[g]; __syncthreads(); for (int o = n / 2; o; o /= 2) { if (t < o) s[t] += s[t + o];"
    "__syncthreads(); } y[g] = s[0];",
    "warps with other loops": "float v = x[g]; for (int i = 0; i < t / 32 + b; i++) v = v * 0.5f + i; s[t] = v;"
    "__syncthreads(); y[g] = s[n - 1 - t];",
    "threads with other loops": "float v = x[g]; for (int i = 0; i < t % 7 + b; i++)"
    "{ if (i & 1) v *= 0.5f; else v += i; }"
    "if (t % 3 == 0) { for (int i = 0; i < t % 5; i++) v += sqrtf(fabsf(v)); } y[g] = v;",
    "ended threads": "y[g] = 0; if (t >= 70) return; s[t] = x[g]; __syncthreads(); y[g] = s[69 - t];",
    "shuffles and votes": "float v = x[g]; if (t / 32 != 1) for (int o = 16; o; o /= 2)"
    "v += __shfl_xor_sync(~0u, v, o);"
    "unsigned m = __ballot_sync(~0u, v > 0); if (t % 2) v += __shfl_sync(0xaaaaaaaau, v, 5);"
    "y[g] = v + __popc(m) + __syncthreads_count(v > 1);",
    "a warp that joins others late": "y[g] = 0; if (b < 2) return; float v = x[g];"
    "if (t / 32 == 1) for (int i = 0; i < t % 3; i++) v = v * 0.5f + sqrtf(i + fabsf(v));"
    "s[t] = v; __syncwarp(); y[g] = v * 3 + s[t ^ 1];",
    "within a warp": "s[t] = x[g]; __syncwarp(); float v = s[t ^ 1]; __syncwarp(); s[t] = v * 2; __syncwarp();"
    "y[g] = s[t ^ 3];",
    "bytes": "char* c = (char*)s; c[t] = t * 3; short* h = (short*)(s + 512); h[t] = t * 5; __syncthreads();"
    "y[g] = c[n - 1 - t] + h[(t + 40) % n];",
    "a buffer read and written": "float v = y0[g] + 1; y0[g] = v; __syncthreads();"
    "y[g] = v + y0[b * n + (t + 50) % n];",
}  # fmt: skip
#: Bodies with a fault or a formal finding; the last is none, but lockstep cannot know it.
FAULTY = {
    "no barrier": "s[t] = x[g]; y[g] = s[(t + 32) % n];",
    "no barrier after the reads": "s[t] = x[g]; __syncthreads(); float v = s[n - 1 - t]; s[t] = v; y[g] = v;",
    "no syncwarp": "s[t] = x[g]; y[g] = s[t ^ 1];",
    "two warps, one place": "s[t % 64] = x[g]; __syncthreads(); y[g] = s[t % 64];",
    "two blocks, one place": "y[g] = 0; y[t] = x[g];",
    "a block reads what another writes": "y0[g] = x[g]; y[g] = y0[(g + n) % (3 * n)];",
    "out of bounds": "y[g] = x[g * 40];",
    "an uninitialised word": "if (t != 40) s[t] = x[g]; __syncthreads(); y[g] = s[n - 1 - t];",
    "a barrier that a warp skips": "if (t < 96) { __syncthreads(); y[g] = 1; } else y[g] = s[t + 5000];",
    "one value by all": "s[0] = x[0]; __syncthreads(); y[g] = s[0];",
}


def compile_bodies(bodies: list[str]) -> str:
    """Return the PTX of kernels k0, k1, ..."""
    text = "\n".join(
        f'extern "C" __global__ void k{n}(const float* x, float* y0, float* y) {{ {ROOMS} {body} }}'
        for n, body in enumerate(bodies)
    )
    return to_ptx(KernelSource("k0", text, "k.cu", (KERNEL_DIR,), (128, 1, 1)), Target("sm_89"), assemble=False)


def run_kernel(ptx: str, entry: str, threads: int, seed: int) -> tuple[Any, ...]:
    """Return all results of a run, or the words of its fault."""
    x = np.random.default_rng(0).standard_normal(4096, np.float32)
    plan = Launch((3, 1, 1), ("x", "y0", "y"))
    outputs = {"y0": OutputSpec((3 * threads,), "float32", zeros=True), "y": OutputSpec((3 * threads,), "float32")}
    try:
        result = run_grid(ptx, entry, (threads, 1, 1), 0, plan, {"x": x}, outputs, seed=seed, keep_formal=True)
    except KernelFaultError as e:
        return str(e), e.location
    arrays = {name: array.tobytes() for name, array in result.outputs.items()}
    findings = [(f.name, f.text) for f in result.findings]
    return arrays, vars(result.counts), findings, result.unwritten, result.input_writes


def run_both(ptx: str, entry: str, threads: int, seed: int) -> tuple[Any, Any, bool]:
    """Return the results in lockstep and warp by warp, and whether the first run stayed in lockstep."""
    _, program = load_program(ptx, entry)
    units = program.lockstep_units
    assert units is not None
    together = run_kernel(ptx, entry, threads, seed)
    stayed, program.lockstep_units = program.lockstep_units is not None, None
    apart = run_kernel(ptx, entry, threads, seed)
    program.lockstep_units = units
    return together, apart, stayed


@pytest.fixture(scope="module")
def plain() -> str:
    return compile_bodies(list(PLAIN.values()))


@pytest.fixture(scope="module")
def faulty() -> str:
    return compile_bodies(list(FAULTY.values()))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("threads", "seed"), [(128, 0), (128, 3), (75, 1)])
def test_results_and_counts_are_equal(plain: str, name: str, threads: int, seed: int) -> None:
    together, apart, stayed = run_both(plain, f"k{list(PLAIN).index(name)}", threads, seed)
    assert together == apart
    assert stayed or isinstance(together[0], str)  # a fault: threads without a partner


@pytest.mark.parametrize("name", FAULTY)
@pytest.mark.parametrize("seed", [0, 2])
def test_faults_are_those_of_warps_one_after_the_other(faulty: str, name: str, seed: int) -> None:
    together, apart, stayed = run_both(faulty, f"k{list(FAULTY).index(name)}", 128, seed)
    assert together == apart
    assert not stayed
    assert (name == "one value by all") != (isinstance(together[0], str) or bool(together[2]))


def test_random_accesses() -> None:
    """Run kernels of random accesses to few places, with barriers at random: about half of them have a race."""
    choose = random.Random(5)
    places = ("t", "t ^ 1", "t ^ 32", "t % 32", "t / 2", "t / 32", "n - 1 - t", "0")

    def statement() -> str:
        array, place = choose.choice(("s", "y0 + b * n")), choose.choice(places)
        some = choose.choice(("", "", "if (t < 64) ", "if (t % 32 < 5) ", "if (t == 40) "))
        access = choose.choice((f"({array})[{place}] = v + t;", f"v += ({array})[{place}];"))
        return choose.choice(("__syncthreads();", "__syncthreads();", "__syncwarp();", some + access, some + access))

    bodies = [
        "float v = 0; s[t] = t; __syncthreads();" + "".join(statement() for _ in range(6)) + "y[g] = v;"
        for _ in range(60)
    ]
    ptx, faults, lockstep = compile_bodies(bodies), 0, 0
    for n, body in enumerate(bodies):
        together, apart, stayed = run_both(ptx, f"k{n}", 64, n % 3)
        assert together == apart, body
        faults += isinstance(together[0], str)
        lockstep += stayed
    assert faults > 15
    assert lockstep > 15


@pytest.mark.parametrize(
    "body",
    [
        "y[g] = atomicAdd(y0, 1.0f);",
        "y[g] = ((volatile float*)y0)[0];",
        "y[g] = clock();",
        'asm volatile("bar.sync 1, 64;"); y[g] = 0;',
        'if (g == 0) printf("");  y[g] = 0;',
    ],
)
def test_kernels_that_depend_on_the_order_run_warp_by_warp(body: str) -> None:
    _, program = load_program(compile_bodies([body]), "k0")
    assert program.lockstep_units is None
