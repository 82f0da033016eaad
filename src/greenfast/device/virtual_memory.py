"""Device memory through CUDA's virtual memory management: chosen access, and unmapped addresses on both sides.

The addresses next to a mapping are reserved and unmapped. A kernel that reads or writes there ends with an illegal
address, independent of other allocations. The same memory can have several mappings with different access, such as a
read-only one for a kernel and a writable one to restore the content.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from cuda.bindings import driver

from greenfast.device.bound_launch import check
from greenfast.spec.errors import MachineError

#: Bytes of addresses without memory on each side of a mapping. They cost no memory, only addresses.
GUARD_ADDRESSES = 1 << 30


class Access(Enum):
    """The device's access to a mapping."""

    NONE = "CU_MEM_ACCESS_FLAGS_PROT_NONE"
    READ = "CU_MEM_ACCESS_FLAGS_PROT_READ"
    READ_WRITE = "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"


def is_supported(ordinal: int) -> bool:
    """Return whether a device has virtual memory management."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return bool(check(driver.cuDeviceGetAttribute(attribute, ordinal)))


def mapping_granularity(ordinal: int) -> int:
    """Return the granularity of memory sizes and mapping addresses in bytes."""
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(check(driver.cuMemGetAllocationGranularity(_properties(ordinal), minimum)))


def _properties(ordinal: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def has_read_only(ordinal: int) -> bool:
    """Return whether the driver supports read-only mappings."""
    memory = PhysicalMemory(1, ordinal)
    try:
        memory.map(Access.READ).free()
    except MachineError:
        return False
    finally:
        memory.release()
    return True


class PhysicalMemory:
    """Physical memory of a device without an address. nbytes: the requested size, rounded up to granules, at least one.

    Raises MachineError if the driver refuses.
    """

    def __init__(self, nbytes: int, ordinal: int) -> None:
        self.ordinal = ordinal
        self.granularity = mapping_granularity(ordinal)
        self.nbytes = max(nbytes + -nbytes % self.granularity, self.granularity)
        self._handle = check(driver.cuMemCreate(self.nbytes, _properties(ordinal), 0))

    def map(self, access: Access = Access.READ_WRITE) -> Mapping:
        """Give all of it an address. Raises MachineError if the driver refuses, as some do for READ."""
        return Mapping(self, self._handle, access)

    def release(self) -> None:
        """Free it as soon as its mappings are freed too."""
        check(driver.cuMemRelease(self._handle))


class Mapping:
    """An address of physical memory, between GUARD_ADDRESSES without memory. pointer: its first byte."""

    def __init__(self, memory: PhysicalMemory, handle: Any, access: Access) -> None:
        guard = GUARD_ADDRESSES + -GUARD_ADDRESSES % memory.granularity
        self.nbytes, self._ordinal = memory.nbytes, memory.ordinal
        self._reserved = self.nbytes + 2 * guard
        self._base = int(check(driver.cuMemAddressReserve(self._reserved, 0, 0, 0)))
        self.pointer = self._base + guard
        self._is_mapped = False
        try:
            check(driver.cuMemMap(self.pointer, self.nbytes, 0, handle, 0))
            self._is_mapped = True
            self.set_access(access)
        except BaseException:
            self.free()
            raise

    @property
    def end(self) -> int:
        """The first address without memory."""
        return self.pointer + self.nbytes

    def set_access(self, access: Access) -> None:
        """Change the device's access after all queued work has finished. Raises MachineError as ``map``."""
        check(driver.cuCtxSynchronize())
        description = driver.CUmemAccessDesc()
        description.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        description.location.id = self._ordinal
        description.flags = getattr(driver.CUmemAccess_flags, access.value)
        check(driver.cuMemSetAccess(self.pointer, self.nbytes, [description], 1))

    def free(self) -> None:
        """Give the addresses back, once everything that is queued has run; the memory stays until it is released."""
        check(driver.cuCtxSynchronize())
        if self._is_mapped:
            check(driver.cuMemUnmap(self.pointer, self.nbytes))
        check(driver.cuMemAddressFree(self._base, self._reserved))
