"""Run a comparison: check each backend, time all of them interleaved in one process, write record and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from benchmarks.comparison import BenchCell, CheckResult, Comparison, ErrorLimits, Facts, TimingResult
from benchmarks.freshness import timed_kernels
from benchmarks.pictures import save_benchmark_plot
from benchmarks.records import AccuracyRow, Benchmark, HostRow, Row
from benchmarks.report import benchmark_report, headline
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import CANDIDATE, BuiltSide, Implementation, build_rung_implementation
from greenfast.judge.pipeline import GateRun
from greenfast.judge.record_io import PLOT, RECORD, REPORT, sealed_json
from greenfast.judge.record_schema import GateResult
from greenfast.judge.request import ProgressListener, Request
from greenfast.judge.store import check_writable, new_run_folder
from greenfast.judge.task import Variant
from greenfast.spec.errors import CompileError, MachineError, UsageError, WrongResultError, unknown

#: Time limit of one session call in seconds: the first call loads every library.
_TIMEOUT_S = 180.0
#: A backend is left out after it crashed its process on this many shapes.
_MOST_CRASHES = 2


class BenchListener(ProgressListener, Protocol):
    """Callbacks that follow a comparison's progress."""

    def cell(self, rows: Sequence[Row]) -> None:
        """Report a timed shape."""


@dataclass(frozen=True)
class BenchResult:
    """A record, and the folder that holds it with its report."""

    record: Benchmark
    folder: Path


class _WorkerSession:
    """A session in a worker process, which is replaced after a crash; counts the crashes of each backend."""

    def __init__(
        self, comparison: Comparison, start: Callable[[], Worker], limits: ErrorLimits, side: BuiltSide | None
    ) -> None:
        self._comparison, self._start, self.limits, self._side = comparison, start, limits, side
        self._crashes: dict[str, list[str]] = {}
        self._worker = start()
        facts: Facts = self._worker.call("facts", comparison.contenders)
        self.backends, self.versions = facts.backends, facts.versions
        self._missing = {c.name: c.missing for c in facts.backends}

    def close(self) -> None:
        self._worker.close()

    def checked(self, cell: BenchCell) -> dict[str, CheckResult]:
        """Open a cell, add its backends and check greenfast's. A backend that crashes gets the reason of its crash.

        Raises WrongResultError if an output of greenfast is not finite or, for a timed cell, beyond the error limits.
        """
        name = cell.shape.name
        kernel = self._side.executable(name).steps[0] if self._side else None
        broken: dict[str, CheckResult] = {}
        while True:
            self._worker.call("open", cell, kernel)
            try:
                results = {name: broken.get(name) or self._add(name, cell) for name in cell.backends}
            except _BrokenError as e:
                broken[e.backend] = CheckResult(reason=e.reason)
                self._crashes.setdefault(e.backend, []).append(e.reason)
                self._worker.close()
                self._worker = self._start()
                continue
            for own in self._comparison.own:
                if own in results:
                    self._judge(own, cell, results[own])
            return results

    def _add(self, name: str, cell: BenchCell) -> CheckResult:
        crashes = self._crashes.get(name, [])
        if self._missing[name] or len(crashes) >= _MOST_CRASHES:
            return CheckResult(reason=self._missing[name] or f"left out after {len(crashes)} crashes: {crashes[-1]}")
        try:
            result: CheckResult = self._worker.call("add", name, not cell.series)
        except WorkerError as e:
            if name in self._comparison.own:
                raise
            raise _BrokenError(name, " ".join(str(e).split())[:240]) from e
        return result

    def _judge(self, name: str, cell: BenchCell, result: CheckResult) -> None:
        where = f"{name} on {cell.shape.name} ({', '.join(f'{k}={v}' for k, v in cell.shape.dims.items())})"
        if result.reason:
            raise MachineError(f"{where}: {result.reason}")
        if not result.finite:
            raise WrongResultError(f"{where}: not every element of the output was written with a finite number")
        if cell.series:
            return
        for what, value, limit in (
            ("error", result.error, self.limits.error),
            ("kernel error", result.kernel_error, self.limits.kernel_error),
            ("the worst element over what rounding explains", result.bound_ratio, self.limits.bound_ratio),
        ):
            if limit is not None and not (value is not None and value <= limit):  # NaN is not
                raise WrongResultError(f"{where}: {what} {value}, at most {limit} is right; nothing was timed")

    def timed(self, cell: BenchCell, rounds: int | None) -> TimingResult:
        """Time the added backends. Raises WrongResultError if greenfast's timed launches wrote other bits."""
        result: TimingResult = self._worker.call("time", rounds)
        changed = [name for name in result.changed if name in self._comparison.own]
        if changed:
            raise WrongResultError(
                f"{changed[0]} on {cell.shape.name}: the timed launches wrote other bits than the checked call"
            )
        return result

    def host(self, cell: BenchCell) -> list[HostRow]:
        """Measure the host time of eager calls."""
        rows: list[HostRow] = self._worker.call("host", cell)
        return rows


class _BrokenError(Exception):
    """A backend ended its process."""

    def __init__(self, backend: str, reason: str) -> None:
        self.backend, self.reason = backend, reason


def compare(
    comparison: Comparison, request: Request, variant: Variant | None, watcher: BenchListener, *,
    shapes: Sequence[str] | None = None, grid: bool = False, rounds: int | None = None,
) -> BenchResult:  # fmt: skip
    """Measure a comparison; write record and report.

    variant: the task's own kernel, if it is a backend. shapes: names of the shapes to time. grid: time the grid only.
    Without both, all shapes are timed, and errors and host times are measured. rounds: per shape (default: by time).
    Raises UsageError for unknown shapes, MachineError without a GPU that the libraries can use, and WrongResultError
    for a wrong result of greenfast.
    """
    cells = _cells(comparison, shapes, grid)
    everything = not (shapes or grid)
    accuracy = comparison.accuracy if everything else ()
    ordinal = request.gpu
    if comparison.arch and request.target.name != comparison.arch:
        raise MachineError(
            f"benchmarks {comparison.name} times kernels for {comparison.arch}, not {request.target.name}"
        )
    parent = request.out / comparison.name
    check_writable(parent)
    built = {cell.shape.name: cell.shape for cell in (*cells, *accuracy)} if variant else {}
    request = replace(request, shapes=list(built.values()))
    run = GateRun(request, {CANDIDATE: build_rung_implementation(request.task, variant)} if variant else {}, watcher)
    limits = comparison.limits or _kernel_limits(request, run.implementations[CANDIDATE])
    side = _built(run) if variant else None
    timeout_s = max(request.timeout_s, _TIMEOUT_S)
    contest = _WorkerSession(
        comparison, lambda: Worker(ordinal, timeout_s=timeout_s, make_session=comparison.session), limits, side
    )
    steps = len(cells) + len(accuracy)
    rows: list[Row] = []
    errors: list[AccuracyRow] = []
    try:
        for step, cell in enumerate((*cells, *accuracy)):
            run.progress("PERFORMANCE")(step / steps, cell.shape.name)
            if cell.series:
                errors += [_accuracy_row(cell, name, result) for name, result in contest.checked(cell).items()]
            else:
                measured = _measure(contest, comparison, cell, rounds, request)
                watcher.cell(measured)
                rows += measured
        host = contest.host(comparison.host) if everything and comparison.host else []
    finally:
        contest.close()
    run.add(_correct(comparison, rows, limits))
    run.add(GateResult(gate="PERFORMANCE", status="PASS", summary=headline(rows, comparison.versus)))
    record = _record(comparison, run, contest, rows=rows, host=host, accuracy=errors)
    with new_run_folder(parent, run.stamp) as (work, publish):
        (work / RECORD).write_text(sealed_json(record), encoding="utf-8")
        plot = PLOT if any(row.median_us is not None and row.tflops for row in rows) else None
        if plot:
            save_benchmark_plot(record, work / plot)
        (work / REPORT).write_text(benchmark_report(record, plot=plot), encoding="utf-8")
        return BenchResult(record, publish())


def _cells(comparison: Comparison, names: Sequence[str] | None, grid: bool) -> list[BenchCell]:
    """Select the timed cells. Raises UsageError for unknown names."""
    known = {cell.shape.name: cell for cell in comparison.timed}
    if names is None:
        return [cell for cell in known.values() if cell.grid or not grid]
    for name in names:
        if name not in known:
            raise unknown(f"shape of benchmarks {comparison.name}", name, known)
    if len(set(names)) != len(names):
        raise UsageError(f"shapes {', '.join(names)}: one is named twice")
    return [known[name] for name in names]


def _kernel_limits(request: Request, kernel: Implementation) -> ErrorLimits:
    """Return the error limits of the task's own kernel."""
    gate = kernel.requirements.kernel_error or request.gates.kernel_error
    return ErrorLimits(kernel_error=gate.relative_error, bound_ratio=gate.bound_factor)


def _built(run: GateRun) -> BuiltSide:
    """Build the task's own kernel for every shape. Raises CompileError if it does not compile."""
    run.run([GATES["BUILD"]])
    (result,) = run.gates
    if result.status == "FAIL":
        raise CompileError("; ".join(result.reasons))
    return run.sides[0]


def _measure(
    contest: _WorkerSession, comparison: Comparison, cell: BenchCell, rounds: int | None, request: Request
) -> list[Row]:  # fmt: skip
    """Return a row per backend. Raises WrongResultError for a wrong result of greenfast before or after the timing."""
    checked = contest.checked(cell)
    timed = contest.timed(cell, rounds)
    l2_bytes = request.device.l2_bytes if request.device else 0
    dims = cell.shape.dims
    rows = []
    for name, result in checked.items():
        row = Row(
            shape=cell.shape.name,
            dims=dict(dims),
            grid=cell.grid,
            backend=name,
            inputs=cell.inputs,
            cache="warm" if comparison.bytes_moved(dims) <= l2_bytes else "beyond L2",
            error=result.error,
            kernel_error=result.kernel_error,
            reason=result.reason,
        )
        if name in timed.changed:
            reason = "its timed launches wrote another output than the checked call"
            row = msgspec.structs.replace(row, reason=reason)
        elif not result.reason:
            samples = timed.samples_us[name]
            p25, p50, p75 = (float(p) for p in np.percentile(samples, (25, 50, 75)))
            row = msgspec.structs.replace(
                row, median_us=p50, p25_us=p25, p75_us=p75, rounds=len(samples), calls=timed.calls[name],
                tflops=None if result.error is None else comparison.flops(dims) / p50 / 1e6, clocks=timed.clocks,
            )  # fmt: skip
        rows.append(row)
    return rows


def _accuracy_row(cell: BenchCell, name: str, result: CheckResult) -> AccuracyRow:
    assert cell.series
    return AccuracyRow(
        series=cell.series,
        inputs=cell.inputs,
        dims=dict(cell.shape.dims),
        backend=name,
        sampled=min(cell.sampled, cell.shape.dims["S"]),
        error=result.error,
        kernel_error=result.kernel_error,
        reason=result.reason,
    )


def _correct(comparison: Comparison, rows: Sequence[Row], limits: ErrorLimits) -> GateResult:
    """Return the CORRECTNESS gate of a finished run, with greenfast's largest error."""
    own = [row for row in rows if row.backend in comparison.own]
    if limits.kernel_error is None:
        what, values, limit = "error", [row.error for row in own], limits.error
    else:
        what, values, limit = "kernel error", [row.kernel_error for row in own], limits.kernel_error
    worst = max((value or 0.0 for value in values), default=0.0)
    shapes = len({row.shape for row in rows})
    summary = f"{what} at most {worst:.3g} on {shapes} shapes, {limit:g} allowed"
    return GateResult(gate="CORRECTNESS", status="PASS", summary=summary)


def _record(
    comparison: Comparison, run: GateRun, contest: _WorkerSession, *, rows: list[Row], host: list[HostRow],
    accuracy: list[AccuracyRow],
) -> Benchmark:  # fmt: skip
    facts, side = run.facts(), run.side(CANDIDATE) if run.sides else None
    facts["environment"] |= contest.versions | {c.name: c.version for c in contest.backends if c.version}
    kinds = {"normal", *(row.inputs for row in accuracy)}
    return Benchmark(
        **facts,
        clocks=_extremes([row.clocks for row in rows]),
        comparison=comparison.name,
        what=comparison.what or f"{run.request.task.config.name}: {side.variant if side else ''}",
        own=list(comparison.own),
        versus=list(comparison.versus),
        backends=contest.backends,
        rows=rows,
        host=host,
        accuracy=accuracy,
        inputs={kind: text for kind, text in comparison.inputs.items() if kind in kinds},
        side=side,
        kernels=timed_kernels(comparison),
    )


def _extremes(clocks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the minimum and maximum of each clock over the shapes."""
    by_name = {name: [c[name] for c in clocks if name in c] for name in sorted({n for c in clocks for n in c})}
    return {f"{name}_{end.__name__}": end(values) for name, values in by_name.items() for end in (min, max)}
