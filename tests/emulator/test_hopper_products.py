"""wgmma on the emulator against NumPy, its operands loaded by tensor copies."""

from __future__ import annotations

import numpy as np
import pytest

from greenfast.emulator.grid import run_grid
from greenfast.emulator.instructions.convert import E4M3_VALUES
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.ptx.syntax import Instruction
from greenfast.spec.errors import UnsupportedError
from greenfast.spec.kernel import Launch
from tests.emulator.hopper import D_STORE, run, tensor_map, wgmma

RNG = np.random.default_rng(3)


def codes(*shape: int) -> np.ndarray:
    """Random E4M3 codes of finite numbers up to 15."""
    return (RNG.integers(0, 2, shape) * 128 + RNG.integers(0, 88, shape)).astype(np.uint8)


GEMM = (
    """
extern __shared__ __align__(1024) u8 s[];
__shared__ u64 bar;
u8 *sa = s, *sb = s + 64 * K;
if (threadIdx.x == 0) { init(&bar, 1); init_fence(); }
__syncthreads();
if (threadIdx.x == 0) {
  expect(&bar, (64 + N) * K);
  for (int k = 0; k < K; k += W) { load(sa + 64 * k, &ma, &bar, k, 0); load(sb + N * k, &mb, &bar, k, 0); }
}
wait(&bar, 0);
float d[N / 2];
for (int i = 0; i < N / 2; ++i) d[i] = 0;
mma_fence();
#pragma unroll
for (int k = 0; k < K; k += 32)
  mma(d, descriptor(sa + k / W * 64 * W + k % W, 16, 8 * W, W),
    descriptor(sb + k / W * N * W + k % W, 16, 8 * W, W), k > 0);
mma_commit();
mma_wait<0>();
"""
    + D_STORE
)


@pytest.mark.parametrize(("k", "width"), [(64, 64), (128, 128), (128, 64), (64, 32)])
@pytest.mark.parametrize("n", [8, 64, 128])
def test_tensor_copy_and_e4m3_product(k: int, width: int, n: int) -> None:
    a, b = codes(64, k), codes(n, k)
    result = run(
        GEMM,
        {"a": a, "b": b},
        {"y": ((64, n), "float32")},
        parameters="const __grid_constant__ CUtensorMap ma, const __grid_constant__ CUtensorMap mb, float* y",
        args=(tensor_map("a", a, (64, width), width), tensor_map("b", b, (n, width), width), "y"),
        before=f"constexpr int K = {k}, N = {n}, W = {width};\n" + wgmma("mma", n, "k32", "f32.e4m3.e4m3"),
        dynamic=(64 + n) * k,
        seed=k + n,
    )
    assert np.allclose(result.outputs["y"], E4M3_VALUES[a] @ E4M3_VALUES[b].T, rtol=1e-5, atol=1e-3)
    assert result.counts.matrix_flops == 2 * 64 * n * k


def direct(body: str, n: int, left: np.ndarray, right: np.ndarray, before: str, out: str = "float32") -> np.ndarray:
    """Return the output of a one-block kernel with 64 x n outputs for two arrays."""
    kind = "int" if out == "int32" else "float"
    result = run(
        "extern __shared__ __align__(1024) u8 s[];\n" + body + D_STORE,
        {"a": left, "b": right},
        {"y": ((64, n), out)},
        parameters=f"const u8* a, const u8* b, {kind}* y",
        args=("a", "b", "y"),
        before=f"constexpr int N = {n};\n" + before,
        dynamic=32768,
    )
    return result.outputs["y"]


# Core matrices of 8 rows by 16 bytes, K-major and not swizzled: side by side along K, then along rows.
PLAIN = """
u8 *sa = s, *sb = s + 64 * 32;
for (int i = threadIdx.x; i < (64 + N) * 32; i += 128) {
  int row = i / 32, k = i % 32;
  bool is_a = row < 64;
  if (!is_a) row -= 64;
  (is_a ? sa : sb)[row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16] = (is_a ? a : b)[row * 32 + k];
}
proxy_fence();
__syncthreads();
"""
MULTIPLY = """
mma_fence();
mma(d, {a}, {b}, {scale});
mma_commit();
mma_wait<0>();
"""


def test_8_bit_integers_without_swizzle_accumulate() -> None:
    a, b = RNG.integers(-128, 128, (64, 32)).astype(np.int8), RNG.integers(-128, 128, (24, 32)).astype(np.int8)
    multiply = MULTIPLY.format(a="descriptor(sa, 128, 256, 0)", b="descriptor(sb, 128, 256, 0)", scale="1")
    body = PLAIN + "int d[N / 2]; for (int i = 0; i < N / 2; ++i) d[i] = 1000 + i;" + multiply
    result = direct(body, 24, a, b, wgmma("mma", 24, "k32", "s32.s8.s8", tail=""), "int32")
    row, column = np.meshgrid(np.arange(64), np.arange(24), indexing="ij")
    register = column // 8 * 4 + row // 8 % 2 * 2 + column % 2
    assert np.array_equal(result, a.astype(np.int32) @ b.T.astype(np.int32) + 1000 + register)


def test_a_from_registers_and_negated() -> None:
    a, b = codes(64, 32), codes(16, 32)
    load_a = """
u32 r[4];
for (int n = 0; n < 4; ++n) {
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + n % 2 * 8;
  r[n] = *(const u32*)(a + row * 32 + threadIdx.x % 4 * 4 + n / 2 * 16);
}
float d[N / 2];
"""
    multiply = MULTIPLY.format(a="r", b="descriptor(sb, 128, 256, 0)", scale="0")
    before = wgmma("mma", 16, "k32", "f32.e4m3.e4m3", from_registers=True, tail=", -1, 1")
    result = direct(PLAIN + load_a + multiply, 16, a, b, before)
    assert np.allclose(result, -(E4M3_VALUES[a] @ E4M3_VALUES[b].T), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kinds", ["e5m2.e5m2", "e4m3.e5m2"])
def test_other_8_bit_floats(kinds: str) -> None:
    e5m2 = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
    values = [E4M3_VALUES if kind == "e4m3" else e5m2 for kind in kinds.split(".")]
    a, b = codes(64, 32), codes(8, 32)
    multiply = MULTIPLY.format(a="descriptor(sa, 128, 256, 0)", b="descriptor(sb, 128, 256, 0)", scale="0")
    result = direct(PLAIN + "float d[N / 2];" + multiply, 8, a, b, wgmma("mma", 8, "k32", f"f32.{kinds}"))
    assert np.allclose(result, values[0][a] @ values[1][b].T, rtol=1e-5, atol=1e-3)


HALVES_STORE = """
for (int r = 0; r < N / 4; ++r)  // two neighbours of a row in each register
  for (int half = 0; half < 2; ++half) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + r % 2 * 8, column = r / 2 * 8 + threadIdx.x % 4 * 2 + half;
    y[row * N + column] = (unsigned short)(d[r] >> 16 * half);
  }
"""


@pytest.mark.parametrize(("n", "shape", "kind"), [(8, "k16", "f16"), (24, "k16", "f16"), (16, "k32", "e4m3")])
def test_sums_in_float16(n: int, shape: str, kind: str) -> None:
    """The second product adds to the first; each instruction rounds its sums. Large ones become infinite."""
    a, b = codes(64, 32), codes(n, 32)
    left, right = E4M3_VALUES[a], E4M3_VALUES[b]
    if kind == "f16":
        left, right = (RNG.standard_normal((m, 16)).astype(np.float16) for m in (64, n))
        left[5] *= 250
        right[3] *= 250
        a, b = left.view(np.uint8), right.view(np.uint8)
    tail = ", 1, 1, 0, 0" if kind == "f16" else ", 1, 1"
    product = "mma(d, descriptor(sa, 128, 256, 0), descriptor(sb, 128, 256, 0), {});"
    body = PLAIN + f"u32 d[N / 4]; mma_fence(); {product.format(0)} {product.format(1)} mma_commit(); mma_wait<0>();"
    result = run(
        "extern __shared__ __align__(1024) u8 s[];\n" + body + HALVES_STORE,
        {"a": a, "b": b},
        {"y": ((64, n), "uint16")},
        before=f"constexpr int N = {n};\n" + wgmma("mma", n, shape, f"f16.{kind}.{kind}", tail=tail),
        dynamic=32768,
    )
    exact = left.astype(np.float32) @ right.astype(np.float32).T
    with np.errstate(over="ignore"):
        once = exact.astype(np.float16)
        expected = (once.astype(np.float32) + exact).astype(np.float16)
    got = result.outputs["y"].view(np.float16)
    np.testing.assert_array_max_ulp(got, expected, 1)  # NumPy's sums may be in another order
    assert (got == expected).mean() > 0.99
    assert np.isinf(got).any() == (kind == "f16")


def test_moves_of_packed_sums_before_the_wait() -> None:
    """Compilers unpack sums in flight and pack them again; another use of a half is a fault."""
    left, right = (RNG.standard_normal((m, 16)).astype(np.float16) for m in (64, 8))
    moves = """unsigned short h[4];
asm volatile("mov.b32 {%0, %1}, %2;" : "=h"(h[0]), "=h"(h[1]) : "r"(d[0]));
asm volatile("mov.b32 {%0, %1}, %2;" : "=h"(h[2]), "=h"(h[3]) : "r"(d[1]));
USE
mma_wait<0>();
asm volatile("mov.b32 %0, {%1, %2};" : "=r"(d[0]) : "h"(h[0]), "h"(h[1]));
asm volatile("mov.b32 %0, {%1, %2};" : "=r"(d[1]) : "h"(h[2]), "h"(h[3]));
"""
    product = "mma(d, descriptor(sa, 128, 256, 0), descriptor(sb, 128, 256, 0), 0);"
    body = PLAIN + f"u32 d[N / 4]; mma_fence(); {product} mma_commit(); {moves}" + HALVES_STORE

    def run_with(use: str) -> np.ndarray:
        result = run(
            "extern __shared__ __align__(1024) u8 s[];\n" + body.replace("USE", use),
            {"a": left.view(np.uint8), "b": right.view(np.uint8)},
            {"y": ((64, 8), "uint16")},
            before="constexpr int N = 8;\n" + wgmma("mma", 8, "k16", "f16.f16.f16", tail=", 1, 1, 0, 0"),
            dynamic=32768,
        )
        return result.outputs["y"].view(np.float16)

    expected = (left.astype(np.float32) @ right.astype(np.float32).T).astype(np.float16)
    np.testing.assert_array_max_ulp(run_with(""), expected, 1)
    with pytest.raises(KernelFaultError, match=r"read of a wgmma's accumulator before a wgmma\.wait_group"):
        run_with("y[threadIdx.x] = h[1];")


TURNED = """
__shared__ u64 bar;
u8 *sa = s, *sb = s + 64 * 128;
if (threadIdx.x == 0) { init(&bar, 1); init_fence(); }
__syncthreads();
if (threadIdx.x == 0) {
  expect(&bar, 64 * 128 + N * 64 * 2);
  load(sa, &ma, &bar, 0, 0);
  for (int n = 0; n < N; n += W / 2) load(sb + n * 128, &mb, &bar, n, 0);
}
wait(&bar, 0);
float d[N / 2];
mma_fence();
#pragma unroll
for (int k = 0; k < 64; k += 16)
  mma(d, descriptor(sa + 2 * k, 16, 1024, 128), descriptor(sb + k * W, 64 * W, 8 * W, W), k > 0);
mma_commit();
mma_wait<0>();
"""


@pytest.mark.parametrize(
    ("kind", "width", "n"), [("f16", 128, 128), ("f16", 64, 64), ("bf16", 128, 64), ("f16", 32, 32)]
)
def test_16_bit_product_with_transposed_b(kind: str, width: int, n: int) -> None:
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((64, 64), (64, n)))
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else x.astype(np.float16) for x in (a, b)]
    result = run(
        "extern __shared__ __align__(1024) u8 s[];" + TURNED + D_STORE,
        {"a": bits[0], "b": bits[1]},
        {"y": ((64, n), "float32")},
        parameters="const __grid_constant__ CUtensorMap ma, const __grid_constant__ CUtensorMap mb, float* y",
        args=(tensor_map("a", bits[0], (64, 64), 128), tensor_map("b", bits[1], (64, width // 2), width), "y"),
        before=f"constexpr int N = {n}, W = {width};\n"
        + wgmma("mma", n, "k16", f"f32.{kind}.{kind}", tail=", 1, 1, 0, 1"),
        dynamic=64 * 128 + 64 * n * 2,
    )
    exact = [(x.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else x.astype(np.float32) for x in bits]
    assert np.allclose(result.outputs["y"], exact[0] @ exact[1], rtol=1e-4, atol=1e-4)


RIGHT = (
    PLAIN
    + "float d[N / 2];"
    + MULTIPLY.format(a="descriptor(sa, 128, 256, 0)", b="descriptor(sb, 128, 256, 0)", scale="0")
)
# Each warp writes its own 16 rows of A, as FlashAttention-3 does with the weights of V.
OWN_ROWS = """
u8 *sa = s, *sb = s + 64 * 32;
for (int i = threadIdx.x; i < N * 32; i += 128) {
  int row = i / 32, k = i % 32;
  sb[row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16] = b[i];
}
proxy_fence();
__syncthreads();
for (int i = threadIdx.x % 32; i < 16 * 32; i += 32) {
  int row = i / 32 + WARP * 16, k = i % 32;
  sa[row / 8 * 256 + k / 16 * 128 + row % 8 * 16 + k % 16] = a[row * 32 + k];
}
proxy_fence();
__syncwarp();
float d[N / 2];
""" + MULTIPLY.format(a="descriptor(sa, 128, 256, 0)", b="descriptor(sb, 128, 256, 0)", scale="0")


def test_a_warp_reads_its_own_rows_of_a() -> None:
    a, b = codes(64, 32), codes(8, 32)
    before = wgmma("mma", 8, "k32", "f32.e4m3.e4m3")
    result = direct(OWN_ROWS.replace("WARP", "threadIdx.x / 32"), 8, a, b, before)
    assert np.allclose(result, E4M3_VALUES[a] @ E4M3_VALUES[b].T, rtol=1e-5, atol=1e-3)
    with pytest.raises(KernelFaultError, match=r"a data race on .* this read and the write .*\(in: wgmma\.mma_async"):
        direct(OWN_ROWS.replace("WARP", "(threadIdx.x / 32 + 1) % 4"), 8, a, b, before)


def test_messages_shorten_long_lists_of_registers() -> None:
    accumulators = ",".join(f"%f{n}" for n in range(64))
    i = Instruction("wgmma", (), (), None, None, f"wgmma.mma_async {{{accumulators}}}, {{%r0, %r1}}, %rd1, p;")
    assert i.short_text == "wgmma.mma_async {%f0, ..., %f63}, {%r0, %r1}, %rd1, p;"


ADD = 'd[0] = 1; asm volatile("add.f32 %0, %0, %0;" : "+f"(d[0]));'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mma_fence();", "", r"a wgmma with no wgmma\.fence before it"),
        ("mma_fence();", "mma_fence(); " + ADD, r"a wgmma on %f\d+: written with no wgmma\.fence since"),
        ("mma_commit();\n", "", r"read of a wgmma's accumulator before a wgmma\.wait_group"),
        ("mma_wait<0>();", "mma_wait<1>();", r"read of a wgmma's accumulator before a wgmma\.wait_group"),
        ("mma_wait<0>();", "", r"read of a wgmma's accumulator before a wgmma\.wait_group"),
        ("mma_wait<0>();", "sa[7] = 1; mma_wait<0>();", r"1-byte write to where an asynchronous operation"),
        ("__syncthreads();\n", "", r"a data race on .* this read and the write .*\(in: wgmma\.mma_async"),
        (
            "proxy_fence();\n__syncthreads();",
            "__syncthreads(); if (threadIdx.x < 96) proxy_fence();",
            r"read of what a store wrote with no fence\.proxy",
        ),
        ("proxy_fence();", "", r"wgmma operand read of what a store wrote with no fence\.proxy\.async since"),
        ("mma(d,", "if (threadIdx.x < 96) mma(d,", r"deadlock.*of warp 0 wait at.*for the rest of the warpgroup"),
        ("descriptor(sb,", "descriptor(sb + threadIdx.x / 32 * 256,", r"threads of a warpgroup differ in a matrix"),
        ("descriptor(sb, 128, 256, 0)", "descriptor(sb, 32752, 256, 0)", r"descriptor that reaches byte \d+ of 32768"),
        ("descriptor(sb, 128, 256, 0)", "descriptor(sb + 8192, 128, 256, 0)", r"read of an element that nothing"),
    ],
)
def test_wrong_products(old: str, new: str, message: str) -> None:
    a, b = codes(64, 32), codes(8, 32)
    before = wgmma("mma", 8, "k32", "f32.e4m3.e4m3")
    assert np.allclose(direct(RIGHT, 8, a, b, before), E4M3_VALUES[a] @ E4M3_VALUES[b].T, rtol=1e-5, atol=1e-3)
    assert old in RIGHT
    with pytest.raises(KernelFaultError, match=message):
        direct(RIGHT.replace(old, new, 1), 8, a, b, before)


def test_a_base_offset_is_no_fault_of_the_kernel() -> None:
    with pytest.raises(UnsupportedError, match="base offset, unknown to the emulator"):
        direct(
            RIGHT.replace("mma(d, ", "mma(d, 1ull << 49 | ", 1),
            8,
            codes(64, 32),
            codes(8, 32),
            wgmma("mma", 8, "k32", "f32.e4m3.e4m3"),
        )


def test_a_register_of_a_may_be_read_but_not_written_under_way() -> None:
    read = 'asm volatile("{.reg .b32 t; add.u32 t, %0, 1;}" :: "r"(r[0]));'
    body = (
        PLAIN
        + "u32 r[4] = {1, 2, 3, 4}; float d[N / 2];"
        + MULTIPLY.format(a="r", b="descriptor(sb, 128, 256, 0)", scale="0")
    )
    before = wgmma("mma", 8, "k32", "f32.e4m3.e4m3", from_registers=True)
    a, b = codes(64, 32), codes(8, 32)
    direct(body.replace("mma_wait", read + "mma_wait"), 8, a, b, before)
    write = 'asm volatile("add.u32 %0, %0, 1;" : "+r"(r[0]));'
    with pytest.raises(KernelFaultError, match=r"write to a register that a wgmma in flight uses"):
        direct(body.replace("mma_wait", write + "mma_wait"), 8, a, b, before)


def test_a_wait_that_leaves_a_group_under_way() -> None:
    a, b = codes(64, 32), codes(8, 32)
    # The second product differs from the first: ptxas 13.0 removes the second of two equal ones, and its accumulators
    # are then read from unrelated registers.
    body = (
        PLAIN
        + """
    float d[N / 2], e[N / 2];
    mma_fence();
    mma(e, descriptor(sa, 128, 256, 0), descriptor(sb, 128, 256, 0), 0);
    mma_commit();
    mma_negated(d, descriptor(sa, 128, 256, 0), descriptor(sb, 128, 256, 0), 0);
    mma_commit();
    mma_wait<1>();
    for (int i = 0; i < N / 2; ++i) asm volatile("add.f32 %0, %0, %0;" : "+f"(e[i]));
    mma_wait<0>();
    for (int i = 0; i < N / 2; ++i) d[i] += e[i];
    """
    )
    before = wgmma("mma", 8, "k32", "f32.e4m3.e4m3")
    before += wgmma("mma_negated", 8, "k32", "f32.e4m3.e4m3", tail=", 1, -1")
    expected = (2 - 1) * (E4M3_VALUES[a] @ E4M3_VALUES[b].T)
    assert np.allclose(direct(body, 8, a, b, before), expected, rtol=1e-5, atol=1e-3)
    early = body.replace("mma_wait<1>();", "").replace("mma_commit();", "mma_commit(); mma_wait<1>();")
    with pytest.raises(KernelFaultError, match=r"before a wgmma\.wait_group that covers it"):
        direct(early.replace("(e[i])", "(d[i])"), 8, a, b, before)


def test_a_shape_that_is_no_wgmma_is_refused() -> None:
    ptx = (
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{\n.reg .f32 %f<9>;\n.reg .b64 %rd<3>;\n"
        "wgmma.mma_async.sync.aligned.m64n8k4.f32.tf32.tf32 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1;\n}\n"
    )
    with pytest.raises(UnsupportedError, match=r"wgmma\.mma_async.*m64n8k4\.f32\.tf32\.tf32 has \.m64n8k4, unknown"):
        run_grid(ptx, "k", (128, 1, 1), 0, Launch((1, 1, 1), ()), {}, {})
