"""Calls that were made before, found by what their tensors are like at a tenth of the cost of comparing in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

_MOST = 4096  # combinations of other arguments
_MOST_KINDS = 4  # of tensors, for each of them: the last ones


class Repeats:
    """Values by the tensors of a call and by its other arguments, ``options``, which must be equal.

    Tensors are alike in their Python type, dtype, shape, strides, device, whether a gradient is wanted, and the
    dispatch keys that apply to them, so that inference tensors, functorch's wrappers, modes and autocast make a call
    another one. No tensor is kept. Options tell which tensors there are, and hold no tensors and no mutable values.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[tuple[Any, Any], ...]] = {}

    def find(self, options: tuple[Any, ...], tensors: Sequence[Any]) -> Any:
        """What was kept for such a call; None if there is nothing, and where ``tensors`` are none."""
        for guards, value in self._found.get(options, ()):
            if guards.check(*tensors):
                return value
        same = _same(tensors)
        return None if same is None else self.find((options, same), _each_once(tensors, same))

    def keep(self, options: tuple[Any, ...], tensors: Sequence[Tensor], value: Any) -> None:
        """Keep a value for such calls; the oldest of several kinds of tensors is dropped."""
        same = _same(tensors)
        if same is not None:
            options, tensors = (options, same), _each_once(tensors, same)
        if len(self._found) >= _MOST:
            self._found.clear()
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._found[options] = ((guards, value), *self._found.get(options, ()))[:_MOST_KINDS]

    def clear(self) -> None:
        """Forget all calls."""
        self._found.clear()


def _same(tensors: Sequence[Any]) -> tuple[int, ...] | None:
    """Of each tensor, the place of the first that is the same object; None where all differ.

    TensorGuards takes no tensor twice.
    """
    names = [*map(id, tensors)]
    return None if len(set(names)) == len(names) else tuple(map(names.index, names))


def _each_once(tensors: Sequence[Any], same: tuple[int, ...]) -> list[Any]:
    return [x for i, x in enumerate(tensors) if same[i] == i]
