"""A prepared launch: its arguments are packed as the kernel takes them, and refused where they are not its own."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from greenfast.device import bound_launch
from greenfast.device.bound_launch import BoundLaunch, NoContextError
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.kernel import Launch, Packed, Struct, TensorMap


@dataclass(frozen=True)
class Kernel:
    num_arguments: int
    handle: int = 77


class Driver:
    """The calls of the driver that a launch makes."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launched: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, *args: Any) -> tuple[int]:  # noqa: N802
        self.launched.append(args)
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake, real = Driver(), vars(bound_launch)["driver"]
    for name in ("CUfunction", "CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchConfig", "CUstream"):
        setattr(fake, name, getattr(real, name))
    monkeypatch.setattr(bound_launch, "driver", fake)
    monkeypatch.setattr(bound_launch, "encode_tensor_map", lambda layout, pointer: bytes([pointer]) * 128)
    return fake


PLAN = Launch(
    (3, 2, 1), ("a", np.int32(-5), np.float32(0.5), np.int64(2**40), TensorMap("b", "uint8", (1,), (1,), (1,), 0))
)


def test_arguments_are_where_the_parameters_point(driver: Driver) -> None:
    launch = BoundLaunch(Kernel(5), (128, 1, 1), 4096, PLAN, {"a": 2**40 + 16, "b": 9}, 0)
    launch()
    launch()
    (config, function, parameters, _), again = driver.launched
    assert again[2] == parameters
    assert int(function) == 77
    assert (config.gridDimX, config.gridDimY, config.blockDimX, config.sharedMemBytes) == (3, 2, 128, 4096)
    addresses = (ctypes.c_void_p * 5).from_address(parameters)
    assert ctypes.c_uint64.from_address(addresses[0] or 0).value == 2**40 + 16
    assert ctypes.c_int32.from_address(addresses[1] or 0).value == -5
    assert ctypes.c_float.from_address(addresses[2] or 0).value == 0.5
    assert ctypes.c_int64.from_address(addresses[3] or 0).value == 2**40
    assert ctypes.string_at(addresses[4] or 0, 128) == bytes([9]) * 128
    assert all((address or 0) % 64 == 0 for address in addresses), "as tensor maps ask for"


def test_addresses_are_written_where_the_buffers_are(driver: Driver) -> None:
    inner = Struct((np.int32(3), "b", Struct((np.int8(1), "a")), TensorMap("b", "uint8", (1,), (1,), (1,), 0)))
    plan = dataclasses.replace(PLAN, args=(*PLAN.args, inner))
    launch = BoundLaunch(Kernel(6), (1, 1, 1), 0, plan, {"a": 1, "b": 2}, 0)
    for name, place in launch.address_slots():
        place.value = {"a": 2**40 + 5, "b": 77}[name]
    launch()
    moved = BoundLaunch(Kernel(6), (1, 1, 1), 0, plan, {"a": 2**40 + 5, "b": 77}, 0)
    moved()
    (of_first, *_), (of_second, *_) = ((ctypes.c_void_p * 6).from_address(call[2]) for call in driver.launched)
    assert of_first != of_second
    for size, i in ((8, 0), (4, 1), (4, 2), (8, 3), (128, 4), (192, 5)):
        first, second = ((ctypes.c_void_p * 6).from_address(call[2])[i] for call in driver.launched)
        assert ctypes.string_at(first or 0, size) == ctypes.string_at(second or 0, size), i


def test_addresses_in_captured_bytes_move_with_their_buffers(driver: Driver) -> None:
    """A callable's kernels get their pointers in structs, of which the capture knows the bytes alone."""
    captured = Packed(bytes(24), ((8, "a", 0), (16, "b", 32)))
    launch = BoundLaunch(Kernel(1), (1, 1, 1), 0, dataclasses.replace(PLAN, args=(captured,)), {"a": 64, "b": 128}, 0)
    assert [(name, slot.value) for name, slot in launch.address_slots()] == [("a", 64), ("b", 160)]


def test_a_tensor_map_is_encoded_again_for_another_address_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings = []

    def encoded(layout: TensorMap, pointer: int) -> bytes:
        encodings.append(pointer)
        return bytes([pointer]) * 128

    launch = BoundLaunch(Kernel(5), (1, 1, 1), 0, PLAN, {"a": 1, "b": 2}, 0)
    monkeypatch.setattr(bound_launch, "encode_tensor_map", encoded)
    place = dict(launch.address_slots())["b"]
    for address in (5, 6, 5, 6):
        place.value = address
        launch()
        parameters = driver.launched[-1][2]
        argument = (ctypes.c_void_p * 5).from_address(parameters)[4]
        assert ctypes.string_at(argument or 0, 128) == bytes([address]) * 128
    assert encodings == [5, 6]


@pytest.mark.parametrize("early", [False, True])
def test_only_a_launch_that_may_begin_early_does(driver: Driver, early: bool) -> None:
    BoundLaunch(Kernel(5), (1, 1, 1), 0, dataclasses.replace(PLAN, early=early), {"a": 1, "b": 2}, 0)()
    config = driver.launched[0][0]
    assert config.numAttrs == early
    if early:
        assert config.attrs[0].id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1


def test_a_launch_of_another_kernel_is_refused(driver: Driver) -> None:
    with pytest.raises(UsageError, match="the kernel has 4 parameters, its launch gives 5"):
        BoundLaunch(Kernel(4), (1, 1, 1), 0, PLAN, {"a": 1, "b": 2}, 0)


def test_a_thread_without_a_context_is_reported(driver: Driver) -> None:
    driver.status = vars(bound_launch)["_NO_CONTEXT"]
    with pytest.raises(NoContextError, match="no context"):
        BoundLaunch(Kernel(5), (1, 1, 1), 0, PLAN, {"a": 1, "b": 2}, 0)()


def test_a_driver_call_without_a_context_is_told_from_others() -> None:
    with pytest.raises(NoContextError, match="no context"):
        bound_launch.check((vars(bound_launch)["_NO_CONTEXT"],))


def test_what_the_driver_refuses_is_raised(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(result: tuple[int]) -> None:
        raise MachineError(f"CUDA: {result[0]}")

    monkeypatch.setattr(bound_launch, "check", refuse)
    driver.status = 700
    with pytest.raises(MachineError, match="700"):
        BoundLaunch(Kernel(5), (1, 1, 1), 0, PLAN, {"a": 1, "b": 2}, 0)()
