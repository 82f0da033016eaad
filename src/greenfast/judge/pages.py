"""The HTML page of a record, with data that today's task and compiler add."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from greenfast.judge.artifacts import RECORD
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.hotspots import find_hot_code
from greenfast.judge.record_schema import AnyRecord, PhaseRecord, Run
from greenfast.judge.report.webpage.listing import HotCode
from greenfast.judge.report.webpage.roofline import Work
from greenfast.judge.report.webpage.run import PageData, run_page
from greenfast.judge.store import write_whole
from greenfast.judge.tasks import LoadedTask, find_task, load
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.problem import least_work

#: Reason why the page of a saved record has no machine code for a solution.
_NOT_BUILT = (
    "a solution's code does not run to show a saved record; the command under 'Repeat it' with --html FILE writes a "
    "page with the machine code"
)


def write_page(
    file: Path | None, record: AnyRecord, run: Path, task: LoadedTask | None = None, built: Sequence[BuiltSide] = ()
) -> None:
    """Write the page of a record, whose file or folder is ``run``. Do nothing if no file is named."""
    if file is not None:
        write_whole(file, record_page(record, digest(run), task, built))


def record_page(
    record: AnyRecord, sha256: str = "", task: LoadedTask | None = None, built: Sequence[BuiltSide] = ()
) -> str:
    """The page of a record. sha256: of its file. task: the record's; searched for by its name where it is not given.

    built: the sides of the run, if it has just ended; else the kernels are compiled again where the cache does not have
    them. Nothing runs.
    """
    code = HotCode(missing="an instrumented build has other code")
    if not isinstance(record, PhaseRecord):
        try:
            task = task or _task_of(record)
            code = find_hot_code(record, task, built)
        except GreenfastError as e:
            code = HotCode(missing=str(e).splitlines()[0].rstrip(".:"))
        if not built and any(side.solution for _, side in record.sides()):
            code = HotCode(missing=_NOT_BUILT)
    return run_page(record, PageData(work=work_of(record, task), code=code, sha256=sha256))


def digest(run: Path) -> str:
    """Return the SHA-256 of a record's file. The argument is the file or its folder."""
    return hashlib.sha256((run / RECORD if run.is_dir() else run).read_bytes()).hexdigest()


def _task_of(record: Run) -> LoadedTask:
    """The task that a record names. Raises UsageError for one that is not known by its name.

    A record must not choose a folder from which code is loaded.
    """
    if not re.fullmatch(r"[\w-]+", record.task):
        raise UsageError("the record names no task")
    return load(find_task(record.task))


def work_of(record: Run, task: LoadedTask | None) -> dict[str, Work]:
    """Return the problem's minimum work by timed shape, from the record, else from today's task."""
    dims = {row.shape: row.dims for _, side in record.sides() for row in side.timing}
    rows = [row for _, side in record.sides() for row in side.correctness]
    moved = {row.shape: row.case_bytes for row in rows if row.case_bytes}
    found = {}
    for name, sizes in dims.items():
        known = task if task is not None and _has(task, name, sizes) else None
        least = record.least_work.get(name) or (least_work(known.problem, sizes) if known else {})
        nbytes = moved.get(name) or (known.problem.make_case(sizes, 0, record.format).nbytes if known else 0)
        found[name] = Work(least, nbytes)
    return found


def _has(task: LoadedTask, shape: str, dims: Mapping[str, int]) -> bool:
    """Return True if the task has this shape with these dimensions. A record must not cause other computations."""
    try:
        return task.config.shape(shape).dims == dims
    except UsageError:
        return False
