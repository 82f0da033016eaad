"""The serving operators on a GPU. ``greenfast.serving.checks`` checks their arguments, once per combination.

As in ``ops.cuda``, a call looks up its plan by shapes, strides and options.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from greenfast.kernels.serving import append, attention, slots
from greenfast.kernels.serving.append import AppendConfig, AppendSizes, AppendStrides
from greenfast.kernels.serving.attention import ServingSizes, ServingStrides
from greenfast.kernels.serving.config import NARROW_ROWS, TILE, ServingConfig
from greenfast.ops.arguments import SERVING_ON_HOPPER
from greenfast.ops.launch_plans import ALIGNMENT, LaunchPlan, LaunchStep, get_target, put_bounded, require_hopper
from greenfast.ops.launch_plans import concat_plans as concat_plans
from greenfast.ops.layout import fill_without_keys, is_aligned
from greenfast.serving.checks import (
    NUM_APPEND_TENSORS,
    NUM_ATTENTION_TENSORS,
    OUT,
    OUT_DTYPE,
    check_append,
    check_attention,
)
from greenfast.spec.arch import Target

_MAX_PLANS = 4096
#: TMA strides are multiples of the first number of bytes, and below the second.
_TMA_ALIGNMENT, _TMA_MAX_STRIDE = 16, 2**40
_DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "e4m3",
}
_DTYPE_NAMES |= {torch.int64: "int64", torch.int32: "int32"}
_PLANS: dict[tuple[Any, ...], LaunchPlan] = {}


@cache
def get_hopper_target(device: int) -> Target:
    """Return the device's target, or the kernels' own for meta tensors. Raises NotImplementedError without Hopper."""
    if device < 0:
        return attention.TARGET
    target = get_target(device)
    require_hopper(target, SERVING_ON_HOPPER)
    return target


def _choose_row_tiles(
    head_dim: int, sizes: ServingSizes, multiprocessors: int, plan: Tensor | None
) -> tuple[bool, int]:
    """Return the row tiles of ``attention.row_tiles``, or of a given plan, possibly made for fewer tokens."""
    wide, few_rows = attention.row_tiles(head_dim, sizes, multiprocessors)
    if plan is not None and sizes.max_q_len * sizes.group > NARROW_ROWS:
        wide = plan.numel() % 2 == 1  # as _plan_words makes them
    return wide, few_rows


def _get_row_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of all dimensions but the last, in elements.

    A dimension of one element may have any stride. One that TMA would refuse is replaced by a row's.
    """
    steps = x.stride()[:-1]
    if 1 not in x.shape[:-1]:
        return steps
    return tuple(
        x.shape[-1]
        if n == 1 and (step * x.itemsize % _TMA_ALIGNMENT or not 0 < step * x.itemsize < _TMA_MAX_STRIDE)
        else step
        for n, step in zip(x.shape[:-1], steps, strict=True)
    )


def _normalize_window(causal: bool, left: int, right: int) -> tuple[int, int]:
    return left, 0 if causal else right


def _check_addresses(k_cache: Tensor, v_cache: Tensor) -> None:
    if is_aligned(k_cache.data_ptr() | v_cache.data_ptr()):
        return
    name, x = ("v_cache", v_cache) if is_aligned(k_cache.data_ptr()) else ("k_cache", k_cache)
    raise ValueError(f"{name}: it begins at address {x.data_ptr():#x}; a multiple of 16 is needed")


def get_attention_plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    k_scale: Tensor, v_scale: Tensor, q_scale: Tensor | None, sinks: Tensor | None, plan: Tensor | None,
    max_seqlen_q: int, causal: bool, window_left: int, window_right: int, softcap: float, softmax_scale: float,
    out_dtype: torch.dtype, *, lse: bool = True,
) -> LaunchPlan:  # fmt: skip
    """Return the launches of ``paged_attention`` with such tensors. They are checked once per combination.

    lse: write the log-sum-exp.
    """
    tensors = (q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, k_scale, v_scale, q_scale, sinks, plan)
    others = (max_seqlen_q, causal, window_left, window_right, softcap, softmax_scale, out_dtype)
    try:
        key = (*[x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors], others, lse)
        cached = _PLANS.get(key)
    except (AttributeError, RuntimeError, TypeError):  # not strided tensors; the check raises
        check_attention(*tensors, *others)
        raise
    if cached is None:
        check_attention(*tensors, *others)
        mask = (causal, window_left, window_right)
        new = _build_attention_plan(*tensors, max_seqlen_q, mask, softcap, softmax_scale, out_dtype, lse=lse)
        cached = put_bounded(_PLANS, key, new, _MAX_PLANS)
    return cached


def paged_attention(*args: Any, lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Compute ``torch.ops.greenfast.paged_attention`` of CUDA tensors; a tensor for the output may be the last.

    lse: compute the log-sum-exp; otherwise it is None. Rows after the last of cu_seqlens_q are not written.
    """
    launch_plan = get_attention_plan(*args[:OUT], lse=lse)
    q, k_cache, v_cache, block_table, _, seqused_k, _, _, _, sinks = args[:10]
    out = args[OUT] if len(args) > OUT else None
    if out is not None and not (out.is_contiguous() and is_aligned(out.data_ptr())):
        contiguous, sums = paged_attention(*args[:OUT], lse=lse)
        return out.copy_(contiguous), sums
    if out is None:
        out = q.new_empty(q.shape, dtype=args[OUT_DTYPE])  # torch.empty costs twice as much
    sums = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if lse else None
    if out.numel() == 0 or seqused_k.shape[0] == 0:
        return out, sums
    if k_cache.shape[0] == 0 or block_table.shape[1] == 0:
        return (out.zero_(), None) if sums is None else fill_without_keys(out, sums, sinks)
    if not is_aligned(q.data_ptr()):
        q = q.clone(memory_format=torch.contiguous_format)
        return paged_attention(q, *args[1:OUT], out, lse=lse)
    _check_addresses(k_cache, v_cache)
    buffers = (sums, *args[:NUM_ATTENTION_TENSORS], out)
    launch_plan.launch([0 if x is None else x.data_ptr() for x in buffers])
    return out, sums


_ATTENTION_BUFFERS = (
    "lse", "q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "q_scale",
    "sinks", "plan", "out",
)  # fmt: skip


def _build_attention_plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
    k_scale: Tensor, v_scale: Tensor, q_scale: Tensor | None, sinks: Tensor | None, plan: Tensor | None,
    max_seqlen_q: int, mask: tuple[bool, int, int], softcap: float, softmax_scale: float, out_dtype: torch.dtype,
    *, lse: bool = True,
) -> LaunchPlan:  # fmt: skip
    """Build the launches for such tensors, with the launch of the work plan if ``plan`` is None."""
    device = q.get_device()
    multiprocessors = get_hopper_target(device).multiprocessors
    (tokens, heads, head_dim), (pages, page, kv_heads, _) = q.shape, k_cache.shape
    per_token = k_scale.dim() == 3
    sizes = ServingSizes(
        sequences=seqused_k.shape[0], tokens=tokens, max_q_len=max_seqlen_q, heads=heads, kv_heads=kv_heads,
        pages=pages, page=page, table_entries=block_table.shape[1],
    )  # fmt: skip
    wide, few_rows = _choose_row_tiles(head_dim, sizes, multiprocessors, plan)
    config = ServingConfig(
        head_dim=head_dim, query=_DTYPE_NAMES[q.dtype], out=_DTYPE_NAMES[out_dtype], wide=wide, few_rows=few_rows,
        token_scales=per_token, softcap=softcap > 0, value_layout="rows" if v_cache.dim() == 4 else "grouped",
    )  # fmt: skip

    def strides(scale: Tensor) -> tuple[int, int]:
        return scale.stride()[:2] if scale.dim() > 1 else (0, *scale.stride()) if scale.dim() else (0, 0)  # type: ignore[return-value]

    blocks, window = attention.grid_blocks(config, sizes, multiprocessors), _normalize_window(*mask)
    needed = _count_plan_words(config, sizes, blocks)
    if plan is not None and plan.numel() != needed:
        raise ValueError(
            f"plan (scheduler_metadata): {plan.numel()} elements, {needed} are needed; it was made for another "
            "batch, max_seqlen_q or number of heads"
        )
    page_stride, token_stride, head_stride = _get_row_strides(k_cache)
    launch = attention.launch(
        config, sizes,
        ServingStrides(
            q=_get_row_strides(q),  # type: ignore[arg-type]
            k=(page_stride, token_stride, head_stride),
            v=_get_row_strides(v_cache)[: 3 if v_cache.dim() == 4 else 2],
            table=block_table.stride(0),
            q_scale=(0, 0) if q_scale is None else strides(q_scale),
            k_scale=strides(k_scale), v_scale=strides(v_scale),
        ),
        window, softmax_scale, softcap,
        frozenset(
            n for n, x in (("q_scale", q_scale), ("sinks", sinks), ("lse", lse or None)) if x is not None
        ),
        multiprocessors,
    )  # fmt: skip
    steps = [LaunchStep(attention.kernel(config), launch)]
    work, size = {"partials": 0}, -(-4 * attention.partial_words(config, sizes, blocks) // ALIGNMENT) * ALIGNMENT
    if plan is None:
        steps.insert(
            0, LaunchStep(attention.plan_kernel(config), attention.plan_launch(config, sizes, window, multiprocessors))
        )
        work["plan"], size = size, size + 4 * needed
    return LaunchPlan(device, tuple(steps), _ATTENTION_BUFFERS, work, size)


def plan(
    cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int, heads: int, kv_heads: int, head_dim: int, causal: bool,
    window_left: int, window_right: int, total_q: int | None = None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``torch.ops.greenfast.paged_attention_plan`` of CUDA tensors: int32 of ``get_plan_size`` elements.

    into: write to the memory of this plan, made for the same sizes.
    """
    device = cu_seqlens_q.get_device()
    batch_sizes = (seqused_k.shape[0], max_seqlen_q, heads, kv_heads, head_dim, total_q)
    planner, size = _get_planner(device, batch_sizes, causal, window_left, window_right)
    if into is not None and (into.shape != (size,) or into.dtype != torch.int32):
        raise ValueError(f"plan: {into.dtype} {tuple(into.shape)}; int32 ({size},) is needed, make a new plan")
    out = cu_seqlens_q.new_empty(size) if into is None else into
    cu_seqlens_q, seqused_k = cu_seqlens_q.contiguous(), seqused_k.contiguous()
    if seqused_k.shape[0] == 0:
        return out.zero_()
    planner.launch((cu_seqlens_q.data_ptr(), seqused_k.data_ptr(), out.data_ptr()))
    return out


def _build_plan_config(
    device: int, batch: int, max_seqlen_q: int, heads: int, kv_heads: int, head_dim: int, total_q: int | None
) -> tuple[ServingConfig, ServingSizes]:
    """Return the config and sizes that determine a plan. total_q: query tokens of all sequences, None if unknown."""
    tokens = batch * max_seqlen_q if total_q is None else total_q
    sizes = ServingSizes(
        sequences=batch, tokens=tokens, max_q_len=max_seqlen_q, heads=heads, kv_heads=kv_heads, pages=0, page=TILE,
        table_entries=0,
    )  # fmt: skip
    wide, few_rows = attention.row_tiles(head_dim, sizes, get_hopper_target(device).multiprocessors)
    return ServingConfig(head_dim=head_dim, wide=wide, few_rows=few_rows), replace(sizes, tokens=0)


@lru_cache(maxsize=_MAX_PLANS)
def _get_planner(
    device: int, batch_sizes: tuple[Any, ...], causal: bool, window_left: int, window_right: int
) -> tuple[LaunchPlan, int]:
    """Return the launch that makes a plan, and the size of the plan. batch_sizes: see ``_build_plan_config``."""
    return _build_planner(device, *_build_plan_config(device, *batch_sizes), causal, window_left, window_right)


@lru_cache(maxsize=_MAX_PLANS)
def _build_planner(
    device: int, config: ServingConfig, sizes: ServingSizes, causal: bool, window_left: int, window_right: int
) -> tuple[LaunchPlan, int]:
    """Build the same for all numbers of tokens with the same row tiles."""
    multiprocessors, window = (
        get_hopper_target(device).multiprocessors,
        _normalize_window(causal, window_left, window_right),
    )
    step = LaunchStep(attention.plan_kernel(config), attention.plan_launch(config, sizes, window, multiprocessors))
    size = _count_plan_words(config, sizes, attention.grid_blocks(config, sizes, multiprocessors))
    return LaunchPlan(device, (step,), ("cu_seqlens_q", "seqused_k", "plan")), size


def get_plan_size(
    batch: int, max_seqlen_q: int, heads: int, kv_heads: int, head_dim: int, total_q: int | None = None
) -> int:
    """Return the elements of a plan on the current device, for tracing."""
    device = torch.cuda.current_device()
    # Not cached, because traced numbers have no hash.
    config, sizes = _build_plan_config(device, batch, max_seqlen_q, heads, kv_heads, head_dim, total_q)
    return _count_plan_words(
        config, sizes, attention.grid_blocks(config, sizes, get_hopper_target(device).multiprocessors)
    )


def _count_plan_words(config: ServingConfig, sizes: ServingSizes, blocks: int) -> int:
    """Return ``attention.plan_words``, made odd for wide row tiles. Raises ValueError above the limit of the kernels.

    The size identifies a plan. A plan for another batch may have other row tiles, and the parity of its size shows
    which.
    """
    words = attention.plan_words(config, sizes, blocks) + (1 if config.wide else 0)
    if words >= 2**31:
        raise ValueError(
            f"max_seqlen_q: {sizes.max_q_len}, of {sizes.sequences} sequences; their plan would have {words} numbers, "
            "2**31 - 1 are allowed: give the longest sequence's queries"
        )
    return words


def get_slots_plan(
    starts: Tensor, before: Tensor | None, block_table: Tensor | None, counted_from: Tensor | None, tokens: int,
    max_pages: int, page_size: int,
) -> LaunchPlan:  # fmt: skip
    """Return the launch of ``token_slots`` with such tensors. All except the table must be contiguous."""
    device, batch = starts.get_device(), starts.shape[0] - 1
    tensors = {"starts": starts, "before": before, "counted_from": counted_from, "block_table": block_table}
    optional = frozenset(name for name, x in tensors.items() if x is not None) - {"starts"}
    entries = max_pages if block_table is None else block_table.shape[1]
    row = 0 if block_table is None else block_table.stride(0)
    options = ("slots", device, batch, tokens, page_size, entries, row, optional)
    plan = _PLANS.get(options)
    if plan is None:
        get_hopper_target(device)
        step = LaunchStep(slots.KERNEL, slots.launch(batch, tokens, page_size, entries, row, optional))
        names = (*tensors, "slots", "positions", "lengths", "made_table")
        plan = put_bounded(_PLANS, options, LaunchPlan(device, (step,), names), _MAX_PLANS)
    return plan


def token_slots(
    starts: Tensor, before: Tensor | None, block_table: Tensor | None, counted_from: Tensor | None, tokens: int,
    max_pages: int, page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute ``torch.ops.greenfast.token_slots`` of CUDA tensors."""
    batch = starts.shape[0] - 1
    slot_ids, positions = (starts.new_empty(tokens, dtype=torch.int64) for _ in range(2))
    lengths = starts.new_empty(batch)
    table = starts.new_empty((0, 0) if block_table is not None else (batch, max_pages))
    if batch == 0:
        return slot_ids.fill_(-1), positions.zero_(), lengths, table
    before, counted = (x if x is None else x.contiguous() for x in (before, counted_from))
    starts = starts.contiguous()
    plan = get_slots_plan(starts, before, block_table, counted, tokens, max_pages, page_size)
    buffers = (starts, before, counted, block_table, slot_ids, positions, lengths, table)
    plan.launch([0 if x is None else x.data_ptr() for x in buffers])
    return slot_ids, positions, lengths, table


def get_append_plan(*args: Any) -> LaunchPlan:
    """Return the launch of ``append_kv`` with such tensors. They are checked once per combination."""
    tensors, options = args[:NUM_APPEND_TENSORS], args[NUM_APPEND_TENSORS:]
    try:
        kinds = [x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
        key = ("append", *kinds, *options)
        cached = _PLANS.get(key)
    except (AttributeError, RuntimeError, TypeError):  # not strided tensors; the check raises
        check_append(*tensors, *options)
        raise
    if cached is None:
        check_append(*tensors, *options)
        cached = put_bounded(_PLANS, key, _build_append_plan(tensors, *options), _MAX_PLANS)
    return cached


def append_kv(*args: Any) -> Tensor:
    """Compute ``torch.ops.greenfast.append_kv`` of CUDA tensors: return Q for attention, empty if q is None."""
    q, k, _, k_cache, v_cache = args[:5]
    if isinstance(k, Tensor) and k.dim() == 3 and k.shape[0] == 0:  # nothing to launch
        check_append(*args)
        return k.new_empty(0) if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    plan = get_append_plan(*args)
    addresses = [0 if x is None else x.data_ptr() for x in args[:NUM_APPEND_TENSORS]]
    if not all(is_aligned(addresses[i]) for i in _IN_VECTORS):
        _check_addresses(k_cache, v_cache)
        moved = [
            x.clone() if i in _IN_VECTORS and x is not None else x for i, x in enumerate(args[:NUM_APPEND_TENSORS])
        ]
        return append_kv(*moved[:3], k_cache, v_cache, *moved[5:], *args[NUM_APPEND_TENSORS:])
    q_out = k.new_empty(0) if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    plan.launch([*addresses, q_out.data_ptr()])
    return q_out


_APPEND_BUFFERS = (
    "q", "k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale", "q_weight", "k_weight", "cos", "sin",
    "positions", "q_out",
)  # fmt: skip
#: The buffers that are accessed in vectors of 16 bytes. The others need no alignment.
_IN_VECTORS = tuple(
    _APPEND_BUFFERS.index(x) for x in ("q", "k", "v", "k_cache", "v_cache", "q_weight", "k_weight", "cos", "sin")
)


def _build_append_plan(tensors: tuple[Tensor | None, ...], eps: float, interleaved: bool) -> LaunchPlan:
    q, k, v, k_cache, v_cache, _, k_scale, v_scale, _, k_weight, cos, sin, positions = tensors
    assert k is not None and v is not None and k_cache is not None and v_cache is not None  # noqa: PT018
    assert k_scale is not None and v_scale is not None  # noqa: PT018
    device = k.get_device()
    get_hopper_target(device)
    grouped, per_token = v_cache.dim() == 5, k_scale.dim() == 3
    config = AppendConfig(
        head_dim=k.shape[2],
        page_size=k_cache.shape[1],
        dtype=_DTYPE_NAMES[k.dtype],
        value_layout="grouped" if grouped else "rows",
        scales="token" if per_token else "head",
        queries=q is not None,
        norm="" if k_weight is None else _DTYPE_NAMES[k_weight.dtype],
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        interleaved=interleaved,
        tables="float32" if cos is None else _DTYPE_NAMES[cos.dtype],
        positions="int64" if positions is None else _DTYPE_NAMES[positions.dtype],
    )
    sizes = AppendSizes(
        k.shape[0], 0 if q is None else q.shape[1], k.shape[1], k_cache.shape[0], 0 if cos is None else cos.shape[0]
    )
    value_strides = _get_row_strides(v_cache)
    strides = AppendStrides(
        query=(0, 0) if q is None else _get_row_strides(q),  # type: ignore[arg-type]
        key=_get_row_strides(k),  # type: ignore[arg-type]
        value=_get_row_strides(v),  # type: ignore[arg-type]
        key_cache=_get_row_strides(k_cache),  # type: ignore[arg-type]
        value_cache=(value_strides[0], 0, value_strides[1]) if grouped else value_strides[:3],  # type: ignore[arg-type]
        key_scale=k_scale.stride(0) if k_scale.dim() else 0,
        value_scale=v_scale.stride(0) if v_scale.dim() else 0,
        cos=0 if cos is None else cos.stride(0),
        sin=0 if sin is None else sin.stride(0),
    )
    return LaunchPlan(
        device, (LaunchStep(append.kernel(config), append.launch(config, sizes, strides, eps)),), _APPEND_BUFFERS
    )


def build_attention_steps(*args: Any) -> tuple[LaunchStep, ...]:
    """Build the launches of ``paged_attention`` on such tensors (meta tensors too); the first makes the work plan.

    args: the arguments of ``paged_attention``, with plan None and with causal, window_left and window_right as one
    tuple.
    """
    return _build_attention_plan(*args).steps


def build_append_step(tensors: tuple[Tensor | None, ...], eps: float, interleaved: bool) -> LaunchStep:
    """Build the launch of ``append_kv`` on such tensors (meta tensors too)."""
    return _build_append_plan(tensors, eps, interleaved).steps[0]
