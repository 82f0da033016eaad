"""FlashAttention-3's functions for servers, computed in FP8, with its names, arguments and shapes.

    from greenfast.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

docs/flash_attn.md lists every difference.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from greenfast.ops.arguments import MAX_LENGTH, check_flag, parse_length
from greenfast.ops.call_cache import replay
from greenfast.ops.context_stack import ACTIVE, in_context_parallel
from greenfast.ops.quantized import check_device
from greenfast.ops.symbols import is_known, require, require_same_shape
from greenfast.serving.call import AttentionCall, Result, get_constant
from greenfast.serving.checks import check_strided_argument
from greenfast.serving.launch_cache import ATTENTION_CACHE
from greenfast.serving.pages import view_rows_as_pages
from greenfast.serving.plan import ServingPlan, describe_tensor

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: Tensor | None = None,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: ServingPlan | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    q_v: Tensor | None = None,
    fa_version: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Result:
    """Attention of packed sequences, over their own keys or over a paged FP8 cache.

    q: (total_q, heads, head_dim) of float16 or bfloat16, or float8_e4m3fn with q_descale (batch, kv_heads).
    Without block_table: k, v (total_k, kv_heads, head_dim) with cu_seqlens_k, of q's dtype. They are computed as in
    ``varlen_attn``. With scheduler_metadata, and if max_seqlen_q times the query heads of a KV head is at most 64, each
    token and head is quantized with its own scale, as in a cache. They may also be float8_e4m3fn with k_descale,
    v_descale.
    With block_table (or page_table), int32 (batch, max_pages): k, v are the float8_e4m3fn pages of a ``PagedKVCache``,
    k_descale, v_descale their scales and seqused_k, int32 (batch,), the lengths.
    cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,). max_seqlen_q, max_seqlen_k: at least the longest sequence's. Lengths
    of 0 are allowed, on either side.
    causal and window_size: aligned at a sequence's last query and key. s_aux: (heads,), the sinks' logits.
    scheduler_metadata: a ``ServingPlan`` for the same lengths. out: the tensor for the output.

    Returns the output, (total_q, heads, head_dim) of q's dtype (bfloat16 for E4M3); with return_attn_probs or
    return_softmax_lse also the natural log-sum-exp, float32 (heads, total_q). Only calls that are computed as in
    ``varlen_attn`` have gradients, without seqused_k, softcap, s_aux and out.

    Raises TypeError and ValueError for arguments that do not fit, and NotImplementedError for calls without a kernel,
    naming the argument, before any work.
    """
    if in_context_parallel():  # before any check: a refusal must reach the other ranks
        return ACTIVE[-1].varlen(  # type: ignore[no-any-return]
            q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), softmax_scale, causal, softcap,
            return_attn_probs or return_softmax_lse, out,
            dict(
                block_table=block_table, page_table=page_table, seqused_q=seqused_q, seqused_k=seqused_k, qv=qv,
                q_v=q_v, s_aux=s_aux, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
                alibi_slopes=alibi_slopes, scheduler_metadata=scheduler_metadata, window_size=window_size,
                dropout_p=dropout_p or None, attention_chunk=attention_chunk or None,
                cp_world_size=None if cp_world_size == 1 else cp_world_size,
                cp_rank=cp_rank or None, cp_tot_seqused_k=cp_tot_seqused_k,
            ),
        )  # fmt: skip
    if (
        seqused_q is not None or qv is not None or q_v is not None or type(attention_chunk) is not int
        or attention_chunk or type(dropout_p) is not float or dropout_p or type(cp_world_size) is not int
        or cp_world_size != 1 or alibi_slopes is not None or cp_tot_seqused_k is not None
        or type(cp_rank) is not int or cp_rank
    ):  # fmt: skip
        _reject_arguments(
            seqused_q=seqused_q, qv=qv, q_v=q_v, attention_chunk=attention_chunk, dropout_p=dropout_p,
            cp_world_size=None if isinstance(cp_world_size, int) and cp_world_size == 1 else cp_world_size,
            alibi_slopes=alibi_slopes, cp_tot_seqused_k=cp_tot_seqused_k, cp_rank=cp_rank,
        )  # fmt: skip
    if type(num_splits) is not int or num_splits < 0:
        parse_length("num_splits", num_splits)
    wants_lse = return_softmax_lse if return_attn_probs is False else return_attn_probs
    table, request = _select_table(block_table, page_table), None
    if not torch.compiler.is_compiling():
        keys = (k, v, out, None, None) if table is not None else (None, None, out, k, v)
        plan = scheduler_metadata.parts() if type(scheduler_metadata) is ServingPlan else (scheduler_metadata,)
        # A pair or one argument, so that requests with other arguments differ in length.
        window = window_size if type(window_size) is tuple and len(window_size) == 2 else (window_size,)
        request = (
            q, *keys, None, None, cu_seqlens_k, None, table, cu_seqlens_q, seqused_k, k_descale, v_descale, q_descale,
            s_aux, *plan, max_seqlen_q, softmax_scale, causal, *window, softcap, wants_lse,
            max_seqlen_k if table is None else None,
        )  # fmt: skip
        replayed = replay(ATTENTION_CACHE, request, q, out)
        if replayed is not None:
            return replayed if wants_lse else replayed[0]  # type: ignore[return-value]
    check_flag("return_softmax_lse", return_softmax_lse)
    check_flag("return_attn_probs", return_attn_probs)
    _check_query(q, 3, "total_q, heads, head_dim")
    max_seqlen_q = parse_length("max_seqlen_q", max_seqlen_q, MAX_LENGTH)
    scales = (q_descale, k_descale, v_descale)
    if table is not None and seqused_k is None:
        raise ValueError("seqused_k: None; with block_table the lengths of the sequences are needed, int32 (batch,)")
    if table is not None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k: given with block_table; the lengths of paged sequences are seqused_k")
    try:
        call = AttentionCall(
            q, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size, softcap, s_aux, scheduler_metadata, out
        )
        if table is None:
            return call.over_keys(
                k, v, cu_seqlens_k, max_seqlen_k, seqused_k, scales, wants_lse, request, allow_dense=True
            )
        _check_pages(k=k, v=v)
        return call.attend(k, v, table, seqused_k, scales, wants_lse, request)  # type: ignore[arg-type]
    except (TypeError, ValueError, NotImplementedError) as e:  # errors name the operator's arguments
        if e.args and isinstance(e.args[0], str):
            e.args = (e.args[0].replace("k_cache", "k").replace("v_cache", "v"), *e.args[1:])
        raise


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: ServingPlan | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Result:
    """Attention over an FP8 cache. If ``k`` and ``v`` are given, they are first appended to it.

    q: (batch, seqlen, heads, head_dim), or with cu_seqlens_q (total_q, heads, head_dim) and max_seqlen_q.
    k_cache, v_cache: float8_e4m3fn pages with page_table (or block_table), as in ``flash_attn_varlen_func``; without it
    (batch_cache, seqlen_cache, kv_heads, head_dim), seqlen_cache a multiple of 16, of the sequences that
    cache_batch_idx selects. k_descale, v_descale: the scales, 1 by default.
    cache_seqlens: an int, or int32 (batch,): keys in the cache before the call; without it the cache is full.
    k, v: (batch, seqlen_new, kv_heads, head_dim), or with cu_seqlens_k_new (total_new, kv_heads, head_dim), of q's
    dtype. They are quantized and written after those keys, with scales per token if k_descale and v_descale have these.
    With rotary_cos and rotary_sin, (positions, rotary_dim / 2), k and q are rotated first, by their positions, or
    counted from rotary_seqlens. Then q and k must have the same tokens, and several of each need a causal mask or a
    window.
    The other arguments are as in ``flash_attn_varlen_func``.

    Returns the output, of q's shape; with return_softmax_lse also the natural log-sum-exp, float32 (batch, heads,
    seqlen), or (heads, total_q) with cu_seqlens_q.
    Raises as ``flash_attn_varlen_func`` does.
    """
    if (
        qv is not None or cache_leftpad is not None or type(attention_chunk) is not int or attention_chunk
        or alibi_slopes is not None
    ):  # fmt: skip
        _reject_arguments(
            qv=qv, cache_leftpad=cache_leftpad, attention_chunk=attention_chunk, alibi_slopes=alibi_slopes
        )
    if type(num_splits) is not int or num_splits < 0:
        parse_length("num_splits", num_splits)
    table, request = _select_table(block_table, page_table), None
    if cache_batch_idx is None and not torch.compiler.is_compiling():
        plan = scheduler_metadata.parts() if type(scheduler_metadata) is ServingPlan else (scheduler_metadata,)
        window = window_size if type(window_size) is tuple and len(window_size) == 2 else (window_size,)
        request = (
            q, k_cache, v_cache, out, k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens, table,
            cu_seqlens_q, cache_seqlens, k_descale, v_descale, q_descale, s_aux, *plan, max_seqlen_q, softmax_scale,
            causal, *window, softcap, return_softmax_lse, rotary_interleaved,
        )  # fmt: skip
        replayed = replay(ATTENTION_CACHE, request, q, out)
        if replayed is not None:
            result, lse = replayed
            if lse is None:
                return result  # type: ignore[no-any-return]
            return result, lse if q.dim() == 3 else lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)
    check_flag("return_softmax_lse", return_softmax_lse)
    rotary = (rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved)
    if (k is None) != (v is None) or (k is None and not (rotary_cos is None and rotary_sin is None)):
        raise ValueError("k, v: None; both are given, or neither and no rotary_cos and rotary_sin")
    if cu_seqlens_q is None:
        _check_query(q, 4, "batch, seqlen, heads, head_dim")
        (batch, length), rows = q.shape[:2], q.flatten(0, 1)
        starts = get_constant(q, "arange", length, batch)
        max_length = length
    else:
        _check_query(q, 3, "total_q, heads, head_dim")
        max_seqlen_q = parse_length("max_seqlen_q", max_seqlen_q, MAX_LENGTH)
        if not isinstance(cu_seqlens_q, Tensor) or cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] == 0:
            raise ValueError("cu_seqlens_q: an int32 tensor (batch + 1,) is needed")
        batch, length, rows, starts, max_length = cu_seqlens_q.shape[0] - 1, None, q, cu_seqlens_q, max_seqlen_q
    has_table = table is not None
    k_cache, v_cache, table = _view_cache(k_cache, v_cache, table, cache_batch_idx, batch)
    used = _parse_lengths(q, cache_seqlens, batch, table.shape[1] * k_cache.shape[1])
    target = out if out is None or length is None else _flatten_out(out)
    call = AttentionCall(
        rows, starts, max_length, softmax_scale, causal, window_size, softcap, s_aux, scheduler_metadata, target
    )
    call.has_table = has_table
    scales = (q_descale, k_descale, v_descale)
    if k is not None and v is not None:
        used = call.append(k, v, k_cache, v_cache, table, used, cu_seqlens_k_new, scales, rotary, length)
    result = call.attend(k_cache, v_cache, table, used, scales, return_softmax_lse, request)
    if length is None:
        return result
    if not isinstance(result, tuple):
        return result.view(q.shape) if out is None else out
    sums = result[1].view(q.shape[2], batch, length).transpose(0, 1)
    return (result[0].view(q.shape) if out is None else out), sums


def _reject_arguments(**arguments: Any) -> None:
    for name, value in arguments.items():
        is_number = isinstance(value, numbers.Number)
        if value is not None and not (is_number and value == 0):
            shown = value if is_number else f"a {type(value).__name__}"
            raise NotImplementedError(f"{name}: {shown}; the kernels have none, leave it out (docs/flash_attn.md)")


def _check_query(q: Any, dims: int, names: str) -> None:
    check_strided_argument("q", q)
    if q.dim() != dims:
        raise ValueError(f"q: its shape is {tuple(q.shape)}; ({names}) is needed")


def _select_table(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    if block_table is not None and page_table is not None:
        raise ValueError("page_table: given together with block_table; both are names of one argument")
    return page_table if block_table is None else block_table


def _check_pages(**caches: Any) -> None:
    for name, x in caches.items():
        if not isinstance(x, Tensor) or x.dim() < 4:
            raise ValueError(f"{name}: {describe_tensor(x)}; (pages, page_size, kv_heads, head_dim) is needed")
        check_strided_argument(name, x)


def _view_cache(
    k_cache: Tensor, v_cache: Tensor, table: Tensor | None, batch_idx: Tensor | None, batch: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cache as pages, and its block table."""
    _check_pages(k_cache=k_cache, v_cache=v_cache)
    if table is not None:
        if batch_idx is not None:
            raise ValueError("cache_batch_idx: given with page_table; its rows are the sequences")
        if not isinstance(table, Tensor) or table.dim() != 2:
            raise ValueError(f"page_table: {describe_tensor(table)}; int32 (batch, max_pages) is needed")
        return k_cache, v_cache, table
    if not require_same_shape(v_cache.shape, k_cache.shape):
        raise ValueError(f"v_cache: {describe_tensor(v_cache)}; without page_table it has the shape of k_cache")
    rows = k_cache.shape[0]
    if batch_idx is None and not require(rows == batch):
        raise ValueError(f"k_cache: {rows} sequences, q {batch}; without cache_batch_idx they must agree")
    keys, values, step, pages = view_rows_as_pages(k_cache, v_cache)
    if batch_idx is None:
        return keys, values, get_constant(k_cache, "table", step, (batch, pages))
    if not isinstance(batch_idx, Tensor) or batch_idx.dtype != torch.int32 or batch_idx.dim() != 1:
        raise TypeError(f"cache_batch_idx: {describe_tensor(batch_idx)}; int32 (batch,) is needed")
    check_device("cache_batch_idx", batch_idx, "k_cache", k_cache)
    return keys, values, batch_idx.unsqueeze(1) * step + get_constant(k_cache, "table", step, (1, pages))


def _flatten_out(out: Tensor) -> Tensor:
    """View (batch, seqlen, heads, head_dim) as (batch * seqlen, heads, head_dim).

    It must be a view, since it is written.
    """
    check_strided_argument("out", out)
    if out.dim() != 4:
        raise ValueError(f"out: {describe_tensor(out)}; (batch, seqlen, heads, head_dim) is needed, as q")
    several = not is_known(out.shape[0] <= 1) and not is_known(out.shape[1] == 1)
    if several and not is_known(out.stride(0) == out.shape[1] * out.stride(1)):
        raise ValueError(f"out: its strides are {out.stride()}; its sequences must be contiguous")
    return out.flatten(0, 1)


def _parse_lengths(q: Tensor, cache_seqlens: int | Tensor | None, batch: Any, capacity: Any) -> Tensor:
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dim() != 1 or not require(cache_seqlens.shape[0] == batch):
            raise ValueError(
                f"cache_seqlens: {describe_tensor(cache_seqlens)}; int32 (batch,) is needed, batch {batch}, or an int"
            )
        return cache_seqlens
    if cache_seqlens is None:
        cache_seqlens = capacity
    length = parse_length("cache_seqlens", cache_seqlens, MAX_LENGTH)
    return torch.full((batch,), length, dtype=torch.int32, device=q.device)
