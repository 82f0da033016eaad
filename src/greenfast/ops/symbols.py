"""Comparisons of sizes that may be symbols of a traced graph.

A size that depends on data (``x[mask]``, ``nonzero``, ``item()``) is an unbacked symbol. A Python ``if`` on it raises
an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: ``experimental.symbolic_shapes`` imports SymPy. PyTorch loads it once a symbol exists, so calls look it up here.
_TORCH_FX: Any = torch.fx
_is_compiling = torch.compiler.is_compiling  # an eager call does about twenty comparisons


def is_known(condition: Any) -> bool:
    """Return whether a comparison of sizes is true; False also if only the run can decide it."""
    if type(condition) is bool and not _is_compiling():  # while compiling, the type of a symbol is bool
        return condition
    return bool(_TORCH_FX.experimental.symbolic_shapes.guard_or_false(condition))


def require(condition: Any) -> bool:
    """Return False if a comparison of sizes is false. If only the run can decide it, the graph asserts it."""
    if type(condition) is bool and not _is_compiling():
        return condition
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
