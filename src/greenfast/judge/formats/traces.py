"""Conversion of a record to traces of FlashInfer-Trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from greenfast.judge.formats.converted import DEFINITION, WORKLOADS
from greenfast.judge.formats.flashinfer_trace import Definition, Workload, read_definition, read_workloads
from greenfast.judge.record_schema import CorrectnessRow, Record, TimingRow
from greenfast.judge.store import write_whole
from greenfast.judge.timing.interleaved import COLD


def write_traces(file: Path, record: Record, problem: Path) -> int:
    """Write a record as FlashInfer-Trace's JSONL. Return the number of traces."""
    definition, workloads = read_definition(problem / DEFINITION), read_workloads(problem / WORKLOADS)
    traces = build_traces(record, definition, workloads)
    write_whole(file, "".join(json.dumps(trace) + "\n" for trace in traces))
    return len(traces)


def build_traces(record: Record, definition: Definition, workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    """Return one trace per workload of the record. A correct workload without times has none: PASSED needs times.

    Times are medians with a cold L2 cache, as in FlashInfer-Bench. ``correctness.extra`` and the log contain the
    decision, the interval of the speedup and its noise floor, because the format has no fields for them.
    """
    traces = []
    for number, workload in enumerate(workloads, 1):
        rows = [row for row in record.candidate.correctness if row.dims.get("workload") == number]
        evaluation = _evaluation(record, rows)
        if evaluation is not None:
            traces.append(
                {
                    "definition": definition.name,
                    "workload": msgspec.to_builtins(workload),
                    "solution": record.candidate.variant,
                    "evaluation": evaluation,
                }
            )
    return traces


def _evaluation(record: Record, rows: Sequence[CorrectnessRow]) -> dict[str, Any] | None:
    """Return the evaluation of a workload's rows, one row per seed; None if there is no verdict."""
    if record.gate_status("BUILD") == "FAIL":
        return _base(record, "COMPILE_ERROR")
    if not rows:
        return None
    if any(row.error is None for row in rows):
        text = " ".join(note for row in rows for note in row.notes)
        return _base(record, "TIMEOUT" if text.startswith("hang") else "RUNTIME_ERROR", text)
    correctness = {
        "max_relative_error": max(row.error.max_rel_err for row in rows if row.error),
        "max_absolute_error": max(row.error.max_abs_err for row in rows if row.error),
        "extra": {"seeds": [row.seed for row in rows], "decision": record.decision},
    }
    if not all(row.passed for row in rows):
        notes = "; ".join(note for row in rows for note in row.notes)
        return {**_base(record, "INCORRECT_NUMERICAL", notes), "correctness": correctness}
    shape = rows[0].shape
    times = [_cold_p50(side.timing, shape) for side in (record.baseline, record.candidate)]
    speedup = next((row for row in record.speedups if (row.shape, row.cache) == (shape, COLD)), None)
    if None in times or speedup is None:
        return None
    before, after = (float(t) / 1e3 for t in times if t is not None)
    interval = f"speedup {speedup.speedup} [{speedup.ci_low}, {speedup.ci_high}], noise floor {speedup.noise_floor}"
    return {
        **_base(record, "PASSED", f"{record.decision}; {interval}"),
        "correctness": correctness,
        "performance": {"latency_ms": after, "reference_latency_ms": before, "speedup_factor": speedup.speedup},
    }


def _cold_p50(rows: Sequence[TimingRow], shape: str) -> float | None:
    times = [row.p50_us for row in rows if (row.shape, row.cache) == (shape, COLD)]
    return sum(times) / len(times) if times else None


def _base(record: Record, status: str, log: str = "") -> dict[str, Any]:
    hardware = record.device.name if record.device else "none"
    libs = {**record.environment, "greenfast": record.package_version}
    return {
        "status": status,
        "environment": {"hardware": hardware.replace(" ", "_"), "libs": libs},
        "timestamp": record.created,
        "log": log,
        "correctness": None,
        "performance": None,
    }
