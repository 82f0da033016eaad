"""A GPU through cuda.core: memory with guard bands, launches, time stamps, clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, EventOptions, ObjectCode, system

from greenfast.device.bound_launch import BoundLaunch, check
from greenfast.device.session import Executable, KernelImage
from greenfast.spec.errors import MachineError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.kernel import PHASE_BUFFER, Workspace
from greenfast.spec.problem import Array, Case, OutputSpec, to_dtype

#: Guard bytes before and after every buffer. They and unwritten outputs are 0xFF: NaN as float32, float16 and E4M3.
GUARD_BYTES = 4096
POISON = 0xFF
#: The driver maps memory in pages of this size.
PAGE_BYTES = 2 << 20

#: The first compute capability with clusters of blocks.
_CLUSTERS_SINCE = (9, 0)
#: NVML's field number of a board's current power in milliwatts.
_POWER_INSTANT = 186


def device_count() -> int:
    """Return the number of CUDA devices; 0 without a driver."""
    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return 0
        return int(check(driver.cuDeviceGetCount()))
    except RuntimeError:  # cuda.bindings cannot find the driver's library
        return 0


def load_kernel(image: KernelImage, device: Device) -> Any:
    """Load the kernel of an image (cuda.core Kernel) on a device with a current context.

    Raises MachineError if it needs more shared memory than a block of the device can have.
    """
    limit = device.properties.max_shared_memory_per_block_optin
    if image.dynamic_smem_bytes > limit:
        raise MachineError(
            f"{image.entry} needs {image.dynamic_smem_bytes} bytes of dynamic shared memory; a block of "
            f"{device.name} has at most {limit}"
        )
    kernel = ObjectCode.from_cubin(image.cubin).get_kernel(image.entry)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    # Above 48 KB a launch fails unless the kernel's dynamic shared memory limit has been raised.
    check(driver.cuKernelSetAttribute(attribute, image.dynamic_smem_bytes, kernel.handle, device.device_id))
    return kernel


def whole_pages(nbytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return nbytes + -nbytes % PAGE_BYTES


def describe_changed_variables(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Describe the variables of a module with other contents after its launches, as ``Gpu.variables`` reads them."""
    return [f"variable {name!r} of its module was changed" for name in after if after[name] != before[name]]


class GuardedBuffer:
    """Device memory for one array, between two guard bands that must never change.

    Copies and fills are complete when a method returns: they run on the default stream, and launches on other streams
    do not wait for it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._base = int(check(driver.cuMemAlloc(nbytes + 2 * GUARD_BYTES)))
        self.pointer = self._base + GUARD_BYTES
        check(driver.cuMemsetD8(self._base, POISON, nbytes + 2 * GUARD_BYTES))
        check(driver.cuCtxSynchronize())

    def upload(self, array: Array) -> None:
        """Copy a contiguous host array in."""
        if self.nbytes:
            check(driver.cuMemcpyHtoD(self.pointer, array.ctypes.data, self.nbytes))
            check(driver.cuCtxSynchronize())  # small copies return before they have arrived

    def download(self, shape: Sequence[int], dtype: str | np.dtype[Any]) -> Array:
        """Copy the buffer out as an array of this shape and dtype."""
        array = np.empty(shape, dtype)
        if self.nbytes:
            check(driver.cuMemcpyDtoH(array.ctypes.data, self.pointer, self.nbytes))
        return array

    def queue_initial(self, initial: int | GuardedBuffer, stream: Any) -> None:
        """Queue overwriting the buffer with a byte, or with another buffer of its size."""
        if not self.nbytes:
            return
        if isinstance(initial, int):
            check(driver.cuMemsetD8Async(self.pointer, initial, self.nbytes, stream.handle))
        else:
            check(driver.cuMemcpyDtoDAsync(self.pointer, initial.pointer, self.nbytes, stream.handle))

    def guards_intact(self) -> bool:
        """Return whether the guard bands before and after the buffer are unchanged."""
        for start in (self._base, self.pointer + self.nbytes):
            band = np.empty(GUARD_BYTES, np.uint8)
            check(driver.cuMemcpyDtoH(band.ctypes.data, start, GUARD_BYTES))
            if not (band == POISON).all():
                return False
        return True

    def free(self) -> None:
        """Free the memory."""
        check(driver.cuMemFree(self._base))


class Bound:
    """A program bound to one case in fresh device memory, ready to launch."""

    def __init__(self, gpu: Gpu, executable: Executable, case: Case) -> None:
        if executable.operations:
            raise MachineError("a function that was recorded without a GPU runs in the emulator only")
        self._gpu = gpu
        self._inputs = {name: np.ascontiguousarray(a) for name, a in case.inputs.items()}
        self._outputs = dict(case.outputs)
        if executable.phases:
            (_, plan) = executable.steps[0]
            blocks = plan.grid[0] * plan.grid[1] * plan.grid[2]
            self._outputs[PHASE_BUFFER] = OutputSpec((blocks, len(executable.phases)), "int64")
        changed: dict[str, OutputSpec | Workspace] = {**self._outputs, **executable.workspaces}
        sizes = {name: array.nbytes for name, array in self._inputs.items()}
        sizes |= {name: spec.nbytes for name, spec in changed.items()}
        self._buffers = {name: GuardedBuffer(nbytes) for name, nbytes in sizes.items()}
        for name, array in self._inputs.items():
            self._buffers[name].upload(array)
        #: Content of each writable buffer before a launch: a byte, or a copy for buffers that are changed in place.
        self._initial: dict[str, int | GuardedBuffer] = {}
        for name, spec in changed.items():
            self._initial[name] = 0 if spec.zeros else POISON
            content = np.frombuffer(spec.data, np.uint8) if isinstance(spec, Workspace) and spec.data else None
            content = self._inputs.get(name, content)
            if content is not None:
                self._initial[name] = copy = GuardedBuffer(sizes[name])
                copy.upload(content)
        pointers = {name: buffer.pointer for name, buffer in self._buffers.items()}
        self._launches = gpu.prepare(executable, pointers)
        self._executable, self._variables = executable, gpu.variables(executable)

    def launch(self) -> None:
        """Queue the program's launches."""
        for launch in self._launches:
            launch()

    def run(self) -> dict[str, Array]:
        """Poison the outputs, launch once, wait, and return the outputs."""
        self.queue_poison()
        self.launch()
        self._gpu.stream.sync()
        return self.outputs()

    def queue_poison(self) -> None:
        """Queue the initial content of all writable buffers: NaN, zeros or an input."""
        for name, initial in self._initial.items():
            self._buffers[name].queue_initial(initial, self._gpu.stream)

    def outputs(self) -> dict[str, Array]:
        """Return the current content of the outputs."""
        return {
            name: self._buffers[name].download(spec.shape, to_dtype(spec.dtype)) for name, spec in self._outputs.items()
        }

    def violations(self) -> list[str]:
        """Describe changes of memory that the kernel must not write: inputs, guard bands, variables."""
        changes = []
        for name, array in self._inputs.items():
            if name in self._outputs:
                continue
            if self._buffers[name].download(array.shape, array.dtype).tobytes() != array.tobytes():
                changes.append(f"input {name!r} was changed")
        changes += [f"memory around {name!r} was written" for name, b in self._buffers.items() if not b.guards_intact()]
        return changes + describe_changed_variables(self._variables, self._gpu.variables(self._executable))

    def free(self) -> None:
        """Free the device memory."""
        for buffer in (*self._buffers.values(), *(b for b in self._initial.values() if not isinstance(b, int))):
            buffer.free()
        self._buffers.clear()
        self._initial.clear()


class Gpu:
    """One CUDA device, made current in this process.

    Raises MachineError if there is no such device.
    """

    def __init__(self, ordinal: int = 0) -> None:
        count = device_count()
        if not 0 <= ordinal < count:
            raise MachineError(f"no CUDA device {ordinal}: the driver shows {count}")
        self.device = Device(ordinal)
        self.device.set_current()
        self.stream = self.device.create_stream()
        self._kernels: dict[KernelImage, Any] = {}

    def info(self) -> DeviceInfo:
        """Return name, compute capability, driver and sizes of the device."""
        properties = self.device.properties
        capability = self.device.compute_capability
        cuda = int(check(driver.cuDriverGetVersion()))
        return DeviceInfo(
            kind="gpu",
            name=self.device.name,
            compute_capability=f"{capability.major}.{capability.minor}",
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
            driver=".".join(f"{part:02d}" for part in system.get_kernel_mode_driver_version()),
            sm_count=properties.multiprocessor_count,
            sm_clock_mhz=properties.clock_rate // 1000,
            memory_bytes=int(check(driver.cuDeviceTotalMem(self.device.device_id))),
            l2_bytes=properties.l2_cache_size,
            memory_gb_s=self._memory_gb_s(),
        )

    def _memory_gb_s(self) -> float:
        """Return the bandwidth from the memory's clock and width, with two transfers per clock; 0 if unknown."""
        attributes = driver.CUdevice_attribute
        clock, width = (
            int(check(driver.cuDeviceGetAttribute(attribute, self.device.device_id)))
            for attribute in (
                attributes.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
                attributes.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            )
        )
        return round(2 * clock * 1e3 * width / 8 / 1e9, 1)

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor) compute capability."""
        return (self.device.compute_capability.major, self.device.compute_capability.minor)

    def load(self, image: KernelImage) -> Any:
        """Return the loaded kernel of an image (cuda.core Kernel). Each image is loaded once."""
        if image not in self._kernels:
            kernel = load_kernel(image, self.device)
            if self.capability >= _CLUSTERS_SINCE:  # a launch or the kernel may request more than 8 blocks
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                check(driver.cuKernelSetAttribute(attribute, 1, kernel.handle, self.device.device_id))
            self._kernels[image] = kernel
        return self._kernels[image]

    def prepare(self, executable: Executable, pointers: Mapping[str, int]) -> list[BoundLaunch]:
        """Return a program's launches on the device's stream. pointers: the address of each buffer."""
        addresses = {PHASE_BUFFER: 0, **pointers}  # only an instrumented build writes that one
        stream = int(self.stream.handle)
        return [
            BoundLaunch(
                self.load(image), image.block, image.dynamic_smem_bytes, plan, addresses, stream, name=image.entry
            )
            for image, plan in executable.steps
        ]

    def variables(self, executable: Executable) -> dict[str, bytes]:
        """Return the contents of the variables that no launch of a program may change, by kernel and name.

        Raises MachineError for one of ``KernelImage.variables`` that is not found.
        """
        values = {}
        for image in dict.fromkeys(image for image, _ in executable.steps if image.variables or image.tables):
            library = check(driver.cuKernelGetLibrary(self.load(image).handle))
            for name in (*image.variables, *image.tables):
                status, address, nbytes = driver.cuLibraryGetGlobal(library, name.encode())
                if status and name in image.tables:  # the driver hides tables with internal linkage
                    continue
                if status:
                    raise MachineError(f"{image.entry}: its module's variable {name!r} cannot be read: {status.name}")
                value = np.empty(int(nbytes), np.uint8)
                check(driver.cuMemcpyDtoH(value.ctypes.data, address, int(nbytes)))
                values[f"{image.entry}: {name}"] = value.tobytes()
        return values

    def bind(self, executable: Executable, case: Case) -> Bound:
        """Upload a case to fresh memory and bind a program to it."""
        return Bound(self, executable, case)

    def clocks(self) -> dict[str, float]:
        """Return the SM clock in MHz, temperature in degrees Celsius and power in watts that the driver reports."""
        readings = {}
        with contextlib.suppress(Exception):  # any NVML error; virtual machines often withhold clocks
            board = self.device.to_system_device()
            sm_mhz, temperature = board.get_clock("sm").get_current_mhz(), board.temperature.get_sensor()
            readings = {"sm_mhz": float(sm_mhz), "temperature_c": float(temperature)}
            readings["power_w"] = board.get_field_values([_POWER_INSTANT])[0].value / 1e3
        return readings

    def mark(self) -> Any:
        """Queue a time stamp (cuda.core Event). The difference of two completed ones is in milliseconds."""
        return self.stream.record(options=EventOptions(timing_enabled=True))
