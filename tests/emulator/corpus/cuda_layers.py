"""Layers of neural networks: softmax, rotary embedding, attention."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.emulator.corpus.entry import F16, F32, F64, I32, Args, Out, Rng, cuda


def peaked(rng: Rng, *shape: int) -> NDArray[np.float32]:
    """Biased numbers with some outliers."""
    x = rng.standard_normal(shape) * 2 + 3
    x[rng.random(shape) < 0.03] *= 20
    return x.astype(F32)


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)  # type: ignore[no-any-return]


@cuda(
    r"""
// one pass: maximum and sum of a thread are joined with others' (Milakov and Gimelshein, 2018)
extern "C" __global__ void k(const float* x, float* y, int rows, int n) {
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float m = -INFINITY_, d = 0;
  for (int i = lane; i < n; i += 32) {
    float v = x[row * n + i], to = fmaxf(m, v);
    d = d * __expf(m - to) + __expf(v - to);
    m = to;
  }
  for (int s = 16; s; s >>= 1) {
    float om = __shfl_xor_sync(~0u, m, s), od = __shfl_xor_sync(~0u, d, s), to = fmaxf(m, om);
    d = (m == to ? d : d * __expf(m - to)) + (om == to ? od : od * __expf(om - to));
    m = to;
  }
  for (int i = lane; i < n; i += 32) y[row * n + i] = __expf(x[row * n + i] - m) / d;
}""".replace("INFINITY_", "__int_as_float(0x7f800000)"),
    grid=2,
    block=96,
)
def softmax_online(rng: Rng) -> Args:
    x = peaked(rng, 5, 71)
    return x, Out(softmax(x.astype(F64)).astype(F32), rtol=3e-5, atol=1e-30), I32(5), I32(71)


@cuda(
    r"""
#include <cuda_fp16.h>
extern "C" __global__ void k(const half2* x, const int* position, half2* y, int heads, int half_dim) {
  int token = blockIdx.x, head = threadIdx.y;
  for (int i = threadIdx.x; i < half_dim; i += blockDim.x) {
    float angle = position[token] * powf(10000.f, -(float)i / half_dim), s, c;
    sincosf(angle, &s, &c);
    int at = (token * heads + head) * half_dim + i;
    float2 v = __half22float2(x[at]);
    y[at] = __floats2half2_rn(v.x * c - v.y * s, v.x * s + v.y * c);
  }
}""",
    grid=5,
    block=(8, 3),
)
def rotary_embedding(rng: Rng) -> Args:
    x = rng.standard_normal((5, 3, 20, 2)).astype(F16)
    position = np.array([0, 1, 17, 999, 4095], I32)
    angle = position[:, None, None] * 10000.0 ** (-np.arange(20) / 20)
    v = x.astype(F64)
    y = np.stack(
        [v[..., 0] * np.cos(angle) - v[..., 1] * np.sin(angle), v[..., 0] * np.sin(angle) + v[..., 1] * np.cos(angle)],
        -1,
    )
    return x, position, Out(y.astype(F16), atol=3e-3), I32(3), I32(20)


ATTENTION = r"""
extern "C" __global__ void k(const float* q, const float* key, const float* v, float* o, float* lse, int S,
  int causal) {
  const int D = 16, T = 32;
  __shared__ float ks[T][D], vs[T][D];
  int row = blockIdx.x * T + threadIdx.x, head = blockIdx.y;
  q += head * S * D; key += head * S * D; v += head * S * D; o += head * S * D;
  float mine[D], sum[D] = {}, m = -1e30f, d = 0;
  if (row < S) for (int i = 0; i < D; ++i) mine[i] = q[row * D + i] * 0.25f;
  for (int start = 0; start < (causal ? min(S, (int)(blockIdx.x + 1) * T) : S); start += T) {
    __syncthreads();
    if (start + threadIdx.x < S)
      for (int i = 0; i < D; ++i) ks[threadIdx.x][i] = key[(start + threadIdx.x) * D + i],
        vs[threadIdx.x][i] = v[(start + threadIdx.x) * D + i];
    __syncthreads();
    if (row < S)
      for (int j = 0; j < T && start + j < (causal ? row + 1 : S); ++j) {
        float score = 0;
        for (int i = 0; i < D; ++i) score += mine[i] * ks[j][i];
        float to = fmaxf(m, score), scale = __expf(m - to), p = __expf(score - to);
        d = d * scale + p;
        for (int i = 0; i < D; ++i) sum[i] = sum[i] * scale + p * vs[j][i];
        m = to;
      }
  }
  if (row < S) {
    for (int i = 0; i < D; ++i) o[row * D + i] = sum[i] / d;
    lse[head * S + row] = m + logf(d);
  }
}"""


def _attention(rng: Rng, size: int, causal: bool) -> Args:
    q, key, v = (rng.standard_normal((2, size, 16)).astype(F32) for _ in range(3))
    key += 2
    scores = q.astype(F64) @ key.astype(F64).transpose(0, 2, 1) / 4
    if causal:
        scores[:, np.triu(np.ones((size, size), bool), 1)] = -np.inf
    lse = np.log(np.exp(scores).sum(-1))
    o = softmax(scores) @ v
    return q, key, v, Out(o.astype(F32), atol=2e-5), Out(lse.astype(F32), atol=2e-5), I32(size), I32(causal)


@cuda(ATTENTION, grid=(2, 2))
def flash_attention(rng: Rng) -> Args:
    return _attention(rng, 45, False)


@cuda(ATTENTION, grid=(2, 2))
def flash_attention_causal(rng: Rng) -> Args:
    return _attention(rng, 50, True)
