"""The subject of a run: a task with a candidate and a baseline, each a variant of the task or a solution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from greenfast.judge.formats.convert import (
    NEW_MODEL,
    ORIGINAL,
    convert_definition,
    convert_model,
    convert_problem,
    convert_robust_problem,
    convert_robust_solution,
    convert_solution,
    find_robust_problem,
    find_workloads,
    is_definition,
    is_foreign_solution,
    is_kernelbench,
    is_robust_solution,
)
from greenfast.judge.formats.schema import DEFINITION, WORKLOADS, read_definition, read_workloads
from greenfast.judge.implementation import Implementation, build_rung_implementation, build_solution_implementation
from greenfast.judge.request import Request, read_git_state
from greenfast.judge.solution.schema import CONFIG_NAME as SOLUTION_CONFIG
from greenfast.judge.solution.schema import ResolvedSolution, find_solution, is_solution
from greenfast.judge.task import CONFIG_NAME, LoadedTask, Variant, find_task, is_task, load, task_names
from greenfast.spec.errors import UsageError, unknown

#: The folders, next to the results, of problems and of solutions that were converted: no solution, whatever its name,
#: writes into a problem.
CONVERTED, SOLUTIONS = "converted", "converted_solutions"
#: The folders that ``greenfast init`` makes.
_PROBLEM, _SOLUTION = "problem", "solution"


@dataclass(frozen=True)
class Subject:
    """A task with a candidate and a baseline."""

    task: LoadedTask
    candidate: Variant | ResolvedSolution
    baseline: Variant | ResolvedSolution
    is_task_baseline: bool

    @property
    def target(self) -> str:
        """The target that the candidate is written for; empty if it has none."""
        return "" if isinstance(self.candidate, Variant) else self.candidate.config.target

    @property
    def names(self) -> tuple[str, str]:
        """The names of baseline and candidate in records."""
        baseline, candidate = (
            side.name if isinstance(side, Variant) else side.config.name for side in (self.baseline, self.candidate)
        )
        return baseline, candidate


def find_subject(
    text: str, *, problem: str | None, candidate: str | None, baseline: str | None, workloads: Path | None, out: Path
) -> Subject:
    """Find the subject that ``text`` names: a task, or the path of a solution.

    A folder of ``greenfast init``, with a folder ``problem`` and a folder ``solution``, names both.
    problem: a task or a problem of another format; by default the task that the solution names.
    candidate: a variant of the task; by default its candidate. A solution is the candidate itself.
    baseline: as in ``find_baseline``; by default the rung before the named candidate, else the task's baseline.
    Raises UsageError if ``text`` is neither a task nor a solution, or both without a problem.
    """
    path = Path(text)
    if problem is None and not is_task(text) and not is_solution(path) and is_task(str(path / _PROBLEM)):
        path, problem = path / _SOLUTION, str(path / _PROBLEM)
        text = str(path)
    if problem is None and is_task(text):
        if is_solution(path):
            raise UsageError(f"{text}: names a task and a solution; --problem judges the solution")
        task = load(find_task(import_problem(text, out, workloads)))
        config = task.config
        variant = config.variant(candidate or config.defaults.candidate)
        rung = next((rung for rung in config.rungs if rung.name == variant.name), None)
        before = rung.after if rung is not None and candidate else None
        return _with_baseline(task, variant, baseline or before, out)
    if path.is_dir() and not is_solution(path):
        task_too = "" if problem else f"no {CONFIG_NAME} of a task and "
        raise UsageError(f"{path}: holds {task_too}no {SOLUTION_CONFIG} of a solution")
    if not path.exists() and problem:
        raise UsageError(f"{path}: no such solution; --problem names the problem of a solution")
    if not path.exists():
        raise unknown("task or solution", text, [*task_names(), "the folder of a task", "the path of a solution"])
    if candidate is not None:
        raise UsageError(f"--candidate {candidate}: {text} is a solution and so the candidate itself")
    task = load(find_task(import_problem(problem or _name_problem(find_solution(path)), out, workloads)))
    solution = find_solution(import_solution(path, task.folder, out))
    return _with_baseline(task, solution, baseline, out)


def import_problem(name: str, out: Path, workloads: Path | None = None) -> str:
    """Return the task of a problem: ``name`` itself, or the folder below ``out`` with the converted foreign problem.

    Raises UsageError for a problem that cannot be judged, and for workloads of a problem that takes none.
    """
    path = Path(name)
    if is_definition(path):
        return str(convert_definition(find_workloads(path, workloads), out / CONVERTED))
    if workloads is not None:
        raise UsageError(f"--workloads {workloads}: only for a definition of FlashInfer-Trace or SOL-ExecBench")
    robust = find_robust_problem(path)
    if robust is not None:
        return str(convert_robust_problem(robust, out / CONVERTED))
    return str(convert_problem(path, out / CONVERTED)) if is_kernelbench(path) else name


def import_solution(path: Path, problem: Path, out: Path) -> Path:
    """Return a solution's path: ``path`` itself, or the folder that a foreign one is converted to.

    problem: the folder of the task that it is judged by. Raises UsageError if the two do not belong together.
    """
    if is_foreign_solution(path):
        if not (problem / DEFINITION).is_file():
            raise UsageError(f"{path}: solves a definition of FlashInfer-Trace; --problem names that definition's file")
        definition, workloads = read_definition(problem / DEFINITION), read_workloads(problem / WORKLOADS)
        return convert_solution(path, definition, workloads, out / SOLUTIONS)
    if is_robust_solution(path, problem):
        return convert_robust_solution(path, problem, out / SOLUTIONS)
    if is_kernelbench(path, NEW_MODEL) and (problem / ORIGINAL).is_file():
        return convert_model(path, problem / ORIGINAL, out / SOLUTIONS)
    return path


def _name_problem(solution: ResolvedSolution) -> str:
    problem = solution.config.problem
    if not problem:
        raise UsageError(f"{solution.path}: names no problem; --problem names a task or its folder")
    if problem not in task_names():
        raise unknown(f"problem of {solution.path}", problem, task_names())
    return problem


def _with_baseline(task: LoadedTask, candidate: Variant | ResolvedSolution, baseline: str | None, out: Path) -> Subject:
    text = baseline or task.config.defaults.baseline
    return Subject(task, candidate, *find_baseline(task, text, out))


def find_baseline(task: LoadedTask, text: str, out: Path) -> tuple[Variant | ResolvedSolution, bool]:
    """Find the baseline that ``text`` names: a rung, toggles of the task, or the path of a solution.

    Return it, and True if it is a solution that the task names as its baseline.
    A path is relative to the working directory or to the task's folder. Raises UsageError with the names of the rungs.
    """
    config = task.config
    rungs = [rung.name for rung in config.rungs]
    if text in rungs or ("=" in text and rungs):
        return config.variant(text), False
    is_task_baseline = text == config.defaults.baseline
    # The working directory may contain an unrelated folder of the same name as the task's baseline.
    for path in (task.folder / text,) if is_task_baseline else (Path(text), task.folder / text):
        if is_solution(path):
            return find_solution(import_solution(path, task.folder, out)), is_task_baseline
    raise unknown("baseline", text, [*rungs, "the path of a solution"])


def load_implementations(request: Request, subject: Subject) -> tuple[Implementation, Implementation]:
    """Build baseline and candidate for a request. Raises as ``build_solution_implementation``."""
    return _load_baseline(request, subject.baseline, subject.is_task_baseline), _load(request, subject.candidate)


def load_baseline(request: Request, text: str) -> Implementation:
    """Load the baseline that ``text`` names. Raises as ``find_baseline`` and ``build_solution_implementation``."""
    return _load_baseline(request, *find_baseline(request.task, text, request.out))


def _load_baseline(request: Request, side: Variant | ResolvedSolution, is_task_baseline: bool) -> Implementation:
    return replace(_load(request, side, is_reference=True), is_task_baseline=is_task_baseline)


def _load(request: Request, side: Variant | ResolvedSolution, *, is_reference: bool = False) -> Implementation:
    task = request.task
    if isinstance(side, Variant):
        return build_rung_implementation(task.config, task.family, side)
    gpu = request.ordinal if isinstance(request.ordinal, int) else None
    built = build_solution_implementation(
        task.config, side, request.target, task.problem, gpu, is_reference=is_reference, results=request.out
    )
    if built.source is None:
        return built
    return replace(built, source=msgspec.structs.replace(built.source, commit=_read_commit(side.path)))


def _read_commit(path: Path) -> str:
    """Return the commit of the repository that a solution is in, with " (dirty)"; empty if it is in none."""
    git = read_git_state(path if path.is_dir() else path.parent)
    return "" if git.sha == "unknown" else f"{git.sha}{' (dirty)' if git.dirty else ''}"
