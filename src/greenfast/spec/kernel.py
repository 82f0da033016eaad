"""A kernel's source, its launch, and the interface of a kernel family."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.errors import UsageError

_MOST_DIMENSIONS = 5


@dataclass(frozen=True)
class TensorMap:
    """A tensor map (CUtensorMap) over a buffer of the case, for TMA copies of tiles.

    The kernel takes it by value, as a ``const __grid_constant__ CUtensorMap`` parameter or in a struct that is one.
    Reads out of bounds give 0.

    buffer: name of the buffer. dtype: NumPy name of its elements. shape: elements per dimension, outermost first.
    strides: bytes per dimension, outermost first, multiples of 16. The last is the element size.
    box: elements of a tile per dimension, at most 256. swizzle: 0 (none), 32, 64 or 128 bytes, at least the box's
    innermost extent in bytes.

    Raises UsageError for an unknown dtype or swizzle, and unless shape, strides and box have one entry per dimension.
    """

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def __post_init__(self) -> None:
        """Refuse maps that a driver would accept and encode wrongly."""
        lengths = len(self.shape), len(self.strides), len(self.box)
        if not 1 <= lengths[0] <= _MOST_DIMENSIONS or len({*lengths}) > 1:
            raise UsageError(
                f"tensor map over {self.buffer!r}: {lengths[0]} extents, {lengths[1]} strides and {lengths[2]} extents "
                f"of the box; each has one entry for each of 1 to {_MOST_DIMENSIONS} dimensions, outermost first, and "
                "the last stride is the element's size"
            )
        try:
            np.dtype(self.dtype)
        except TypeError:
            message = (
                f"tensor map over {self.buffer!r}: unknown dtype {self.dtype!r}; NumPy's names are known, as float16"
            )
            raise UsageError(message) from None
        if self.swizzle not in (0, 32, 64, 128):
            raise UsageError(
                f"tensor map over {self.buffer!r}: a swizzle of {self.swizzle}; known are 0, 32, 64 and 128"
            )


#: Bytes of a CUtensorMap, and the multiple of bytes at which it is stored.
MAP_BYTES, MAP_ALIGNMENT = 128, 64


def _blank(layout: TensorMap) -> bytes:
    """Return the bytes of a tensor map that only its size matters of."""
    return bytes(MAP_BYTES)


@dataclass(frozen=True)
class Struct:
    """A struct that a kernel takes by value, laid out as in C++: each field at a multiple of its alignment.

    fields: a buffer's name is a pointer to it, an array is an array member; structs nest.
    """

    fields: tuple[str | np.generic | NDArray[Any] | Struct | TensorMap, ...]

    @property
    def alignment(self) -> int:
        """Alignment in bytes."""
        return max((_alignment(f) for f in self.fields), default=1)

    def layout(self, pointer_to: Callable[[str], int], encode: Callable[[TensorMap], bytes] = _blank) -> bytes:
        """Return its bytes, with the addresses of buffers, encoded tensor maps and zero padding."""
        data = b""
        for f in self.fields:
            data = data.ljust(-(-len(data) // _alignment(f)) * _alignment(f), b"\0")
            data += value_bytes(f, pointer_to, encode)
        return data.ljust(-(-len(data) // self.alignment) * self.alignment, b"\0")

    def pointers(self) -> tuple[tuple[int, str], ...]:
        """Return (offset, buffer) of each pointer, also in nested structs."""
        return tuple((start + n, name) for start, f in self._placed() for n, name in find_pointers(f))

    def maps(self) -> tuple[tuple[int, TensorMap], ...]:
        """Return (offset, map) of each tensor map, also in nested structs."""
        return tuple((start + n, layout) for start, f in self._placed() for n, layout in find_tensor_maps(f))

    def _placed(self) -> list[tuple[int, Any]]:
        """Return each field with its offset."""
        fields, end = [], 0
        for f in self.fields:
            end = -(-end // _alignment(f)) * _alignment(f)
            fields.append((end, f))
            end += len(value_bytes(f, lambda _: 0, _blank))
        return fields


@dataclass(frozen=True)
class Packed:
    """The bytes of an argument as another process launched it. Device addresses in them are replaced before a launch.

    pointers: (offset in ``data``, buffer, bytes from its start) of each device address. In a CUtensorMap it is the
    first field.
    """

    data: bytes
    pointers: tuple[tuple[int, str, int], ...] = ()

    def layout(self, pointer_to: Callable[[str], int]) -> bytes:
        """Return the bytes, with the addresses of buffers."""
        data = bytearray(self.data)
        for start, buffer, offset in self.pointers:
            data[start : start + 8] = (pointer_to(buffer) + offset).to_bytes(8, "little")
        return bytes(data)


def _alignment(field: str | np.generic | NDArray[Any] | Struct | TensorMap) -> int:
    if isinstance(field, Struct):
        return field.alignment
    if isinstance(field, TensorMap):
        return MAP_ALIGNMENT
    return 8 if isinstance(field, str) else int(field.dtype.alignment)


def value_bytes(
    argument: str | np.generic | NDArray[Any] | bytes | ctypes.Structure | ctypes.Union | Struct | Packed | TensorMap,
    pointer_to: Callable[[str], int],
    encode: Callable[[TensorMap], bytes],
) -> bytes:
    """Return the bytes of an argument; pointer_to: the address of a buffer. encode: the bytes of a tensor map."""
    if isinstance(argument, str):
        return pointer_to(argument).to_bytes(8, "little")
    if isinstance(argument, TensorMap):
        return encode(argument)
    if isinstance(argument, Struct):
        return argument.layout(pointer_to, encode)
    if isinstance(argument, Packed):
        return argument.layout(pointer_to)
    if isinstance(argument, (bytes, ctypes.Structure, ctypes.Union)):
        return bytes(argument)
    return argument.tobytes()


def find_pointers(argument: object) -> tuple[tuple[int, str], ...]:
    """Return (offset, buffer) of each pointer in an argument."""
    if isinstance(argument, str):
        return ((0, argument),)
    if isinstance(argument, Packed):
        return tuple((start, name) for start, name, _ in argument.pointers)
    return argument.pointers() if isinstance(argument, Struct) else ()


def find_tensor_maps(argument: object) -> tuple[tuple[int, TensorMap], ...]:
    """Return (offset, map) of each tensor map in an argument."""
    if isinstance(argument, TensorMap):
        return ((0, argument),)
    return argument.maps() if isinstance(argument, Struct) else ()


def find_buffers(argument: object) -> list[str]:
    """Return the names of the buffers that an argument points to, in the order of their places in it."""
    maps = ((start, layout.buffer) for start, layout in find_tensor_maps(argument))
    return [name for _, name in sorted((*find_pointers(argument), *maps))]


#: A kernel argument: the name of a buffer of the case, a typed scalar, a struct (a Struct, its bytes, a structured
#: NumPy scalar or a ctypes struct), bytes captured elsewhere, or a tensor map over a buffer.
Argument: TypeAlias = "str | np.generic | bytes | ctypes.Structure | ctypes.Union | Struct | Packed | TensorMap"

#: The buffer that an instrumented build writes its cycle counts to, int64 (blocks, phases); null in other builds.
PHASE_BUFFER = "@phase_cycles"


@dataclass(frozen=True)
class KernelSource:
    """One rendered translation unit.

    entry: the ``extern "C"`` name of the kernel.
    source: CUDA C++ text; ``#include "..."`` lines resolve in ``include_dirs``, in order.
    name: file name in the compiler's messages.
    block: threads per block (x, y, z).
    dynamic_smem_bytes: dynamic shared memory of each launch.
    phases: names of the phase counters of an instrumented build, in the kernel's order; else empty.
    requires: the only target that has its instructions, such as "sm_90a"; empty if there are several.
    language: of ``source``; a "cubin" has its machine code in ``binary`` and no source.
    """

    entry: str
    source: str
    name: str
    include_dirs: tuple[Path, ...]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int = 0
    phases: tuple[str, ...] = ()
    requires: str = ""
    language: Literal["cuda", "ptx", "cubin"] = "cuda"
    binary: bytes = b""


@dataclass(frozen=True)
class Launch:
    """One launch: ``grid`` blocks of the kernel with ``args`` in the order of its parameters.

    early: whether it may begin while the launch before it in the stream ends (programmatic dependent launch); the
    kernel waits before it reads the results.
    cluster: blocks per thread block cluster (x, y, z), if the kernel does not declare it.
    cooperative: whether all blocks must be resident at once, as a grid-wide barrier needs.
    """

    grid: tuple[int, int, int]
    args: tuple[Argument, ...]
    early: bool = False
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False


@dataclass(frozen=True)
class Step:
    """A kernel and how it is launched."""

    kernel: KernelSource
    launch: Launch


@dataclass(frozen=True)
class Workspace:
    """A scratch buffer of a program; it holds NaN, or zeros, or ``data``, when the program begins."""

    nbytes: int
    zeros: bool = False
    data: bytes = b""


@dataclass(frozen=True)
class Allocation:
    """Memory that a program allocates before a step: bytes of a buffer that are uninitialised from then on."""

    step: int
    buffer: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorView:
    """A strided tensor in a buffer. dtype: PyTorch's name. strides: in elements. offset: in bytes."""

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class TorchConstant:
    """A constant of PyTorch by its name, such as a dtype or a memory format."""

    name: str


@dataclass(frozen=True)
class TensorOperation:
    """An operation of PyTorch that a function runs before a launch, or after its last launch.

    name: such as "aten.add.Tensor". args, kwargs: TensorView, TorchConstant, numbers, texts, None, or lists of them.
    writes: the arguments that it writes to. is_out: whether it writes them without reading them. results: the places of
    its new tensors.
    """

    step: int
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    writes: tuple[TensorView, ...]
    is_out: bool
    results: tuple[TensorView, ...]


@dataclass(frozen=True)
class Program:
    """A computation of a case: launches in order on one stream, and the scratch buffers that they share, by name.

    allocations: of a captured function; its allocator may return the same memory several times. function_us: median
    device time of direct calls of that function, in microseconds; 0 for other programs. operations: in their order, of
    a function that was recorded without a GPU; only the emulator runs such a program. It may have no launches then.
    """

    steps: tuple[Step, ...]
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    allocations: tuple[Allocation, ...] = ()
    function_us: float = 0.0
    operations: tuple[TensorOperation, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The recommended rung for a call, and why."""

    rung: str
    reason: str


class Family(Protocol):
    """A kernel family: a module with these two functions, and optionally ``choose(target, fmt, dims)``, a Choice.

    A family of several launches has ``program`` in place of both, with the parameters of ``kernel``: a Program.

    Toggles are the task's (usually 0 or 1), ``fmt`` is a number format of its config, ``dims`` a shape's dimensions.
    """

    def kernel(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> KernelSource:
        """Render the kernel for a variant. Equal results for two shapes are compiled once.

        instrumented: the build that counts cycles per phase; a family without one raises UsageError.
        Raises UsageError, naming the rule, for illegal toggles or dimensions.
        """

    def launch(self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int]) -> Launch:
        """Return the grid and arguments of that kernel for a shape; arguments name buffers of the problem's case."""


def render_program(
    family: Family, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
) -> Program:
    """Return a family's program for a shape: its ``program``, or the single launch of its ``kernel``.

    Raises the errors of ``program``, or of ``kernel`` and ``launch``.
    """
    several = getattr(family, "program", None)
    if several is not None:
        made: Program = several(toggles, fmt, dims, instrumented=instrumented)
        return made
    kernel = family.kernel(toggles, fmt, dims, instrumented=instrumented)
    return Program((Step(kernel, family.launch(toggles, fmt, dims)),))
