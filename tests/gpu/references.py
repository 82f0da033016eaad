"""The references in float64, computed on the GPU: on the CPU they would take most of the GPU tests' time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greenfast.numerics import attention as on_cpu

#: Bytes of GPU memory that a process may keep for the next reference; many processes share the GPU.
_KEPT = 1 << 30


def attention(*args: Any, **options: float) -> Tensor:
    """``numerics.attention.attention``; arguments and result are on the CPU."""
    found: Tensor = _on_gpu(on_cpu.attention, args, options)
    return found


def attention_rounding_bound(*args: Any, **options: float) -> Tensor:
    """``numerics.attention.attention_rounding_bound``; arguments and result are on the CPU."""
    found: Tensor = _on_gpu(on_cpu.attention_rounding_bound, args, options)
    return found


def attention_with_bounds(*args: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """``numerics.attention.attention_with_bounds``; arguments and results are on the CPU."""
    out, bounds = _on_gpu(on_cpu.attention_with_bounds, args, options)
    return out, bounds


def _on_gpu(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if not torch.cuda.is_available():  # also if this torch cannot use the GPU
        return function(*args, **options)
    found = function(*[a.cuda() if isinstance(a, Tensor) else a for a in args], **options)
    found = found.cpu() if isinstance(found, Tensor) else (found[0].cpu(), [bound.cpu() for bound in found[1]])
    if torch.cuda.memory_reserved() > _KEPT:
        torch.cuda.empty_cache()
    return found
