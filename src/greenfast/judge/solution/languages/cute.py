"""Compilation of a CuTe DSL ``@cute.jit`` function that launches one kernel, to PTX without a GPU.

Tensors have static row-major layouts with the shapes of the problem's buffers. So the kernel's parameters are scalars
and pointers, with tensors as structs of 8 bytes. The solution describes the launch; the host function does not run.
Only PTX leaves this process.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from greenfast.device.compiler import entries
from greenfast.judge.solution.cuda_program import build_workspaces, evaluate_constants, evaluate_launch
from greenfast.judge.solution.languages.compiled import (
    build_ptx_kernel,
    import_solution_module,
    parse_parameters,
    require_extra,
    without_folders,
)
from greenfast.judge.solution.messages import Buffer
from greenfast.judge.solution.schema import ResolvedSolution
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, UsageError
from greenfast.spec.kernel import Argument, Launch, Program, Step, Struct

#: NumPy's and ml_dtypes' names of elements and scalars, and CUTLASS's.
_TYPES = {
    **{f"{sign}int{bits}": f"{'Uint' if sign else 'Int'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"bool": "Boolean", "float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64"},
    **{"float8_e4m3fn": "Float8E4M3FN", "float8_e5m2": "Float8E5M2"},
}
#: The alignment of tensors that CuTe may assume, as in its own examples. Buffers begin at multiples of 256 bytes.
_ALIGNMENT = 16
_BYTES_OF = {".u8": 1, ".s8": 1, ".b8": 1, ".u16": 2, ".s16": 2, ".b16": 2, ".u32": 4, ".s32": 4, ".b32": 4, ".f32": 4,
             ".u64": 8, ".s64": 8, ".b64": 8, ".f64": 8}  # fmt: skip
_PARAMETER = re.compile(r"\.param(?:\s+\.align\s+\d+)?\s+(\.\w+).*?(?:\[(\d+)\])?$", re.DOTALL)
_THREADS = re.compile(r"^\.reqntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", re.MULTILINE)


def program(
    solution: ResolvedSolution, fmt: str, dims: Mapping[str, int], target: Target, buffers: Mapping[str, Buffer]
) -> Program:
    """Compile the program of a CuTe DSL solution for a shape. This runs the solution's file.

    buffers: the buffers of the problem's case by name.
    Raises UsageError with the file, the key and the allowed values, and CompileError with the compiler's message.
    """
    require_extra(solution.config.name, "cute")
    os.environ.setdefault("CUTE_DSL_ARCH", target.name)  # The package requires it at import without a GPU.
    names = evaluate_constants(solution, dims)
    spaces = build_workspaces(solution, names)
    known = {**buffers, **{name: Buffer("uint8", [space.nbytes]) for name, space in spaces.items()}}
    module = import_solution_module(solution.folder, solution.config.file)
    numbers = range(len(solution.config.launches))
    return Program(tuple(_step(solution, n, module, names, known, target) for n in numbers), spaces)


def _step(
    solution: ResolvedSolution,
    number: int,
    module: Any,
    names: Mapping[str, int],
    buffers: Mapping[str, Buffer],
    target: Target,
) -> Step:
    """Compile a launch, and check the kernel's parameters against the launch's arguments."""
    spec = solution.config.launches[number]
    where = f"{solution.path}: launches[{number}]"
    function = getattr(module, spec.kernel, None)
    if not callable(function):
        raise UsageError(f"{where}.kernel: no @cute.jit function {spec.kernel!r} in {solution.file.name}")
    launch = evaluate_launch(solution, number, names)
    ptx = _compile(where, function, _host_arguments(where, function, launch.args, names, buffers), target)
    threads = _THREADS.search(ptx)
    if threads and launch.block != tuple(int(n or 1) for n in threads.groups()):
        raise UsageError(
            f"{where}.block: {list(launch.block)}, and {spec.kernel} launches its kernel with {threads[0]}"
        )
    if ".extern .shared" in ptx and not launch.shared:
        raise UsageError(f"{where}.shared: missing; the kernel has dynamic shared memory: give its bytes")
    kernel = build_ptx_kernel(solution.file.name, _only_entry(where, ptx), ptx, launch.block, launch.shared)
    return Step(kernel, Launch(launch.grid, _kernel_arguments(where, ptx, launch.args), spec.early))


def _host_arguments(
    where: str, function: Any, given: tuple[Argument, ...], names: Mapping[str, int], buffers: Mapping[str, Buffer]
) -> list[Any]:
    """Return the arguments for the compilation: tensors without memory, typed scalars, and constants by name."""
    made: list[Any] = []
    left = list(given)
    for parameter in inspect.signature(function).parameters.values():
        annotation = str(parameter.annotation)
        if "Constexpr" in annotation:
            if parameter.name not in names and parameter.default is parameter.empty:
                raise UsageError(f"{where}.kernel: {parameter.name} is a Constexpr; give it under constants")
            made.append(names.get(parameter.name, parameter.default))
        elif not left:
            raise UsageError(f"{where}.args: {len(given)} given, and none for {parameter.name}")
        else:
            made.append(_host_argument(f"{where}.args", parameter.name, annotation, left.pop(0), buffers))
    if left:
        raise UsageError(f"{where}.args: {len(given)} given, {len(left)} more than the function has parameters")
    return made


def _host_argument(key: str, name: str, annotation: str, argument: Argument, buffers: Mapping[str, Buffer]) -> Any:
    import cutlass
    from cutlass import cute

    if isinstance(argument, np.generic):
        return getattr(cutlass, _TYPES[argument.dtype.name])(argument.item())
    if not isinstance(argument, str):
        raise UsageError(f"{key}: {name}: structs and tensor maps are not passed to CuTe DSL")
    if argument not in buffers:
        raise UsageError(f"{key}: no buffer {argument!r}; the problem and the workspaces have {', '.join(buffers)}")
    buffer = buffers[argument]
    if buffer.dtype not in _TYPES:
        raise UsageError(f"{key}: {argument} holds {buffer.dtype}; CuTe DSL's types are {', '.join(_TYPES)}")
    dtype = getattr(cutlass, _TYPES[buffer.dtype])
    if "Pointer" in annotation:
        return cute.runtime.make_ptr(dtype, _ALIGNMENT, cute.AddressSpace.gmem, assumed_align=_ALIGNMENT)
    order = tuple(reversed(range(len(buffer.shape))))
    return cute.runtime.make_fake_compact_tensor(
        dtype, tuple(buffer.shape), stride_order=order, assumed_align=_ALIGNMENT
    )


def _compile(where: str, function: Any, given: list[Any], target: Target) -> str:
    from cutlass import cute

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the DSL's own names
        options = f"--gpu-arch={target.name} --keep-ptx --generate-line-info --dump-dir={folder}"
        try:
            made = cute.compile(function, *given, options=options)
        except Exception as e:  # The exceptions of the DSL, MLIR and the solution's code have no common base.
            raise CompileError(f"{where}: CuTe DSL does not compile {function.__name__}: {e}") from None
    return without_folders(made.__ptx__)


def _only_entry(where: str, ptx: str) -> str:
    names = entries(ptx)
    if len(names) != 1:
        raise UsageError(f"{where}.kernel: launches {len(names)} kernels; write a function and a launch for each")
    return names[0]


def _kernel_arguments(where: str, ptx: str, given: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Return the kernel's arguments; tensors are structs with a pointer. Raises UsageError for other parameters."""
    parameters = []
    for text in parse_parameters(ptx):
        kind = _PARAMETER.search(text)
        size = _BYTES_OF.get(kind[1], 0) * int(kind[2] or 1) if kind else 0
        parameters.append((size, bool(kind and kind[2])))
    sizes = [8 if isinstance(a, str) else a.dtype.itemsize for a in given if isinstance(a, (str, np.generic))]
    parameter_sizes = [size for size, _ in parameters]
    if sizes != parameter_sizes:
        raise UsageError(
            f"{where}: its kernel has parameters of {parameter_sizes} bytes, and the launch gives {sizes}: it must "
            "hand on pointers, scalars and tensors of static layout in its order; tensors of dynamic layout and TMA "
            "descriptors are not supported"
        )
    pairs = zip(given, parameters, strict=True)
    return tuple(Struct((a,)) if is_struct and isinstance(a, str) else a for a, (_, is_struct) in pairs)
