"""Launches for calls of one kind, prepared once on each stream; a call writes its addresses into their arguments."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from cuda.core import Device

from greenfast.device.bound_launch import BoundLaunch, NoContextError
from greenfast.device.compiler import compile_kernel
from greenfast.device.executable import KernelImage
from greenfast.device.gpu import load_kernel
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource, Launch, maps_of, pointers_of

ALIGNMENT = 256  # bytes, of buffers in the workspace
_MAX_STREAMS = 64  # per plan
_COMPILING = threading.Lock()

Key = TypeVar("Key")
Value = TypeVar("Value")
Addresses = Sequence[int]


@cache
def get_target(device: int) -> Target:
    """The target of a CUDA device. Raises NotImplementedError for one that is too old."""
    try:
        properties = torch.cuda.get_device_properties(device)
        return Target.of_device((properties.major, properties.minor), properties.multi_processor_count)
    except UsageError as e:
        raise NotImplementedError(str(e)) from None


@cache
def _load(source: KernelSource, device: int) -> Any:
    compiled = compile_kernel(source, get_target(device))
    image = KernelImage(compiled.cubin, source.entry, source.block, source.dynamic_smem_bytes)
    return load_kernel(image, Device(device))


def put_bounded(cache: dict[Key, Value], key: Key, value: Value, most: int) -> Value:
    """Store a value and return it; a cache of ``most`` entries is cleared first."""
    if len(cache) >= most:
        cache.clear()
    cache[key] = value
    return value


@dataclass(frozen=True)
class LaunchStep:
    """One launch of a plan; ``names``: buffers of the kernel -> buffers of the plan, where they differ."""

    source: KernelSource
    launch: Launch
    names: Mapping[str, str] = field(default_factory=dict)

    def buffers(self) -> set[str]:
        """The plan's buffers that the launch reads or writes."""
        args = self.launch.args
        named = {name for x in args for _, name in pointers_of(x)} | {m.buffer for x in args for _, m in maps_of(x)}
        return {self.names.get(x, x) for x in named}

    def bind(self, device: int, pointers: Mapping[str, int], stream: int) -> BoundLaunch:
        """The launch on a stream, with the address of each of the plan's buffers."""
        with _COMPILING:
            kernel = _load(self.source, device)
        renamed = {**pointers, **{name: pointers[buffer] for name, buffer in self.names.items()}}
        return BoundLaunch(kernel, self.source.block, self.source.dynamic_smem_bytes, self.launch, renamed, stream)


class BoundLaunches:
    """The launches of a plan on one stream.

    places: where addresses are in their arguments, each with the number of the address. work: places of the workspace,
    each with the bytes from its beginning.
    """

    __slots__ = ("_each", "_places", "_work")

    def __init__(
        self, each: Sequence[BoundLaunch], places: Sequence[tuple[int, Any]], work: Sequence[tuple[int, Any]] = ()
    ) -> None:
        self._each, self._places, self._work = each, places, work

    def __call__(self, addresses: Addresses, workspace: int) -> None:
        """Queue the launches with these addresses. Raises NoContextError, with none queued, without a context."""
        for number, place in self._places:
            place.value = addresses[number]
        for offset, place in self._work:
            place.value = workspace + offset
        for launch in self._each:
            launch()


@dataclass(slots=True)
class LaunchPlan:
    """Launches for calls of one kind.

    names: buffers that a call gives the addresses of. work: those in one allocation, by their offsets in bytes.
    idle: by stream, launches that no thread is queueing. reordered: plans for other orders of the addresses.
    """

    device: int
    steps: tuple[LaunchStep, ...]
    names: tuple[str, ...] = ()
    work: Mapping[str, int] = field(default_factory=dict)
    work_bytes: int = 0
    head_dim: int = 0  # of the codes
    out_strides: tuple[int, ...] = ()
    idle: dict[int, list[BoundLaunches]] = field(default_factory=dict)
    reordered: dict[tuple[str, ...], LaunchPlan] = field(default_factory=dict)

    def with_argument_order(self, names: tuple[str, ...]) -> LaunchPlan:
        """The plan for calls that give the addresses of these buffers, all that its launches have, in this order."""
        if names not in self.reordered:
            self.reordered[names] = replace(self, names=names, idle={}, reordered={})
        return self.reordered[names]

    def launch(self, addresses: Addresses) -> None:
        """Queue the launches on the current stream; addresses: of each of ``names``.

        A call takes launches for itself, since it writes their arguments; no lock is held while it does. Its workspace
        is PyTorch's memory of the stream, held until they are queued: given back, another thread may take it.
        """
        device = self.device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self.launch(addresses)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)  # an object for it costs forty times as much
        idle = self.idle.get(stream)
        if idle is None:
            idle = put_bounded(self.idle, stream, [], _MAX_STREAMS)
        # A tensor around it would cost as much again.
        workspace = torch._C._cuda_cudaCachingAllocator_raw_alloc(self.work_bytes, stream) if self.work_bytes else 0
        try:
            try:
                launches = idle.pop()
            except IndexError:
                launches = self._bind(stream, addresses, workspace)
            try:
                launches(addresses, workspace)
            except NoContextError:  # the first launch of a thread: none was queued
                Device(device).set_current()
                launches(addresses, workspace)
        finally:
            if workspace:
                torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)
        idle.append(launches)

    def _bind(self, stream: int, addresses: Addresses, workspace: int) -> BoundLaunches:
        pointers = dict(zip(self.names, addresses, strict=True))
        pointers |= {name: workspace + at for name, at in self.work.items()}
        Device(self.device).set_current()  # in a new thread PyTorch may not have done so yet
        each = tuple(step.bind(self.device, pointers, stream) for step in self.steps)
        pairs = zip(self.steps, each, strict=True)
        placed = [(step.names.get(name, name), place) for step, x in pairs for name, place in x.places()]
        work = [(self.work[name], place) for name, place in placed if name in self.work]
        return BoundLaunches(each, [(self.names.index(n), place) for n, place in placed if n not in self.work], work)


def concat_plans(
    parts: Sequence[tuple[LaunchPlan, Mapping[str, str]]], names: tuple[str, ...], temporary: Mapping[str, int]
) -> LaunchPlan:
    """The launches of several plans, one after another, with one workspace, of bytes.

    parts: plans, with what their buffers are called in the whole where they differ. names: of the whole, as a plan's.
    temporary: further buffers in the workspace, with their bytes.
    """
    steps: list[LaunchStep] = []
    work, size = {}, 0
    for name, nbytes in temporary.items():
        work[name] = size
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    for plan, renamed in parts:
        if plan.work:
            work |= {name: size + at for name, at in plan.work.items()}
            size += plan.work_bytes
        steps += [replace(step, names={n: b for n, b in renamed.items() if n in step.buffers()}) for step in plan.steps]
    return LaunchPlan(parts[0][0].device, tuple(steps), names, work, size)
