"""Calls that were made before, found by what their arguments are like; guards cost a fraction of keys in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

_MOST = 4096  # combinations of other arguments, of each kind
_MOST_ALIKE = 4  # kinds of tensors, for each of them: the last ones
_VALUES = {Tensor, type(None), bool, int, float, str, tuple}

Arguments = tuple[Any, ...]


class _Kind(NamedTuple):
    """Calls whose arguments have the same types: where their tensors and other values are, and what was kept."""

    tensors: Callable[[Arguments], tuple[Any, ...]]
    others: Callable[[Arguments], tuple[Any, ...]]
    found: dict[tuple[Any, ...], tuple[tuple[Callable[..., bool], Any], ...]]


class Repeats:
    """Values by the arguments of a call, which are alike where tensors are, and others are equal and of one type.

    Tensors are alike in their Python type, dtype, shape, strides, device, whether a gradient is wanted, and the
    dispatch keys that apply to them, so that inference tensors, functorch's wrappers, tracing and autocast make a call
    another one. No tensor is kept.
    """

    def __init__(self, tensors: int) -> None:
        """tensors: how many of the arguments, the first ones, may be tensors."""
        self._tensors = tensors
        self._kinds: dict[tuple[type, ...], _Kind] = {}

    def find(self, args: Arguments) -> tuple[Any, tuple[Tensor, ...]]:
        """What was kept for such a call, and the call's tensors in their order; None if there is nothing."""
        kind = self._kinds.get((*map(type, args),))
        if kind is not None:
            tensors = kind.tensors(args)
            for alike, value in kind.found.get(kind.others(args), ()):
                if alike(*tensors):
                    return value, tensors
        return None, ()

    def takes(self, args: Arguments) -> bool:
        """Whether all arguments are tensors and plain values; numbers in a tuple have to be checked elsewhere."""
        types = [*map(type, args)]
        return _VALUES.issuperset(types) and Tensor not in types[self._tensors :]

    def keep(self, args: Arguments, value: Any) -> None:
        """Keep a value for such calls, if it takes them; the oldest of several kinds of tensors is dropped."""
        if not self.takes(args):
            return
        types = (*map(type, args),)
        kind = self._kinds.get(types)
        if kind is None:
            others = [i for i, t in enumerate(types) if t is not Tensor and t is not type(None)]
            kind = _Kind(_taking([i for i, t in enumerate(types) if t is Tensor]), _taking(others), {})
            self._kinds[types] = kind
        if len(kind.found) >= _MOST:
            kind.found.clear()
        at, entry = kind.others(args), (_alike(kind.tensors(args)), value)
        kind.found[at] = (entry, *kind.found.get(at, ()))[:_MOST_ALIKE]

    def clear(self) -> None:
        """Forget all calls."""
        self._kinds.clear()


def _taking(places: Sequence[int]) -> Callable[[Arguments], tuple[Any, ...]]:
    """The function that takes these items of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(*(places[0], places[0] + 1) if places else (0, 0)))


def _alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether tensors are like these."""
    names = [*map(id, tensors)]
    again = [i for i, name in enumerate(names) if names.index(name) < i]
    if not again:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    # TensorGuards takes no tensor twice.
    once, rest = (_taking(x) for x in ([i for i in range(len(names)) if i not in again], again))
    first, others = _alike(once(tuple(tensors))), _alike(rest(tuple(tensors)))
    return lambda *given: first(*once(given)) and others(*rest(given))
