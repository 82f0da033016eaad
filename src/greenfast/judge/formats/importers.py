"""What a user gives as a problem or a solution, in whatever format, as folders that the judge reads."""

from __future__ import annotations

import json
from pathlib import Path

from greenfast.judge.formats.convert import (
    convert_definition,
    convert_solution,
    find_workloads,
    is_definition,
    is_foreign_solution,
)
from greenfast.judge.formats.kernelbench import NEW_MODEL, ORIGINAL, convert_model, convert_problem, is_kernelbench
from greenfast.judge.formats.schema import DEFINITION, WORKLOADS, read_definition, read_workloads
from greenfast.judge.formats.traces import build_traces
from greenfast.judge.record_schema import Record
from greenfast.judge.store import write_whole
from greenfast.spec.errors import UsageError

#: The folders, next to the results, of problems and of solutions that were converted: no solution, whatever its name,
#: writes into a problem.
CONVERTED, SOLUTIONS = "converted", "converted_solutions"


def import_problem(asked: str, out: Path, workloads: Path | None = None) -> str:
    """A task's name or folder: ``asked`` itself, or the folder that a foreign problem is converted to, below ``out``.

    Raises UsageError for a problem that cannot be judged, and for workloads of a problem that takes none.
    """
    path = Path(asked)
    if is_definition(path):
        return str(convert_definition(find_workloads(path, workloads), out / CONVERTED))
    if workloads is not None:
        raise UsageError(f"--workloads {workloads}: only for a definition of FlashInfer-Trace or SOL-ExecBench")
    return str(convert_problem(path, out / CONVERTED)) if is_kernelbench(path) else asked


def import_solution(path: Path, problem: Path, out: Path) -> Path:
    """A solution's path: ``path`` itself, or the folder that a foreign one is converted to.

    problem: the folder of the task that it is judged by. Raises UsageError where the two do not belong together.
    """
    if is_foreign_solution(path):
        if not (problem / DEFINITION).is_file():
            raise UsageError(f"{path}: solves a definition of FlashInfer-Trace; --problem names that definition's file")
        definition, workloads = read_definition(problem / DEFINITION), read_workloads(problem / WORKLOADS)
        return convert_solution(path, definition, workloads, out / SOLUTIONS)
    if is_kernelbench(path, NEW_MODEL) and (problem / ORIGINAL).is_file():
        return convert_model(path, problem / ORIGINAL, out / SOLUTIONS)
    return path


def check_traces(file: Path, problem: Path) -> None:
    """Raise UsageError, before anything is run, where traces can be written of no problem but a definition."""
    if not (problem / DEFINITION).is_file():
        raise UsageError(f"--traces {file}: the problem is no definition of FlashInfer-Trace")


def write_traces(file: Path, record: Record, problem: Path) -> int:
    """Write a record as FlashInfer-Trace's JSONL; returns the number of traces."""
    definition, workloads = read_definition(problem / DEFINITION), read_workloads(problem / WORKLOADS)
    traces = build_traces(record, definition, workloads)
    write_whole(file, "".join(json.dumps(trace) + "\n" for trace in traces))
    return len(traces)
