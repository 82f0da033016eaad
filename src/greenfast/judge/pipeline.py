"""The gates BUILD, RESOURCES and CORRECTNESS for one or two implementations, and the fields that all records share."""

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
from greenfast.judge.record_schema import GATES, Build, GateResult, Limits, Side, Status, TimingRow, read_status
from greenfast.judge.request import ProgressListener, Request
from greenfast.judge.task import KernelErrorGate
from greenfast.judge.variant import Variant
from greenfast.spec.problem import least_work

NOT_CORRECT = "not asked: a kernel that is not correct is not timed"
NOT_DECIDED = "not asked: what has not been shown to be correct is not timed"


def pending(gate: str, reason: str) -> GateResult:
    """Return the result of a gate that could not run."""
    return GateResult(gate=gate, status="PENDING", summary=reason)


class GateRun:
    """One pass of the implementations through the gates. Each result is stored and reported when its gate ends."""

    def __init__(
        self, request: Request, implementations: Mapping[str, Implementation | Variant], observer: ProgressListener
    ) -> None:
        """implementations: by role, an implementation or a variant of the task."""
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

    def until_correct(self, untimed: Callable[[str], GateResult] | None = None) -> bool:
        """Run BUILD, RESOURCES and CORRECTNESS. Return True if the implementations may be timed.

        Otherwise PERFORMANCE is added as PENDING with its reason, and EVIDENCE too if a build failed.
        untimed: makes the PERFORMANCE result from the reason if all is correct but this machine cannot time.
        """
        request = self.request
        unnamed_shapes = request.check_plan.unnamed_shapes if request.check_plan else ()
        result, self.sides = build.check(
            self.implementations, request.format, request.built_shapes, request.target, unnamed_shapes
        )
        if self.add(result).status != "PASS":
            reason = f"not asked: BUILD {'failed' if result.status == 'FAIL' else 'is pending'}"
            for gate in list(GATES)[1:]:
                self.add(pending(gate, reason))
            return False
        requirements = {role: implementation.requirements for role, implementation in self.implementations.items()}
        self.add(resources.check(self.sides, requirements, request.built_shapes))
        obstacle = request.cannot_run() or self._cannot_run()
        if obstacle:
            self.add(pending("CORRECTNESS", obstacle))
            self.add(pending("PERFORMANCE", obstacle))
            return False
        result, self.correctness = correctness.check(
            self.sides,
            request.task.problem,
            request.case_plans,
            request.format,
            request.task.config.gates(request.format),
            self._own_gates(),
            request.make_worker,
            self.progress("CORRECTNESS"),
            emulated=self._emulated(),
            memory=self._memory_checks(),
            check_awaited=check_awaited,
            own=next(
                (role for role, implementation in self.implementations.items() if implementation.is_task_baseline), None
            ),
        )
        if self.add(result).status != "PASS":
            self.add(pending("PERFORMANCE", NOT_CORRECT if result.status == "FAIL" else NOT_DECIDED))
            return False
        obstacle = request.cannot_time()
        if obstacle:
            self.add(untimed(obstacle) if untimed else pending("PERFORMANCE", obstacle))
        return obstacle is None

    def _emulated(self) -> EmulatedRuns | None:
        """Return the emulator's runs of small cases beside a GPU, for all implementations with PTX; None if no GPU."""
        request = self.request
        if request.check_plan is None or request.make_emulator is None:
            return None
        case_plans = [
            next(case_plan for case_plan in request.case_plans if case_plan.shape == shape)
            for shape in request.check_plan.emulated_shapes
        ]
        sides = [side for side in self.sides if all(kernel.ptx for _, kernel in side.distinct)]
        return EmulatedRuns(sides, case_plans, request.make_emulator)

    def _memory_checks(self) -> MemoryChecks | None:
        """Return the memory check, or None if the run has none."""
        return MemoryChecks(self.sides, self.request.make_worker) if self.request.checks_memory else None

    def _own_gates(self) -> dict[str, KernelErrorGate]:
        """Return the kernel-error gates by role, for rungs that define their own."""
        asked = {
            role: implementation.requirements.kernel_error for role, implementation in self.implementations.items()
        }
        return {role: gate for role, gate in asked.items() if gate is not None}

    def _cannot_run(self) -> str | None:
        """Return the reason why a kernel cannot run on the chosen device, or None if all can."""
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

    def side(self, role: str, timing: list[TimingRow]) -> Side:
        """Return the results of a role's implementation for the record."""
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
        """Return the limits of CORRECTNESS for a role, by shape."""
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
        counts = evidence.count_side_instructions(side)
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
