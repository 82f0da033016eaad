"""The pipeline of gates: the type of a gate, and one pass of one or two implementations through the gates."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from greenfast import __version__
from greenfast.device import assembler
from greenfast.device.identity import code_hash
from greenfast.judge.implementation import (
    CANDIDATE,
    BuiltSide,
    Implementation,
    count_side_instructions,
)
from greenfast.judge.record_schema import (
    Build,
    CachedTiming,
    CorrectnessRow,
    GateResult,
    Limits,
    ParityRow,
    Run,
    Side,
    SpeedupRow,
    Status,
    TimingRow,
    read_status,
)
from greenfast.judge.report.formatting import Section
from greenfast.judge.request import ProgressListener, Request, git_state, now, package_versions
from greenfast.spec.facts import KernelCounts
from greenfast.spec.problem import least_work


@dataclass(frozen=True)
class Gate:
    """A gate. Its module in ``judge.gates`` defines it as ``GATE``; ``gates.registry`` collects all gates.

    exit_code: the exit code of ``greenfast judge`` if the gate is the first that fails. It belongs to the name: a new
        gate gets a new number, independent of its position.
    after: the name of the gate before it; empty for the first.
    check: runs the gate, and stores its measurements in the run.
    sections: returns the sections of a record's report. Its second argument is the path
        of the figure of the record, if there is one.
    conclude: returns the result that follows from a record's measurements and from the rows of its result.
    runs_kernels: True if the gate launches kernels. The report shows their sections first.
    """

    name: str
    exit_code: int
    after: str
    check: Callable[[GateRun], GateResult]
    sections: Callable[[Run, str | None], list[Section]] = lambda record, plot: []
    conclude: Callable[[Run, GateResult], GateResult] = lambda record, result: conclude_checks(result)
    runs_kernels: bool = False


_LIMIT = re.compile(r"(<=|>=|<|>)?\s*([-+.\deE]+)(?: \(.*\))?")
_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


def conclude_checks(result: GateResult) -> GateResult:
    """Return a gate's result with the statuses that follow from its rows, such as 74 and "<= 64 (stage2)"."""
    checks = [
        (check, target, actual, _conclude_row(target, actual, was)) for check, target, actual, was in result.checks
    ]
    failed = result.status == "PASS" and (result.reasons or any(status == "FAIL" for *_, status in checks))
    return msgspec.structs.replace(result, checks=checks, status="FAIL" if failed else result.status)


def _conclude_row(target: str, actual: str, status: Status) -> Status:
    limit, number = _LIMIT.fullmatch(target), _LIMIT.fullmatch(actual)
    if status == "PENDING" or not limit or not limit[1] or not number or number[1]:
        return status
    try:
        return "PASS" if _COMPARISONS[limit[1]](float(number[2]), float(limit[2])) else "FAIL"
    except ValueError:
        return status


def pending(gate: str, reason: str) -> GateResult:
    """Return the result of a gate that could not run."""
    return GateResult(gate=gate, status="PENDING", summary=reason)


@dataclass
class CorrectnessOutcome:
    """The results of the gate: rows by role, parity, and a digest of each output by (role, shape, seed).

    counts: by role and shape, from the first seed; empty if the device does not count.
    tightened: by shape, the trivial answer that would meet the stated tolerance. These shapes are judged relative to
        the size of their outputs.
    trivial: by shape, the trivial answers that pass all cases nevertheless.
    constant: by shape, the name of the right answer if it is one number for all elements and inputs, such as the
        softmax of one number; otherwise "".
    """

    rows: dict[str, list[CorrectnessRow]] = field(default_factory=dict)
    parity: list[ParityRow] = field(default_factory=list)
    digests: dict[tuple[str, str, int], str] = field(default_factory=dict)
    counts: dict[str, dict[str, KernelCounts]] = field(default_factory=dict)
    tightened: dict[str, str] = field(default_factory=dict)
    trivial: dict[str, set[str]] = field(default_factory=dict)
    constant: dict[str, str] = field(default_factory=dict)


@dataclass
class PerformanceOutcome:
    """The measurements: timing rows by role (and ``AGAIN``), speedups, range of the clocks, seed of the draws."""

    rows: dict[str, list[TimingRow]] = field(default_factory=dict)
    speedups: list[SpeedupRow] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)
    order_seed: int | None = None


class GateRun:
    """One pass of the implementations through the gates. Each result is stored and reported when its gate ends."""

    def __init__(
        self,
        request: Request,
        implementations: Mapping[str, Implementation],
        observer: ProgressListener,
        *,
        required: float | None = None,
        profile: Callable[[Request, Implementation, str], tuple[list[str], str]] | None = None,
        reuse_timing: Callable[[GateRun, str], GateResult] = lambda run, reason: pending("PERFORMANCE", reason),
    ) -> None:
        """Take the implementations by role.

        required: the required speedup, instead of the one of the candidate's rung.
        profile: takes a profile of an implementation; returns its files, or none and the reason.
        reuse_timing: returns PERFORMANCE of a machine that cannot time, for the reason given. It may set ``quoted``,
            and ``quote_completes`` if their record covers the cases that this run skips.
        """
        self.request = request
        self.profile = profile
        self.reuse_timing = reuse_timing
        self.implementations = implementations
        candidate = self.implementations.get(CANDIDATE)
        self.required_speedup = required or (candidate.requirements.required_speedup if candidate else None)
        self.created = now()
        self.gates: list[GateResult] = []
        self.sides: list[BuiltSide] = []
        self.correctness = CorrectnessOutcome()
        self.timed = PerformanceOutcome()
        self.quoted: CachedTiming | None = None
        self.quote_completes = False
        self._observer = observer

    def add(self, result: GateResult) -> GateResult:
        """Store and report a gate's result."""
        self.gates.append(result)
        self._observer.gate(result)
        return result

    def status(self, gate: str) -> Status:
        """Return a gate's status; PENDING until it ends."""
        return read_status(self.gates, gate)

    def progress(self, gate: str) -> Callable[[float, str], None]:
        """Return the function that reports a gate's progress."""
        return lambda share, text: self._observer.progress(gate, share, text)

    def run(self, gates: Iterable[Gate]) -> None:
        """Run the gates in order. If the first does not pass, the others are PENDING."""
        for gate in gates:
            first = self.gates[0] if self.gates else None
            if first is None or first.status == "PASS":
                self.add(gate.check(self))
            else:
                state = "failed" if first.status == "FAIL" else "is pending"
                self.add(pending(gate.name, f"not asked: {first.gate} {state}"))

    def cannot_run(self) -> str | None:
        """Return the reason why a kernel cannot run on the chosen device, or None if all can."""
        if reason := self.request.cannot_run():
            return reason
        emulated = self.request.device is not None and self.request.device.kind != "gpu"
        for side in self.sides:
            for _, kernel in side.distinct:
                if emulated and not kernel.ptx:
                    return f"the emulator reads PTX, and {kernel.source.name} is machine code; it runs on a GPU"
                if not emulated and not kernel.cubin:
                    return f"{kernel.source.name} was not assembled: {assembler.MISSING}"
        return None

    def built(self, role: str) -> BuiltSide | None:
        """Return the compiled kernels of a role, or None if they did not compile."""
        return next((side for side in self.sides if side.role == role), None)

    def side(self, role: str) -> Side:
        """Return the results of a role's implementation for the record."""
        implementation, built = self.implementations[role], self.built(role)
        variant = implementation.variant
        return Side(
            variant=variant.name,
            toggles=variant.values,
            correctness=self.correctness.rows.get(role, []),
            timing=self.timed.rows.get(role, []),
            counts=self.correctness.counts.get(role, {}),
            limits=self._limits(role),
            builds=self._builds(built) if built else [],
            solution=implementation.source,
            sandbox=list(implementation.sandbox),
        )

    def _limits(self, role: str) -> dict[str, Limits]:
        gates, own = self.request.gates, self.implementations[role].requirements.kernel_error
        return {shape.name: gates.select(shape.dims, own).limits for shape in self.request.built_shapes}

    def facts(self) -> dict[str, Any]:
        """Return the fields that all records share, by name."""
        request = self.request
        return {
            "created": self.created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "task": request.task.config.name,
            "format": request.format,
            "arch": request.target.name,
            "command": request.command,
            "package_version": __version__,
            "gates": self.gates,
            "git": git_state(),
            "device": request.device,
            "environment": package_versions(),
            "least_work": self.least_work(),
        }

    def least_work(self) -> dict[str, dict[str, int]]:
        """Return the problem's minimum counts by shape, for the shapes with counted instructions."""
        request = self.request
        counted = {shape for counts in self.correctness.counts.values() for shape in counts}
        minima = {s.name: least_work(request.task.problem, s.dims) for s in request.built_shapes if s.name in counted}
        return {shape: minimum for shape, minimum in minima.items() if minimum}

    @property
    def stamp(self) -> str:
        """Return the name of the run's folder, YYYYMMDD-HHMMSS."""
        return self.created.strftime("%Y%m%d-%H%M%S")

    def _builds(self, side: BuiltSide) -> list[Build]:
        counts = count_side_instructions(side)
        dims = {shape.name: shape.dims for shape in self.request.built_shapes}
        return [
            Build(
                entry=k.source.entry,
                source=k.source.name,
                dims=dict(dims[shape]),
                arch=k.target.name,
                options=list(k.options),
                compiler=k.compiler,
                kernel_hash=k.kernel_hash,
                compile_ms=round(k.compile_ms, 1),
                from_cache=k.from_cache,
                resources=k.reported,
                machine_code=counts[k.kernel_hash],
                shapes=[
                    name
                    for name, program in side.programs.items()
                    if any(other.kernel_hash == k.kernel_hash for other in program.kernels)
                ],
                code_hash=code_hash(k),
                launches={
                    name: facts
                    for shape, program in side.programs.items()
                    for name, (other, facts) in program.name_launches(shape, dims[shape]).items()
                    if other.kernel_hash == k.kernel_hash
                },
            )
            for shape, k in side.distinct
        ]
