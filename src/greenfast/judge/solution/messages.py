"""The messages between the judge and a solution's process: MessagePack with a schema. They contain only data.

A message is its length in four bytes, little-endian, and that many bytes. A reply repeats the number of its request.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Annotated, Any, Literal

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta

from greenfast.judge.solution.schema import MAX_ARGUMENTS, MAX_LAUNCHES, Entry, SolutionConfig
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import (
    Allocation,
    Argument,
    KernelSource,
    Launch,
    Packed,
    Program,
    Step,
    Struct,
    TensorMap,
    TensorOperation,
    TensorView,
    TorchConstant,
    Workspace,
)

#: The longest message, bytes.
MAX_MESSAGE = 512 << 20

_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
} | {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}

Text = Annotated[str, Meta(max_length=1000)]
Line = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z", max_length=1000)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
#: Extents of a grid or a block. BUILD checks them against the limits of GPUs.
Extents = tuple[Count, Count, Count]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class BufferData(_Message, frozen=True, tag="buffer"):
    """A buffer's name."""

    name: Line


class ScalarData(_Message, frozen=True, tag="scalar"):
    """A NumPy scalar."""

    dtype: Text
    data: bytes


class BytesData(_Message, frozen=True, tag="bytes"):
    """A struct by value."""

    data: bytes


class ArrayData(_Message, frozen=True, tag="array"):
    """An array member of a struct."""

    dtype: Text
    shape: list[Count]
    data: bytes


class StructData(_Message, frozen=True, tag="struct"):
    """A struct with fields. Their offsets are computed at the launch."""

    fields: list[BufferData | ScalarData | ArrayData | StructData | TensorMapData]


class TensorMapData(_Message, frozen=True, tag="map"):
    """A tensor map; the fields are as in ``spec.kernel.TensorMap``."""

    buffer: Line
    dtype: Text
    shape: list[Count]
    strides: list[Count]
    box: list[Count]
    swizzle: int


class PackedData(_Message, frozen=True, tag="packed"):
    """Bytes with addresses in them; the fields are as in ``spec.kernel.Packed``."""

    data: bytes
    pointers: list[tuple[Count, Line, Count]]


ArgumentData = BufferData | ScalarData | BytesData | StructData | TensorMapData | PackedData


class StepData(_Message, frozen=True):
    """A kernel and its launch."""

    entry: Entry
    source: str
    name: Line
    include_dirs: list[Line]
    block: Extents
    dynamic_smem_bytes: Annotated[int, Meta(ge=0, le=1 << 20)]
    phases: list[Line]
    requires: Line
    language: Literal["cuda", "ptx", "cubin"]
    binary: bytes
    grid: Extents
    args: Annotated[list[ArgumentData], Meta(max_length=MAX_ARGUMENTS)]
    early: bool
    cluster: tuple[
        Annotated[int, Meta(ge=1, le=16)], Annotated[int, Meta(ge=1, le=16)], Annotated[int, Meta(ge=1, le=16)]
    ]
    cooperative: bool


class WorkspaceData(_Message, frozen=True):
    """A scratch buffer."""

    nbytes: Annotated[int, Meta(ge=1, le=1 << 37)]
    zeros: bool
    data: bytes


class Buffer(_Message, frozen=True):
    """A buffer of the problem's case: its dtype's name and shape.

    output: True if the program writes it. path: a file with example data; empty for none.
    """

    dtype: Text
    shape: list[Count]
    output: bool = False
    path: str = ""


class Load(_Message, frozen=True, tag="load"):
    """Request to import a solution's code. module: an importable name that replaces the folder's file, or empty."""

    solution: SolutionConfig
    folder: str
    module: str = ""


class Render(_Message, frozen=True, tag="render"):
    """Request for the program of a shape."""

    toggles: dict[str, int]
    format: str
    dims: dict[str, int]
    target: str
    multiprocessors: int
    instrumented: bool = False
    buffers: dict[Line, Buffer] = {}


class Choose(_Message, frozen=True, tag="choose"):
    """Request for the rung that a family recommends."""

    target: str
    multiprocessors: int
    format: str
    dims: dict[str, int]


class RpcRequest(_Message, frozen=True):
    """A request of the judge with its number."""

    number: int
    call: Load | Render | Choose


class Ready(_Message, frozen=True, tag="ready"):
    """The first message of a confined process, before it runs any code of the solution. sandbox: the protections."""

    sandbox: list[Line]


class Loaded(_Message, frozen=True, tag="loaded"):
    """Reply: the solution's code is imported. functions: their names."""

    functions: list[Line]


class AllocationData(_Message, frozen=True):
    """An allocation before a step, with the fields of ``spec.kernel.Allocation``."""

    step: Annotated[int, Meta(ge=0, le=MAX_LAUNCHES)]
    buffer: Line
    offset: Count
    nbytes: Count


class ViewData(_Message, frozen=True, tag="view"):
    """A tensor in a buffer; the fields are as in ``spec.kernel.TensorView``."""

    buffer: Line
    dtype: Annotated[str, Meta(pattern=r"^[a-z]+[0-9a-z_]*\Z", max_length=40)]
    shape: Annotated[list[Count], Meta(max_length=64)]
    strides: Annotated[list[Count], Meta(max_length=64)]
    offset: Count


class ConstantData(_Message, frozen=True, tag="constant"):
    """A constant of PyTorch."""

    name: Annotated[str, Meta(pattern=r"^[a-z]+[0-9a-z_]*\Z", max_length=40)]


class ListData(_Message, frozen=True, tag="list"):
    """Several values."""

    values: Annotated[list[OperationValue], Meta(max_length=MAX_ARGUMENTS)]


OperationValue = ViewData | ConstantData | ListData | bool | int | float | Text | None


class OperationData(_Message, frozen=True):
    """An operation of PyTorch, with the fields of ``spec.kernel.TensorOperation``."""

    step: Annotated[int, Meta(ge=0, le=MAX_LAUNCHES)]
    name: Annotated[str, Meta(pattern=r"^aten\.[a-z0-9_]+\.[A-Za-z0-9_]+\Z", max_length=100)]
    args: Annotated[list[OperationValue], Meta(max_length=MAX_ARGUMENTS)]
    kwargs: Annotated[dict[Line, OperationValue], Meta(max_length=MAX_ARGUMENTS)]
    writes: Annotated[list[ViewData], Meta(max_length=MAX_ARGUMENTS)]
    is_out: bool
    results: Annotated[list[ViewData], Meta(max_length=MAX_ARGUMENTS)]


class Rendered(_Message, frozen=True, tag="rendered"):
    """A program."""

    steps: Annotated[list[StepData], Meta(max_length=MAX_LAUNCHES)]
    workspaces: dict[Line, WorkspaceData]
    allocations: Annotated[list[AllocationData], Meta(max_length=1 << 16)] = []
    function_us: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    operations: Annotated[list[OperationData], Meta(max_length=1 << 16)] = []


class Chosen(_Message, frozen=True, tag="chosen"):
    """A family's recommendation."""

    rung: Line
    reason: Text


class MissingDependency(_Message, frozen=True, tag="missing_dependency"):
    """Reply: a dependency of the solution's language is missing on this machine."""

    text: str


class Rejected(_Message, frozen=True, tag="rejected"):
    """Reply: the solution does not support the request."""

    text: str


class CompileFailed(_Message, frozen=True, tag="compile_failed"):
    """Reply: the solution does not compile. text: the compiler's message."""

    text: str


class ExceptionReply(_Message, frozen=True, tag="exception"):
    """Reply: the solution's code raised. text: the exception. lines: its traceback. exits: True for sys.exit."""

    text: str
    lines: list[str]
    exits: bool = False


class RpcReply(_Message, frozen=True):
    """A reply of the solution's process, with the number of its request."""

    number: int
    reply: Ready | Loaded | Rendered | Chosen | MissingDependency | Rejected | CompileFailed | ExceptionReply


def encode_program(program: Program) -> Rendered:
    """Encode a program. Raises UsageError for an argument that cannot be encoded."""
    return Rendered(
        [_encode_step(step) for step in program.steps],
        {name: WorkspaceData(w.nbytes, w.zeros, w.data) for name, w in program.workspaces.items()},
        [AllocationData(a.step, a.buffer, a.offset, a.nbytes) for a in program.allocations],
        program.function_us,
        [_encode_operation(operation) for operation in program.operations],
    )


def _encode_step(step: Step) -> StepData:
    kernel, launch = step.kernel, step.launch
    return StepData(
        entry=kernel.entry,
        source=kernel.source,
        name=kernel.name,
        include_dirs=[str(folder) for folder in kernel.include_dirs],
        block=_encode_extents(kernel.block),
        dynamic_smem_bytes=int(kernel.dynamic_smem_bytes),
        phases=list(kernel.phases),
        requires=kernel.requires,
        language=kernel.language,
        binary=kernel.binary,
        grid=_encode_extents(launch.grid),
        args=[_encode_argument(argument) for argument in launch.args],
        early=bool(launch.early),
        cluster=_encode_extents(launch.cluster),
        cooperative=bool(launch.cooperative),
    )


def _encode_operation(operation: TensorOperation) -> OperationData:
    return OperationData(
        step=operation.step,
        name=operation.name,
        args=[_encode_value(value) for value in operation.args],
        kwargs={name: _encode_value(value) for name, value in operation.kwargs.items()},
        writes=[_encode_view(view) for view in operation.writes],
        is_out=operation.is_out,
        results=[_encode_view(view) for view in operation.results],
    )


def _encode_view(view: TensorView) -> ViewData:
    return ViewData(view.buffer, view.dtype, list(view.shape), list(view.strides), view.offset)


def _encode_value(value: Any) -> OperationValue:
    if isinstance(value, TensorView):
        return _encode_view(value)
    if isinstance(value, TorchConstant):
        return ConstantData(value.name)
    if isinstance(value, (list, tuple)):
        return ListData([_encode_value(item) for item in value])
    encoded: OperationValue = value
    return encoded


def _encode_extents(extents: tuple[int, int, int]) -> tuple[int, int, int]:
    x, y, z = map(int, extents)
    return x, y, z


def _encode_argument(argument: Argument) -> ArgumentData:
    if isinstance(argument, Packed):
        return PackedData(argument.data, list(argument.pointers))
    if isinstance(argument, (ctypes.Structure, ctypes.Union, bytes)):
        return BytesData(bytes(argument))
    if isinstance(argument, np.void):
        return BytesData(argument.tobytes())
    field = _encode_field(argument)
    if isinstance(field, ArrayData):
        raise UsageError("an argument of a launch is an array; give a buffer's name, or a Struct with an array")
    return field


def _encode_field(field: Any) -> BufferData | ScalarData | ArrayData | StructData | TensorMapData:
    if isinstance(field, TensorMap):
        sizes = (field.shape, field.strides, field.box)
        shape, strides, box = ([int(n) for n in values] for values in sizes)
        return TensorMapData(field.buffer, field.dtype, shape, strides, box, field.swizzle)
    if isinstance(field, str):
        return BufferData(field)
    if isinstance(field, Struct):
        return StructData([_encode_field(inner) for inner in field.fields])
    if isinstance(field, (np.generic, np.ndarray)) and field.dtype.name in _DTYPES:
        if isinstance(field, np.ndarray):
            return ArrayData(field.dtype.name, list(field.shape), field.tobytes())
        return ScalarData(field.dtype.name, field.tobytes())
    raise UsageError(
        f"{field!r} ({type(field).__name__}) cannot be an argument of a launch; give a buffer's name, a NumPy scalar "
        "such as numpy.int32(n), a struct as bytes or a Struct, or a TensorMap"
    )


def decode_program(data: Rendered) -> Program:
    """Decode a program. Raises ValueError for inconsistent values, and for a program that computes nothing."""
    if not data.steps and not data.operations:
        raise ValueError("a program without launches and operations")
    steps = []
    for step in data.steps:
        kernel = KernelSource(
            entry=step.entry,
            source=step.source,
            name=step.name,
            include_dirs=tuple(map(Path, step.include_dirs)),
            block=step.block,
            dynamic_smem_bytes=step.dynamic_smem_bytes,
            phases=tuple(step.phases),
            requires=step.requires,
            language=step.language,
            binary=step.binary,
        )
        arguments = tuple(_decode_argument(argument) for argument in step.args)
        steps.append(Step(kernel, Launch(step.grid, arguments, step.early, step.cluster, step.cooperative)))
    for name, workspace in data.workspaces.items():
        if workspace.data and len(workspace.data) != workspace.nbytes:
            raise ValueError(f"{name!r} of {workspace.nbytes} bytes begins with {len(workspace.data)}")
    workspaces = {name: Workspace(w.nbytes, w.zeros, w.data) for name, w in data.workspaces.items()}
    allocations = tuple(Allocation(a.step, a.buffer, a.offset, a.nbytes) for a in data.allocations)
    operations = tuple(map(_decode_operation, data.operations))
    return Program(tuple(steps), workspaces, allocations, data.function_us, operations)


def _decode_operation(data: OperationData) -> TensorOperation:
    return TensorOperation(
        step=data.step,
        name=data.name,
        args=[_decode_value(value) for value in data.args],
        kwargs={name: _decode_value(value) for name, value in data.kwargs.items()},
        writes=tuple(map(_decode_value, data.writes)),
        is_out=data.is_out,
        results=tuple(map(_decode_value, data.results)),
    )


def _decode_value(data: OperationValue) -> Any:
    if isinstance(data, ViewData):
        if len(data.shape) != len(data.strides):
            raise ValueError(f"a tensor with {len(data.shape)} extents and {len(data.strides)} strides")
        return TensorView(data.buffer, data.dtype, tuple(data.shape), tuple(data.strides), data.offset)
    if isinstance(data, ConstantData):
        return TorchConstant(data.name)
    if isinstance(data, ListData):
        return [_decode_value(item) for item in data.values]
    return data


def _decode_argument(data: ArgumentData | ArrayData) -> Any:
    if isinstance(data, BufferData):
        return data.name
    if isinstance(data, BytesData):
        return data.data
    if isinstance(data, PackedData):
        if any(offset + 8 > len(data.data) for offset, *_ in data.pointers):
            raise ValueError("an address beyond the bytes that hold it")
        return Packed(data.data, tuple(data.pointers))
    if isinstance(data, StructData):
        return Struct(tuple(map(_decode_argument, data.fields)))
    if isinstance(data, TensorMapData):
        shape, strides, box = (tuple(values) for values in (data.shape, data.strides, data.box))
        return TensorMap(data.buffer, data.dtype, shape, strides, box, data.swizzle)
    if data.dtype not in _DTYPES:
        raise ValueError(f"the dtype {data.dtype!r}")
    dtype = _DTYPES[data.dtype]
    if isinstance(data, ArrayData):
        return np.frombuffer(data.data, dtype).reshape(data.shape)
    if len(data.data) != dtype.itemsize:
        raise ValueError(f"a {dtype} of {len(data.data)} bytes")
    return np.frombuffer(data.data, dtype)[0]
