"""What a solution or a search is compared with: a rung or toggles of the task, or another solution."""

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
    """A rung or toggles of the task, or a solution: a path, from here or from the task's folder.

    Raises UsageError naming the rungs.
    """
    task, config = request.task, request.task.config
    if text in [rung.name for rung in config.rungs] or ("=" in text and config.rungs):
        return build_rung_implementation(config, task.family, config.variant(text))
    is_own = text == config.defaults.baseline
    # A folder of its name may lie where the command is given.
    for path in (task.folder / text,) if is_own else (Path(text), task.folder / text):
        if is_solution(path):
            found = find_solution(import_solution(path, task.folder, request.out))
            return replace(load_solution(request, found, is_reference=True), is_own=is_own)
    rungs = [rung.name for rung in config.rungs]
    raise unknown("reference", text, [*rungs, "the path of a solution"])
