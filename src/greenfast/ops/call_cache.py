"""Cache of values by the arguments of a call, and the replay of launches that were cached.

Tensors are compared by guards, at a fraction of a Python key's cost. A replayed call skips the argument checks, and
launches its plan with new addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from greenfast.ops import torch_ops
from greenfast.ops.layout import ROW_ALIGNMENT

_MAX_KEYS = 4096  # keys of non-tensor arguments, for each combination of argument types
_MAX_GUARDS = 4  # guards for each key; the newest ones stay
_CACHEABLE_TYPES = {Tensor, type(None), bool, int, float, str, tuple}

Arguments = tuple[Any, ...]


class _TypeEntry(NamedTuple):
    """The cached calls with one combination of argument types.

    select_tensors, select_others: select the tensors and the other arguments of a call. values: for each key of other
    arguments, pairs of a guard for the tensors and the cached value.
    """

    select_tensors: Callable[[Arguments], tuple[Any, ...]]
    select_others: Callable[[Arguments], tuple[Any, ...]]
    values: dict[tuple[Any, ...], tuple[tuple[Callable[..., Any], Any], ...]]


class CallCache:
    """A cache with the arguments of a call as its key. It holds no tensor.

    Two calls have the same key if all arguments have equal types, the tensors match, and the other arguments are equal.
    Tensors match if Python type, dtype, shape, strides, device, ``requires_grad`` and dispatch keys are equal.
    Inference tensors, functorch wrappers, tracing and autocast change the dispatch keys, so such calls have other keys.
    """

    def __init__(self, tensors: int) -> None:
        """tensors: only the first ``tensors`` arguments may be tensors."""
        self._tensors = tensors
        self._entries: dict[tuple[type, ...], _TypeEntry] = {}

    def get(self, args: Arguments) -> tuple[Any, tuple[Tensor, ...]]:
        """Return the cached value and the tensors of the call, in order; (None, ()) if the call is not in the cache."""
        entry = self._entries.get((*map(type, args),))
        if entry is not None:
            tensors = entry.select_tensors(args)
            for guard, value in entry.values.get(entry.select_others(args), ()):
                if guard(*tensors):
                    return value, tensors
        return None, ()

    def cacheable(self, args: Arguments) -> bool:
        """Return whether all arguments are tensors or plain values. The items of tuples are not checked."""
        types = [*map(type, args)]
        return _CACHEABLE_TYPES.issuperset(types) and Tensor not in types[self._tensors :]

    def put(self, args: Arguments, value: Any) -> None:
        """Store a value, unless the call is not cacheable. The oldest of several guards for one key is dropped."""
        if not self.cacheable(args):
            return
        types = (*map(type, args),)
        entry = self._entries.get(types)
        if entry is None:
            tensors = [i for i, t in enumerate(types) if t is Tensor]
            others = [i for i, t in enumerate(types) if t is not Tensor and t is not type(None)]
            entry = self._entries[types] = _TypeEntry(_build_selector(tensors), _build_selector(others), {})
        if len(entry.values) >= _MAX_KEYS:
            entry.values.clear()
        key, guarded = entry.select_others(args), (_build_guard(entry.select_tensors(args)), value)
        entry.values[key] = (guarded, *entry.values.get(key, ()))[:_MAX_GUARDS]

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()


def _build_selector(indices: Sequence[int]) -> Callable[[Arguments], tuple[Any, ...]]:
    """Return a function that selects these items of a tuple, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return itemgetter(slice(*(indices[0], indices[0] + 1) if indices else (0, 0)))


def _build_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that checks whether tensors match these."""
    ids = [*map(id, tensors)]
    repeated = [i for i, name in enumerate(ids) if ids.index(name) < i]
    if not repeated:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    # TensorGuards accepts each tensor only once.
    unique = [i for i in range(len(ids)) if i not in repeated]
    select_unique, select_repeated = _build_selector(unique), _build_selector(repeated)
    guard_unique = _build_guard(select_unique(tuple(tensors)))
    guard_repeated = _build_guard(select_repeated(tuple(tensors)))
    return lambda *args: guard_unique(*select_unique(args)) and guard_repeated(*select_repeated(args))


@dataclass(slots=True)
class CachedLaunch:
    """The launches of an earlier call.

    plan: holds the addresses of the call's tensors, of the log-sum-exp (with ``lse``), of the constants, and of the
    output. allocate_out: allocates an output like Q. aligned_count: the first ``aligned_count`` tensors of the call
    must begin at multiples of 16 bytes. constants: tensors of the launches that the call does not pass. addresses:
    of the constants. stream: the stream of constants that are not synchronized. Calls on other streams must not
    use them.
    """

    plan: Any
    allocate_out: Callable[[Tensor], Tensor] | None
    aligned_count: int
    lse: bool = False
    constants: Sequence[Tensor] = ()
    addresses: Sequence[int] = ()
    stream: int | None = None


def store_plan(cache: CallCache, request: Arguments, plan: Any, q: Tensor, aligned_count: int = 3) -> None:
    """Store the plan of a call with an output like Q, so that ``replay`` launches it; None for a call without one."""
    if plan is not None:
        cache.put(request, CachedLaunch(plan, build_allocator(q, q.dtype, plan.out_strides), aligned_count))


def replay(cache: CallCache, request: Arguments, q: Any, out: Any = None) -> tuple[Any, Tensor | None] | None:
    """Launch the cached plan of a request. Return the output, and the log-sum-exp or None.

    Return None if the call is not in the cache, if a dispatch mode is active, or if an address is not aligned.
    """
    launch, tensors = cache.get(request)
    if launch is None or torch_ops.dispatch_mode_active():
        return None
    if launch.stream is not None and launch.stream != torch._C._cuda_getCurrentRawStream(launch.plan.device):
        return None
    addresses = [*map(Tensor.data_ptr, tensors)]
    for address in addresses[: launch.aligned_count]:
        if address % ROW_ALIGNMENT:
            return None
    if out is None and launch.allocate_out is not None:
        out = launch.allocate_out(q)
    lse = None
    if launch.lse:
        lse = q.new_empty((q.shape[-2], q.shape[:-2].numel()), dtype=torch.float32)
        addresses.append(lse.data_ptr())
    addresses += launch.addresses
    if out is not None:
        addresses.append(out.data_ptr())
    launch.plan.launch(addresses)
    return out, lse


def build_allocator(q: Tensor, dtype: torch.dtype, strides: Sequence[int] | None = None) -> Callable[[Tensor], Tensor]:
    """Build a function that allocates outputs of a dtype, like these queries. strides: contiguous by default."""
    if strides is not None and q.stride() != strides:
        return partial(Tensor.new_empty_strided, size=q.shape, stride=strides)
    if q.dtype != dtype:
        return partial(torch.empty_like, dtype=dtype, memory_format=torch.contiguous_format)
    if strides is None and not q.is_contiguous():
        return partial(torch.empty_like, memory_format=torch.contiguous_format)
    return torch.empty_like
