"""z = x + y as a family: Python that renders CUDA for a shape, if expressions in solution.json are not enough.

The judge runs this file in a process that cannot write, reach the network or see other processes; it hands back the
kernel's source and its launch. toggles: from solution.json. dims: a shape's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from greenfast.spec.kernel import KernelSource, Launch

_THREADS = 256


def _vector(toggles: Mapping[str, int], dims: Mapping[str, int]) -> int:
    return next(v for v in ((4, 2, 1) if toggles["VECTORS"] else (1,)) if dims["N"] % v == 0)


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Return the source for a shape; shapes with equal sources share a kernel."""
    source = f"""struct alignas({4 * _vector(toggles, dims)}) Pack {{
  float values[{_vector(toggles, dims)}];
}};

extern "C" __global__ void add(const Pack* x, const Pack* y, Pack* z, int packs) {{
  const int i = blockIdx.x * {_THREADS} + threadIdx.x;
  if (i >= packs) return;
  const Pack a = x[i], b = y[i];
  Pack sum;
  for (int k = 0; k < {_vector(toggles, dims)}; ++k) sum.values[k] = a.values[k] + b.values[k];
  z[i] = sum;
}}
"""
    return KernelSource(entry="add", source=source, name="add.cu", include_dirs=(), block=(_THREADS, 1, 1))


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """Return the grid, and the arguments in the kernel's order: names of buffers, and typed scalars."""
    packs = dims["N"] // _vector(toggles, dims)
    return Launch(grid=(-(-packs // _THREADS), 1, 1), args=("x", "y", "z", np.int32(packs)))
