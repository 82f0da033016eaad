"""Saved comparisons of contenders: read them, and tell which measured kernels are no longer today's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgspec

from greenfast.bench.comparison import Comparison
from greenfast.bench.record_schema import Benchmark
from greenfast.bench.serving_cases import GROUPS
from greenfast.device.compiler import compile_kernel
from greenfast.device.identity import code_hash
from greenfast.judge import record_io as judged
from greenfast.judge.digest import FIELD as DIGEST
from greenfast.judge.freshness import of_build, of_launch
from greenfast.judge.record_schema import SCHEMA_VERSION, BenchRecord, PhaseRecord, Record, TimedKernel
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.freshness import STALE, Freshness, worst
from greenfast.spec.kernel import KernelSource

AnyRecord: TypeAlias = "Record | BenchRecord | PhaseRecord | Benchmark"


def read_record(run: Path) -> AnyRecord:
    """The record of any run: its folder, or its record's file; shapes under the names that the task gives them today.

    Raises UsageError for anything else.
    """
    record: AnyRecord = judged.read_run(run, Record | BenchRecord | PhaseRecord | Benchmark)
    return record


def record_schema() -> dict[str, Any]:
    """The JSON Schema of a record's file, of every kind, as today's greenfast writes it."""
    schema: dict[str, Any] = msgspec.json.schema(Record | BenchRecord | PhaseRecord | Benchmark)
    for kind in get_args(Record | BenchRecord | PhaseRecord | Benchmark):
        one = schema["$defs"][kind.__name__]
        one["properties"] |= {
            "schema_version": {"const": SCHEMA_VERSION},
            DIGEST: {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "of all other fields, by SHA-256"},
        }
        one["required"] = sorted({*one["required"], "schema_version", DIGEST})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A record of greenfast", **schema}


def read_benchmark(run: Path) -> Benchmark:
    """The record of a comparison of contenders, as ``read_record`` reads it; raises UsageError for any other."""
    record = read_record(run)
    if not isinstance(record, Benchmark):
        raise UsageError(f"{run}: not a record of greenfast bench peers, operator, serving or routing")
    return record


def operator_comparison() -> Comparison:
    """What ``greenfast bench operator`` measures."""
    # By its name, as kernel families are loaded: what only reads records needs no PyTorch.
    found: Comparison = importlib.import_module("greenfast.bench.attention").operator()
    return found


def routing_comparison() -> Comparison:
    """What ``greenfast bench routing`` measures."""
    found: Comparison = importlib.import_module("greenfast.bench.routing").routing()
    return found


def serving_comparison(
    groups: Sequence[str] | None = None, *, quick: bool = False, fa3_library: str = ""
) -> Comparison:
    """What ``greenfast bench serving`` measures of these groups, all by default. Raises UsageError for unknown ones."""
    module = importlib.import_module("greenfast.bench.serving")
    found: Comparison = module.serving(groups or GROUPS, quick=quick, fa3_library=fa3_library)
    return found


def comparison_of(record: Benchmark) -> Comparison:
    """What made a record that is not of a task's own kernel, as it is today."""
    made = {"serving": serving_comparison, "routing": routing_comparison}.get(record.comparison, operator_comparison)
    return made()


def timed_kernels(comparison: Comparison) -> dict[str, TimedKernel]:
    """The kernels of a comparison that times another one than a task's own, by what each is for; compiles them.

    Needs no GPU.
    """
    wanted = comparison.kernels() if comparison.kernels else {}
    facts: dict[KernelSource, dict[str, Any]] = {}
    for source in dict.fromkeys(source for source, _ in wanted.values()):  # many shapes share one
        compiled = compile_kernel(source, Target(comparison.arch))
        facts[source] = {
            "arch": compiled.target.name,
            "options": list(compiled.options),
            "compiler": compiled.compiler,
            "kernel_hash": compiled.kernel_hash,
            "code_hash": code_hash(compiled),
        }
    return {name: TimedKernel(**facts[source], launch=launch) for name, (source, launch) in wanted.items()}


def freshness(record: AnyRecord) -> Freshness:
    """Whether a record is of today's kernels and launches, as far as this machine's compiler can tell."""
    if not isinstance(record, Benchmark) or record.side is not None:
        return judged.check_freshness(record)
    return worst(_of_kernels(record).values())


def _of_kernels(record: Benchmark) -> dict[str, Freshness]:
    kernels = comparison_of(record).kernels
    today = kernels() if kernels else {}
    if record.comparison == "serving":  # a run of some groups has the kernels of these
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
    """A serving comparison without the times of contenders one of whose kernels has changed, and those contenders.

    Where there are any, what the host takes is left out too: it is of the code around the kernels.
    """
    steps: dict[str, tuple[str, ...]] = importlib.import_module("greenfast.bench.serving_kernels").STEPS
    changed = {n.rpartition(", ")[0] for n, answer in _of_kernels(record).items() if answer.status == STALE}
    gone = [name for name, of in steps.items() if changed.intersection(of)]
    if not gone:
        return record, []
    rows = [row for row in record.rows if row.contender not in gone]
    return msgspec.structs.replace(record, rows=rows, host=[]), [c.label for c in record.contenders if c.name in gone]
