"""Timing of one implementation after BUILD, RESOURCES and CORRECTNESS. An incorrect kernel is not timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from greenfast.device.worker import WorkerError
from greenfast.judge.artifacts import RECORD, REPORT, side_files
from greenfast.judge.digest import sealed_json
from greenfast.judge.gates.performance import time_sides, timing_rows
from greenfast.judge.gates.sides import CANDIDATE
from greenfast.judge.implementation import Implementation
from greenfast.judge.pipeline import GateRun
from greenfast.judge.record_schema import BenchRecord, GateResult, TimingRow
from greenfast.judge.report.markdown import bench_report
from greenfast.judge.request import ProgressListener, Request
from greenfast.judge.store import check_writable, new_run_folder, to_json
from greenfast.judge.timing.interleaved import WARM
from greenfast.judge.variant import Variant


@dataclass(frozen=True)
class BenchOutcome:
    """A record, and the folder with its file and the three JSON files."""

    record: BenchRecord
    folder: Path


def bench(request: Request, variant: Implementation | Variant, observer: ProgressListener) -> BenchOutcome:
    """Check and time one implementation and write its artifacts. Raises MachineError for an unwritable folder."""
    parent = request.out / request.task.config.defaults.results
    check_writable(parent)
    run = GateRun(request, {CANDIDATE: variant}, observer)
    rows: list[TimingRow] = []
    clocks: dict[str, float] = {}
    order_seed: int | None = None
    if run.until_correct():
        rows, clocks, order_seed = _time(run)
    record = BenchRecord(**run.facts(), clocks=clocks, order_seed=order_seed, side=run.side(CANDIDATE, rows))
    with new_run_folder(parent, run.stamp) as (work, publish):
        (work / RECORD).write_text(sealed_json(record), encoding="utf-8")
        (work / REPORT).write_text(bench_report(record), encoding="utf-8")
        for name, content in side_files(record, record.side).items():
            (work / name).write_text(to_json(content), encoding="utf-8")
        return BenchOutcome(record, publish())


def _time(run: GateRun) -> tuple[list[TimingRow], dict[str, float], int | None]:
    """Time the implementation. PERFORMANCE passes if the timed launches computed the checked outputs.

    Return the timing rows, the observed clocks and the seed of the random order.
    """
    request = run.request
    try:
        measurement, floors = time_sides(
            run.sides,
            request.task.problem,
            request.shapes,
            request.seeds,
            request.format,
            request.timing,
            run.correctness.digests,
            request.make_worker,
            run.progress("PERFORMANCE"),
            device=request.device,
        )
    except WorkerError as e:
        run.add(GateResult(gate="PERFORMANCE", status="FAIL", summary=e.fault, reasons=[e.fault]))
        return [], {}, None
    rows = timing_rows(measurement, CANDIDATE, request.shapes, request.timing, floors, run.sides[0])
    warm = "; ".join(f"{r.shape} seed {r.seed} {r.p50_us:.2f} µs" for r in rows if r.cache == WARM)
    run.add(GateResult(gate="PERFORMANCE", status="PASS", summary=f"timed, p50 with warm L2: {warm}"))
    return rows, measurement.clocks, measurement.order_seed
