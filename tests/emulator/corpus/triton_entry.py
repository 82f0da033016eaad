"""Compile Triton kernels to PTX on a machine without a GPU, and launch them as entries of the corpus.

What Triton's own launcher adds to the arguments is added here: a tensor descriptor becomes a tensor map, its shape and
its strides; two pointers to scratch memory come last. Needs the package ``triton``.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.emulator.corpus.entry import Args, Beyond, Entry, Extent, Map, Rng, Scratch, extent

_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "float64": "fp64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}
_TYPES |= {"uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64"}
_SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class Typed:
    """A parameter of an element type that NumPy lacks: bf16, fp8e4nv (E4M3) or fp8e5 (E5M2), given as bits."""

    value: Any
    kind: str


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor over a parameter's array, with blocks of this shape."""

    array: Any
    block: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True)
class TritonKernel:
    """A kernel, its compilation and launch, and its expected outcome.

    build: returns the parameters in order; constexpr ones are ``constants``. An array that only a descriptor points to
    is given as Beyond(...). refused: as of an Entry.
    """

    name: str
    function: Any
    build: Callable[[Rng], Args]
    grid: Extent
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    capability: int = 90
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


KERNELS: dict[str, TritonKernel] = {}


def launched(
    function: Any,
    grid: Extent,
    warps: int = 4,
    stages: int = 3,
    capability: int = 90,
    options: Mapping[str, Any] | None = None,
    refused: str = "",
    **constants: Any,
) -> Callable[[Callable[[Rng], Args]], Callable[[Rng], Args]]:
    """Declare a launch of a Triton function; the decorated function builds its parameters and names it."""

    def add(build: Callable[[Rng], Args]) -> Callable[[Rng], Args]:
        name = f"triton_{build.__name__}_sm{capability}"
        kernel = TritonKernel(name, function, build, grid, constants, warps, stages, capability, options or {}, refused)
        assert name not in KERNELS
        KERNELS[name] = kernel
        return build

    return add


def compiled(kernel: TritonKernel) -> Entry:
    """Compile a kernel and bind its launch. Raises what Triton raises."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from triton.compiler import ASTSource  # type: ignore[import-not-found, import-untyped, unused-ignore]
    function = triton.jit(kernel.function) if not hasattr(kernel.function, "arg_names") else kernel.function
    supplied = [v for v in kernel.build(np.random.default_rng(0)) if not isinstance(v, Beyond)]
    names = [n for n in function.arg_names if n not in kernel.constants]
    signature = dict(zip(names, map(_type, supplied), strict=True))
    signature = {n: signature.get(n, "constexpr") for n in function.arg_names}
    attributes = {
        (function.arg_names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n].startswith("*")
    }
    source = ASTSource(function, signature, dict(kernel.constants), attributes)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, **kernel.options}
    made = triton.compile(source, target=GPUTarget("cuda", kernel.capability, 32), options=options)
    ptx: str = made.asm["ptx"]
    threads = int(re.search(r"\.reqntid\s+(\d+)", ptx)[1])  # type: ignore[index]
    grid = extent(kernel.grid)

    def build(rng: Rng) -> Args:
        return _expanded(kernel.build(rng), made.metadata, math.prod(grid))

    return Entry(
        name=kernel.name,
        kind="triton",
        source=ptx,
        build=build,
        grid=grid,
        block=(threads, 1, 1),
        smem=made.metadata.shared,
        kernel=made.metadata.name,
        refused=kernel.refused,
    )


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Typed) else value


def _array(value: Any) -> Any:
    value = _plain(value)
    for name in ("start", "expected"):
        value = getattr(value, name, value)
    return np.asarray(value)


def _type(value: Any) -> str:
    """Return a parameter's type in Triton's words."""
    if isinstance(value, Descriptor):
        kind = value.kind or _TYPES[np.asarray(value.array).dtype.name]
        return f"tensordesc<{kind}{list(value.block)}>".replace(" ", "")
    if isinstance(value, np.generic):
        return _TYPES[value.dtype.name]
    return "*" + (value.kind if isinstance(value, Typed) else _TYPES[_array(value).dtype.name])


def _expanded(supplied: Args, metadata: Any, blocks: int) -> Args:
    """Return the parameters as the compiled kernel takes them."""
    result: list[Any] = []
    maps = iter(metadata.tensordesc_meta or ())
    for value in supplied:
        if not isinstance(value, Descriptor):
            result.append(_plain(value))
            continue
        made, a = next(maps), np.asarray(value.array)
        result.append(Map(value.array, tuple(made["block_size"]), _SWIZZLES[made["swizzle"]]))
        result += [np.int32(n) for n in a.shape] + [np.int64(n // a.itemsize) for n in a.strides]
    last: list[Any] = []
    for size in (metadata.global_scratch_size, metadata.profile_scratch_size):
        last.append(Scratch(np.zeros(size * blocks, np.uint8)) if size else np.uint64(0))
    return (*result, *last)
