"""Matrix products in Triton, in the style of its tutorials. Importing this needs the package ``triton``."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from greenfast.emulator.instructions.convert import E4M3_VALUES
from tests.emulator.corpus.cuda_products import bf16, coded, small
from tests.emulator.corpus.entry import F16, F32, I8, I32, Args, Beyond, InOut, Out, Rng
from tests.emulator.corpus.triton_entry import Descriptor, Typed, launched


def matmul_pointers(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
) -> None:
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (G * columns)
    first = group * G
    size = min(rows - first, G)
    pm = first + (pid % (G * columns)) % size
    pn = (pid % (G * columns)) // size
    m, n, k = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN), tl.arange(0, BK)
    pa = a + (m % M)[:, None] * K + k[None, :]
    pb = b + k[:, None] * N + (n % N)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32 if c.dtype.element_ty != tl.int32 else tl.int32)
    for i in range(0, tl.cdiv(K, BK)):
        x = tl.load(pa, mask=k[None, :] < K - i * BK, other=0.0)
        y = tl.load(pb, mask=k[:, None] < K - i * BK, other=0.0)
        if c.dtype.element_ty == tl.int32:
            acc = tl.dot(x, y, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(x, y, acc, input_precision=P)
        pa += BK
        pb += BK * N
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


_SHAPE = (I32(80), I32(72), I32(96))
_TILES: dict[str, Any] = {"BM": 64, "BN": 32, "BK": 32, "G": 2, "P": "tf32"}


@launched(matmul_pointers, grid=6, **_TILES)
@launched(matmul_pointers, grid=6, capability=80, **_TILES)
def matmul_f16(rng: Rng) -> Args:
    a, b = small(rng, 80, 96), small(rng, 96, 72)
    return a.astype(F16), b.astype(F16), Out((a @ b).astype(F16)), *_SHAPE


@launched(matmul_pointers, grid=6, **_TILES)
@launched(matmul_pointers, grid=6, capability=80, **_TILES)
def matmul_bf16(rng: Rng) -> Args:
    a, b = small(rng, 80, 96), small(rng, 96, 72)
    return Typed(bf16(a), "bf16"), Typed(bf16(b), "bf16"), Out(a @ b), *_SHAPE


@launched(matmul_pointers, grid=6, **_TILES)
@launched(matmul_pointers, grid=6, capability=80, **_TILES)
def matmul_tf32(rng: Rng) -> Args:
    a, b = small(rng, 80, 96), small(rng, 96, 72)
    return a, b, Out(a @ b), *_SHAPE


@launched(matmul_pointers, grid=6, **{**_TILES, "P": "ieee"})
def matmul_f32_without_tensor_cores(rng: Rng) -> Args:
    a, b = small(rng, 80, 96), small(rng, 96, 72)
    return a, b, Out(a @ b), *_SHAPE


@launched(matmul_pointers, grid=6, **_TILES)
@launched(matmul_pointers, grid=6, capability=80, **_TILES)
def matmul_int8(rng: Rng) -> Args:
    a, b = rng.integers(-128, 128, (80, 96)), rng.integers(-128, 128, (96, 72))
    return a.astype(I8), b.astype(I8), Out((a @ b).astype(I32)), *_SHAPE


@launched(matmul_pointers, grid=6, **_TILES)
@launched(matmul_pointers, grid=6, capability=89, **_TILES)
def matmul_fp8(rng: Rng) -> Args:
    a, b = small(rng, 80, 96), small(rng, 96, 72)
    kinds = [Typed(coded(m, E4M3_VALUES), "fp8e4nv") for m in (a, b)]
    return *kinds, Out(a @ b), *_SHAPE


def matmul_descriptors(
    a: tl.tensor_descriptor,
    b: tl.tensor_descriptor,
    c: tl.tensor_descriptor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WS: tl.constexpr,
) -> None:
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=WS):
        acc = tl.dot(a.load([i, k]), b.load([k, j]), acc)
    c.store([i, j], acc.to(tl.float16))


def _descriptors(rng: Rng) -> Args:
    a, b = small(rng, 128, 192), small(rng, 192, 64)
    x, w, y = a.astype(F16), b.astype(F16), (a @ b).astype(F16)
    block = (64, 64)
    return (
        Descriptor(x, block),
        Descriptor(w, block),
        Descriptor(y, block),
        I32(192),
        Beyond(x),
        Beyond(w),
        Beyond(Out(y)),
    )


# two groups of warps compute the same tile here, and both store it
@launched(matmul_descriptors, grid=(2, 1), BM=64, BN=64, BK=64, WS=True)
def matmul_warp_specialised(rng: Rng) -> Args:
    return _descriptors(rng)


def matmul_persistent(
    a: tl.tensor_descriptor,
    b: tl.tensor_descriptor,
    c: tl.tensor_descriptor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
) -> None:
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, P, flatten=True):
        i, j = tile // tl.cdiv(N, BN) * BM, tile % tl.cdiv(N, BN) * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            acc = tl.dot(a.load([i, k * BK]), b.load([j, k * BK]).T, acc)
        c.store([i, j], acc.to(tl.float16))


@launched(matmul_persistent, grid=2, BM=64, BN=64, BK=32, P=2)
def matmul_persistent_with_descriptors(rng: Rng) -> Args:
    a, b = small(rng, 150, 64), small(rng, 100 + 28, 64)
    x, w, y = a.astype(F16), b.astype(F16), (a @ b.T).astype(F16)
    shape = (I32(150), I32(128), I32(64))
    return (
        Descriptor(x, (64, 32)),
        Descriptor(w, (64, 32)),
        Descriptor(y, (64, 64)),
        *shape,
        Beyond(x),
        Beyond(w),
        Beyond(Out(y)),
    )


def split_k(a: tl.tensor, b: tl.tensor, c: tl.tensor, K: tl.tensor, B: tl.constexpr, SPLIT: tl.constexpr) -> None:
    i, part = tl.arange(0, B), tl.program_id(0)
    acc = tl.zeros((B, B), tl.float32)
    for k in range(part * B, K, B * SPLIT):
        x = tl.load(a + i[:, None] * K + k + i[None, :])
        y = tl.load(b + (k + i)[:, None] * B + i[None, :])
        acc = tl.dot(x, y, acc)
    tl.atomic_add(c + i[:, None] * B + i[None, :], acc)


@launched(split_k, grid=4, B=32, SPLIT=4)
def matmul_split_k(rng: Rng) -> Args:
    a, b = small(rng, 32, 256), small(rng, 256, 32)
    return a.astype(F16), b.astype(F16), InOut(np.zeros((32, 32), F32), Out(a @ b)), I32(256)
