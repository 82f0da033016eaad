"""The Ada kernel: toggles and shape to CUDA source and launch (``kernels/attention_ada.cuh``)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from greenfast.kernels import KERNEL_DIR
from greenfast.kernels.attention.config import OutputRows, Sizes, padded_keys, plain, sizes_of
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "fp8_attention_ada"
HEAD_DIMS = (64, 128)
FORMATS = ("e4m3", "int8")
_BLOCK = 64  # queries of a block, and keys of a tile
_STAGES = 2


def refuses(fmt: str, sizes: Sizes) -> str | None:
    """What of a shape and format the kernel does not compute; None where it computes them."""
    if fmt not in FORMATS:
        return f"the Ada kernel is for formats {', '.join(FORMATS)}"
    if sizes.head_dim not in HEAD_DIMS:
        return f"the Ada kernel is for head dims {', '.join(map(str, HEAD_DIMS))}"
    if not plain(sizes):
        return "the Ada kernel has no log-sum-exp, bfloat16, scales of blocks and channels, or row-major V"
    return None


def kernel(fmt: str, dims: Mapping[str, int]) -> KernelSource:
    """Render the kernel of a shape. Raises UsageError for a format or head dim that it does not compute."""
    sizes = sizes_of(dims)
    refused = refuses(fmt, sizes)
    if refused is not None:
        raise UsageError(f"{refused}; got {dict(dims)}, {fmt}")
    smem = _BLOCK * sizes.head_dim * (1 + 2 * _STAGES)
    blocks = 3 if sizes.head_dim == 64 else 2  # on a multiprocessor at least: a limit on registers
    source = f"""#include "attention_ada.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {sizes.head_dim};
  static constexpr int kSmemBytes = {smem};
  static constexpr bool kCausal = {str(bool(sizes.causal)).lower()};
  using Score = {"int" if fmt == "int8" else "float"};
}};

extern "C" __global__ void __launch_bounds__(128, {blocks})
{ENTRY}(const unsigned char* q, const unsigned char* k, const unsigned char* v_t, const float* q_scale,
        const float* k_scale, const float* v_scale, half* out, int heads_per_kv, int q_len, int kv_len, int kv_padded,
        int causal_shift, float softmax_scale, long long out_gap, long long out_head, long long out_row,
        unsigned out_heads, int out_columns) {{
  greenfast::attention_ada<Cfg>({{q, k, v_t, q_scale, k_scale, v_scale, out, heads_per_kv, q_len, kv_len, kv_padded,
                                 causal_shift, softmax_scale,
                                 {{out_gap, out_head, out_row, out_heads, out_columns}}}});
}}
"""
    return KernelSource(
        entry=ENTRY,
        source=source,
        name=f"{ENTRY}.cu",
        include_dirs=(KERNEL_DIR,),
        block=(128, 1, 1),
        dynamic_smem_bytes=smem,
    )


def launch(
    fmt: str, dims: Mapping[str, int], scale: float | None = None, *, output: OutputRows | None = None
) -> Launch:
    """One block per 64 query rows and head; scale: of the scores, > 0."""
    sizes = sizes_of(dims)
    padded = padded_keys(sizes.kv_len)
    return Launch(
        grid=(-(-sizes.q_len // _BLOCK), sizes.batch * sizes.heads, 1),
        args=(
            *("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "out"),
            np.int32(sizes.heads // sizes.kv_heads),
            np.int32(sizes.q_len),
            np.int32(sizes.kv_len),
            np.int32(padded),
            np.int32(sizes.shift),
            np.float32(1.0 / math.sqrt(sizes.head_dim) if scale is None else scale),
            *(output or OutputRows.contiguous(sizes)).arguments(sizes),
        ),
    )
