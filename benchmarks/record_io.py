"""Read records, and check whether their kernels equal today's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from benchmarks.comparison import Comparison
from benchmarks.record_schema import Benchmark
from benchmarks.serving_cases import GROUPS
from greenfast.device.compiler import compile_kernel
from greenfast.device.identity import code_hash
from greenfast.judge import record_io as judged
from greenfast.judge.freshness import of_build, of_launch
from greenfast.judge.record_schema import BenchRecord, PhaseRecord, Record, TimedKernel
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.freshness import STALE, Freshness, worst
from greenfast.spec.kernel import KernelSource

AnyRecord: TypeAlias = "Record | BenchRecord | PhaseRecord | Benchmark"


def read_record(run: Path) -> AnyRecord:
    """Read the record of a run from its folder or file. Shapes get the task's current names.

    Raises UsageError for any other path.
    """
    record: AnyRecord = judged.read_run(run, Record | BenchRecord | PhaseRecord | Benchmark)
    return record


def record_schema() -> dict[str, Any]:
    """Return the JSON Schema of record files of all kinds, those of the judge included."""
    return judged.record_schema(Record | BenchRecord | PhaseRecord | Benchmark)


def read_benchmark(run: Path) -> Benchmark:
    """Read the record of a comparison. Raises UsageError for any other record."""
    record = read_record(run)
    if not isinstance(record, Benchmark):
        raise UsageError(f"{run}: not a record of python -m benchmarks peers, operator, serving or routing")
    return record


def operator_comparison() -> Comparison:
    """Return the comparison of ``python -m benchmarks sdpa``."""
    # Imported by name: reading records needs no PyTorch.
    comparison: Comparison = importlib.import_module("benchmarks.attention").operator()
    return comparison


def routing_comparison() -> Comparison:
    """Return the comparison of ``python -m benchmarks routing``."""
    comparison: Comparison = importlib.import_module("benchmarks.routing").routing()
    return comparison


def serving_comparison(
    groups: Sequence[str] | None = None, *, quick: bool = False, fa3_library: str = ""
) -> Comparison:
    """Return the comparison of ``python -m benchmarks serving`` for some groups, by default all.

    Raises UsageError for unknown groups.
    """
    module = importlib.import_module("benchmarks.serving")
    comparison: Comparison = module.serving(groups or GROUPS, quick=quick, fa3_library=fa3_library)
    return comparison


def find_comparison(record: Benchmark) -> Comparison:
    """Return today's comparison for a record without a task's own kernel."""
    make = {"serving": serving_comparison, "routing": routing_comparison}.get(record.comparison, operator_comparison)
    return make()


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
        return judged.check_freshness(record)
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
            answers[name] = worst([of_build(name, then, source), of_launch(name, then.launch, launch)])
    return answers


def current_part(record: Benchmark) -> tuple[Benchmark, list[str]]:
    """Remove the backends with changed kernels from a serving record; return the record and the removed labels.

    If any is removed, the host times are removed too: they measure the code around the kernels.
    """
    steps: dict[str, tuple[str, ...]] = importlib.import_module("benchmarks.serving_kernels").STEPS
    changed = {n.rpartition(", ")[0] for n, answer in _check_kernels(record).items() if answer.status == STALE}
    gone = [name for name, kernel_steps in steps.items() if changed.intersection(kernel_steps)]
    if not gone:
        return record, []
    rows = [row for row in record.rows if row.backend not in gone]
    return msgspec.structs.replace(record, rows=rows, host=[]), [c.label for c in record.backends if c.name in gone]
