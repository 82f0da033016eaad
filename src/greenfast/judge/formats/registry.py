"""The foreign formats of problems and solutions, and their conversion to folders that the judge reads.

Each format has a module with the two functions of ``ForeignFormat``. A new format is a new module and its name in
``FORMATS``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from greenfast.judge.formats import flashinfer_trace, kernelbench, robust_kbench, tritonbench
from greenfast.judge.formats.converted import Files
from greenfast.judge.solution.schema import ResolvedSolution, find_solution
from greenfast.judge.store import write_files
from greenfast.spec.errors import UsageError


class ForeignFormat(Protocol):
    """The module of a format."""

    def import_problem(self, path: Path, parent: Path, /) -> Path | None:
        """Write the task folder of a problem below ``parent`` and return it; None for a path of another format."""

    def import_solution(self, path: Path, problem: Path, /) -> tuple[str, Files] | None:
        """Return the name and the files of a solution that is judged by a converted problem; None as above."""


#: The modules in the order in which they are tried.
FORMATS: tuple[ForeignFormat, ...] = (flashinfer_trace, robust_kbench, tritonbench, kernelbench)
#: The folders, next to the results, of problems and of solutions that were converted: no solution, whatever its name,
#: writes into a problem.
CONVERTED, SOLUTIONS = "converted", "converted_solutions"


def import_problem(name: str, out: Path, workloads: Path | None = None) -> str:
    """Return the task of a problem: ``name`` itself, or the folder below ``out`` with the converted foreign problem.

    Raises UsageError for a problem that cannot be judged, and for workloads of a problem that takes none.
    """
    path, parent = Path(name), out / CONVERTED
    if workloads is not None:
        folder = flashinfer_trace.import_problem(path, parent, workloads)
        if folder is None:
            raise UsageError(f"--workloads {workloads}: only for a definition of FlashInfer-Trace or SOL-ExecBench")
        return str(folder)
    folders = (foreign.import_problem(path, parent) for foreign in FORMATS)
    return str(next((folder for folder in folders if folder is not None), name))


def read_solution(path: Path, problem: Path, out: Path) -> ResolvedSolution:
    """Read a solution as ``find_solution`` does; one of a foreign format is converted to a folder below ``out``.

    problem: the folder of the task that it is judged by. Raises UsageError if the two do not belong together.
    """
    for foreign in FORMATS:
        if (converted := foreign.import_solution(path, problem)) is not None:
            name, files = converted
            folder = out / SOLUTIONS / name
            shutil.rmtree(folder, ignore_errors=True)  # of a solution of the same name with more files
            return find_solution(write_files(folder, files))
    return find_solution(path)
