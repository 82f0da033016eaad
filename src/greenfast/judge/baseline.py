"""The baseline of a comparison: a rung or toggles of the task, or another solution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from greenfast.judge.formats.importers import import_solution
from greenfast.judge.implementation import Implementation, build_rung_implementation, build_solution_implementation
from greenfast.judge.request import Request
from greenfast.judge.solution.schema import ResolvedSolution, find_solution, is_solution
from greenfast.spec.errors import unknown


def load_solution(request: Request, found: ResolvedSolution, *, is_reference: bool = False) -> Implementation:
    """Build the implementation of a solution for a request. Raises as ``build_solution_implementation``."""
    gpu = request.ordinal if isinstance(request.ordinal, int) else None
    task = request.task
    return build_solution_implementation(
        task.config, found, request.target, task.problem, gpu, is_reference=is_reference, results=request.out
    )


def load_baseline(request: Request, text: str) -> Implementation:
    """Load the baseline that ``text`` names: a rung, toggles of the task, or the path of a solution.

    A path is relative to the working directory or to the task's folder. Raises UsageError with the names of the rungs.
    """
    task, config = request.task, request.task.config
    if text in [rung.name for rung in config.rungs] or ("=" in text and config.rungs):
        return build_rung_implementation(config, task.family, config.variant(text))
    is_task_baseline = text == config.defaults.baseline
    # The working directory may contain an unrelated folder of the same name as the task's baseline.
    for path in (task.folder / text,) if is_task_baseline else (Path(text), task.folder / text):
        if is_solution(path):
            solution = find_solution(import_solution(path, task.folder, request.out))
            return replace(load_solution(request, solution, is_reference=True), is_task_baseline=is_task_baseline)
    rungs = [rung.name for rung in config.rungs]
    raise unknown("reference", text, [*rungs, "the path of a solution"])
