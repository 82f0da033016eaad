"""The backends of the serving comparison: greenfast's calls, and FlashAttention-3 from vLLM and as a package.

FlashAttention-3 (Shah et al., 2024) gets Q in codes in FP8; greenfast quantizes Q itself. Both have made their plan of
the work before a call, as a server does once for all layers of a step.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.registry import GREENFAST, KERNEL, TORCH, BoundCall, Library, Suite
from benchmarks.serving_cases import PAGE
from benchmarks.serving_inputs import EPS, FP8, AppendInputs, PagedInputs
from greenfast.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from greenfast.serving.plan import ServingPlan, append_kv

#: The package of the backends in vLLM's library, which the session loads from a file.
VLLM: Library = ("torch", "vllm")
Precision = Literal["fp8", "bf16"]
_PACKAGES = (("fa3_fwd_interface", "fa3-fwd"), ("flash_attn_interface", "flash_attn_3"))
#: The first installed package of FlashAttention-3.
_FA3 = next((package for package in _PACKAGES if importlib.util.find_spec(package[0])), _PACKAGES[0])
#: All backends by name.
BACKENDS = Suite()
_register = BACKENDS.register


def _in_turn(calls: Sequence[Callable[[], Any]]) -> BoundCall:
    """Bind calls that run in rotation; they compute the same result."""
    turn = itertools.cycle(calls)
    return BoundCall(lambda: next(turn)(), copies=len(calls))


def _plan(inputs: PagedInputs) -> ServingPlan:
    return ServingPlan(
        inputs.starts, inputs.used, inputs.max_queries, heads=inputs.heads, kv_heads=inputs.kv_heads,
        head_dim=inputs.head_dim, causal=True, total_q=inputs.q.shape[0],
    )  # fmt: skip


def _common(inputs: PagedInputs) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Return the arguments of most calls, computed before the timing."""
    return inputs.q, inputs.starts, inputs.used, inputs.max_queries, inputs.longest


def _paged(inputs: PagedInputs, cache: Sequence[Tensor]) -> BoundCall:
    """Bind greenfast's attention over a cache of KVPages."""
    k, v, k_scale, v_scale = cache
    plan, (q, starts, used, queries, longest) = _plan(inputs), _common(inputs)

    def bind(table: Tensor) -> Callable[[], Any]:
        return lambda: flash_attn_varlen_func(
            q, k, v, starts, None, queries, longest, seqused_k=used, block_table=table, k_descale=k_scale,
            v_descale=v_scale, causal=True, scheduler_metadata=plan,
        )  # fmt: skip

    return _in_turn([bind(table) for table in inputs.tables])


@_register(KERNEL, "greenfast FP8", "fp8", GREENFAST)
def _greenfast(inputs: PagedInputs) -> BoundCall:
    return _paged(inputs, (inputs.k_codes, inputs.v_groups, inputs.scale, inputs.scale))


@_register("token_scales", "greenfast FP8, a scale per token", "fp8", GREENFAST)
def _token_scales(inputs: PagedInputs) -> BoundCall:
    return _paged(inputs, inputs.token_scaled)


@_register("varlen", "greenfast FP8 on bf16, quantization included", "fp8", GREENFAST)
def _varlen(inputs: PagedInputs) -> BoundCall:
    """Bind the serving kernel over bfloat16 keys without a cache; the call includes quantization."""
    (k, v), (q, starts, _, _, most), plan = inputs.rows, _common(inputs), _plan(inputs)
    return BoundCall(
        lambda: flash_attn_varlen_func(q, k, v, starts, starts, most, most, causal=True, scheduler_metadata=plan)
    )


@_register("kvcache_unplanned", "flash_attn_with_kvcache", "fp8", GREENFAST, planned=False)
@_register("kvcache", "flash_attn_with_kvcache, planned", "fp8", GREENFAST, planned=True)
def _with_kvcache(inputs: PagedInputs, planned: bool) -> BoundCall:
    q, plan = inputs.q.unsqueeze(1), _plan(inputs) if planned else None
    k, v, used, table, scale = inputs.k_codes, inputs.v_groups, inputs.used, inputs.tables[0], inputs.scale
    return BoundCall(
        lambda: flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, page_table=table, k_descale=scale, v_descale=scale, causal=True,
            scheduler_metadata=plan,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class _Last:
    """The last token of each sequence, as appended by a decode step.

    The cache already holds it, so it does not change.
    """

    k: Tensor  # (sequences, kv_heads, head_dim), as V
    v: Tensor
    at: Tensor  # positions, int64
    slots: Tensor
    scale: Tensor  # (kv_heads,)
    angles: tuple[Tensor, Tensor]  # cosines and sines of rotations by 0

    @classmethod
    def make(cls, inputs: PagedInputs) -> _Last:
        at = inputs.used.long() - 1
        k, v = (x[inputs.used.cumsum(0) - 1] for x in inputs.rows)
        slots = inputs.tables[0].long().gather(1, (at // PAGE).unsqueeze(1)).squeeze(1) * PAGE + at % PAGE
        cos = torch.ones(inputs.longest, inputs.head_dim // 2, device=at.device)
        return cls(k, v, at, slots, inputs.scale[0], (cos, torch.zeros_like(cos)))


@_register("kvcache_appending", "flash_attn_with_kvcache, planned, with k and v", "fp8", GREENFAST)
def _appending_kvcache(inputs: PagedInputs) -> BoundCall:
    """Bind a call with the last token of each sequence as new K and V, to rotate and write."""
    q, plan, last, past = inputs.q.unsqueeze(1), _plan(inputs), _Last.make(inputs), inputs.used - 1
    k, v, scale, (cos, sin) = last.k.unsqueeze(1), last.v.unsqueeze(1), last.scale, last.angles
    k_cache, v_cache, table = inputs.k_codes, inputs.v_groups, inputs.tables[0]
    return BoundCall(
        lambda: flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=past, page_table=table,
            k_descale=scale, v_descale=scale, causal=True, scheduler_metadata=plan,
        )
    )  # fmt: skip


@_register("append_last", "append_kv", "none", GREENFAST, attention=False)
def _append_last(inputs: PagedInputs) -> BoundCall:
    last = _Last.make(inputs)
    q, k_cache, v_cache = inputs.q, inputs.k_codes, inputs.v_groups
    k, v, at, slots, scale, (cos, sin) = last.k, last.v, last.at, last.slots, last.scale, last.angles
    return BoundCall(
        lambda: append_kv(
            q, k, v, k_cache, v_cache, slots, k_scale=scale, v_scale=scale, cos=cos, sin=sin, positions=at
        )
    )


@_register("varlen_decode", "flash_attn_varlen_func without a cache", "fp8", GREENFAST)
def _varlen_of_decode(inputs: PagedInputs) -> BoundCall:
    """Bind one query per sequence over bfloat16 keys without a cache."""
    (k, v), ends = inputs.rows, torch.nn.functional.pad(inputs.used.cumsum(0), (1, 0)).int()
    q, starts, _, _, longest = _common(inputs)
    return BoundCall(lambda: flash_attn_varlen_func(q, k, v, starts, ends, 1, longest, causal=True))


@_register("plan", "greenfast's plan", "none", GREENFAST, attention=False)
def _make_plan(inputs: PagedInputs) -> BoundCall:
    return BoundCall(lambda: _plan(inputs).tensor)


@_register("plan_update", "ServingPlan.update", "none", GREENFAST, attention=False)
def _update_plan(inputs: PagedInputs) -> BoundCall:
    plan = _plan(inputs)

    def update() -> Tensor:
        plan.update()
        return plan.tensor

    return BoundCall(update)


def _given(inputs: PagedInputs, precision: Precision) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Return Q, K, V and scales in FlashAttention's layout: pages for decode, rows for prefill."""
    if precision == "fp8":
        k, v = inputs.row_codes if inputs.prefill else (inputs.k_codes, inputs.v_codes)
        return inputs.q_codes, k, v, (inputs.scale,) * 3
    return inputs.q, *(inputs.rows if inputs.prefill else (inputs.k, inputs.v)), (None,) * 3


def _vllm_metadata(inputs: PagedInputs, precision: Precision) -> Tensor:
    """Return the scheduler metadata of vLLM's library. The arguments are positional: the schema has no defaults."""
    library: Any = torch.ops._vllm_fa3_C
    dtype = FP8 if precision == "fp8" else torch.bfloat16
    metadata: Tensor = library.get_scheduler_metadata(
        len(inputs.lengths), inputs.max_queries, inputs.longest, inputs.heads, inputs.kv_heads, inputs.head_dim,
        inputs.head_dim, dtype, inputs.used, inputs.starts, None, None, None, None, PAGE, 0, True, -1, -1, False, 0,
        None, 0,
    )  # fmt: skip
    return metadata


@_register("vllm_fa3_bf16", "FA3 bf16 (vLLM)", "bf16", VLLM, precision="bf16")
@_register("vllm_fa3", "FA3 FP8 (vLLM)", "fp8", VLLM, precision="fp8")
def _vllm(inputs: PagedInputs, precision: Precision) -> BoundCall:
    library: Any = torch.ops._vllm_fa3_C
    q, k, v, scales = _given(inputs, precision)
    metadata = None if inputs.prefill else _vllm_metadata(inputs, precision)
    _, starts, used, queries, longest = _common(inputs)
    of_keys, of_cache = (starts, None) if inputs.prefill else (None, used)
    forward, scale = library.fwd, inputs.head_dim**-0.5

    def bind(table: Tensor | None) -> Callable[[], Any]:
        return lambda: forward(
            q, k, v, None, None, None, None, starts, of_keys, None, None, of_cache, queries, longest, table, None,
            None, None, None, None, *scales, scale, True, -1, -1, 0.0, True, metadata, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    return _in_turn([bind(table) for table in ([None] if inputs.prefill else inputs.tables)])


@_register("vllm_fa3_plan", "FA3's plan (vLLM)", "none", VLLM, attention=False)
def _vllm_plan(inputs: PagedInputs) -> BoundCall:
    return BoundCall(lambda: _vllm_metadata(inputs, "fp8"))


@_register("fa3_bf16", "FA3 bf16", "bf16", _FA3, precision="bf16")
@_register("fa3", "FA3 FP8", "fp8", _FA3, precision="fp8")
def _package(inputs: PagedInputs, precision: Precision) -> BoundCall:
    fa3 = importlib.import_module(_FA3[0])
    q, k, v, scales = _given(inputs, precision)
    descale = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    if inputs.prefill:
        starts, most = inputs.starts, inputs.longest
        return BoundCall(
            lambda: _first(fa3.flash_attn_varlen_func(q, k, v, starts, starts, most, most, causal=True, **descale))
        )
    metadata = fa3.get_scheduler_metadata(
        len(inputs.lengths), 1, inputs.longest, inputs.heads, inputs.kv_heads, inputs.head_dim, inputs.used,
        qkv_dtype=q.dtype, cu_seqlens_q=inputs.starts, page_size=PAGE, causal=True,
    )  # fmt: skip
    _, starts, used, _, _ = _common(inputs)

    def bind(table: Tensor) -> Callable[[], Any]:
        return lambda: _first(
            fa3.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=used, page_table=table, cu_seqlens_q=starts, max_seqlen_q=1, causal=True,
                scheduler_metadata=metadata, **descale,
            )
        )  # fmt: skip

    return _in_turn([bind(table) for table in inputs.tables])


def _first(result: Any) -> Any:
    """Return the output; some releases also return the LSE."""
    return result[0] if isinstance(result, tuple | list) else result


@_register("append", "append", "none", GREENFAST)
def _append(inputs: AppendInputs) -> BoundCall:
    k_cache, v_cache, k_scale, v_scale = inputs.pages
    q_weight, k_weight = inputs.weights or (None, None)
    return BoundCall(
        lambda: append_kv(
            inputs.q, inputs.k, inputs.v, k_cache, v_cache, inputs.slots, k_scale=k_scale, v_scale=v_scale,
            q_weight=q_weight, k_weight=k_weight, eps=EPS, cos=inputs.cos, sin=inputs.sin, positions=inputs.positions,
        )
    )  # fmt: skip


@_register("copy", "copy", "none", TORCH, attention=False)
def _copy(inputs: AppendInputs) -> BoundCall:
    """Bind a copy of as many bytes as the append moves."""
    half = inputs.bytes_moved // 2
    moved = torch.empty(2 * half, dtype=torch.uint8, device=inputs.q.device)
    return BoundCall(lambda: moved[:half].copy_(moved[half:]))


@_register("read_norm", "norm", "none", TORCH, attention=False, reduction=torch.linalg.vector_norm)
@_register("read_max", "maximum", "none", TORCH, attention=False, reduction=torch.max)
@_register("read_sum", "sum", "none", TORCH, attention=False, reduction=torch.sum)
def _read(x: Tensor, reduction: Callable[[Tensor], Tensor]) -> BoundCall:
    return BoundCall(lambda: reduction(x))
