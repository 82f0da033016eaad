"""How long kernels take to compile cold, and to load from the cache: ``python benchmarks/compile_time.py [TARGET]``.

Needs no GPU. The cache is a temporary folder, so every first compile is a cold one.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from greenfast.build.compiler import compile_kernel
from greenfast.build.machine_code import disassemble
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource

LOADS = 5


def example() -> KernelSource:
    """A small WMMA kernel with the headers that the real ones include."""
    text = """
#include <cuda_fp8.h>
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void example(const half* a, const half* b, float* c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}
"""
    return KernelSource("example", text, "example.cu", (), (32, 1, 1))


KERNELS: list[Callable[[], KernelSource]] = [example]


def measure(kernels: Sequence[Callable[[], KernelSource]], target: Target) -> None:
    """Print a row per kernel; the first cold time includes loading NVRTC."""
    print(f"{'kernel':24} {'cold ms':>9} {'cached ms':>9} {'SASS ms':>9} {'cached ms':>9}   ({target.name})")
    for render in kernels:
        source = render()
        cold = compile_kernel(source, target)
        cached = statistics.median(compile_kernel(source, target).compile_ms for _ in range(LOADS))
        times = []
        for _ in range(1 + LOADS):
            start = time.perf_counter()
            disassemble(cold.cubin, source.entry)
            times.append((time.perf_counter() - start) * 1e3)
        sass_cold, sass_cached = times[0], statistics.median(times[1:])
        print(f"{source.entry:24} {cold.compile_ms:9.1f} {cached:9.2f} {sass_cold:9.1f} {sass_cached:9.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GREENFAST_CACHE_DIR"] = folder
        measure(KERNELS, Target.parse(sys.argv[1] if len(sys.argv) > 1 else "sm_89"))
