"""FlashInfer-Trace with its extension SOL-ExecBench: definitions, workloads and solutions, and their conversion.

Sources: flashinfer-bench, docs/flashinfer-trace (definition, workload, solution, trace); SOL-ExecBench, docs (the same
pages). Keys without influence on the judgement (descriptions, tags) are ignored.
"""

from __future__ import annotations

import ast
import codecs
import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from greenfast.judge.formats.converted import (
    DEFINITION,
    REFERENCE,
    WORKLOADS,
    Files,
    callable_config,
    render_problem_module,
    safe_name,
    task_config,
    write_problem,
)
from greenfast.judge.solution.expressions import evaluate, evaluate_whole
from greenfast.judge.store import decode
from greenfast.judge.task import CONFIG_NAME
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

_EXTENSION = '''"""Builds the solution's sources as a PyTorch extension, with nvcc, when it is imported."""

from pathlib import Path

from torch.utils.cpp_extension import load

_folder = Path(__file__).parent
_sources = [str(_folder / name) for name in {sources!r}]
_built = load(name="solution", sources=_sources, extra_include_paths=[str(_folder)])
{function} = _built.{function}
'''

#: The dimension that distinguishes workloads with equal axes: the workload's number, from 1.
WORKLOAD = "workload"
#: The supported dtypes, with the names of NumPy and ml_dtypes. 4-bit formats have no array type.
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "bool"),
)
#: The size of an axis. Larger arrays could not be allocated.
Size = Annotated[int, Meta(ge=1, le=2**40)]
_T = TypeVar("_T")


class ConstAxis(msgspec.Struct, frozen=True, tag_field="type", tag="const"):
    """A dimension that the definition fixes."""

    value: Size


class VarAxis(msgspec.Struct, frozen=True, tag_field="type", tag="var"):
    """A dimension that each workload gives."""


class ExprAxis(msgspec.Struct, frozen=True, tag_field="type", tag="expr"):
    """A dimension that follows from others (SOL-ExecBench)."""

    expression: str


class Tensor(msgspec.Struct, frozen=True):
    """An input or output; shape: names of axes, None for a Python scalar."""

    dtype: str
    shape: list[str] | None


class Definition(msgspec.Struct, frozen=True):
    """A problem. reference: Python source with a function ``run``."""

    name: str
    axes: dict[str, ConstAxis | VarAxis | ExprAxis]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    reference: str
    description: str | None = None
    constraints: list[str] = []
    op_type: str | None = None
    custom_inputs_entrypoint: str | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def is_sol(self) -> bool:
        """True for a definition of SOL-ExecBench. Its tolerances are added and allow 1 % of outliers.

        Such a definition may lack op_type (FlashInfer-Trace requires it) and may have a function for inputs.
        """
        return self.custom_inputs_entrypoint is not msgspec.UNSET or self.op_type is None

    def sizes(self, axes: dict[str, int]) -> dict[str, int]:
        """Return the sizes of all axes of a workload. Raises UsageError for a missing axis or a violated constraint."""
        sizes: dict[str, int] = {}
        for name, axis in self.axes.items():
            if isinstance(axis, ConstAxis):
                sizes[name] = axis.value
            elif isinstance(axis, ExprAxis):
                sizes[name] = evaluate_whole(axis.expression, {**sizes, **axes})
            elif name in axes:
                sizes[name] = axes[name]
            else:
                raise UsageError(f"{self.name}: a workload has no value for axis {name}")
        for constraint in self.constraints:
            try:
                held = evaluate(constraint, sizes)
            except UsageError:
                continue  # A constraint on the content of inputs: the reference itself checks it.
            if not held:
                raise UsageError(f"{self.name}: {sizes} does not meet the constraint {constraint!r}")
        return sizes


class RandomInput(msgspec.Struct, frozen=True, tag_field="type", tag="random"):
    """A random input. The distribution depends on the dtype."""


class ScalarInput(msgspec.Struct, frozen=True, tag_field="type", tag="scalar"):
    """A Python number."""

    value: bool | int | float


class FileInput(msgspec.Struct, frozen=True, tag_field="type", tag="safetensors"):
    """A tensor of a file; path: relative to the data set's root."""

    path: str
    tensor_key: str


class CustomInput(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """An input from the definition's ``custom_inputs_entrypoint``."""


class Allowed(msgspec.Struct, frozen=True):
    """The tolerance of a workload (SOL-ExecBench); its defaults are theirs."""

    max_atol: Annotated[float, Meta(ge=0)] = 1e-2
    max_rtol: Annotated[float, Meta(ge=0)] = 1e-2
    required_matched_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.99
    max_error_cap: float | None = None
    allow_negative_inf: bool = False


class Workload(msgspec.Struct, frozen=True):
    """A definition's variable axes and inputs."""

    uuid: str
    axes: dict[str, Size]
    inputs: dict[str, RandomInput | ScalarInput | FileInput | CustomInput]
    tolerance: Allowed | None = None


def evaluate_dims(definition: Definition, workloads: Sequence[Workload], number: int) -> dict[str, int]:
    """Return the dimensions of the workload with this number (from 1): the axes and the number."""
    return {**definition.sizes(workloads[number - 1].axes), WORKLOAD: number}


class SourceFile(msgspec.Struct, frozen=True):
    """A file of a solution."""

    path: str
    content: str


class BuildSpec(msgspec.Struct, frozen=True):
    """How a solution is built and called."""

    entry_point: str
    destination_passing_style: bool = True
    binding: str | None = None


class ForeignSolution(msgspec.Struct, frozen=True):
    """A solution of a definition."""

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: Annotated[list[SourceFile], Meta(min_length=1)]


class _TracedWorkload(msgspec.Struct, frozen=True):
    """A workload in a trace without a solution, as FlashInfer-Trace stores workloads."""

    workload: Workload


def read_definition(path: Path) -> Definition:
    """Read and check a definition. Raises UsageError naming the file and the key."""
    definition = _decoded(path, _text(path), Definition)
    for name, tensor in {**definition.inputs, **definition.outputs}.items():
        if tensor.dtype not in DTYPES:
            raise UsageError(f"{path}: {name}: dtype {tensor.dtype} is not judged; {', '.join(DTYPES)} are")
        for axis in tensor.shape or ():
            if axis not in definition.axes:
                raise UsageError(f"{path}: {name}: shape names axis {axis}, but it is not defined")
    try:
        functions = {s.name for s in ast.parse(definition.reference).body if isinstance(s, ast.FunctionDef)}
    except (SyntaxError, ValueError, MemoryError, RecursionError) as e:
        line = f"line {e.lineno}: " if isinstance(e, SyntaxError) and e.lineno else ""
        raise UsageError(f"{path}: reference: {line}{getattr(e, 'msg', e)}") from None
    if "run" not in functions:
        raise UsageError(f"{path}: reference: has no function run at the top level")
    return definition


def read_workloads(path: Path) -> list[Workload]:
    """Read the workloads of a JSONL file, plain or wrapped in traces. Raises UsageError with the line."""
    workloads = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            where = Path(f"{path}, line {number}")
            wrapped = b'"workload"' in line and "workload" in _decoded(where, line, dict)
            workloads.append(
                _decoded(where, line, _TracedWorkload).workload if wrapped else _decoded(where, line, Workload)
            )
    if not workloads:
        raise UsageError(f"{path}: holds no workload")
    return workloads


def read_foreign_solution(path: Path) -> ForeignSolution:
    """Read a solution. Raises UsageError naming the file and the key."""
    solution = _decoded(path, _text(path), ForeignSolution)
    names = [source.path for source in solution.sources]
    if solution.spec.entry_point.partition("::")[0] not in names:
        raise UsageError(f"{path}: spec.entry_point: {solution.spec.entry_point} names no file of sources")
    for name in names:
        if not name.strip("./") or "\0" in name:
            raise UsageError(f"{path}: sources: {name!r} is no path")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UsageError(f"{path}: sources: {name} is outside of the solution")
    return solution


def _text(path: Path) -> bytes:
    try:
        return read_file(path).removeprefix(codecs.BOM_UTF8)
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror})") from None


def _decoded(path: Path, text: bytes, kind: type[_T]) -> _T:
    try:
        return cast(_T, decode(text, kind))
    except msgspec.DecodeError as e:
        raise UsageError(f"{path}: {e}") from None


def is_definition(path: Path) -> bool:
    """Return True if a file is a definition of FlashInfer-Trace or SOL-ExecBench."""
    return _has(path, ("axes", "inputs", "outputs", "reference"))


def is_foreign_solution(path: Path) -> bool:
    """Return True if a file is a solution of FlashInfer-Trace or SOL-ExecBench."""
    return _has(path, ("definition", "spec", "sources"))


def find_workloads(definition: Path) -> tuple[Path, Path]:
    """Find a definition's workloads next to it or in the data set's folder of workloads.

    Return their file, and the root of the data set that they are in. Raises UsageError with the searched path.
    """
    name = re.sub(r"[/\0]", "_", read_definition(definition).name)[:200]
    places = [definition.with_name("workload.jsonl"), definition.with_name(f"{name}.jsonl")]
    for root in definition.resolve().parents:
        if (root / "workloads").is_dir():
            places += sorted((root / "workloads").rglob(f"{glob.escape(name)}.jsonl"))
            for place in places:
                if place.is_file():
                    return place, root
            break
    for place in places:
        if place.is_file():
            return place, place.parent
    raise UsageError(f"{definition}: no workloads: {places[0]} is not there; --workloads FILE names them")


def import_problem(path: Path, parent: Path, workloads_file: Path | None = None) -> Path | None:
    """Write the task folder of a definition below ``parent`` and return it; None for a file of another format.

    The baseline is the definition's reference. workloads_file: replaces the workloads that belong to the definition.
    Raises UsageError for a definition or workloads that cannot be judged.
    """
    if not is_definition(path):
        return None
    workloads_file, root = (workloads_file, workloads_file.parent) if workloads_file else find_workloads(path)
    definition, workloads = read_definition(path), read_workloads(workloads_file)
    name = safe_name(definition.name)
    about = f"{name}: read from {safe_name(path.name)}, by its own reference"
    paths = f"Path(__file__).parent, Path({str(root.resolve())!r})"
    return write_problem(
        parent / name,
        {
            DEFINITION: path.read_bytes(),
            WORKLOADS: workloads_file.read_bytes(),
            "problem.py": render_problem_module(about, "defined", "DefinedProblem", paths),
            CONFIG_NAME: task_config(definition.name, definition.description or "", _shapes(definition, workloads)),
        },
        reference={
            "reference.py": definition.reference + "\n",
            "solution.json": _solution(REFERENCE, "reference.py", "run", definition, workloads, writes=False),
        },
    )


def import_solution(path: Path, problem: Path) -> tuple[str, Files] | None:
    """Convert a solution of a definition. Return its name and files; None for a file of another format.

    problem: the folder of the converted definition. Raises UsageError if it is another task's or another definition's,
    and for a solution in a language that is not judged.
    """
    if not is_foreign_solution(path):
        return None
    if not (problem / DEFINITION).is_file():
        raise UsageError(f"{path}: solves a definition of FlashInfer-Trace; --problem names that definition's file")
    definition, workloads = read_definition(problem / DEFINITION), read_workloads(problem / WORKLOADS)
    given = read_foreign_solution(path)
    if given.definition != definition.name:
        raise UsageError(
            f"{path}: solves {given.definition}, the problem is {definition.name}; --problem takes the file of its "
            "definition, or correct its key definition"
        )
    file, _, function = given.spec.entry_point.partition("::")
    files: Files = {source.path: source.content for source in given.sources}
    if Path(file).suffix != ".py":
        file = "greenfast_extension.py"
        files[file] = _extension(path, given, function)
    name = safe_name(given.name)
    writes = given.spec.destination_passing_style
    files["solution.json"] = _solution(name, file, function, definition, workloads, writes, given.author)
    return name, files


def _extension(path: Path, given: ForeignSolution, function: str) -> str:
    if given.spec.binding != "torch":
        raise UsageError(
            f"{path}: spec.binding: {given.spec.binding or 'tvm-ffi (the default)'}; extensions with binding torch are "
            "judged"
        )
    sources = [s.path for s in given.sources if Path(s.path).suffix in (".cu", ".cpp", ".cc", ".cxx")]
    return _EXTENSION.format(sources=sources, function=function)


def _shapes(definition: Definition, workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    shapes: list[dict[str, Any]] = []
    for number, workload in enumerate(workloads, 1):
        axes = "_".join(f"{axis}{value}" for axis, value in workload.axes.items())
        name = safe_name(f"{axes}_{workload.uuid[:8]}" if axes else workload.uuid[:8])
        if any(shape["name"] == name for shape in shapes):  # such as of workload-1 and workload-2
            name = f"{name}_{number}"
        shapes.append(
            {"name": name, "dims": evaluate_dims(definition, workloads, number), "purpose": f"workload {workload.uuid}"}
        )
    return shapes


def _solution(
    name: str,
    file: str,
    function: str,
    definition: Definition,
    workloads: Sequence[Workload],
    writes: bool,
    author: str = "",
) -> str:
    """Return the solution.json of a callable. Raises UsageError if workloads have different values of a scalar."""
    args = []
    for key, tensor in definition.inputs.items():
        if tensor.shape is not None:
            args.append(key)
            continue
        values = {w.inputs[key].value for w in workloads if isinstance(w.inputs.get(key), ScalarInput)}  # type: ignore[union-attr]
        if len(values) != 1:
            raise UsageError(f"{definition.name}: the scalar {key} has {len(values)} values; judge one at a time")
        (value,) = values
        kind = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float64"
        args.append(f"{kind}({int(value) if isinstance(value, bool) else value!r})")
    args += list(definition.outputs) if writes else []
    launch = {"kernel": function, "args": args}
    return callable_config(name, file, author, launch)


def _has(path: Path, keys: Sequence[str]) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and all(key in data for key in keys)
