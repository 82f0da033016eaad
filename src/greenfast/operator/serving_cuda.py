"""The serving operators on a GPU. Arguments have been checked by ``serving_checks``."""

from __future__ import annotations

import torch
from torch import Tensor

_MISSING = "the serving kernels for GPUs are not part of this version; CPU tensors are computed by the reference"


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    k_scale: Tensor, v_scale: Tensor, q_scale: Tensor | None, sinks: Tensor | None, plan: Tensor | None,
    max_seqlen_q: int, causal: bool, window_left: int, window_right: int, softcap: float, softmax_scale: float,
    out_dtype: torch.dtype, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``torch.ops.greenfast.paged_attention`` of CUDA tensors; ``out``: where the output is written, if given."""
    raise NotImplementedError(f"q: on {q.device}; {_MISSING}")


def append_kv(
    q: Tensor | None, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor,
    v_scale: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    positions: Tensor | None, eps: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    """``torch.ops.greenfast.append_kv`` of CUDA tensors: Q as attention takes it, empty where q is None."""
    raise NotImplementedError(f"k: on {k.device}; {_MISSING}")


def plan(
    cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int, heads: int, kv_heads: int, head_dim: int, causal: bool,
    window_left: int, window_right: int,
) -> Tensor:  # fmt: skip
    """``torch.ops.greenfast.paged_attention_plan`` of CUDA tensors: int32 of ``plan_size`` elements."""
    raise NotImplementedError(f"cu_seqlens_q: on {cu_seqlens_q.device}; {_MISSING}")


def plan_size(batch: int, max_seqlen_q: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Elements of a plan, for tracing."""
    raise NotImplementedError(f"plan: {_MISSING}")
