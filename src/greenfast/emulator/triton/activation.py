"""Run Triton kernels on CPU tensors: ``activate``."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from greenfast.device.compiler import compile_kernel
from greenfast.emulator.grid import KernelLaunch, load_program
from greenfast.emulator.kernel_run import DEFAULT_TARGET, Fault, convert_error, convert_finding
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.observed import NOTHING, Observe, Observed
from greenfast.emulator.observer import Observer, add_launch
from greenfast.emulator.ptx.names import demangle
from greenfast.emulator.triton.cuda_tensors import CudaTensors, replace_attribute, without_modes
from greenfast.emulator.triton.driver import (
    SHARED_MEMORY,
    Binder,
    EmulatorDriver,
    make_launch,
    make_step,
    measure_nothing,
    run_launch,
)
from greenfast.emulator.triton.extensions import Extensions
from greenfast.emulator.triton.storage import Regions
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UnsupportedError, UsageError
from greenfast.spec.extras import require
from greenfast.spec.facts import FORMAL, KernelCounts
from greenfast.spec.kernel import KernelSource
from greenfast.spec.limits import MOST_GRID

#: Configurations of an autotuned kernel that run; benchmarks that run.
AUTOTUNE, BENCHMARKS = ("first", "all"), ("once", "skip")


class LaunchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A launch that ran: kernel, grid in blocks, threads of a block, seconds, counts, formal findings.

    observed: the observations that ``observe`` selected.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    seconds: float
    printed: str
    counts: KernelCounts
    findings: list[Fault]
    observed: Observed | None = None


@dataclass(eq=False)
class Activation:
    """Kernels of Triton and of PyTorch extensions run in the emulator until ``deactivate``.

    Made by ``activate``, with its options. launches: the reports of all launches, in order. observer: adds up their
    observations, None without ``observe``. files: the paths of the kernels' source files. faults: of kernels and
    refusals of launches, also those that the caller caught. skipped_benchmarks: how many did not run. tensors: the
    CUDA tensors, None without them.
    """

    capability: int
    cuda_tensors_as_cpu: bool = False
    autotune: str = "first"
    benchmarks: str = "once"
    formal: bool = True
    seed: int = 0
    on_launch: Callable[[LaunchReport], None] | None = None
    observe: Observe = NOTHING
    launches: list[LaunchReport] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    skipped_benchmarks: int = 0

    def __post_init__(self) -> None:
        self.observer = Observer(self.observe) if self.observe else None
        with contextlib.ExitStack() as stack:
            self.tensors = stack.enter_context(CudaTensors(self.capability)) if self.cuda_tensors_as_cpu else None
            if self.tensors is not None:
                suffix = "a" if self.capability >= 90 else ""
                Extensions(self.tensors.mode, f"{self.capability}{suffix}", self.execute, self.faults).replace(stack)
            if importlib.util.find_spec("triton") is not None:
                self._replace(stack, torch.device("cuda", 0) if self.cuda_tensors_as_cpu else torch.device("cpu"))
            self._stack = stack.pop_all()

    def __enter__(self) -> Activation:
        return self

    def __exit__(self, *error: object) -> None:
        self.deactivate()

    def deactivate(self) -> None:
        """Restore Triton and PyTorch."""
        self._stack.close()

    def _replace(self, stack: contextlib.ExitStack, device: torch.device) -> None:
        """Set the driver, and replace functions that would need ptxas or a GPU."""
        import triton
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.compiler.compiler import ASTSource, CompiledKernel
        from triton.runtime.autotuner import Autotuner

        if triton.knobs.runtime.interpret:
            raise UsageError("TRITON_INTERPRET is set: Triton interprets its kernels and launches none; unset it")
        config = triton.runtime.driver
        stack.enter_context(replace_attribute(config, "_active", EmulatorDriver(self.capability, device, self.launch)))
        replaced: list[tuple[Any, str, Any]] = [
            (CUDABackend, "make_cubin", lambda _, text, *__: text.encode()),
            # Part of the key of Triton's cache, in which a GPU's run must not find PTX for machine code.
            (CUDABackend, "hash", lambda backend: f"greenfast emulator-{backend.target.arch}"),
            # Without the file in the key, a fault could name another file with the same function.
            (ASTSource, "hash", _add_file(ASTSource.hash)),
            (CompiledKernel, "n_regs", property(self._count_registers, lambda kernel, count: None)),
            (triton.testing, "do_bench", self._bench),
            (triton.testing, "do_bench_cudagraph", self._bench),
        ]
        if self.benchmarks == "skip":
            replaced.append((triton.testing.Mark, "run", self._skip))
        if self.autotune == "first":
            replaced.append((Autotuner, "prune_configs", _choose_first(Autotuner.prune_configs)))
            # Before 3.9 Triton measures a single configuration too.
            replaced.append((Autotuner, "_bench", lambda *_, **__: 0.0))
        else:
            replaced.append((Autotuner, "_bench", _without_nan(Autotuner._bench)))
        for owner, name, value in replaced:
            stack.enter_context(replace_attribute(owner, name, value))

    def _count_registers(self, kernel: Any) -> int:
        """Return the registers per thread of a kernel. ptxas chooses their number, and runs only for this."""
        ptx = kernel.asm["ptx"]
        block = (32 * kernel.metadata.num_warps, 1, 1)
        source = KernelSource(kernel.name, ptx, f"{kernel.name}.ptx", (), block, kernel.metadata.shared, language="ptx")
        target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
        resources = compile_kernel(source, Target.parse(target[1] if target else DEFAULT_TARGET)).resources
        return resources.registers

    def _bench(self, call: Callable[[], Any], *args: Any, **options: Any) -> Any:
        """Run a benchmark's call once, or not at all. Return NaN for each time."""
        return measure_nothing(self._skip if self.benchmarks == "skip" else call, *args, **options)

    def _skip(self, *args: Any, **options: Any) -> None:
        self.skipped_benchmarks += 1

    def launch(
        self, source: Any, metadata: Any, function: Any, grid: tuple[int, int, int], args: Any, scratch: Any
    ) -> None:
        """Run a launch, and raise KernelFaultError for a fault, or for a formal finding if these are failures."""
        if min(grid) > 0 and any(n > limit for n, limit in zip(grid, MOST_GRID, strict=True)):
            limits = " x ".join(map(str, MOST_GRID))
            raise RuntimeError(f"Triton Error [CUDA]: invalid argument (a grid of {grid}; at most {limits})")
        for number, value in enumerate(args):
            if self.tensors is not None and isinstance(value, torch.Tensor):
                with without_modes():
                    is_accessible = self.tensors.mode.is_accessible(value)
                if not is_accessible:
                    raise ValueError(f"Pointer argument (at {number}) cannot be accessed from Triton (cpu tensor?)")
        try:
            with without_modes():
                living = self.tensors.mode.find_addressed() if self.tensors is not None else ()
                regions, parameters = Binder(source, metadata).bind(args, scratch, living)
        except GreenfastError as e:
            self.faults.append(convert_error(e))
            raise
        self.execute(make_step(metadata, function, make_launch(metadata, grid, parameters)), regions)

    def execute(self, step: KernelLaunch, regions: Regions, keep: Callable[[str, bytes], None] | None = None) -> None:
        """Run a launch. Its arguments name regions. Raises as ``launch``.

        keep: receives the name and the contents of each variable of the module that the launch changed; None to refuse
        such a launch.
        """
        try:
            with without_modes():
                unwritten = self.tensors.mode.unwritten if self.tensors is not None else None
                result, seconds = run_launch(step, regions, self.seed, self.observe, unwritten)
        except GreenfastError as e:
            self.faults.append(convert_error(e))
            add_launch(self.observer, getattr(e, "observer", None))
            raise
        finally:
            with contextlib.suppress(GreenfastError):
                self.files.update(load_program(step.ptx, step.entry)[0].files)
        add_launch(self.observer, result.observer)
        for (_, name), content in result.changed.items():
            if keep is None:
                text = f"{demangle(step.entry)} changes the variable {name}, and no later launch sees it"
                raise UnsupportedError(text)
            keep(name, content)
        report = LaunchReport(
            kernel=demangle(step.entry),
            grid=step.plan.grid,
            threads=math.prod(step.block),
            seconds=round(seconds, 3),
            printed=result.printed,
            counts=result.counts.record(),
            findings=[convert_finding(finding) for finding in result.findings],
            observed=result.observed,
        )
        self.launches.append(report)
        if result.printed:
            print(result.printed, end="")
        if self.on_launch is not None:
            self.on_launch(report)
        formal = [f for f in report.findings if f.level == FORMAL]
        if self.formal and formal:
            error = KernelFaultError(f"formal finding: {formal[0].message}")
            error.level, error.kernel = FORMAL, step.entry
            self.faults += formal
            raise error


def activate(
    target: str = "sm_90",
    *,
    cuda_tensors_as_cpu: bool = False,
    autotune: str = "first",
    benchmarks: str = "once",
    formal: bool = True,
    seed: int = 0,
    on_launch: Callable[[LaunchReport], None] | None = None,
    observe: Observe = NOTHING,
) -> Activation:
    """Run Triton kernels on CPU tensors, in the emulator, until the returned object's ``deactivate`` or end as context.

    target: the GPU that Triton compiles for: sm_80, sm_90 or sm_100. cuda_tensors_as_cpu: whether ``device="cuda"``
    gives CPU tensors that report a CUDA device, and ``torch.cuda`` answers for the target's GPU, so that code for a
    GPU runs unchanged, also the CUDA kernels of ``torch.utils.cpp_extension.load_inline``.
    autotune: "first" runs the first configuration that fits, "all" runs each of them once.
    benchmarks: whether ``triton.testing.do_bench`` and ``perf_report`` run their calls "once", or "skip" them; times
    are NaN. formal: whether formal findings (docs/emulator.md) are failures. seed: of the order of the warps.
    on_launch: is called with each report. observe: what to observe in each launch (docs/emulator.md), by lines of the
    Triton source or as a warp's trace.

    A fault of a kernel is raised at its launch, as KernelFaultError with the line of the Triton source. A missing
    feature of the emulator raises UnsupportedError. Raises UsageError for a wrong request.
    """
    if not cuda_tensors_as_cpu:
        require("greenfast.emulator.triton", "triton")
    capability = parse_target(target)
    for name, value, allowed in (("autotune", autotune, AUTOTUNE), ("benchmarks", benchmarks, BENCHMARKS)):
        if value not in allowed:
            raise UsageError(f"{name}={value!r}; allowed: {', '.join(allowed)}")
    if observe.watch:
        raise UsageError("observe.watch is for CUDA sources; Triton kernels can be observed by lines and trace")
    return Activation(capability, cuda_tensors_as_cpu, autotune, benchmarks, formal, seed, on_launch, observe)


def parse_target(target: str) -> int:
    """Return the compute capability of a target, such as 90 of sm_90 or sm_90a. Raises UsageError for others."""
    match = re.fullmatch(r"sm_(\d+)a?", target)
    if match is None or int(match[1]) not in SHARED_MEMORY:
        raise UsageError(f"target {target!r}; allowed: {', '.join(f'sm_{n}' for n in SHARED_MEMORY)}")
    return int(match[1])


def _without_nan(bench: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """Replace NaN, the time of a configuration that ran, by 0. One that does not fit has the time infinity."""
    return lambda *args, **options: [0.0 if time != time else time for time in bench(*args, **options)]


def _add_file(hash_source: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda source: f"{hash_source(source)}-{getattr(source.fn, 'file_name', '')}"


def _choose_first(prune: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return a replacement of Autotuner.prune_configs that keeps the first configuration that a GPU could launch."""

    def choose(tuner: Any, kwargs: dict[str, Any]) -> list[Any]:
        from triton.compiler.errors import CompileTimeAssertionFailure
        from triton.runtime.errors import OutOfResources

        configs = prune(tuner, kwargs)
        for config in configs if len(configs) > 1 else ():
            try:
                kernel = tuner.fn.run(*tuner.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
                if kernel is not None:
                    kernel._init_handles()
            except (OutOfResources, CompileTimeAssertionFailure):
                continue
            return [config]
        return configs[:1]

    return choose
