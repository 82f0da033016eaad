"""PERFORMANCE on a machine without a GPU: cached timings from an earlier record of the same kernels.

A record is reused only if everything that affects a time is equal: machine code and launches of both implementations,
compiler, target, format, shapes with dimensions and inputs, and the timing protocol. Its gates must have passed, except
PERFORMANCE: a failed PERFORMANCE is reused too. The age does not matter; the report shows the date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from greenfast.judge.gates.performance import build_cached_performance, gated_shapes, judge_again
from greenfast.judge.implementation import BASELINE, CANDIDATE
from greenfast.judge.pipeline import GateRun, pending
from greenfast.judge.record_io import (
    RECORD,
    StoredRecord,
    check_freshness,
    compare_build,
    compare_launch,
)
from greenfast.judge.record_schema import FIRST_GATES, CachedTiming, GateResult, Record, Side, TimingRow
from greenfast.judge.request import Request
from greenfast.judge.task import Timing
from greenfast.judge.timing.interleaved import METHOD, WARM
from greenfast.spec.arch import Target
from greenfast.spec.freshness import CURRENT, STALE, worst
from greenfast.spec.problem import NORMAL, build_case


def use_recorded_target(request: Request, kept: Sequence[StoredRecord], baseline: str, candidate: str) -> Request:
    """Return the request for the target of the newest record that compares the two, as its timings can be reused.

    If no record compares the two, or if kernels cannot run, return the request unchanged.
    """
    if not kept or request.cannot_run() is not None:
        return request
    wanted = (request.task.config.name, request.format, baseline, candidate)
    records = [
        k.record
        for k in kept
        if (k.record.task, k.record.format, k.record.baseline.variant, k.record.candidate.variant) == wanted
    ]
    if not records:
        return request
    newest = max(records, key=lambda record: record.created)
    return replace(request, target=Target.parse(newest.arch))


def reuse_cached_timing(run: GateRun, kept: Sequence[StoredRecord], reason: str) -> GateResult:
    """Return PERFORMANCE from the newest matching record, else PENDING with the mismatches of the closest record.

    run: a run that passed CORRECTNESS; receives the timings as ``quoted``, and as ``quote_completes`` whether their
        record covers the cases that the run skips. reason: why this machine cannot time.
    """
    request = run.request
    same_task = [k for k in kept if (k.record.task, k.record.format) == (request.task.config.name, request.format)]
    checked = [(k, find_mismatches(k.record, run)) for k in same_task]
    matching = [k for k, mismatches in checked if not mismatches]
    if matching:
        newest = max(matching, key=lambda k: k.record.created)
        run.quoted, run.quote_completes = _quote(newest, run), covers_missing_cases(newest.record, request)
        return build_cached_performance(run.quoted)
    names = [run.implementations[role].variant.name for role in (BASELINE, CANDIDATE)]
    same_names = [(k, m) for k, m in checked if [k.record.baseline.variant, k.record.candidate.variant] == names]
    if same_names:
        newest_first = sorted(same_names, key=lambda pair: pair[0].record.created, reverse=True)
        closest, (first, *others) = min(newest_first, key=lambda pair: len(pair[1]))
        more = f" (and {len(others)} more)" if others else ""
        path = closest.path.removesuffix(f"/{RECORD}")
        reason += f"; the record of {closest.record.created[:10]} ({path}) {first}{more}"
    elif kept:
        reason += f"; none of {len(kept)} kept records compares {names[0]} with {names[1]}"
    return pending("PERFORMANCE", reason)


def covers_missing_cases(record: Record, request: Request) -> bool:
    """Return True if a kept record covers the cases of the full check plan that this run skips.

    The record must have the full plan with every check, all shapes and at least as many seeds as the task has today.
    Its kernels and launches must be today's. For a solution, its timed inputs must have been secret too, because a
    solution could hold precomputed answers.
    """
    plan = request.check_plan
    if record.exam is None or not record.exam.complete or plan is None or not plan.secret:
        return False
    if any(gate.unchecked for gate in record.gates):
        return False
    config = request.task.config
    timed = {row.seed for row in record.candidate.timing}
    if record.candidate.solution is not None and record.exam.seed not in timed:
        return False
    seeds_by_dims: dict[str, set[int]] = {}
    for row in record.candidate.correctness:
        if row.variant == NORMAL:
            seeds_by_dims.setdefault(str(sorted(row.dims.items())), set()).add(row.seed)
    num_seeds = len(config.seeds)
    is_full = all(
        len(seeds_by_dims.get(str(sorted(shape.dims.items())), ())) >= num_seeds for shape in plan.required_shapes
    )
    return is_full and check_freshness(record).status == CURRENT


def _quote(kept: StoredRecord, run: GateRun) -> CachedTiming:
    record, request = kept.record, run.request
    assert record.device is not None
    gated = gated_shapes(request.shapes, request.timing)
    names = {shape.name for shape in request.shapes}
    rows = [
        judge_again(row, run.required_speedup or 0.0, row.shape in gated)
        for row in record.speedups
        if row.shape in names
    ]
    return CachedTiming(
        path=kept.path,
        sha256=kept.sha256,
        created=record.created,
        git=record.git,
        device=record.device,
        command=record.command,
        speedups=rows,
    )


def find_mismatches(record: Record, run: GateRun) -> list[str]:
    """Return the reasons why a record's timings do not hold for this run; empty if they do.

    Each reason is a predicate that follows the record's name, such as "did not time b1_h8_s512_d64".
    """
    request = run.request
    mismatches = []
    if record.arch != request.target.name:
        mismatches.append(f"is of {record.arch}, not {request.target.name}")
    for role, side in ((BASELINE, record.baseline), (CANDIDATE, record.candidate)):
        mismatches += [text for text in _compare_kernels(role, side, run) if text not in mismatches]
    # Only the gates that the record lists: a gate that was added later must not invalidate it.
    listed = dict.fromkeys([*FIRST_GATES, *(gate.gate for gate in record.gates)])
    failed = [gate for gate in listed if gate != "PERFORMANCE" and record.gate_status(gate) != "PASS"]
    if failed:
        mismatches.append(f"did not pass {', '.join(failed)}")
    if not mismatches:  # Inputs are compared last, because this is slow.
        mismatches += _compare_inputs(record, run)
    if not mismatches:
        mismatches += _compare_timing(record, run)
        mismatches += _compare_verdicts(record, run)
    return mismatches


def _compare_kernels(role: str, side: Side, run: GateRun) -> list[str]:
    built = run.built(role)
    assert built is not None
    dims = {shape.name: shape.dims for shape in run.request.shapes}
    timed = {row.shape for row in side.timing}
    mismatches = []
    launches = {
        name: launched
        for shape, program in built.programs.items()
        if shape in timed  # _compare_inputs reports the shapes that were not timed.
        for name, launched in program.name_launches(shape, dims[shape]).items()
    }
    for name, (kernel, facts) in launches.items():
        build = next((build for build in side.builds if name in build.launches), None)
        if build is None:
            mismatches.append(f"does not name the {role} kernel that {name} ran")
        elif build.arch == kernel.target.name:
            label = f"the {role} kernel at {name}"
            freshness = worst(
                (
                    compare_build(label, build, kernel.source, kernel),
                    compare_launch(label, build.launches[name], facts),
                )
            )
            if freshness.status != CURRENT:
                state = "is stale" if freshness.status == STALE else "cannot be compared"
                mismatches.append(f"{state}: {freshness.reasons[0]}")
    return list(dict.fromkeys(mismatches))


def _compare_inputs(record: Record, run: GateRun) -> list[str]:
    """Compare the timed shapes and inputs with this run's. The inputs are made again from the record's seeds."""
    mismatches: dict[str, None] = {}
    request = run.request
    digests: dict[tuple[str, int], str] = {}
    for side in (record.baseline, record.candidate):
        recorded = {(row.shape, row.seed): row for row in side.correctness if row.variant == NORMAL}
        for shape in request.shapes:
            seeds = sorted({row.seed for row in side.timing if row.shape == shape.name})
            rows = [recorded.get((shape.name, seed)) for seed in seeds]
            if not rows or None in rows:
                mismatches[f"did not time {shape.name}"] = None
            for row in rows:
                if row is None:
                    continue
                key = shape.name, row.seed
                if key not in digests and row.dims == shape.dims and not mismatches:
                    digests[key] = build_case(request.task.problem, shape.dims, row.seed, request.format).digest
                if row.dims != shape.dims or digests.get(key, row.inputs_digest) != row.inputs_digest:
                    mismatches[f"had other inputs at {shape.name} seed {row.seed}"] = None
    return list(mismatches)


def _compare_timing(record: Record, run: GateRun) -> list[str]:
    timing = run.request.timing
    names = {shape.name for shape in run.request.shapes}
    rows = [row for side in (record.baseline, record.candidate) for row in side.timing if row.shape in names]
    speedups = [row for row in record.speedups if row.shape in names]
    has_protocol = all(any(_has_protocol(row, timing, repeats) for repeats in (1, 2)) for row in rows)
    if not has_protocol or any(row.confidence != timing.confidence for row in speedups):
        return ["was timed otherwise (method, launches, processes, blocks or confidence)"]
    return []


def _has_protocol(row: TimingRow, timing: Timing, repeats: int) -> bool:
    """Return True if the row has this protocol. repeats: 2 if an inconclusive measurement was repeated."""
    blocks = sum(len(process) for process in row.block_medians_us)
    return (
        (row.method, row.warmup_iters) == (METHOD, timing.warmup_iters)
        and row.timed_iters + row.discarded_iters == repeats * timing.timed_iters
        and len(row.block_medians_us) == repeats * timing.processes
        and (blocks == repeats * timing.blocks or (row.discarded_iters > 0 and blocks < repeats * timing.blocks))
    )


def _compare_verdicts(record: Record, run: GateRun) -> list[str]:
    """Check that the shapes that decide here were gated in the record, and that no verdict is inconclusive.

    Other verdicts were one of many in the record, so they have no valid confidence.
    """
    mismatches, required = [], run.required_speedup
    for shape in gated_shapes(run.request.shapes, run.request.timing):
        row = next((r for r in record.speedups if (r.shape, r.cache) == (shape, WARM)), None)
        if row is None or not row.gated:
            mismatches.append(f"did not gate {shape}")
        elif row.required != (required or 0.0) and judge_again(row, required or 0.0, True).verdict == "INCONCLUSIVE":
            mismatches.append(f"does not decide whether {shape} reaches {required or 1:g}x")
    return mismatches
