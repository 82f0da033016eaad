"""Compilation of Triton functions to PTX without a GPU.

The compiler specialises as Triton's JIT does at a launch: for pointers and integers that are multiples of 16, and for
integers equal to 1. Only PTX leaves this process. The judge assembles the same PTX that the emulator runs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from greenfast.device.compiler import entries
from greenfast.judge.solution.cuda_program import build_workspaces, evaluate_constants, evaluate_launch
from greenfast.judge.solution.expressions import evaluate_whole
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
from greenfast.spec.kernel import Argument, Launch, Program, Step, Workspace

#: NumPy's and ml_dtypes' names of elements, and Triton's.
_TYPES = {
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"bool": "i1", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"},
    **{"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"},
}
_BYTES = {"i1": 1, "fp8e4nv": 1, "fp8e5": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
_BYTES |= {f"{sign}{bits}": bits // 8 for sign in "iu" for bits in (8, 16, 32, 64)}
#: The type of a workspace's elements. With bytes, a float would silently be stored as an integer below 256.
_UNTYPED = "bytes of no type"
_DIVISIBLE = [["tt.divisibility", 16]]


def program(
    solution: ResolvedSolution, fmt: str, dims: Mapping[str, int], target: Target, buffers: Mapping[str, Buffer]
) -> Program:
    """Compile the program of a Triton solution for a shape. This runs the solution's file.

    buffers: the buffers of the problem's case by name.
    Raises UsageError with the file, the key and the allowed values, and CompileError with Triton's message.
    """
    require_extra(solution.config.name, "triton")
    names = evaluate_constants(solution, dims)
    spaces = build_workspaces(solution, names)
    dtypes = {name: buffer.dtype for name, buffer in buffers.items()} | dict.fromkeys(spaces, _UNTYPED)
    with _ready(target):
        module = import_solution_module(solution.folder, solution.config.file)
        steps = []
        for number in range(len(solution.config.launches)):
            call = _call(solution, number, module, names, dtypes)
            steps.append(_step(solution, number, call, target, spaces))
    return Program(tuple(steps), spaces)


@dataclass(frozen=True)
class _Call:
    """The compiler's input for a launch: types and constants by parameter, and the remaining arguments."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    arguments: tuple[Argument, ...]
    grid: tuple[int, int, int]
    options: dict[str, Any]


def _call(
    solution: ResolvedSolution, number: int, module: Any, names: Mapping[str, int], buffers: Mapping[str, str]
) -> _Call:
    """Return the compiler's input for a launch. Raises UsageError as ``program`` does."""
    spec = solution.config.launches[number]
    where = f"{solution.path}: launches[{number}]"
    function, heuristics = _function(f"{where}.kernel", module, spec.kernel, solution)
    launch = evaluate_launch(solution, number, names)
    given = launch.args
    runtime = [p.name for p in function.params if not p.is_constexpr]
    if len(given) != len(runtime):
        raise UsageError(
            f"{where}.args: {len(given)} given, and {spec.kernel} takes {len(runtime)} that are no tl.constexpr: "
            f"{', '.join(runtime)}"
        )
    by_name = dict(zip(runtime, given, strict=True))
    signature: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    divisible: list[str] = []
    for parameter in function.params:
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            fixed[name] = _constant(f"{where}.kernel", parameter, names, heuristics, by_name)
            continue
        argument = by_name[name]
        signature[name] = _find_type(f"{where}.args", parameter, argument, buffers)
        if isinstance(argument, str):
            if not parameter.do_not_specialize_on_alignment:
                divisible.append(name)
        elif argument.dtype.kind in "iu" and not parameter.do_not_specialize:
            if argument == 1:
                signature[name], fixed[name] = "constexpr", 1
            elif argument % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                divisible.append(name)
    options = {"num_warps": _option(where, "num_warps", spec.num_warps, names)}
    options["num_stages"] = _option(where, "num_stages", spec.num_stages, names)
    if options["num_warps"] not in (1, 2, 4, 8, 16, 32):
        raise UsageError(f"{where}.num_warps: {options['num_warps']} is no power of two up to 32")
    if spec.early:
        options["launch_pdl"] = True
    left = tuple(value for name, value in by_name.items() if signature[name] != "constexpr")
    return _Call(function, signature, fixed, tuple(divisible), left, launch.grid, options)


def _function(
    key: str, module: Any, name: str, solution: ResolvedSolution
) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Return the @triton.jit function with this name, and its heuristics by constant.

    Raises UsageError if there is none, or if it is autotuned and the solution does not set all its constants.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    function = getattr(module, name, None)
    heuristics: dict[str, Callable[..., Any]] = {}
    while isinstance(function, (Autotuner, Heuristics)):
        if isinstance(function, Heuristics):
            heuristics |= function.values
        elif open_ := sorted({k for c in function.configs for k in c.kwargs} - solution.config.constants.keys()):
            configs = "; ".join(str(config) for config in function.configs[:4])
            raise UsageError(
                f"{key}: {name} is autotuned, and nothing is timed here: choose a configuration, its "
                f"{', '.join(open_)} under constants, num_warps and num_stages in the launch (there are: {configs})"
            )
        function = function.fn
    if not isinstance(function, JITFunction):
        jitted = sorted(n for n, f in vars(module).items() if isinstance(f, (JITFunction, Autotuner, Heuristics)))
        raise UsageError(f"{key}: no @triton.jit function {name!r} in {solution.file.name}; it has {', '.join(jitted)}")
    return function, heuristics


def _constant(
    key: str,
    parameter: Any,
    names: Mapping[str, int],
    heuristics: Mapping[str, Callable[..., Any]],
    arguments_by_name: Mapping[str, Argument],
) -> Any:
    """Return the value of a tl.constexpr: a constant of the solution, a dimension, a heuristic's value, or default."""
    name = parameter.name
    if name in names:
        return names[name]
    if name in heuristics:
        try:
            plain = {n: a.item() if isinstance(a, np.generic) else a for n, a in arguments_by_name.items()}
            return heuristics[name]({**names, **plain})
        except Exception as e:  # The heuristic is code of the solution.
            raise UsageError(f"{key}: the heuristic of {name} fails ({e}); give it under constants") from None
    if parameter.has_default:
        return parameter.default
    raise UsageError(f"{key}: {name} is a tl.constexpr without a value; give it under constants")


def _find_type(key: str, parameter: Any, argument: Argument, buffers: Mapping[str, str]) -> str:
    """Return Triton's name of a parameter's type: its annotation, else the type of the buffer or scalar."""
    name, annotated = parameter.name, parameter.annotation_type
    if isinstance(argument, str):
        if argument not in buffers:
            raise UsageError(f"{key}: no buffer {argument!r}; the problem and the workspaces have {', '.join(buffers)}")
        own = _TYPES.get(buffers[argument])
        if annotated.startswith("*"):  # Such as "*bf16" for a buffer of uint16.
            return str(annotated)
        if own is None:
            raise UsageError(f'{key}: {argument} holds {buffers[argument]}; annotate {name}, such as {name}: "*fp32"')
        return f"*{own}"
    if not isinstance(argument, np.generic):
        raise UsageError(f"{key}: {name}: structs and tensor maps are not passed to Triton; make descriptors inside")
    own = _TYPES[argument.dtype.name]
    if annotated and _BYTES.get(annotated) != _BYTES[own]:
        raise UsageError(f"{key}: {name} is annotated as {annotated}, and the launch gives {argument.dtype}")
    return annotated or own


def _option(where: str, key: str, text: int | str, names: Mapping[str, int]) -> int:
    try:
        value = evaluate_whole(text, names)
    except UsageError as e:
        raise UsageError(f"{where}.{key}: {e}") from None
    if value < 1:
        raise UsageError(f"{where}.{key}: {value} is not at least 1")
    return value


def _step(solution: ResolvedSolution, number: int, call: _Call, target: Target, spaces: dict[str, Workspace]) -> Step:
    """Compile a launch. Add the scratch memory of its code to the workspaces."""
    compiled = _compile(f"{solution.path}: launches[{number}]", call, target)
    about, ptx = compiled.metadata, without_folders(compiled.asm["ptx"])
    (entry,) = entries(ptx)
    # Pointers to scratch memory follow the function's parameters. They are null if it needs none.
    extra: list[Argument] = [np.uint64(0)] * (len(parse_parameters(ptx)) - len(call.arguments))
    if about.global_scratch_size:
        name = f"scratch_{number}"
        x, y, z = call.grid
        spaces[name] = Workspace(about.global_scratch_size * about.num_ctas * x * y * z)
        extra[0] = name
    kernel = build_ptx_kernel(solution.file.name, entry, ptx, (32 * about.num_warps, 1, 1), about.shared)
    launch = Launch(call.grid, (*call.arguments, *extra), bool(about.launch_pdl))
    return Step(kernel, launch)


def _compile(where: str, call: _Call, target: Target) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    positions = {name: (n,) for n, name in enumerate(call.signature)}
    source = ASTSource(
        call.function,
        call.signature,
        {positions[name]: value for name, value in call.constants.items()},
        {positions[name]: _DIVISIBLE for name in call.divisible},
    )
    major, minor = target.capability
    try:
        return compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=call.options)
    except Exception as e:  # The exceptions of MLIR, ptxas and Triton have no common base.
        raise CompileError(f"{where}: Triton does not compile {call.function.__name__}: {e}") from None


class _NoDevice:
    """A replacement of Triton's driver without a GPU. It answers for the target, for code at a file's top level."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._target.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> str:
        return "cpu"

    def get_current_device(self) -> int:
        return 0


@contextmanager
def own_cache() -> Iterator[None]:
    """Use a new cache of Triton's, because a shared one could hold files of others, and no warnings of its settings.

    Do nothing without Triton.
    """
    try:
        import triton
    except ImportError:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        triton.knobs.cache.dir = folder
        yield


@contextmanager
def _ready(target: Target) -> Iterator[None]:
    """Set up Triton without a driver and with a new cache."""
    import triton

    with own_cache():
        triton.runtime.driver.set_active(_NoDevice(target))
        yield
