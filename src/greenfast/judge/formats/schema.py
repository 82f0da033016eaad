"""The data of foreign formats: FlashInfer-Trace with its extension SOL-ExecBench, and robust-kbench's settings.

Sources: flashinfer-bench, docs/flashinfer-trace (definition, workload, solution, trace); SOL-ExecBench, docs (the same
pages). Keys without influence on the judgement (descriptions, tags) are ignored.
"""

from __future__ import annotations

import ast
import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from greenfast.judge.solution.expressions import evaluate, evaluate_whole
from greenfast.judge.store import decode
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

#: The files of a converted problem's folder.
DEFINITION, WORKLOADS = "definition.json", "workloads.jsonl"
#: The folder of a converted problem's baseline.
REFERENCE = "reference"
#: The dimension that numbers the settings of a problem with a model, from 1.
SETTING = "problem"
#: The seed of both models' parameters.
SEED = 42
_NAME = re.compile(r"[^A-Za-z0-9_.+-]+")
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
    language: str = ""
    languages: list[str] = []
    destination_passing_style: bool = True
    binding: str | None = None
    compile_options: dict[str, Any] | None = None


class ForeignSolution(msgspec.Struct, frozen=True):
    """A solution of a definition."""

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: Annotated[list[SourceFile], Meta(min_length=1)]
    description: str | None = None


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


@dataclass(frozen=True)
class RobustSetting:
    """The keyword arguments of Model and of get_inputs."""

    init: dict[str, Any]
    inputs: dict[str, Any]


def read_settings(path: Path) -> tuple[list[RobustSetting], int]:
    """Return the settings of a problem of robust-kbench, and how many of them are "single": its own default.

    Raises UsageError for a file of another form.
    """
    try:
        given = json.loads(read_file(path))
        both = [
            [
                RobustSetting({**init, **shared}, {**inputs, **shared})
                for init in given[f"{kind}_init_configs"]
                for inputs in given[f"{kind}_input_configs"]
                for shared in given[f"{kind}_shared_configs"]
            ]
            for kind in ("single", "multi")
            if f"{kind}_init_configs" in given
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UsageError(
            f"{path}: cannot be read ({type(e).__name__}: {e}); it has single_init_configs, single_input_configs and "
            "single_shared_configs, and the same with multi"
        ) from None
    settings = [setting for several in both for setting in several]
    if not settings:
        raise UsageError(f"{path}: has no setting; single_init_configs, ..._input_configs and ..._shared_configs do")
    return settings, len(both[0])


def safe_name(text: str) -> str:
    """Convert a text to a valid name of a task or solution."""
    return _NAME.sub("_", text)[:200].strip("_.+-") or "unnamed"


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
