"""A GPU that is pretended on CPU tensors: launches are prepared as there, and noted with every byte of their arguments.

Tensors that a call allocates have addresses by their dtype and size, so that equal calls launch equal bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from greenfast.device import bound_launch
from greenfast.ops import cuda, launch_plans, masked, sdpa, varlen
from greenfast.serving import call as serving_call
from greenfast.serving import cuda as serving_cuda
from greenfast.serving import launch_cache as serving_request
from greenfast.spec.arch import Target
from greenfast.spec.kernel import MAP_BYTES, TensorMap, value_bytes

_ADDRESS = Tensor.data_ptr
_WORKSPACE = 1 << 56  # above all addresses


def forget_launches() -> None:
    """Empty every cache of launches."""
    for repeats in (
        sdpa.SDPA_CACHE,
        sdpa.BLOCK_CACHE,
        sdpa.PARTS_CACHE,
        masked.MASKED_CACHE,
        varlen.VARLEN_CACHE,
        serving_request.ATTENTION_CACHE,
        serving_request.APPEND_CACHE,
    ):
        repeats.clear()
    for cache in (cuda._PLANS, serving_cuda._PLANS, serving_call._CONSTANTS, serving_request.CONCATENATED_PLANS):
        cache.clear()
    serving_cuda._get_planner.cache_clear()
    serving_cuda._build_planner.cache_clear()


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[bytes, ...]
    stream: int


class _Any(int):
    """Any number of parameters."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class _Kernel:
    num_arguments, handle = _Any(), 0

    def __init__(self, name: str) -> None:
        self.name = name


class _FinishedStream:
    """A stream without work: constants that a call makes for later calls wait for it."""

    @staticmethod
    def synchronize() -> None: ...


class PretendedGpu:
    """launches: of each thread. stream: the current one of each. real: whether all addresses are the tensors' own."""

    def __init__(self, patch: pytest.MonkeyPatch, target: str = "sm_90a") -> None:
        self.launches: dict[int, list[Launch]] = {}
        self.stream: dict[int, int] = {}
        self.real = False
        self._ranges: list[tuple[int, int]] = []
        self._workspaces: dict[int, int] = {}  # the one that each thread holds
        self._memory: dict[tuple[int, int], StorageWeakRef] = {}  # the last tensor of each thread
        gpu = self

        class Prepared(bound_launch.BoundLaunch):
            def __init__(self, kernel: Any, *args: Any, **more: Any) -> None:
                super().__init__(kernel, *args, **more)
                self._kernel, self._stream = kernel.name, args[4]

            def __call__(self) -> None:
                inputs = [slot.value for _, slot in self.address_slots() if isinstance(slot, ctypes.c_uint64)]
                held = gpu._workspaces.get(threading.get_ident(), 0)
                assert all(a < _WORKSPACE or a >= held > 0 for a in inputs), "the workspace was given back"
                sizes = [len(value_bytes(a, lambda _: 0, lambda _: bytes(MAP_BYTES))) for a in self._arguments]
                result = [
                    ctypes.string_at(position, size) for position, size in zip(self._host_addresses, sizes, strict=True)
                ]
                grid = (self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ)
                noted = gpu.launches.setdefault(threading.get_ident(), [])
                noted.append(Launch(self._kernel, grid, tuple(result), self._stream))

        queue = launch_plans.LaunchPlan.launch

        def launch(plan: launch_plans.LaunchPlan, addresses: launch_plans.Addresses) -> None:
            """Another thread may be given memory that was given back before the launch is queued."""
            freed = [i for i, a in enumerate(addresses) if a and gpu._given_back(a)]  # 0: none, or no elements
            assert not freed, f"the tensors of addresses {freed} of a launch are gone"
            queue(plan, addresses)

        def allocated(nbytes: int, stream: int) -> int:
            asked = threading.get_ident()
            assert asked not in gpu._workspaces
            gpu._workspaces[asked] = _WORKSPACE + (nbytes << 8)
            return gpu._workspaces[asked]

        def given_back(address: int) -> None:
            assert gpu._workspaces.pop(threading.get_ident()) == address

        def encoded(layout: TensorMap, pointer: int) -> bytes:
            return pointer.to_bytes(8, "little") + hashlib.sha256(repr(layout).encode()).digest().ljust(120, b"\0")

        def loaded(source: Any, device: int) -> _Kernel:
            return _Kernel(hashlib.sha256(source.source.encode()).hexdigest())

        patch.setattr(bound_launch, "encode_tensor_map", encoded)
        patch.setattr(launch_plans, "BoundLaunch", Prepared)
        patch.setattr(launch_plans.LaunchPlan, "launch", launch)
        patch.setattr(launch_plans, "_load", loaded)
        for name, stand_in in (
            ("_cuda_getDevice", lambda: -1),
            ("_cuda_getCurrentRawStream", lambda _: gpu.stream.get(threading.get_ident(), 7)),
            ("_cuda_cudaCachingAllocator_raw_alloc", allocated),
            ("_cuda_cudaCachingAllocator_raw_delete", given_back),
        ):
            patch.setattr(torch._C, name, stand_in, raising=False)
        patch.setattr(cuda, "get_target", lambda _: Target(target))
        patch.setattr(launch_plans, "Device", lambda _: type("Device", (), {"set_current": lambda _: None})())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_stream", lambda _: _FinishedStream)
        patch.setattr(Tensor, "data_ptr", lambda x: gpu._address(x))
        patch.setattr(cuda, "_PLANS", {})
        patch.setattr(serving_cuda, "_PLANS", {})
        self.forget()

    def forget(self) -> None:
        forget_launches()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """These tensors and their views keep their addresses."""
        for x in tensors:
            storage = x.untyped_storage()
            self._ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def launched(self) -> list[Launch]:
        """Return the launches of this thread since the last call."""
        return self.launches.pop(threading.get_ident(), [])

    def _given_back(self, address: int) -> bool:
        """Return whether an address is free: this thread has freed its tensor there, and no other thread has one.

        Addresses follow from contents, so equal lengths that another thread made for the same stream have the same one.
        """
        own = self._memory.get((threading.get_ident(), address))
        if own is None or not own.expired():  # type: ignore[no-untyped-call]
            return False
        return all(x.expired() for (_, at), x in list(self._memory.items()) if at == address)  # type: ignore[no-untyped-call]

    def _address(self, x: Tensor) -> int:
        result = self._address_of(x)
        self._memory[threading.get_ident(), result] = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
        return result

    def _address_of(self, x: Tensor) -> int:
        real: int = _ADDRESS(x)
        if self.real or any(a <= real < b for a, b in self._ranges):
            return real
        constant = next((k for k, c in serving_call._CONSTANTS.items() if _ADDRESS(c) == real), None)
        values = x.tolist() if x.dtype == torch.int32 and x.dim() == 1 else []  # lengths: their values matter
        kind = repr((x.dtype, x.numel(), constant, values)).encode()
        return int.from_bytes(hashlib.sha256(kind).digest()[:5], "little") << 8


def pretend_cuda(patch: pytest.MonkeyPatch) -> None:
    """Make CPU tensors report that they are on a GPU."""
    patch.setattr(Tensor, "is_cuda", property(lambda _: True))
    patch.setattr(Tensor, "is_cpu", property(lambda _: False))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    """A pretended GPU on which CPU tensors are."""
    pretend_cuda(monkeypatch)
    return PretendedGpu(monkeypatch)
