"""Guard bytes around the buffers of operators. Buffers are filled with NaN, to show missing and stray writes."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

GUARD = 4096  # bytes on each side
FILL = 0xFF  # NaN as float32, float16, bfloat16 and E4M3

_empty = torch.empty


def guarded(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    """A tensor of FILL, and the memory around it, uint8."""
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else 0
    size = extent * dtype.itemsize
    memory = _empty(GUARD + -(-size // 256) * 256 + GUARD, dtype=torch.uint8, device=device).fill_(FILL)
    body = memory[GUARD : GUARD + size].view(dtype)
    return body.as_strided(shape, strides, body.storage_offset()), memory


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step *= max(n, 1)
    return tuple(strides)


class Guards:
    """Guards the memory of ``torch.empty``, ``Tensor.new_empty`` and ``new_empty_strided`` while it is entered.

    It covers only allocations from Python by these names: outputs, workspaces and codes of the operators.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._patches: list[Any] = []

    def _made(self, shape: Any, strides: Any, dtype: torch.dtype, device: Any) -> Tensor:
        shape = tuple(shape)
        result, memory = guarded(shape, dense(shape) if strides is None else tuple(strides), dtype, device)
        self._kept.append(memory)
        return result

    def __enter__(self) -> Guards:
        def empty(*shape: Any, **options: Any) -> Tensor:
            size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            if not set(options) <= {"dtype", "device"} or str(options.get("device")) == "meta":
                return _empty(*shape, **options)
            return self._made(size, None, options.get("dtype") or torch.float32, options.get("device"))

        def new_empty(like: Tensor, *shape: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
            size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            if like.is_meta or device is not None:
                return torch.empty(size, dtype=dtype or like.dtype, device=device or like.device)
            return self._made(size, None, dtype or like.dtype, like.device)

        def new_empty_strided(like: Tensor, size: Any, stride: Any, dtype: torch.dtype | None = None) -> Tensor:
            return self._made(size, stride, dtype or like.dtype, like.device)

        self._patches = [
            mock.patch.object(torch, "empty", empty),
            mock.patch.object(Tensor, "new_empty", new_empty),
            mock.patch.object(Tensor, "new_empty_strided", new_empty_strided),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patch in reversed(self._patches):
            patch.stop()

    def faults(self) -> list[str]:
        """Guard bytes that were written to."""
        result = []
        for number, memory in enumerate(self._kept):
            around = torch.cat([memory[:GUARD], memory[-GUARD:]])
            if not bool((around == FILL).all()):
                at = int((around != FILL).nonzero()[0])
                where = f"{GUARD - at} bytes before" if at < GUARD else f"{at - GUARD} bytes behind"
                result.append(f"guard: buffer {number} of {memory.numel() - 2 * GUARD} bytes, written {where} it")
        return result
