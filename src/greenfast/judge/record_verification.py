"""Verification of a record: recompute its conclusions from its measurements whenever it is read.

- Block medians give each speedup with its interval, noise floor and verdict, the range of the p50, and PERFORMANCE.
- The numbers and limits of each correctness row give its gates.
- The builds give the rows of RESOURCES and the counts of EVIDENCE.
- The gates give the decision with its reasons.

A record does not contain single launches (for p50, p90, mean and deviation), outputs, machine code and the task's
requirements at the time of the run. So verification detects changed figures, verdicts and decisions, but not invented
measurements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from greenfast.judge.decision import decide
from greenfast.judge.error_metrics import relative_error_factor
from greenfast.judge.gates.performance import build_cached_performance, judge
from greenfast.judge.record_schema import (
    FIRST_GATES,
    BenchRecord,
    Build,
    CorrectnessRow,
    GateResult,
    Histogram,
    Limits,
    Record,
    Run,
    SpeedupRow,
    TimingRow,
)
from greenfast.judge.timing.estimators import Interval, verdict
from greenfast.judge.timing.interleaved import WARM
from greenfast.judge.timing.speedup import speedup_row

#: Tolerance between a stored and a recomputed figure: the last digit may differ between processors.
_LAST_DIGIT = 1.1e-4
#: Tolerance of times in microseconds, which are rounded to a thousandth.
_LAST_DIGITS_US = 1.1e-3
#: Relative tolerance of a floating-point sum.
_ROUNDING = 1e-9
_LIMIT = re.compile(r"(<=|>=|<|>)?\s*([-+.\deE]+)(?: \(.*\))?")


class Mismatch(NamedTuple):
    """A field of a record, its stored value, and the value recomputed from the other fields."""

    field: str
    stored: Any
    recomputed: Any


def verify_record(record: Run) -> Iterator[Mismatch]:
    """Yield the mismatches between stored and recomputed conclusions, in order of their dependencies."""
    for role, side in record.sides():
        for i, row in enumerate(side.correctness):
            yield from _verify_correctness_row(f"{role}.correctness[{i}]", row, side.limits.get(row.shape))
    for i, gate in enumerate(record.gates):
        yield from _verify_gate(f"gates[{i}] ({gate.gate})", gate)
    if record.schema_version > 1:
        yield from _verify_builds(record)
    yield from _verify_correctness_gate(record)
    if isinstance(record, Record):
        yield from _verify_speedups(record)
        yield from _verify_cached_timing(record)
        yield from _verify_decision(record)
    for role, side in record.sides():
        for i, timing in enumerate(side.timing):
            yield from _verify_timing(f"{role}.timing[{i}] ({timing.shape}, {timing.cache} L2)", timing)


def _unless(held: bool, field: str, stored: Any, recomputed: Any) -> Iterator[Mismatch]:
    if not held:
        yield Mismatch(field, stored, recomputed)


def _verify_correctness_row(field: str, row: CorrectnessRow, limits: Limits | None) -> Iterator[Mismatch]:
    where = f"{field} ({row.shape} seed {row.seed})"
    for name, held in _compute_gates(row, limits).items():
        if name in row.gates:
            yield from _unless(row.gates[name] == held, f"{where}.gates.{name}", row.gates[name], held)
    for name in ("error", "kernel_error"):
        if (error := getattr(row, name)) is not None:
            held = error.mean_abs_err <= error.max_abs_err * (1 + _ROUNDING)
            yield from _unless(held, f"{where}.{name}.mean_abs_err", error.mean_abs_err, f"<= {error.max_abs_err}")
    if row.kernel_error is not None and row.error_histogram is not None:
        low, high = _find_top_bin(row.error_histogram)
        max_error = row.kernel_error.max_abs_err
        held = low * (1 - _ROUNDING) <= max_error <= high * (1 + _ROUNDING)
        expected = f"from {low:.3g} to {high:.3g}, as its histogram"
        yield from _unless(held, f"{where}.kernel_error.max_abs_err", max_error, expected)
    if row.passed:
        required_gates = ["kernel_relative_error_pass", "kernel_bound_pass"]
        if limits is not None and row.format_is_judged:
            required_gates += ["format_error_pass", "max_abs_err_pass", "mean_abs_err_pass", "pct_bad_pass"]
        for name in required_gates:
            yield from _unless(name in row.gates, f"{where}.gates", "no " + name, "not passed without it")


def _compute_gates(row: CorrectnessRow, limits: Limits | None) -> dict[str, bool]:
    """Compute the gates by name from the row's numbers."""
    gates = {"finite_pass": row.error is not None and row.kernel_error is not None and row.bound_ratio is not None}
    if limits is None:
        return gates
    for prefix, error in (("", row.error), ("format_error", row.format_error)):
        if error is not None:
            within = {name: getattr(error, name) <= getattr(limits, name) for name in ("max_abs_err", "mean_abs_err")}
            within["pct_bad"] = error.pct_bad <= limits.pct_bad
            gates |= {f"{prefix}_pass": all(within.values())} if prefix else {f"{n}_pass": v for n, v in within.items()}
    if row.kernel_error is not None and row.bound_ratio is not None:
        allowed = limits.relative_error
        if row.scatters and row.error_histogram is not None:
            allowed *= relative_error_factor(sum(row.error_histogram.counts), row.variant)
        gates["kernel_relative_error_pass"] = row.kernel_error.relative_error <= allowed
        gates["kernel_bound_pass"] = row.bound_ratio <= limits.bound_factor
    return gates


def _find_top_bin(histogram: Histogram) -> tuple[float, float]:
    """Return the edges of the highest bin with an element; the lowest bin if the histogram is empty."""
    top = max((n for n, count in enumerate(histogram.counts) if count), default=0)
    low, high = (10.0 ** (histogram.first + (top - n) / histogram.per_decade) for n in (1, 0))
    return (low if top else 0.0), (high if top < len(histogram.counts) - 1 else math.inf)


def _verify_builds(record: Run) -> Iterator[Mismatch]:
    """Compare the rows of RESOURCES and EVIDENCE with the builds."""
    rows: dict[str, dict[str, list[str]]] = {gate.gate: {} for gate in record.gates}
    for gate in record.gates:
        for check, _, actual, _ in gate.checks:
            rows[gate.gate].setdefault(check, []).append(actual)
    if record.gate_status("RESOURCES") == "PASS":
        for role, side in record.sides():
            role = role if isinstance(record, Record) else "candidate"
            for build in (build for build in side.builds if build.resources is not None and build.shapes):
                for name, amount in _list_amounts(build):
                    shape = build.shapes[0]
                    # The only launch of a shape has the shape's name. If there are several, the kernel is named too.
                    kernel = shape if not build.launches or shape in build.launches else f"{shape}, {build.entry}"
                    check = f"{role} {side.variant} ({kernel}): {name}"
                    stored = rows["RESOURCES"].get(check, [])
                    held = str(amount) in stored
                    yield from _unless(held, f"gates (RESOURCES), {check}", ", ".join(stored) or "nothing", amount)
    for check, (stored_count, *_) in rows.get("EVIDENCE", {}).items():
        shape, _, counter = check.partition(": ")
        launches = [
            build
            for build in record.sides()[-1][1].builds
            for launch in build.launches
            if launch.partition(" launch ")[0] == shape
        ]
        if launches and all(counter in build.machine_code for build in launches):
            count = sum(build.machine_code[counter] for build in launches)
            yield from _unless(stored_count == str(count), f"gates (EVIDENCE), {check}", stored_count, count)


def _list_amounts(build: Build) -> list[tuple[str, int]]:
    """Return the resources that RESOURCES checks, except variables: some of these are compared after launches."""
    used = build.resources
    assert used is not None
    return [
        ("registers", used.registers),
        ("shared memory, bytes", used.smem_bytes),
        ("stack, bytes", used.stack_bytes),
        ("spills, bytes", used.spill_bytes),
    ]


def _verify_timing(field: str, row: TimingRow) -> Iterator[Mismatch]:
    """Check that the p50 is within the range of the block medians and not above the p90."""
    medians = [median for process in row.block_medians_us for median in process]
    if medians:
        low, high = min(medians), max(medians)
        held = low - _LAST_DIGITS_US <= row.p50_us <= high + _LAST_DIGITS_US
        yield from _unless(held, f"{field}.p50_us", row.p50_us, f"from {low} to {high}, as its blocks are")
    yield from _unless(row.p50_us <= row.p90_us, f"{field}.p90_us", row.p90_us, f"at least {row.p50_us}, its p50")


def _verify_gate(field: str, gate: GateResult) -> Iterator[Mismatch]:
    """Check the status of each row against its numbers, and the gate's status against its rows."""
    for check, target, actual, status in gate.checks:
        held = _is_met(target, actual)
        if held is not None and status != "PENDING":
            yield from _unless((status == "PASS") == held, f"{field}, {check}", status, "PASS" if held else "FAIL")
    failed = [check for check, _, _, status in gate.checks if status == "FAIL"] + gate.reasons
    yield from _unless(gate.status != "PASS" or not failed, f"{field}.status", gate.status, f"FAIL ({failed[:1]})")


def _is_met(target: str, actual: str) -> bool | None:
    """Return True if a number meets a limit such as "<= 64 (stage2)"; None if one of them is not a number."""
    limit, number = _LIMIT.fullmatch(target), _LIMIT.fullmatch(actual)
    if not limit or not limit[1] or not number or number[1]:
        return None
    try:
        bound, value = float(limit[2]), float(number[2])
    except ValueError:
        return None
    return {"<=": value <= bound, ">=": value >= bound, "<": value < bound, ">": value > bound}[limit[1]]


def _verify_correctness_gate(record: Run) -> Iterator[Mismatch]:
    if not isinstance(record, Record | BenchRecord) or record.gate_status("CORRECTNESS") != "PASS":
        return
    cases = {(row.shape, row.seed, row.variant) for _, side in record.sides() for row in side.correctness}
    for role, side in record.sides():
        wrong = [f"{row.shape} seed {row.seed}" for row in side.correctness if not row.passed]
        yield from _unless(not wrong, "gates.CORRECTNESS.status", "PASS", f"FAIL ({role}: {', '.join(wrong)})")
        yield from _unless(bool(side.correctness), "gates.CORRECTNESS.status", "PASS", f"PENDING ({role} was not run)")
        # A baseline may reject the random shapes, and is then not compiled for them.
        built = {shape for build in side.builds for shape in build.shapes} or {shape for shape, _, _ in cases}
        ran = {(row.shape, row.seed, row.variant) for row in side.correctness}
        same = ran == {case for case in cases if case[0] in built}
        yield from _unless(same, "gates.CORRECTNESS.status", "PASS", "not passed (the sides ran other shapes or seeds)")


def _verify_speedups(record: Record) -> Iterator[Mismatch]:
    stored = {(row.shape, row.cache) for row in record.speedups}
    for role, side in record.sides():
        timed = {(row.shape, row.cache) for row in side.timing}
        yield from _unless(timed == stored, "speedups", f"of {sorted(stored)}", f"{role} was timed at {sorted(timed)}")
        if timed != stored:
            return
    if not record.speedups:
        held = record.gate_status("PERFORMANCE") != "PASS" or record.quoted is not None
        yield from _unless(held, "gates.PERFORMANCE.status", "PASS", "not passed (there are no speedups)")
        return
    for i, row in enumerate(record.speedups):
        where = f"speedups[{i}] ({row.shape}, {row.cache} L2)"
        yield from _verify_speedup(record, row, where)
    yield from _verify_gated(record.speedups, "speedups")
    yield from _verify_performance(record, judge(record.speedups, _get_requirement(record.speedups)))


def _verify_gated(rows: Sequence[SpeedupRow], field: str) -> Iterator[Mismatch]:
    """Check that at least one row is gated, only warm rows are, and all rows have the same requirement."""
    gated = [row.cache for row in rows if row.gated]
    yield from _unless(bool(gated) and set(gated) == {WARM}, f"{field}.gated", gated, "one or more, warm")
    required = sorted({row.required for row in rows})
    yield from _unless(len(required) == 1, f"{field}.required", required, "one for all")


def _verify_speedup(record: Record, row: SpeedupRow, where: str) -> Iterator[Mismatch]:
    try:
        recomputed = speedup_row(
            record.baseline.timing,
            record.candidate.timing,
            record.baseline_again,
            row.shape,
            row.cache,
            confidence=row.confidence,
            required=row.required or None,
            gated=row.gated,
        )
    except ValueError as e:
        yield Mismatch(where, f"{row.speedup}x", f"nothing: {e}")
        return
    for name in ("speedup", "ci_low", "ci_high", "noise_floor"):
        stored, value = getattr(row, name), getattr(recomputed, name)
        yield from _unless(abs(stored - value) <= _LAST_DIGIT, f"{where}.{name}", stored, value)
    for name in ("processes", "blocks", "slow_replay"):
        stored, value = getattr(row, name), getattr(recomputed, name)
        yield from _unless(stored == value, f"{where}.{name}", stored, value)
    yield from _verify_verdict(row, where)


def _verify_verdict(row: SpeedupRow, where: str) -> Iterator[Mismatch]:
    """Check the verdict against the row's own figures."""
    try:
        interval = Interval(row.speedup, row.ci_low, row.ci_high)
        recomputed = verdict(interval, noise_floor=row.noise_floor, required=row.required)
    except ValueError as e:
        yield Mismatch(where, row.verdict, f"nothing: {e}")
        return
    yield from _unless(row.verdict == recomputed, f"{where}.verdict", row.verdict, recomputed)


def _get_requirement(rows: Sequence[SpeedupRow]) -> float | None:
    return rows[0].required or None


def _verify_performance(record: Record, recomputed: GateResult) -> Iterator[Mismatch]:
    stored = next((gate for gate in record.gates if gate.gate == "PERFORMANCE"), None)
    if stored is None:
        yield Mismatch("gates", "no PERFORMANCE", recomputed.status)
        return
    for name in ("status", "summary", "reasons", "checks", "unchecked"):
        before, after = getattr(stored, name), getattr(recomputed, name)
        yield from _unless(before == after, f"gates.PERFORMANCE.{name}", before, after)


def _verify_cached_timing(record: Record) -> Iterator[Mismatch]:
    if record.quoted is None:
        return
    rows = record.quoted.speedups
    for i, row in enumerate(rows):
        yield from _verify_verdict(row, f"quoted.speedups[{i}] ({row.shape}, {row.cache} L2)")
    yield from _verify_gated(rows, "quoted.speedups")
    if rows:
        yield from _verify_performance(record, build_cached_performance(record.quoted, _get_requirement(rows)))


def _verify_decision(record: Record) -> Iterator[Mismatch]:
    names = [gate.gate for gate in record.gates]
    has_all = set(FIRST_GATES) <= set(names) and len(set(names)) == len(names)
    yield from _unless(has_all or record.decision != "MERGE", "gates", names, f"{', '.join(FIRST_GATES)}, each once")
    yield from _verify_coverage(record)
    decision, reasons = decide(record.gates, record.quoted, record.exam)
    yield from _unless(record.decision == decision, "decision", record.decision, decision)
    yield from _unless(record.reasons == reasons, "reasons", record.reasons, reasons)


def _verify_coverage(record: Record) -> Iterator[Mismatch]:
    """Check the coverage of the check plan against the candidate's rows. The task's shapes of that time are unknown."""
    exam = record.exam
    if exam is None:
        yield Mismatch("exam", None, "what was asked")
        return
    complete = not exam.missing or (exam.complete and record.quoted is not None)
    yield from _unless(exam.complete == complete, "exam.complete", exam.complete, complete)
    nothing = exam.seed is None and complete and record.quoted is None
    yield from _unless(not nothing, "exam.complete", True, "False: nothing was drawn")
    if record.gate_status("CORRECTNESS") != "PASS":
        return
    if exam.seed is not None:
        has_seed = any(row.drawn and row.seed == exam.seed for row in record.candidate.correctness)
        yield from _unless(has_seed, "exam.seed", exam.seed, "None: no case has it")
    dims_by_case = {(row.shape, row.seed, row.drawn): row.dims for row in record.candidate.correctness}
    for name, dims in exam.drawn.items():
        row_dims = dims_by_case.get((name, exam.seed or 0, True))
        yield from _unless(row_dims == dims, f"exam.drawn.{name}", dims, row_dims or "not run")
