"""Matrix products: in registers, WMMA in every format, mma.sync in inline PTX, wgmma."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.convert import E4M3_VALUES, E5M2_VALUES
from tests.emulator.corpus.entry import F16, F32, F64, I8, I32, U8, U16, U32, Args, Out, Rng, cuda


def small(rng: Rng, *shape: int, limit: int = 8) -> NDArray[np.float32]:
    """Return integers and quarters with sums of products that are exact in float32 and in every 8-bit format."""
    return (rng.integers(-limit, limit + 1, shape) / 4).astype(F32)


def bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits of bfloat16, of numbers that it holds."""
    return (np.ascontiguousarray(x, F32).view(U32) >> 16).astype(U16)


def coded(x: NDArray[Any], values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the codes of numbers that an 8-bit format holds."""
    finite = np.isfinite(values)
    codes = np.flatnonzero(finite)
    order = np.argsort(values[finite], kind="stable")
    result = codes[order][np.searchsorted(values[finite][order], x)]
    assert (values[result] == x).all()
    return result.astype(U8)


@cuda(
    r"""
extern "C" __global__ void k(const float* a, const float* b, float* y) {
  __shared__ float as[8][32], bs[8][32];
  float sum[4][4] = {};
  int t = threadIdx.x, r = t / 8 * 4, c = t % 8 * 4;
  for (int start = 0; start < 32; start += 8) {
    for (int j = 0; j < 4; ++j) {
      as[(t * 4 + j) % 8][(t * 4 + j) / 8] = a[(t * 4 + j) / 8 * 32 + start + (t * 4 + j) % 8];
    }
    reinterpret_cast<float4*>(&bs[0][0])[t] = reinterpret_cast<const float4*>(b + start * 32)[t];
    __syncthreads();
    for (int i = 0; i < 8; ++i) {
      float4 u = *reinterpret_cast<float4*>(&as[i][r]), v = *reinterpret_cast<float4*>(&bs[i][c]);
      float us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
      #pragma unroll
      for (int p = 0; p < 4; ++p)
        #pragma unroll
        for (int q = 0; q < 4; ++q) sum[p][q] += us[p] * vs[q];
    }
    __syncthreads();
  }
  for (int p = 0; p < 4; ++p)
    *reinterpret_cast<float4*>(y + (r + p) * 32 + c) = make_float4(sum[p][0], sum[p][1], sum[p][2], sum[p][3]);
}""",
    block=64,
)
def matmul_register_tiles(rng: Rng) -> Args:
    a, b = small(rng, 32, 32), small(rng, 32, 32)
    return a, b, Out(a @ b)


def _wmma(types: str, into: str, out: str, m: int, n: int, depth: int, *, b_layout: str = "row_major") -> str:
    b_stride, b_at = (2 * n, f"i * {depth} * {2 * n} + blockIdx.x * {n}")
    if b_layout == "col_major":
        b_stride, b_at = 2 * depth, f"blockIdx.x * {n} * {2 * depth} + i * {depth}"
    return rf"""
#include <mma.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
using namespace nvcuda;
extern "C" __global__ void k(const {into}* a, const {into}* b, {out}* y) {{
  wmma::fragment<wmma::matrix_a, {m}, {n}, {depth}, {types}, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, {m}, {n}, {depth}, {types}, wmma::{b_layout}> fb;
  wmma::fragment<wmma::accumulator, {m}, {n}, {depth}, {out}> sum;
  wmma::fill_fragment(sum, ({out})0);
  for (int i = 0; i < 2; ++i) {{
    wmma::load_matrix_sync(fa, a + blockIdx.y * {m} * {2 * depth} + i * {depth}, {2 * depth});
    wmma::load_matrix_sync(fb, b + {b_at}, {b_stride});
    wmma::mma_sync(sum, fa, fb, sum);
  }}
  for (int i = 0; i < sum.num_elements; ++i) sum.x[i] = sum.x[i] + sum.x[i];
  wmma::store_matrix_sync(y + blockIdx.y * {m} * {2 * n} + blockIdx.x * {n}, sum, {2 * n}, wmma::mem_row_major);
}}"""


def _wmma_args(a: Any, b: Any, convert: Any, out: Any = F32, turned: bool = False) -> Args:
    y = 2 * (a.astype(F64) @ b.astype(F64))
    supplied = np.ascontiguousarray(b.T) if turned else b
    return convert(a), convert(supplied), Out(y.astype(out))


@cuda(_wmma("half", "half", "float", 16, 16, 16), grid=(2, 2))
def wmma_f16(rng: Rng) -> Args:
    return _wmma_args(small(rng, 32, 32), small(rng, 32, 32), lambda x: x.astype(F16))


@cuda(_wmma("half", "half", "half", 16, 16, 16, b_layout="col_major"), grid=(2, 2))
def wmma_f16_accumulated_in_f16(rng: Rng) -> Args:
    return _wmma_args(small(rng, 32, 32), small(rng, 32, 32), lambda x: x.astype(F16), F16, True)


@cuda(_wmma("half", "half", "float", 32, 8, 16), grid=(2, 2))
def wmma_f16_m32n8(rng: Rng) -> Args:
    return _wmma_args(small(rng, 64, 32), small(rng, 32, 16), lambda x: x.astype(F16))


@cuda(_wmma("half", "half", "float", 8, 32, 16, b_layout="col_major"), grid=(2, 2))
def wmma_f16_m8n32(rng: Rng) -> Args:
    return _wmma_args(small(rng, 16, 32), small(rng, 32, 64), lambda x: x.astype(F16), turned=True)


@cuda(_wmma("__nv_bfloat16", "__nv_bfloat16", "float", 16, 16, 16), grid=(2, 2))
def wmma_bf16(rng: Rng) -> Args:
    return _wmma_args(small(rng, 32, 32), small(rng, 32, 32), bf16)


@cuda(_wmma("wmma::precision::tf32", "float", "float", 16, 16, 8), grid=(2, 2))
def wmma_tf32(rng: Rng) -> Args:
    return _wmma_args(small(rng, 32, 16), small(rng, 16, 32), lambda x: x)


@cuda(_wmma("signed char", "signed char", "int", 16, 16, 16, b_layout="col_major"), grid=(2, 2))
def wmma_s8(rng: Rng) -> Args:
    a, b = (rng.integers(-128, 128, (32, 32)) for _ in range(2))
    return _wmma_args(a, b, lambda x: x.astype(I8), I32, True)


@cuda(_wmma("unsigned char", "unsigned char", "int", 16, 16, 16), grid=(2, 2))
def wmma_u8(rng: Rng) -> Args:
    a, b = (rng.integers(0, 256, (32, 32)) for _ in range(2))
    return _wmma_args(a, b, lambda x: x.astype(U8), I32)


@cuda(_wmma("double", "double", "double", 8, 8, 4, b_layout="col_major"), grid=(2, 2))
def wmma_f64(rng: Rng) -> Args:
    return _wmma_args(small(rng, 16, 8), small(rng, 8, 16), lambda x: x.astype(F64), F64, True)


@cuda(
    r"""
#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void k(const half* a, const half* b, float* y, int lda, int ldb) {
  __shared__ __align__(32) half as[16 * 24];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // each block has its own stride of A
  int stride = lda + 8 * blockIdx.x;
  for (int i = threadIdx.x; i < 256;
  i += blockDim.x) as[i / 16 * 24 + i % 16] = a[blockIdx.x * 4096 + i / 16 * stride + i % 16];
  __syncthreads();
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa, ga;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 1.f);
  wmma::load_matrix_sync(fa, as, 24);
  wmma::load_matrix_sync(ga, a + blockIdx.x * 4096, stride);
  wmma::load_matrix_sync(fb, b + warp * 16, ldb);
  wmma::mma_sync(sum, fa, fb, sum);
  wmma::mma_sync(sum, ga, fb, sum);
  wmma::store_matrix_sync(y + (blockIdx.x * 2 + warp) * 256, sum, 16, wmma::mem_col_major);
}""",
    grid=3,
    block=64,
)
def wmma_strides_that_differ_between_blocks(rng: Rng) -> Args:
    buffer, b = small(rng, 3, 4096), small(rng, 16, 40)
    y = np.empty((3, 2, 16, 16), F32)
    for block in range(3):
        stride = 16 + 8 * block
        a = np.stack([buffer[block, r * stride : r * stride + 16] for r in range(16)])
        for warp in range(2):
            y[block, warp] = (1 + 2 * (a @ b[:, warp * 16 : warp * 16 + 16])).T
    return buffer.astype(F16), b.astype(F16), Out(y), I32(16), I32(40)


def _mma(
    name: str, c_type: str, letter: str, a_words: int, b_words: int, c_words: int, load: str, word: str = "unsigned"
) -> str:
    word_letter = "d" if word == "double" else "r"
    total = c_words + a_words + b_words
    d = ", ".join(f"%{i}" for i in range(c_words))
    a = ", ".join(f"%{i}" for i in range(c_words, c_words + a_words))
    b = ", ".join(f"%{i}" for i in range(c_words + a_words, total))
    outputs = ", ".join(f'"+{letter}"(c[{i}])' for i in range(c_words))
    inputs = ", ".join(
        [f'"{word_letter}"(a[{i}])' for i in range(a_words)] + [f'"{word_letter}"(b[{i}])' for i in range(b_words)]
    )
    return rf"""
extern "C" __global__ void k(const {word}* x, const {word}* w, const {c_type}* z, {c_type}* y) {{
  int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  {word} a[{a_words}], b[{b_words}];
  {c_type} c[{c_words}];
  {load}
  asm volatile("{name} {{{d}}}, {{{a}}}, {{{b}}}, {{{d}}};" : {outputs} : {inputs});
  #pragma unroll
  for (int i = 0; i < {c_words}; ++i) y[OUT(i)] = c[i];
}}"""


# words of a row-major A (16 rows of 16 or 32 bytes) and of B stored by columns (8 columns), as the PTX ISA gives them
_ROW8 = r"""
  #define OUT(i) ((g + i / 2 * 8) * 8 + t * 2 + i % 2)
  a[0] = x[g * 8 + t]; a[1] = x[(g + 8) * 8 + t]; a[2] = x[g * 8 + t + 4]; a[3] = x[(g + 8) * 8 + t + 4];
  b[0] = w[g * 8 + t]; b[1] = w[g * 8 + t + 4];
  for (int i = 0; i < 4; ++i) c[i] = z[OUT(i)];
"""
_ROW4 = r"""
  #define OUT(i) ((g + i / 2 * 8) * 8 + t * 2 + i % 2)
  a[0] = x[g * 4 + t]; a[1] = x[(g + 8) * 4 + t];
  b[0] = w[g * 4 + t];
  for (int i = 0; i < 4; ++i) c[i] = z[OUT(i)];
"""


def _mma_args(a: Any, b: Any, convert: Any, c: Any) -> Args:
    y = a.astype(F64) @ b.astype(F64) + c
    words = [np.ascontiguousarray(convert(m)).view(U32) for m in (a, np.ascontiguousarray(b.T))]
    return (*words, c, Out(y.astype(c.dtype)))


_F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


@cuda(_mma(_F16, "float", "f", 4, 2, 4, _ROW8))
def mma_f16(rng: Rng) -> Args:
    return _mma_args(small(rng, 16, 16), small(rng, 16, 8), lambda x: x.astype(F16), small(rng, 16, 8))


@cuda(_mma("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "float", "f", 2, 1, 4, _ROW4))
def mma_f16_k8(rng: Rng) -> Args:
    return _mma_args(small(rng, 16, 8), small(rng, 8, 8), lambda x: x.astype(F16), small(rng, 16, 8))


@cuda(_mma(_F16.replace("f16.f16", "bf16.bf16"), "float", "f", 4, 2, 4, _ROW8))
def mma_bf16(rng: Rng) -> Args:
    return _mma_args(small(rng, 16, 16), small(rng, 16, 8), bf16, small(rng, 16, 8))


@cuda(_mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "float", "f", 4, 2, 4, _ROW8))
def mma_tf32(rng: Rng) -> Args:
    return _mma_args(small(rng, 16, 8), small(rng, 8, 8), lambda x: x, small(rng, 16, 8))


@cuda(_mma("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", "float", "f", 2, 1, 4, _ROW4))
def mma_tf32_k4(rng: Rng) -> Args:
    return _mma_args(small(rng, 16, 4), small(rng, 4, 8), lambda x: x, small(rng, 16, 8))


@cuda(_mma("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "int", "r", 4, 2, 4, _ROW8))
def mma_s8(rng: Rng) -> Args:
    a, b = rng.integers(-128, 128, (16, 32)), rng.integers(-128, 128, (32, 8))
    return _mma_args(a, b, lambda x: x.astype(I8), rng.integers(-(2**20), 2**20, (16, 8), I32))


@cuda(_mma("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32", "int", "r", 2, 1, 4, _ROW4))
def mma_u8_s8_k16(rng: Rng) -> Args:
    a, b = rng.integers(0, 256, (16, 16)), rng.integers(-128, 128, (16, 8))
    c = rng.integers(-(2**20), 2**20, (16, 8), I32)
    words = [a.astype(U8).view(U32), np.ascontiguousarray(b.T).astype(I8).view(U32)]
    return (*words, c, Out((a @ b + c).astype(I32)))


@cuda(_mma("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", "int", "r", 4, 2, 4, _ROW8))
def mma_s8_saturated(rng: Rng) -> Args:
    a, b = rng.integers(100, 128, (16, 32)), rng.integers(-128, 128, (32, 8))
    c = rng.choice([-(2**31), 2**31 - 1], (16, 8)).astype(I32)
    words = [a.astype(I8).view(U32), np.ascontiguousarray(b.T).astype(I8).view(U32)]
    return (*words, c, Out(np.clip(a @ b + c.astype(np.int64), -(2**31), 2**31 - 1).astype(I32)))


@cuda(_mma("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "float", "f", 4, 2, 4, _ROW8))
def mma_e4m3(rng: Rng) -> Args:
    a, b = small(rng, 16, 32), small(rng, 32, 8)
    return _mma_args(a, b, lambda x: coded(x, E4M3_VALUES), small(rng, 16, 8))


@cuda(_mma("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32", "float", "f", 4, 2, 4, _ROW8))
def mma_e5m2_e4m3(rng: Rng) -> Args:
    a, b, c = small(rng, 16, 32, limit=4), small(rng, 32, 8), small(rng, 16, 8)
    words = [coded(a, E5M2_VALUES).view(U32), coded(np.ascontiguousarray(b.T), E4M3_VALUES).view(U32)]
    return (*words, c, Out(a @ b + c))


@cuda(
    _mma(
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
        "double",
        "d",
        1,
        1,
        2,
        r"""
  #define OUT(i) (g * 8 + t * 2 + i)
  a[0] = x[g * 4 + t];
  b[0] = w[g * 4 + t];
  for (int i = 0; i < 2; ++i) c[i] = z[OUT(i)];
""",
        "double",
    )
)
def mma_f64(rng: Rng) -> Args:
    a, b, c = (small(rng, *s).astype(F64) for s in ((8, 4), (4, 8), (8, 8)))
    return a, np.ascontiguousarray(b.T), c, Out(a @ b + c)


@cuda(
    r"""
#include <cuda_fp16.h>
extern "C" __global__ void k(const unsigned* x, const unsigned* w, unsigned* y) {
  int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  unsigned a[4] = {x[g * 8 + t], x[(g + 8) * 8 + t], x[g * 8 + t + 4], x[(g + 8) * 8 + t + 4]};
  unsigned b[2] = {w[g * 8 + t], w[g * 8 + t + 4]}, c[2] = {0, 0};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
    : "+r"(c[0]), "+r"(c[1]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  y[g * 4 + t] = c[0];
  y[(g + 8) * 4 + t] = c[1];
}"""
)
def mma_f16_accumulated_in_f16(rng: Rng) -> Args:
    a, b = small(rng, 16, 16).astype(F16), small(rng, 16, 8).astype(F16)
    y = (a.astype(F32) @ b.astype(F32)).astype(F16)
    return a.view(U32), np.ascontiguousarray(b.T).view(U32), Out(y.view(U32))


@cuda(
    r"""
#include <cuda_fp16.h>
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const uint4* a, const uint4* b, float* y) {
  __shared__ uint4 as[16][2], bs[16][1];
  int lane = threadIdx.x;
  as[lane / 2][lane % 2] = a[lane];
  if (lane < 16) bs[lane][0] = b[lane];
  __syncthreads();
  unsigned ra[4], rb[2];
  float c[4] = {0, 0, 0, 0};
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(at(&as[lane % 16][lane / 16])));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
    : "=r"(rb[0]), "=r"(rb[1]) : "r"(at(&bs[lane % 16][0])));
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]),
      "r"(rb[1]));
  for (int i = 0; i < 4; ++i) y[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}"""
)
def mma_with_ldmatrix_transposed(rng: Rng) -> Args:
    a, b = small(rng, 16, 16), small(rng, 16, 8)
    return a.astype(F16), b.astype(F16), Out(a @ b)


@cuda(
    r"""
extern "C" __global__ void k(const unsigned* x, unsigned* y) {
  __shared__ __align__(16) unsigned s[4 * 32];
  int lane = threadIdx.x;
  for (int j = 0; j < 4; ++j) s[j * 32 + lane] = x[j * 32 + lane];
  __syncwarp();
  unsigned r[4];
  // a generic address, as some samples have it
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(s + 4 * lane));
  unsigned moved;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(r[1]));
  for (int j = 0; j < 4; ++j) y[j * 32 + lane] = j == 1 ? moved : r[j];
}"""
)
def ldmatrix_at_a_generic_address(rng: Rng) -> Args:
    x = rng.integers(0, 65536, (4, 8, 8)).astype(U16)
    y = x.copy()
    y[1] = x[1].T
    return x.view(U32), Out(y.view(U32))


@cuda(
    r"""
extern "C" __global__ void k(const int* a, const int* b, int* y, unsigned* z, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  y[i] = __dp4a(a[i], b[i], 1000);
  z[i] = __dp4a((unsigned)a[i], (unsigned)b[i], 0u);
  y[i + n] = __dp2a_lo(a[i], b[i], -5);
  y[i + 2 * n] = __dp2a_hi(a[i], b[i], 5);
}""",
    block=64,
)
def dot_products_of_bytes(rng: Rng) -> Args:
    a, b = (rng.integers(-(2**31), 2**31, 50).astype(I32) for _ in range(2))
    x, w = a.view(I8).reshape(50, 4).astype(I32), b.view(I8).reshape(50, 4).astype(I32)
    pairs = a.view(np.int16).reshape(50, 2).astype(I32)
    y = [(x * w).sum(1) + 1000, (pairs * w[:, :2]).sum(1) - 5, (pairs * w[:, 2:]).sum(1) + 5]
    z = (a.view(U8).reshape(50, 4).astype(U32) * b.view(U8).reshape(50, 4)).sum(1, dtype=U32)
    return a, b, Out(np.concatenate(y).astype(I32)), Out(z), I32(50)
