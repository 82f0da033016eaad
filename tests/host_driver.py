"""The driver's memory calls on the memory of the host."""

from __future__ import annotations

import ctypes
import enum
from bisect import bisect_right
from collections.abc import Callable
from typing import Any


class HostDriver:
    """The driver's memory calls on host memory; an access outside of an allocation is an illegal address."""

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_ILLEGAL_ADDRESS = 700

    def __init__(self) -> None:
        self._blocks: dict[int, Any] = {}
        self._bases: list[int] = []
        self._hashes: dict[tuple[int, int], tuple[bytes, int]] = {}
        self._ok = self.CUresult.CUDA_SUCCESS
        self.underway = 0  # fills and copies to the device that have not been waited for
        self.queued: list[str] = []  # what the stream was given, when a test sets ``watched``
        self.watched = False

    @property
    def allocations(self) -> int:
        """How many blocks have not been given back."""
        return len(self._blocks)

    def note(self, what: str) -> None:
        """Note an operation on the stream."""
        if self.watched:
            self.queued.append(what)

    def holds(self, pointer: int, nbytes: int) -> bool:
        """Whether an access lies within an allocation."""
        n = bisect_right(self._bases, pointer) - 1
        return n >= 0 and pointer + nbytes <= self._bases[n] + len(self._blocks[self._bases[n]])

    def hash_at(self, pointer: int, nbytes: int) -> int:
        """The hash of what lies there, computed again where that has changed: a comparison takes far less time."""
        data = ctypes.string_at(pointer, nbytes)
        known = self._hashes.get((pointer, nbytes))
        if known is None or known[0] != data:
            known = self._hashes[pointer, nbytes] = data, hash(data)
        return known[1]

    def _do(self, pointer: int, nbytes: int, act: Callable[[], object]) -> tuple[Any, ...]:
        if not self.holds(pointer, nbytes):
            return (self.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        act()
        return (self._ok,)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, int]:  # noqa: N802
        block = ctypes.create_string_buffer(nbytes)
        self._blocks[ctypes.addressof(block)] = block
        self._bases = sorted(self._blocks)
        return self._ok, ctypes.addressof(block)

    def cuMemFree(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        known = self._blocks.pop(pointer, None) is not None
        self._bases = sorted(self._blocks)
        return (self._ok if known else self.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:  # noqa: N802
        self.underway = 0
        return (self._ok,)

    def cuMemsetD8(self, pointer: int, value: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        self.underway += 1
        return self._do(pointer, nbytes, lambda: ctypes.memset(pointer, value, nbytes))

    def cuMemsetD8Async(self, pointer: int, value: int, nbytes: int, stream: object) -> tuple[Any, ...]:  # noqa: N802
        self.note(f"fill {nbytes} bytes")
        return self._do(pointer, nbytes, lambda: ctypes.memset(pointer, value, nbytes))

    def cuMemcpyDtoDAsync(self, to: int, pointer: int, nbytes: int, stream: object) -> tuple[Any, ...]:  # noqa: N802
        self.note("copy")
        if not self.holds(pointer, nbytes):
            return (self.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        return self._do(to, nbytes, lambda: ctypes.memmove(to, pointer, nbytes))

    def cuMemcpyHtoD(self, pointer: int, host: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        self.underway += 1
        return self._do(pointer, nbytes, lambda: ctypes.memmove(pointer, host, nbytes))

    def cuMemcpyDtoH(self, host: int, pointer: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        return self._do(pointer, nbytes, lambda: ctypes.memmove(host, pointer, nbytes))
