"""What a run is asked to do, with every choice made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from greenfast.device.worker import Worker
from greenfast.emulator.session import EmulatorSession
from greenfast.judge.check_plan import CasePlan, CheckPlan, build_check_plan, derive_seeds, draw_seed, select_shapes
from greenfast.judge.environment import choose_device, choose_target, device_info
from greenfast.judge.gates.performance import timed_seeds
from greenfast.judge.record_schema import GateResult
from greenfast.judge.task import Rung, Shape, Timing
from greenfast.judge.tasks import LoadedTask
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.problem import NORMAL


class ProgressListener(Protocol):
    """Whoever watches a run."""

    def gate(self, result: GateResult) -> None:
        """A gate has ended."""

    def progress(self, gate: str, share: float, text: str) -> None:
        """A gate is ``share`` (0 to 1) done and now at ``text``."""


class NullListener:
    """An observer that does not look."""

    def gate(self, result: GateResult) -> None:
        """Do nothing."""

    def progress(self, gate: str, share: float, text: str) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Request:
    """The choices that every run shares; the variants are the verb's own.

    shapes, seeds: which are timed, and without an exam also which CORRECTNESS asks.
    exam: what CORRECTNESS asks (see ``add_check_plan``); None for a run that decides nothing.
    """

    task: LoadedTask
    shapes: list[Shape]
    seeds: list[int]
    format: str
    target: Target
    ordinal: int | str | None
    device: DeviceInfo | None
    timing: Timing
    timeout_s: float
    out: Path
    command: str
    exam: CheckPlan | None = None

    @property
    def cells(self) -> tuple[CasePlan, ...]:
        """The cases that CORRECTNESS asks; where kernels are timed, also all that timing takes inputs from."""
        asked = self.exam.cells if self.exam else tuple(CasePlan(s, n) for s in self.shapes for n in self.seeds)
        if self.cannot_time():
            return asked
        have = {(cell.shape.name, cell.seed) for cell in asked if cell.variant == NORMAL}
        own = self.task.config.seeds
        timed = [CasePlan(s, n, drawn=n not in own) for s in self.shapes for n in timed_seeds(self.seeds)]
        return (*asked, *(cell for cell in timed if (cell.shape.name, cell.seed) not in have))

    @property
    def built_shapes(self) -> list[Shape]:
        """The shapes that kernels are built for."""
        return [*self.shapes, *(self.exam.drawn if self.exam else ())]

    @property
    def make_emulator(self) -> Callable[[], Worker] | None:
        """A function that starts an emulator, for a run on a GPU: it finds faults that a GPU cannot show."""
        if self.exam is None or isinstance(self.ordinal, str):
            return None
        return lambda: Worker(timeout_s=max(self.timeout_s, _SMALL_CASE_TIMEOUT_S), make_session=EmulatorSession)

    @property
    def checks_memory(self) -> bool:
        """Whether the memory check on the GPU is part of the run: of every exam on one."""
        return self.exam is not None and self.device is not None and self.device.kind == "gpu"

    @property
    def make_worker(self) -> Callable[[], Worker]:
        """A function that starts a process on the chosen device."""
        if isinstance(self.ordinal, str):
            return lambda: Worker(timeout_s=max(self.timeout_s, _EMULATOR_TIMEOUT_S), make_session=EmulatorSession)
        ordinal = self.ordinal or 0
        return lambda: Worker(ordinal, timeout_s=self.timeout_s)

    @property
    def gpu(self) -> int:
        """The number of the GPU that was chosen. Raises MachineError where none was."""
        reason = self.cannot_time()
        if reason or not isinstance(self.ordinal, int):
            raise MachineError(f"this needs a GPU; {reason}")
        return self.ordinal

    def cannot_run(self) -> str | None:
        """Why kernels cannot run here, or None where they can."""
        if self.device is None:
            return "no GPU: nothing can run the kernel here"
        if self.device.kind != "gpu":
            return None
        if not self.target.runs_on(self.device.capability):
            return f"{self.target.name} code does not run on {self.device.name} ({self.device.compute_capability})"
        return None

    def cannot_time(self) -> str | None:
        """Why kernels cannot be timed or profiled here, or None where they can."""
        if self.device is not None and self.device.kind != "gpu":
            return f"{self.device.kind}: {self.device.name} says nothing about time"
        return self.cannot_run()


#: Seconds that one case may take on the emulator: it is some thousand times slower than a GPU.
_EMULATOR_TIMEOUT_S = 1200.0
#: The same for the small case that it runs while a GPU runs all of them: being late there is no fault of the kernel, so
#: a limit that is right for a GPU would let one pass whose fault it takes the emulator to see.
_SMALL_CASE_TIMEOUT_S = 60.0


def make_request(
    task: LoadedTask,
    *,
    shapes: Sequence[str] | None,
    seeds: Sequence[int] | None,
    fmt: str | None,
    arch: str | None,
    device: str,
    warmup: int | None,
    iters: int | None,
    processes: int | None,
    timeout_s: float,
    out: Path,
    command: str,
) -> Request:
    """Fill in the task's defaults for what is None, and check the rest.

    Raises UsageError for anything that the task does not know, and MachineError for a device that is not there.
    """
    config = task.config
    chosen = [config.shape(name) for name in (shapes or config.defaults.shapes)]
    if len({s.name for s in chosen}) != len(chosen):
        raise UsageError(f"shapes {', '.join(s.name for s in chosen)}: one is named twice")
    some_seeds = list(config.seeds if seeds is None else seeds)
    if len(set(some_seeds)) != len(some_seeds) or not some_seeds or min(some_seeds) < 0:
        raise UsageError(f"seeds {some_seeds}: different whole numbers from 0 up are needed")
    fmt = fmt or config.defaults.format
    config.gates(fmt)
    changes = {"warmup_iters": warmup, "timed_iters": iters, "processes": processes}
    given = {key: value for key, value in changes.items() if value is not None}
    for key, value in given.items():
        if value < 1:
            raise UsageError(f"{key}: {value} is not at least 1")
    timing = msgspec.structs.replace(config.timing, **given)
    if timing.timed_iters < timing.blocks:  # a block has at least one launch
        timing = msgspec.structs.replace(timing, blocks=max(2, timing.timed_iters))
    ordinal = choose_device(device)
    info = device_info(ordinal, timeout_s)
    return Request(
        task=task,
        shapes=chosen,
        seeds=some_seeds,
        format=fmt,
        target=choose_target(arch, info, config.defaults.arch),
        ordinal=ordinal,
        device=info,
        timing=timing,
        timeout_s=timeout_s,
        out=out,
        command=command,
    )


def add_check_plan(
    request: Request, rung: Rung | None, *, chosen: bool, seed: int | None = None, public: bool | None = None
) -> Request:
    """Return the request with its exam: the whole one on a GPU; on the emulator what it can run in some minutes.

    The inputs come from a secret seed that is drawn here. It is added to the request's command.
    rung: the candidate's, if it is one. chosen: whether options chose the shapes or seeds; if they are less than all,
    nothing is drawn unless there is a ``seed`` to draw from. public: whether options chose the seeds (as ``chosen`` if
    None); then these are the seeds of the inputs. seed: to repeat an exam. With ``public`` or ``seed`` the inputs were
    known before the run, so the exam is not the whole one.
    Raises UsageError as ``plan`` does.
    """
    config = request.task.config
    public = chosen if public is None else public
    runs, emulated = request.cannot_run() is None, isinstance(request.ordinal, str)
    before = request.shapes
    if not chosen and runs and not emulated:
        request = replace(request, shapes=select_shapes(config, rung))
    whole = not chosen or all(shape in request.shapes for shape in select_shapes(config, rung))
    draws, secret = whole or seed is not None, seed is None and not public
    if seed is None and runs and (whole or not public):
        seed = draw_seed()
        request = replace(request, command=f"{request.command} --exam-seed {seed}")
    if seed is not None and not public:
        request = replace(request, seeds=derive_seeds(config, seed))
    asked = build_check_plan(
        config,
        request.task.problem,
        request.format,
        request.shapes,
        request.seeds,
        rung=rung,
        seed=seed,
        emulated=emulated,
        added=[shape for shape in request.shapes if shape not in before],
        draws=draws,
        secret=secret,
    )
    return replace(request, exam=asked)


def is_partial(request: Request) -> bool:
    """Return whether the request has less than what this device is asked without ``--shapes`` and ``--seeds``.

    The emulator is asked the default shapes, which may not be all of the task's.
    """
    config, exam = request.task.config, request.exam
    other = [part for part in (exam.missing if exam else ()) if not part.endswith(" shapes")]
    emulated = isinstance(request.ordinal, str) or request.cannot_run() is not None
    usual = set(config.defaults.shapes) if emulated else {shape.name for shape in config.shapes}
    return bool(other) or not usual <= {shape.name for shape in request.shapes}
