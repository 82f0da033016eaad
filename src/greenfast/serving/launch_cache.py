"""Calls for servers that come again: what was launched for them, to be launched with other addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from greenfast.ops import torch_ops
from greenfast.ops.call_cache import CallCache
from greenfast.ops.layout import ROW_ALIGNMENT, is_aligned, is_capturing
from greenfast.serving import torch_ops as serving_ops
from greenfast.serving.checks import should_check_values

#: The tensors that a request of attention begins with, None where not given: first the ones with rows, which begin at
#: multiples of 16 bytes. What follows them are numbers and flags.
_ALIGNED_TENSORS = ("q", "k_cache", "v_cache", "out", "new_k", "new_v", "cos", "sin")
_OTHER_TENSORS = ("block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "q_scale", "sinks", "plan")
_REQUEST_TENSORS = (*_ALIGNED_TENSORS, "starts", "counted_from", *_OTHER_TENSORS)
_ATTENTION_TENSORS = (*_ALIGNED_TENSORS[:3], *_OTHER_TENSORS)  # as the operator has them
#: The same of a request of append_kv.
_ALIGNED_APPEND_TENSORS = ("q", "k", "v", "k_cache", "v_cache", "q_weight", "k_weight", "cos", "sin")
_APPEND_TENSORS = (*_ALIGNED_APPEND_TENSORS, "slot_mapping", "k_scale", "v_scale", "positions")
_APPEND_RENAMES = {"k": "new_k", "v": "new_v", "slot_mapping": "slots", "q_out": "turned"}
ATTENTION_CACHE, APPEND_CACHE = (
    CallCache(len(_REQUEST_TENSORS)),
    CallCache(len(_APPEND_TENSORS)),
)  # calls that skipped the dispatcher
CONCATENATED_PLANS: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_MAX_CONCATENATED = 1024


@dataclass(slots=True)
class CachedLaunch:
    """A call that was launched before.

    plan: it takes the addresses of the call's tensors, of the log-sum-exp where that is wanted (``lse``), of what is
    kept, which the call did not give, and of the output. empty: makes an output like Q. rows: how many of the call's
    tensors must begin at multiples of 16 bytes, the first ones. stream: the one that calls must be on, where what is
    kept was made on it: on others it may not be there yet.
    """

    plan: Any
    empty: Callable[[Tensor], Tensor] | None
    lse: bool
    rows: int
    kept: Sequence[Tensor]
    addresses: Sequence[int]  # of those kept
    stream: int | None = None


def replay(cache: CallCache, request: tuple[Any, ...], q: Any, out: Any = None) -> tuple[Any, Tensor | None] | None:
    """Launch what such a call launched before: its output, and the log-sum-exp where it is wanted.

    None if it is not known, and where it has to be seen.
    """
    known, tensors = cache.get(request)
    if known is None or torch_ops.dispatch_mode_active():
        return None
    if known.stream is not None and known.stream != torch._C._cuda_getCurrentRawStream(known.plan.device):
        return None
    addresses = [*map(Tensor.data_ptr, tensors)]
    for address in addresses[: known.rows]:
        if address % ROW_ALIGNMENT:
            return None
    if out is None and known.empty is not None:
        out = known.empty(q)
    lse = None
    if known.lse:
        lse = q.new_empty((q.shape[-2], q.shape[:-2].numel()), dtype=torch.float32)
        addresses.append(lse.data_ptr())
    addresses += known.addresses
    if out is not None:
        addresses.append(out.data_ptr())
    known.plan.launch(addresses)
    return out, lse


def _build_allocator(q: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What makes contiguous outputs for such queries, of a dtype."""
    if q.dtype != dtype:
        return partial(torch.empty_like, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty_like if q.is_contiguous() else partial(torch.empty_like, memory_format=torch.contiguous_format)


def _is_replayable(cache: CallCache, request: tuple[Any, ...], others: Sequence[Tensor], rows: int) -> bool:
    """Whether such a request may be launched again. others: further tensors. rows: how many of its first have rows.

    Memory of a CUDA graph belongs to the graph.
    """
    given = [x for x in request if isinstance(x, Tensor)]
    return (
        cache.cacheable(request)
        and torch_ops.can_skip_dispatcher(*given, *others)
        and not should_check_values(given[0])
        and not is_capturing(given[0].device)
        and all(x is None or is_aligned(x.data_ptr()) for x in request[:rows])
    )


def record_attention(request: tuple[Any, ...], args: tuple[Any, ...], out: Tensor, before: Any, *, lse: bool) -> None:
    """Keep what was launched for this request of attention, if the kernels took all tensors as they are.

    args: the attention's. before: of what was launched before it, ``token_slots`` and ``append_kv``.
    """
    given = {name: x for name, x in zip(_REQUEST_TENSORS, request, strict=False) if isinstance(x, Tensor)}
    used = {name: x for name, x in _map_buffers(given, args, out, before).items() if x is not None}
    if not _is_replayable(ATTENTION_CACHE, request, [*used.values()], len(_ALIGNED_TENSORS)):
        return
    sizes = (*args[:6], *(() if before is None else before[1][1:3]))
    if not out.is_contiguous() or any(x.numel() == 0 for x in sizes):
        return
    if before is not None and not all(x is None or x.is_contiguous() for x in (*before[0][:2], before[0][3])):
        return
    if any(name not in used or x.data_ptr() != used[name].data_ptr() for name, x in given.items()):
        return
    kept = {name: x for name, x in used.items() if name not in given and x is not out}
    names = (*given, *(["lse"] if lse else []), *kept, "out")
    plan = _build_plan("seqused_k" in given, args, before, lse=lse).with_argument_order(names)
    rows, addresses = sum(x in _ALIGNED_TENSORS for x in given), [x.data_ptr() for x in kept.values()]
    # Lengths from a number; all else that is kept are constants, which were waited for.
    stream = torch._C._cuda_getCurrentRawStream(plan.device) if "seqused_k" in kept else None
    empty = _build_allocator(request[0], out.dtype)
    ATTENTION_CACHE.put(request, CachedLaunch(plan, empty, lse, rows, [*kept.values()], addresses, stream))


def record_append(request: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Keep what was launched for this request of ``append_kv``. args: the operator's."""
    given = {name: x for name, x in zip(_APPEND_TENSORS, request, strict=False) if x is not None}
    q, k = args[:2]
    if k.shape[0] and _is_replayable(APPEND_CACHE, request, [], len(_ALIGNED_APPEND_TENSORS)):
        plan = (
            serving_ops.load_cuda()
            .get_append_plan(*args)
            .with_argument_order((*given, *([] if q is None else ["q_out"])))
        )
        empty, rows = q if q is None else _build_allocator(q, q.dtype), sum(x in _ALIGNED_APPEND_TENSORS for x in given)
        APPEND_CACHE.put(request, CachedLaunch(plan, empty, False, rows, [], []))


def _map_buffers(given: dict[str, Tensor], args: tuple[Any, ...], out: Tensor, before: Any) -> dict[str, Tensor | None]:
    """What took the places of a request's tensors; without those that the workspace has."""
    of_attention = dict(zip(_ATTENTION_TENSORS, args, strict=False)) | {"out": out}
    if before is None:
        return of_attention
    (starts, lengths, table, counted, *_), (q, k, v, *_, cos, sin, _, _, _) = before
    new = {"new_k": k, "new_v": v, "starts": starts, "counted_from": counted, "cos": cos, "sin": sin}
    if lengths is None:  # keys that are in no cache
        in_workspace = dict.fromkeys(("k_cache", "v_cache", "block_table", "k_scale", "v_scale"))
        return of_attention | new | in_workspace | {"seqused_k": given.get("seqused_k")}
    return of_attention | new | {"q": args[0] if q is None else q, "block_table": table, "seqused_k": lengths}


def _build_plan(has_lengths: bool, args: tuple[Any, ...], before: Any, *, lse: bool) -> Any:
    """One plan for all that is launched. has_lengths: whether the request has ``seqused_k``."""
    gpu = serving_ops.load_cuda()
    attention = gpu.get_attention_plan(*args, lse=lse)
    if before is None:
        return attention
    of_slots, (q, _, _, k_cache, v_cache, slots, k_scale, v_scale) = before[0], before[1][:8]
    temporary = {"slots": slots.nbytes, "positions": slots.nbytes, "lengths": args[5].nbytes}
    renamed, of_queries = {"seqused_k": "lengths"}, {} if q is None else {"q": "turned"}
    if q is not None:
        temporary["turned"] = q.numel() * q.itemsize
    if of_slots[1] is None:
        temporary |= {"made_table": args[3].nbytes, "k_cache": k_cache.nbytes, "v_cache": v_cache.nbytes}
        temporary |= {"k_scale": k_scale.nbytes, "v_scale": v_scale.nbytes}
        renamed = {"block_table": "made_table"} | ({} if has_lengths else renamed)
    parts = [
        (gpu.get_slots_plan(*of_slots), {"before": "seqused_k"}),
        (gpu.get_append_plan(*before[1]), _APPEND_RENAMES),
        (attention, renamed | of_queries),
    ]
    # Calls that differ in a length have the same parts; their entry keeps these, and so their identities.
    at = (*[id(plan) for plan, _ in parts], has_lengths)
    found = CONCATENATED_PLANS.get(at)
    if found is None:
        if len(CONCATENATED_PLANS) >= _MAX_CONCATENATED:
            CONCATENATED_PLANS.clear()  # another thread may do so at any time
        found = CONCATENATED_PLANS[at] = gpu.concat_plans(parts, ("lse", *_REQUEST_TENSORS), temporary), parts
    return found[0]
