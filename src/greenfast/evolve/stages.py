"""Run the judge's gates for one candidate of a search: BUILD and RESOURCES, then CORRECTNESS.

The gates and the kinds of cases are those of ``greenfast validate``, with fewer cases. A candidate that passes here is
not yet accepted: finalists are validated with the whole check plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from greenfast.device.identity import code_hash
from greenfast.device.worker import Worker
from greenfast.evolve.estimate import estimate
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import Candidate, Descriptor, Stage
from greenfast.evolve.sources import Sources
from greenfast.judge.baseline import load_baseline
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.gates.sides import BASELINE, CANDIDATE, BuiltSide
from greenfast.judge.implementation import Implementation
from greenfast.judge.pipeline import GateRun
from greenfast.judge.record_schema import DRAWN, GateResult
from greenfast.judge.request import NullListener, Request, add_check_plan, make_request
from greenfast.judge.tasks import LoadedTask, find_task, load
from greenfast.spec.errors import GreenfastError, MachineError, UsageError
from greenfast.spec.kernel import find_buffers
from greenfast.spec.problem import Problem, References

#: Emulator time limit per case in seconds. A candidate beyond it is dropped, though its kernel may be correct.
_CASE_S = 120.0
_GATE_STAGES: dict[str, Stage] = {"BUILD": "BUILD", "RESOURCES": "RESOURCES", "CORRECTNESS": "CORRECTNESS"}


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


@dataclass(frozen=True)
class _SearchRequest(Request):
    """A request that runs kernels in a shared process."""

    shared: SharedWorker | None = None

    @property
    def make_worker(self) -> Callable[[], Worker]:
        """Return the shared worker instead of a new one."""
        shared = self.shared
        return (lambda: shared) if shared is not None else super().make_worker

    @property
    def make_emulator(self) -> Callable[[], Worker] | None:
        """None: the emulator stage comes before the GPU."""
        return None

    @property
    def checks_memory(self) -> bool:
        """Return False: the validation of finalists checks memory."""
        return False


def make_search_request(manifest: Manifest, task: LoadedTask, shapes: list[str], device: str, out: Path) -> Request:
    """Make the judge's request with a search's settings. Raises as ``make_request``."""
    return make_request(
        task,
        shapes=shapes or None,
        seeds=manifest.seeds,
        fmt=manifest.format or None,
        arch=manifest.arch or None,
        device=device,
        warmup=None,
        iters=None,
        processes=None,
        timeout_s=manifest.timeout_s,
        out=out,
        command=manifest.command,
    )


class Stages:
    """The gates of one run and their worker processes. Use as a context manager: it ends the processes."""

    def __init__(self, manifest: Manifest, folder: Path, gpu: int | None = None) -> None:
        """folder: of the run. gpu: number of the GPU; None for the emulator alone."""
        self.manifest, self.gpu = manifest, gpu
        task = load(find_task(manifest.task))
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
        return load_baseline(self.raced, self.manifest.baseline or self.task.config.defaults.baseline)

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
        run = self._passed(request, candidate)
        if isinstance(run, StageResult):
            return run
        side, fault = run.built(_role(candidate)), _first_failure(run.gates, ("BUILD", "RESOURCES"))
        if side is None or fault is not None:
            return fault or StageResult(stage="BUILD", valid=False)
        dims = {shape.name: shape.dims for shape in request.shapes}
        timed = [side.programs[shape.name] for shape in self.raced.shapes if shape.name in side.programs]
        resources = [kernel.resources for program in timed for kernel in program.kernels]
        behaviour = Descriptor(
            smem_bytes=max((r.smem_bytes for r in resources), default=0),
            registers=max((r.registers for r in resources), default=0),
        )
        return StageResult(stage="RESOURCES", valid=True, hash=hash_programs(side, dims), behaviour=behaviour)

    def emulated(self, candidate: Candidate | None, exam_seed: int) -> StageResult:
        """CORRECTNESS on the emulator, on small shapes and shapes that are drawn from the seed; and the counts."""
        request = _SearchRequest(**_fields(self._emulated), shared=self._emulator)
        run = self._passed(add_check_plan(request, self.sources.rung, chosen=True, seed=exam_seed), candidate)
        if isinstance(run, StageResult):
            return run
        failure = _first_failure(run.gates, tuple(_GATE_STAGES), undecided_too=self.gpu is None)
        if failure is not None:
            return failure
        counts, side = run.correctness.counts.get(_role(candidate), {}), run.built(_role(candidate))
        named = {shape: c for shape, c in counts.items() if not shape.startswith(DRAWN)}
        seconds, pipe = estimate(named or counts, self.target, request.format)
        whole = side is not None and len(side.programs) == len(
            run.request.built_shapes
        )  # sums over some of the shapes cannot be compared
        return StageResult(
            stage="CORRECTNESS",
            valid=True,
            estimate=(seconds or None) if whole else None,
            behaviour=Descriptor(pipe=pipe),
        )

    def on_gpu(self, candidate: Candidate | None) -> tuple[StageResult, BuiltSide | None, dict[tuple[str, int], str]]:
        """Run CORRECTNESS on the GPU for the timed shapes; return the kernels and the digests of their outputs too."""
        request = _SearchRequest(**_fields(self.raced), shared=self._on_gpu)
        run = self._passed(request, candidate)
        if isinstance(run, StageResult):
            return run, None, {}
        failure = _first_failure(run.gates, tuple(_GATE_STAGES))
        if failure is not None:
            return failure, None, {}
        digests = {(shape, seed): digest for (_, shape, seed), digest in run.correctness.digests.items()}
        return StageResult(stage="CORRECTNESS", valid=True), run.built(_role(candidate)), digests

    def _passed(self, request: Request, candidate: Candidate | None) -> GateRun | StageResult:
        """One pass through the gates; what a candidate's making or its own code raised is a finding."""
        try:
            implementation = self.implementation(candidate)
        except UsageError as e:
            if candidate is None:
                raise
            return StageResult(stage="space", valid=False, feedback=str(e))
        except MachineError:
            raise
        except GreenfastError as e:
            return StageResult(stage="BUILD", valid=False, feedback=str(e))
        request = dataclasses.replace(request, task=self._remembering)
        run = GateRun(request, {_role(candidate): implementation}, NullListener())
        try:
            run.until_correct()
        except UsageError as e:  # the family refuses the combination, or a shape
            return StageResult(stage="space", valid=False, feedback=str(e))
        except MachineError:
            raise
        except GreenfastError as e:
            return StageResult(stage="BUILD", valid=False, feedback=str(e))
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
        launches = program.facts(shape, dims[shape]).items()
        for step, (name, (kernel, facts)) in zip(program.program.steps, launches, strict=True):
            # The facts number buffers by first use, so they do not change if input and output are swapped.
            buffers = [buffer for argument in step.launch.args for buffer in find_buffers(argument)]
            digest.update(msgspec.json.encode((name, code_hash(kernel) or kernel.kernel_hash, facts, buffers)))
    return digest.hexdigest()[:16]


def _first_failure(
    gates: list[GateResult], asked: tuple[str, ...], *, undecided_too: bool = True
) -> StageResult | None:
    """Return the first of these gates that did not pass. PENDING passes if a GPU checks again (undecided_too=False)."""
    for gate in gates:
        if gate.gate in asked and gate.status in ("FAIL", *(["PENDING"] if undecided_too else [])):
            why = "; ".join(gate.reasons) or gate.summary
            feedback = why if gate.status == "FAIL" else f"could not be decided here: {why}"
            return StageResult(stage=_GATE_STAGES[gate.gate], valid=False, feedback=feedback)
    return None


def _fields(request: Request) -> dict[str, Any]:
    return {field.name: getattr(request, field.name) for field in dataclasses.fields(Request)}
