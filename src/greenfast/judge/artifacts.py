"""The JSON files of a run: build_meta.json, correctness_summary.json and perf_baseline.json."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from greenfast.judge.record_schema import CorrectnessRow, Record, Run, Side, TimingRow
from greenfast.judge.report.facts import describe_source, side_status
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import Resources

RECORD = "record.json"
REPORT = "VALIDATION_REPORT.md"
PLOT = "performance.png"
BUILD_META = "build_meta.json"
CORRECTNESS = "correctness_summary.json"
PERFORMANCE = "perf_baseline.json"

#: Gates in every row of correctness_summary.json: false if there was no output to measure, null if not judged.
_ERROR_GATES = ("max_abs_err_pass", "mean_abs_err_pass", "pct_bad_pass")

_RESOURCES = (
    *("registers", "shared_memory_bytes", "static_smem_bytes", "dynamic_smem_bytes", "stack_bytes"),
    *("spill_store_bytes", "spill_load_bytes"),
)


def record_files(folder: Path) -> list[Path]:
    """Return the record files below a folder, sorted by path. Pipes and devices are excluded: reads may block."""
    return sorted(path for path in folder.rglob(RECORD) if path.is_file())


class PerformanceFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of perf_baseline.json. If ``results`` is empty, ``pending`` is the reason."""

    results: list[TimingRow]
    task: str = ""
    variant: str = ""
    format: str = ""
    pending: str | None = None

    def require_results(self, where: str) -> list[TimingRow]:
        """Return the rows. Raises UsageError if there are none."""
        if not self.results:
            raise UsageError(f"{where}: holds no timings ({self.pending or 'none were taken'})")
        return self.results


def build_meta(run: Run, side: Side) -> dict[str, Any]:
    """Build the content of build_meta.json: toggles, compiler, resources, source tree and device."""
    builds = [
        {
            "dims": b.dims,
            "entry": b.entry,
            "kernel_hash": b.kernel_hash,
            "code_hash": b.code_hash,
            **_resources(b.resources),
            "machine_code": b.machine_code,
        }
        for b in side.builds
    ]
    first = side.builds[0] if side.builds else None
    return {
        "timestamp": run.created,
        "task": run.task,
        "variant": side.variant,
        "format": run.format,
        "build": {
            **side.toggles,
            "arch": run.arch,
            "flags": first.options if first else [],
            "compiler": first.compiler if first else "",
            "kernels": builds,
        },
        "git": run.git,
        "device": run.device,
        "environment": run.environment,
    }


def _resources(r: Resources | None) -> dict[str, int | None]:
    """Return the resources by name; None for each if the kernel's PTX was not assembled."""
    resources = {} if r is None else {**asdict(r), "shared_memory_bytes": r.smem_bytes}
    return {name: resources.get(name) for name in _RESOURCES}


def correctness_summary(run: Run, side: Side) -> dict[str, Any]:
    """Build the content of correctness_summary.json: errors and gates per (shape, seed).

    Values are None for cases that did not run. ``all_pass`` is None if such cases are the only obstacle.
    """
    results = []
    for row in side.correctness:
        error = row.error
        results.append(
            {
                "shape": row.shape,
                **row.dims,
                "seed": row.seed,
                "max_abs_err": error.max_abs_err if error else None,
                "mean_abs_err": error.mean_abs_err if error else None,
                "max_rel_err": error.max_rel_err if error else None,
                "pct_bad": error.pct_bad if error else None,
                "format_error": row.format_error,
                "kernel_error": row.kernel_error,
                "bound_ratio": row.bound_ratio,
                "inputs_digest": row.inputs_digest,
                "variant": row.variant,
                "drawn": row.drawn,
                "gates": dict.fromkeys(_ERROR_GATES, _unmeasured(row)) | row.gates,
                "pass": row.passed if row.gates else None,
                "notes": row.notes,
            }
        )
    return {
        "task": run.task,
        "variant": side.variant,
        "format": run.format,
        "results": results,
        "all_pass": {"PASS": True, "FAIL": False}.get(side_status(side)),
        "pending": _pending(run, "CORRECTNESS"),
    }


def _unmeasured(row: CorrectnessRow) -> bool | None:
    return False if row.gates and row.format_is_judged else None


def performance(run: Run, side: Side) -> dict[str, Any]:
    """Build the content of perf_baseline.json: timings per (shape, seed) and cache state, with dimensions."""
    return {
        "task": run.task,
        "variant": side.variant,
        "format": run.format,
        "results": [{**msgspec.structs.asdict(row), **row.dims} for row in side.timing],
        "pending": _explain_missing_timings(run),
    }


def side_files(run: Run, side: Side) -> dict[str, Any]:
    """Return the contents of an implementation's three files by name."""
    return {
        BUILD_META: build_meta(run, side),
        CORRECTNESS: correctness_summary(run, side),
        PERFORMANCE: performance(run, side),
    }


def _explain_missing_timings(run: Run) -> str | None:
    if isinstance(run, Record) and run.quoted is not None:
        return f"nothing was timed here; PERFORMANCE was {describe_source(run.quoted)}"
    return _pending(run, "PERFORMANCE")


def _pending(run: Run, gate: str) -> str | None:
    for result in run.gates:
        if result.gate == gate and result.status == "PENDING":
            return result.summary
    return None
