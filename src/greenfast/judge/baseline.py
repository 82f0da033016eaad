"""What a solution or a search is compared with: a rung or toggles of the task, or another solution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from greenfast.judge.formats.importers import given_solution
from greenfast.judge.implementation import Entrant, rung_entrant, solution_entrant
from greenfast.judge.request import Request
from greenfast.judge.solution.schema import FoundSolution, find_solution, is_solution
from greenfast.spec.errors import unknown


def found_entrant(request: Request, found: FoundSolution, *, is_reference: bool = False) -> Entrant:
    """The entrant of a solution for a request's task, target and GPU; raises as ``solution_entrant`` does."""
    gpu = request.ordinal if isinstance(request.ordinal, int) else None
    task = request.task
    return solution_entrant(
        task.config, found, request.target, task.problem, gpu, is_reference=is_reference, results=request.out
    )


def reference_entrant(request: Request, text: str) -> Entrant:
    """A rung or toggles of the task, or a solution: a path, from here or from the task's folder.

    Raises UsageError naming the rungs.
    """
    task, config = request.task, request.task.config
    if text in [rung.name for rung in config.rungs] or ("=" in text and config.rungs):
        return rung_entrant(config, task.family, config.variant(text))
    is_own = text == config.defaults.baseline
    # A folder of its name may lie where the command is given.
    for path in (task.folder / text,) if is_own else (Path(text), task.folder / text):
        if is_solution(path):
            found = find_solution(given_solution(path, task.folder, request.out))
            return replace(found_entrant(request, found, is_reference=True), is_own=is_own)
    rungs = [rung.name for rung in config.rungs]
    raise unknown("reference", text, [*rungs, "the path of a solution"])
