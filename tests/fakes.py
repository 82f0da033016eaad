"""A device without a GPU: host memory behind the driver's calls, kernels that are Python, scripted durations.

Everything above the driver is real: Bound with its poison, guard bands and checks, Rotation with what it queues around
each launch, GpuSession, and all of Worker but its process. A kernel looks for its inputs where its launch says, and
writes what the problem's exact reference says for them, cast to the output's type, unless its script makes it do
something else (a ``Behaviour``). What is queued is done at once.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
import sys
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import pytest

from greenfast.device.gpu import Gpu
from greenfast.device.gpu_session import GpuSession
from greenfast.device.helper_kernels import FIELDS, RANGES
from greenfast.device.session import Block, Executable, KernelImage, RunResult, Started
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.implementation import Implementation, build_rung_implementation, build_side
from greenfast.judge.record_schema import GateResult
from greenfast.judge.request import CasePlan, CheckPlan, Request
from greenfast.judge.solution.client import SolutionProcess
from greenfast.judge.solution.messages import Choose, Load, Render, RpcReply, RpcRequest
from greenfast.judge.solution.server import _Server
from greenfast.judge.task import FormatGates, LoadedTask, load
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, MachineError, UnsupportedError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.kernel import PHASE_BUFFER, Launch
from greenfast.spec.problem import NORMAL, Array, Case, Problem, build_case
from tests.host_driver import HostDriver

L4 = DeviceInfo(
    kind="gpu", name="NVIDIA L4", compute_capability="8.9", cuda_version="13.0", driver="580.95", sm_clock_mhz=2040
)
CLOCK_MHZ = 2040.0


@dataclass
class Call:
    """One launch as a kernel sees it. ``right`` is what it ought to write; the numbers count from 0.

    kept: what the kernel keeps from launch to launch of a process, as in memory that is nobody's.
    """

    pointers: dict[str, int]
    right: dict[str, Array]
    other_seed: Callable[[], dict[str, Array]]
    number: int  # among the launches at these addresses; of timed ones, among those in this place
    serial: int  # among all launches of the device
    kept: dict[Any, Any]
    memory: HostDriver

    def write(self, name: str, data: bytes, offset: int = 0) -> None:
        """Write to a buffer, or outside of it. Raises MachineError where there is no memory that it may write."""
        if not self.memory.may_write(self.pointers[name] + offset, len(data)):
            raise MachineError("CUDA: CUDA_ERROR_ILLEGAL_ADDRESS")
        ctypes.memmove(self.pointers[name] + offset, data, len(data))

    def read(self, name: str, nbytes: int, offset: int = 0) -> bytes:
        """Read a buffer, or outside of it. Raises MachineError where there is no memory."""
        if not self.memory.holds(self.pointers[name] + offset, nbytes):
            raise MachineError("CUDA: CUDA_ERROR_ILLEGAL_ADDRESS")
        return ctypes.string_at(self.pointers[name] + offset, nbytes)

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
    """One call of Worker.time; key: the shape."""

    process: int
    variant: str
    key: str
    warmup: int
    iters: int
    cold: bool


@cache
def _right(
    problem: Hashable, dims: tuple[tuple[str, int], ...], seed: int, fmt: str, variant: str = NORMAL
) -> tuple[Case, dict[str, Array]]:
    """A case and its right outputs: the exact reference, cast."""
    made = cast(Problem, problem)
    case = build_case(made, dict(dims), seed, fmt, variant)
    ((name, spec),) = case.outputs.items()
    given: dict[str, Any] = {} if variant == NORMAL else {"variant": variant}
    exact = made.references(dict(dims), seed, fmt, **given).exact
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
            side = build_side("fake", r.task.family, variant, r.format, r.built_shapes, r.target, rejections={})
            for _, kernel in side.distinct:
                self._variant_of[kernel.cubin] = name
        #: By shape, the sizes of its inputs, and what tells its cases apart.
        self._sizes: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        self._seeds: dict[tuple[int, ...], tuple[int, str]] = {}
        for case_plan in r.case_plans:
            dims = tuple(case_plan.shape.dims.items())
            inputs = self.case(dims, case_plan.seed, case_plan.variant)[0].inputs
            self._sizes[dims] = {name: array.nbytes for name, array in inputs.items()}
            self._seeds[tuple(hash(inputs[name].tobytes()) for name in inputs)] = case_plan.seed, case_plan.variant

    def variant(self, image: KernelImage) -> str:
        """The name of the scripted variant that an image was built from, or "default"."""
        return self._variant_of.get(image.cubin, "default")

    def script(self, image: KernelImage) -> Script:
        """What an image's kernel does."""
        return self.scripts.get(self.variant(image), self.default)

    def case(
        self, dims: tuple[tuple[str, int], ...], seed: int, variant: str = NORMAL
    ) -> tuple[Case, dict[str, Array]]:
        """A case and its right outputs."""
        return _right(cast(Hashable, self.request.task.problem), dims, seed, self.request.format, variant)

    def found_at(self, pointers: Mapping[str, int]) -> tuple[tuple[tuple[str, int], ...], int, str] | None:
        """The dims, seed and variant of the case whose inputs lie there, None if it is none of the request's."""
        largest_first = sorted(self._sizes.items(), key=lambda item: -sum(item[1].values()))  # one may begin as another
        for dims, sizes in largest_first:
            if sizes.keys() <= pointers.keys() and all(
                self.memory.holds(pointers[name], nbytes) for name, nbytes in sizes.items()
            ):
                key = tuple(self.memory.hash_at(pointers[name], nbytes) for name, nbytes in sizes.items())
                if key in self._seeds:
                    return dims, *self._seeds[key]
        return None

    def make_worker(self) -> Worker:
        """A worker on this device, as Request.make_worker gives one."""
        return FakeWorker(self, timeout_s=self.request.timeout_s)


class HostLaunch:
    """A launch of a kernel that is Python, in the place of ``BoundLaunch``."""

    def __init__(self, kernel: HostKernel | HostInstrument, block: object, smem: int, plan: Launch,
                 pointers: Mapping[str, int], stream: int, name: str) -> None:  # fmt: skip
        self._kernel, self._plan, self._pointers = kernel, plan, dict(pointers)
        self._arguments = list(plan.args)
        self._launches = 0

    def address_slots(self) -> list[tuple[str, HostSlot]]:
        return [(name, HostSlot(self._pointers, name)) for name in self._pointers]

    def write(self, number: int, argument: bytes) -> None:
        self._arguments[number] = argument

    def __call__(self) -> None:
        if isinstance(self._kernel, HostInstrument):
            self._kernel.launch(self._arguments)
        else:
            self._kernel.launch(self._plan, dict(self._pointers), self._launches)
        self._launches += 1


class HostSlot:
    """The address of a buffer among the arguments of a launch."""

    def __init__(self, pointers: dict[str, int], name: str) -> None:
        self._pointers, self._name = pointers, name

    @property
    def value(self) -> int:
        return self._pointers[self._name]

    @value.setter
    def value(self, address: int) -> None:
        self._pointers[self._name] = address


@dataclass
class HostKernel:
    """A loaded kernel of a solution."""

    gpu: FakeGpu
    image: KernelImage

    def launch(self, plan: Launch, pointers: Mapping[str, int], number: int) -> None:
        """Do what the script says with the case that lies there."""
        gpu, device = self.gpu, self.gpu.fake
        gpu.at = found = device.found_at(pointers) or gpu.at
        assert found is not None, "a launch with the inputs of no case"
        dims, seed, variant = found
        device.memory.note("launch")
        script = device.script(self.image)
        call = Call(
            pointers={name: pointers[name] for name in plan.args if isinstance(name, str)},
            right=device.case(dims, seed, variant)[1],
            other_seed=lambda: device.case(dims, device.request.seeds[0])[1],
            number=number,
            serial=device.launches,
            kept=gpu.kept,
            memory=device.memory,
        )
        device.launches += 1
        gpu.pass_time(script)
        script.behave(call)
        if self.image.phases:
            cycles = np.tile(np.arange(1, len(self.image.phases) + 1, dtype=np.int64), math.prod(plan.grid))
            call.write(PHASE_BUFFER, cycles.tobytes())


@dataclass
class HostInstrument:
    """One of the judge's own kernels. Its digest is another keyed hash than the device's."""

    gpu: FakeGpu
    entry: str

    def launch(self, arguments: Sequence[Any]) -> None:
        memory = self.gpu.fake.memory
        memory.note(self.entry)
        if self.entry == "apply_mask":
            pointer, pairs, key = map(int, arguments)
            ctypes.memmove(pointer, _mask_words(ctypes.string_at(pointer, 16 * pairs), key), 16 * pairs)
        if self.entry != "digest":
            return
        *fields, key = struct.unpack(f"<{RANGES * FIELDS + 1}Q", arguments[0])
        for pointer, pairs, first, place, mask_key in zip(*(fields[i::FIELDS] for i in range(FIELDS)), strict=True):
            if pairs:
                assert memory.holds(pointer, 16 * pairs), "a digest of memory that is not allocated"
                number = ctypes.c_uint64.from_address(place)
                if mask_key:
                    of_data = hash(_mask_words(ctypes.string_at(pointer, 16 * pairs), mask_key))
                else:
                    of_data = memory.hash_at(pointer, 16 * pairs)
                number.value += hash((of_data, first, key)) % 2**64


def _mask_words(data: bytes, key: int) -> bytes:
    return (np.frombuffer(data, np.uint8) ^ _stream(key, len(data))).tobytes()


@cache
def _stream(key: int, nbytes: int) -> Array:
    return np.random.default_rng(key).integers(0, 256, nbytes, np.uint8)


@dataclass(frozen=True)
class Stamp:
    """A time stamp in microseconds."""

    us: float

    def __sub__(self, other: Stamp) -> float:
        return (self.us - other.us) / 1e3


class FakeGpu(Gpu):
    """A Gpu whose stream does everything at once, and whose time passes in the kernels of solutions only."""

    def __init__(self, device: FakeDevice, process: int) -> None:
        properties = SimpleNamespace(multiprocessor_count=2, l2_cache_size=4096, max_shared_memory_per_block_optin=1024)
        self.fake, self.process = device, process
        self.device = SimpleNamespace(properties=properties, device_id=0)
        self.stream = SimpleNamespace(sync=lambda: None, handle=0, record=lambda options: self._stamp())
        self.kept: dict[Any, Any] = {}
        self.at: tuple[tuple[tuple[str, int], ...], int, str] | None = None
        self.cold = False
        self._us = 0.0
        self._drift = device.rng.standard_normal()

    @property
    def capability(self) -> tuple[int, int]:
        return (8, 9)

    def info(self) -> DeviceInfo:
        info = self.fake.request.device
        assert info is not None
        return info

    def load(self, image: KernelImage) -> HostKernel | HostInstrument:
        if image.entry in ("spin", "clobber_smem", "digest", "apply_mask", "fill_local"):
            return HostInstrument(self, image.entry)
        return HostKernel(self, image)

    def variables(self, executable: Executable) -> dict[str, bytes]:
        return {}  # kernels that are Python have no module

    def clocks(self) -> dict[str, float]:
        return {"sm_mhz": self.fake.clock(len(self.fake.timed) - 1), "temperature_c": 50.0, "power_w": 300.0}

    def pass_time(self, script: Script) -> None:
        """Let a launch take its time."""
        noise = script.sigma * self.fake.rng.standard_normal() + script.process_sigma * self._drift
        us = script.us if script.cold_us is None or not self.cold else script.cold_us
        self._us += us * math.exp(noise)

    def _stamp(self) -> Stamp:
        self.fake.memory.note("stamp")
        return Stamp(self._us)


class FakeSession(GpuSession):
    """A session on the fake device, which notes what is timed."""

    def __init__(self, device: FakeDevice, process: int) -> None:
        self._fake = FakeGpu(device, process)
        self._images: dict[str, KernelImage] = {}
        self._start(self._fake)

    def prepare(self, key: str, executable: Executable, cases: Sequence[Case], warmup: int, seed: int) -> Started:
        self._images[key] = executable.steps[0][0]
        return super().prepare(key, executable, cases, warmup, seed)

    def time(self, key: str, warmup: int, iters: int, cold: bool, seed: int) -> Block:
        device = self._fake.fake
        variant = device.variant(self._images[key])
        device.timed.append(TimedBlock(self._fake.process, variant, key, warmup, iters, cold))
        self._fake.cold = cold
        return super().time(key, warmup, iters, cold, seed)


class FakeWorker(Worker):
    """A Worker whose session lives in this process; a failure is reported as the real one reports it."""

    def __init__(self, device: FakeDevice, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.closed = False
        self.session = FakeSession(device, len(device.workers))
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


#: Modules that look for the GPUs of this machine.
_ASKING = ("judge.request", "cli.library")


class InOrder(Executor):
    """Runs what it is given at once, so that what a fake device does next does not depend on threads."""

    def __init__(self, threads: int) -> None:
        """As a pool of threads is made."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that has its result already."""
        found: Future[Any] = Future()
        try:
            found.set_result(function(*args, **kwargs))
        except BaseException as e:
            found.set_exception(e)
        return found


def install(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> FakeDevice:
    """Put the fake device in the place of the GPU of this machine, if it has one. Few launches warm up a block."""
    monkeypatch.setattr("greenfast.judge.timing.interleaved._BLOCK_WARMUP", 1)
    monkeypatch.setattr("greenfast.device.gpu.PAGE_BYTES", PAGE)
    monkeypatch.setattr("greenfast.device.rotating_buffers.SHIFTS", SHIFTS)
    monkeypatch.setattr("greenfast.judge.gates.correctness.ThreadPoolExecutor", InOrder)
    for module in ("gpu", "helper_kernels", "rotating_buffers"):
        monkeypatch.setattr(f"greenfast.device.{module}.BoundLaunch", HostLaunch)
    for module in ("gpu", "helper_kernels", "rotating_buffers", "virtual_memory", "memory_check"):
        monkeypatch.setattr(f"greenfast.device.{module}.driver", device.memory)
    seeds = itertools.count()
    monkeypatch.setattr("greenfast.judge.gates.performance.draw_order_seed", lambda: next(seeds))
    for module in _ASKING:
        monkeypatch.setattr(f"greenfast.{module}.device_count", lambda: 1)

    def start(ordinal: int = 0, *, timeout_s: float) -> Worker:
        assert ordinal == 0
        return FakeWorker(device, timeout_s=timeout_s)

    monkeypatch.setattr(Request, "make_emulator", None)  # which would run the real kernels
    monkeypatch.setattr("greenfast.judge.request.Worker", start)
    for module in ("judge.request", "cli.library"):
        monkeypatch.setattr(f"greenfast.{module}.gpu_info", lambda n, limit: start(n, timeout_s=limit).info())
    return device


class EmulatorHere(Worker):
    """The emulator in this process. Another process takes a third of a second to start, longer than a small kernel."""

    def __init__(self, make_session: type[EmulatorSession] = EmulatorSession) -> None:
        self._session = make_session()

    def close(self) -> None:
        """There is no process."""

    def call(self, method: str, *args: Any) -> RunResult:
        """What the session's method returns."""
        try:
            result: RunResult = getattr(self._session, method)(*args)
        except UnsupportedError as e:
            raise UnsupportedByDeviceError(f"{method}: {e}") from None
        except GreenfastError as e:
            raise WorkerError(f"{method}: {e}") from None
        return result


def emulate_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the emulator in this process if a request asks for one."""

    def start(*args: Any, make_session: type[EmulatorSession] | None = None, **options: Any) -> Worker:
        return EmulatorHere() if make_session is EmulatorSession else Worker(*args, **options)

    monkeypatch.setattr("greenfast.judge.request.Worker", start)


class FamilyHere(SolutionProcess):
    """A solution's code in this process, with the messages of its own process, which takes 0.4 s of CPU to start."""

    def __init__(self, label: str, folder: Path, **options: Any) -> None:
        self._label = label
        self._server = _Server()
        self._temporary = tempfile.TemporaryDirectory(prefix="greenfast-solution-")
        self.scratch = Path(self._temporary.name)
        self.readable = ["/"]
        self.sandbox = []

    def close(self) -> None:
        """There is no process."""

    def request(self, call: Load | Render | Choose) -> Any:
        """Encode the request and its reply as for a process. Return the reply."""
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(RpcRequest(1, call)), type=RpcRequest)
        data = msgspec.msgpack.encode(RpcReply(1, self._server.answer(request.call)))
        return msgspec.msgpack.decode(data, type=RpcReply).reply


def import_families_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code of families in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # a family's folder is added
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # tests change a family within a second
    monkeypatch.setattr("greenfast.judge.solution.client.SolutionProcess", FamilyHere)


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine one without a GPU, here and in processes that it starts."""
    for module in _ASKING:
        monkeypatch.setattr(f"greenfast.{module}.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@cache
def shipped(name: str) -> LoadedTask:
    """A task of this repository."""
    return load(name)


#: Of the fake device. A launch's digest reads what is left of a page: of the driver's 2 MB that was most of the work.
PAGE = 1 << 14
#: Of the fake device. It digests and overwrites the memory of all shifts around each launch.
SHIFTS = 8
FEW = {"warmup_iters": 3, "timed_iters": 24}


def request(
    out: Path,
    *,
    task: LoadedTask | None = None,
    shapes: Sequence[str] = ("small",),
    seeds: Sequence[int] = (0, 1),
    fmt: str = "e4m3",
    arch: str = "sm_89",
    device: DeviceInfo | None = L4,
    whole: bool = True,
    **timing: int,
) -> Request:
    """A request of the attention task (or of ``task``), for the fake device unless ``device`` says otherwise.

    It times few launches, so that tests take little time, unless ``timing`` says otherwise.

    whole: whether the exam is as if the task had these shapes and seeds only, of which the last of each were drawn;
    else none is planned.
    """
    task = task or shipped("fp8_sdpa")
    chosen = [task.config.shape(name) for name in shapes]
    last = chosen[-1], seeds[-1]
    case_plans = tuple(CasePlan(shape, seed, randomized=(shape, seed) == last) for shape in chosen for seed in seeds)
    return Request(
        task=task,
        shapes=chosen,
        seeds=list(seeds),
        check_plan=CheckPlan(
            case_plans, tuple(chosen), chosen[0], (chosen[0],), random_shapes=(chosen[-1],), seed=seeds[-1]
        )
        if whole
        else None,
        format=fmt,
        target=Target.parse(arch),
        ordinal=None if device is None else 0,
        device=device,
        timing=msgspec.structs.replace(task.config.timing, **{**FEW, **timing}),
        timeout_s=30.0,
        out=out,
        command="greenfast judge fp8_sdpa",
    )


def rungs(request: Request, baseline: str, candidate: str) -> tuple[Implementation, Implementation]:
    """Two implementations of a request's task, by the names of their rungs or their toggles."""
    variants = (request.task.config.variant(name) for name in (baseline, candidate))
    one, other = (build_rung_implementation(request.task, variant) for variant in variants)
    return one, other


@dataclass
class Watcher:
    """An Observer that keeps what it was told."""

    gates: list[GateResult] = field(default_factory=list)
    shares: list[tuple[str, float]] = field(default_factory=list)

    def gate(self, result: GateResult) -> None:
        self.gates.append(result)

    def progress(self, gate: str, share: float, text: str) -> None:
        self.shares.append((gate, share))


def case_run(
    sides: Sequence[Any],
    problem: Any,
    case_plans: Sequence[CasePlan],
    fmt: str,
    gates: FormatGates,
    make_worker: Any,
    *,
    own: str | None = None,
) -> Any:
    """A run with all that CORRECTNESS reads of it. own: the role of the task's own baseline."""
    implementations = {
        side.role: SimpleNamespace(is_task_baseline=side.role == own, requirements=SimpleNamespace(kernel_error=None))
        for side in sides
    }
    request = SimpleNamespace(
        task=SimpleNamespace(problem=problem), format=fmt, case_plans=case_plans, gates=gates,
        make_worker=make_worker, checks_memory=False, check_plan=None,
    )  # fmt: skip
    return SimpleNamespace(
        request=request, sides=sides, implementations=implementations, cannot_run=lambda: None,
        progress=lambda gate: lambda share, text: None,
    )  # fmt: skip
