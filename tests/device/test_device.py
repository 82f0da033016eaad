"""Device memory and cases bound to it, with host memory behind the driver's calls."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver

from greenfast.device.bound_launch import check
from greenfast.device.gpu import GUARD_BYTES, POISON, Gpu, GuardedBuffer, device_count
from greenfast.device.session import Executable, KernelImage, same_bits
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import Launch
from tests.host_driver import HostDriver

STREAM = SimpleNamespace(handle=None)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    host = HostDriver()
    monkeypatch.setattr("greenfast.device.gpu.driver", host)
    return host


def test_unwritten_memory_is_nan_in_every_format(memory: HostDriver) -> None:
    for dtype in ("float16", "float32", "float64"):
        assert np.isnan(GuardedBuffer(64).download((64 // np.dtype(dtype).itemsize,), dtype)).all()
    codes = torch.from_numpy(GuardedBuffer(64).download((64,), "uint8")).view(torch.float8_e4m3fn)
    assert bool(torch.isnan(codes.float()).all())


def test_arrays_round_trip_and_are_poisoned_on_demand(memory: HostDriver) -> None:
    buffer = GuardedBuffer(16)
    buffer.upload(np.arange(4, dtype=np.float32))
    assert buffer.download((2, 2), "float32").tolist() == [[0, 1], [2, 3]]
    buffer.queue_initial(POISON, STREAM)
    assert np.isnan(buffer.download((4,), "float32")).all()
    assert buffer.guards_intact()


@pytest.mark.parametrize("offset", [-GUARD_BYTES, -1, 16, 16 + GUARD_BYTES - 1])
def test_a_write_next_to_the_buffer_is_noticed(memory: HostDriver, offset: int) -> None:
    buffer = GuardedBuffer(16)
    check(memory.cuMemsetD8(buffer.pointer + offset, 0, 1))
    assert not buffer.guards_intact()


@pytest.mark.parametrize("offset", [0, 15])
def test_a_write_inside_the_buffer_is_allowed(memory: HostDriver, offset: int) -> None:
    buffer = GuardedBuffer(16)
    check(memory.cuMemsetD8(buffer.pointer + offset, 0, 1))
    assert buffer.guards_intact()


def test_fills_are_complete_before_a_launch_on_another_stream(memory: HostDriver) -> None:
    """On a GPU shared by several processes, the fill of new outputs once ran after a kernel had written them."""
    buffer = GuardedBuffer(16)
    assert memory.underway == 0
    buffer.upload(np.zeros(2))
    assert memory.underway == 0


def test_an_empty_buffer_has_guards_too(memory: HostDriver) -> None:
    buffer = GuardedBuffer(0)
    buffer.upload(np.empty(0))
    buffer.queue_initial(POISON, STREAM)
    assert buffer.download((0, 3), "float16").shape == (0, 3)
    assert buffer.guards_intact()
    buffer.free()
    assert memory.allocations == 0


def test_a_driver_error_is_a_machine_error_with_its_name(memory: HostDriver) -> None:
    buffer = GuardedBuffer(16)
    buffer.free()
    with pytest.raises(MachineError, match="CUDA: CUDA_ERROR_ILLEGAL_ADDRESS"):
        buffer.queue_initial(POISON, STREAM)


def no_library(flags: int) -> Any:
    raise RuntimeError("Failed to dlopen libcuda.so.1")


@pytest.mark.parametrize(
    "init", [no_library, lambda _: (driver.CUresult.CUDA_ERROR_NO_DEVICE,), lambda _: (driver.CUresult.CUDA_SUCCESS,)]
)
def test_a_machine_without_a_gpu_has_no_devices(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    fake = SimpleNamespace(
        CUresult=driver.CUresult, cuInit=init, cuDeviceGetCount=lambda: (driver.CUresult.CUDA_SUCCESS, 0)
    )
    monkeypatch.setattr("greenfast.device.gpu.driver", fake)
    assert device_count() == 0
    for ordinal in (-1, 0, 99):
        with pytest.raises(MachineError, match=f"no CUDA device {ordinal}: the driver shows 0"):
            Gpu(ordinal)


def test_bits_are_compared_and_not_values() -> None:
    def outputs(*values: float) -> dict[str, Any]:
        return {"out": np.array(values, dtype=np.float32)}

    assert same_bits(outputs(1, np.nan), outputs(1, np.nan))
    assert not same_bits(outputs(0.0), outputs(-0.0))
    assert not same_bits(outputs(1, 2), outputs(1, np.nextafter(np.float32(2), np.float32(3))))


def test_variables_that_the_driver_does_not_show_are_no_error_for_tables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the PTX shows to be read-only is compared where it has an address; a cubin's variables must have one."""
    shown = {b"shown": np.arange(3, dtype=np.uint8), b"table": np.arange(5, dtype=np.uint8)}

    class Driver(HostDriver):
        def cuKernelGetLibrary(self, kernel: object) -> tuple[Any, str]:  # noqa: N802
            return self.CUresult.CUDA_SUCCESS, "library"

        def cuLibraryGetGlobal(self, library: str, name: bytes) -> tuple[Any, int, int]:  # noqa: N802
            if name not in shown:
                return self.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
            return self.CUresult.CUDA_SUCCESS, shown[name].ctypes.data, shown[name].nbytes

        def holds(self, pointer: int, nbytes: int) -> bool:
            return True

    monkeypatch.setattr("greenfast.device.gpu.driver", Driver())
    gpu = object.__new__(Gpu)
    monkeypatch.setattr(gpu, "load", lambda image: SimpleNamespace(handle=0))
    plan = Launch((1, 1, 1), ())
    image = KernelImage(b"", "k", (1, 1, 1), 0, variables=("shown",), tables=("hidden", "table"))
    assert gpu.variables(Executable.single(image, plan)) == {"k: shown": b"\0\1\2", "k: table": b"\0\1\2\3\4"}
    with pytest.raises(MachineError, match="k: its module's variable 'hidden' cannot be read"):
        gpu.variables(Executable.single(replace(image, variables=("hidden",), tables=()), plan))
