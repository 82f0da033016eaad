"""An entry of the corpus: a kernel, its launch, and its expected outcome.

A kernel is called ``k``. A builder returns its parameters in order, from a seeded generator:

    an array            a read-only buffer
    Out(expected)       a buffer that must be written completely; ``expected`` comes from NumPy
    InOut(start, ...)   an initialised buffer that the kernel may change
    Scratch(array)      the same, and its final contents are not checked
    a NumPy scalar      a number, or a struct by value (``numpy.void``)
    Map(array, box)     a tensor map over an array that is a parameter too
    Beyond(...)         a buffer that is not a parameter
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.kernel import Argument, TensorMap
from greenfast.spec.problem import OutputSpec

Rng: TypeAlias = np.random.Generator
Args: TypeAlias = "tuple[Any, ...]"
Builder: TypeAlias = Callable[[Rng], Args]
#: Returns the error in an output; empty for a correct output.
Check: TypeAlias = Callable[[NDArray[Any]], str]
Extent: TypeAlias = "int | tuple[int, ...]"

F16, F32, F64 = np.float16, np.float32, np.float64
I8, I16, I32, I64 = np.int8, np.int16, np.int32, np.int64
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64


@dataclass(frozen=True)
class Out:
    """An expected output: equal, or within ``atol + rtol * |expected|`` of it, or accepted by ``check``."""

    expected: Any
    atol: Any = 0.0
    rtol: float = 0.0
    check: Check | None = None


@dataclass(frozen=True)
class InOut:
    """A buffer that begins as ``start`` and must end as ``end.expected``."""

    start: Any
    end: Out


@dataclass(frozen=True)
class Scratch:
    """A workspace that begins as ``start``."""

    start: Any


@dataclass(frozen=True)
class Map:
    """A tensor map over the buffer of an array that is a parameter too (the same object)."""

    array: Any
    box: tuple[int, ...]
    swizzle: int = 0


@dataclass(frozen=True)
class Beyond:
    """A buffer that no parameter points to, only a tensor map or a pointer in memory."""

    value: Any


@dataclass(frozen=True)
class Entry:
    """A kernel of the corpus.

    kind: cuda, ptx, triton or bug. faults: regular expression for the fault of a kernel with a bug. The lines that it
    may name are marked ``// <-`` in the source, in the functions ``inside``. refused: the name of an unsupported
    instruction, if the entry needs one. prints: regular expression for the printed output. kernel: its name in the PTX.
    limit: seconds, if the runner's limit is too short.
    """

    name: str
    kind: str
    source: str
    build: Builder
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    smem: int = 0
    target: str = "sm_90a"
    faults: str = ""
    refused: str = ""
    prints: str = ""
    inside: str = ""
    kernel: str = "k"
    limit: float = 0.0

    @property
    def lines(self) -> list[int]:
        """The lines that a fault may name, from 1: the marked ones, and within functions of the ``inside`` names."""
        inner = re.compile(rf"__device__.* ({self.inside})\(")
        result, within = [], False
        for n, line in enumerate(self.source.splitlines(), 1):
            within |= bool(self.inside and inner.match(line))
            if within or "// <-" in line:
                result.append(n)
            within &= not line.endswith("}")
        return result


@dataclass
class Bound:
    """An entry's parameters as the emulator and a GPU take them."""

    args: list[Argument] = field(default_factory=list)
    inputs: dict[str, NDArray[Any]] = field(default_factory=dict)
    outputs: dict[str, OutputSpec] = field(default_factory=dict)
    expected: dict[str, Out] = field(default_factory=dict)

    def differences(self, outputs: dict[str, NDArray[Any]]) -> str:
        """Describe wrong outputs; empty if all are right."""
        return "; ".join(
            f"{name}: {text}" for name, want in self.expected.items() if (text := _difference(outputs[name], want))
        )


def extent(value: Extent) -> tuple[int, int, int]:
    """One to three extents as three."""
    values = (value,) if isinstance(value, int) else tuple(value)
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def bind(entry: Entry, seed: int = 0) -> Bound:
    """Build an entry's parameters."""
    bound = Bound()
    supplied = entry.build(np.random.default_rng([seed, *entry.name.encode()]))
    called = _names(entry, len(supplied))
    buffers: dict[int, str] = {}
    for name, parameter in zip(called, supplied, strict=True):
        value = parameter.value if isinstance(parameter, Beyond) else parameter
        if isinstance(value, InOut | Scratch):
            bound.inputs[name] = np.asarray(value.start)
        elif isinstance(value, np.ndarray) and not _is_struct(value):
            bound.inputs[name] = value
            buffers[id(value)] = name
        if isinstance(value, InOut | Out):
            bound.expected[name] = value.end if isinstance(value, InOut) else value
            buffers[id(bound.expected[name].expected)] = name
        if isinstance(value, InOut | Out | Scratch):
            array = np.asarray(value.expected if isinstance(value, Out) else value.start)
            bound.outputs[name] = OutputSpec(array.shape, array.dtype.str)
    for name, value in zip(called, supplied, strict=True):
        if isinstance(value, Map):
            a = value.array
            bound.args.append(TensorMap(buffers[id(a)], a.dtype.str, a.shape, a.strides, value.box, value.swizzle))
        elif isinstance(value, np.ndarray) and _is_struct(value):
            structure: np.generic = value[()]  # type: ignore[assignment]
            bound.args.append(structure)
        elif isinstance(value, np.generic):
            bound.args.append(value)
        elif not isinstance(value, Beyond):
            bound.args.append(name)
    return bound


def _is_struct(value: NDArray[Any]) -> bool:
    return value.ndim == 0 and value.dtype.fields is not None


def _names(entry: Entry, count: int) -> Sequence[str]:
    """Return the parameters' names in a CUDA kernel, as used in fault messages."""
    match = re.search(r"__global__[^;{]*?\bk\(([^{]*?)\)\s*\{", entry.source, re.DOTALL)
    result = [re.sub(r"\[.*", "", p).split()[-1].lstrip("*&") for p in match[1].split(",")] if match else []
    return result if len(result) == count else [f"arg{n}" for n in range(count)]


def _difference(result: NDArray[Any], want: Out) -> str:
    if want.check is not None:
        return want.check(result)
    expected = np.asarray(want.expected)
    if expected.dtype.kind in "fc":
        a, b = result.astype(np.float64), expected.astype(np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            same |= np.abs(a - b) <= want.atol + want.rtol * np.abs(b)
    else:
        same = result == expected
    if same.all():
        return ""
    where = np.unravel_index(int(np.flatnonzero(~same.ravel())[0]), same.shape)
    index = tuple(int(i) for i in where)
    return f"{int((~same).sum())} of {same.size} differ, first at {index}: {result[where]!r}, not {expected[where]!r}"


_ENTRIES: dict[str, Entry] = {}


def entries() -> dict[str, Entry]:
    """Every entry that was declared so far, by name."""
    return _ENTRIES


def declare(kind: str, source: str, grid: Extent, block: Extent, **more: Any) -> Callable[[Builder], Entry]:
    """Declare an entry; the decorated function builds its parameters and gives it its name."""

    def add(build: Builder) -> Entry:
        name = build.__name__
        if name in _ENTRIES:
            raise ValueError(f"two entries are called {name}")
        _ENTRIES[name] = Entry(name, kind, source.lstrip("\n"), build, extent(grid), extent(block), **more)
        return _ENTRIES[name]

    return add


def cuda(
    source: str, grid: Extent = 1, block: Extent = 32, smem: int = 0, prints: str = ""
) -> Callable[[Builder], Entry]:
    """Declare a CUDA kernel."""
    return declare("cuda", source, grid, block, smem=smem, prints=prints)


def bug(
    source: str,
    message: str,
    grid: Extent = 1,
    block: Extent = 32,
    smem: int = 0,
    inside: str = "",
    limit: float = 0.0,
) -> Callable[[Builder], Entry]:
    """Declare a CUDA kernel with a bug, and the expected fault."""
    return declare("bug", source, grid, block, smem=smem, faults=message, inside=inside, limit=limit)
