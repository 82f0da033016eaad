"""WMMA tiles with strides and addresses that differ between warps and blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from tests.emulator.kernels import run

RNG = np.random.default_rng(3)


def test_each_warp_has_its_own_stride() -> None:
    """Warp w of block b multiplies tiles of strides that only it has, and stores with another one."""
    a = RNG.integers(-4, 5, 4096).astype(np.float16)
    b = RNG.integers(-4, 5, 4096).astype(np.float16)
    result = run(
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
        held = np.array([[result[512 * w + r * ldd + c] for c in range(16)] for r in range(16)])
        assert np.array_equal(held, product), w


#: Name of the C++ type, of the accumulators' one, tile, and how to draw whole numbers of A and B.
TYPES = [
    ("__half", "float", (16, 16, 16), np.float16),
    ("__half", "__half", (16, 16, 16), np.float16),
    ("__half", "float", (32, 8, 16), np.float16),
    ("__half", "__half", (8, 32, 16), np.float16),
    ("__nv_bfloat16", "float", (16, 16, 16), "bf16"),
    ("__nv_bfloat16", "float", (32, 8, 16), "bf16"),
    ("__nv_bfloat16", "float", (8, 32, 16), "bf16"),
    ("wmma::precision::tf32", "float", (16, 16, 8), np.float32),
    ("double", "double", (8, 8, 4), np.float64),
    ("signed char", "int", (16, 16, 16), np.int8),
    ("unsigned char", "int", (32, 8, 16), np.uint8),
    ("signed char", "int", (8, 32, 16), np.int8),
]


@pytest.mark.parametrize(("order_a", "order_b", "order_d"), [("row", "col", "row"), ("col", "row", "col")])
@pytest.mark.parametrize("case", TYPES, ids=lambda c: f"{c[0].split(':')[-1]}-{c[1]}-{c[2]}")
def test_products_of_every_type(case: Any, order_a: str, order_b: str, order_d: str) -> None:
    """d = a b + c with each element of the sums doubled by its thread before it is stored."""
    kind, sums, (m, n, k), dtype = case
    a, b = RNG.integers(-8, 9, (m, k)), RNG.integers(-8, 9, (k, n))
    if dtype == np.uint8:
        a, b = abs(a) * 31, abs(b) * 30
    c = RNG.integers(-20, 21, (m, n))

    def stored(x: Any, order: str, pad: int) -> Any:
        """With rows (or columns) that are ``pad`` elements longer than the matrix."""
        rows = np.pad(x if order == "row" else x.T, ((0, 0), (0, pad)))
        if dtype == "bf16" and pad < 16:
            return (rows.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return rows.astype({"float": np.float32, "__half": np.float16, "int": np.int32, "double": np.float64}[sums]
                           if pad >= 16 else dtype)  # fmt: skip

    element = {"wmma::precision::tf32": "float"}.get(kind, kind)
    words = {"float": "float32", "__half": "float16", "int": "int32", "double": "float64"}[sums]
    held_c, shape = stored(c, order_d, 16), f"{m}, {n}, {k}"
    lengths = [(cols if order == "row" else rows) + pad
               for rows, cols, order, pad in ((m, k, order_a, 8), (k, n, order_b, 8), (m, n, order_d, 16))]  # fmt: skip
    result = run(
        f"wmma::fragment<wmma::matrix_a, {shape}, {kind}, wmma::{order_a}_major> x;"
        f"wmma::fragment<wmma::matrix_b, {shape}, {kind}, wmma::{order_b}_major> y;"
        f"wmma::fragment<wmma::accumulator, {shape}, {sums}> z;"
        f"wmma::load_matrix_sync(x, a, {lengths[0]}); wmma::load_matrix_sync(y, b, {lengths[1]});"
        f"wmma::load_matrix_sync(z, c, {lengths[2]}, wmma::mem_{order_d}_major); wmma::mma_sync(z, x, y, z);"
        f"for (int i = 0; i < z.num_elements; ++i) z.x[i] = z.x[i] + z.x[i];"
        f"wmma::store_matrix_sync(d, z, {lengths[2]}, wmma::mem_{order_d}_major);",
        {"a": stored(a, order_a, 8), "b": stored(b, order_b, 8), "c": held_c},
        {"d": (held_c.size, words)},
        parameters=f"const {element}* a, const {element}* b, const {sums}* c, {sums}* d",
        args=("a", "b", "c", "d"),
        before="#include <mma.h>\n#include <cuda_bf16.h>\nusing namespace nvcuda;",
    ).outputs["d"]
    tile = result.reshape(held_c.shape)[:, : n if order_d == "row" else m]
    assert np.array_equal(tile if order_d == "row" else tile.T, 2 * (a @ b + c))


@pytest.mark.parametrize(
    ("lda", "message"), [("16 + 8 * (threadIdx.x % 2)", "stride of a WMMA tile differs within a warp"), ("16", "")]
)
def test_a_stride_that_differs_within_a_warp_is_a_fault(lda: str, message: str) -> None:
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

    if not message:
        one()
        return
    with pytest.raises(KernelFaultError, match=message):
        one()
