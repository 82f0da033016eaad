"""The subject of a run: a task with a candidate and a baseline, each a variant of the task or a solution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from greenfast.judge.formats.registry import import_problem, import_solution
from greenfast.judge.implementation import Implementation, build_rung_implementation, build_solution_implementation
from greenfast.judge.request import Request, read_git_state
from greenfast.judge.solution.schema import CONFIG_NAME as SOLUTION_CONFIG
from greenfast.judge.solution.schema import ResolvedSolution, find_solution, is_solution
from greenfast.judge.task import CONFIG_NAME, LoadedTask, Variant, find_task, is_task, load, task_names
from greenfast.spec.errors import UsageError, unknown

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
    baseline = _build(request, subject.baseline, is_reference=True)
    candidate = _build(request, subject.candidate)
    return replace(baseline, is_task_baseline=subject.is_task_baseline), candidate


def load_baseline(request: Request, text: str) -> Implementation:
    """Load the baseline that ``text`` names. Raises as ``find_baseline`` and ``build_solution_implementation``."""
    side, is_task_baseline = find_baseline(request.task, text, request.out)
    return replace(_build(request, side, is_reference=True), is_task_baseline=is_task_baseline)


def _build(request: Request, side: Variant | ResolvedSolution, *, is_reference: bool = False) -> Implementation:
    """Build the implementation of a variant, or of a solution with the commit of its repository."""
    task = request.task
    if isinstance(side, Variant):
        return build_rung_implementation(task, side)
    gpu = request.ordinal if isinstance(request.ordinal, int) else None
    built = build_solution_implementation(
        task, side, request.target, gpu, is_reference=is_reference, results=request.out
    )
    git = read_git_state(side.path.parent)
    commit = "" if git.sha == "unknown" else f"{git.sha}{' (dirty)' if git.dirty else ''}"
    assert built.source is not None
    return replace(built, source=msgspec.structs.replace(built.source, commit=commit))
