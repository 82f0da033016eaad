"""Vectors, transposes, stencils, images, simulations: the first kernels of every tutorial."""

from __future__ import annotations

import numpy as np

from tests.emulator.corpus.entry import F32, F64, I32, U8, Args, InOut, Out, Rng, cuda


@cuda(
    r"""
extern "C" __global__ void k(const float* a, const float* b, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a[i] + b[i];
}""",
    grid=4,
    block=256,
)
def vector_add(rng: Rng) -> Args:
    a, b = (rng.standard_normal(1000) * 10.0 ** rng.integers(-30, 30, 1000) for _ in range(2))
    a, b = a.astype(F32), b.astype(F32)
    a[:4], b[:4] = [np.inf, np.nan, 3e38, 1e-45], [-np.inf, 1, 3e38, 1e-45]
    with np.errstate(all="ignore"):
        return a, b, Out(a + b), I32(1000)


@cuda(
    r"""
extern "C" __global__ void k(int n, float a, const float* x, float* y) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) y[i] = a * x[i] + y[i];
}""",
    grid=2,
    block=48,
)
def saxpy(rng: Rng) -> Args:
    x, y = rng.standard_normal(501).astype(F32), rng.standard_normal(501).astype(F32)
    fused = (x.astype(F64) * F32(2.5) + y).astype(F32)  # 48 bits: exact in float64
    return I32(501), F32(2.5), x, InOut(y, Out(fused))


@cuda(
    r"""
extern "C" __global__ void k(const float4* x, float4* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) { float4 v = __ldg(x + i); y[i] = make_float4(v.w, v.z, v.y, v.x); }
}""",
    grid=2,
    block=64,
)
def vector4_reverse(rng: Rng) -> Args:
    x = rng.standard_normal((100, 4)).astype(F32)
    return x, Out(np.ascontiguousarray(x[:, ::-1])), I32(100)


@cuda(
    r"""
extern "C" __global__ void k(const unsigned short* x, unsigned short* y) {
  __shared__ unsigned short tile[32][32];
  for (int j = threadIdx.y; j < 32; j += 8) tile[j][threadIdx.x ^ j] = x[j * 32 + threadIdx.x];
  __syncthreads();
  for (int j = threadIdx.y; j < 32; j += 8) y[j * 32 + threadIdx.x] = tile[threadIdx.x][j ^ threadIdx.x];
}""",
    block=(32, 8),
)
def transpose_swizzled_halves(rng: Rng) -> Args:
    x = rng.integers(0, 65536, (32, 32)).astype(np.uint16)
    return x, Out(np.ascontiguousarray(x.T))


@cuda(
    r"""
__constant__ float weight[7] = {0.25f, 0.5f, -1.f, 2.f, -1.f, 0.5f, 0.25f};
extern "C" __global__ void k(const float* x, float* y, int n) {
  __shared__ float s[64 + 6];
  int i = blockIdx.x * 64 + threadIdx.x;
  s[threadIdx.x + 3] = i < n ? x[i] : 0;
  if (threadIdx.x < 3) {
    s[threadIdx.x] = i >= 3 ? x[i - 3] : 0;
    s[threadIdx.x + 67] = i + 64 < n ? x[i + 64] : 0;
  }
  __syncthreads();
  float sum = 0;
  for (int j = 0; j < 7; ++j) sum += weight[j] * s[threadIdx.x + j];
  if (i < n) y[i] = sum;
}""",
    grid=4,
    block=64,
)
def stencil_1d(rng: Rng) -> Args:
    x = rng.integers(-64, 64, 210).astype(F32)
    kernel = np.array([0.25, 0.5, -1, 2, -1, 0.5, 0.25])
    return x, Out(np.convolve(x, kernel[::-1], "same").astype(F32)), I32(210)


@cuda(
    r"""
extern "C" __global__ void k(const double* x, double* y, int n, int steps) {
  extern __shared__ double s[];
  double* now = s; double* next = s + blockDim.x;
  int i = threadIdx.x;
  now[i] = x[i];
  __syncthreads();
  for (int t = 0; t < steps; ++t) {
    next[i] = i > 0 && i < n - 1 ? now[i] + 0.25 * (now[i - 1] - 2 * now[i] + now[i + 1]) : now[i];
    double* swap = now; now = next; next = swap;
    __syncthreads();
  }
  y[i] = now[i];
}""",
    block=50,
    smem=800,
)
def heat_equation_double(rng: Rng) -> Args:
    x = rng.standard_normal(50) * 100
    now = x.copy()
    for _ in range(12):
        now[1:-1] += 0.25 * (now[:-2] - 2 * now[1:-1] + now[2:])
    return x, Out(now, atol=1e-12), I32(50), I32(12)


@cuda(
    r"""
extern "C" __global__ void k(const unsigned char* x, unsigned char* y, int h, int w, int turns) {
  extern __shared__ unsigned char s[];
  unsigned char* a = s; unsigned char* b = s + h * w;
  int cells = h * w;
  for (int i = threadIdx.x; i < cells; i += blockDim.x) a[i] = x[i];
  __syncthreads();
  for (int t = 0; t < turns; ++t) {
    for (int i = threadIdx.x; i < cells; i += blockDim.x) {
      int r = i / w, c = i % w, alive = 0;
      for (int dr = -1; dr <= 1; ++dr)
        for (int dc = -1; dc <= 1; ++dc)
          if (dr || dc) alive += a[(r + dr + h) % h * w + (c + dc + w) % w];
      b[i] = alive == 3 || (alive == 2 && a[i]);
    }
    __syncthreads();
    unsigned char* swap = a; a = b; b = swap;
  }
  for (int i = threadIdx.x; i < cells; i += blockDim.x) y[i] = a[i];
}""",
    block=96,
    smem=2 * 13 * 17,
)
def game_of_life(rng: Rng) -> Args:
    x = (rng.random((13, 17)) < 0.4).astype(U8)
    now = x
    for _ in range(5):
        around = sum(np.roll(now, (a, b), (0, 1)) for a in (-1, 0, 1) for b in (-1, 0, 1)) - now
        now = ((around == 3) | ((around == 2) & (now == 1))).astype(U8)
    return x, Out(now), I32(13), I32(17), I32(5)


@cuda(
    r"""
extern "C" __global__ void k(int* y, int w, int h, int most) {
  int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
  if (c >= w || r >= h) return;
  double cr = -2.0 + 3.0 * c / w, ci = -1.0 + 2.0 * r / h, a = 0, b = 0;
  int n = 0;
  while (n < most && a * a + b * b <= 4) {
    double t = __dadd_rn(__dsub_rn(__dmul_rn(a, a), __dmul_rn(b, b)), cr);
    b = __dadd_rn(__dmul_rn(2 * a, b), ci);
    a = t;
    ++n;
  }
  y[r * w + c] = n;
}""",
    grid=(4, 3),
    block=(8, 8),
)
def mandelbrot(rng: Rng) -> Args:
    h, w, limit = 20, 30, 25
    expected = np.zeros((h, w), I32)
    for r in range(h):
        for c in range(w):
            cr, ci, a, b, n = -2.0 + 3.0 * c / w, -1.0 + 2.0 * r / h, 0.0, 0.0, 0
            while n < limit and a * a + b * b <= 4:
                a, b = a * a - b * b + cr, 2 * a * b + ci
                n += 1
            expected[r, c] = n
    return Out(expected), I32(w), I32(h), I32(limit)


@cuda(
    r"""
extern "C" __global__ void k(const float4* body, float4* force, int n) {
  __shared__ float4 s[32];
  int i = blockIdx.x * 32 + threadIdx.x;
  float4 me = i < n ? body[i] : make_float4(0, 0, 0, 0);
  float fx = 0, fy = 0, fz = 0;
  for (int base = 0; base < n; base += 32) {
    s[threadIdx.x] = base + threadIdx.x < n ? body[base + threadIdx.x] : make_float4(0, 0, 0, 0);
    __syncthreads();
    #pragma unroll 8
    for (int j = 0; j < 32; ++j) {
      float dx = s[j].x - me.x, dy = s[j].y - me.y, dz = s[j].z - me.z;
      float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + 0.01f);
      float scale = s[j].w * inverse * inverse * inverse;
      fx += dx * scale; fy += dy * scale; fz += dz * scale;
    }
    __syncthreads();
  }
  if (i < n) force[i] = make_float4(fx, fy, fz, 0);
}""",
    grid=2,
)
def nbody_tiled(rng: Rng) -> Args:
    body = rng.standard_normal((50, 4)).astype(F32)
    d = body[None, :, :3].astype(F64) - body[:, None, :3]
    weights = body[None, :, 3] * ((d**2).sum(2) + 0.01) ** -1.5
    force = np.zeros((50, 4))
    force[:, :3] = (d * weights[..., None]).sum(1)
    size = np.zeros((50, 4))
    size[:, :3] = (np.abs(d) * np.abs(weights)[..., None]).sum(1)
    return body, Out(force.astype(F32), atol=size * 1e-5), I32(50)


@cuda(
    r"""
extern "C" __global__ void k(const float2* x, float2* y) {
  __shared__ float2 s[64];
  int t = threadIdx.x;
  s[__brev(t) >> 26] = x[t];
  s[__brev(t + 32) >> 26] = x[t + 32];
  __syncthreads();
  for (int half = 1; half < 64; half *= 2) {
    int k = t % half, i = t / half * 2 * half + k;
    float sine, cosine;
    sincospif(-(float)k / half, &sine, &cosine);
    float2 a = s[i], b = s[i + half];
    float2 w = make_float2(b.x * cosine - b.y * sine, b.x * sine + b.y * cosine);
    s[i] = make_float2(a.x + w.x, a.y + w.y);
    s[i + half] = make_float2(a.x - w.x, a.y - w.y);
    __syncthreads();
  }
  y[t] = s[t];
  y[t + 32] = s[t + 32];
}"""
)
def fft_64(rng: Rng) -> Args:
    x = rng.standard_normal((64, 2)).astype(F32)
    y = np.fft.fft(x[:, 0] + 1j * x[:, 1])
    return x, Out(np.stack([y.real, y.imag], 1).astype(F32), atol=1e-4)
