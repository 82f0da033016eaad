"""Launch plans: kernels with arguments, bound once per stream. A call writes its addresses into the arguments."""

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
from greenfast.device.gpu import load_kernel
from greenfast.device.session import KernelImage
from greenfast.kernels.attention.hopper import TARGET
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import KernelSource, Launch, find_buffers

ALIGNMENT = 256  # bytes; alignment of buffers in the workspace
_MAX_STREAMS = 64  # per plan
_COMPILING = threading.Lock()

Key = TypeVar("Key")
Value = TypeVar("Value")
Addresses = Sequence[int]


@cache
def get_target(device: int) -> Target:
    """Return the target of a CUDA device. Raises NotImplementedError for a device that is too old."""
    try:
        properties = torch.cuda.get_device_properties(device)
        return Target.of_device((properties.major, properties.minor), properties.multi_processor_count)
    except UsageError as e:
        raise NotImplementedError(str(e)) from None


def require_hopper(target: Target, requirement: str) -> None:
    """Raise NotImplementedError for any other target. requirement: the beginning of the message."""
    if target.name != TARGET.name:
        raise NotImplementedError(f"{requirement}, this is {target.name}")


@cache
def _load(source: KernelSource, device: int) -> Any:
    compiled = compile_kernel(source, get_target(device))
    image = KernelImage(compiled.cubin, source.entry, source.block, source.dynamic_smem_bytes)
    return load_kernel(image, Device(device))


def put_bounded(cache: dict[Key, Value], key: Key, value: Value, max_entries: int) -> Value:
    """Store a value in a cache and return it. A cache with ``max_entries`` entries is cleared first."""
    if len(cache) >= max_entries:
        cache.clear()
    cache[key] = value
    return value


@dataclass(frozen=True)
class LaunchStep:
    """One launch of a plan.

    names: maps buffers of the kernel to buffers of the plan, for buffers with different names.
    """

    source: KernelSource
    launch: Launch
    names: Mapping[str, str] = field(default_factory=dict)

    def buffers(self) -> set[str]:
        """Return the buffers of the plan that the launch reads or writes."""
        return {self.names.get(name, name) for argument in self.launch.args for name in find_buffers(argument)}

    def bind(self, device: int, pointers: Mapping[str, int], stream: int) -> BoundLaunch:
        """Bind the launch to a stream and to the addresses of the plan's buffers."""
        with _COMPILING:
            kernel = _load(self.source, device)
        renamed = {**pointers, **{name: pointers[buffer] for name, buffer in self.names.items()}}
        return BoundLaunch(kernel, self.source.block, self.source.dynamic_smem_bytes, self.launch, renamed, stream)


class BoundLaunches:
    """The launches of a plan on one stream.

    slots: argument slots that hold addresses, each with the index of its address. work: argument slots that point into
    the workspace, each with an offset in bytes.
    """

    __slots__ = ("_each", "_places", "_work")

    def __init__(
        self, each: Sequence[BoundLaunch], slots: Sequence[tuple[int, Any]], work: Sequence[tuple[int, Any]] = ()
    ) -> None:
        self._each, self._places, self._work = each, slots, work

    def __call__(self, addresses: Addresses, workspace: int) -> None:
        """Enqueue the launches with these addresses.

        Raises NoContextError, with nothing enqueued, without a CUDA context.
        """
        for number, slot in self._places:
            slot.value = addresses[number]
        for offset, slot in self._work:
            slot.value = workspace + offset
        for launch in self._each:
            launch()


@dataclass(slots=True)
class LaunchPlan:
    """The launches of all calls with equal shapes and options.

    names: the buffers with addresses that a call passes, in order. work: buffers in the workspace, with their offsets
    in bytes. idle: for each stream, bound launches that no thread uses. reordered: the same plan for other orders of
    ``names``.
    """

    device: int
    steps: tuple[LaunchStep, ...]
    names: tuple[str, ...] = ()
    work: Mapping[str, int] = field(default_factory=dict)
    work_bytes: int = 0
    head_dim: int = 0  # of the quantized tensors
    out_strides: tuple[int, ...] = ()
    idle: dict[int, list[BoundLaunches]] = field(default_factory=dict)
    reordered: dict[tuple[str, ...], LaunchPlan] = field(default_factory=dict)

    def with_argument_order(self, names: tuple[str, ...]) -> LaunchPlan:
        """Return the plan for calls that pass addresses in this order.

        ``names`` must contain all buffers of the launches.
        """
        if names not in self.reordered:
            self.reordered[names] = replace(self, names=names, idle={}, reordered={})
        return self.reordered[names]

    def launch(self, addresses: Addresses) -> None:
        """Enqueue the launches on the current stream, with one address for each of ``names``.

        Each call takes bound launches for itself, because it writes their arguments; no lock is held. The workspace
        comes from PyTorch's caching allocator. It is freed after the launches are enqueued: before that, another thread
        could receive it.
        """
        device = self.device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self.launch(addresses)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)  # a Stream object costs forty times as much
        idle = self.idle.get(stream)
        if idle is None:
            idle = put_bounded(self.idle, stream, [], _MAX_STREAMS)
        # A tensor would double the cost.
        workspace = torch._C._cuda_cudaCachingAllocator_raw_alloc(self.work_bytes, stream) if self.work_bytes else 0
        try:
            try:
                launches = idle.pop()
            except IndexError:
                launches = self._bind(stream, addresses, workspace)
            try:
                launches(addresses, workspace)
            except NoContextError:  # first launch of a thread; nothing was enqueued
                Device(device).set_current()
                launches(addresses, workspace)
        finally:
            if workspace:
                torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)
        idle.append(launches)

    def _bind(self, stream: int, addresses: Addresses, workspace: int) -> BoundLaunches:
        pointers = dict(zip(self.names, addresses, strict=True))
        pointers |= {name: workspace + offset for name, offset in self.work.items()}
        Device(self.device).set_current()  # PyTorch may not have set it in a new thread
        each = tuple(step.bind(self.device, pointers, stream) for step in self.steps)
        pairs = zip(self.steps, each, strict=True)
        placed = [(step.names.get(name, name), slot) for step, x in pairs for name, slot in x.address_slots()]
        work = [(self.work[name], slot) for name, slot in placed if name in self.work]
        return BoundLaunches(each, [(self.names.index(n), slot) for n, slot in placed if n not in self.work], work)


def lay_out_workspace(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offsets of buffers with these sizes, and the size of the workspace, in bytes."""
    offsets, size = {}, 0
    for name, nbytes in sizes.items():
        offsets[name] = size
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, size


def build_plan(
    device: int, steps: Sequence[LaunchStep], names: tuple[str, ...], sizes: Mapping[str, int], head_dim: int = 0,
    out_strides: tuple[int, ...] = (),
) -> LaunchPlan:  # fmt: skip
    """Build the plan of launches. Its other arguments are as in ``LaunchPlan``.

    sizes: bytes of buffers. Those that the launches use, and that no call passes, are in the workspace.
    """
    used = set().union(*(step.buffers() for step in steps))
    work, size = lay_out_workspace({name: n for name, n in sizes.items() if name in used and name not in names})
    return LaunchPlan(device, tuple(steps), names, work, size, head_dim, out_strides)


def concat_plans(
    parts: Sequence[tuple[LaunchPlan, Mapping[str, str]]], names: tuple[str, ...], temporary: Mapping[str, int]
) -> LaunchPlan:
    """Concatenate plans into one plan with one workspace.

    parts: plans, each with the new names of its buffers. names: as in ``LaunchPlan``. temporary: further buffers in the
    workspace, with their sizes in bytes.
    """
    steps: list[LaunchStep] = []
    work, size = lay_out_workspace(temporary)
    for plan, renamed in parts:
        if plan.work:
            work |= {name: size + offset for name, offset in plan.work.items()}
            size += plan.work_bytes
        steps += [replace(step, names={n: b for n, b in renamed.items() if n in step.buffers()}) for step in plan.steps]
    return LaunchPlan(parts[0][0].device, tuple(steps), names, work, size)
