"""Render and launch the kernel that merges two partial results of attention, ``kernels/merge/merge.cuh``."""

from __future__ import annotations

import numpy as np

from greenfast.kernels import CUDA_TYPES, make_source
from greenfast.kernels.attention.config import Stride3
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "merge_attention"
_THREADS = 256
_VECTOR = 8
_TYPES = {**CUDA_TYPES, "float32": "float"}


def kernel(columns: int, a: str, b: str, out: str, *, in_place: bool) -> KernelSource:
    """Render the kernel for results of the dtypes "float16", "bfloat16" or "float32".

    columns: a multiple of 8. in_place: whether ``out`` is ``a``.
    """
    source = f"""#include "merge/merge.cuh"

struct Cfg {{
  static constexpr int kColumns = {columns};
  static constexpr bool kInPlace = {str(in_place).lower()};
  using A = {_TYPES[a]};
  using B = {_TYPES[b]};
  using Out = {_TYPES[out]};
}};

extern "C" __global__ void __launch_bounds__({_THREADS})
{ENTRY}(const void* a, long long a_batch, long long a_head, long long a_row, const void* b, long long b_batch,
        long long b_head, long long b_row, void* out, long long out_batch, long long out_head, long long out_row,
        const float* lse_a, const float* lse_b, float* lse_out, int heads, int rows, int first) {{
  greenfast::merge<Cfg>({{{{static_cast<const Cfg::A*>(a), a_batch, a_head, a_row}},
                         {{static_cast<const Cfg::B*>(b), b_batch, b_head, b_row}},
                         {{static_cast<Cfg::Out*>(out), out_batch, out_head, out_row}},
                         lse_a, lse_b, lse_out, heads, rows, first}});
}}
"""
    return make_source(ENTRY, source, _THREADS)


def launch(shape: tuple[int, ...], first: int, a: Stride3, b: Stride3, out: Stride3) -> Launch:
    """Return the launch. shape: (batch, heads, rows, columns) of ``a`` and ``out``; ``b`` has the rows from ``first``.

    a, b, out: strides in elements. The LSEs are contiguous (batch, heads, rows); ``lse_out`` must not be ``lse_a``.
    """
    batch, heads, rows, columns = shape
    vectors = rows * (columns // _VECTOR)
    strides = [tuple(np.int64(n) for n in of) for of in (a, b, out)]
    return Launch(
        grid=(-(-vectors // _THREADS), batch * heads, 1),
        args=(
            "a",
            *strides[0],
            "b",
            *strides[1],
            "out",
            *strides[2],
            *("lse_a", "lse_b", "lse_out"),
            *(np.int32(n) for n in (heads, rows, first)),
        ),
    )
