"""Whether a record's conclusions follow from its measurements: they are drawn again whenever it is read.

From the stored block medians: each speedup with its interval, noise floor and verdict, and where the median of all
launches lies. From these: PERFORMANCE. From the numbers of each correctness row and the limits: its gates. From what
was built: the rows of RESOURCES, and what those of EVIDENCE counted. From the gates: the decision with its reasons.
What a record does not hold cannot be drawn again: single launches (so p50 itself, p90, mean and deviation), outputs,
machine code, and what the task asked then (limits, budgets, promises, the required speedup).

So changed figures, verdicts and decisions are found; measurements that were made up are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from greenfast.judge.decision import build_cached_performance, decide
from greenfast.judge.error_metrics import relative_error_factor
from greenfast.judge.gates.performance import judge
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

#: How far a stored figure may be from the recomputed one: another processor's last digit may differ.
_LAST_DIGIT = 1.1e-4
#: Times are rounded to a thousandth.
_LAST_DIGITS_US = 1.1e-3
#: Of a sum in floating point, as a share.
_ROUNDING = 1e-9
_LIMIT = re.compile(r"(<=|>=|<|>)?\s*([-+.\deE]+)(?: \(.*\))?")


class Mismatch(NamedTuple):
    """A field of a record, what it says, and what follows from the rest of the record."""

    field: str
    stored: Any
    recomputed: Any


def verify_record(record: Run) -> Iterator[Mismatch]:
    """Every conclusion that does not follow, in the order in which they build on each other."""
    for role, side in record.sides():
        for i, row in enumerate(side.correctness):
            yield from _of_correctness(f"{role}.correctness[{i}]", row, side.limits.get(row.shape))
    for i, gate in enumerate(record.gates):
        yield from _of_gate(f"gates[{i}] ({gate.gate})", gate)
    if record.schema_version > 1:
        yield from _of_builds(record)
    yield from _of_correctness_gate(record)
    if isinstance(record, Record):
        yield from _of_speedups(record)
        yield from _of_quote(record)
        yield from _of_decision(record)
    for role, side in record.sides():
        for i, timing in enumerate(side.timing):
            yield from _of_timing(f"{role}.timing[{i}] ({timing.shape}, {timing.cache} L2)", timing)


def _unless(held: bool, field: str, stored: Any, recomputed: Any) -> Iterator[Mismatch]:
    if not held:
        yield Mismatch(field, stored, recomputed)


def _of_correctness(field: str, row: CorrectnessRow, limits: Limits | None) -> Iterator[Mismatch]:
    where = f"{field} ({row.shape} seed {row.seed})"
    for name, held in _gates_of(row, limits).items():
        if name in row.gates:
            yield from _unless(row.gates[name] == held, f"{where}.gates.{name}", row.gates[name], held)
    for name in ("error", "kernel_error"):
        if (error := getattr(row, name)) is not None:
            held = error.mean_abs_err <= error.max_abs_err * (1 + _ROUNDING)
            yield from _unless(held, f"{where}.{name}.mean_abs_err", error.mean_abs_err, f"<= {error.max_abs_err}")
    if row.kernel_error is not None and row.error_histogram is not None:
        low, high = _top_bin(row.error_histogram)
        most = row.kernel_error.max_abs_err
        held = low * (1 - _ROUNDING) <= most <= high * (1 + _ROUNDING)
        found = f"from {low:.3g} to {high:.3g}, as its histogram"
        yield from _unless(held, f"{where}.kernel_error.max_abs_err", most, found)
    if row.passed:
        asked = ["kernel_relative_error_pass", "kernel_bound_pass"]
        if limits is not None and row.format_is_judged:
            asked += ["format_error_pass", "max_abs_err_pass", "mean_abs_err_pass", "pct_bad_pass"]
        for name in asked:
            yield from _unless(name in row.gates, f"{where}.gates", "no " + name, "not passed without it")


def _gates_of(row: CorrectnessRow, limits: Limits | None) -> dict[str, bool]:
    """By name, the gates that follow from the row's numbers."""
    found = {"finite_pass": row.error is not None and row.kernel_error is not None and row.bound_ratio is not None}
    if limits is None:
        return found
    for prefix, error in (("", row.error), ("format_error", row.format_error)):
        if error is not None:
            within = {name: getattr(error, name) <= getattr(limits, name) for name in ("max_abs_err", "mean_abs_err")}
            within["pct_bad"] = error.pct_bad <= limits.pct_bad
            found |= {f"{prefix}_pass": all(within.values())} if prefix else {f"{n}_pass": v for n, v in within.items()}
    if row.kernel_error is not None and row.bound_ratio is not None:
        allowed = limits.relative_error
        if row.scatters and row.error_histogram is not None:
            allowed *= relative_error_factor(sum(row.error_histogram.counts), row.variant)
        found["kernel_relative_error_pass"] = row.kernel_error.relative_error <= allowed
        found["kernel_bound_pass"] = row.bound_ratio <= limits.bound_factor
    return found


def _top_bin(histogram: Histogram) -> tuple[float, float]:
    """The edges of the highest bin that has an element; no element counts as one in the lowest."""
    top = max((n for n, count in enumerate(histogram.counts) if count), default=0)
    low, high = (10.0 ** (histogram.first + (top - n) / histogram.per_decade) for n in (1, 0))
    return (low if top else 0.0), (high if top < len(histogram.counts) - 1 else math.inf)


def _of_builds(record: Run) -> Iterator[Mismatch]:
    """What the rows of RESOURCES and EVIDENCE say was built, against the builds."""
    rows: dict[str, dict[str, list[str]]] = {gate.gate: {} for gate in record.gates}
    for gate in record.gates:
        for what, _, actual, _ in gate.checks:
            rows[gate.gate].setdefault(what, []).append(actual)
    if record.gate_status("RESOURCES") == "PASS":
        for role, side in record.sides():
            role = role if isinstance(record, Record) else "candidate"
            for build in (build for build in side.builds if build.resources is not None and build.shapes):
                for name, amount in _amounts(build):
                    shape = build.shapes[0]
                    # A launch has its shape's name where the program has no other, and kernels are named where it has.
                    place = shape if not build.launches or shape in build.launches else f"{shape}, {build.entry}"
                    what = f"{role} {side.variant} ({place}): {name}"
                    found = rows["RESOURCES"].get(what, [])
                    held = str(amount) in found
                    yield from _unless(held, f"gates (RESOURCES), {what}", ", ".join(found) or "nothing", amount)
    for what, (told, *_) in rows.get("EVIDENCE", {}).items():
        shape, _, counter = what.partition(": ")
        launches = [
            build
            for build in record.sides()[-1][1].builds
            for launch in build.launches
            if launch.partition(" launch ")[0] == shape
        ]
        if launches and all(counter in build.machine_code for build in launches):
            count = sum(build.machine_code[counter] for build in launches)
            yield from _unless(told == str(count), f"gates (EVIDENCE), {what}", told, count)


def _amounts(build: Build) -> list[tuple[str, int]]:
    """What RESOURCES compares of a kernel but variables, some of which are compared after launches instead."""
    used = build.resources
    assert used is not None
    return [
        ("registers", used.registers),
        ("shared memory, bytes", used.smem_bytes),
        ("stack, bytes", used.stack_bytes),
        ("spills, bytes", used.spill_bytes),
    ]


def _of_timing(field: str, row: TimingRow) -> Iterator[Mismatch]:
    """The median of all launches lies between the blocks' medians, and the 90th percentile is not below it."""
    medians = [median for process in row.block_medians_us for median in process]
    if medians:
        low, high = min(medians), max(medians)
        held = low - _LAST_DIGITS_US <= row.p50_us <= high + _LAST_DIGITS_US
        yield from _unless(held, f"{field}.p50_us", row.p50_us, f"from {low} to {high}, as its blocks are")
    yield from _unless(row.p50_us <= row.p90_us, f"{field}.p90_us", row.p90_us, f"at least {row.p50_us}, its p50")


def _of_gate(field: str, gate: GateResult) -> Iterator[Mismatch]:
    """A row's status against its own numbers, and the gate's against its rows."""
    for what, target, actual, status in gate.checks:
        held = _holds(target, actual)
        if held is not None and status != "PENDING":
            yield from _unless((status == "PASS") == held, f"{field}, {what}", status, "PASS" if held else "FAIL")
    failed = [what for what, _, _, status in gate.checks if status == "FAIL"] + gate.reasons
    yield from _unless(gate.status != "PASS" or not failed, f"{field}.status", gate.status, f"FAIL ({failed[:1]})")


def _holds(target: str, actual: str) -> bool | None:
    """Whether a number meets a limit such as "<= 64 (stage2)"; None for what is not numbers."""
    limit, found = _LIMIT.fullmatch(target), _LIMIT.fullmatch(actual)
    if not limit or not limit[1] or not found or found[1]:
        return None
    try:
        bound, value = float(limit[2]), float(found[2])
    except ValueError:
        return None
    return {"<=": value <= bound, ">=": value >= bound, "<": value < bound, ">": value > bound}[limit[1]]


def _of_correctness_gate(record: Run) -> Iterator[Mismatch]:
    if not isinstance(record, Record | BenchRecord) or record.gate_status("CORRECTNESS") != "PASS":
        return
    cells = {(row.shape, row.seed, row.variant) for _, side in record.sides() for row in side.correctness}
    for role, side in record.sides():
        wrong = [f"{row.shape} seed {row.seed}" for row in side.correctness if not row.passed]
        yield from _unless(not wrong, "gates.CORRECTNESS.status", "PASS", f"FAIL ({role}: {', '.join(wrong)})")
        yield from _unless(bool(side.correctness), "gates.CORRECTNESS.status", "PASS", f"PENDING ({role} was not run)")
        # A baseline need not compute what the exam adds, and is then not built for it.
        built = {shape for build in side.builds for shape in build.shapes} or {shape for shape, _, _ in cells}
        ran = {(row.shape, row.seed, row.variant) for row in side.correctness}
        same = ran == {cell for cell in cells if cell[0] in built}
        yield from _unless(same, "gates.CORRECTNESS.status", "PASS", "not passed (the sides ran other shapes or seeds)")


def _of_speedups(record: Record) -> Iterator[Mismatch]:
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
        yield from _of_speedup(record, row, where)
    yield from _of_gated(record.speedups, "speedups")
    yield from _of_performance(record, judge(record.speedups, _required(record.speedups)))


def _of_gated(rows: Sequence[SpeedupRow], field: str) -> Iterator[Mismatch]:
    """Some warm row must decide, and all must ask for the same."""
    gated = [row.cache for row in rows if row.gated]
    yield from _unless(bool(gated) and set(gated) == {WARM}, f"{field}.gated", gated, "one or more, warm")
    required = sorted({row.required for row in rows})
    yield from _unless(len(required) == 1, f"{field}.required", required, "one for all")


def _of_speedup(record: Record, row: SpeedupRow, where: str) -> Iterator[Mismatch]:
    try:
        now = speedup_row(
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
        then, today = getattr(row, name), getattr(now, name)
        yield from _unless(abs(then - today) <= _LAST_DIGIT, f"{where}.{name}", then, today)
    for name in ("processes", "blocks", "slow_replay"):
        then, today = getattr(row, name), getattr(now, name)
        yield from _unless(then == today, f"{where}.{name}", then, today)
    yield from _of_verdict(row, where)


def _of_verdict(row: SpeedupRow, where: str) -> Iterator[Mismatch]:
    """The verdict, from the row's own figures."""
    try:
        interval = Interval(row.speedup, row.ci_low, row.ci_high)
        now = verdict(interval, noise_floor=row.noise_floor, required=row.required)
    except ValueError as e:
        yield Mismatch(where, row.verdict, f"nothing: {e}")
        return
    yield from _unless(row.verdict == now, f"{where}.verdict", row.verdict, now)


def _required(rows: Sequence[SpeedupRow]) -> float | None:
    return rows[0].required or None


def _of_performance(record: Record, now: GateResult) -> Iterator[Mismatch]:
    then = next((gate for gate in record.gates if gate.gate == "PERFORMANCE"), None)
    if then is None:
        yield Mismatch("gates", "no PERFORMANCE", now.status)
        return
    for name in ("status", "summary", "reasons", "checks", "unchecked"):
        stored, recomputed = getattr(then, name), getattr(now, name)
        yield from _unless(stored == recomputed, f"gates.PERFORMANCE.{name}", stored, recomputed)


def _of_quote(record: Record) -> Iterator[Mismatch]:
    if record.quoted is None:
        return
    rows = record.quoted.speedups
    for i, row in enumerate(rows):
        yield from _of_verdict(row, f"quoted.speedups[{i}] ({row.shape}, {row.cache} L2)")
    yield from _of_gated(rows, "quoted.speedups")
    if rows:
        yield from _of_performance(record, build_cached_performance(record.quoted, _required(rows)))


def _of_decision(record: Record) -> Iterator[Mismatch]:
    names = [gate.gate for gate in record.gates]
    whole = set(FIRST_GATES) <= set(names) and len(set(names)) == len(names)
    yield from _unless(whole or record.decision != "MERGE", "gates", names, f"{', '.join(FIRST_GATES)}, each once")
    yield from _of_exam(record)
    decision, reasons = decide(record.gates, record.quoted, record.exam)
    yield from _unless(record.decision == decision, "decision", record.decision, decision)
    yield from _unless(record.reasons == reasons, "reasons", record.reasons, reasons)


def _of_exam(record: Record) -> Iterator[Mismatch]:
    """What was asked, against the candidate's rows; which shapes and seeds the task had then is not known here."""
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
        took = any(row.drawn and row.seed == exam.seed for row in record.candidate.correctness)
        yield from _unless(took, "exam.seed", exam.seed, "None: no case has it")
    ran = {(row.shape, row.seed, row.drawn): row.dims for row in record.candidate.correctness}
    for name, dims in exam.drawn.items():
        found = ran.get((name, exam.seed or 0, True))
        yield from _unless(found == dims, f"exam.drawn.{name}", dims, found or "not run")
