"""The family of a solution in CUDA, PTX or as a cubin: its programs for a shape's dimensions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from greenfast.judge.solution.expressions import evaluate, evaluate_whole
from greenfast.judge.solution.schema import (
    Expression,
    LaunchSpec,
    ResolvedSolution,
    TensorMapSpec,
    read_bytes,
    read_text,
)
from greenfast.spec.errors import UsageError, unknown
from greenfast.spec.kernel import Argument, KernelSource, Launch, Program, Step, Struct, TensorMap, Workspace
from greenfast.spec.limits import MOST_BLOCK, MOST_GRID, MOST_THREADS

SCALARS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "float16", "float32", "float64"),
)
_SCALAR = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_MAX_CLUSTER = (16, 16, 16)
_MAX_SHARED = 1 << 20
_MAX_WORKSPACE = 1 << 37


class DeclaredFamily:
    """A solution in CUDA, PTX or as a cubin. None of its code runs on the host."""

    def __init__(self, solution: ResolvedSolution) -> None:
        self._solution = solution
        #: The protections against the solution's code.
        self.sandbox: list[str] = ["no code of the solution but its kernels is run"]

    def program(
        self, toggles: Mapping[str, int], fmt: str, dims: Mapping[str, int], *, instrumented: bool = False
    ) -> Program:
        """Return the program for a shape. Raises UsageError with the file, the key and the reason."""
        solution = self._solution
        if instrumented:
            raise UsageError(f"{solution.config.name}: a solution has no instrumented build")
        names = evaluate_constants(solution, dims)
        steps = tuple(_step(solution, number, spec, names) for number, spec in enumerate(solution.config.launches))
        return Program(steps, build_workspaces(solution, names))


def evaluate_constants(solution: ResolvedSolution, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the dimensions and the values of the solution's constants. Raises UsageError as above."""
    names = dict(dims)
    for name, text in solution.config.constants.items():
        if name in dims:
            raise UsageError(
                f"{solution.path}: constants.{name}: a dimension of the shape has this name; choose another"
            )
        names[name] = _whole(solution, f"constants.{name}", text, names)
    return names


def build_workspaces(solution: ResolvedSolution, names: Mapping[str, int]) -> dict[str, Workspace]:
    """Build the solution's scratch buffers for these dimensions and constants. Raises UsageError as above."""
    spaces = {}
    for name, spec in solution.config.workspaces.items():
        key = f"workspaces.{name}.bytes"
        nbytes = _whole(solution, key, spec.bytes, names)
        if not 0 < nbytes <= _MAX_WORKSPACE:
            raise UsageError(f"{solution.path}: {key}: {nbytes}; from 1 byte to {_MAX_WORKSPACE >> 30} GiB are allowed")
        spaces[name] = Workspace(nbytes, spec.zeros)
    return spaces


@dataclass(frozen=True)
class EvaluatedLaunch:
    """A launch of a solution for a shape. block is (1, 1, 1) if the solution does not give it, as for Triton."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    args: tuple[Argument, ...]


def evaluate_launch(solution: ResolvedSolution, number: int, names: Mapping[str, int]) -> EvaluatedLaunch:
    """Evaluate the launch with this number. Raises UsageError with the file, the key and the allowed values."""
    spec, where = solution.config.launches[number], f"launches[{number}]"
    block = _evaluate_extents(solution, f"{where}.block", spec.block or (), names, MOST_BLOCK)
    if (threads := math.prod(block)) > MOST_THREADS:
        raise UsageError(f"{solution.path}: {where}.block: {threads} threads; a block has at most {MOST_THREADS}")
    shared = _whole(solution, f"{where}.shared", spec.shared, names)
    if not 0 <= shared <= _MAX_SHARED:
        raise UsageError(f"{solution.path}: {where}.shared: {shared} bytes; from 0 to {_MAX_SHARED} are allowed")
    cluster = _evaluate_extents(solution, f"{where}.cluster", spec.cluster, names, _MAX_CLUSTER)
    grid = _evaluate_extents(solution, f"{where}.grid", spec.grid, names, MOST_GRID)
    args: list[Argument] = []
    for n, given in enumerate(spec.args):
        key = f"{where}.args[{n}]"
        if isinstance(given, TensorMapSpec):
            args.append(_tensor_map(solution, key, given, names))
        elif isinstance(given, str):
            args.append(_argument(solution, key, given, names))
        else:
            args.append(Struct(tuple(_argument(solution, key, field, names) for field in given)))
    return EvaluatedLaunch(grid, block, cluster, shared, tuple(args))


def _evaluate_extents(
    solution: ResolvedSolution,
    key: str,
    expressions: Sequence[Expression],
    names: Mapping[str, int],
    limits: Sequence[int],
) -> tuple[int, int, int]:
    """Evaluate up to three extents; missing ones are 1. Raises UsageError for a value below 1 or above ``limits``."""
    values = [_whole(solution, f"{key}[{n}]", text, names) for n, text in enumerate(expressions)]
    x, y, z = (*values, 1, 1, 1)[:3]
    for n, (value, limit) in enumerate(zip((x, y, z), limits, strict=True)):
        if not 1 <= value <= limit:
            raise UsageError(f"{solution.path}: {key}[{n}]: {value}; from 1 to {limit} is allowed")
    return x, y, z


def _step(solution: ResolvedSolution, number: int, spec: LaunchSpec, names: Mapping[str, int]) -> Step:
    config, launch = solution.config, evaluate_launch(solution, number, names)
    kernel = KernelSource(
        entry=spec.kernel,
        source="" if config.language == "cubin" else _source(solution, names),
        name=solution.file.name,
        include_dirs=(solution.file.parent, *([solution.folder] if solution.file.parent != solution.folder else [])),
        block=launch.block,
        dynamic_smem_bytes=launch.shared,
        requires=config.target,
        language=config.language,  # type: ignore[arg-type]  # one of DECLARED
        binary=read_bytes(solution.file) if config.language == "cubin" else b"",
    )
    return Step(kernel, Launch(launch.grid, launch.args, spec.early, launch.cluster, spec.cooperative))


def _source(solution: ResolvedSolution, names: Mapping[str, int]) -> str:
    """Return the source's text. CUDA gets its constants as macros in front; line numbers are unchanged."""
    text = read_text(solution.file)
    if not solution.config.constants:
        return text
    macros = "".join(f"#define {name} {names[name]}\n" for name in solution.config.constants)
    return f"{macros}#line 1\n{text}" if solution.config.language == "cuda" else text


def _whole(solution: ResolvedSolution, key: str, text: Expression, names: Mapping[str, int]) -> int:
    try:
        return evaluate_whole(text, names)
    except UsageError as e:
        raise UsageError(f"{solution.path}: {key}: {e}") from None


def _argument(solution: ResolvedSolution, key: str, text: str, names: Mapping[str, int]) -> str | np.generic:
    if _IDENTIFIER.fullmatch(text):
        return text
    try:
        return parse_scalar(text, names)
    except UsageError as e:
        raise UsageError(f"{solution.path}: {key}: {e}") from None


def parse_scalar(text: str, names: Mapping[str, int]) -> np.generic:
    """Parse a typed scalar such as "int32(R)". Raises UsageError if its value does not fit the type."""
    typed = _SCALAR.fullmatch(text.strip())
    if typed is None:
        raise UsageError(f"{text!r} is neither a buffer's name nor a typed scalar such as int32(R)")
    if typed[1] not in SCALARS:
        raise unknown("type", typed[1], SCALARS)
    dtype = np.dtype(typed[1])
    value = evaluate(typed[2], names)
    if dtype.kind in "iub":
        value = evaluate_whole(typed[2], names)
        least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if not least <= value <= most:
            raise UsageError(f"{text} is {value}: out of range for {dtype} ({least} to {most})")
    with np.errstate(over="ignore"):
        made: np.generic = dtype.type(value)
    if np.isinf(made) and not math.isinf(value):
        raise UsageError(f"{text} is {value:g}: out of range for {dtype}")
    return made


def _tensor_map(solution: ResolvedSolution, key: str, spec: TensorMapSpec, names: Mapping[str, int]) -> TensorMap:
    def evaluate_all(part: str, given: Sequence[Expression]) -> tuple[int, ...]:
        return tuple(_whole(solution, f"{key}.{part}[{n}]", text, names) for n, text in enumerate(given))

    shape, strides, box = (evaluate_all(part, getattr(spec, part)) for part in ("shape", "strides", "box"))
    try:
        return TensorMap(spec.buffer, spec.dtype, shape, strides, box, spec.swizzle)
    except UsageError as e:
        raise UsageError(f"{solution.path}: {key}: {e}") from None
