"""Compare two saved runs of one variant each."""

from __future__ import annotations

from pathlib import Path

from greenfast.judge.artifacts import PERFORMANCE, PerformanceFile
from greenfast.judge.record_io import resolve_aliases
from greenfast.judge.report.compare import compare_markdown
from greenfast.judge.store import read_json, write_whole
from greenfast.spec.errors import UsageError


def compare(baseline: Path, candidate: Path, *, required: float | None, out: Path) -> str:
    """Write and return the comparison of two runs (folders, or their perf_baseline.json).

    Raises UsageError for files without timings, of different tasks or formats, or timed by different methods.
    """
    files = [path / PERFORMANCE if path.is_dir() else path for path in (baseline, candidate)]
    a, b = (read_json(path, PerformanceFile, "perf_baseline.json") for path in files)
    for field, x, y in (("task", a.task, b.task), ("format", a.format, b.format)):
        if x and y and x != y:
            raise UsageError(f"the runs differ in {field}: {x} ({files[0]}) and {y} ({files[1]})")
    task = a.task or b.task
    a, b = resolve_aliases(a, task), resolve_aliases(b, task)
    text = compare_markdown(a.require_results(str(files[0])), b.require_results(str(files[1])), required=required)
    write_whole(out, text)
    return text
