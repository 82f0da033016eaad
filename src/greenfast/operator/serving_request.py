"""Calls of attention for servers that come again: what was launched for them, to be launched with other addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from greenfast.operator import ops, serving_ops
from greenfast.operator.layout import aligned, capturing
from greenfast.operator.repeats import Repeats
from greenfast.operator.serving import ServingPlan
from greenfast.operator.serving_checks import checks_values

KNOWN = Repeats()  # of calls that skipped the dispatcher
JOINED: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_MOST_JOINED = 1024
_TWO_INTS = [int, int]


class _Known(NamedTuple):
    """A call that was launched before: its plan, and the addresses of tensors that the call did not give, else 0.

    like: whether the output is as ``torch.empty_like(q)``; else it is of dtype. kept: the tensors of these addresses.
    """

    plan: Any
    addresses: tuple[int, ...]
    like: bool
    dtype: torch.dtype
    kept: tuple[Tensor, ...]


#: The tensors of a request: first the ones that every attention has, then the ones of new keys.
_NAMES = (
    "q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k", "k_scale", "v_scale", "q_scale", "sinks",
    "plan", "out",
)  # fmt: skip
_OF_NEW_KEYS = ("new_k", "new_v", "starts", "counted_from", "cos", "sin")
_OUT, _APPENDED = _NAMES.index("out"), {"k": "new_k", "v": "new_v", "slot_mapping": "slots", "q_out": "turned"}


class Request:
    """Attention as it was called, to be launched as the last time or else remembered.

    tensors: the operator's in its order up to the sinks, as given, Q of any leading dimensions; None where not given.
    options: max_seqlen_q, softmax_scale, causal, window_size, softcap, and whether the log-sum-exp is wanted.
    number: one more, or None. new: k, v, their cumulative lengths, the lengths that rotations count from, cos and sin.
    """

    __slots__ = ("_all", "_given", "_options")

    def __init__(
        self, tensors: tuple[Any, ...], plan: ServingPlan | None, out: Tensor | None, options: tuple[Any, ...],
        number: int | None = None, new: tuple[Any, ...] = (), interleaved: bool = False,
    ) -> None:  # fmt: skip
        most, scale, causal, window, softcap, _ = options
        self._options: tuple[Any, ...] | None = None
        # What equals a number that was checked, such as True, and what may change is not remembered.
        if (
            type(softcap) is float and (scale is None or type(scale) is float) and (causal is True or causal is False)
            and (most is None or type(most) is int) and (type(window) is tuple and [*map(type, window)] == _TWO_INTS)
            and (plan is None or type(plan) is ServingPlan) and (number is None or type(number) is int)
            and (interleaved is True or interleaved is False)
        ):  # fmt: skip
            self._all = (*tensors, None if plan is None else plan.tensor, out, *new)
            self._given = [x for x in self._all if x is not None]
            of_plan = () if plan is None else (plan.max_seqlen_q, plan.heads, plan.kv_heads, plan.head_dim, plan.mask)
            self._options = (options, number, interleaved, of_plan, *[x is None for x in self._all])

    def again(self) -> tuple[Tensor, Any] | None:
        """The output and log-sum-exp; None where nothing like it was launched, or the call has to be seen."""
        if self._options is None:
            return None
        known: _Known | None = KNOWN.find(self._options, self._given)
        if known is None or not ops.unobserved() or checks_values(self._all[0]):
            return None
        addresses = [a if x is None else x.data_ptr() for x, a in zip(self._all, known.addresses, strict=True)]
        rows = addresses[0] | addresses[1] | addresses[2] | addresses[_OUT]
        for address in addresses[_OUT + 1 :]:  # of new keys
            rows |= address
        if not aligned(rows):
            return None
        q, out = self._all[0], self._all[_OUT]
        if out is None:
            out = torch.empty_like(q) if known.like else q.new_empty(q.shape, dtype=known.dtype)
            addresses[_OUT] = out.data_ptr()
        lse = None
        if self._options[0][-1]:
            lse = q.new_empty((q.shape[-2], q.shape[:-2].numel()), dtype=torch.float32)
        known.plan.launch([0 if lse is None else lse.data_ptr(), *addresses])
        return out, lse

    def remember(
        self, args: tuple[Any, ...], out: Tensor, before: tuple[tuple[Any, ...], tuple[Any, ...]] | None
    ) -> None:
        """Keep what was launched for this call, if the kernels took all tensors as they are.

        args: the attention's. before: of what was launched before it, ``token_slots`` and ``append_kv``.
        """
        if self._options is None or torch.compiler.is_compiling() or checks_values(out):
            return
        used = self._used(args, out, before)
        if not ops.may_skip_dispatcher(*self._given, *[x for x in used if x is not None]) or capturing(out.device):
            return  # memory of a CUDA graph belongs to the graph
        sizes = (*args[:6], *(() if before is None else before[1][1:3]))
        if not out.is_contiguous() or any(x.numel() == 0 for x in sizes):
            return
        if before is not None and not all(x is None or x.is_contiguous() for x in (*before[0][:2], before[0][3])):
            return
        pairs = [*zip(self._all, used, strict=True)]
        if any(x is not None and (y is None or x.data_ptr() != y.data_ptr()) for x, y in pairs):
            return
        kept = tuple(y for x, y in pairs if x is None and y is not None and y is not out)
        addresses = tuple(0 if y is None else y.data_ptr() for y in used)
        like = self._all[0].is_contiguous() and self._all[0].dtype == out.dtype
        plan = self._plan(args, before)
        KNOWN.keep(self._options, self._given, _Known(plan, addresses, like, out.dtype, kept))

    def _used(self, args: tuple[Any, ...], out: Tensor, before: Any) -> tuple[Tensor | None, ...]:
        """The tensors in the places of the request's; None where the workspace has them."""
        if before is None:
            return (*args[:11], out)
        (starts, lengths, table, counted, *_), (q, k, v, *_) = before
        new = (k, v, starts, counted, *before[1][10:12])
        if lengths is None:  # keys that are in no cache
            return (args[0], None, None, None, args[4], self._all[5], None, None, *args[8:11], out, *new)
        return (args[0] if q is None else q, *args[1:3], table, args[4], lengths, *args[6:11], out, *new)

    def _plan(self, args: tuple[Any, ...], before: Any) -> Any:
        """One plan for all that is launched."""
        gpu = serving_ops.gpu()
        attention = gpu.attention_plan(*args, lse=self._options is not None and self._options[0][-1])
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
            renamed = {"block_table": "made_table"} | (renamed if self._all[5] is None else {})
        parts = [
            (gpu.slots_plan(*of_slots), {"before": "seqused_k"}),
            (gpu.append_plan(*before[1]), _APPENDED),
            (attention, renamed | of_queries),
        ]
        # Calls that differ in a length have the same parts; their entry keeps these, and so their identities.
        at = (*[id(plan) for plan, _ in parts], self._all[5] is None)
        found = JOINED.get(at)
        if found is None:
            if len(JOINED) >= _MOST_JOINED:
                JOINED.clear()  # another thread may do so at any time
            found = JOINED[at] = gpu.joined(parts, ("lse", *_NAMES, *_OF_NEW_KEYS), temporary), parts
        return found[0]
