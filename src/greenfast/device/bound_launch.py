"""Launches with arguments that are packed once: each repetition is a single driver call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from cuda.bindings import driver

from greenfast.spec.errors import MachineError, UsageError, unknown
from greenfast.spec.kernel import MAP_BYTES, Launch, TensorMap, find_pointers, find_tensor_maps, value_bytes

_NO_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
_MAX_ENCODINGS = 1024  # cached encodings per tensor map, by address
_SLOT = 64  # alignment of each argument in bytes, as a tensor map requires
_KINDS = driver.CUtensorMapDataType
_TYPES = {
    "uint8": _KINDS.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    "uint16": _KINDS.CU_TENSOR_MAP_DATA_TYPE_UINT16,
    "uint32": _KINDS.CU_TENSOR_MAP_DATA_TYPE_UINT32,
    "uint64": _KINDS.CU_TENSOR_MAP_DATA_TYPE_UINT64,
    "int32": _KINDS.CU_TENSOR_MAP_DATA_TYPE_INT32,
    "int64": _KINDS.CU_TENSOR_MAP_DATA_TYPE_INT64,
    "float16": _KINDS.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    "float32": _KINDS.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    "float64": _KINDS.CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
}
_SWIZZLES = {
    0: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


class NoContextError(MachineError):
    """The thread has no current CUDA context: PyTorch sets one only when it needs it."""


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call. Raises MachineError with the error's name if it failed.

    Raises NoContextError, a MachineError, if the thread has no context.
    """
    status, *values = result
    if status == _NO_CONTEXT:
        raise NoContextError("CUDA: this thread has no context; Device(n).set_current() gives it one")
    if status:
        raise MachineError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else values


def encode_tensor_map(layout: TensorMap, pointer: int) -> bytes:
    """Encode a tensor map (CUtensorMap, 128 bytes) over device memory at ``pointer``.

    Raises UsageError for an unsupported element type, and MachineError if the driver refuses.
    """
    rank, name = len(layout.shape), np.dtype(layout.dtype).name
    if name not in _TYPES:
        raise unknown("type of a tensor map's elements", name, _TYPES)
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            _TYPES[name],
            rank,
            pointer,
            [driver.cuuint64_t(n) for n in reversed(layout.shape)],
            # The driver refuses an empty list, but does not read it for one dimension.
            [driver.cuuint64_t(n) for n in reversed(layout.strides[:-1])] or [driver.cuuint64_t(MAP_BYTES)],
            [driver.cuuint32_t(n) for n in reversed(layout.box)],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            _SWIZZLES[layout.swizzle],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), MAP_BYTES)


class MovableMap:
    """A tensor map among the arguments of a launch. Setting ``value``, its address, encodes it again."""

    def __init__(self, layout: TensorMap, host_address: int) -> None:
        self._layout, self._bytes = layout, (ctypes.c_char * MAP_BYTES).from_address(host_address)
        self._encoded: dict[int, bytes] = {}
        self._address = 0

    def _set(self, address: int) -> None:
        if address == self._address:
            return
        encoding = self._encoded.get(address)
        if encoding is None:
            encoding = encode_tensor_map(self._layout, address)
            if len(self._encoded) >= _MAX_ENCODINGS:
                self._encoded.clear()
            self._encoded[address] = encoding
        self._bytes.raw, self._address = encoding, address

    value = property(fset=_set)


class BoundLaunch:
    """One launch of a loaded kernel on a fixed stream. Its buffers are fixed unless ``address_slots`` are written.

    Calling it queues the launch. It owns no device memory, so the caller must keep its pointers valid. Threads may
    share an object if nothing writes its arguments.
    """

    def __init__(
        self,
        kernel: Any,
        block: tuple[int, int, int],
        dynamic_smem_bytes: int,
        plan: Launch,
        pointers: Mapping[str, int],
        stream: int,
        name: str = "the kernel",
    ) -> None:
        """kernel: a loaded kernel of cuda.core. pointers: device address of each buffer that ``plan`` names.

        Raises UsageError, with the kernel's name, if the plan's arguments do not match the kernel or name no buffer,
        and MachineError if the driver refuses.
        """
        if len(plan.args) != kernel.num_arguments:
            raise UsageError(f"{name} has {kernel.num_arguments} parameters, its launch gives {len(plan.args)}")
        try:
            packed = [
                value_bytes(x, pointers.__getitem__, lambda layout: encode_tensor_map(layout, pointers[layout.buffer]))
                for x in plan.args
            ]
        except KeyError as e:
            raise UsageError(f"launch argument {e.args[0]!r} is no buffer of the case: {', '.join(pointers)}") from None
        offsets = np.cumsum([0, *(-(-len(p) // _SLOT) * _SLOT for p in packed)])
        self._storage = ctypes.create_string_buffer(int(offsets[-1]) + _SLOT)
        base = -(-ctypes.addressof(self._storage) // _SLOT) * _SLOT
        self._host_addresses = [base + int(offset) for offset in offsets[:-1]]
        for address, argument in zip(self._host_addresses, packed, strict=True):
            ctypes.memmove(address, argument, len(argument))
        self._addresses = (ctypes.c_void_p * len(packed))(*self._host_addresses)
        self._parameters = ctypes.addressof(self._addresses)
        self._arguments = plan.args
        self._function = driver.CUfunction(int(kernel.handle))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.attrs = _attributes(plan)
        config.sharedMemBytes, config.numAttrs = dynamic_smem_bytes, len(config.attrs)
        config.hStream = driver.CUstream(stream)
        self._config = config

    def write(self, number: int, argument: bytes) -> None:
        """Overwrite an argument, counted from 0, by one of the same size. Queued launches keep their arguments."""
        ctypes.memmove(self._host_addresses[number], argument, len(argument))

    def address_slots(self) -> list[tuple[str, Any]]:
        """Return (buffer, slot) for each address among the arguments. Setting ``slot.value`` changes the address.

        Queued launches keep their arguments. A slot is valid as long as this object.
        """
        slots: list[tuple[str, Any]] = []
        for base, argument in zip(self._host_addresses, self._arguments, strict=True):
            maps = find_tensor_maps(argument)
            slots += [(layout.buffer, MovableMap(layout, base + start)) for start, layout in maps]
            slots += [(name, ctypes.c_uint64.from_address(base + start)) for start, name in find_pointers(argument)]
        return slots

    def __call__(self) -> None:
        """Queue the launch. Raises MachineError if the driver refuses it, NoContextError without a context."""
        status = driver.cuLaunchKernelEx(self._config, self._function, self._parameters, 0)[0]
        if status:
            check((status,))


def _attributes(plan: Launch) -> list[driver.CUlaunchAttribute]:
    attributes = []
    if plan.early:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    if plan.cluster != (1, 1, 1):
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = plan.cluster
        attributes.append(cluster)
    if plan.cooperative:
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    return attributes
