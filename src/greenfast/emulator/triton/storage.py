"""The memory of CPU tensors as buffers of a launch: one buffer per storage, so that views of it stay views."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef

from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Packed

Bytes = NDArray[np.uint8]
_T = TypeVar("_T")


@dataclass
class MemoryRegion:
    """Bytes of the host's memory, the name of the first argument that points into them, and their storage.

    may_hold_pointers: whether the argument is a tensor of int64.
    """

    name: str
    start: int
    end: int
    storage: Any = None
    may_hold_pointers: bool = False

    def view(self) -> Bytes:
        """Return the bytes as a NumPy array in the same memory."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * (self.end - self.start)).from_address(self.start))


def find_region(name: str, value: Any) -> tuple[MemoryRegion, int]:
    """Return the storage that an argument points into, and the argument's address.

    value: a CPU tensor, or an object with a ``base`` that is one (``triton.reinterpret``).
    Raises UsageError for other objects and for tensors of other devices.
    """
    tensor = value
    while not isinstance(tensor, torch.Tensor) and hasattr(tensor, "base"):
        tensor = tensor.base
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name}: {type(value).__name__}; a pointer in the emulator is a CPU tensor of PyTorch")
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu":
            raise UsageError(f"{name}: a tensor on {tensor.device}; the emulator runs on CPU tensors")
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        region = MemoryRegion(name, start, start + storage.nbytes(), storage, tensor.dtype == torch.int64)
        return region, tensor.data_ptr()


class StorageMap(Generic[_T]):
    """A value for each of some storages, by address, until the storage is freed."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, _T]] = {}
        self._limit = 1024

    def __bool__(self) -> bool:
        return bool(self._entries)

    def put(self, address: int, storage: Any, value: _T) -> None:
        """Set the value of a storage."""
        self._entries[address] = StorageWeakRef(storage), value  # type: ignore[no-untyped-call]
        if len(self._entries) > self._limit:
            self._entries = {key: self._entries[key] for key, *_ in self.list_living()}
            self._limit = max(1024, 2 * len(self._entries))

    def get(self, address: int) -> _T | None:
        """Return the value of the storage at an address; None if no living storage has one there."""
        reference, value = self._entries.get(address, (None, None))
        return None if reference is None or reference.expired() else value  # type: ignore[no-untyped-call]

    def discard(self, address: int) -> None:
        """Remove the value at an address."""
        self._entries.pop(address, None)

    def list_living(self) -> list[tuple[int, StorageWeakRef, _T]]:
        """Return address, reference and value of each living storage."""
        return [(key, *entry) for key, entry in self._entries.items() if not entry[0].expired()]  # type: ignore[no-untyped-call]


class UnwrittenBytes:
    """The bytes of storages that nothing has written, as in ``torch.empty``. Other storages are written."""

    def __init__(self) -> None:
        self._masks = StorageMap[NDArray[np.bool_]]()

    def add(self, tensor: torch.Tensor) -> None:
        """Add a new tensor's storage, all of it unwritten."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._masks.put(storage.data_ptr(), storage, np.ones(storage.nbytes(), np.bool_))

    def discard(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as written."""
        if self._masks and tensor.layout == torch.strided and tensor.device.type == "cpu":
            self._masks.discard(tensor.untyped_storage().data_ptr())

    def find(self, start: int, size: int) -> NDArray[np.bool_] | None:
        """Return the unwritten bytes of the living storage with an address and a size; None if all are written."""
        mask = self._masks.get(start)
        return None if mask is None or len(mask) != size or not mask.any() else mask


class Regions:
    """The disjoint regions of a launch. Storages that share memory (as of ``torch.from_numpy``) become one."""

    def __init__(self, found: Sequence[MemoryRegion]) -> None:
        self.regions: list[MemoryRegion] = []
        for region in sorted((r for r in found if r.end > r.start), key=lambda r: r.start):
            if self.regions and region.start < self.regions[-1].end:
                self.regions[-1].end = max(self.regions[-1].end, region.end)
                self.regions[-1].may_hold_pointers |= region.may_hold_pointers
            else:
                self.regions.append(replace(region))
        names: dict[str, int] = {}
        for region in self.regions:  # one tensor list may give several regions one name
            count = names[region.name] = names.get(region.name, 0) + 1
            region.name += f" ({count})" if count > 1 else ""
        self._starts = [region.start for region in self.regions]

    def locate(self, address: int) -> tuple[str, int] | None:
        """Return the region of an address and the offset in it; None if it is in no region, such as a null pointer.

        The end of a region belongs to it: it is the address of an empty view there.
        """
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address > self.regions[index].end:
            return None
        return self.regions[index].name, address - self.regions[index].start


def find_pointed(region: MemoryRegion, living: Sequence[tuple[int, int]]) -> list[MemoryRegion]:
    """Return the storages that numbers in a region point into. living: start and end of every storage."""
    numbers = _numbers(region)
    return [
        MemoryRegion(f"{region.name}, pointed to", start, end)
        for start, end in living
        if ((numbers >= start) & (numbers < end)).any()
    ]


def pack_pointers(region: MemoryRegion, regions: Regions) -> Packed | None:
    """Return the contents of a region with its pointers by region, None if it has no pointer."""
    places = [(8 * n, regions.locate(value)) for n, value in enumerate(_numbers(region).tolist()) if value > 4096]
    found = tuple((at, *place) for at, place in places if place is not None)
    return Packed(region.view().tobytes(), found) if found else None


def _numbers(region: MemoryRegion) -> NDArray[np.int64]:
    return region.view()[: (region.end - region.start) // 8 * 8].view(np.int64)
