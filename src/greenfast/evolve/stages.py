"""Run the judge's gates for one candidate of a search: BUILD and RESOURCES, then CORRECTNESS.

The gates and the kinds of cases are as in ``greenfast judge``, with fewer cases. A candidate that passes them is
not yet accepted: finalists are validated with all gates and the whole check plan, in new processes, on shapes and seeds
that the search did not use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from greenfast.device.identity import code_hash
from greenfast.device.worker import Worker
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import Candidate, Descriptor, Stage
from greenfast.evolve.sources import Sources, copy_folder
from greenfast.judge.check_plan import add_check_plan
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import BASELINE, CANDIDATE, BuiltSide, Implementation, build_implementation
from greenfast.judge.pipeline import GateRun
from greenfast.judge.record_io import RECORD, REPORT, compute_digest, read_measurements
from greenfast.judge.record_schema import DRAWN, Record
from greenfast.judge.request import NullListener, ProgressListener, Request, make_request
from greenfast.judge.store import to_json, write_whole
from greenfast.judge.subject import find_baseline
from greenfast.judge.task import LoadedTask, load
from greenfast.judge.validate import validate
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, MachineError, UsageError
from greenfast.spec.facts import KernelCounts
from greenfast.spec.kernel import find_buffers
from greenfast.spec.limits import matrix_rate
from greenfast.spec.problem import Problem, References

#: Emulator time limit per case in seconds. A candidate beyond it is dropped, though its kernel may be correct.
_CASE_S = 120.0
#: Rates per multiprocessor and clock: warp instructions, exponentials, passes of 128 bytes over shared memory, and
#: bytes to or from the L2 cache (CUDA C++ Programming Guide, "Arithmetic Instructions"; NVIDIA A100 whitepaper for the
#: L2).
_ISSUED, _SPECIAL, _PASSES, _L2_BYTES = 4, 16, 1, 64
_SECTOR = 32
#: A clock near the clocks of all targets. Estimates are compared only with each other.
_HERTZ = 1.7e9
#: The gates of a search; each is also the stage at which a candidate ends.
_GATES: tuple[Stage, ...] = ("BUILD", "RESOURCES", "CORRECTNESS")


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a stage. estimate: seconds computed from counts (not a speed); None without counts."""

    stage: Stage
    valid: bool
    hash: str = ""
    behaviour: Descriptor | None = None
    estimate: float | None = None
    feedback: str = ""


class SharedWorker(Worker):
    """A worker that several runs share: ``close`` keeps it open, and an ended process is restarted."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self._worker: Worker | None = None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the session; return its result."""
        self._worker = self._worker or self._make()
        try:
            return self._worker.call(method, *args)
        except GreenfastError:
            self.end()  # its process may have ended, or a kernel may hang
            raise

    def close(self) -> None:
        """Keep the process for the next run."""

    def end(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


class _CachedReferences:
    """A problem with cached references: all candidates of a search are checked on the same cases."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._cache: dict[tuple[Any, ...], References] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)

    def references(self, dims: Mapping[str, int], seed: int, fmt: str, **variant: str) -> References:
        """Return the problem's references."""
        key = (*sorted(dims.items()), seed, fmt, *variant.values())
        if key not in self._cache:
            self._cache[key] = self._problem.references(dims, seed, fmt, **variant)
        return self._cache[key]


def make_search_request(manifest: Manifest, task: LoadedTask, shapes: list[str], device: str, out: Path) -> Request:
    """Make the judge's request with a search's settings. Raises as ``make_request``."""
    return make_request(
        task,
        shapes=shapes or None,
        seeds=manifest.seeds,
        fmt=manifest.format or None,
        arch=manifest.arch or None,
        device=device,
        timeout_s=manifest.timeout_s,
        out=out,
        command=manifest.command,
    )


class Stages:
    """The gates of one run and their worker processes. Use as a context manager: it ends the processes."""

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        gpu: int | None = None,
        progress: Callable[[str], None] = lambda text: None,
        *,
        gpu_follows: bool = False,
    ) -> None:
        """folder: of the run. gpu: its number; None for the emulator alone. progress: receives the current step.

        gpu_follows: True if another process of the search checks its candidates on a GPU afterwards.
        """
        self.manifest, self.gpu, self.progress = manifest, gpu, progress
        self.gpu_follows = gpu_follows or gpu is not None
        task = load(manifest.task)
        out = folder / "judged"
        self._emulated = make_search_request(manifest, task, manifest.small, "emulator", out)
        self.raced = make_search_request(manifest, task, manifest.shapes, "none" if gpu is None else str(gpu), out)
        self.task, self.target = task, self.raced.target
        self._remembering = dataclasses.replace(task, problem=cast(Problem, _CachedReferences(task.problem)))
        self._emulated = dataclasses.replace(self._emulated, target=self.target)
        self._emulator = SharedWorker(lambda: Worker(timeout_s=_CASE_S, make_session=EmulatorSession))
        self._on_gpu = SharedWorker(lambda: Worker(gpu or 0, timeout_s=manifest.timeout_s))
        work = folder / "candidates"
        self.sources = Sources(manifest.space, Path(manifest.space_folder), self.raced, work)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._emulator.end()
        self._on_gpu.end()

    def baseline(self) -> Implementation:
        """Return the baseline's implementation."""
        side = find_baseline(self.task, self.manifest.baseline, self.raced.out)
        return build_implementation(self.raced, side, is_reference=True)

    def described(self) -> str:
        """Describe the task in words, for proposers."""
        request, config = self.raced, self.task.config
        shapes = "; ".join(f"{s.name} ({', '.join(f'{k}={v}' for k, v in s.dims.items())})" for s in request.shapes)
        target = f"Format {request.format}, target {self.target.name}, timed at {shapes}."
        return f"{config.name}: {config.description}. {target}"

    def implementation(self, candidate: Candidate | None) -> Implementation:
        """Return a candidate's implementation; the baseline's for None."""
        return self.baseline() if candidate is None else self.sources.implementation(candidate)

    def built(self, candidate: Candidate | None) -> StageResult:
        """Run BUILD and RESOURCES for all shapes of the search."""
        shapes = {shape.name: shape for shape in (*self._emulated.shapes, *self.raced.shapes)}
        request = dataclasses.replace(self.raced, shapes=list(shapes.values()), ordinal=None, device=None)
        run = self._run_gates(request, candidate, _GATES[:2])
        if isinstance(run, StageResult):
            return run
        side = run.built(_role(candidate))
        if side is None:
            return StageResult(stage="BUILD", valid=False)
        dims = {shape.name: shape.dims for shape in request.shapes}
        timed = [side.programs[shape.name] for shape in self.raced.shapes if shape.name in side.programs]
        resources = [kernel.resources for program in timed for kernel in program.kernels]
        behaviour = Descriptor(
            smem_bytes=max((r.smem_bytes for r in resources), default=0),
            registers=max((r.registers for r in resources), default=0),
        )
        return StageResult(stage="RESOURCES", valid=True, hash=hash_programs(side, dims), behaviour=behaviour)

    def emulated(self, candidate: Candidate | None, exam_seed: int) -> StageResult:
        """Run CORRECTNESS on the emulator, on small shapes and shapes drawn from the seed, and count.

        If a GPU follows: as ``greenfast judge`` does beside a GPU, one case of each emulated shape, and all variants of
        the smallest one. The validation of finalists runs every case on the GPU.
        """
        request = dataclasses.replace(self._emulated, start_worker=lambda: self._emulator)
        planned = add_check_plan(request, self.sources.rung, chosen=True, seed=exam_seed)
        if self.gpu_follows and (plan := planned.check_plan):
            emulated = plan.emulated_case_plans
            chosen = tuple(case for case in plan.case_plans if case.shape == plan.small_shape or case in emulated)
            planned = dataclasses.replace(planned, check_plan=dataclasses.replace(plan, case_plans=chosen))
        # A GPU checks undecided cases again.
        run = self._run_gates(planned, candidate, _GATES, undecided_passes=self.gpu_follows)
        if isinstance(run, StageResult):
            return run
        counts, side = run.correctness.counts.get(_role(candidate), {}), run.built(_role(candidate))
        named = {shape: c for shape, c in counts.items() if not shape.startswith(DRAWN)}
        seconds, pipe = estimate(named or counts, self.target, request.format)
        # Sums over some of the shapes cannot be compared.
        whole = side is not None and len(side.programs) == len(run.request.built_shapes)
        return StageResult(
            stage="CORRECTNESS",
            valid=True,
            estimate=(seconds or None) if whole else None,
            behaviour=Descriptor(pipe=pipe),
        )

    def on_gpu(self, candidate: Candidate | None) -> tuple[StageResult, BuiltSide | None, dict[tuple[str, int], str]]:
        """Run CORRECTNESS on the GPU for the timed shapes; return the kernels and the digests of their outputs too."""
        request = dataclasses.replace(self.raced, start_worker=lambda: self._on_gpu)
        run = self._run_gates(request, candidate, _GATES)
        if isinstance(run, StageResult):
            return run, None, {}
        digests = {(shape, seed): digest for (_, shape, seed), digest in run.correctness.digests.items()}
        return StageResult(stage="CORRECTNESS", valid=True), run.built(_role(candidate)), digests

    def _run_gates(
        self, request: Request, candidate: Candidate | None, gates: Sequence[Stage], *, undecided_passes: bool = False
    ) -> GateRun | StageResult:
        """Run the gates. Return the first of ``gates`` that did not pass, or an error of the candidate, as a result."""
        try:
            implementation = self.implementation(candidate)
            request = dataclasses.replace(request, task=self._remembering)
            run = GateRun(request, {_role(candidate): implementation}, NullListener())
            run.run(GATES[name] for name in gates)
        except UsageError as e:  # not in the space, or the family refuses the combination or a shape
            if candidate is None:
                raise
            return StageResult(stage="space", valid=False, feedback=str(e))
        except MachineError:
            raise
        except GreenfastError as e:
            return StageResult(stage="BUILD", valid=False, feedback=str(e))
        for stage, gate in ((stage, gate) for gate in run.gates for stage in gates if gate.gate == stage):
            why = "; ".join(gate.reasons) or gate.summary
            if gate.status == "FAIL":
                return StageResult(stage=stage, valid=False, feedback=why)
            if gate.status == "PENDING" and not undecided_passes:
                return StageResult(stage=stage, valid=False, feedback=f"could not be decided here: {why}")
        return run


def _role(candidate: Candidate | None) -> str:
    """Return the role; a baseline need not support all randomised shapes."""
    return BASELINE if candidate is None else CANDIDATE


def hash_programs(side: BuiltSide, dims: Mapping[str, Mapping[str, int]]) -> str:
    """Return 16 hexadecimal digits over machine code, launches and scratch buffers for all shapes."""
    digest = hashlib.sha256()
    for shape, program in sorted(side.programs.items()):
        for name, space in sorted(program.program.workspaces.items()):
            digest.update(msgspec.json.encode((name, space.nbytes, space.zeros, space.data)))
        launches = program.name_launches(shape, dims[shape]).items()
        for step, (name, (kernel, facts)) in zip(program.program.steps, launches, strict=True):
            # The facts number buffers by first use, so they do not change if input and output are swapped.
            buffers = [buffer for argument in step.launch.args for buffer in find_buffers(argument)]
            digest.update(msgspec.json.encode((name, code_hash(kernel) or kernel.kernel_hash, facts, buffers)))
    return digest.hexdigest()[:16]


def compute_pipe_clocks(counts: KernelCounts, target: Target, fmt: str) -> dict[str, float]:
    """Return the clocks for which a launch keeps each pipe busy, over all multiprocessors of the target.

    ``wgmma`` multiplies operands of the format; all other matrix instructions multiply half.
    """
    wide = any(name.startswith("wgmma") for name in counts.instructions)
    rate = matrix_rate(".".join(map(str, target.capability)), fmt if wide else "f16")
    sectors = counts.global_load_sectors + counts.global_store_sectors
    work = {
        "tensor": counts.matrix_flops / rate if rate else 0.0,
        "special": counts.exponentials / _SPECIAL,
        "issue": counts.warp_instructions / _ISSUED,
        "shared": counts.shared_passes / _PASSES,
        "memory": sectors * _SECTOR / _L2_BYTES,
    }
    return {name: clocks / target.multiprocessors for name, clocks in work.items()}


def estimate(counts: Mapping[str, KernelCounts], target: Target, fmt: str) -> tuple[float, str]:
    """Estimate the seconds of one launch from the emulator's counts, and return the busiest pipe too.

    The model covers throughput alone: each kind of work runs at its peak rate on all multiprocessors, and the slowest
    kind determines the time. It ranks variants of a kernel roughly and ignores latency. It is a screen, not a
    measurement (docs/evolve-proposers.md reports its recall).
    """
    total, busy = 0.0, dict[str, float]()
    for shape_counts in counts.values():
        pipe_clocks = compute_pipe_clocks(shape_counts, target, fmt)
        total += max(pipe_clocks.values()) / _HERTZ
        for name, clocks in pipe_clocks.items():
            busy[name] = busy.get(name, 0.0) + clocks
    return total, max(busy, key=lambda name: busy[name]) if busy else ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a finalist's validation.

    record: path of its record, relative to the run's folder. record_digest: digest of that record. speedup, low, high:
    speedup and confidence interval of the gated shape with the smallest gain; 0 if nothing was timed. confidence:
    corrected for the number of finalists. device, created: the GPU and the date of the timing.
    """

    decision: str
    reasons: list[str]
    record: str = ""
    record_digest: str = ""
    shape: str = ""
    speedup: float = 0.0
    low: float = 0.0
    high: float = 0.0
    confidence: float = 0.0
    device: str = ""
    created: str = ""

    @property
    def where(self) -> str:
        """Return the device and the day in words; empty if unknown (older runs)."""
        return f"on {self.device}, {self.created[:10]}" if self.device else ""


def validate_finalist(
    stages: Stages, candidate: Candidate, finalists: int, folder: Path, observer: ProgressListener
) -> Verdict:
    """Validate one of several finalists against the baseline. folder: of the run.

    Raises as ``validate`` does.
    """
    manifest, request = stages.manifest, stages.raced
    implementation = stages.implementation(candidate)
    timing = msgspec.structs.replace(
        request.timing,
        # All verdicts hold together with the confidence (Bonferroni).
        confidence=1 - (1 - manifest.confidence) / max(1, finalists),
        gate_shapes=[shape.name for shape in request.shapes],
    )
    request = dataclasses.replace(request, timing=timing, seeds=list(request.task.config.seeds))
    timed = request.shapes
    request = add_check_plan(request, implementation.rung or stages.sources.rung, chosen=False)
    request = dataclasses.replace(request, shapes=timed, builds_plan=True)
    outcome = validate(request, stages.baseline(), implementation, observer, required=manifest.required, profile=False)
    return _verdict(outcome.record, outcome.folder, folder)


def _verdict(record: Record, where: Path, folder: Path) -> Verdict:
    gated = [row for row in record.speedups if row.gated]
    least = min(gated, key=lambda row: row.ci_low, default=None)
    verdict = Verdict(
        decision=record.decision,
        reasons=list(record.reasons),
        record=where.relative_to(folder).as_posix(),
        record_digest=compute_digest(read_measurements(record)),
    )
    if least is None:
        return verdict
    return msgspec.structs.replace(
        verdict,
        shape=least.shape,
        speedup=least.speedup,
        low=least.ci_low,
        high=least.ci_high,
        confidence=least.confidence,
        device=record.device.name if record.device else "",
        created=record.created,
    )


def keep_winner(stages: Stages, candidate: Candidate, verdict: Verdict, folder: Path) -> None:
    """Write ``winner/``: candidate, verdict, record, report, sources, and the rung to add to the task for toggles."""
    winner, record = folder / "winner", folder / verdict.record
    shutil.rmtree(winner, ignore_errors=True)
    write_whole(winner / "winner.json", to_json({"candidate": candidate, "verdict": verdict}))
    for name in (RECORD, REPORT):
        if (record / name).is_file():
            write_whole(winner / name, (record / name).read_bytes())
    sources = folder / "candidates" / candidate.key
    for kind in ("solution", "kernels"):
        if (sources / kind).is_dir():
            copy_folder(sources / kind, winner / kind)
    space = stages.manifest.space
    implementation = stages.implementation(candidate)
    if not space.solution and not space.family and implementation.rung is None:
        rung = {
            "name": f"evolved_{candidate.key[:6]}",
            "title": candidate.rationale.splitlines()[0][:80] if candidate.rationale else "found by greenfast evolve",
            "toggles": {name: value for name, value in implementation.variant.toggles if value},
            "after": stages.manifest.baseline or stages.task.config.defaults.baseline,
            "required_speedup": max(1.0, round(verdict.low - 0.005, 2)),
            "budget": msgspec.to_builtins(implementation.requirements.budget),
        }
        write_whole(winner / "rung.json", to_json(rung))
