"""A Triton driver without a GPU: kernels are compiled as for one, and their PTX runs in the emulator.

Triton's own compiler produces the PTX. The step after it, ptxas, is left out. A launch copies the storages of its
tensors into the emulator's memory, and changed bytes back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from greenfast.emulator.grid import KernelLaunch, run_chain
from greenfast.emulator.machine.observed import NOTHING, Observe
from greenfast.emulator.machine.tensormap import encode, lay_out
from greenfast.emulator.result import GridResult
from greenfast.emulator.triton.storage import (
    MemoryRegion,
    Regions,
    UnwrittenBytes,
    find_pointed,
    find_region,
    pack_pointers,
)
from greenfast.spec.arch import Target
from greenfast.spec.errors import UnsupportedError, UsageError
from greenfast.spec.kernel import Argument, Launch, Packed, TensorMap
from greenfast.spec.limits import most_shared
from greenfast.spec.problem import OutputSpec

#: Bytes of shared memory per block of each target.
SHARED_MEMORY = {number: most_shared(Target(f"sm_{number}")) for number in (80, 86, 89, 90, 100, 120)}
_FORMATS = {
    **{f"{sign}{bits}": f"{kind}{bits // 8}" for sign, kind in (("i", "i"), ("u", "u")) for bits in (8, 16, 32, 64)},
    **{"i1": "u1", "u1": "u1", "fp16": "f2", "fp32": "f4", "f32": "f4", "fp64": "f8"},
}
#: The folder of Triton's own files in a .file directive. Without it, their lines are reported at their calls.
_LIBRARY = re.compile(r'^(\s*\.file\s+\d+\s+")[^"\n]*/(?=triton/language/)', re.MULTILINE)
#: Bytes of a swizzle in the metadata of a tensor descriptor.
_SWIZZLES = (0, 32, 64, 128)


@dataclass(frozen=True)
class LoadedFunction:
    """A loaded kernel."""

    name: str
    ptx: str


class Utilities:
    """The part of a driver that loads kernels and answers for the device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: Any
    ) -> tuple[Any, LoadedFunction, int, int, int]:
        """Return a kernel's module, function, registers, spills and the threads that its block may have.

        The registers are 0, because PTX does not have them. ``Activation`` counts them if a script reads the number.
        """
        return None, LoadedFunction(name, _LIBRARY.sub(r"\1", binary.decode())), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """Do nothing: a kernel is text."""

    def get_device_properties(self, device: Any) -> dict[str, int]:
        """Return properties of an H100 as Triton's driver does: clock rates in kHz, and a bus width in bits."""
        return {
            "max_shared_mem": SHARED_MEMORY[self._capability],
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5120,
        }

    def is_stream_capturing(self, stream: int) -> bool:
        """Return False: nothing is captured here."""
        return False

    def set_printf_fifo_size(self, size: int) -> None:
        """Do nothing: printed text has no limit."""


class EmulatorDriver:
    """Triton's driver for one target, with the methods of its ``DriverBase``; ``launch`` runs a kernel."""

    def __init__(self, capability: int, device: torch.device, launch: Callable[..., None]) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)
        self.utils = Utilities(capability)
        self.launch = launch
        self.device = device
        self.launcher_cls = lambda src, metadata: Launcher(self, src, metadata)

    @classmethod
    def is_active(cls) -> bool:
        """Return False: Triton does not choose this driver by itself."""
        return False

    def get_current_target(self) -> Any:
        """Return the GPU that kernels are compiled for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors that kernels run on."""
        return self.device

    def get_current_device(self) -> str:
        """Return a key of Triton's caches that no GPU has."""
        return f"emulator of sm_{self.target.arch}"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the compute capability."""
        return divmod(int(self.target.arch), 10)

    def get_current_stream(self, device: Any = None) -> int:
        """Return the default stream: launches run at once, in their order."""
        return 0

    def set_current_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def get_device_interface(self) -> Any:
        """Return torch.cuda, for its streams and events."""
        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the C++ type of a Triton type."""
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return the function that times a configuration of an autotuned kernel."""
        return measure_nothing

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return the buffer that a benchmark overwrites to clear a cache: an empty one."""
        return torch.empty(0, dtype=torch.int32)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Do nothing: there is no cache."""

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: Any) -> torch.Tensor:
        """Return zeroed memory for instrumented kernels."""
        return torch.zeros(size, dtype=torch.int8)


def measure_nothing(call: Callable[[], Any], *args: Any, quantiles: Sequence[float] | None = None, **_: Any) -> Any:
    """Run a call once, in place of ``triton.testing.do_bench``. Return NaN: the emulator cannot measure time."""
    call()
    return [float("nan")] * len(quantiles) if quantiles else float("nan")


@dataclass
class Launcher:
    """Runs the launches of one compiled kernel."""

    driver: EmulatorDriver
    source: Any
    metadata: Any
    calls: int = field(default=0)

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: LoadedFunction,
        kernel_metadata: Any,
        launch_metadata: Any,
        enter_hook: Any,
        exit_hook: Any,
        *args: Any,
    ) -> None:
        """Run a launch as Triton's own launcher does, hooks included. A grid without blocks runs nothing."""
        if enter_hook is not None:
            enter_hook(launch_metadata)
        blocks = grid_x * grid_y * grid_z
        if blocks > 0:
            scratch = self._allocate_scratch(blocks, stream)
            self.driver.launch(self.source, self.metadata, function, (grid_x, grid_y, grid_z), args, scratch)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _allocate_scratch(self, blocks: int, stream: int) -> tuple[Any, Any]:
        """Return the global and the profile scratch memory, from the allocators that the user set."""
        from triton.runtime import _allocation

        metadata = self.metadata
        count = blocks * metadata.num_ctas
        memory = profile = None
        if metadata.global_scratch_size > 0:
            allocate = _allocation._allocator.get()
            memory = allocate(metadata.global_scratch_size * count, metadata.global_scratch_align, stream)
        if metadata.profile_scratch_size > 0:
            size = metadata.profile_scratch_size * count
            if _allocation.has_profile_allocator():
                profile = _allocation._profile_allocator(size, metadata.profile_scratch_align, stream)
            else:
                profile = self.driver.allocate_default_profile_scratch(size, metadata.profile_scratch_align, stream)
        return memory, profile


@dataclass(frozen=True)
class _Pointer:
    name: str
    address: int


@dataclass(frozen=True)
class _Descriptor:
    """A tensor descriptor on the host: its base, and its tensor map over memory that begins there."""

    base: _Pointer
    content: bytes


class Binder:
    """Converts the arguments of a launch into kernel parameters and regions of memory."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._meta = list(getattr(metadata, "tensordesc_meta", None) or ())
        self._has_meta = bool(self._meta)
        self._names = list(source.signature)
        self._types = list(source.signature.values())
        self.found: list[MemoryRegion] = []
        self._values: list[bytes | _Pointer | _Descriptor] = []

    def bind(
        self, args: Sequence[Any], scratch: Sequence[Any], living: Sequence[tuple[int, int]] = ()
    ) -> tuple[Regions, tuple[Argument, ...]]:
        """Return the regions that arguments point into, and the kernel's parameters.

        living: starts and ends of storages that tensors of int64 may point into.
        """
        for name, kind, value in zip(self._names, self._types, args, strict=True):
            self._add(name, kind, value)
        for name, value in zip(("global scratch", "profile scratch"), scratch, strict=True):
            self._values.append(bytes(8) if value is None else self._point(name, value))
        pointed = [p for r in self.found if r.may_hold_pointers for p in find_pointed(r, living)]
        regions = Regions([*self.found, *pointed])
        return regions, tuple(self._place(value, regions) for value in self._values)

    def _add(self, name: str, kind: Any, value: Any) -> None:
        """Add the parameters of one argument; a tuple or a descriptor has several."""
        if isinstance(kind, tuple):
            for number, (inner, element) in enumerate(zip(kind, value, strict=True)):
                self._add(f"{name}[{number}]", inner, element)
        elif kind == "constexpr":
            return
        elif kind.startswith("tensordesc"):
            self._add_descriptor(name, kind, value)
        elif kind.startswith("*"):
            self._values.append(self._point(name, value))
        else:
            self._values.append(pack_scalar(name, kind, value))

    def _point(self, name: str, value: Any) -> bytes | _Pointer:
        if value is None:
            return bytes(8)
        if isinstance(value, int):
            return _Pointer(name, value)
        region, address = find_region(name, value)
        self.found.append(region)
        return _Pointer(name, address)

    def _add_descriptor(self, name: str, kind: str, value: Any) -> None:
        """Add a tensor map, or base, shape, strides and options if the target has no tensor maps; shape and strides."""
        shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
        base = self._point(name, value.base)
        if not self._has_meta:
            self._values += [base, *(pack_scalar(name, "i64", n) for n in (*shape, *strides))]
            self._values += [bytes([value.padding == "nan"]), bytes([value.round_f32_to_tf32])]
        else:
            assert isinstance(base, _Pointer)
            self._values.append(_Descriptor(base, _encode_map(name, kind, value, self._meta.pop(0))))
        self._values += [pack_scalar(name, "i32", n) for n in shape]
        self._values += [pack_scalar(name, "i64", n) for n in strides]

    def _place(self, value: bytes | _Pointer | _Descriptor, regions: Regions) -> Argument:
        if isinstance(value, bytes):
            return value
        pointer = value.base if isinstance(value, _Descriptor) else value
        content = value.content if isinstance(value, _Descriptor) else bytes(8)
        place = regions.locate(pointer.address)
        if place is None and pointer.address:
            raise UsageError(
                f"{pointer.name}: the address {pointer.address:#x} is in no tensor of the launch; give the tensor"
            )
        return content if place is None else Packed(content, ((0, *place),))


def _encode_map(name: str, kind: str, value: Any, meta: dict[str, Any]) -> bytes:
    """Return the tensor map of a descriptor over memory that begins at address 0."""
    for key, reason in (("fp4_padded", "padded FP4 elements"), ("is_im2col", "im2col mode")):
        if meta.get(key):
            raise UnsupportedError(f"{name}: a tensor descriptor with {reason} is not emulated")
    if value.padding == "nan":
        raise UnsupportedError(f"{name}: a tensor descriptor with padding='nan' is not emulated")
    item = int(meta["elem_size"])
    layout = TensorMap(
        name,
        f"uint{8 * item}",
        tuple(map(int, value.shape)),
        tuple(int(n) * item for n in value.strides),
        tuple(map(int, meta["block_size"])),
        _SWIZZLES[meta["swizzle"]],
    )
    return encode(lay_out(layout), 0)


def pack_scalar(name: str, kind: str, value: Any) -> bytes:
    """Return the bytes of a number in a Triton type. Raises UsageError for a number that does not fit."""
    if kind == "bf16":  # the upper half of a float32, as Triton's launcher packs it
        return bytes(np.float32(value).tobytes()[2:])
    if kind not in _FORMATS:
        raise UnsupportedError(f"{name}: a parameter of type {kind} is not emulated")
    dtype = np.dtype(_FORMATS[kind])
    if dtype.kind in "iu":
        number = int(value)
        limits = np.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            raise UsageError(f"{name}: {number} does not fit into {kind}")
        return number.to_bytes(dtype.itemsize, "little", signed=dtype.kind == "i")
    with np.errstate(over="ignore"):
        return bytes(dtype.type(value).tobytes())


def make_launch(metadata: Any, grid: tuple[int, int, int], parameters: tuple[Argument, ...]) -> Launch:
    """Return the launch of a grid of programs; each program is a cluster of ``num_ctas`` blocks."""
    x, y, z = grid
    return Launch(
        (x * metadata.num_ctas, y, z),
        parameters,
        early=bool(metadata.launch_pdl),
        cluster=(metadata.num_ctas, 1, 1),
        cooperative=bool(metadata.launch_cooperative_grid),
    )


def make_step(metadata: Any, function: LoadedFunction, launch: Launch) -> KernelLaunch:
    """Return a kernel's launch for the emulator."""
    return KernelLaunch(function.ptx, function.name, (32 * metadata.num_warps, 1, 1), metadata.shared, launch)


def run_launch(
    step: KernelLaunch, regions: Regions, seed: int, observe: Observe = NOTHING, unwritten: UnwrittenBytes | None = None
) -> tuple[GridResult, float]:
    """Run a launch on the memory of its tensors. Return its result without the outputs, and the seconds it took.

    unwritten: the bytes of tensors that nothing has written. The launch removes those that it writes.
    Raises KernelFaultError for a fault of the kernel; the tensors are then unchanged.
    """
    start = time.perf_counter()
    inputs = {region.name: region.view() for region in regions.regions}
    outputs = {name: OutputSpec(view.shape, "uint8") for name, view in inputs.items()}
    packed = {r.name: pack_pointers(r, regions) for r in regions.regions if r.may_hold_pointers}
    structs = {name: content for name, content in packed.items() if content is not None}
    masks = {
        r.name: m for r in regions.regions if unwritten and (m := unwritten.find(r.start, r.end - r.start)) is not None
    }
    result = run_chain(
        [step], inputs, outputs, seed=seed, keep_formal=True, structs=structs, observe=observe, unwritten=masks
    )
    for region in regions.regions:
        name, view = region.name, inputs[region.name]
        for at, *_ in structs[name].pointers if name in structs else ():
            result.outputs[name][at : at + 8] = view[at : at + 8]
        if name in result.unwritten_bytes and unwritten is not None:
            mask = result.unwritten_bytes[name]
            result.outputs[name][mask] = view[mask]
            masks[name][:] = mask
        if not np.array_equal(view, result.outputs[name]):
            view[...] = result.outputs[name]
    result.outputs = {}
    return result, time.perf_counter() - start
