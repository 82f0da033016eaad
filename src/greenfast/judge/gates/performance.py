"""PERFORMANCE: the candidate's speedup over the baseline, with its interval, and an A/A run of the same protocol."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from greenfast.device.worker import WorkerError
from greenfast.judge.implementation import BASELINE, CANDIDATE
from greenfast.judge.pipeline import Gate, GateRun, PerformanceOutcome, conclude_checks, pending
from greenfast.judge.record_schema import CachedTiming, Claim, GateResult, Record, Run, SpeedupRow, Status, TimingRow
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.facts import cached_section, describe_source, speedup_table
from greenfast.judge.report.formatting import Section
from greenfast.judge.request import timed_seeds
from greenfast.judge.task import Shape, Timing
from greenfast.judge.timing.estimators import (
    AGAIN,
    MIN_PROCESSES,
    Interval,
    speedup_row,
    summarize,
    verdict,
)
from greenfast.judge.timing.interleaved import COLD, METHOD, WARM, Cell, measure
from greenfast.spec.limits import compute_floor
from greenfast.spec.problem import least_work

NOT_CORRECT = "not asked: a kernel that is not correct is not timed"
NOT_DECIDED = "not asked: only kernels that passed CORRECTNESS are timed"
_OTHER_FIRST = "its first launch in a process wrote other bits than the checked ones"


def draw_order_seed() -> int:
    """Draw an unpredictable seed of 53 bits, so that JSON readers represent it exactly."""
    return secrets.randbits(53)


def time_sides(run: GateRun, timing: Timing, *, again: bool = False) -> PerformanceOutcome:
    """Time all sides of a run, and with ``again`` the first one twice (A/A). Return the rows by role and ``AGAIN``.

    Timed are the shapes that all sides support, on the cases that passed CORRECTNESS.
    Raises WorkerError if a launch wrote different bits, wrote outside of its outputs, crashed or hung, and for a time
    below the floor.
    """
    request, problem = run.request, run.request.task.problem
    shapes, seeds = list_timed_shapes(run), timed_seeds(request.seeds)
    cells = [
        Cell(shape.name, {n: problem.make_case(shape.dims, n, request.format) for n in seeds}, request.seeds)
        for shape in shapes
    ]
    sides = {side.role: side for side in run.sides} | ({AGAIN: run.sides[0]} if again else {})
    kernels = {label: {s.name: side.executable(s.name) for s in shapes} for label, side in sides.items()}
    progress = run.progress("PERFORMANCE")
    result = measure(kernels, cells, timing, request.make_worker, progress, order_seed=draw_order_seed())
    for (label, shape_name, seed), first_digests in result.digests.items():
        if set(first_digests) != {run.correctness.digests[sides[label].role, shape_name, seed]}:
            raise WorkerError(f"{label} {shape_name} seed {seed}: {_OTHER_FIRST}")
    floors = {
        (shape.name, cache): compute_floor(
            request.device, least_work(problem, shape.dims), _written_bytes(cell), cold=cache == COLD
        )
        for shape, cell in zip(shapes, cells, strict=True)
        for cache in (WARM, COLD)
    }
    for (label, shape_name, seed, cache), timed in result.timed.items():
        fastest = min((us for process in timed.medians for us in process), default=float("inf"))
        floor = floors[shape_name, cache]
        if fastest < floor.us:
            raise WorkerError(
                f"{label} {shape_name} seed {seed}, {cache} L2: {fastest:.3g} µs, but the device cannot do it under "
                f"{floor}: the measurement or the kernel is wrong"
            )
    rows: dict[str, list[TimingRow]] = {label: [] for label in sides}
    dims = {shape.name: dict(shape.dims) for shape in shapes}
    for (label, shape_name, seed, cache), timed in result.timed.items():
        if timed.samples:  # else all blocks were discarded
            row = TimingRow(
                shape=shape_name,
                dims=dims[shape_name],
                seed=seed,
                method=METHOD,
                cache=cache,
                warmup_iters=timing.warmup_iters,
                timed_iters=len(timed.samples),
                discarded_iters=timed.discarded,
                block_medians_us=[[round(t, 3) for t in process] for process in timed.medians],
                block_mhz=timed.read("sm_mhz"),
                block_watts=[[round(w, 1) for w in process] for process in timed.read("power_w")],
                floor=str(floors[shape_name, cache]),
                function_us=round(sides[label].programs[shape_name].program.function_us, 3),
                **summarize(timed.samples),
            )
            rows[label].append(row)
    return PerformanceOutcome(rows, clocks=result.clocks, order_seed=result.order_seed)


def list_timed_shapes(run: GateRun) -> list[Shape]:
    """Return the shapes of a run's request that all its sides support."""
    return [shape for shape in run.request.shapes if all(shape.name in side.programs for side in run.sides)]


def _written_bytes(cell: Cell) -> int:
    """Return the bytes that a launch must write, for the smallest case."""
    return min(
        sum(spec.nbytes for name, spec in case.outputs.items() if not spec.zeros and name not in case.inputs)
        for case in cell.cases.values()
    )


def gated_shapes(shapes: Sequence[Shape], timing: Timing) -> list[str]:
    """Return the shapes that decide: ``timing.gate_shapes``, or all if no such shape is timed."""
    return [s.name for s in shapes if s.name in timing.gate_shapes] or [s.name for s in shapes]


def find_obstacle(run: GateRun) -> str | None:
    """Return the reason why a run's implementations may not be timed, or None if they may."""
    obstacle = run.cannot_run()
    status = run.status("CORRECTNESS")
    if obstacle or status == "PASS":
        return obstacle
    return NOT_CORRECT if status == "FAIL" else NOT_DECIDED


def _check(run: GateRun) -> GateResult:
    """Measure the speedup per shape; the gated shapes (timing.gate_shapes, else all) decide, warm.

    All gated shapes must be FAST, so no correction for several shapes is needed (an intersection-union test keeps its
    level). An INCONCLUSIVE result is measured once more, with twice the processes, before it is reported.
    """
    request, timing = run.request, run.request.timing
    if obstacle := find_obstacle(run):
        return pending("PERFORMANCE", obstacle)
    if reason := request.cannot_time():
        return run.reuse_timing(run, reason)
    if timing.processes < MIN_PROCESSES:
        return _fail(f"{timing.processes} process(es): a claim needs at least {MIN_PROCESSES}")
    shapes = list_timed_shapes(run)
    gated = gated_shapes(shapes, timing)
    claim = Claim(confidence=timing.confidence, required=run.required_speedup or 0.0, gated=gated)
    names = [shape.name for shape in shapes]
    try:
        for _ in range(2):
            timed = time_sides(run, timing, again=True)
            timed.speedups = _test_claim(claim, names, *(timed.rows[role] for role in (BASELINE, CANDIDATE, AGAIN)))
            if not any(row.gated and row.verdict == "INCONCLUSIVE" for row in timed.speedups):
                break
            timing = msgspec.structs.replace(
                timing, processes=2 * timing.processes, blocks=2 * timing.blocks, timed_iters=2 * timing.timed_iters
            )
    except (WorkerError, ValueError) as e:  # ValueError: too few blocks remain
        return _fail(e.fault if isinstance(e, WorkerError) else str(e))
    run.timed = timed
    return judge(timed.speedups)


def _fail(reason: str) -> GateResult:
    return GateResult(gate="PERFORMANCE", status="FAIL", summary=reason, reasons=[reason])


def _test_claim(
    claim: Claim,
    shapes: Iterable[str],
    baseline: Sequence[TimingRow],
    candidate: Sequence[TimingRow],
    again: Sequence[TimingRow],
) -> list[SpeedupRow]:
    """Return the speedups of the shapes for both cache states. Raises ValueError as ``speedup_row``."""
    return [speedup_row(baseline, candidate, again, shape, cache, claim) for shape in shapes for cache in (WARM, COLD)]


def judge(speedups: Sequence[SpeedupRow]) -> GateResult:
    """Return PASS if every gated row is FAST. A baseline with a slow replay makes the gate unchecked."""
    checks: list[tuple[str, str, str, Status]] = []
    reasons = []
    summaries = []
    for row in speedups:
        if not row.gated:
            continue
        target = f">= {row.required:g}x" if row.required else "faster than the noise"
        text = f"{row.speedup:.3f}x [{row.ci_low:.3f}, {row.ci_high:.3f}], {row.verdict}"
        is_fast = row.verdict == "FAST"
        checks.append((f"{row.shape}, {row.cache} L2", target, text, "PASS" if is_fast else "FAIL"))
        summaries.append(f"{row.shape} {text}")
        if not is_fast:
            reasons.append(f"{row.shape}: {text}; required {target}, noise floor {100 * row.noise_floor:.2f} %")
    if not summaries:
        reasons.append("no shape decides: none is gated")
    return GateResult(
        gate="PERFORMANCE",
        status="FAIL" if reasons else "PASS",
        summary="; ".join(summaries or reasons),
        reasons=reasons,
        checks=checks,
        unchecked=[f"{row.shape}: {row.slow_replay}" for row in speedups if row.gated and row.slow_replay],
    )


def build_cached_performance(quoted: CachedTiming) -> GateResult:
    """Build the PERFORMANCE result from cached speedups. Each line names the record that they come from."""
    result = judge(quoted.speedups)
    source = describe_source(quoted)
    return msgspec.structs.replace(
        result,
        summary=f"{source}, not measured here: {result.summary}",
        reasons=[f"{reason} ({source})" for reason in result.reasons],
        checks=[(f"{check}, quoted", required, actual, status) for check, required, actual, status in result.checks],
    )


def find_claim(speedups: Sequence[SpeedupRow]) -> Claim | None:
    """Return the claim that speedups test; None if there are none."""
    if not speedups:
        return None
    gated = [row.shape for row in speedups if row.gated]
    return Claim(confidence=speedups[0].confidence, required=speedups[0].required, gated=gated)


def compute_speedups(record: Record) -> list[SpeedupRow]:
    """Return the speedups that follow from a record's timings and its claim. Raises ValueError as ``speedup_row``."""
    claim = record.claim or find_claim(record.speedups)
    if claim is None:
        return []
    shapes = dict.fromkeys(row.shape for row in record.baseline.timing)
    return _test_claim(claim, shapes, record.baseline.timing, record.candidate.timing, record.baseline_again)


def judge_again(row: SpeedupRow, required: float, gated: bool) -> SpeedupRow:
    """Return the row with a requirement, and the verdict that follows from its interval."""
    interval = Interval(row.speedup, row.ci_low, row.ci_high)
    new_verdict = verdict(interval, noise_floor=row.noise_floor, required=required)
    return msgspec.structs.replace(row, required=required, verdict=new_verdict, gated=gated and row.cache == WARM)


def _conclude(record: Run, result: GateResult) -> GateResult:
    """Judge the record's speedups, or its cached ones. Without any, the gate did not pass."""
    if not isinstance(record, Record):
        return conclude_checks(result)
    if record.speedups:
        return judge(record.speedups)
    if record.quoted is not None:
        return build_cached_performance(record.quoted)
    if result.status == "PASS":
        return pending("PERFORMANCE", "there are no speedups")
    return conclude_checks(result)


def _list_sections(record: Run, plot: str | None) -> list[Section]:
    outcome = formatting.without_html(facts.gate_line(record, "PERFORMANCE"))
    if not isinstance(record, Record):
        return [Section("Timing", list(_timings(record)) or [outcome])]
    if record.quoted is not None:
        return [Section("Performance", [outcome, cached_section(record.quoted)])]
    figure = [f"![block medians and speedups]({plot})"] if plot else []
    return [Section("Performance", [*figure, *_speedups(record), *_timings(record)] or [outcome])]


def _speedups(record: Record) -> Iterator[str]:
    if record.speedups:
        yield speedup_table(record.speedups)
    elif record.baseline.timing or record.candidate.timing:
        yield formatting.without_html(f"Speedup: {facts.gate_line(record, 'PERFORMANCE')}")


def _timings(record: Run) -> Iterator[str]:
    rows = [
        (
            name,
            row.shape,
            str(row.seed),
            row.method,
            row.cache,
            *(formatting.micros(us) for us in (row.p50_us, row.p90_us, row.mean_us, row.std_us)),
            formatting.percent(row.std_us / row.mean_us) if row.mean_us else formatting.NONE,
            f"{row.iters_per_sec:.0f}",
            f"{row.timed_iters} after {row.warmup_iters}, {row.discarded_iters} discarded",
        )
        for name, side in record.sides()
        for row in side.timing
    ]
    if rows:
        numbers = ("p50 µs", "p90 µs", "mean µs", "std µs", "std / mean", "per second")
        header = ("side", "shape", "seed", "method", "cache", *numbers, "iterations")
        yield formatting.table(header, rows, right=numbers)


GATE = Gate(
    "PERFORMANCE",
    exit_code=14,
    after="CORRECTNESS",
    check=_check,
    conclude=_conclude,
    sections=_list_sections,
    runs_kernels=True,
)
