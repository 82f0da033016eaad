"""The registered serving operators: attention over a paged FP8 cache, its plan, token slots and ``append_kv``."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from greenfast.numerics import serving, serving_append
from greenfast.ops import autograd, torch_ops
from greenfast.serving import pages as serving_pages
from greenfast.serving.checks import (
    MAX_SEQLEN_Q,
    NUM_APPEND_TENSORS,
    NUM_ATTENTION_TENSORS,
    OUT,
    OUT_DTYPE,
    Q,
    check_append,
    check_append_once,
    check_attention,
    check_attention_once,
    check_out,
    check_slots,
    check_values,
    should_check_values,
)

_ATTENTION = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, "
    "Tensor k_scale, Tensor v_scale, Tensor? q_scale, Tensor? sinks, Tensor? plan, SymInt max_seqlen_q, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, float softmax_scale, ScalarType out_dtype"
)
_SCHEMAS = {
    "paged_attention": f"({_ATTENTION}) -> (Tensor, Tensor)",
    "paged_attention_out": f"({_ATTENTION}, Tensor(a!) out) -> Tensor",
    "paged_attention_plan": "(Tensor cu_seqlens_q, Tensor seqused_k, SymInt max_seqlen_q, SymInt heads, "
    "SymInt kv_heads, int head_dim, bool causal, SymInt window_left, SymInt window_right, SymInt? total_q=None) "
    "-> Tensor",
    "token_slots": "(Tensor starts, Tensor? before, Tensor? block_table, Tensor? counted_from, SymInt tokens, "
    "SymInt max_pages, int page_size) -> (Tensor, Tensor, Tensor, Tensor)",
    "append_kv": "(Tensor? q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, "
    "Tensor? positions, float eps, bool interleaved) -> Tensor",
}


@cache
def load_cuda() -> Any:
    """Import ``greenfast.serving.cuda`` at the first CUDA tensor."""
    return importlib.import_module("greenfast.serving.cuda")


def _check_values(args: tuple[Any, ...]) -> None:
    """Check lengths and block tables if ``should_check_values``."""
    if should_check_values(args[Q]):
        check_attention_once(*args[:OUT])
        q, k_cache, _, block_table, cu_seqlens_q, seqused_k = args[:6]
        check_values(q, k_cache, block_table, cu_seqlens_q, seqused_k, args[MAX_SEQLEN_Q])


def _attention_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    _check_values(args)
    (q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, k_scale, v_scale, q_scale, sinks, plan) = args[
        :NUM_ATTENTION_TENSORS
    ]
    _, causal, left, right, softcap, softmax_scale, out_dtype = args[NUM_ATTENTION_TENSORS:]
    if plan is not None:
        check_plan(plan, cu_seqlens_q, seqused_k)
    return serving.paged_attention(
        q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, k_scale=k_scale, v_scale=v_scale, q_scale=q_scale,
        sinks=sinks, causal=causal, window=(left, right), softcap=softcap, softmax_scale=softmax_scale,
        out_dtype=out_dtype,
    )  # fmt: skip


def _attention_cuda(*args: Any, lse: bool = True) -> tuple[Tensor, Tensor]:
    _check_values(args)
    result: tuple[Tensor, Tensor] = load_cuda().paged_attention(*args, lse=lse)
    return result


def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    check_attention(*args)
    q: Tensor = args[Q]
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty(q.shape, dtype=args[OUT_DTYPE], device=q.device), lse


def _attention_out_cpu(*args: Any) -> Tensor:
    check_out(args[OUT], args[Q], args[OUT_DTYPE])
    out, lse = _attention_cpu(*args[:OUT])
    args[OUT].copy_(out)
    return lse


def _attention_out_cuda(*args: Any, lse: bool = True) -> Tensor:
    check_out(args[OUT], args[Q], args[OUT_DTYPE])
    return _attention_cuda(*args, lse=lse)[1]


def _attention_out_fake(*args: Any) -> Tensor:
    check_out(args[OUT], args[Q], args[OUT_DTYPE])
    return _attention_fake(*args[:OUT])[1]


def _plan_cpu(cu_seqlens_q: Tensor, seqused_k: Tensor, *options: Any) -> Tensor:
    return torch.cat([cu_seqlens_q, seqused_k])


def check_plan(plan: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor) -> None:
    """Raise ValueError unless a plan made on the CPU is for these lengths."""
    if not torch.equal(plan, torch.cat([cu_seqlens_q, seqused_k])):
        raise ValueError("plan (scheduler_metadata): it was made for other lengths; call its update() in every step")


def _plan_fake(
    cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int, heads: int, kv_heads: int, head_dim: int, causal: bool,
    window_left: int, window_right: int, total_q: int | None = None,
) -> Tensor:  # fmt: skip
    batch = seqused_k.shape[0]
    on_gpu = cu_seqlens_q.device.type == "cuda"
    size = (
        load_cuda().get_plan_size(batch, max_seqlen_q, heads, kv_heads, head_dim, total_q) if on_gpu else 2 * batch + 1
    )
    return cu_seqlens_q.new_empty(size)


def _slots_fake(
    starts: Tensor, before: Tensor | None, block_table: Tensor | None, counted_from: Tensor | None, tokens: Any,
    max_pages: Any, page_size: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch = starts.shape[0] - 1
    token_outputs = [starts.new_empty(tokens, dtype=torch.int64) for _ in range(2)]
    table = (0, 0) if block_table is not None else (batch, max_pages)
    return *token_outputs, starts.new_empty(batch), starts.new_empty(table)


def _check_append_values(args: tuple[Any, ...]) -> None:
    """Check slots if ``should_check_values``."""
    _, k, _, k_cache, _, slot_mapping, *_ = args
    if should_check_values(k):
        check_append_once(*args)
        check_slots(slot_mapping, k_cache)


def _append_cuda(*args: Any) -> Tensor:
    _check_append_values(args)
    result: Tensor = load_cuda().append_kv(*args)
    return result


def _append_cpu(*args: Any) -> Tensor:
    _check_append_values(args)
    _, k, *_ = args
    result: Tensor | None = serving_append.append(*args)
    return torch.empty(0, dtype=k.dtype) if result is None else result


def _append_fake(*args: Any) -> Tensor:
    check_append(*args)
    q: Tensor | None
    q, k, *_ = args
    return k.new_empty(0) if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)


NO_GRADIENT = "no gradient flows through a quantized cache; greenfast.sdpa has gradients"
_IMPLEMENTATIONS: dict[str, tuple[Any, Any, Any, str]] = {
    "paged_attention": (_attention_cpu, _attention_cuda, _attention_fake, "greenfast.flash_attn"),
    "paged_attention_out": (_attention_out_cpu, _attention_out_cuda, _attention_out_fake, "greenfast.flash_attn"),
    "paged_attention_plan": (_plan_cpu, lambda *args: load_cuda().plan(*args), _plan_fake, "greenfast.ServingPlan"),
    "token_slots": (
        serving_pages.compute_token_slots,
        lambda *args: load_cuda().token_slots(*args),
        _slots_fake,
        "greenfast.flash_attn",
    ),
    "append_kv": (_append_cpu, _append_cuda, _append_fake, "greenfast.append_kv"),
}
for _name, (_cpu, _cuda, _shapes, _call) in _IMPLEMENTATIONS.items():
    torch_ops.define_operator(_name, _SCHEMAS[_name], _cpu, _cuda, _shapes)
    autograd.register(torch_ops.LIBRARY, _name, f"{_call}: {NO_GRADIENT}")

_PAGED_ATTENTION = torch.ops.greenfast.paged_attention.default
_PAGED_ATTENTION_OUT = torch.ops.greenfast.paged_attention_out.default
_TOKEN_SLOTS = torch.ops.greenfast.token_slots.default
_APPEND_KV = torch.ops.greenfast.append_kv.default
PLAN = torch.ops.greenfast.paged_attention_plan.default


def paged_attention(*args: Any, lse: bool = True) -> tuple[Tensor, Tensor]:
    """Call ``torch.ops.greenfast.paged_attention``, without PyTorch's dispatcher if nothing observes the call.

    lse: compute the log-sum-exp; otherwise that result is undefined.
    """
    if _can_launch_directly(*args[:NUM_ATTENTION_TENSORS]):
        return _attention_cuda(*args, lse=lse)
    result: tuple[Tensor, Tensor] = _PAGED_ATTENTION(*_check_eager(check_attention_once, args))
    return result


def paged_attention_out(*args: Any, lse: bool = True) -> Tensor:
    """Do the same with the output written to the last argument; return the log-sum-exp."""
    if _can_launch_directly(*args[:NUM_ATTENTION_TENSORS], args[OUT]):
        return _attention_out_cuda(*args, lse=lse)
    if not torch.compiler.is_compiling():
        check_out(args[OUT], args[Q], args[OUT_DTYPE])
    result: Tensor = _PAGED_ATTENTION_OUT(*_check_eager(check_attention_once, args[:OUT]), args[OUT])
    return result


def plan(*args: Any, into: Tensor | None = None) -> Tensor:
    """Call ``torch.ops.greenfast.paged_attention_plan`` in the same way. into: the memory of the result, if given."""
    if _can_launch_directly(*args[:2], into):
        result: Tensor = load_cuda().plan(*args, into=into)
        return result
    new_plan: Tensor = PLAN(*args)
    return new_plan if into is None else into.copy_(new_plan)


def token_slots(*args: Any) -> tuple[Tensor, ...]:
    """Call ``torch.ops.greenfast.token_slots`` in the same way. Returns the fields of ``serving_pages.Slots``."""
    run = load_cuda().token_slots if _can_launch_directly(*args[:4]) else _TOKEN_SLOTS
    result: tuple[Tensor, ...] = run(*args)
    return result


def append_kv(*args: Any) -> Tensor:
    """Call ``torch.ops.greenfast.append_kv`` in the same way as ``paged_attention``."""
    if _can_launch_directly(*args[:NUM_APPEND_TENSORS]):
        return _append_cuda(*args)
    return _APPEND_KV(*_check_eager(check_append_once, args))  # type: ignore[no-any-return]


def _check_eager(check: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments after a check, before PyTorch's dispatcher sees them.

    A graph checks them when it is traced.
    """
    if not torch.compiler.is_compiling():
        check(*args)
    return args


def _can_launch_directly(*values: Any) -> bool:
    """Return whether nothing observes a call with these tensors. Some may be None."""
    tensors = [x for x in values if x is not None]
    return len(tensors) > 0 and isinstance(tensors[0], Tensor) and torch_ops.can_skip_dispatcher(*tensors)
