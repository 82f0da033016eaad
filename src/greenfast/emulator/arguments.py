"""Kernel arguments in the order of the kernel's parameters: Python's values, or words of ``greenfast emulate --arg``.

In words:

    i32:128                           a number; types as below
    in:x=f16[8,64]:normal             a buffer with elements: zeros, ones, arange, normal, uniform (0 to 1)
    in:x=i32[64]:uniform:0:9          whole numbers need the limits, both may come
    in:x=f32[64]:0.5                  all the same number
    in:x=x.npy                        a buffer from a file
    out:y=f32[1024]                   a buffer that holds nothing before the kernel writes it
    inout:y=f32[1024]:zeros           a buffer that the kernel reads and changes
    x                                 a buffer named by an argument before this one, again
    map:x[8,32]:128                   a tensor map (CUtensorMap) over such a buffer: its box, and its swizzle if any
    struct:i32=5,f64=1.5:2,x          a struct by value: numbers, arrays of them, pointers to such buffers, and maps
                                      (struct:i32=5,map=x[8,32]:128)
    in:p=struct:i32=5,x               a pointer to such a struct in global memory

Types are i8 to i64, u8 to u64, f16, f32, f64, or NumPy's names.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from greenfast.emulator.ptx.syntax import Function, Variable
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import MAP_BYTES, Argument, Struct, TensorMap
from greenfast.spec.problem import Array, OutputSpec

TYPES: dict[str, str] = {f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
TYPES |= {f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)}
TYPES |= {f"f{bits}": f"float{bits}" for bits in (16, 32, 64)}
_NAMES = {**TYPES, **{name: name for name in TYPES.values()}}
_ROLES = ("in", "out", "inout")
_FILLS = "zeros, ones, arange, normal, uniform, uniform:LOW:HIGH or a number"
_FORMS = (
    "allowed are TYPE:NUMBER, in:NAME=..., out:NAME=..., inout:NAME=..., the NAME of a buffer given before, "
    "map:NAME[BOX]:SWIZZLE, or struct:FIELD,... of fields TYPE=NUMBER, NAME or map=NAME[BOX]:SWIZZLE"
)
_NUMBER = re.compile(r"[-+.]*(\d|inf|nan)")
_MAP = re.compile(r"(\w+)\[(\d+(?:,\d+)*)\](?::(\d+))?")
_SPEC = re.compile(r"(\w+)\[([^\]]*)\](?::(.*))?")
#: Larger buffers would take minutes to fill and hours to run through.
_MAX_BYTES = 1 << 30


@dataclass
class Arguments:
    """The arguments of a kernel and its buffers.

    A buffer in both inputs and outputs is initialised, and the kernel may change it. structs: contents of some inputs.
    texts: the arguments as messages name them. changeable: how to give a buffer that the kernel may change.
    """

    launch: list[Argument] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)
    outputs: dict[str, OutputSpec] = field(default_factory=dict)
    structs: dict[str, Struct] = field(default_factory=dict)
    changeable: str = "it as inout:{}=..."


@dataclass(frozen=True)
class In:
    """An array that a kernel must not change: ``emulator.run`` reports a write to it."""

    array: Any


@dataclass(frozen=True)
class Out:
    """An array that is uninitialised at the launch: ``emulator.run`` reports early reads and unwritten bytes."""

    array: Any


def read_arguments(texts: Sequence[str], seed: int, buffers: Sequence[str] = ()) -> Arguments:
    """Parse every ``--arg``, and every ``--buffer`` that they name.

    Random elements depend on the seed and the buffer's name. Raises UsageError with the wrong argument and the reason.
    """
    arguments = Arguments()
    for text in buffers:
        kind, colon, remainder = text.partition(":")
        if not colon or kind not in _ROLES:
            raise UsageError(f"--buffer {text!r}: allowed are in:NAME=..., out:NAME=... and inout:NAME=...")
        _add_buffer(arguments, text, kind, remainder, seed)
    for text in texts:
        kind, colon, remainder = text.partition(":")
        if colon and kind in _ROLES:
            arguments.launch.append(_add_buffer(arguments, text, kind, remainder, seed))
        elif colon and kind in _NAMES:
            arguments.launch.append(_parse_number(text, remainder, _NAMES[kind]))
        elif colon and kind == "struct":
            arguments.launch.append(_parse_struct(arguments, text, remainder))
        elif colon and kind == "map":
            arguments.launch.append(_parse_tensor_map(arguments, text, remainder))
        elif text in arguments.inputs or text in arguments.outputs:
            arguments.launch.append(text)
        else:
            raise UsageError(f"--arg {text!r}: {_FORMS}; types are {', '.join(TYPES)}")
        arguments.texts.append(f"--arg {text!r}")
    return arguments


def bind_arguments(function: Function, values: Sequence[object]) -> tuple[Arguments, dict[str, Array]]:
    """Convert Python's values. Return the arguments, and the NumPy array of each buffer that the kernel may write.

    Raises UsageError for a value that no parameter can have.
    """
    arguments = Arguments(changeable="the array itself, without In or Out,")
    buffers: dict[str, tuple[object, Array]] = {}
    for n, value in enumerate(values):
        label = f"args[{n}]"
        arguments.texts.append(label)
        if isinstance(value, np.number | Struct):
            arguments.launch.append(value)
        elif value is None:
            arguments.launch.append(np.uint64(0))
        elif isinstance(value, bool | np.bool_ | int | float):
            parameter = function.params[n] if n < len(function.params) else None
            arguments.launch.append(_convert_number(label, value, parameter))
        else:
            arguments.launch.append(_bind_array(arguments, buffers, label, value))
    return arguments, {name: array for name, (_, array) in buffers.items() if name in arguments.outputs}


def _convert_number(label: str, value: bool | np.bool_ | int | float, parameter: Variable | None) -> np.number[Any]:
    """Return a Python number in the type of its parameter."""
    if parameter is None:  # check_parameters reports the number of arguments
        return np.float64(value)
    floating = parameter.type[0] == "f"
    if (parameter.type == "b8" and parameter.size > 1) or (isinstance(value, float) and not floating):
        raise UsageError(f"{label}: {value!r} for {_describe(parameter)}; give a NumPy number, such as np.float16(1)")
    sign = "int" if value < 0 else "uint"
    dtype = np.dtype(f"{'float' if floating else sign}{8 * parameter.size}")
    if not floating and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise UsageError(f"{label}: {value!r} does not fit into {_describe(parameter)}")
    number: np.number[Any] = dtype.type(value)
    return number


def _bind_array(
    arguments: Arguments, buffers: dict[str, tuple[object, Array]], label: str, value: object
) -> str | np.number[Any]:
    """Return the name of an array's buffer, or a null pointer for an empty array. Add the buffer if it is new."""
    owner = value.array if isinstance(value, In | Out) else value
    array = _view_array(label, owner)
    if not array.size:
        return np.uint64(0)
    for name, (other_owner, other) in buffers.items():
        if other_owner is owner:
            return name
        if np.may_share_memory(array, other):
            raise UsageError(f"{label}: overlaps {name}; give the same array twice, or copies")
    if not isinstance(value, In) and not array.flags.writeable:
        raise UsageError(f"{label}: is read-only; give emulator.In(array) if the kernel does not change it")
    buffers[label] = owner, array
    if not isinstance(value, Out):
        arguments.inputs[label] = array.copy()
    if not isinstance(value, In):
        arguments.outputs[label] = OutputSpec(array.shape, array.dtype.name)
    return label


def _view_array(label: str, value: Any) -> Array:
    """Return a NumPy array in the memory of an array or a CPU tensor; of other formats, such as bfloat16, its bits."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise UsageError(
                f"{label}: a tensor on {value.device}, strides {value.stride()}; give a contiguous CPU tensor"
            )
        plain = value.detach()
        if not ((plain.dtype.is_floating_point and plain.element_size() > 2) or plain.dtype == torch.float16):
            plain = plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
        value = plain.numpy()
    if not isinstance(value, np.ndarray):
        raise UsageError(
            f"{label}: {type(value).__name__}; allowed are NumPy arrays, CPU tensors of PyTorch, numbers, None for a "
            "null pointer, and emulator.In or emulator.Out of an array"
        )
    if not value.flags.c_contiguous:
        raise UsageError(f"{label}: strides {value.strides}; give a contiguous array, such as np.ascontiguousarray(x)")
    return value if value.dtype.name in TYPES.values() else value.reshape(-1).view(np.uint8)


def check_parameters(function: Function, arguments: Arguments, name: str) -> None:
    """Raise UsageError unless the arguments fit the kernel's parameters in number, size and kind."""
    listed = "; its parameters: " + (
        ", ".join(f"{n} {_describe(p)}" for n, p in enumerate(function.params, 1)) or "none"
    )
    if len(arguments.launch) != len(function.params):
        raise UsageError(f"{name} takes {len(function.params)} arguments, not {len(arguments.launch)}{listed}")
    for n, (parameter, argument, text) in enumerate(
        zip(function.params, arguments.launch, arguments.texts, strict=True), 1
    ):
        if not _fits(parameter, argument):
            raise UsageError(f"{text}: parameter {n} of {name} is {_describe(parameter)}{listed}")


def _describe(parameter: Variable) -> str:
    """Describe a parameter by its PTX type and its C++ meaning."""
    if parameter.type == "b8" and parameter.size > 1:
        meaning = "a half" if parameter.size == 2 else "a struct by value: give struct:FIELD,..."
        if parameter.size == MAP_BYTES:
            meaning += ", or map:NAME[BOX] for a tensor map"
        return f".b8[{parameter.size}] ({meaning})"
    if parameter.size == 8 and parameter.type[0] != "f":
        return f".{parameter.type} (pointer or 64-bit integer)"
    kind = "float" if parameter.type[0] == "f" else "integer"
    return f".{parameter.type} ({8 * parameter.size}-bit {kind})"


def _parse_struct(arguments: Arguments, text: str, fields: str) -> Struct:
    """Parse a struct of numbers, arrays of numbers and pointers to buffers given before."""
    values: list[str | np.generic | Array | TensorMap] = []
    for field_text in re.split(r",(?![^\[]*\])", fields):
        kind, equals, numbers = field_text.partition("=")
        if not equals and (kind in arguments.inputs or kind in arguments.outputs):
            values.append(kind)
        elif equals and kind == "map":
            values.append(_parse_tensor_map(arguments, text, numbers))
        elif equals and kind in _NAMES:
            several = [_parse_number(text, number, _NAMES[kind]) for number in numbers.split(":")]
            values.append(several[0] if len(several) == 1 else np.array(several, _NAMES[kind]))
        else:
            forms = "TYPE=NUMBER, TYPE=NUMBER:NUMBER:..., map=NAME[BOX]:SWIZZLE or the NAME of a buffer given before"
            raise UsageError(
                f"--arg {text!r}: {field_text!r} is not a field; give {forms}; types are {', '.join(TYPES)}"
            )
    return Struct(tuple(values))


def _parse_tensor_map(arguments: Arguments, text: str, spec: str) -> TensorMap:
    """Return the tensor map over the whole of a buffer given before; it has the buffer's shape."""
    match = _MAP.fullmatch(spec)
    if match is None:
        raise UsageError(f"--arg {text!r}: give a tensor map as NAME[BOX] or NAME[BOX]:SWIZZLE, such as x[8,64]:128")
    name, box, swizzle = match[1], tuple(map(int, match[2].split(","))), int(match[3] or 0)
    if name not in arguments.inputs and name not in arguments.outputs:
        raise UsageError(f"--arg {text!r}: a tensor map over {name!r}: no earlier argument is this buffer")
    buffer = arguments.inputs[name] if name in arguments.inputs else arguments.outputs[name]
    shape, dtype = tuple(buffer.shape), np.dtype(buffer.dtype)
    strides = [math.prod(shape[n + 1 :]) * dtype.itemsize for n in range(len(shape))]
    if len(box) != len(shape):
        raise UsageError(f"--arg {text!r}: a box of {len(box)} dimensions, {name!r} has {len(shape)}")
    return TensorMap(name, dtype.name, shape, tuple(strides), box, swizzle)


def _fits(parameter: Variable, argument: Argument) -> bool:
    if isinstance(argument, Struct):
        return parameter.type == "b8" and parameter.size == len(argument.layout(lambda name: 0))
    if isinstance(argument, TensorMap):
        return parameter.type == "b8" and parameter.size == MAP_BYTES
    if isinstance(argument, str):
        return parameter.size == 8 and parameter.type in ("u64", "b64", "s64")
    assert isinstance(argument, np.number)
    kind = {"f": "f", "u": "iu", "s": "iu", "b": "fiu"}[parameter.type[0]]
    return argument.itemsize == parameter.size and argument.dtype.kind in kind


def _parse_number(text: str, number: str, dtype: str) -> np.number[Any]:
    """Parse one value of a type. Raises UsageError unless it is a number in the type's range."""
    whole = np.dtype(dtype).kind in "iu"
    try:
        value: float = int(number, 0) if whole else float(number)
    except ValueError:
        expected = "a whole number" if whole else "a number"
        raise UsageError(f"--arg {text!r}: {number!r} is not {expected}") from None
    limits = np.iinfo(dtype) if whole else np.finfo(dtype)
    low, high = (limit if whole else float(limit) for limit in (limits.min, limits.max))
    if math.isfinite(value) and not low <= value <= high:
        raise UsageError(f"--arg {text!r}: {dtype} holds {low} to {high}")
    typed: np.number[Any] = np.dtype(dtype).type(value)
    return typed


def _add_buffer(arguments: Arguments, text: str, role: str, remainder: str, seed: int) -> str:
    """Add a buffer. Return its name."""
    name, equals, spec = remainder.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise UsageError(f"--arg {text!r}: give {role}:NAME=..., the name in letters, digits and _")
    if name in arguments.inputs or name in arguments.outputs:
        raise UsageError(f"--arg {text!r}: there is a buffer {name!r} already; give its name alone to pass it again")
    kind, _, fields = spec.partition(":")
    if kind == "struct":
        if role != "in":
            raise UsageError(f"--arg {text!r}: a struct in global memory is an input; give in:{remainder}")
        arguments.structs[name] = _parse_struct(arguments, text, fields)
        arguments.inputs[name] = np.zeros(len(arguments.structs[name].layout(lambda _: 0)), np.uint8)
        return name
    if role != "out":
        data = arguments.inputs[name] = _fill(text, name, spec, seed)
        if role == "inout":
            arguments.outputs[name] = OutputSpec(data.shape, data.dtype.name)
        return name
    dtype, shape, fill = _parse_spec(text, spec)
    if fill is not None:
        raise UsageError(f"--arg {text!r}: out holds nothing at first; use inout:{spec} for a buffer that does")
    arguments.outputs[name] = OutputSpec(shape, dtype)
    return name


def _parse_spec(text: str, spec: str) -> tuple[str, tuple[int, ...], str | None]:
    """Parse TYPE[SHAPE] with or without :FILL."""
    match = _SPEC.fullmatch(spec)
    if match is None or match[1] not in _NAMES:
        raise UsageError(f"--arg {text!r}: give TYPE[SHAPE], such as f32[8,64]; types are {', '.join(TYPES)}")
    try:
        shape = tuple(int(size) for size in match[2].split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(f"--arg {text!r}: [{match[2]}] is not a shape; give whole numbers from 1 up, such as [8,64]")
    dtype = _NAMES[match[1]]
    if math.prod(shape) * np.dtype(dtype).itemsize > _MAX_BYTES:
        raise UsageError(f"--arg {text!r}: too large to emulate; a buffer may have up to 1 GiB")
    return dtype, shape, match[3]


def _fill(text: str, name: str, spec: str, seed: int) -> Array:
    if spec.endswith(".npy"):
        return read_array(Path(spec), f"--arg {text!r}")
    dtype, shape, fill = _parse_spec(text, spec)
    whole = np.dtype(dtype).kind in "iu"
    count = math.prod(shape)
    random = np.random.default_rng([seed, *name.encode()])
    kind, *limits = (fill or "").split(":")
    if kind in ("zeros", "ones") and not limits:
        return np.full(shape, kind == "ones", dtype)
    if kind == "arange" and not limits:
        _parse_number(text, str(count - 1), dtype)  # the last element must be one that the type holds
        return np.arange(count).astype(dtype).reshape(shape)
    if kind == "normal" and not limits and not whole:
        return random.standard_normal(shape).astype(dtype)
    if kind == "uniform" and (len(limits) == 2 or (not limits and not whole)):
        low, high = (_parse_number(text, limit, dtype) for limit in limits or ("0", "1"))
        if not low <= high:
            raise UsageError(f"--arg {text!r}: {low} is above {high}")
        if whole:
            return random.integers(int(low), int(high), shape, endpoint=True).astype(dtype)
        return random.uniform(float(low), float(high), shape).astype(dtype)
    if _NUMBER.match(fill or ""):
        return np.full(shape, _parse_number(text, fill or "", dtype))
    why = "; normal makes no whole numbers, and uniform needs its limits for them" if whole else ""
    raise UsageError(f"--arg {text!r}: name the fill: {_FILLS}{why}")


def read_array(path: Path, where: str) -> Array:
    """Load the array of a .npy file. Raise UsageError, prefixed with ``where``, unless it holds plain numbers."""
    try:
        data: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else "not a .npy file of numbers"
        raise UsageError(f"{where}: {path}: {why}") from e
    if not isinstance(data, np.ndarray) or data.dtype.name not in TYPES.values() or not data.size:
        held = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else "no array"
        raise UsageError(f"{where}: {path} holds {held}; allowed are {', '.join(TYPES.values())}")
    return np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("="))
