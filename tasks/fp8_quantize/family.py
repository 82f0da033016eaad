"""Per-head quantization as a kernel family: amax and cast, with scalar or vectorized loads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from greenfast.kernels import make_source
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "quantize_heads"
_THREADS = 512
_FORMATS = {"e4m3": "kE4M3", "int8": "kInt8"}


def kernel(
    toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> KernelSource:
    """Render the quantizer. USE_VECTOR_LOADS=1: eight elements per access. Raises UsageError as Family documents."""
    if instrumented:
        raise UsageError("the quantizer has no instrumented build; profile it with Nsight Compute")
    if fmt not in _FORMATS:
        raise unknown("format", fmt, _FORMATS)
    if min(dims.get(d, 0) for d in "BHSD") < 1:
        raise UsageError(f"a tensor to quantize needs B, H, S and D, each at least 1; got {dict(dims)}")
    vector = 8 if toggles["USE_VECTOR_LOADS"] else 1
    if dims["S"] * dims["D"] % vector:
        raise UsageError(f"USE_VECTOR_LOADS=1 needs S * D to be a multiple of 8, got {dims['S']} * {dims['D']}")
    source = f"""#include "quantize/heads.cuh"

struct Cfg {{
  static constexpr greenfast::Format kFormat = greenfast::Format::{_FORMATS[fmt]};
  static constexpr int kThreads = {_THREADS};
  static constexpr int kVector = {vector};
}};

extern "C" __global__ void __launch_bounds__({_THREADS})
{ENTRY}(const half* x, unsigned char* codes, float* scale, int elements) {{
  greenfast::quantize_heads<Cfg>(x, codes, scale, elements);
}}
"""
    return make_source(ENTRY, source, _THREADS)


def launch(toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
    """One block per head."""
    return Launch(grid=(dims["B"] * dims["H"], 1, 1), args=("x", "codes", "scale", np.int32(dims["S"] * dims["D"])))
