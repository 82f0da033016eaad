"""Mappings of device memory: their access, their sizes, and that nothing is beside them."""

from __future__ import annotations

import ctypes

import pytest

from greenfast.device import virtual_memory
from greenfast.device.bound_launch import check
from greenfast.device.virtual_memory import GUARD_ADDRESSES, Access, PhysicalMemory
from greenfast.spec.errors import MachineError
from tests.host_driver import GRANULE, HostDriver


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    host = HostDriver()
    monkeypatch.setattr(virtual_memory, "driver", host)
    return host


@pytest.mark.parametrize("nbytes", [0, 1, GRANULE, GRANULE + 1, 3 * GRANULE])
def test_there_is_no_memory_beside_a_mapping(memory: HostDriver, nbytes: int) -> None:
    physical = PhysicalMemory(nbytes, 0)
    pages = physical.map()
    physical.release()  # the mapping keeps it
    end = pages.pointer + pages.nbytes
    assert pages.nbytes == max(1, -(-nbytes // GRANULE)) * GRANULE
    for inside in (pages.pointer, end - 1):
        check(memory.cuMemsetD8(inside, 7, 1))
        assert ctypes.string_at(inside, 1) == b"\7"
    for outside in (pages.pointer - 1, end, pages.pointer - GUARD_ADDRESSES, end + GUARD_ADDRESSES - 1):
        with pytest.raises(MachineError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            check(memory.cuMemsetD8(outside, 7, 1))
    pages.free()
    assert memory.allocations == 0


def test_two_mappings_share_their_memory_and_have_their_own_access(memory: HostDriver) -> None:
    physical = PhysicalMemory(GRANULE, 0)
    writable, readable = physical.map(), physical.map(Access.READ)
    check(memory.cuMemsetD8(writable.pointer, 42, 16))
    assert ctypes.string_at(readable.pointer, 16) == bytes([42] * 16)
    assert memory.may_write(writable.pointer, 16)
    assert not memory.may_write(readable.pointer, 16)
    readable.set_access(Access.READ_WRITE)
    assert memory.may_write(readable.pointer, 16)
    for mapping in (writable, readable):
        mapping.free()
    physical.release()
    assert memory.allocations == 0


def test_a_refused_access_gives_the_addresses_back(memory: HostDriver) -> None:
    memory.refuses_read_only = True
    physical = PhysicalMemory(1, 0)
    with pytest.raises(MachineError, match="CUDA_ERROR_INVALID_VALUE"):
        physical.map(Access.READ)
    assert memory.allocations == 0
    assert not memory.mapped
    physical.release()
