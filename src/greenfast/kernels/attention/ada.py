"""Render and launch the Ada attention kernel, ``kernels/attention/sm89/kernel.cuh``."""

from __future__ import annotations

import numpy as np

from greenfast.kernels import make_source
from greenfast.kernels.attention.config import (
    AttentionConfig,
    Sizes,
    Strides,
    output_arguments,
    padded_keys,
    softmax_scale,
)
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource, Launch

ENTRY = "fp8_attention_ada"
HEAD_DIMS = (64, 128)
_BLOCK = 64  # queries of a block, and keys of a tile
_STAGES = 2


def refuses(config: AttentionConfig) -> str | None:
    """Return the options that the kernel does not support, as a message; None if it supports all of them."""
    if config.head_dim not in HEAD_DIMS:
        return f"the Ada kernel is for head dims {', '.join(map(str, HEAD_DIMS))}"
    lacking = config.beyond("head_dim", "columns", "format", "mask", "key_mean", "rotate")
    return f"the Ada kernel has no choice of {', '.join(lacking)}" if lacking else None


def kernel(config: AttentionConfig) -> KernelSource:
    """Render the kernel of an attention. Raises UsageError for unsupported options."""
    refused = refuses(config)
    if refused is not None:
        raise UsageError(f"{refused}; got {config}")
    smem = _BLOCK * config.head_dim * (1 + 2 * _STAGES)
    blocks = 3 if config.head_dim == 64 else 2  # on a multiprocessor at least: a limit on registers
    source = f"""#include "attention/sm89/kernel.cuh"

struct Cfg {{
  static constexpr int kHeadDim = {config.head_dim};
  static constexpr int kSmemBytes = {smem};
  static constexpr bool kCausal = {str(config.causal).lower()};
  using Score = {"int" if config.format == "int8" else "float"};
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
    return make_source(ENTRY, source, 128, dynamic_smem_bytes=smem)


def launch(
    config: AttentionConfig,
    sizes: Sizes,
    scale: float | None = None,
    strides: Strides = Strides(),  # noqa: B008
) -> Launch:
    """Return the launch: one block per 64 query rows and head. scale: of the scores, > 0; strides: of out only."""
    return Launch(
        grid=(-(-sizes.q_len // _BLOCK), sizes.batch * sizes.heads, 1),
        args=(
            *("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "out"),
            np.int32(sizes.heads // sizes.kv_heads),
            np.int32(sizes.q_len),
            np.int32(sizes.kv_len),
            np.int32(padded_keys(sizes.kv_len)),
            np.int32(sizes.shift(config.mask)),
            softmax_scale(config, scale),
            *output_arguments(config, sizes, strides.out),
        ),
    )
