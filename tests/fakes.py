"""A device without a GPU: host memory behind the driver's calls, kernels that are Python, scripted durations.

Everything above the driver is real: Bound with its poison, guard bands and checks, GpuSession with its repeats, and all
of Worker but its process. A kernel writes what the problem's exact reference says, cast to the output's type, unless
its script makes it do something else (a ``Behaviour``).
"""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from greenfast.device.gpu import Bound, Executable, KernelImage
from greenfast.device.session import GpuSession
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.gates.sides import build_side
from greenfast.judge.record import GateResult
from greenfast.judge.request import Request
from greenfast.judge.tasks import LoadedTask, find_task, load
from greenfast.spec.arch import Target
from greenfast.spec.errors import UnsupportedError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.kernel import PHASE_BUFFER, Launch
from greenfast.spec.problem import Array, Case, Problem

L4 = DeviceInfo(
    kind="gpu", name="NVIDIA L4", compute_capability="8.9", cuda_version="13.0", driver="580.95", sm_clock_mhz=2040
)
CLOCK_MHZ = 2040.0


class HostDriver:
    """The driver's memory calls on host memory; an access outside of an allocation is an illegal address."""

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_ILLEGAL_ADDRESS = 700

    def __init__(self) -> None:
        self._blocks: dict[int, Any] = {}
        self._ok = self.CUresult.CUDA_SUCCESS
        self.underway = 0  # fills and copies to the device that have not been waited for

    @property
    def allocations(self) -> int:
        """How many blocks have not been given back."""
        return len(self._blocks)

    def _holds(self, pointer: int, nbytes: int) -> bool:
        return any(base <= pointer and pointer + nbytes <= base + len(b) for base, b in self._blocks.items())

    def _do(self, pointer: int, nbytes: int, act: Callable[[], object]) -> tuple[Any, ...]:
        if not self._holds(pointer, nbytes):
            return (self.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        act()
        return (self._ok,)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, int]:  # noqa: N802
        block = ctypes.create_string_buffer(nbytes)
        self._blocks[ctypes.addressof(block)] = block
        return self._ok, ctypes.addressof(block)

    def cuMemFree(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        known = self._blocks.pop(pointer, None) is not None
        return (self._ok if known else self.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:  # noqa: N802
        self.underway = 0
        return (self._ok,)

    def cuMemsetD8(self, pointer: int, value: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        self.underway += 1
        return self._do(pointer, nbytes, lambda: ctypes.memset(pointer, value, nbytes))

    def cuMemsetD8Async(self, pointer: int, value: int, nbytes: int, stream: object) -> tuple[Any, ...]:  # noqa: N802
        return self.cuMemsetD8(pointer, value, nbytes)

    def cuMemcpyHtoD(self, pointer: int, host: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        self.underway += 1
        return self._do(pointer, nbytes, lambda: ctypes.memmove(pointer, host, nbytes))

    def cuMemcpyDtoH(self, host: int, pointer: int, nbytes: int) -> tuple[Any, ...]:  # noqa: N802
        return self._do(pointer, nbytes, lambda: ctypes.memmove(host, pointer, nbytes))


@dataclass
class Call:
    """One launch as a kernel sees it. ``right`` is what it ought to write; the numbers count from 0."""

    pointers: dict[str, int]
    right: dict[str, Array]
    other_seed: Callable[[], dict[str, Array]]
    number: int  # among the launches of this binding
    serial: int  # among all launches of the device

    def write(self, name: str, data: bytes, offset: int = 0) -> None:
        """Write to a buffer, or outside of it."""
        ctypes.memmove(self.pointers[name] + offset, data, len(data))

    def write_all(self, outputs: Mapping[str, Array]) -> None:
        """Write these arrays to their buffers."""
        for name, array in outputs.items():
            contiguous = np.ascontiguousarray(array)
            ctypes.memmove(self.pointers[name], contiguous.ctypes.data, contiguous.nbytes)


Behaviour: TypeAlias = Callable[[Call], None]


class CrashError(Exception):
    """The kernel takes its process with it."""


class HangError(Exception):
    """The kernel does not end."""


def right(call: Call) -> None:
    """Write the right result."""
    call.write_all(call.right)


@dataclass(frozen=True)
class Script:
    """What a variant's kernel does on the fake device, and how long it takes; the sigmas are relative."""

    us: float = 10.0
    cold_us: float | None = None  # with an empty L2 cache; None: as warm
    behave: Behaviour = right
    sigma: float = 0.003
    process_sigma: float = 0.0


@dataclass(frozen=True)
class TimedBlock:
    """One call of Worker.time."""

    process: int
    variant: str
    digest: str
    warmup: int
    iters: int
    cold: bool


@cache
def _right(problem: Hashable, dims: tuple[tuple[str, int], ...], seed: int, fmt: str) -> tuple[Case, dict[str, Array]]:
    """A case and its right outputs: the exact reference, cast."""
    made = cast(Problem, problem)
    case = made.make_case(dict(dims), seed, fmt)
    ((name, spec),) = case.outputs.items()
    exact = made.references(dict(dims), seed, fmt).exact
    return case, {name: exact.reshape(spec.shape).astype(spec.dtype)}


@dataclass
class FakeDevice:
    """A device for one request: scripts by variant name (``default`` for the others), and what it saw."""

    request: Request
    scripts: dict[str, Script] = field(default_factory=dict)
    default: Script = Script()
    clock: Callable[[int], float] = lambda block: CLOCK_MHZ
    memory: HostDriver = field(default_factory=HostDriver)
    timed: list[TimedBlock] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)
    launches: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        r = self.request
        self._variant_of: dict[bytes, str] = {}
        for name in self.scripts:
            variant = r.task.config.variant(name)
            side = build_side("fake", r.task.family, variant, r.format, r.shapes, r.target)
            for _, kernel in side.distinct:
                self._variant_of[kernel.cubin] = name
        self._cases: dict[str, tuple[tuple[tuple[str, int], ...], int]] = {}
        for shape in r.shapes:
            for seed in r.seeds:
                dims = tuple(shape.dims.items())
                self._cases[_right(cast(Hashable, r.task.problem), dims, seed, r.format)[0].digest] = (dims, seed)

    def variant(self, image: KernelImage) -> str:
        """The name of the scripted variant that an image was built from, or "default"."""
        return self._variant_of.get(image.cubin, "default")

    def script(self, image: KernelImage) -> Script:
        """What an image's kernel does."""
        return self.scripts.get(self.variant(image), self.default)

    def right(self, digest: str, seed: int | None = None) -> dict[str, Array]:
        """The right outputs of the case with that digest (of its shape with another seed)."""
        dims, own = self._cases[digest]
        problem = cast(Hashable, self.request.task.problem)
        return _right(problem, dims, own if seed is None else seed, self.request.format)[1]

    def make_worker(self) -> Worker:
        """A worker on this device, as Request.make_worker gives one."""
        return FakeWorker(self, timeout_s=self.request.timeout_s)


@dataclass
class HostKernel:
    """A loaded kernel, bound to a case."""

    device: FakeDevice
    image: KernelImage
    plan: Launch
    digest: str
    launches: int = 0

    @property
    def num_arguments(self) -> int:
        """As many as its launch gives."""
        return len(self.plan.args)

    def __call__(self, args: Sequence[Any]) -> None:
        pointers = {name: arg for name, arg in zip(self.plan.args, args, strict=True) if isinstance(name, str)}
        call = Call(
            pointers=pointers,
            right=self.device.right(self.digest),
            other_seed=lambda: self.device.right(self.digest, self.device.request.seeds[0]),
            number=self.launches,
            serial=self.device.launches,
        )
        self.launches += 1
        self.device.launches += 1
        self.device.script(self.image).behave(call)
        if self.image.phases:
            blocks = math.prod(self.plan.grid)
            cycles = np.tile(np.arange(1, len(self.image.phases) + 1, dtype=np.int64), blocks)
            call.write(PHASE_BUFFER, cycles.tobytes())


class HostLaunch:
    """A launch of a kernel that is Python, in the place of ``Prepared``."""

    def __init__(self, kernel: HostKernel, block: object, smem: int, plan: Launch, pointers: Mapping[str, int],
                 stream: int, name: str) -> None:  # fmt: skip
        self._kernel = kernel
        self._args = [pointers[a] if isinstance(a, str) else a for a in plan.args]

    def __call__(self) -> None:
        self._kernel(self._args)


class FakeGpu:
    """What GpuSession and Bound need of a Gpu."""

    def __init__(self, device: FakeDevice, process: int) -> None:
        self._device = device
        self._process = process
        self._drift = device.rng.standard_normal()
        self._next: tuple[Launch, str]
        self._on: dict[int, tuple[KernelImage, str]] = {}
        self.stream = SimpleNamespace(sync=lambda: None, handle=0)

    def info(self) -> DeviceInfo:
        info = self._device.request.device
        assert info is not None
        return info

    def load(self, image: KernelImage) -> HostKernel:
        return HostKernel(self._device, image, *self._next)

    def bind(self, executable: Executable, case: Case) -> Bound:
        ((image, plan),) = executable.steps
        self._next = (plan, case.digest)
        bound = Bound(self, executable, case)  # type: ignore[arg-type]
        self._on[id(bound)] = (image, case.digest)
        return bound

    def clocks(self) -> dict[str, float]:
        return {"sm_mhz": self._device.clock(len(self._device.timed) - 1), "temperature_c": 50.0}

    def time(self, bound: Bound, warmup: int, iters: int, *, cold: bool) -> list[float]:
        image, digest = self._on[id(bound)]
        script = self._device.script(image)
        for _ in range(warmup):
            bound.launch()
        for _ in range(iters):
            bound.queue_poison()
            bound.launch()
        variant = self._device.variant(image)
        self._device.timed.append(TimedBlock(self._process, variant, digest, warmup, iters, cold))
        noise = script.sigma * self._device.rng.standard_normal(iters) + script.process_sigma * self._drift
        us = script.us if script.cold_us is None or not cold else script.cold_us
        samples: NDArray[np.float64] = us * np.exp(noise)
        return [float(t) for t in samples]


class FakeWorker(Worker):
    """A Worker whose session lives in this process; a failure is reported as the real one reports it."""

    def __init__(self, device: FakeDevice, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.closed = False
        self.session = _session(device, len(device.workers))
        device.workers.append(self)

    def close(self) -> None:
        self.closed = True

    def call(self, method: str, *args: Any) -> Any:
        assert not self.closed, "a closed worker was used"
        try:
            return getattr(self.session, method)(*args)
        except CrashError:
            problem = f"crash: the process ended during {method} (exit -11)"
        except HangError:
            problem = f"hang: {method} did not end within {self._timeout_s:g} s; its process was killed"
        except UnsupportedError as e:
            raise UnsupportedByDeviceError(f"{method}: {e}") from None
        except Exception as e:
            problem = f"{method}: {type(e).__name__}: {e}"
        self.close()
        raise WorkerError(problem)


def _session(device: FakeDevice, process: int) -> GpuSession:
    session = GpuSession.__new__(GpuSession)
    session._gpu = FakeGpu(device, process)  # type: ignore[assignment]
    session._bound = {}
    return session


#: Modules that look for the GPUs of this machine.
_ASKING = ("judge.environment", "cli.warmup")


def install(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> FakeDevice:
    """Put the fake device in the place of the GPU of this machine, if it has one."""
    monkeypatch.setattr("greenfast.device.gpu.driver", device.memory)
    monkeypatch.setattr("greenfast.device.gpu.Prepared", HostLaunch)
    for module in _ASKING:
        monkeypatch.setattr(f"greenfast.{module}.device_count", lambda: 1)

    def start(ordinal: int = 0, *, timeout_s: float) -> Worker:
        assert ordinal == 0
        return FakeWorker(device, timeout_s=timeout_s)

    for module in ("judge.request", *_ASKING):
        monkeypatch.setattr(f"greenfast.{module}.Worker", start)
    return device


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine one without a GPU, here and in processes that it starts."""
    for module in _ASKING:
        monkeypatch.setattr(f"greenfast.{module}.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@cache
def shipped(name: str) -> LoadedTask:
    """A task of this repository."""
    return load(find_task(name))


def request(
    out: Path,
    *,
    task: LoadedTask | None = None,
    shapes: Sequence[str] = ("small",),
    seeds: Sequence[int] = (0, 1),
    fmt: str = "e4m3",
    arch: str = "sm_89",
    device: DeviceInfo | None = L4,
    **timing: int,
) -> Request:
    """A request of the attention task (or of ``task``), for the fake device unless ``device`` says otherwise."""
    task = task or shipped("fp8_sdpa")
    return Request(
        task=task,
        shapes=[task.config.shape(name) for name in shapes],
        seeds=list(seeds),
        format=fmt,
        target=Target.parse(arch),
        ordinal=None if device is None else 0,
        device=device,
        timing=msgspec.structs.replace(task.config.timing, **timing),
        timeout_s=30.0,
        out=out,
        command="greenfast validate fp8_sdpa",
    )


@dataclass
class Watcher:
    """An Observer that keeps what it was told."""

    gates: list[GateResult] = field(default_factory=list)
    shares: list[tuple[str, float]] = field(default_factory=list)

    def gate(self, result: GateResult) -> None:
        self.gates.append(result)

    def progress(self, gate: str, share: float, text: str) -> None:
        self.shares.append((gate, share))
