"""Comparisons of sizes that may be symbols of a traced graph.

A size that depends on data (``x[mask]``, ``nonzero``, ``item()``) is an unbacked symbol. A Python ``if`` on it raises
an error. A NumPy number gives a comparison of NumPy, and torch.jit.trace, where sizes are tensors, a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

#: ``experimental.symbolic_shapes`` imports SymPy. PyTorch loads it once a symbol exists, so calls look it up here.
_TORCH_FX: Any = torch.fx
_is_compiling = torch.compiler.is_compiling  # an eager call does about twenty comparisons


def is_known(condition: Any) -> bool:
    """Return whether a comparison of sizes is true; False also if only the run can decide it."""
    if type(condition) is bool and not _is_compiling():  # while compiling, the type of a symbol is bool
        return condition
    if isinstance(condition, np.bool_ | torch.Tensor):
        return bool(condition)
    return bool(_TORCH_FX.experimental.symbolic_shapes.guard_or_false(condition))


def is_certain(condition: Any) -> bool:
    """Return whether a comparison of sizes is true for all sizes that a graph is meant for.

    For a choice between two correct computations. A graph of torch.compile may guard on it, and other sizes get another
    graph. An exported program has one graph, and so has a range that ``mark_dynamic`` declares: nothing is guarded, and
    the result is False unless the declared sizes decide it.
    """
    if type(condition) is bool and not _is_compiling():
        return condition
    if isinstance(condition, np.bool_ | torch.Tensor):
        return bool(condition)
    shapes = _TORCH_FX.experimental.symbolic_shapes
    if _is_only_graph():
        return bool(shapes.statically_known_true(condition))
    return bool(shapes.guard_or_false(condition))


def _is_only_graph() -> bool:
    """Return whether one graph is for all sizes.

    It is if the program is exported, or if ``torch._dynamo.mark_dynamic`` has declared a minimum or maximum of an
    input's size.
    """
    if torch.compiler.is_exporting():
        return True
    context = torch._guards.TracingContext.try_get()
    env = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    strict = _TORCH_FX.experimental.symbolic_shapes.StrictMinMaxConstraint
    inputs = getattr(env, "tracked_fakes", None) or ()
    return any(
        isinstance(constraint, strict)
        for x in inputs
        for constraint in getattr(x.symbolic_context, "constraint_sizes", None) or ()
    )


# A constant of the graph: torch.compile calls it while it traces. PyTorch 2.11 traces ``is_exporting`` itself as True.
_is_only_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def require(condition: Any) -> bool:
    """Return False if a comparison of sizes is false. If only the run can decide it, the graph asserts it."""
    if type(condition) is bool and not _is_compiling():
        return condition
    if isinstance(condition, np.bool_ | torch.Tensor):
        return bool(condition)
    if not _TORCH_FX.experimental.symbolic_shapes.guard_or_true(condition):
        return False
    torch._check(condition)  # type: ignore[no-untyped-call]
    return True


def require_same_shape(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return False if two shapes differ; sizes are compared as by ``require``."""
    if len(shape) != len(other):
        return False
    for a, b in zip(shape, other, strict=True):  # noqa: SIM110 - torch.compile traces no generator here
        if not require(a == b):
            return False
    return True


def may_be_same_shape(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes are equal; True also if only the run can decide it."""
    return len(shape) == len(other) and not any([is_known(a != b) for a, b in zip(shape, other, strict=True)])


def broadcast_shapes(*shapes: Sequence[Any]) -> tuple[Any, ...] | None:
    """Broadcast shapes. Return None if they do not broadcast. A symbol counts as not 1, as in PyTorch."""
    sizes: list[Any] = []
    for dim in range(1, max(len(x) for x in shapes) + 1):
        size = 1
        for x in shapes:
            n = x[-dim] if dim <= len(x) else 1
            if is_known(n == 1):
                continue
            if not is_known(size == 1) and not require(size == n):
                return None
            size = n
        sizes.insert(0, size)
    return tuple(sizes)
