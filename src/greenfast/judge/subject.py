"""The subject of a run: a task with a candidate and a baseline, each a variant of the task or a solution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from greenfast.judge.formats.registry import import_problem, read_solution
from greenfast.judge.solution.schema import CONFIG_NAME as SOLUTION_CONFIG
from greenfast.judge.solution.schema import ResolvedSolution, find_solution, is_solution
from greenfast.judge.task import CONFIG_NAME, LoadedTask, Variant, is_task, load, task_names
from greenfast.spec.errors import UsageError, unknown

#: The folders that ``greenfast init`` makes.
_PROBLEM, _SOLUTION = "problem", "solution"


@dataclass(frozen=True)
class Subject:
    """A task with a baseline and a candidate."""

    task: LoadedTask
    baseline: Variant | ResolvedSolution
    candidate: Variant | ResolvedSolution

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
    is_variant = problem is None and is_task(text)
    if is_variant:
        if is_solution(path):
            raise UsageError(f"{text}: names a task and a solution; --problem judges the solution")
    elif path.is_dir() and not is_solution(path):
        task_too = "" if problem else f"no {CONFIG_NAME} of a task and "
        raise UsageError(f"{path}: holds {task_too}no {SOLUTION_CONFIG} of a solution")
    elif not path.exists() and problem:
        raise UsageError(f"{path}: no such solution; --problem names the problem of a solution")
    elif not path.exists():
        raise unknown("task or solution", text, [*task_names(), "the folder of a task", "the path of a solution"])
    elif candidate is not None:
        raise UsageError(f"--candidate {candidate}: {path} is a solution and so the candidate itself")
    else:
        problem = problem or _name_problem(find_solution(path))
    task = load(import_problem(problem or text, out, workloads))
    config = task.config
    if is_variant:
        variant = config.variant(candidate or config.defaults.candidate)
        rung = config.find_rung(variant) if candidate else None
        baseline = baseline or (rung.after if rung else None)
    return Subject(
        task,
        baseline=find_baseline(task, baseline, out),
        candidate=variant if is_variant else read_solution(path, task.folder, out),
    )


def _name_problem(solution: ResolvedSolution) -> str:
    problem = solution.config.problem
    if not problem:
        raise UsageError(f"{solution.path}: names no problem; --problem names a task or its folder")
    if problem not in task_names():
        raise unknown(f"problem of {solution.path}", problem, task_names())
    return problem


def find_baseline(task: LoadedTask, text: str | None, out: Path) -> Variant | ResolvedSolution:
    """Find the baseline that ``text`` names: a rung, toggles of the task, or the path of a solution.

    None names the task's baseline.
    A path is relative to the working directory or to the task's folder. Raises UsageError with the names of the rungs.
    """
    config = task.config
    text = text or config.defaults.baseline
    rungs = [rung.name for rung in config.rungs]
    if text in rungs or ("=" in text and rungs):
        return config.variant(text)
    # The working directory may contain an unrelated folder of the same name as the task's baseline.
    for path in (task.folder / text,) if text == config.defaults.baseline else (Path(text), task.folder / text):
        if is_solution(path):
            return read_solution(path, task.folder, out)
    raise unknown("baseline", text, [*rungs, "the path of a solution"])
