"""The request of a run, with all defaults: task, shapes, seeds, device and check plan; and the machine of the run."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import msgspec

from greenfast.device.gpu import device_count
from greenfast.device.worker import Worker, gpu_info
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.record_schema import GateResult, GitState
from greenfast.judge.task import FormatGates, LoadedTask, Shape, Timing
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.problem import NORMAL

#: Environment variable: the commit of a source tree without git history.
GIT_SHA_VARIABLE = "GREENFAST_GIT_SHA"

_PACKAGES = ("torch", "numpy", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


def git_state() -> GitState:
    """Return the commit of the checkout that this package runs from; "unknown" if installed or without git.

    A source tree on a GPU machine may have no history. GREENFAST_GIT_SHA then gives its commit, with branch "copied".
    """
    copied_from = os.environ.get(GIT_SHA_VARIABLE)
    if copied_from:
        return GitState(sha=copied_from, branch="copied", dirty=False)
    return read_git_state(KERNEL_DIR)


def read_git_state(folder: Path) -> GitState:
    """Return the commit of the repository that a folder is in; "unknown" if it is in none or there is no git."""

    def git(*args: str) -> str | None:
        command = ["git", *args]
        try:
            return subprocess.check_output(
                command, cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
            ).strip()
        except (OSError, subprocess.SubprocessError):
            return None

    sha = git("rev-parse", "HEAD")
    if sha is None:
        return GitState(sha="unknown", branch="unknown", dirty=False)
    return GitState(
        sha=sha, branch=git("rev-parse", "--abbrev-ref", "HEAD") or "unknown", dirty=bool(git("status", "--porcelain"))
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a result."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(timezone.utc)


#: The name of the emulator as a device.
EMULATOR = "emulator"
_EMULATED = "emulated"  # The emulator's name in records.


def choose_device(text: str) -> int | str | None:
    """Parse ``--device``: auto (the first GPU, else the emulator), none, emulator, or the number of a GPU.

    Raises UsageError for any other text and MachineError for a missing GPU.
    """
    if text == "none":
        return None
    if text in (EMULATOR, _EMULATED):
        return EMULATOR
    count = device_count()
    if text == "auto":
        return 0 if count else EMULATOR
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"device {text!r}: allowed are auto, none, emulator and a GPU's number")
    if int(text) >= count:
        raise MachineError(f"device {text}: the driver shows {count} GPU(s); use --device none to run without one")
    return int(text)


def choose_devices(text: str) -> list[str]:
    """Parse ``--device`` of a search: the values of ``choose_device``, several numbers such as 0,1, or all.

    "all" selects every GPU, else the emulator. Raises as ``choose_device`` does.
    """
    if text == "all":
        return [str(n) for n in range(device_count())] or [EMULATOR]
    parts = text.split(",")
    words = ("auto", "none", EMULATOR, _EMULATED)
    if text not in words and not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"device {text!r}: allowed are auto, all, none, emulator, and GPUs' numbers such as 0 or 0,1")
    chosen = [choose_device(part) for part in parts]
    if len(set(chosen)) != len(chosen):
        raise UsageError(f"device {text!r}: a GPU is named twice, and its two races would slow each other")
    return ["none" if one is None else str(one) for one in chosen]


def device_info(ordinal: int | str | None, timeout_s: float) -> DeviceInfo | None:
    """Return the facts about the chosen device. A separate process queries a GPU, so this one has no CUDA context."""
    if ordinal is None:
        return None
    if isinstance(ordinal, str):
        return EmulatorSession().info()
    return gpu_info(ordinal, timeout_s)


class ProgressListener(Protocol):
    """The interface for reports of a run's progress."""

    def gate(self, result: GateResult) -> None:
        """Report a gate that ended."""

    def progress(self, gate: str, share: float, text: str) -> None:
        """Report that a gate has done ``share`` (0 to 1) of its work; ``text`` names the current step."""


class NullListener:
    """A progress listener that ignores all events."""

    def gate(self, result: GateResult) -> None:
        """Do nothing."""

    def progress(self, gate: str, share: float, text: str) -> None:
        """Do nothing."""


#: The minimum number of seeds per shape. Each timed launch draws its inputs from their cases.
MIN_SEEDS = 3


def timed_seeds(seeds: Sequence[int]) -> list[int]:
    """Return the seeds of the timed cases: these, and the smallest other ones up to MIN_SEEDS."""
    others = (n for n in range(MIN_SEEDS + len(seeds)) if n not in seeds)
    return [*seeds, *(next(others) for _ in range(MIN_SEEDS - len(seeds)))]


@dataclass(frozen=True)
class CasePlan:
    """One planned case of CORRECTNESS: a shape, a seed and a variant of the inputs.

    randomized: True if the shape or the seed is not the task's. The task's limits on the format's error hold for its
        own shapes and seeds. In randomized cases and in variants the format's error is reported and not judged.
    new_shape: True if the shape is not the task's.
    """

    shape: Shape
    seed: int
    variant: str = NORMAL
    randomized: bool = False
    new_shape: bool = False

    @property
    def format_is_judged(self) -> bool:
        """True if the limits on the format's error and on the total error apply."""
        return not self.randomized and self.variant == NORMAL

    def __str__(self) -> str:
        return f"{self.shape.name} seed {self.seed}" + (f" {self.variant}" if self.variant != NORMAL else "")


@dataclass(frozen=True)
class CheckPlan:
    """The cases of a run, and the parts of the full plan that it skips.

    required_shapes: the task's shapes in the full plan.
    small_shape: the shape on which all variants run.
    emulated_shapes: the shapes that the emulator runs too while a GPU runs all shapes: ``small_shape``, the smallest
        random shape if it is not larger, and the random shapes that are longer than a tile.
    unnamed_shapes: names of the shapes that are in no option and no default.
    random_shapes: the shapes that were drawn at run time.
    seed: the first seed of the inputs and the source of all randomness; None if the inputs come from public seeds.
    missing: the skipped parts of the full plan, in words.
    secret: True if ``seed`` was unknown before the run.
    """

    case_plans: tuple[CasePlan, ...]
    required_shapes: tuple[Shape, ...]
    small_shape: Shape
    emulated_shapes: tuple[Shape, ...]
    unnamed_shapes: frozenset[str] = frozenset()
    random_shapes: tuple[Shape, ...] = ()
    seed: int | None = None
    missing: tuple[str, ...] = ()
    secret: bool = True

    @property
    def emulated_case_plans(self) -> list[CasePlan]:
        """The cases that the emulator runs beside a GPU: the first one of each emulated shape."""
        return [next(case for case in self.case_plans if case.shape == shape) for shape in self.emulated_shapes]


@dataclass(frozen=True)
class Request:
    """The choices that all runs share. Each command adds its own implementations.

    shapes, seeds: the timed cases; without a check plan, also the cases of CORRECTNESS.
    ordinal: the number of the GPU, the emulator's name, or None.
    check_plan: the cases of CORRECTNESS (``judge.check_plan``); None for a run without a decision.
    is_partial: True if options left out a part of the check plan. Without options, a run on a GPU has all shapes of the
        candidate's rung, any other run has the task's default shapes.
    start_worker: starts the process that runs kernels; None for a new one on the device. With it, neither the emulator
        nor the memory check runs beside a GPU.
    builds_plan: True to build for all shapes of the check plan, also those that are not timed.
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
    check_plan: CheckPlan | None = None
    is_partial: bool = False
    start_worker: Callable[[], Worker] | None = None
    builds_plan: bool = False

    @property
    def case_plans(self) -> tuple[CasePlan, ...]:
        """The cases of CORRECTNESS. If kernels are timed, these include all cases that give inputs to timing."""
        if self.check_plan:
            planned = self.check_plan.case_plans
        else:
            planned = tuple(CasePlan(s, n) for s in self.shapes for n in self.seeds)
        if self.cannot_time():
            return planned
        covered = {(case_plan.shape.name, case_plan.seed) for case_plan in planned if case_plan.variant == NORMAL}
        task_seeds = self.task.config.seeds
        timed = [CasePlan(s, n, randomized=n not in task_seeds) for s in self.shapes for n in timed_seeds(self.seeds)]
        return (*planned, *(plan for plan in timed if (plan.shape.name, plan.seed) not in covered))

    @property
    def results(self) -> Path:
        """The folder of the task's runs."""
        return self.out / self.task.config.defaults.results

    @property
    def is_emulated(self) -> bool:
        """True if the chosen device is the emulator."""
        return isinstance(self.ordinal, str)

    @property
    def gates(self) -> FormatGates:
        """The correctness gates of the format."""
        return self.task.config.gates(self.format)

    @property
    def built_shapes(self) -> list[Shape]:
        """The shapes that kernels are built for."""
        plan = self.check_plan
        shapes = [*self.shapes, *(plan.required_shapes if plan and self.builds_plan else ())]
        return list({shape.name: shape for shape in (*shapes, *(plan.random_shapes if plan else ()))}.values())

    @property
    def make_emulator(self) -> Callable[[], Worker] | None:
        """A function that starts an emulator beside a GPU, to detect faults that a GPU cannot show; None if unused."""
        if self.check_plan is None or self.is_emulated or self.start_worker:
            return None
        return lambda: Worker(timeout_s=max(self.timeout_s, _SMALL_CASE_TIMEOUT_S), make_session=EmulatorSession)

    @property
    def checks_memory(self) -> bool:
        """True if the run includes the memory check on the GPU: a run with a check plan on a GPU."""
        on_gpu = self.device is not None and self.device.kind == "gpu"
        return self.check_plan is not None and on_gpu and not self.start_worker

    @property
    def make_worker(self) -> Callable[[], Worker]:
        """A function that starts a process on the chosen device."""
        if self.start_worker is not None:
            return self.start_worker
        if self.is_emulated:
            return lambda: Worker(timeout_s=max(self.timeout_s, _EMULATOR_TIMEOUT_S), make_session=EmulatorSession)
        ordinal = int(self.ordinal or 0)
        return lambda: Worker(ordinal, timeout_s=self.timeout_s)

    @property
    def gpu(self) -> int:
        """The ordinal of the chosen GPU. Raises MachineError if no GPU was chosen."""
        reason = self.cannot_time()
        if reason or not isinstance(self.ordinal, int):
            raise MachineError(f"this needs a GPU; {reason}")
        return self.ordinal

    def cannot_run(self) -> str | None:
        """Return the reason why kernels cannot run on this device, or None if they can."""
        if self.device is None:
            return "no GPU: nothing can run the kernel here"
        if self.device.kind != "gpu":
            return None
        if not self.target.runs_on(self.device.capability):
            return f"{self.target.name} code does not run on {self.device.name} ({self.device.compute_capability})"
        return None

    def cannot_time(self) -> str | None:
        """Return the reason why kernels cannot be timed or profiled on this device, or None if they can."""
        if self.device is not None and self.device.kind != "gpu":
            return f"{self.device.kind}: {self.device.name} cannot measure time"
        return self.cannot_run()


#: Time limit of one case on the emulator, in seconds. The emulator is about a thousand times slower than a GPU.
_EMULATOR_TIMEOUT_S = 1200.0
#: The same for the small cases that the emulator runs beside a GPU. A timeout there is not a fault of the kernel, so a
#: limit that suits a GPU would let a kernel pass although only the emulator can detect its fault.
_SMALL_CASE_TIMEOUT_S = 60.0


def make_request(
    task: LoadedTask,
    *,
    shapes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    fmt: str | None = None,
    arch: str | None = None,
    device: str,
    warmup: int | None = None,
    iters: int | None = None,
    processes: int | None = None,
    timeout_s: float,
    out: Path,
    command: str,
) -> Request:
    """Build a request: replace None with the task's defaults and check all values.

    The target is the value of ``--arch``, else the GPU's own, else the task's default.
    Raises UsageError for a shape, seed, format or target that the task does not have and for a timeout that is no time,
    and MachineError for a missing device.
    """
    if not 0 < timeout_s < math.inf:
        raise UsageError(f"--timeout {timeout_s:g}: give a number of seconds above 0")
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
    overrides = {key: value for key, value in changes.items() if value is not None}
    for key, value in overrides.items():
        if value < 1:
            raise UsageError(f"{key}: {value} is not at least 1")
    timing = msgspec.structs.replace(config.timing, **overrides)
    if timing.timed_iters < timing.blocks:  # Each block needs at least one launch.
        timing = msgspec.structs.replace(timing, blocks=max(2, timing.timed_iters))
    ordinal = choose_device(device)
    info = device_info(ordinal, timeout_s)
    if arch is None and info is not None and info.kind == "gpu":
        target = Target.of_device(info.capability)
    else:
        target = Target.parse(config.defaults.arch if arch is None else arch)
    return Request(
        task=task,
        shapes=chosen,
        seeds=some_seeds,
        format=fmt,
        target=target,
        ordinal=ordinal,
        device=info,
        timing=timing,
        timeout_s=timeout_s,
        out=out,
        command=command,
    )


def read_request(task: LoadedTask, args: Namespace, **changes: Any) -> Request:
    """Build a request from a command's options; missing options are None. Raises as ``make_request``."""
    names = ("shapes", "seeds", "arch", "device", "warmup", "iters", "processes", "out", "command")
    options: dict[str, Any] = {name: getattr(args, name, None) for name in names}
    options |= {"fmt": getattr(args, "format", None), "timeout_s": args.timeout}
    return make_request(task, **(options | changes))
