"""Check whether the kernels of a record equal today's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.comparison import Comparison
from benchmarks.records import AnyRecord, Benchmark
from benchmarks.routing import routing
from benchmarks.sdpa import operator
from benchmarks.serving import STEPS, serving
from greenfast.device.compiler import compile_kernel
from greenfast.device.identity import code_hash
from greenfast.judge.record_io import check_freshness, compare_build, compare_launch
from greenfast.judge.record_schema import TimedKernel
from greenfast.spec.arch import Target
from greenfast.spec.freshness import STALE, Freshness, worst
from greenfast.spec.kernel import KernelSource


def find_comparison(record: Benchmark) -> Comparison:
    """Return today's comparison for a record without a task's own kernel."""
    makers: dict[str, Callable[[], Comparison]] = {"serving": serving, "routing": routing}
    return makers.get(record.comparison, operator)()


def timed_kernels(comparison: Comparison) -> dict[str, TimedKernel]:
    """Compile the kernels of a comparison that does not time a task's own kernel. Needs no GPU.

    Return them by step and shape.
    """
    kernels = comparison.kernels() if comparison.kernels else {}
    facts: dict[KernelSource, dict[str, Any]] = {}
    for source in dict.fromkeys(source for source, _ in kernels.values()):  # many shapes share a kernel
        compiled = compile_kernel(source, Target(comparison.arch))
        facts[source] = {
            "arch": compiled.target.name,
            "options": list(compiled.options),
            "compiler": compiled.compiler,
            "kernel_hash": compiled.kernel_hash,
            "code_hash": code_hash(compiled),
        }
    return {name: TimedKernel(**facts[source], launch=launch) for name, (source, launch) in kernels.items()}


def freshness(record: AnyRecord) -> Freshness:
    """Return whether a record's kernels and launches equal today's, as built by this machine's compiler."""
    if not isinstance(record, Benchmark) or record.side is not None:
        return check_freshness(record)
    return worst(_check_kernels(record).values())


def _check_kernels(record: Benchmark) -> dict[str, Freshness]:
    kernels = find_comparison(record).kernels
    today = kernels() if kernels else {}
    if record.comparison == "serving":  # a run of some groups has only their kernels
        shapes = {row.shape for row in record.rows}
        today = {n: k for n, k in today.items() if n in record.kernels or n.rpartition(", ")[2] in shapes}
    answers = {
        name: Freshness(STALE, (f"{name} is {'not in the record' if name in today else 'timed no more'}",))
        for name in sorted(today.keys() ^ record.kernels.keys())
    }
    for name, then in record.kernels.items():
        if name in today:
            source, launch = today[name]
            answers[name] = worst([compare_build(name, then, source), compare_launch(name, then.launch, launch)])
    return answers


def current_part(record: Benchmark) -> tuple[Benchmark, list[str]]:
    """Remove the backends with changed kernels from a serving record; return the record and the removed labels.

    If any is removed, the host times are removed too: they measure the code around the kernels.
    """
    changed = {n.rpartition(", ")[0] for n, answer in _check_kernels(record).items() if answer.status == STALE}
    gone = [name for name, kernel_steps in STEPS.items() if changed.intersection(kernel_steps)]
    if not gone:
        return record, []
    rows = [row for row in record.rows if row.backend not in gone]
    return msgspec.structs.replace(record, rows=rows, host=[]), [c.label for c in record.backends if c.name in gone]
