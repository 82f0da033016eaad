"""The driver's memory calls on the memory of the host, virtual memory management too: its guard pages are real."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
#: Sizes and addresses of mappings are multiples of this.
GRANULE = 1 << 16


class HostDriver:
    """The driver's memory calls on host memory; an access outside of an allocation is an illegal address."""

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1
        CUDA_ERROR_ILLEGAL_ADDRESS = 700

    CUmemAllocationProp = driver.CUmemAllocationProp
    CUmemAllocationType = driver.CUmemAllocationType
    CUmemAllocationGranularity_flags = driver.CUmemAllocationGranularity_flags
    CUmemLocationType = driver.CUmemLocationType
    CUmemAccessDesc = driver.CUmemAccessDesc
    CUmemAccess_flags = driver.CUmemAccess_flags
    CUdevice_attribute = driver.CUdevice_attribute

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}  # ranges of addresses: their sizes by their first address
        self.mapped: dict[int, tuple[int, bool]] = {}  # sizes of mappings, and whether the device may write
        self.refuses_read_only = False  # as some drivers do
        self._blocks: dict[int, Any] = {}
        self._bases: list[int] = []
        self._mapped_bases: list[int] = []
        self._hashes: dict[tuple[int, int], tuple[bytes, int]] = {}
        self._ok = self.CUresult.CUDA_SUCCESS
        self.underway = 0  # fills and copies to the device that have not been waited for
        self.queued: list[str] = []  # what the stream was given, when a test sets ``watched``
        self.watched = False

    @property
    def allocations(self) -> int:
        """How many blocks have not been given back, addresses included."""
        return len(self._blocks) + len(self.reserved)

    def note(self, what: str) -> None:
        """Note an operation on the stream."""
        if self.watched:
            self.queued.append(what)

    def holds(self, pointer: int, nbytes: int) -> bool:
        """Whether an access lies within an allocation."""
        base, size, _ = self._mapping_at(pointer)
        if pointer + nbytes <= base + size:
            return True
        n = bisect_right(self._bases, pointer) - 1
        return n >= 0 and pointer + nbytes <= self._bases[n] + len(self._blocks[self._bases[n]])

    def _mapping_at(self, pointer: int) -> tuple[int, int, bool]:
        """The base, size and writability of the last mapping that begins at or before an address; zeros for none."""
        n = bisect_right(self._mapped_bases, pointer) - 1
        return (self._mapped_bases[n], *self.mapped[self._mapped_bases[n]]) if n >= 0 else (0, 0, False)

    def may_write(self, pointer: int, nbytes: int) -> bool:
        """Whether a write lies within an allocation that the device may write."""
        base, size, writable = self._mapping_at(pointer)
        return self.holds(pointer, nbytes) and (writable or pointer >= base + size)

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

    def cuDeviceGetAttribute(self, attribute: object, ordinal: int) -> tuple[Any, int]:  # noqa: N802
        return self._ok, 1

    def cuMemGetAllocationGranularity(self, properties: object, which: object) -> tuple[Any, int]:  # noqa: N802
        return self._ok, GRANULE

    def cuMemCreate(self, nbytes: int, properties: object, flags: int) -> tuple[Any, int]:  # noqa: N802
        assert nbytes in range(GRANULE, 1 << 40, GRANULE), "a size that is no multiple of the granularity"
        handle = os.memfd_create("device memory")
        os.ftruncate(handle, nbytes)
        return self._ok, handle

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:  # noqa: N802
        os.close(handle)
        return (self._ok,)

    def cuMemAddressReserve(  # noqa: N802
        self, nbytes: int, alignment: int, hint: int, flags: int
    ) -> tuple[Any, int]:
        found = _map(0, nbytes + GRANULE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        base = found + -found % GRANULE
        _LIBC.munmap(found, base - found)
        _LIBC.munmap(base + nbytes, GRANULE - (base - found))
        self.reserved[base] = nbytes
        return self._ok, base

    def cuMemAddressFree(self, pointer: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.reserved.pop(pointer) == nbytes
        assert not any(pointer <= mapped < pointer + nbytes for mapped in self.mapped), "addresses that are in use"
        _LIBC.munmap(pointer, nbytes)
        return (self._ok,)

    def cuMemMap(self, pointer: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert any(base <= pointer and pointer + nbytes <= base + size for base, size in self.reserved.items())
        assert pointer % GRANULE == offset == 0
        _map(pointer, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, handle)
        self.mapped[pointer] = nbytes, False
        self._mapped_bases = sorted(self.mapped)
        return (self._ok,)

    def cuMemUnmap(self, pointer: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        assert self.mapped.pop(pointer)[0] == nbytes
        self._mapped_bases = sorted(self.mapped)
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(pointer, nbytes, _PROT_NONE, kind, -1)
        return (self._ok,)

    def cuMemSetAccess(  # noqa: N802
        self, pointer: int, nbytes: int, descriptions: list[Any], count: int
    ) -> tuple[Any, ...]:
        (description,) = descriptions
        read_only = description.flags == driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        if read_only and self.refuses_read_only:
            return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert self.mapped[pointer][0] == nbytes
        self.mapped[pointer] = nbytes, not read_only
        return (self._ok,)


def _map(pointer: int, nbytes: int, protection: int, kind: int, handle: int) -> int:
    found = int(_LIBC.mmap(pointer, nbytes, protection, kind, handle, 0))
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return found
