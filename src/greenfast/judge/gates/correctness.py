"""CORRECTNESS: format error and kernel error per shape and seed, both sides, and the sides against each other."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.device.session import RunResult, output_digest
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.check_plan import CasePlan
from greenfast.judge.error_metrics import (
    bound_histogram,
    error_histogram,
    error_stats,
    nearer_of,
    relative_error_factor,
    worst_bound_ratio,
    worst_element,
)
from greenfast.judge.gates.emulated import EmulatedRuns
from greenfast.judge.gates.memory import NOT_COVERED, MemoryChecks
from greenfast.judge.gates.sensitivity import (
    CONSTANT,
    FILLS,
    NEED_OTHERS,
    ZEROS,
    filled,
    find_dropped,
    is_far,
    segments,
    trivial_answers,
)
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.record_schema import (
    NOT_RUN,
    CorrectnessRow,
    ErrorStats,
    GateResult,
    Histogram,
    ParityRow,
    Status,
    WorstElement,
)
from greenfast.judge.task import ErrorGate, FormatGates, KernelErrorGate, Shape
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import KernelCounts
from greenfast.spec.kernel import PHASE_BUFFER
from greenfast.spec.problem import NORMAL, Case, Problem, References, case_of, references_of

#: The share of its elements that a reference on a GPU has within the tolerance around the same reference on the CPU.
#: Where sums are rounded to 16 bits and cancel afterwards, a few may be further away.
_LIKE_ITSELF = 0.99
#: The gates of a row that judge the values of the output.
_OF_VALUES = (
    "finite_pass",
    "max_abs_err_pass",
    "mean_abs_err_pass",
    "pct_bad_pass",
    "kernel_relative_error_pass",
    "kernel_bound_pass",
)
#: The statistics of the error against the unquantized reference that have limits, and the largest share of a limit that
#: the format's own error may take of it where the seed is not the task's.
_ERRORS, _ROOM = ("max_abs_err", "mean_abs_err", "pct_bad"), 0.9
_AWAITED = "asynchronous operations are awaited"
_NUMBER = re.compile(r"(?<![:\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
#: Each case runs this often on equal input in fresh memory; outputs that differ in a bit show a race.
REPEATS = 2
_REMEDY = "give the problem a bound that this exceeds, or inputs for which it is wrong"


@dataclass
class CorrectnessOutcome:
    """What the gate found: rows by role, parity, and a digest of each output by (role, shape, seed).

    counts: by role and shape, from the first seed; empty where nothing counts. tightened: the shapes whose stated
    tolerance an answer that computes nothing would meet, and which are judged relative to their outputs' size. trivial:
    by shape, the answers that compute nothing and pass nevertheless, on all cases. constant: by shape, the name
    of the right answer if it is the same number everywhere and for all inputs, as the softmax of one number is; or "".
    """

    rows: dict[str, list[CorrectnessRow]] = field(default_factory=dict)
    parity: list[ParityRow] = field(default_factory=list)
    digests: dict[tuple[str, str, int], str] = field(default_factory=dict)
    counts: dict[str, dict[str, KernelCounts]] = field(default_factory=dict)
    tightened: dict[str, str] = field(default_factory=dict)
    trivial: dict[str, set[str]] = field(default_factory=dict)
    constant: dict[str, str] = field(default_factory=dict)


def check(
    sides: Sequence[BuiltSide],
    problem: Problem,
    cells: Sequence[CasePlan],
    fmt: str,
    gates: FormatGates,
    own_gates: Mapping[str, KernelErrorGate],
    make_worker: Callable[[], Worker],
    progress: Callable[[float, str], None],
    *,
    emulated: EmulatedRuns | None = None,
    memory: MemoryChecks | None = None,
    check_awaited: Callable[[BuiltSide], tuple[Status, str] | None] | None = None,
    own: str | None = None,
) -> tuple[GateResult, CorrectnessOutcome]:
    """Run every side on every case that it computes, each side in a separate process.

    A side whose process fails is not run further. What the device could not run is no fault of the kernel: the gate is
    PENDING, or FAIL where another case was wrong.

    own_gates: by role, the kernel-error gate of a side whose rung defines one.
    emulated: cases that the emulator runs at the same time. memory: the memory check on the GPU. The faults of both
    count. A side for which neither could be done is named in the result's ``unchecked``.
    check_awaited: tells of a side's kernels whether their asynchronous operations are awaited (``in_flight``).
    own: the role of the problem's own reference, whose output here is as right as its reference where that is a run.

    Raises UsageError for a problem whose references do not hold (``spec.problem.references_of``), and for a workspace
    with a buffer's name.
    """
    outcome = CorrectnessOutcome({side.role: [] for side in sides})
    workers = {side.role: make_worker() for side in sides}
    broken: dict[str, WorkerError] = {}
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(max(1, len(sides))))
        for worker in workers.values():
            stack.callback(worker.close)  # before the threads are waited for
        if emulated:
            stack.enter_context(emulated)
        if memory:
            stack.enter_context(memory)
        checked = _Checked(problem, fmt, gates, own_gates)
        inputs: dict[tuple[str, int, str], str] = {}
        others: dict[str, tuple[str, NDArray[np.float64]]] = {}
        shown: set[str] = set()
        seen: dict[int, tuple[CasePlan, Case, References, NDArray[np.float64] | None]] = {}
        _require_same_inputs(problem, cells[0], fmt)
        for done, cell in enumerate(cells):
            progress(done / len(cells), str(cell))
            shape = cell.shape.name
            case = case_of(problem, cell.shape.dims, cell.seed, fmt, cell.variant)
            _require_other_inputs(inputs, cell, case)
            if emulated and cell in emulated.cells:
                emulated.start(cell, case)
            asked = [side for side in sides if shape in side.programs]
            for side in asked:
                _require_own_workspaces(side, shape, case)
            running = {
                side.role: threads.submit(_ran, workers[side.role], side, cell, case, broken.get(side.role), memory)
                for side in asked
            }
            references = references_of(problem, cell.shape.dims, cell.seed, fmt, cell.variant)
            digest, other = others.get(shape, ("", None))
            stated = references
            references = checked.settle(
                cell, case, references, None if digest == case.digest else other, shape not in others, outcome
            )
            if cell.variant == NORMAL:
                others.setdefault(shape, (case.digest, references.exact))
            decoded: dict[str, NDArray[np.float64]] = {}
            also = None
            for side in sorted(asked, key=lambda side: side.role != own):
                result = running[side.role].result()
                if isinstance(result, WorkerError) and result.ended:
                    broken.setdefault(side.role, result)
                expected = _of_itself(stated) if side.role == own else references
                row, values = checked.row(side.role, cell, case, expected, result, also)
                outcome.rows[side.role].append(row)
                if side.role == own and references.is_run and row.passed:
                    also = values
                    _note_noise(outcome, cell, references, values)
                if values is None or cell.variant != NORMAL:
                    continue
                assert isinstance(result, RunResult)
                if row.passed and shape not in shown:
                    checked.require_shown(side.role, cell, case, expected, result, values)
                    shown.add(shape)
                decoded[side.role] = values
                outcome.digests[side.role, shape, cell.seed] = output_digest(result.outputs)
                if result.counts is not None:
                    outcome.counts.setdefault(side.role, {}).setdefault(shape, result.counts)
            if len(decoded) == 2:
                decoded = {side.role: decoded[side.role] for side in sides}
                same_bits = len({outcome.digests[role, shape, cell.seed] for role in decoded}) == 1
                outcome.parity.append(_parity(cell.shape, cell.seed, same_bits, *decoded.values()))
            if emulated and cell in emulated.cells:
                seen[emulated.cells.index(cell)] = cell, case, references, also
        emulated_rows = [
            (role, result, checked.row(role, cell, case, references, result, also)[0])
            for (role, number), result in (emulated.results().items() if emulated else ())
            for cell, case, references, also in (seen[number],)
        ]
    return _result(outcome, sides, emulated_rows, memory, check_awaited), outcome


def _ran(
    worker: Worker, side: BuiltSide, cell: CasePlan, case: Case, broken: WorkerError | None, memory: MemoryChecks | None
) -> RunResult | WorkerError:
    """Run a case in a side's process, and check its memory; broken: why the process is not used further."""
    if broken is not None:
        return type(broken)(f"{NOT_RUN}{broken}")
    try:
        result = worker.run(side.executable(cell.shape.name), case, REPEATS)
    except WorkerError as e:
        return e
    if memory is not None:
        memory.run(side, cell, case, result)
    return result


def _require_same_inputs(problem: Problem, cell: CasePlan, fmt: str) -> None:
    """The references are of what make_case gives when it is asked again."""
    first, again = (case_of(problem, cell.shape.dims, cell.seed, fmt, cell.variant).digest for _ in range(2))
    if first != again:
        raise UsageError(
            f"make_case gives other inputs when it is asked for {cell} again; draw them from a generator with the seed"
        )


def _require_other_inputs(seen: dict[tuple[str, int, str], str], cell: CasePlan, case: Case) -> None:
    """A variant whose inputs are the normal ones asks nothing."""
    if not case.inputs or (cell.variant == NORMAL and not cell.drawn):
        return
    variant = seen.setdefault((cell.shape.name, cell.seed, case.digest), cell.variant)
    if variant != cell.variant:
        raise UsageError(
            f"make_case gives the inputs of variant {variant!r} for {cell} too; give each name of VARIANTS its own"
        )


def _require_own_workspaces(side: BuiltSide, shape: str, case: Case) -> None:
    """A workspace in the place of an output would begin with what the solution says, such as zeros."""
    names = case.inputs.keys() | case.outputs.keys() | {PHASE_BUFFER}
    if taken := sorted(names & side.executable(shape).workspaces.keys()):
        raise UsageError(
            f"{side.variant.name}: workspaces: {', '.join(taken)}: the problem has buffers of this name; choose others"
        )


@dataclass(frozen=True)
class _Checked:
    """What outputs are compared with."""

    problem: Problem
    fmt: str
    gates: FormatGates
    own_gates: Mapping[str, KernelErrorGate]

    def row(
        self,
        role: str,
        cell: CasePlan,
        case: Case,
        references: References,
        result: RunResult | WorkerError,
        also: NDArray[np.float64] | None,
    ) -> tuple[CorrectnessRow, NDArray[np.float64] | None]:
        """One side's row of a case, and its decoded output; None where it did not run.

        also: another output that is as right; each element is compared with the nearer of the two.
        """
        decoded = None
        if not isinstance(result, WorkerError):
            result = replace(result, violations=[*result.violations, *_odd_booleans(result.outputs)])
            decoded = self.problem.decode(result.outputs, self.fmt)
            if not isinstance(decoded, np.ndarray) or decoded.dtype.kind not in "fiub":
                found = getattr(decoded, "dtype", type(decoded).__name__)
                raise UsageError(f"{cell}: decode gives {found}; an array of float64 is asked for")
            if decoded.shape != references.exact.shape:
                shapes_differ = f"{decoded.shape}, the references have {references.exact.shape}"
                raise UsageError(f"{cell}: decode gives an array of shape {shapes_differ}")
        if decoded is not None and also is not None:
            nearer = nearer_of(decoded, also, references.exact)
            references = replace(references, full=nearer, exact=nearer)
        kernel_gate = self.own_gates.get(role, self.gates.kernel_error)
        gate = self.gates.error_for(cell.shape.dims)
        return _row(cell, case, references, gate, kernel_gate, result, decoded), decoded

    def settle(
        self,
        cell: CasePlan,
        case: Case,
        references: References,
        other: NDArray[np.float64] | None,
        first: bool,
        outcome: CorrectnessOutcome,
    ) -> References:
        """Return the references with a relative bound if an answer that computes nothing is within the stated one.

        Answers that pass nevertheless are noted in ``outcome.trivial``, for the task's own shapes and normal inputs.
        other: the exact answer to the first inputs of this shape, if these are not the same ones. first: whether these
        are the first.
        """
        asked = cell.variant == NORMAL and not cell.new_shape
        if references.relative is None and not asked:
            return references
        passing = self._trivial(cell, case, references, other)
        if passing and references.relative is not None:
            outcome.tightened.setdefault(cell.shape.name, passing[0])
            references = replace(references, bound=references.relative)
            passing = self._trivial(cell, case, references, other)
        if asked:
            names = set(passing) | (NEED_OTHERS if first else set())
            outcome.trivial[cell.shape.name] = names & outcome.trivial.get(cell.shape.name, names)
            exact = references.exact
            if other is not None and exact.size:  # one case alone cannot show it: a sum is one number too
                same = bool((exact == exact.flat[0]).all()) and np.array_equal(other, exact)
                name = ZEROS if exact.flat[0] == 0 else CONSTANT
                outcome.constant[cell.shape.name] = name if same and outcome.constant.get(cell.shape.name, name) else ""
        return references

    def _trivial(
        self, cell: CasePlan, case: Case, references: References, other: NDArray[np.float64] | None
    ) -> list[str]:
        """Name the answers that compute nothing and pass; of each output alone too, the others being right."""
        gate = self.gates.error_for(cell.shape.dims)
        kernel_gates = [self.gates.kernel_error, *self.own_gates.values()]
        passing: list[str] = []
        format_error = None
        for name, answer in trivial_answers(case, references, other):
            if np.array_equal(answer, references.exact):  # right, as the softmax of one number is 1
                continue
            for kernel_gate in kernel_gates:
                if is_far(answer, references, references.bound_of(kernel_gate.rounding), kernel_gate.bound_factor):
                    continue
                format_error = format_error or error_stats(references.exact, references.full, gate.bad_abs_err)
                values = _measure(cell, references, gate, kernel_gate, format_error, answer)
                if all(values.gates.values()):
                    passing.append(name)
                    break
        return list(dict.fromkeys(passing))

    def require_shown(
        self,
        role: str,
        cell: CasePlan,
        case: Case,
        references: References,
        result: RunResult,
        decoded: NDArray[np.float64],
    ) -> None:
        """Raise UsageError if the check does not notice a change of an output that passed."""
        dropped = find_dropped(lambda outputs: self.problem.decode(outputs, self.fmt), result.outputs, decoded)
        if dropped:
            raise UsageError(
                f"{cell}: CORRECTNESS cannot check all outputs: {dropped}; a kernel could write anything there. Let "
                "decode return them and references their values, or declare no output that is not compared"
            )
        kernel_gate = self.own_gates.get(role, self.gates.kernel_error)
        gate = self.gates.error_for(cell.shape.dims)

        def passes(outputs: dict[str, NDArray[Any]]) -> bool:
            with np.errstate(all="ignore"):
                values = self.problem.decode(outputs, self.fmt)
            if values.shape != decoded.shape or not np.isfinite(values).all() or np.array_equal(values, decoded):
                return False
            return _row(cell, case, references, gate, kernel_gate, replace(result, outputs=outputs), values).passed

        for name, variants in filled(result.outputs):
            if all(map(passes, variants)):
                raise UsageError(
                    f"{cell}: CORRECTNESS cannot judge output {name!r}: it passes with {FILLS[0]:g} in all of its "
                    f"elements, and with {FILLS[1]:g}. Give it a bound that such values exceed"
                )


def _note_noise(
    outcome: CorrectnessOutcome, cell: CasePlan, references: References, values: NDArray[np.float64] | None
) -> None:
    """Note a shape whose own reference, run here, is beyond the relative bound that was to be used."""
    shape = cell.shape.name
    if references.bound is not references.relative or values is None or not np.isfinite(values).all():
        return
    if worst_bound_ratio(values, references.exact, references.bound, matched=_LIKE_ITSELF) > 1:
        outcome.trivial.setdefault(shape, set()).add(outcome.tightened[shape])


def _of_itself(references: References) -> References:
    """What the problem's own reference is compared with."""
    return replace(references, matched=min(references.matched, _LIKE_ITSELF)) if references.is_run else references


def _odd_booleans(outputs: Mapping[str, NDArray[Any]]) -> list[str]:
    """Bytes of truth values that are neither 0 nor 1. Such as 255, which unwritten ones hold, some take for true."""
    odd = {n: int((a.view(np.uint8) > 1).sum()) for n, a in outputs.items() if a.dtype == np.bool_}
    return [f"{count} elements of {name!r}, which is bool, are neither 0 nor 1" for name, count in odd.items() if count]


def _row(
    cell: CasePlan,
    case: Case,
    references: References,
    gate: ErrorGate,
    kernel_gate: KernelErrorGate,
    result: RunResult | WorkerError,
    decoded: NDArray[np.float64] | None,
) -> CorrectnessRow:
    """One side's row; a kernel that did not run, or wrote NaN, has no error statistics and fails.

    A row of what the device cannot run has no gates.
    """
    bad = gate.bad_abs_err
    format_error = error_stats(references.exact, references.full, bad)
    error = kernel_error = bound_ratio = None
    histograms: dict[str, Histogram] = {}
    worst: WorstElement | None = None
    held = {"format_error_pass": _within(format_error, gate)} if cell.format_is_judged else {}
    notes = [str(result)] if isinstance(result, WorkerError) else [*result.violations, *result.notes]
    if isinstance(result, UnsupportedByDeviceError):
        held = {}
    elif isinstance(result, WorkerError) or decoded is None:
        held["ran_pass"] = False
    else:
        held["memory_pass"] = not result.violations
        held["repeat_pass"] = result.repeatable
        if not result.repeatable:
            notes.append(f"{REPEATS} runs on the same input gave different bits (a race?)")
        bound = references.bound_of(kernel_gate.rounding)
        worst = worst_element(decoded, references.exact, kernel_gate.bound_factor * bound, result.outputs)
        bad_elements = int((~np.isfinite(decoded)).sum())
        held["finite_pass"] = bad_elements == 0
        if bad_elements:
            notes.append(f"{bad_elements} of {decoded.size} output elements are not finite or were never written")
        else:
            values = _measure(cell, references, gate, kernel_gate, format_error, decoded)
            error, kernel_error, bound_ratio = values.error, values.kernel_error, values.bound_ratio
            histograms["error_histogram"] = error_histogram(decoded, references.exact)
            histograms["bound_histogram"] = bound_histogram(decoded, references.exact, bound)
            held |= values.gates
        if not all(held.get(name, True) for name in _OF_VALUES):
            notes.append(str(worst))
    return CorrectnessRow(
        shape=cell.shape.name,
        dims=dict(cell.shape.dims),
        seed=cell.seed,
        variant=cell.variant,
        drawn=cell.drawn,
        own_shape=cell.drawn and not cell.new_shape,
        inputs_digest=case.digest,
        error=error,
        format_error=format_error,
        kernel_error=kernel_error,
        bound_ratio=bound_ratio,
        gates=held,
        notes=notes,
        case_bytes=case.nbytes,
        worst=worst,
        **histograms,
    )


@dataclass(frozen=True)
class _Values:
    """Errors of decoded values, and the gates that judge them."""

    error: ErrorStats
    kernel_error: ErrorStats
    bound_ratio: float
    gates: dict[str, bool]


def _measure(
    cell: CasePlan,
    references: References,
    gate: ErrorGate,
    kernel_gate: KernelErrorGate,
    format_error: ErrorStats,
    decoded: NDArray[np.float64],
) -> _Values:
    """Measure and judge decoded values, all of which are finite."""
    error = error_stats(decoded, references.full, gate.bad_abs_err)
    same = references.exact is references.full
    kernel_error = error if same else error_stats(decoded, references.exact, gate.bad_abs_err)
    bound = references.bound_of(kernel_gate.rounding)
    ratios = (
        worst_bound_ratio(got, exact, allowed, matched=references.matched, most=references.most)
        for got, exact, allowed in zip(
            *(segments(references, array) for array in (decoded, references.exact, bound)), strict=True
        )
    )
    bound_ratio = float(np.max(list(ratios), initial=0.0))
    held = {}
    for name in _judged_errors(cell, format_error, gate):
        held[f"{name}_pass"] = getattr(error, name) <= getattr(gate, name)
    allowed = kernel_gate.relative_error
    if cell.variant != NORMAL or cell.new_shape:
        allowed *= relative_error_factor(decoded.size, cell.variant)
    held["kernel_relative_error_pass"] = kernel_error.relative_error <= allowed
    held["kernel_bound_pass"] = bound_ratio <= kernel_gate.bound_factor
    return _Values(error, kernel_error, bound_ratio, held)


def _judged_errors(cell: CasePlan, format_error: ErrorStats, gate: ErrorGate) -> list[str]:
    """Return which limits on the error against the unquantized reference apply to a case.

    They are the task's for its own shapes and seeds. With a secret seed, the format alone may come close to one of them
    or beyond. Then that one does not apply: a right kernel could not meet it.
    """
    if cell.format_is_judged:
        return list(_ERRORS)
    if cell.new_shape or cell.variant != NORMAL:
        return []
    return [name for name in _ERRORS if getattr(format_error, name) <= _ROOM * getattr(gate, name)]


def _within(error: ErrorStats, gate: ErrorGate) -> bool:
    return (
        error.max_abs_err <= gate.max_abs_err
        and error.mean_abs_err <= gate.mean_abs_err
        and error.pct_bad <= gate.pct_bad
    )


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
    outcome: CorrectnessOutcome,
    sides: Sequence[BuiltSide],
    emulated: Sequence[tuple[str, RunResult | WorkerError, CorrectnessRow]],
    memory: MemoryChecks | None,
    check_awaited: Callable[[BuiltSide], tuple[Status, str] | None] | None,
) -> GateResult:
    checks: list[tuple[str, str, str, Status]] = []
    reasons: list[str] = []
    unknown: list[str] = []
    unchecked: list[str] = []
    counts = []
    for side in sides:
        rows = outcome.rows[side.role]
        passed = sum(row.passed for row in rows)
        before = len(reasons), len(unknown)
        for row, more in group_by_cause(rows):
            if row.gates:
                reasons.append(f"{_where(side, row)}: {_missed(row)}{more}")
            else:
                unknown.append(f"{_where(side, row)}: could not be run here: {'; '.join(row.notes)}{more}")
        counts.append(f"{side.variant.name} {passed}/{len(rows)}")
        checks.append(
            (
                f"{side.role} {side.variant.name}",
                f"{len(rows)}/{len(rows)}",
                f"{passed}/{len(rows)}",
                "FAIL" if len(reasons) > before[0] else "PENDING" if len(unknown) > before[1] else "PASS",
            )
        )
        by_emulator: list[Status] = []
        why = ""
        on_emulator = [(result, row) for role, result, row in emulated if role == side.role]
        for result, row in on_emulator:
            status: Status = (
                "PENDING" if isinstance(result, UnsupportedByDeviceError) else "PASS" if row.passed else "FAIL"
            )
            actual = "; ".join(["no fault", *row.notes] if status == "PASS" else row.notes) or _missed(row)
            checks.append((f"{_where(side, row)} on the emulator", "no fault", actual, status))
            if status == "PENDING":
                why = actual
            by_emulator.append(status)
        judged = [row for result, row in on_emulator if not isinstance(result, UnsupportedByDeviceError)]
        reasons += [
            f"{_where(side, row)} on the emulator: {_missed(row)}{more}" for row, more in group_by_cause(judged)
        ]
        if awaited := check_awaited(side) if check_awaited else None:
            status, actual = awaited
            checks.append((f"{side.variant.name}: {_AWAITED}", "before a thread ends", actual, status))
            if status == "FAIL":
                reasons.append(f"{side.variant.name}: {actual}")
            elif status == "PENDING":
                unchecked.append(f"{side.variant.name}: {_AWAITED}: {actual}")
        if memory is None:
            continue
        if not by_emulator:
            why = "no case ran" if all(k.ptx for _, k in side.distinct) else "it runs PTX, and there is none"
            checks.append((f"{side.variant.name} on the emulator", "no fault", why, "PENDING"))
        status, actual = memory.check_of(side)
        complete = bool(by_emulator) and "PENDING" not in by_emulator
        note = "" if complete or status != "PASS" else f" ({NOT_COVERED})"
        checks.append((f"{side.variant.name} memory check on the GPU", "no fault", actual + note, status))
        if status == "FAIL":
            reasons.append(f"{side.variant.name} memory check on the GPU: {actual}")
        elif left_open := memory.left_open(side):
            unchecked.append(f"{side.variant.name}: writes to inputs at the timed shapes: {left_open}")
        elif status == "PENDING" and not complete:
            unchecked.append(
                f"{side.variant.name}: neither the check on the emulator ({why}) nor the memory check on the GPU "
                f"({actual}) was done"
            )
    for shape, answer in outcome.tightened.items():
        checks.append((f"tolerance at {shape}", "as stated", f"relative: {answer} would meet the stated one", "PASS"))
    cells = [row.shape for row in outcome.rows[sides[0].role] if row.variant == NORMAL] if sides else []
    known = {
        shape: names - NEED_OTHERS if cells.count(shape) < 2 else names for shape, names in outcome.trivial.items()
    }
    unjudged = {shape: sorted(names) for shape, names in known.items() if names}
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


def _where(side: BuiltSide, row: CorrectnessRow) -> str:
    variant = f" {row.variant}" if row.variant != NORMAL else ""
    return f"{side.variant.name} {row.shape} seed {row.seed}{variant}"


def group_by_cause(rows: Sequence[CorrectnessRow]) -> list[tuple[CorrectnessRow, str]]:
    """Return the first row of each cause for which rows did not pass, and how many more rows have this cause.

    The record has all rows.
    """
    groups: dict[tuple[object, ...], list[CorrectnessRow]] = {}
    for row in rows:
        if not row.passed or not row.gates:
            groups.setdefault(_cause(row), []).append(row)
    found = []
    for first, *others in groups.values():
        skipped = sum(row.is_skipped for row in others)
        alike = len(others) - skipped
        counts = [f"{alike} more of {len(rows)} cases {'fail alike' if first.gates else 'alike'}"] if alike else []
        counts += [f"{skipped}{'' if alike else f' more of {len(rows)} cases'} were not run"] if skipped else []
        found.append((first, "".join(f"; {count}" for count in counts)))
    return found


def _cause(row: CorrectnessRow) -> tuple[object, ...]:
    """Return what rows of one cause have in common.

    That is the failed gates. If they judge more than the values of the output, it is the notes too, without the numbers
    that differ from case to case; line numbers stay.
    """
    failed = frozenset(name for name, held in row.gates.items() if not held)
    if failed and failed <= set(_OF_VALUES) and len(row.notes) == 1:
        return (failed,)
    return failed, *(_NUMBER.sub("#", note.removeprefix(NOT_RUN)) for note in row.notes)


def _missed(row: CorrectnessRow) -> str:
    missed = ", ".join(name.removesuffix("_pass") for name, ok in row.gates.items() if not ok)
    return missed + (f" ({'; '.join(row.notes)})" if row.notes else "")
