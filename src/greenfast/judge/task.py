"""Tasks: the schema of a ``config_forward.json``, discovery, and import of a task's kernel family and problem.

msgspec checks every key, type and bound against the types below when a file is read.
``greenfast list --schema`` prints them as JSON Schema.
"""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, cast, get_args

import msgspec
from msgspec import Meta

from greenfast.judge.record_schema import Limits
from greenfast.judge.solution.client import RemoteFamily
from greenfast.judge.solution.schema import SolutionConfig
from greenfast.judge.store import decode
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UsageError, unknown
from greenfast.spec.files import read_file
from greenfast.spec.kernel import Choice, Family, Program
from greenfast.spec.problem import Problem


@dataclass(frozen=True)
class Variant:
    """A named, complete setting of toggles; equal settings under two names differ only in ``name``."""

    name: str
    toggles: tuple[tuple[str, int], ...]

    @property
    def values(self) -> dict[str, int]:
        """Toggle name -> value."""
        return dict(self.toggles)


CONFIG_NAME = "config_forward.json"

# In Python, $ also matches before a newline. The pattern avoids \Z, because other languages read the printed schema.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$(?!\n)")]
Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Tolerance = Annotated[float, Meta(ge=0)]
Percent = Annotated[float, Meta(ge=0, le=100)]
Counter = Literal[
    "cp_async", "hmma", "imma", "qmma", "hgmma", "qgmma", "igmma", "mufu_ex2", "local_memory", "ldsm", "bar_sync"
]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Shape(_Strict, frozen=True, kw_only=True):
    """A named problem size. The task chooses the dimensions, such as B, H, S, D for attention.

    aliases: other names in options and older records. Reports show ``name``.
    """

    name: Name
    aliases: list[Name] = []
    dims: dict[str, Positive]
    purpose: str = ""


class Budget(_Strict, frozen=True, kw_only=True):
    """Upper limits per kernel: registers per thread, shared memory (static + dynamic) per block, spills and stack.

    device_state_bytes: size of the state that outlives a launch and could hold results for the next one: variables
    (``__device__``, managed, ``__constant__``, in inline PTX) and the device heap.
    """

    registers: Positive
    smem_bytes: NonNegative
    spill_bytes: NonNegative = 0
    stack_bytes: NonNegative = 0
    device_state_bytes: NonNegative = 0


class BudgetWhere(Budget, frozen=True, kw_only=True):
    """A budget for shapes with the dimensions in ``when``, such as {"D": 128}."""

    when: Annotated[dict[str, Positive], Meta(min_length=1)]


class Promises(_Strict, frozen=True, kw_only=True):
    """Requirements on a rung's machine code, by instruction counter."""

    at_least: dict[Counter, NonNegative] = {}
    at_most: dict[Counter, NonNegative] = {}
    more_than_predecessor: list[Counter] = []


class KernelErrorGate(_Strict, frozen=True, kw_only=True):
    """Limits on the error against exact arithmetic on the same dequantized inputs.

    relative_error: Frobenius norm of the error over the norm of the exact result.
    bound_factor: limit on the error of an element, as a multiple of the bound that the problem derives from roundings.
    rounding: name of this bound; empty for the default bound.
    """

    relative_error: Tolerance
    bound_factor: Tolerance = 1.0
    rounding: str = ""


class Rung(_Strict, frozen=True, kw_only=True):
    """One step of the ladder: a named variant with its predecessor, its gate, its budget and its promises.

    required_speedup: the predecessor's time over this rung's time that PERFORMANCE requires, such as 1.15; None for no
        requirement.
    only: the supported values of dimensions, 0 for an absent one. Dimensions without an entry are not restricted.
    kernel_error: replaces the format's gate, for a rung that rounds more.
    """

    name: Name
    title: str
    toggles: dict[str, int] = {}
    only: dict[str, Annotated[list[NonNegative], Meta(min_length=1)]] = {}
    after: str | None = None
    required_speedup: Annotated[float, Meta(ge=1)] | None = None
    budget: Budget
    budget_where: list[BudgetWhere] = []
    promises: Promises = Promises()
    kernel_error: KernelErrorGate | None = None

    def budget_for(self, dims: dict[str, int]) -> Budget:
        """Return the first budget of ``budget_where`` that matches these dimensions, else ``budget``."""
        for budget in self.budget_where:
            if budget.when.items() <= dims.items():
                return budget
        return self.budget


class Toggle(_Strict, frozen=True, kw_only=True):
    """A compile-time switch of the kernel family, read from the environment by its name."""

    default: int
    values: Annotated[list[int], Meta(min_length=1)]
    help: str = ""


class ErrorGate(_Strict, frozen=True, kw_only=True):
    """Limits on the error against the unquantized reference; an element is bad beyond ``bad_abs_err``."""

    max_abs_err: Tolerance
    mean_abs_err: Tolerance
    pct_bad: Percent
    bad_abs_err: Tolerance


class ErrorWhere(ErrorGate, frozen=True, kw_only=True):
    """An error gate for shapes with the dimensions in ``when``, such as {"CAUSAL": 1}."""

    when: Annotated[dict[str, Positive], Meta(min_length=1)]


class FormatGates(_Strict, frozen=True, kw_only=True):
    """The correctness gates of one number format."""

    error: ErrorGate
    error_where: list[ErrorWhere] = []
    kernel_error: KernelErrorGate

    def select(self, dims: dict[str, int], own: KernelErrorGate | None = None) -> CaseGates:
        """Return the gates of a case: the first one of ``error_where`` that matches its dimensions, else ``error``.

        own: replaces ``kernel_error``, for an implementation with its own gate.
        """
        error = next((gate for gate in self.error_where if gate.when.items() <= dims.items()), self.error)
        return CaseGates(error, own or self.kernel_error)


@dataclass(frozen=True)
class CaseGates:
    """The gates of a case: on the error against the unquantized reference, and on the kernel's own error."""

    error: ErrorGate
    kernel_error: KernelErrorGate

    @property
    def limits(self) -> Limits:
        """The limits in the form of a record."""
        return Limits(
            max_abs_err=self.error.max_abs_err,
            mean_abs_err=self.error.mean_abs_err,
            pct_bad=self.error.pct_bad,
            relative_error=self.kernel_error.relative_error,
            bound_factor=self.kernel_error.bound_factor,
        )


class Solutions(_Strict, frozen=True, kw_only=True):
    """The requirements for solutions.

    budget: None for the limits of the target's hardware, without state between launches.
    required_speedup: speedup over the reference; None requires a speedup above the noise.
    kernel_error: replaces the format's gate.
    """

    budget: Budget | None = None
    budget_where: list[BudgetWhere] = []
    required_speedup: Annotated[float, Meta(ge=1)] | None = None
    kernel_error: KernelErrorGate | None = None


class Timing(_Strict, frozen=True, kw_only=True):
    """The timing protocol: iterations per shape and seed, spread over fresh processes and interleaved blocks."""

    warmup_iters: Positive = 100
    timed_iters: Positive = 500
    processes: Positive = 5
    blocks: Annotated[int, Meta(ge=2)] = 20
    confidence: Annotated[float, Meta(gt=0.5, lt=1)] = 0.95
    gate_shapes: list[str] = []


class Range(_Strict, frozen=True, kw_only=True):
    """The sizes from ``min`` to ``max``."""

    min: Positive
    max: Positive


class Drawing(_Strict, frozen=True, kw_only=True):
    """The ranges of shapes that kernels must support, and the number of shapes that are drawn at run time.

    ranges: by dimension, a range of sizes or a list of values. A value that is listed twice is drawn twice as often.
        The value 0 leaves the dimension out.
    max_size: limit on the product of the dimensions that have a Range.
    max_size_emulated: the same limit if the emulator runs the kernels.
    """

    ranges: dict[str, Range | Annotated[list[NonNegative], Meta(min_length=1)]] = {}
    count: NonNegative = 4
    max_size: Positive = 4096
    max_size_emulated: Positive = 128


class Defaults(_Strict, frozen=True, kw_only=True):
    """The defaults of the options of ``greenfast judge TASK``.

    baseline: a rung; in a task without rungs, the path of a solution in the task's folder.
    candidate: a rung; empty in a task without rungs.
    """

    baseline: str
    candidate: str = ""
    shapes: Annotated[list[str], Meta(min_length=1)]
    format: str
    arch: str
    results: Name


class TaskConfig(_Strict, frozen=True, kw_only=True):
    """The content of a task's ``config_forward.json``.

    family, problem: an importable module, or a Python file next to the config (``family.py``). The family renders the
        kernels of rungs (``greenfast.spec.kernel.Family``); a task without rungs needs none. The problem makes inputs
        and references (``greenfast.spec.problem.Problem``).
    solutions: the requirements for solutions.
    left_out: parts of an imported problem that cannot be judged, each with the reason.
    """

    name: Name
    description: str
    left_out: list[str] = []
    family: str = ""
    problem: str
    shapes: Annotated[list[Shape], Meta(min_length=1)]
    seeds: Annotated[list[NonNegative], Meta(min_length=1)]
    formats: Annotated[dict[str, FormatGates], Meta(min_length=1)]
    toggles: dict[str, Toggle] = {}
    rungs: list[Rung] = []
    solutions: Solutions = Solutions()
    timing: Timing = Timing()
    drawing: Drawing = Drawing()
    defaults: Defaults

    def shape(self, name: str) -> Shape:
        """Return the shape with this name or alias. Raises UsageError with the known names."""
        for shape in self.shapes:
            if name == shape.name or name in shape.aliases:
                return shape
        raise unknown(f"shape of task {self.name}", name, (s.name for s in self.shapes))

    @property
    def shape_names(self) -> dict[str, str]:
        """Map from alias to name, for all shapes."""
        return {alias: shape.name for shape in self.shapes for alias in shape.aliases}

    def rung(self, name: str) -> Rung:
        """Return the rung with this name. Raises UsageError with the known names."""
        if not self.rungs:
            raise UsageError(f"task {self.name} has no rungs; `greenfast judge SOLUTION --problem ...` judges yours")
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise unknown(f"variant of task {self.name}", name, (r.name for r in self.rungs))

    def find_rung(self, variant: Variant) -> Rung | None:
        """Return the rung with the name of a variant; None if it is none of the task's."""
        return next((rung for rung in self.rungs if rung.name == variant.name), None)

    def gates(self, fmt: str) -> FormatGates:
        """Return the correctness gates of a format. Raises UsageError with the known formats."""
        if fmt not in self.formats:
            raise unknown(f"format of task {self.name}", fmt, self.formats)
        return self.formats[fmt]

    def toggle_values(self, settings: dict[str, int]) -> dict[str, int]:
        """Return the values of all toggles, with defaults. Raises UsageError for an unknown toggle or value."""
        for name, value in settings.items():
            if name not in self.toggles:
                raise unknown(f"toggle of task {self.name}", name, self.toggles)
            if value not in self.toggles[name].values:
                raise UsageError(f"{name}={value}: allowed values are {self.toggles[name].values}")
        return {name: settings.get(name, t.default) for name, t in self.toggles.items()}

    def rung_variant(self, rung: Rung) -> Variant:
        """Return the variant of a rung: its toggles, and 0 for every other toggle."""
        return Variant(rung.name, tuple((name, rung.toggles.get(name, 0)) for name in self.toggles))

    def variant(self, text: str) -> Variant:
        """Parse a rung's name or ``TOGGLE=VALUE,...``. Toggles that are not named have their defaults."""
        if "=" not in text:
            return self.rung_variant(self.rung(text))
        settings: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name in settings:
                raise UsageError(f"variant {text!r}: {name} is given twice")
            try:
                settings[name] = int(value)
            except ValueError:
                raise UsageError(f"variant {text!r}: {part!r} is not TOGGLE=INTEGER") from None
        return self.toggle_variant(settings)

    def toggle_variant(self, settings: dict[str, int]) -> Variant:
        """Return the variant with some toggle values and defaults for the others. It has the name of an equal rung."""
        values = tuple(self.toggle_values(settings).items())
        for rung in self.rungs:
            if self.rung_variant(rung).toggles == values:
                return Variant(rung.name, values)
        return Variant("+".join(f"{n}={v}" for n, v in values if v) or "all-off", values)


class Task(msgspec.Struct, frozen=True):
    """A task config and the folder that it was read from."""

    config: TaskConfig
    folder: Path


def load_task(folder: Path) -> Task:
    """Read and check a task's config.

    Raises UsageError with the file, the key and the allowed values.
    """
    path = folder / CONFIG_NAME
    try:
        raw = read_file(path).removeprefix(codecs.BOM_UTF8)
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); a task folder holds a {CONFIG_NAME}") from e
    try:
        config = decode(raw, TaskConfig)
    # The message of a ValidationError contains the path of the key.
    except msgspec.DecodeError as e:
        # The counters are the only enumeration in the schema. msgspec does not list the allowed values.
        allowed = f"; allowed: {', '.join(get_args(Counter))}" if "Invalid enum value" in str(e) else ""
        raise UsageError(f"{path}: {e}{allowed}") from e
    faults = _find_inconsistencies(config, folder)
    if faults:
        raise UsageError(f"{path}: " + "; ".join(faults))
    return Task(config, folder)


def _find_inconsistencies(c: TaskConfig, folder: Path) -> list[str]:
    """Return the faults that the types cannot detect: missing and duplicate names."""
    faults: list[str] = []

    def require_unique(key: str, names: list[str]) -> None:
        for name in sorted({n for n in names if names.count(n) > 1}):
            faults.append(f"{key}: {name!r} appears more than once")

    def require_known(key: str, name: str, known: list[str]) -> None:
        if name not in known:
            faults.append(f"{key}: {name!r} is not one of {', '.join(known)}")

    shape_names = [s.name for s in c.shapes]
    rung_names = [r.name for r in c.rungs]
    require_unique("shapes", [name for s in c.shapes for name in (s.name, *s.aliases)])
    require_unique("shapes (dims)", [", ".join(f"{k}={v}" for k, v in sorted(s.dims.items())) for s in c.shapes])
    require_unique("rungs", rung_names)
    require_unique("seeds", [str(s) for s in c.seeds])
    for rung in c.rungs:
        if rung.after is not None:
            require_known(f"rungs.{rung.name}.after", rung.after, rung_names)
        elif rung.promises.more_than_predecessor:
            faults.append(f"rungs.{rung.name}.promises.more_than_predecessor: the rung names no `after`")
        for name, value in rung.toggles.items():
            require_known(f"rungs.{rung.name}.toggles", name, list(c.toggles))
            if name in c.toggles and value not in c.toggles[name].values:
                faults.append(f"rungs.{rung.name}.toggles.{name}: {value} is not one of {c.toggles[name].values}")
    for name, toggle in c.toggles.items():
        if toggle.default not in toggle.values:
            faults.append(f"toggles.{name}.default: {toggle.default} is not one of {toggle.values}")
    if c.rungs:
        require_known("defaults.baseline", c.defaults.baseline, rung_names)
        require_known("defaults.candidate", c.defaults.candidate, rung_names)
        if not c.family:
            faults.append("family: missing, and `rungs` need one")
    elif not (folder / c.defaults.baseline).exists():
        faults.append(
            f"defaults.baseline: {folder / c.defaults.baseline} does not exist; name a solution in the folder"
        )
    require_known("defaults.format", c.defaults.format, list(c.formats))
    for shape in c.defaults.shapes:
        require_known("defaults.shapes", shape, shape_names)
    for key, allowed in c.drawing.ranges.items():
        if isinstance(allowed, Range) and allowed.min > allowed.max:
            faults.append(f"drawing.ranges.{key}: min {allowed.min} is above max {allowed.max}")
    for shape in c.timing.gate_shapes:
        require_known("timing.gate_shapes", shape, shape_names)
    try:
        Target.parse(c.defaults.arch)
    except UsageError as e:
        faults.append(f"defaults.arch: {e}")
    return faults


#: Prefix of the families in greenfast's package.
_OWN = "greenfast.kernels."
#: The folders of greenfast's own tasks: in an installed package, and in a source checkout.
_OWN_ROOTS = (KERNEL_DIR.parent / "tasks", KERNEL_DIR.parents[2] / "tasks")
#: Environment variable: additional folders of tasks, separated like PATH.
TASKS_VARIABLE = "GREENFAST_TASKS"


@dataclass(frozen=True)
class LoadedTask:
    """A task with its modules."""

    config: TaskConfig
    folder: Path
    family: Family
    problem: Problem


def _roots() -> Iterator[Path]:
    for entry in os.environ.get(TASKS_VARIABLE, "").split(os.pathsep):
        if entry:
            yield Path(entry)
    yield from _OWN_ROOTS


def task_folders() -> list[Path]:
    """Return the folders of all known tasks."""
    folders: dict[str, Path] = {}
    for root in _roots():
        if root.is_dir():
            for folder in sorted(root.iterdir()):
                if (folder / CONFIG_NAME).is_file():
                    folders.setdefault(folder.name, folder)
    return list(folders.values())


def load_known_tasks() -> Iterator[tuple[Path, Task | UsageError]]:
    """Yield the folder of each known task with the task, or with the error of its config."""
    for folder in task_folders():
        try:
            yield folder, load_task(folder)
        except UsageError as e:
            yield folder, e


def task_names() -> list[str]:
    """Return the names of the known tasks with a valid config."""
    return [task.config.name for _, task in load_known_tasks() if isinstance(task, Task)]


def is_task(name: str) -> bool:
    """Return True if this is the name of a known task or of its folder, or the path of a task's folder."""
    if (Path(name) / CONFIG_NAME).is_file():
        return True
    return name in task_names() or name in [folder.name for folder in task_folders()]


def find_task(name: str) -> Task:
    """Return the task with this name (in its config or of its folder), or in this folder.

    Raises UsageError with the known tasks, and for an invalid config.
    """
    if os.sep in name or (Path(name) / CONFIG_NAME).is_file():
        return load_task(Path(name))
    broken: list[UsageError] = []
    for folder, task in load_known_tasks():
        if isinstance(task, Task):
            if name in (task.config.name, folder.name):
                return task
        elif folder.name == name:
            raise task
        else:  # Another task's invalid config must not hide the requested task.
            broken.append(task)
    error = unknown("task", name, task_names())
    raise UsageError("; ".join([f"{error}, or a task's folder", *map(str, broken)]))


def load(name: str | Path) -> LoadedTask:
    """Find a task as ``find_task`` does, and import its problem and its family.

    Raises UsageError if one of them is missing or lacks a function.
    """
    task = find_task(str(name))
    problem = _import_module(task, "problem", task.config.problem, ("make_case", "references", "decode"))
    return LoadedTask(task.config, task.folder, load_family(task), cast(Problem, problem))


class _NoFamily:
    """The family of a task without kernels of its own. The task only judges solutions."""

    def program(self, *_: object, **__: object) -> Program:
        """Raise UsageError."""
        raise UsageError("the task has no kernels; `greenfast judge SOLUTION --problem ...` judges yours")


def load_family(task: Task) -> Family:
    """Load the task's kernel family without its problem.

    greenfast's own families, in its package and in its tasks, are imported. Other families run in a confined process.
    Raises UsageError if the family cannot be imported or lacks a function, SolutionError if its process ends.
    """
    name = task.config.family
    if not name:
        return cast(Family, _NoFamily())
    is_file = name.endswith(".py")
    if name.startswith(_OWN) or (is_file and _own_module_name(task.folder / name)):
        return cast(Family, _import_module(task, "family", name, ("kernel", "launch"), instead="program"))
    where = f"{task.folder / CONFIG_NAME}: family {name!r}"
    if is_file and not (task.folder / name).is_file():
        raise UsageError(f"{task.folder / name}: no such file")
    solution = SolutionConfig(name=task.config.name, language="family", file=name if is_file else "")
    family = RemoteFamily(where, task.folder, solution, module="" if is_file else name)
    missing = [f for f in ("kernel", "launch") if f not in family.functions]
    if missing and "program" not in family.functions:
        raise UsageError(f"{where} has no function {', '.join(missing)}")
    return cast(Family, family)


def _import_module(task: Task, key: str, name: str, functions: tuple[str, ...], *, instead: str = "") -> ModuleType:
    """Import a module with these functions, or with the function ``instead``. Raises UsageError for any other."""
    where = f"{task.folder / CONFIG_NAME}: {key} {name!r}"
    try:
        module = import_file(task.folder / name) if name.endswith(".py") else importlib.import_module(name)
    except GreenfastError:
        raise
    except Exception as e:  # A task author's module may raise any exception.
        raise UsageError(f"{where} cannot be imported: {type(e).__name__}: {e}") from e
    missing = [f for f in functions if not callable(getattr(module, f, None))]
    if missing and not callable(getattr(module, instead, None)):
        raise UsageError(f"{where} has no function {', '.join(missing)}")
    return module


def _own_module_name(path: Path) -> str:
    """Return the module name of a file of greenfast's own tasks, such as "tasks.NAME.problem", or an empty string."""
    path = path.resolve()
    for root in _OWN_ROOTS:
        if path.is_file() and path.is_relative_to(root.resolve()):
            return ".".join(("tasks", *path.relative_to(root.resolve()).with_suffix("").parts))
    return ""


def import_file(path: Path) -> ModuleType:
    """Import a task's file under a unique module name, so that two tasks' family.py do not collide.

    A file of greenfast's own tasks is imported once, under the name that ``import`` gives it in a source checkout.
    """
    own_name = _own_module_name(path)
    name = own_name or f"greenfast_task_{path.parent.name}_{path.stem}"
    module = sys.modules.get(own_name)
    if module is not None and Path(module.__file__ or "").resolve() == path.resolve():
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def choices(task: LoadedTask, target: Target, fmt: str, shapes: Sequence[Shape]) -> list[tuple[Shape, Choice | str]]:
    """Return, for each shape, the chosen rung or the reason why no rung supports it.

    Raises UsageError if the task's family has no ``choose``, and for an unknown format.
    """
    config, choose = task.config, getattr(task.family, "choose", None)
    if choose is None:
        raise UsageError(
            f"the kernels of task {config.name} are chosen by name: {', '.join(r.name for r in config.rungs)}"
        )
    config.gates(fmt)
    chosen: list[tuple[Shape, Choice | str]] = []
    for shape in shapes:
        try:
            chosen.append((shape, choose(target, fmt, shape.dims)))
        except UsageError as e:
            chosen.append((shape, str(e)))
    return chosen
