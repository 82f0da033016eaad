"""Layers of neural networks: softmax, norms, rotary embedding, activations, attention, embeddings, losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.corpus.entry import F16, F32, F64, I8, I32, U8, U32, Args, InOut, Out, Rng, cuda


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
extern "C" __global__ void k(const float* x, float* y, int n) {
  __shared__ float part[4];
  const float* row = x + blockIdx.x * n;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float top = -3.4e38f, sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) top = fmaxf(top, row[i]);
  for (int s = 16; s; s >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, s));
  if (lane == 0) part[warp] = top;
  __syncthreads();
  top = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(row[i] - top);
  for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
  if (lane == 0) part[warp] = sum;
  __syncthreads();
  sum = part[0] + part[1] + part[2] + part[3];
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[blockIdx.x * n + i] = expf(row[i] - top) / sum;
}""",
    grid=3,
    block=128,
)
def softmax_rows(rng: Rng) -> Args:
    x = peaked(rng, 3, 301)
    return x, Out(softmax(x.astype(F64)).astype(F32), rtol=3e-5, atol=1e-30), I32(301)


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
#include <cub/block/block_reduce.cuh>
extern "C" __global__ void k(const float* x, const float* gamma, const float* beta, float* y, float* mean,
  float* rstd, int n) {
  using Reduce = cub::BlockReduce<float, 64>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ float shared_mean, shared_rstd;
  const float* row = x + blockIdx.x * n;
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += 64) sum += row[i];
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) mean[blockIdx.x] = shared_mean = sum / n;
  __syncthreads();
  float square = 0;
  for (int i = threadIdx.x; i < n; i += 64) { float d = row[i] - shared_mean; square += d * d; }
  square = Reduce(storage).Sum(square);
  if (threadIdx.x == 0) rstd[blockIdx.x] = shared_rstd = rsqrtf(square / n + 1e-5f);
  __syncthreads();
  for (int i = threadIdx.x; i < n;
  i += 64) y[blockIdx.x * n + i] = (row[i] - shared_mean) * shared_rstd * gamma[i] + beta[i];
}""",
    grid=3,
    block=64,
)
def layer_norm(rng: Rng) -> Args:
    x, gamma, beta = peaked(rng, 3, 150), peaked(rng, 150), peaked(rng, 150)
    v = x.astype(F64)
    mean = v.mean(1)
    rstd = 1 / np.sqrt(v.var(1) + 1e-5)
    y = (v - mean[:, None]) * rstd[:, None] * gamma + beta
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}
    out = [Out(a.astype(F32), **near) for a in (y, mean, rstd)]
    return x, gamma, beta, *out, I32(150)


@cuda(
    r"""
extern "C" __global__ void k(const float* x, const float* gamma, const float* dy, float* dx, float* dgamma,
  int rows, int n) {
  int row = blockIdx.x, lane = threadIdx.x;
  float sum = 0, dot = 0;
  for (int i = lane; i < n; i += 32) {
    float v = x[row * n + i];
    sum += v * v;
    dot += v * dy[row * n + i] * gamma[i];
  }
  for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s), dot += __shfl_xor_sync(~0u, dot, s);
  float r = rsqrtf(sum / n + 1e-6f), c = dot * r * r * r / n;
  for (int i = lane; i < n; i += 32) {
    float v = x[row * n + i], g = dy[row * n + i];
    dx[row * n + i] = g * gamma[i] * r - v * c;
    atomicAdd(dgamma + i, g * v * r);
  }
}""",
    grid=4,
)
def rms_norm_backward(rng: Rng) -> Args:
    x, gamma, dy = peaked(rng, 4, 77), peaked(rng, 77), peaked(rng, 4, 77)
    v, g = x.astype(F64), dy.astype(F64)
    r = (1 / np.sqrt((v**2).mean(1) + 1e-6))[:, None]
    dx = g * gamma * r - v * (v * g * gamma).sum(1, keepdims=True) * r**3 / 77
    total = (g * v * r).sum(0)
    size = np.abs(g * gamma * r).max()
    return (
        x,
        gamma,
        dy,
        Out(dx.astype(F32), atol=size * 1e-5),
        InOut(np.zeros(77, F32), Out(total.astype(F32), atol=1e-3)),
        I32(4),
        I32(77),
    )


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


@cuda(
    r"""
extern "C" __global__ void k(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  y[i] = 0.5f * v * (1 + erff(v * 0.70710678f));
  y[n + i] = 0.5f * v * (1 + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
  y[2 * n + i] = v / (1 + expf(-v));
  y[3 * n + i] = v > 20 ? v : log1pf(expf(v));
  y[4 * n + i] = v > 0 ? v : expm1f(v);
  float t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(v));
  y[5 * n + i] = t;
}""",
    grid=2,
    block=64,
)
def activations(rng: Rng) -> Args:
    x = np.concatenate([[0, -0.0, 30, -30, 88, -88, 1e-6], rng.standard_normal(93) * 4]).astype(F32)
    v = x.astype(F64)
    erf = np.vectorize(math.erf)(v / 2**0.5)
    inner = 0.79788456 * (v + 0.044715 * v**3)
    rows = [0.5 * v * (1 + erf), 0.5 * v * (1 + np.tanh(inner)), v / (1 + np.exp(-v)), np.log1p(np.exp(v))]
    rows += [np.where(v > 0, v, np.expm1(v)), np.tanh(v)]
    return x, Out(np.stack(rows).astype(F32), rtol=2.0**-10, atol=3e-6), I32(100)


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


@cuda(
    r"""
extern "C" __global__ void k(const float* x, const int* target, float* loss, float* dx, int n) {
  __shared__ float s[64];
  const float* row = x + blockIdx.x * n;
  float m = -1e30f;
  for (int i = threadIdx.x; i < n; i += 64) m = fmaxf(m, row[i]);
  s[threadIdx.x] = m;
  for (int step = 32; step; step >>= 1) { __syncthreads();
  if (threadIdx.x < step) s[threadIdx.x] = fmaxf(s[threadIdx.x], s[threadIdx.x + step]); }
  __syncthreads();
  m = s[0];
  __syncthreads();
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += 64) sum += __expf(row[i] - m);
  s[threadIdx.x] = sum;
  for (int step = 32; step; step >>= 1) { __syncthreads();
  if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step]; }
  __syncthreads();
  float lse = m + __logf(s[0]);
  int t = target[blockIdx.x];
  if (threadIdx.x == 0) loss[blockIdx.x] = t < 0 ? 0 : lse - row[t];
  for (int i = threadIdx.x; i < n; i += 64) dx[blockIdx.x * n + i] = t < 0 ? 0 : __expf(row[i] - lse) - (i == t);
}""",
    grid=4,
    block=64,
)
def cross_entropy(rng: Rng) -> Args:
    x, target = peaked(rng, 4, 130), np.array([3, 129, -100, 0], I32)
    v = x.astype(F64)
    lse = np.log(np.exp(v - v.max(1, keepdims=True)).sum(1)) + v.max(1)
    valid = target >= 0
    loss = np.where(valid, lse - v[np.arange(4), target % 130], 0)
    dx = softmax(v)
    dx[np.arange(4), target % 130] -= 1
    dx[~valid] = 0
    return x, target, Out(loss.astype(F32), atol=2e-4, rtol=1e-5), Out(dx.astype(F32), atol=1e-4), I32(130)


@cuda(
    r"""
extern "C" __global__ void k(const int* ids, const float* table, float* y, int dim, int vocabulary) {
  int id = ids[blockIdx.x];
  for (int i = threadIdx.x; i < dim; i += blockDim.x)
    y[blockIdx.x * dim + i] = id >= 0 && id < vocabulary ? table[id * dim + i] : 0;
}""",
    grid=7,
)
def embedding(rng: Rng) -> Args:
    ids, table = np.array([0, 9, 3, 3, -1, 10, 5], I32), rng.standard_normal((10, 45)).astype(F32)
    y = np.where(((ids >= 0) & (ids < 10))[:, None], table[ids % 10], 0)
    return ids, table, Out(y), I32(45), I32(10)


@cuda(
    r"""
extern "C" __global__ void k(const float* x, signed char* y, float* scale, int n) {
  __shared__ unsigned top;
  if (threadIdx.x == 0) top = 0;
  __syncthreads();
  float most = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) most = fmaxf(most, fabsf(x[blockIdx.x * n + i]));
  atomicMax(&top, __float_as_uint(most));
  __syncthreads();
  float s = fmaxf(__uint_as_float(top), 1e-20f) / 127.f;
  if (threadIdx.x == 0) scale[blockIdx.x] = s;
  for (int i = threadIdx.x; i < n;
  i += blockDim.x) y[blockIdx.x * n + i] = (signed char)__float2int_rn(__fdiv_rn(x[blockIdx.x * n + i], s));
}""",
    grid=4,
    block=64,
)
def quantize_rows_to_int8(rng: Rng) -> Args:
    x = peaked(rng, 4, 99)
    x[2], x[3] = 0, x[3] * 1e-30
    scale = (np.maximum(np.abs(x).max(1), F32(1e-20)) / F32(127)).astype(F32)
    y = np.rint((x / scale[:, None]).astype(F32)).astype(I8)
    return x, Out(y), Out(scale), I32(99)


@cuda(
    r"""
extern "C" __global__ void k(const float* x, const float* w, const float* bias, float* y, int C, int H, int W, int K) {
  int o = blockIdx.z, r = blockIdx.y * blockDim.y + threadIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
  int oh = (H + 2 - 3) / 2 + 1, ow = (W + 2 - 3) / 2 + 1;
  if (r >= oh || c >= ow) return;
  float sum = bias[o];
  for (int i = 0; i < C; ++i)
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) {
        int rr = r * 2 + a - 1, cc = c * 2 + b - 1;
        if (rr >= 0 && rr < H && cc >= 0 && cc < W) sum += x[(i * H + rr) * W + cc] * w[((o * C + i) * 3 + a) * 3 + b];
      }
  y[(o * oh + r) * ow + c] = fmaxf(sum, 0);
}""",
    grid=(1, 2, 3),
    block=(8, 4),
)
def convolution_with_stride_and_padding(rng: Rng) -> Args:
    x, w, bias = (rng.integers(-8, 9, s).astype(F32) for s in ((2, 11, 13), (3, 2, 3, 3), (3,)))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    y = np.zeros((3, 6, 7))
    for r in range(6):
        for c in range(7):
            y[:, r, c] = (w * padded[:, 2 * r : 2 * r + 3, 2 * c : 2 * c + 3]).sum((1, 2, 3)) + bias
    return x, w, bias, Out(np.maximum(y, 0).astype(F32)), I32(2), I32(11), I32(13), I32(3)


@cuda(
    r"""
extern "C" __global__ void k(const float* x, float* y, unsigned char* where, int H, int W) {
  int oh = H / 2, ow = W / 2;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < oh * ow; i += gridDim.x * blockDim.x) {
    int r = i / ow * 2, c = i % ow * 2, at = 0;
    float best = x[r * W + c];
    #pragma unroll
    for (int j = 1; j < 4; ++j) {
      float v = x[(r + j / 2) * W + c + j % 2];
      if (v > best) best = v, at = j;
    }
    y[i] = best;
    where[i] = at;
  }
}""",
    grid=2,
    block=32,
)
def max_pool_with_places(rng: Rng) -> Args:
    x = rng.integers(0, 9, (14, 19)).astype(F32)
    tiles = x[:, :18].reshape(7, 2, 9, 2).transpose(0, 2, 1, 3).reshape(7, 9, 4)
    return x, Out(tiles.max(2)), Out(tiles.argmax(2).astype(U8)), I32(14), I32(19)


@cuda(
    r"""
extern "C" __global__ void k(float* p, const float* g, float* m, float* v, float rate, float b1, float b2,
  float decay, int step, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float a = b1 * m[i] + (1 - b1) * g[i], b = b2 * v[i] + (1 - b2) * g[i] * g[i];
  float ah = a / (1 - powf(b1, step)), bh = b / (1 - powf(b2, step));
  p[i] -= rate * (ah / (sqrtf(bh) + 1e-8f) + decay * p[i]);
  m[i] = a; v[i] = b;
}""",
    grid=2,
    block=64,
)
def adam_step(rng: Rng) -> Args:
    p, g, m = (rng.standard_normal(100).astype(F32) for _ in range(3))
    v = rng.random(100).astype(F32)
    b1, b2 = float(F32(0.9)), float(F32(0.999))
    a = b1 * m + (1 - b1) * g.astype(F64)
    b = b2 * v + (1 - b2) * g.astype(F64) ** 2
    to = p - 0.01 * (a / (1 - b1**3) / (np.sqrt(b / (1 - b2**3)) + 1e-8) + 0.1 * p)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    state = [InOut(s, Out(e.astype(F32), **near)) for s, e in ((m, a), (v, b))]
    numbers = (F32(0.01), F32(0.9), F32(0.999), F32(0.1), I32(3), I32(100))
    return InOut(p, Out(to.astype(F32), **near)), g, *state, *numbers


@cuda(
    r"""
extern "C" __global__ void k(const float* score, int* chosen, float* weight, unsigned* load, int tokens, int experts) {
  int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  float best[2] = {-1e30f, -1e30f};
  int at[2] = {-1, -1};
  for (int e = 0; e < experts; ++e) {
    float v = score[t * experts + e];
    if (v > best[0]) { best[1] = best[0]; at[1] = at[0]; best[0] = v; at[0] = e; }
    else if (v > best[1]) { best[1] = v; at[1] = e; }
  }
  float ratio = 1 / (1 + __expf(best[1] - best[0]));
  for (int j = 0; j < 2; ++j) { chosen[t * 2 + j] = at[j]; weight[t * 2 + j] = j ? 1 - ratio : ratio;
  atomicAdd(load + at[j], 1u); }
}""",
    grid=2,
)
def top_two_routing(rng: Rng) -> Args:
    score = rng.standard_normal((50, 8)).astype(F32)
    order = np.argsort(-score, axis=1)[:, :2]
    top = np.take_along_axis(score, order, 1).astype(F64)
    load = np.bincount(order.ravel(), minlength=8).astype(U32)
    weight = Out(softmax(top).astype(F32), atol=1e-5)
    return score, Out(order.astype(I32)), weight, InOut(np.zeros(8, U32), Out(load)), I32(50), I32(8)
