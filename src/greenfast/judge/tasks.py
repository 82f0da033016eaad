"""Discovery of tasks, import of a task's kernel family and problem, and the rung that a family chooses for a shape."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

from greenfast.judge.solution.family import NoFamily, RemoteFamily
from greenfast.judge.solution.schema import SolutionConfig
from greenfast.judge.task import CONFIG_NAME, Shape, Task, TaskConfig, load_task
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UsageError, unknown
from greenfast.spec.kernel import Choice, Family
from greenfast.spec.problem import Problem

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


def task_names() -> list[str]:
    """Return the names of the known tasks with a valid config."""
    names = []
    for folder in task_folders():
        with contextlib.suppress(UsageError):
            names.append(load_task(folder).config.name)
    return names


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
    known = []
    broken: list[UsageError] = []
    for folder in task_folders():
        try:
            task = load_task(folder)
        except UsageError as e:  # Another task's invalid config must not hide the requested task.
            if folder.name == name:
                raise
            broken.append(e)
            continue
        known.append(task.config.name)
        if name in (task.config.name, folder.name):
            return task
    error = unknown("task", name, known)
    raise UsageError("; ".join([f"{error}, or a task's folder", *map(str, broken)]))


def load(task: Task) -> LoadedTask:
    """Import the task's family and problem. Raises UsageError if one is missing or lacks a function."""
    family = load_family(task)
    problem = _import_module(task, "problem", task.config.problem, ("make_case", "references", "decode"))
    return LoadedTask(task.config, task.folder, family, cast(Problem, problem))


def load_family(task: Task) -> Family:
    """Load the task's kernel family without its problem.

    greenfast's own families, in its package and in its tasks, are imported. Other families run in a confined process.
    Raises UsageError if the family cannot be imported or lacks a function, SolutionError if its process ends.
    """
    name = task.config.family
    if not name:
        return cast(Family, NoFamily(task.config.name))
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
    return family


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
