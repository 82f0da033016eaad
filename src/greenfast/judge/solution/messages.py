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

    fields: list[Line | ScalarData | ArrayData | StructData | TensorMapData]


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


#: A text is the name of a buffer.
ArgumentData = Line | ScalarData | BytesData | StructData | TensorMapData | PackedData


class KernelData(_Message, frozen=True):
    """A kernel, with the fields of ``spec.kernel.KernelSource``."""

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


class LaunchData(_Message, frozen=True):
    """A launch, with the fields of ``spec.kernel.Launch``."""

    grid: Extents
    args: Annotated[list[ArgumentData], Meta(max_length=MAX_ARGUMENTS)]
    early: bool
    cluster: tuple[
        Annotated[int, Meta(ge=1, le=16)], Annotated[int, Meta(ge=1, le=16)], Annotated[int, Meta(ge=1, le=16)]
    ]
    cooperative: bool


class StepData(_Message, frozen=True):
    """A kernel and its launch."""

    kernel: KernelData
    launch: LaunchData


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
    steps = []
    for step in program.steps:
        arguments = list(map(_encode_argument, step.launch.args))
        steps.append(StepData(_copy(KernelData, step.kernel), _copy(LaunchData, step.launch, args=arguments)))
    operations = [
        _copy(
            OperationData,
            operation,
            args=list(map(_encode_value, operation.args)),
            kwargs={name: _encode_value(value) for name, value in operation.kwargs.items()},
            writes=list(map(_encode_value, operation.writes)),
            results=list(map(_encode_value, operation.results)),
        )
        for operation in program.operations
    ]
    workspaces = {name: _copy(WorkspaceData, space) for name, space in program.workspaces.items()}
    allocations = [_copy(AllocationData, allocation) for allocation in program.allocations]
    return Rendered(steps, workspaces, allocations, program.function_us, operations)


def _copy(kind: type[_Message], value: Any, **changes: Any) -> Any:
    """Return a message with the fields of a value that have the same names. changes: other fields."""
    names = (name for name in kind.__struct_fields__ if name not in changes)
    return kind(**{name: _make_plain(getattr(value, name)) for name in names}, **changes)


def _make_plain(value: Any) -> Any:
    """Return a field of a family's program as a message can hold it: families give NumPy's numbers too."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_make_plain, value))
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _encode_value(value: Any) -> Any:
    if isinstance(value, TensorView):
        return _copy(ViewData, value)
    if isinstance(value, TorchConstant):
        return ConstantData(value.name)
    return ListData(list(map(_encode_value, value))) if isinstance(value, (list, tuple)) else value


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


def _encode_field(field: Any) -> str | ScalarData | ArrayData | StructData | TensorMapData:
    if isinstance(field, TensorMap):
        tensor_map: TensorMapData = _copy(TensorMapData, field)
        return tensor_map
    if isinstance(field, str):
        return field
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
    for name, workspace in data.workspaces.items():
        if workspace.data and len(workspace.data) != workspace.nbytes:
            raise ValueError(f"{name!r} of {workspace.nbytes} bytes begins with {len(workspace.data)}")
    program: Program = _decode(data)
    return program


#: Message -> the class that has its fields.
_CLASSES: dict[type, type] = {
    Rendered: Program,
    StepData: Step,
    KernelData: KernelSource,
    LaunchData: Launch,
    WorkspaceData: Workspace,
    AllocationData: Allocation,
    OperationData: TensorOperation,
    ViewData: TensorView,
    ConstantData: TorchConstant,
    TensorMapData: TensorMap,
    StructData: Struct,
    PackedData: Packed,
}


def _decode(data: Any) -> Any:
    if type(data) in _CLASSES:
        _check(data)
        values = {name: _decode(getattr(data, name)) for name in data.__struct_fields__}
        if isinstance(data, KernelData):
            values["include_dirs"] = tuple(map(Path, data.include_dirs))
        return _CLASSES[type(data)](**values)
    if isinstance(data, ListData):
        return list(map(_decode, data.values))
    if isinstance(data, list):
        return tuple(map(_decode, data))
    if isinstance(data, dict):
        return {name: _decode(value) for name, value in data.items()}
    if isinstance(data, BytesData):
        return data.data
    return _decode_number(data) if isinstance(data, (ArrayData, ScalarData)) else data


def _check(data: Any) -> None:
    """Raise ValueError for lengths that do not fit together."""
    if isinstance(data, ViewData) and len(data.shape) != len(data.strides):
        raise ValueError(f"a tensor with {len(data.shape)} extents and {len(data.strides)} strides")
    if isinstance(data, PackedData) and any(offset + 8 > len(data.data) for offset, *_ in data.pointers):
        raise ValueError("an address beyond the bytes that hold it")


def _decode_number(data: ArrayData | ScalarData) -> Any:
    if data.dtype not in _DTYPES:
        raise ValueError(f"the dtype {data.dtype!r}")
    dtype = _DTYPES[data.dtype]
    if isinstance(data, ArrayData):
        return np.frombuffer(data.data, dtype).reshape(data.shape)
    if len(data.data) != dtype.itemsize:
        raise ValueError(f"a {dtype} of {len(data.data)} bytes")
    return np.frombuffer(data.data, dtype)[0]
