"""Cached launches of serving calls: one plan for all launches of a request, with the addresses that it passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from greenfast.ops import torch_ops
from greenfast.ops.call_cache import CachedLaunch, CallCache, build_allocator
from greenfast.ops.layout import is_aligned, is_capturing
from greenfast.serving import torch_ops as serving_ops
from greenfast.serving.checks import should_check_values

#: The first items of a request of attention are tensors or None: first those with rows that begin at multiples of 16
#: bytes. Numbers and flags follow.
_ALIGNED_TENSORS = ("q", "k_cache", "v_cache", "out", "new_k", "new_v", "cos", "sin")
_OTHER_TENSORS = ("block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "q_scale", "sinks", "plan")
_REQUEST_TENSORS = (*_ALIGNED_TENSORS, "starts", "counted_from", *_OTHER_TENSORS)
_ATTENTION_TENSORS = (*_ALIGNED_TENSORS[:3], *_OTHER_TENSORS)  # in the order of the operator's arguments
#: The tensors of packed sequences, in the order of the operator's arguments, and their names in its plan.
_PACKED_TENSORS = {
    "q": "q", "new_k": "k", "new_v": "v", "cu_seqlens_q": "cu_seqlens_q", "starts": "cu_seqlens_k",
    "seqused_k": "seqused_k", "sinks": "sinks",
}  # fmt: skip
#: The same for a request of append_kv.
_ALIGNED_APPEND_TENSORS = ("q", "k", "v", "k_cache", "v_cache", "q_weight", "k_weight", "cos", "sin")
_APPEND_TENSORS = (*_ALIGNED_APPEND_TENSORS, "slot_mapping", "k_scale", "v_scale", "positions")
_APPEND_RENAMES = {"k": "new_k", "v": "new_v", "slot_mapping": "slots", "q_out": "turned"}
ATTENTION_CACHE, APPEND_CACHE = (
    CallCache(len(_REQUEST_TENSORS)),
    CallCache(len(_APPEND_TENSORS)),
)  # calls that skipped the dispatcher
CONCATENATED_PLANS: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_MAX_CONCATENATED = 1024


def _is_replayable(cache: CallCache, request: tuple[Any, ...], others: Sequence[Tensor], aligned_count: int) -> bool:
    """Return whether a request may be launched again.

    others: further tensors. aligned_count: the first tensors that must be aligned.

    Memory of a CUDA graph belongs to the graph, so calls inside a capture are not recorded.
    """
    tensors = [x for x in request if isinstance(x, Tensor)]
    return (
        cache.cacheable(request)
        and torch_ops.can_skip_dispatcher(*tensors, *others)
        and not should_check_values(tensors[0])
        and not is_capturing(tensors[0].device)
        and all(x is None or is_aligned(x.data_ptr()) for x in request[:aligned_count])
    )


def record_attention(request: tuple[Any, ...], args: tuple[Any, ...], out: Tensor, before: Any, *, lse: bool) -> None:
    """Record the launches of a request of attention, if the kernels used all its tensors without a copy.

    args: the arguments of attention. before: the arguments of the preceding ``token_slots`` and ``append_kv``, or None.
    """
    inputs = {name: x for name, x in zip(_REQUEST_TENSORS, request, strict=False) if isinstance(x, Tensor)}
    used = {name: x for name, x in _map_buffers(inputs, args, out, before).items() if x is not None}
    if not _is_replayable(ATTENTION_CACHE, request, [*used.values()], len(_ALIGNED_TENSORS)):
        return
    q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k, *_ = args
    not_empty = [q, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k]
    if before is not None:
        (starts, lengths, _, counted_from, *_), (_, k, v, *_) = before
        not_empty += [k, v]
        if not all(x is None or x.is_contiguous() for x in (starts, lengths, counted_from)):
            return
    if not out.is_contiguous() or any(x.numel() == 0 for x in not_empty):
        return
    if any(name not in used or x.data_ptr() != used[name].data_ptr() for name, x in inputs.items()):
        return
    constants = {name: x for name, x in used.items() if name not in inputs and x is not out}
    names = (*inputs, *(["lse"] if lse else []), *constants, "out")
    plan = _build_plan("seqused_k" in inputs, args, before, lse=lse).with_argument_order(names)
    aligned_count = sum(x in _ALIGNED_TENSORS for x in inputs)
    addresses = [x.data_ptr() for x in constants.values()]
    # Lengths made from a number belong to a stream; all other constants are synchronized.
    stream = torch._C._cuda_getCurrentRawStream(plan.device) if "seqused_k" in constants else None
    allocate_out = build_allocator(request[0], out.dtype)
    ATTENTION_CACHE.put(
        request, CachedLaunch(plan, allocate_out, aligned_count, lse, [*constants.values()], addresses, stream)
    )


def record_packed(request: tuple[Any, ...], args: tuple[Any, ...], *, lse: bool) -> None:
    """Record the launches of a request of packed sequences. args: the arguments of ``varlen``.

    Not if the log-sum-exp lacks the mean of the keys, because that is added after the launches.
    """
    inputs = {name: x for name, x in zip(_REQUEST_TENSORS, request, strict=False) if isinstance(x, Tensor)}
    used = {name: x for name, x in zip(_PACKED_TENSORS, args, strict=False) if x is not None}
    if not _is_replayable(ATTENTION_CACHE, request, [*used.values()], len(_ALIGNED_TENSORS)):
        return
    plan = torch_ops.load_cuda().get_varlen_plan(lse, *args)
    if plan is None or "k_mean" in plan.names or any(x is not used.get(n, x) for n, x in inputs.items()):
        return
    names = (*[_PACKED_TENSORS.get(n, n) for n in inputs], *(["lse"] if lse else []), "out")
    aligned_count = sum(x in _ALIGNED_TENSORS for x in inputs)
    launch = CachedLaunch(plan.with_argument_order(names), build_allocator(args[0], args[0].dtype), aligned_count, lse)
    ATTENTION_CACHE.put(request, launch)


def record_append(request: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Record the launches of a request of ``append_kv``. args: the operator's arguments."""
    inputs = {name: x for name, x in zip(_APPEND_TENSORS, request, strict=False) if x is not None}
    q, k, *_ = args
    if k.shape[0] and _is_replayable(APPEND_CACHE, request, [], len(_ALIGNED_APPEND_TENSORS)):
        plan = serving_ops.load_cuda().get_append_plan(*args)
        plan = plan.with_argument_order((*inputs, *([] if q is None else ["q_out"])))
        allocate_out = None if q is None else build_allocator(q, q.dtype)
        aligned_count = sum(x in _ALIGNED_APPEND_TENSORS for x in inputs)
        APPEND_CACHE.put(request, CachedLaunch(plan, allocate_out, aligned_count))


def _map_buffers(
    inputs: dict[str, Tensor], args: tuple[Any, ...], out: Tensor, before: Any
) -> dict[str, Tensor | None]:
    """Map buffers to the tensors that the kernels used. Tensors in the workspace are left out."""
    attention_buffers = dict(zip(_ATTENTION_TENSORS, args, strict=False)) | {"out": out}
    if before is None:
        return attention_buffers
    (starts, lengths, table, counted, *_), (q, k, v, *_, cos, sin, _, _, _) = before
    new = {"new_k": k, "new_v": v, "starts": starts, "counted_from": counted, "cos": cos, "sin": sin}
    if lengths is None:  # keys without a cache
        in_workspace = dict.fromkeys(("k_cache", "v_cache", "block_table", "k_scale", "v_scale"))
        return attention_buffers | new | in_workspace | {"seqused_k": inputs.get("seqused_k")}
    return (
        attention_buffers
        | new
        | {"q": attention_buffers["q"] if q is None else q, "block_table": table, "seqused_k": lengths}
    )


def _build_plan(has_lengths: bool, args: tuple[Any, ...], before: Any, *, lse: bool) -> Any:
    """Build one plan for all launches. has_lengths: the request has ``seqused_k``."""
    gpu = serving_ops.load_cuda()
    attention = gpu.get_attention_plan(*args, lse=lse)
    if before is None:
        return attention
    slots_args, append_args = before
    _, lengths, *_ = slots_args
    q, _, _, k_cache, v_cache, slots, k_scale, v_scale, *_ = append_args
    _, _, _, block_table, _, seqused_k, *_ = args
    temporary = {"slots": slots.nbytes, "positions": slots.nbytes, "lengths": seqused_k.nbytes}
    renamed, query_rename = {"seqused_k": "lengths"}, {} if q is None else {"q": "turned"}
    if q is not None:
        temporary["turned"] = q.numel() * q.itemsize
    if lengths is None:  # keys without a cache
        temporary |= {"made_table": block_table.nbytes, "k_cache": k_cache.nbytes, "v_cache": v_cache.nbytes}
        temporary |= {"k_scale": k_scale.nbytes, "v_scale": v_scale.nbytes}
        renamed = {"block_table": "made_table"} | ({} if has_lengths else renamed)
    parts = [
        (gpu.get_slots_plan(*slots_args), {"before": "seqused_k"}),
        (gpu.get_append_plan(*append_args), _APPEND_RENAMES),
        (attention, renamed | query_rename),
    ]
    # Calls that differ only in a length share the parts. The entry holds the parts, so that their ids stay valid.
    key = (*[id(plan) for plan, _ in parts], has_lengths)
    entry = CONCATENATED_PLANS.get(key)
    if entry is None:
        if len(CONCATENATED_PLANS) >= _MAX_CONCATENATED:
            CONCATENATED_PLANS.clear()  # another thread may clear it at any time
        entry = CONCATENATED_PLANS[key] = gpu.concat_plans(parts, ("lse", *_REQUEST_TENSORS), temporary), parts
    return entry[0]
