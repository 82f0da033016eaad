"""The memory of CPU tensors as buffers of a launch: one buffer per storage, so that views of it stay views."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef

from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import Packed

Bytes = NDArray[np.uint8]


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


class UnwrittenBytes:
    """The bytes of storages that nothing has written, as in ``torch.empty``. Other storages are written."""

    def __init__(self) -> None:
        self._masks: dict[int, tuple[StorageWeakRef, NDArray[np.bool_]]] = {}
        self._limit = 1024

    def add(self, tensor: torch.Tensor) -> None:
        """Add a new tensor's storage, all of it unwritten."""
        storage = tensor.untyped_storage()
        if len(self._masks) >= self._limit:
            self._masks = {key: entry for key, entry in self._masks.items() if not _is_expired(entry[0])}
            self._limit = max(1024, 2 * len(self._masks))
        if storage.nbytes():
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._masks[storage.data_ptr()] = reference, np.ones(storage.nbytes(), np.bool_)

    def discard(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as written."""
        if self._masks and tensor.layout == torch.strided and tensor.device.type == "cpu":
            self._masks.pop(tensor.untyped_storage().data_ptr(), None)

    def find(self, start: int, size: int) -> NDArray[np.bool_] | None:
        """Return the unwritten bytes of the living storage with an address and a size; None if all are written."""
        entry = self._masks.get(start)
        return None if entry is None or _is_expired(entry[0]) or len(entry[1]) != size else entry[1]

    def set(self, start: int, mask: NDArray[np.bool_]) -> None:
        """Set the unwritten bytes of a storage that has some."""
        if mask.any():
            self._masks[start] = self._masks[start][0], mask
        else:
            del self._masks[start]


def _is_expired(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


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
