"""CORRECTNESS: format error and kernel error per case for both implementations, and their parity."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from greenfast.device.session import RunResult, output_digest
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.error_metrics import (
    bound_histogram,
    error_histogram,
    error_stats,
    map_errors,
    relative_error_factor,
    select_closest_reference,
    worst_bound_ratio,
    worst_element,
)
from greenfast.judge.gates.faults import NOT_COVERED, EmulatedRuns, MemoryChecks, check_awaited
from greenfast.judge.gates.sensitivity import (
    CONSTANT,
    FILLS,
    NEED_OTHERS,
    ZEROS,
    fill_outputs,
    find_dropped,
    generate_trivial_answers,
    is_far,
    split_outputs,
)
from greenfast.judge.implementation import BuiltSide
from greenfast.judge.pipeline import CorrectnessOutcome, Gate, GateRun, conclude_checks, pending
from greenfast.judge.record_schema import (
    NOT_RUN,
    OBSERVED_GATES,
    BenchRecord,
    CorrectnessRow,
    ErrorStats,
    GateResult,
    Limits,
    ParityRow,
    Record,
    Run,
    Status,
)
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.formatting import Section
from greenfast.judge.request import CasePlan
from greenfast.judge.task import CaseGates, FormatGates, KernelErrorGate, Shape
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import PHASE_BUFFER
from greenfast.spec.problem import NORMAL, Case, Problem, References, build_case, build_references

#: The share of elements of the problem's own reference on a GPU that must be within the tolerance around the same
#: reference on the CPU. If sums are rounded to 16 bits and cancel, a few elements differ more.
_OWN_REFERENCE_RATIO = 0.99
#: The gates of a row that judge the values of the output.
_VALUE_GATES = (
    "finite_pass",
    "max_abs_err_pass",
    "mean_abs_err_pass",
    "pct_bad_pass",
    "kernel_relative_error_pass",
    "kernel_bound_pass",
)
#: The statistics of the error against the unquantized reference that have limits.
_ERRORS = ("max_abs_err", "mean_abs_err", "pct_bad")
#: With a secret seed, a limit applies only if the format's own error is at most this share of it.
_MAX_FORMAT_SHARE = 0.9
_AWAITED = "asynchronous operations are awaited"
_NUMBER = re.compile(r"(?<![:\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
#: Each case runs this often on equal input in fresh memory. Outputs that differ in a bit indicate a race.
REPEATS = 2
_REMEDY = "give the problem a bound that this exceeds, or inputs for which it is wrong"


def check_cases(run: GateRun) -> GateResult:
    """Run each implementation on all cases that it supports, in a separate process; store the rows in the run.

    An implementation stops after a case that ended its process. A case that the device cannot run is not the kernel's
    fault: the gate is PENDING, or FAIL if another case was wrong. An implementation that neither the emulator nor the
    memory check could check is listed in the result's ``unchecked``.

    If the problem's reference is itself a run on the CPU, the output of the task's own baseline is an equally valid
    reference.

    Raises UsageError for invalid references (``spec.problem.build_references``) and for a workspace with the name of a
    buffer.
    """
    if obstacle := run.cannot_run():
        return pending("CORRECTNESS", obstacle)
    request, sides, progress = run.request, run.sides, run.progress("CORRECTNESS")
    problem, fmt, case_plans = request.task.problem, request.format, request.case_plans
    own = next((role for role, one in run.implementations.items() if one.is_task_baseline), None)
    own_gates = {role: one.requirements.kernel_error for role, one in run.implementations.items()}
    emulated = _emulate(run)
    memory = MemoryChecks(sides, request.make_worker) if request.checks_memory else None
    outcome = run.correctness = CorrectnessOutcome({side.role: [] for side in sides})
    workers = {side.role: request.make_worker() for side in sides}
    broken: dict[str, WorkerError] = {}
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(max(1, len(sides))))
        for worker in workers.values():
            stack.callback(worker.close)  # Close the workers before the executor waits for its threads.
        if emulated:
            stack.enter_context(emulated)
        if memory:
            stack.enter_context(memory)
        inputs: dict[tuple[str, int, str], str] = {}
        others: dict[str, tuple[str, NDArray[np.float64]]] = {}
        sensitive_shapes: set[str] = set()
        emulated_cases: dict[int, tuple[_CheckedCase, NDArray[np.float64] | None]] = {}
        _require_same_inputs(problem, case_plans[0], fmt)
        for done, case_plan in enumerate(case_plans):
            progress(done / len(case_plans), str(case_plan))
            shape = case_plan.shape.name
            case = build_case(problem, case_plan.shape.dims, case_plan.seed, fmt, case_plan.variant)
            _require_other_inputs(inputs, case_plan, case)
            if emulated and case_plan in emulated.case_plans:
                emulated.start(case_plan, case)
            supporting = [side for side in sides if shape in side.programs]
            for side in supporting:
                _require_own_workspaces(side, shape, case)
            running = {
                side.role: threads.submit(
                    _ran, workers[side.role], side, case_plan, case, broken.get(side.role), memory
                )
                for side in supporting
            }
            references = build_references(problem, case_plan.shape.dims, case_plan.seed, fmt, case_plan.variant)
            stated = _CheckedCase(problem, fmt, request.gates, own_gates, case_plan, case, references)
            digest, other = others.get(shape, ("", None))
            settled = stated.settle(None if digest == case.digest else other, shape not in others, outcome)
            if case_plan.variant == NORMAL:
                others.setdefault(shape, (case.digest, references.exact))
            decoded: dict[str, NDArray[np.float64]] = {}
            alternative = None
            for side in sorted(supporting, key=lambda side: side.role != own):
                result = running[side.role].result()
                if isinstance(result, WorkerError) and result.ended:
                    broken.setdefault(side.role, result)
                checked = stated.relax_matched() if side.role == own else settled
                row, values = checked.compare(side.role, result, alternative)
                outcome.rows[side.role].append(row)
                if side.role == own and references.is_run and row.passed:
                    alternative = values
                    settled.note_noise(values, outcome)
                if values is None or case_plan.variant != NORMAL:
                    continue
                assert isinstance(result, RunResult)
                if row.passed and shape not in sensitive_shapes:
                    checked.require_sensitive(side.role, result, values)
                    sensitive_shapes.add(shape)
                decoded[side.role] = values
                outcome.digests[side.role, shape, case_plan.seed] = output_digest(result.outputs)
                if result.counts is not None:
                    outcome.counts.setdefault(side.role, {}).setdefault(shape, result.counts)
            if len(decoded) == 2:
                decoded = {side.role: decoded[side.role] for side in sides}
                same_bits = len({outcome.digests[role, shape, case_plan.seed] for role in decoded}) == 1
                outcome.parity.append(_parity(case_plan.shape, case_plan.seed, same_bits, *decoded.values()))
            if emulated and case_plan in emulated.case_plans:
                emulated_cases[emulated.case_plans.index(case_plan)] = settled, alternative
        emulated_rows = [
            (role, result, checked.compare(role, result, alternative)[0])
            for (role, number), result in (emulated.results().items() if emulated else ())
            for checked, alternative in (emulated_cases[number],)
        ]
    return _result(run, emulated_rows, memory)


def _emulate(run: GateRun) -> EmulatedRuns | None:
    """Return the emulator's runs of small cases beside a GPU, for all implementations with PTX; None if no GPU."""
    request = run.request
    if request.check_plan is None or request.make_emulator is None:
        return None
    sides = [side for side in run.sides if all(kernel.ptx for _, kernel in side.distinct)]
    return EmulatedRuns(sides, request.check_plan.emulated_case_plans, request.make_emulator)


def _ran(
    worker: Worker,
    side: BuiltSide,
    case_plan: CasePlan,
    case: Case,
    broken: WorkerError | None,
    memory: MemoryChecks | None,
) -> RunResult | WorkerError:
    """Run a case in the implementation's process and check its memory.

    broken: the error that ended the process at an earlier case, or None.
    """
    if broken is not None:
        return type(broken)(f"{NOT_RUN}{broken}")
    try:
        result = worker.run(side.executable(case_plan.shape.name), case, REPEATS)
    except WorkerError as e:
        return e
    if memory is not None:
        memory.run(side, case_plan, case, result)
    return result


def _require_same_inputs(problem: Problem, case_plan: CasePlan, fmt: str) -> None:
    """Raise UsageError if make_case gives different inputs on a second call."""
    first, second = (
        build_case(problem, case_plan.shape.dims, case_plan.seed, fmt, case_plan.variant).digest for _ in range(2)
    )
    if first != second:
        raise UsageError(
            f"make_case gives other inputs when it is asked for {case_plan} again; "
            "draw them from a generator with the seed"
        )


def _require_other_inputs(seen: dict[tuple[str, int, str], str], case_plan: CasePlan, case: Case) -> None:
    """Raise UsageError if two variants of one case have equal inputs: the second would check nothing."""
    if not case.inputs or (case_plan.variant == NORMAL and not case_plan.randomized):
        return
    variant = seen.setdefault((case_plan.shape.name, case_plan.seed, case.digest), case_plan.variant)
    if variant != case_plan.variant:
        raise UsageError(
            f"make_case gives the inputs of variant {variant!r} for {case_plan} too; give each name of VARIANTS its own"
        )


def _require_own_workspaces(side: BuiltSide, shape: str, case: Case) -> None:
    """Raise UsageError for a workspace with a buffer's name: it would replace the contents of the buffer."""
    names = case.inputs.keys() | case.outputs.keys() | {PHASE_BUFFER}
    if duplicates := sorted(names & side.executable(shape).workspaces.keys()):
        raise UsageError(
            f"{side.variant.name}: workspaces: {', '.join(duplicates)}: the problem has buffers of this name; "
            "choose others"
        )


@dataclass(frozen=True)
class _CheckedCase:
    """A case with its references, and the gates by which decoded outputs are compared with them.

    own_gates: by role, the kernel-error gate that an implementation's rung defines, or None.
    """

    problem: Problem
    fmt: str
    gates: FormatGates
    own_gates: Mapping[str, KernelErrorGate | None]
    plan: CasePlan
    case: Case
    references: References

    def compare(
        self, role: str, result: RunResult | WorkerError, alternative: NDArray[np.float64] | None
    ) -> tuple[CorrectnessRow, NDArray[np.float64] | None]:
        """Return an implementation's row, and its decoded output (None if it did not run).

        alternative: another valid reference. Each element is compared with the closer of the two.
        """
        if isinstance(result, WorkerError):
            return self._build_row(role, result, None), None
        result = replace(result, violations=[*result.violations, *_find_invalid_booleans(result.outputs)])
        decoded = self.problem.decode(result.outputs, self.fmt)
        if not isinstance(decoded, np.ndarray) or decoded.dtype.kind not in "fiub":
            kind = getattr(decoded, "dtype", type(decoded).__name__)
            raise UsageError(f"{self.plan}: decode gives {kind}; an array of float64 is asked for")
        exact = self.references.exact
        if decoded.shape != exact.shape:
            shapes_differ = f"{decoded.shape}, the references have {exact.shape}"
            raise UsageError(f"{self.plan}: decode gives an array of shape {shapes_differ}")
        compared = self
        if alternative is not None:
            closest = select_closest_reference(decoded, alternative, exact)
            compared = self._with_references(full=closest, exact=closest)
        return compared._build_row(role, result, decoded), decoded

    def _with_references(self, **changes: Any) -> _CheckedCase:
        return replace(self, references=replace(self.references, **changes))

    def _select_gates(self, own: KernelErrorGate | None) -> CaseGates:
        return self.gates.select(self.plan.shape.dims, own)

    def relax_matched(self) -> _CheckedCase:
        """Return the case for the problem's own reference, with a lower matched ratio if it comes from a run."""
        if not self.references.is_run:
            return self
        return self._with_references(matched=min(self.references.matched, _OWN_REFERENCE_RATIO))

    def settle(self, other: NDArray[np.float64] | None, first: bool, outcome: CorrectnessOutcome) -> _CheckedCase:
        """Return the case, with the relative bound if a trivial answer is within the stated bound.

        Trivial answers that pass nevertheless are noted in ``outcome.trivial``, for the task's own shapes and normal
        inputs.
        other: the exact answer to the first inputs of this shape; None if the inputs are equal to the first.
        first: True if these inputs are the first of the shape.
        """
        settled, shape, exact = self, self.plan.shape.name, self.references.exact
        is_noted = self.plan.variant == NORMAL and not self.plan.new_shape
        if self.references.relative is None and not is_noted:
            return self
        passing = self._find_trivial(other)
        if passing and self.references.relative is not None:
            outcome.tightened.setdefault(shape, passing[0])
            settled = self._with_references(bound=self.references.relative)
            passing = settled._find_trivial(other)
        if is_noted:
            names = set(passing) | (NEED_OTHERS if first else set())
            outcome.trivial[shape] = names & outcome.trivial.get(shape, names)
            if other is not None and exact.size:  # One case is not enough: a sum is one number too.
                same = bool((exact == exact.flat[0]).all()) and np.array_equal(other, exact)
                name = ZEROS if exact.flat[0] == 0 else CONSTANT
                outcome.constant[shape] = name if same and outcome.constant.get(shape, name) else ""
        return settled

    def note_noise(self, values: NDArray[np.float64] | None, outcome: CorrectnessOutcome) -> None:
        """Note the shape if the problem's own reference on this device exceeds the relative bound."""
        shape, references = self.plan.shape.name, self.references
        if references.bound is not references.relative or values is None or not np.isfinite(values).all():
            return
        if worst_bound_ratio(values, references.exact, references.bound, matched=_OWN_REFERENCE_RATIO) > 1:
            outcome.trivial.setdefault(shape, set()).add(outcome.tightened[shape])

    def _find_trivial(self, other: NDArray[np.float64] | None) -> list[str]:
        """Return the names of the trivial answers that pass, including those with a single wrong output."""
        references = self.references
        all_gates = [self._select_gates(own) for own in dict.fromkeys((None, *self.own_gates.values()))]
        passing: list[str] = []
        format_error = None
        for name, answer in generate_trivial_answers(self.case, references, other):
            if np.array_equal(answer, references.exact):  # It is the right answer, such as 1 for softmax of one number.
                continue
            for gates in all_gates:
                kernel_gate, bad_abs_err = gates.kernel_error, gates.error.bad_abs_err
                if is_far(answer, references, references.get_bound(kernel_gate.rounding), kernel_gate.bound_factor):
                    continue
                format_error = format_error or error_stats(references.exact, references.full, bad_abs_err)
                measured = self._measure(gates, answer) | {"elements": answer.size}
                held = judge_row(self._make_row(format_error, gates={"repeat_pass": True}, **measured), gates.limits)
                if all(held.get(gate_name, True) for gate_name in _VALUE_GATES):
                    passing.append(name)
                    break
        return list(dict.fromkeys(passing))

    def require_sensitive(self, role: str, result: RunResult, decoded: NDArray[np.float64]) -> None:
        """Raise UsageError if the check does not detect a change of an output that passed."""
        dropped = find_dropped(lambda outputs: self.problem.decode(outputs, self.fmt), result.outputs, decoded)
        if dropped:
            raise UsageError(
                f"{self.plan}: CORRECTNESS cannot check all outputs: {dropped}; a kernel could write anything there. "
                "Let decode return them and references their values, or declare no output that is not compared"
            )

        def passes(outputs: dict[str, NDArray[Any]]) -> bool:
            with np.errstate(all="ignore"):
                values = self.problem.decode(outputs, self.fmt)
            if values.shape != decoded.shape or not np.isfinite(values).all() or np.array_equal(values, decoded):
                return False
            return self._build_row(role, replace(result, outputs=outputs), values).passed

        for name, variants in fill_outputs(result.outputs):
            if all(map(passes, variants)):
                raise UsageError(
                    f"{self.plan}: CORRECTNESS cannot judge output {name!r}: it passes with {FILLS[0]:g} in all of its "
                    f"elements, and with {FILLS[1]:g}. Give it a bound that such values exceed"
                )

    def _build_row(
        self, role: str, result: RunResult | WorkerError, decoded: NDArray[np.float64] | None
    ) -> CorrectnessRow:
        """Build an implementation's row.

        A kernel that did not run or wrote NaN fails and has no error statistics. If the device cannot run the case, the
        row has no gates.
        """
        references, gates = self.references, self._select_gates(self.own_gates.get(role))
        format_error = error_stats(references.exact, references.full, gates.error.bad_abs_err)
        measured: dict[str, Any] = {}
        held: dict[str, bool] = {}
        notes = [str(result)] if isinstance(result, WorkerError) else [*result.violations]
        if isinstance(result, UnsupportedByDeviceError):
            pass
        elif isinstance(result, WorkerError) or decoded is None:
            held["ran_pass"] = False
        else:
            held |= {"memory_pass": not result.violations, "repeat_pass": result.repeatable}
            if not result.repeatable:
                notes.append(
                    f"{REPEATS} runs on the same input gave different bits (a race? float atomics have no fixed order)"
                )
            bound = references.get_bound(gates.kernel_error.rounding)
            compared = (decoded, references.exact, gates.kernel_error.bound_factor * bound, result.outputs)
            worst = worst_element(*compared)
            measured |= {"worst": worst, "elements": decoded.size}
            if worst is not None and worst.wrong:
                measured["error_map"] = map_errors(*compared)
            bad_elements = int((~np.isfinite(decoded)).sum())
            if bad_elements:
                notes.append(f"{bad_elements} of {decoded.size} output elements are not finite or were never written")
            else:
                measured |= self._measure(gates, decoded)
                measured["error_histogram"] = error_histogram(decoded, references.exact)
                measured["bound_histogram"] = bound_histogram(decoded, references.exact, bound)
        row = self._make_row(format_error, gates=held, **measured)
        held = judge_row(row, gates.limits)
        if not all(held.get(name, True) for name in _VALUE_GATES):
            notes.append(str(row.worst))
        if not isinstance(result, WorkerError):
            notes += result.notes  # after the reasons of a failure
        return msgspec.structs.replace(row, gates=held, notes=notes)

    def _make_row(self, format_error: ErrorStats, **measured: Any) -> CorrectnessRow:
        plan = self.plan
        return CorrectnessRow(
            shape=plan.shape.name,
            dims=dict(plan.shape.dims),
            seed=plan.seed,
            variant=plan.variant,
            drawn=plan.randomized,
            own_shape=plan.randomized and not plan.new_shape,
            inputs_digest=self.case.digest,
            format_error=format_error,
            case_bytes=self.case.nbytes,
            **{"error": None, "kernel_error": None, "bound_ratio": None} | measured,
        )

    def _measure(self, gates: CaseGates, decoded: NDArray[np.float64]) -> dict[str, Any]:
        """Return the errors of decoded values by their names in a row. All values must be finite."""
        references, bad_abs_err = self.references, gates.error.bad_abs_err
        error = error_stats(decoded, references.full, bad_abs_err)
        same = references.exact is references.full
        kernel_error = error if same else error_stats(decoded, references.exact, bad_abs_err)
        bound = references.get_bound(gates.kernel_error.rounding)
        ratios = (
            worst_bound_ratio(got, exact, allowed, matched=references.matched, most=references.most)
            for got, exact, allowed in zip(
                *(split_outputs(references, array) for array in (decoded, references.exact, bound)), strict=True
            )
        )
        return {"error": error, "kernel_error": kernel_error, "bound_ratio": float(np.max(list(ratios), initial=0.0))}


def _find_invalid_booleans(outputs: Mapping[str, NDArray[Any]]) -> list[str]:
    """Return a violation for each bool output with bytes other than 0 and 1. Unwritten elements hold 255."""
    counts = {n: int((a.view(np.uint8) > 1).sum()) for n, a in outputs.items() if a.dtype == np.bool_}
    return [
        f"{count} elements of {name!r}, which is bool, are neither 0 nor 1" for name, count in counts.items() if count
    ]


def judge_row(row: CorrectnessRow, limits: Limits) -> dict[str, bool]:
    """Return the gates of a row: the observed ones, and those that follow from its numbers and the limits.

    All limits on the error against the unquantized reference apply to the task's own shapes and seeds. With a secret
    seed, the format's own error may be near a limit or above it. Then this limit does not apply, because a correct
    kernel could not meet it. A row without observed gates could not be run and has no gates.
    """
    observed = {name: held for name, held in row.gates.items() if name in OBSERVED_GATES}
    if not observed:
        return {}
    gates = {}
    if row.format_is_judged:
        gates["format_error_pass"] = all(getattr(row.format_error, n) <= getattr(limits, n) for n in _ERRORS)
    gates |= observed
    if not observed.get("ran_pass", True):
        return gates
    if row.error is None or row.kernel_error is None or row.bound_ratio is None:
        return gates | {"finite_pass": False}
    gates["finite_pass"] = True
    for name in () if row.scatters else _ERRORS:
        limit = getattr(limits, name)
        if row.format_is_judged or getattr(row.format_error, name) <= _MAX_FORMAT_SHARE * limit:
            gates[f"{name}_pass"] = getattr(row.error, name) <= limit
    allowed = limits.relative_error
    elements = row.elements or (sum(row.error_histogram.counts) if row.error_histogram else 0)
    if row.scatters and elements:
        allowed *= relative_error_factor(elements, row.variant)
    gates["kernel_relative_error_pass"] = row.kernel_error.relative_error <= allowed
    gates["kernel_bound_pass"] = row.bound_ratio <= limits.bound_factor
    return gates


def _parity(shape: Shape, seed: int, same_bits: bool, a: NDArray[np.float64], b: NDArray[np.float64]) -> ParityRow:
    different = a != b
    differences = np.abs(a[different] - b[different])
    return ParityRow(
        shape=shape.name,
        seed=seed,
        identical=same_bits,
        different_elements=int(different.sum()),
        max_abs_diff=float(np.nanmax(differences)) if np.isfinite(differences).any() else 0.0,
    )


def _result(
    run: GateRun, emulated: Sequence[tuple[str, RunResult | WorkerError, CorrectnessRow]], memory: MemoryChecks | None
) -> GateResult:
    outcome, sides = run.correctness, run.sides
    checks: list[tuple[str, str, str, Status]] = []
    reasons: list[str] = []
    unknown: list[str] = []
    unchecked: list[str] = []
    counts = []
    for side in sides:
        rows = outcome.rows[side.role]
        passed = sum(row.passed for row in rows)
        num_reasons, num_unknown = len(reasons), len(unknown)
        for row, more in group_by_cause(rows):
            if row.gates:
                reasons.append(f"{side.variant.name} {row.case}: {_list_failures(row)}{more}")
            else:
                unknown.append(f"{side.variant.name} {row.case}: could not be run here: {'; '.join(row.notes)}{more}")
        counts.append(f"{side.variant.name} {passed}/{len(rows)}")
        checks.append(
            (
                f"{side.role} {side.variant.name}",
                f"{len(rows)}/{len(rows)}",
                f"{passed}/{len(rows)}",
                "FAIL" if len(reasons) > num_reasons else "PENDING" if len(unknown) > num_unknown else "PASS",
            )
        )
        emulator_statuses: list[Status] = []
        gap = ""
        emulator_rows = [(result, row) for role, result, row in emulated if role == side.role]
        for result, row in emulator_rows:
            status: Status = (
                "PENDING" if isinstance(result, UnsupportedByDeviceError) else "PASS" if row.passed else "FAIL"
            )
            actual = "; ".join(["no fault", *row.notes] if status == "PASS" else row.notes) or _list_failures(row)
            checks.append((f"{side.variant.name} {row.case} on the emulator", "no fault", actual, status))
            if status == "PENDING":
                gap = actual
            emulator_statuses.append(status)
        judged = [row for result, row in emulator_rows if not isinstance(result, UnsupportedByDeviceError)]
        reasons += [
            f"{side.variant.name} {row.case} on the emulator: {_list_failures(row)}{more}"
            for row, more in group_by_cause(judged)
        ]
        if awaited := check_awaited(side):
            status, actual = awaited
            checks.append((f"{side.variant.name}: {_AWAITED}", "before a thread ends", actual, status))
            if status == "FAIL":
                reasons.append(f"{side.variant.name}: {actual}")
            elif status == "PENDING":
                unchecked.append(f"{side.variant.name}: {_AWAITED}: {actual}")
        if memory is None:
            continue
        if not emulator_statuses:
            gap = "no case ran" if all(k.ptx for _, k in side.distinct) else "it runs PTX, and there is none"
            checks.append((f"{side.variant.name} on the emulator", "no fault", gap, "PENDING"))
        status, actual = memory.summarize(side)
        complete = bool(emulator_statuses) and "PENDING" not in emulator_statuses
        note = "" if complete or status != "PASS" else f" ({NOT_COVERED})"
        checks.append((f"{side.variant.name} memory check on the GPU", "no fault", actual + note, status))
        if status == "FAIL":
            reasons.append(f"{side.variant.name} memory check on the GPU: {actual}")
        elif unchecked_writes := memory.list_unchecked(side):
            unchecked.append(f"{side.variant.name}: writes to inputs at the timed shapes: {unchecked_writes}")
        elif status == "PENDING" and not complete:
            unchecked.append(
                f"{side.variant.name}: neither the check on the emulator ({gap}) nor the memory check on the GPU "
                f"({actual}) was done"
            )
    for shape, answer in outcome.tightened.items():
        checks.append((f"tolerance at {shape}", "as stated", f"relative: {answer} would meet the stated one", "PASS"))
    row_shapes = [row.shape for row in outcome.rows[sides[0].role] if row.variant == NORMAL] if sides else []
    trivial = {
        shape: names - NEED_OTHERS if row_shapes.count(shape) < 2 else names for shape, names in outcome.trivial.items()
    }
    unjudged = {shape: sorted(names) for shape, names in trivial.items() if names}
    if outcome.constant and all(outcome.constant.values()):
        unjudged = {shape: [name] for shape, name in outcome.constant.items()}
    for shape, names in unjudged.items():
        checks.append((f"answers that compute nothing at {shape}", "fail", f"{', '.join(names)} would pass", "PENDING"))
    cannot = [
        f"{shape} cannot be judged: {', '.join(names)} would pass; {_REMEDY}" for shape, names in unjudged.items()
    ]
    pending = sum(not row.gates for side in sides for row in outcome.rows[side.role])
    identical = sum(p.identical for p in outcome.parity)
    parity = f"; outputs identical on {identical}/{len(outcome.parity)}" if outcome.parity else ""
    return GateResult(
        gate="CORRECTNESS",
        status="FAIL" if reasons else "PENDING" if unknown or cannot else "PASS",
        summary="; ".join(
            [*cannot[:1], ", ".join(counts) + parity, *([f"{pending} could not be run here"] if pending else [])]
        ),
        reasons=[*reasons, *unknown, *cannot],
        checks=checks,
        unchecked=unchecked,
    )


def group_by_cause(rows: Sequence[CorrectnessRow]) -> list[tuple[CorrectnessRow, str]]:
    """Return, for each cause of failure, its first row and the number of further rows with this cause, in words.

    The record lists all rows.
    """
    groups: dict[tuple[object, ...], list[CorrectnessRow]] = {}
    for row in rows:
        if not row.passed or not row.gates:
            groups.setdefault(_identify_cause(row), []).append(row)
    causes = []
    for first, *others in groups.values():
        skipped = sum(row.is_skipped for row in others)
        alike = len(others) - skipped
        counts = [f"{alike} more of {len(rows)} cases {'fail alike' if first.gates else 'alike'}"] if alike else []
        counts += [f"{skipped}{'' if alike else f' more of {len(rows)} cases'} were not run"] if skipped else []
        causes.append((first, "".join(f"; {count}" for count in counts)))
    return causes


def _identify_cause(row: CorrectnessRow) -> tuple[object, ...]:
    """Return a key that rows with the same cause of failure share.

    The key is the failed gates. If a failed gate does not judge the values of the output, the key includes the notes
    without their numbers, because these differ from case to case. Line numbers stay.
    """
    failed = frozenset(name for name, held in row.gates.items() if not held)
    if failed and failed <= set(_VALUE_GATES) and len(row.notes) == 1:
        return (failed,)
    return failed, *(_NUMBER.sub("#", note.removeprefix(NOT_RUN)) for note in row.notes)


def _list_failures(row: CorrectnessRow) -> str:
    failures = ", ".join(name.removesuffix("_pass") for name, ok in row.gates.items() if not ok)
    return failures + (f" ({'; '.join(row.notes)})" if row.notes else "")


def _conclude(record: Run, result: GateResult) -> GateResult:
    """Return FAIL instead of PASS if a row failed, or if an implementation did not run all cases of its shapes."""
    result = conclude_checks(result)
    if not isinstance(record, Record | BenchRecord) or result.status != "PASS":
        return result
    cases = {(row.shape, row.seed, row.variant) for _, side in record.sides() for row in side.correctness}
    reasons = []
    for role, side in record.sides():
        # A baseline may reject the random shapes, and is then not compiled for them.
        built = {shape for build in side.builds for shape in build.shapes} or {shape for shape, _, _ in cases}
        wrong = [f"{row.shape} seed {row.seed}" for row in side.correctness if not row.passed]
        ran = {(row.shape, row.seed, row.variant) for row in side.correctness}
        if wrong:
            reasons.append(f"{role}: {', '.join(wrong)}")
        elif not ran or ran != {case for case in cases if case[0] in built}:
            reasons.append(f"{role} did not run all cases")
    return msgspec.structs.replace(result, reasons=reasons, status="FAIL" if reasons else "PASS")


def _list_sections(record: Run, plot: str | None) -> list[Section]:
    sections = [Section("Correctness", [_correctness(record)])]
    if isinstance(record, Record):
        sections.append(Section("Parity of the two sides", [_parity_table(record)]))
    return sections


def _correctness(record: Run) -> str:
    rows = [_correctness_cells(name, row) for name, side in record.sides() for row in side.correctness]
    if not rows:
        return formatting.without_html(facts.gate_line(record, "CORRECTNESS"))
    numbers = ("max", "mean", "bad %", "format max", "format mean", "kernel relative", "kernel / bound")
    text = formatting.table(("side", "shape", "seed", *numbers, "status", "failed, notes"), rows, right=numbers)
    return (
        f"{text}\n\nmax, mean and bad % are absolute errors against the unquantized reference; format errors are "
        "of exact arithmetic on the dequantized inputs: no kernel has less; kernel errors are against "
        "that exact arithmetic, relative (Frobenius) and as the worst element over what rounding explains."
    )


def _correctness_cells(side: str, row: CorrectnessRow) -> tuple[str, ...]:
    failed = [name for name, held in row.gates.items() if not held]
    return (
        side,
        row.shape,
        facts.describe_inputs(row),
        formatting.error(row.error.max_abs_err if row.error else None),
        formatting.error(row.error.mean_abs_err if row.error else None),
        formatting.error(row.error.pct_bad if row.error else None),
        formatting.error(row.format_error.max_abs_err),
        formatting.error(row.format_error.mean_abs_err),
        formatting.error(row.kernel_error.relative_error if row.kernel_error else None),
        formatting.error(row.bound_ratio),
        facts.row_status(row),
        facts.SKIPPED if row.is_skipped else "; ".join([*failed, *row.notes]),
    )


def _parity_table(record: Record) -> str:
    if not record.parity:
        return "PENDING: the outputs of the two sides were not compared"
    same = sum(row.identical for row in record.parity)
    worst = max(row.max_abs_diff for row in record.parity)
    rows = [
        (
            row.shape,
            str(row.seed),
            formatting.yes(row.identical),
            str(row.different_elements),
            formatting.error(row.max_abs_diff),
        )
        for row in record.parity
    ]
    numbers = ("different elements", "largest difference")
    lead = f"Bit-exact on {same}/{len(rows)}" + ("." if same == len(rows) else f"; largest difference {worst:.3g}.")
    return f"{lead}\n\n" + formatting.table(("shape", "seed", "bit-exact", *numbers), rows, right=numbers)


GATE = Gate(
    "CORRECTNESS",
    exit_code=13,
    after="RESOURCES",
    check=check_cases,
    conclude=_conclude,
    sections=_list_sections,
    runs_kernels=True,
)
