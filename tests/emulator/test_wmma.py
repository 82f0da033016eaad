"""WMMA: tiles whose strides and addresses differ between warps and blocks."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.emulator.faults import KernelFaultError
from tests.emulator.kernels import run

RNG = np.random.default_rng(3)


def test_each_warp_has_its_own_stride() -> None:
    """Warp w of block b multiplies tiles of strides that only it has, and stores with another one."""
    a = RNG.integers(-4, 5, 4096).astype(np.float16)
    b = RNG.integers(-4, 5, 4096).astype(np.float16)
    found = run(
        "int w = blockIdx.x * 2 + threadIdx.x / 32; int lda = 16 + 8 * w, ldb = 40 - 8 * w, ldd = 16 + 4 * w;"
        "wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> x;"
        "wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> y;"
        "wmma::fragment<wmma::accumulator, 16, 16, 16, float> z; wmma::fill_fragment(z, 1.0f);"
        "wmma::load_matrix_sync(x, a + 64 * w, lda); wmma::load_matrix_sync(y, b + 32 * w, ldb);"
        "wmma::mma_sync(z, x, y, z); wmma::store_matrix_sync(d + 512 * w, z, ldd, wmma::mem_row_major);",
        {"a": a, "b": b},
        {"d": (2048, "float32")},
        parameters="const __half* a, const __half* b, float* d",
        args=("a", "b", "d"),
        threads=64,
        blocks=2,
        before="#include <mma.h>\nusing namespace nvcuda;",
    ).outputs["d"]
    for w in range(4):
        lda, ldb, ldd = 16 + 8 * w, 40 - 8 * w, 16 + 4 * w
        left = np.array([[a[64 * w + r * lda + k] for k in range(16)] for r in range(16)], np.float64)
        right = np.array([[b[32 * w + c * ldb + k] for c in range(16)] for k in range(16)], np.float64)
        product = left @ right + 1
        held = np.array([[found[512 * w + r * ldd + c] for c in range(16)] for r in range(16)])
        assert np.array_equal(held, product), w


@pytest.mark.parametrize(
    ("lda", "says"),
    [("16 + 8 * (threadIdx.x % 2)", "stride of a WMMA tile differs within a warp"), ("16", "")],
)
def test_a_stride_that_differs_within_a_warp_is_a_fault(lda: str, says: str) -> None:
    def one() -> None:
        run(
            f"int lda = {lda}; wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> x;"
            "wmma::load_matrix_sync(x, a, lda); d[threadIdx.x] = x.x[0];",
            {"a": np.zeros(1024, np.float16)},
            {"d": (32, "float32")},
            parameters="const __half* a, float* d",
            args=("a", "d"),
            before="#include <mma.h>\nusing namespace nvcuda;",
        )

    if not says:
        one()
        return
    with pytest.raises(KernelFaultError, match=says):
        one()
