"""The gates that every run begins with, for one or two variants, and what every record says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from greenfast import __version__
from greenfast.device import assembler
from greenfast.device.identity import code_hash
from greenfast.judge.environment import git_state, now, package_versions
from greenfast.judge.gates import build, correctness, evidence, resources
from greenfast.judge.gates.correctness import CorrectnessOutcome
from greenfast.judge.gates.emulated import EmulatedRuns
from greenfast.judge.gates.memory import MemoryChecks
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.implementation import Implementation, build_rung_implementation
from greenfast.judge.pending_operations import check_awaited
from greenfast.judge.record_schema import GATES, Build, GateResult, Limits, Side, Status, TimingRow, status_of
from greenfast.judge.request import ProgressListener, Request
from greenfast.judge.task import KernelErrorGate
from greenfast.judge.variant import Variant
from greenfast.spec.problem import least_work

NOT_CORRECT = "not asked: a kernel that is not correct is not timed"
NOT_DECIDED = "not asked: what has not been shown to be correct is not timed"


def pending(gate: str, reason: str) -> GateResult:
    """A gate that could not be run."""
    return GateResult(gate=gate, status="PENDING", summary=reason)


class GateRun:
    """One pass through the gates over the variants of each role; every gate's result is kept and shown as it ends."""

    def __init__(
        self, request: Request, implementations: Mapping[str, Implementation | Variant], observer: ProgressListener
    ) -> None:
        """By role, what takes part: an implementation, or a variant of the task."""
        self.request = request
        task = request.task
        self.implementations = {
            role: e if isinstance(e, Implementation) else build_rung_implementation(task.config, task.family, e)
            for role, e in implementations.items()
        }
        self.variants = {role: implementation.variant for role, implementation in self.implementations.items()}
        self.created = now()
        self.gates: list[GateResult] = []
        self.sides: list[BuiltSide] = []
        self.correctness = CorrectnessOutcome()
        self._observer = observer

    def add(self, result: GateResult) -> GateResult:
        """Keep and show a gate's result."""
        self.gates.append(result)
        self._observer.gate(result)
        return result

    def status(self, gate: str) -> Status:
        """A gate's status so far; PENDING before it ended."""
        return status_of(self.gates, gate)

    def progress(self, gate: str) -> Callable[[float, str], None]:
        """The function through which a gate tells how far it is."""
        return lambda share, text: self._observer.progress(gate, share, text)

    def until_correct(self, untimed: Callable[[str], GateResult] | None = None) -> bool:
        """BUILD, RESOURCES and CORRECTNESS; says whether the sides may be timed.

        Where they may not, what follows is added as PENDING with its reason (EVIDENCE only where nothing was built).
        untimed: makes PERFORMANCE from that reason where the sides are correct but nothing can be timed here.
        """
        request = self.request
        examined = request.exam.examined if request.exam else ()
        result, self.sides = build.check(
            self.implementations, request.format, request.built_shapes, request.target, examined
        )
        if self.add(result).status != "PASS":
            why = f"not asked: BUILD {'failed' if result.status == 'FAIL' else 'is pending'}"
            for gate in list(GATES)[1:]:
                self.add(pending(gate, why))
            return False
        asked = {role: implementation.asked for role, implementation in self.implementations.items()}
        self.add(resources.check(self.sides, asked, request.built_shapes))
        reason = request.cannot_run() or self._cannot_run()
        if reason:
            self.add(pending("CORRECTNESS", reason))
            self.add(pending("PERFORMANCE", reason))
            return False
        result, self.correctness = correctness.check(
            self.sides,
            request.task.problem,
            request.cells,
            request.format,
            request.task.config.gates(request.format),
            self._own_gates(),
            request.make_worker,
            self.progress("CORRECTNESS"),
            emulated=self._emulated(),
            memory=self._memory_checks(),
            check_awaited=check_awaited,
            own=next((role for role, implementation in self.implementations.items() if implementation.is_own), None),
        )
        if self.add(result).status != "PASS":
            self.add(pending("PERFORMANCE", NOT_CORRECT if result.status == "FAIL" else NOT_DECIDED))
            return False
        reason = request.cannot_time()
        if reason:
            self.add(untimed(reason) if untimed else pending("PERFORMANCE", reason))
        return reason is None

    def _emulated(self) -> EmulatedRuns | None:
        """Small cases on the emulator, where a GPU runs all of them; without sides that have no PTX."""
        request = self.request
        if request.exam is None or request.make_emulator is None:
            return None
        cells = [next(cell for cell in request.cells if cell.shape == shape) for shape in request.exam.emulated]
        sides = [side for side in self.sides if all(kernel.ptx for _, kernel in side.distinct)]
        return EmulatedRuns(sides, cells, request.make_emulator)

    def _memory_checks(self) -> MemoryChecks | None:
        """The memory check, or None if the run has none."""
        return MemoryChecks(self.sides, self.request.make_worker) if self.request.checks_memory else None

    def _own_gates(self) -> dict[str, KernelErrorGate]:
        """The kernel-error gates of the roles whose rungs define one."""
        asked = {role: implementation.asked.kernel_error for role, implementation in self.implementations.items()}
        return {role: gate for role, gate in asked.items() if gate is not None}

    def _cannot_run(self) -> str | None:
        """Why one of the kernels cannot run on the chosen device, or None where all can."""
        emulated = self.request.device is not None and self.request.device.kind != "gpu"
        for side in self.sides:
            for _, kernel in side.distinct:
                if emulated and not kernel.ptx:
                    return f"the emulator reads PTX, and {kernel.source.name} is machine code; it runs on a GPU"
                if not emulated and not kernel.cubin:
                    return f"{kernel.source.name} was not assembled: {assembler.MISSING}"
        return None

    def built(self, role: str) -> BuiltSide | None:
        """A role's kernels, or None where they did not compile."""
        return next((side for side in self.sides if side.role == role), None)

    def side(self, role: str, timing: list[TimingRow]) -> Side:
        """All that was found out about a role's variant."""
        implementation, built = self.implementations[role], self.built(role)
        variant = implementation.variant
        return Side(
            variant=variant.name,
            toggles=variant.values,
            builds=self._builds(built) if built else [],
            correctness=self.correctness.rows.get(role, []),
            timing=timing,
            counts=self.correctness.counts.get(role, {}),
            limits=self._limits(role),
            solution=implementation.source,
            sandbox=list(implementation.sandbox),
        )

    def _limits(self, role: str) -> dict[str, Limits]:
        """What CORRECTNESS allows a role, by shape."""
        gates = self.request.task.config.gates(self.request.format)
        kernel = self._own_gates().get(role, gates.kernel_error)
        return {
            shape.name: Limits(
                max_abs_err=(error := gates.error_for(shape.dims)).max_abs_err,
                mean_abs_err=error.mean_abs_err,
                pct_bad=error.pct_bad,
                relative_error=kernel.relative_error,
                bound_factor=kernel.bound_factor,
            )
            for shape in self.request.built_shapes
        }

    def facts(self) -> dict[str, Any]:
        """The fields that every record shares, by name."""
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
        """By shape, what the problem says that every kernel must execute; empty where nothing was counted."""
        request = self.request
        counted = {shape for counts in self.correctness.counts.values() for shape in counts}
        found = {s.name: least_work(request.task.problem, s.dims) for s in request.built_shapes if s.name in counted}
        return {shape: least for shape, least in found.items() if least}

    @property
    def stamp(self) -> str:
        """The name of the run's folder, YYYYMMDD-HHMMSS."""
        return self.created.strftime("%Y%m%d-%H%M%S")

    def _builds(self, side: BuiltSide) -> list[Build]:
        counts = evidence.instruction_counts(side)
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
                    for name, (other, facts) in program.facts(shape, dims[shape]).items()
                    if other.kernel_hash == k.kernel_hash
                },
            )
            for shape, k in side.distinct
        ]
