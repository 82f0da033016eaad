"""The memory check on the GPU: a program between unmapped pages, with different contents of uninitialized memory.

Each buffer of a case has pages of its own, with no memory on either side. A program runs several times: each buffer
flush with the end of its pages, then with their start, each time with another byte in all uninitialized memory:
outputs and workspaces, the rest of a buffer's pages, shared memory, and 1 KiB of local memory per thread. It detects

- a read or write outside of a buffer: an illegal address, or a changed byte among the up to ALIGNMENT - 1 bytes between
  a buffer and the end of its pages;
- a write to an input: its mapping is read-only if the driver supports it, and it is compared afterwards;
- a result that depends on uninitialized memory: other bits in one of the runs. Allocations of a captured function are
  overwritten at the time of the allocation, so old content of reused memory counts too.

It does not detect races, missing barriers and fences, accesses outside of a shared array, and reads without an effect
on the outputs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from greenfast.device.bound_launch import BoundLaunch, check
from greenfast.device.gpu import Gpu, describe_changed_variables
from greenfast.device.helper_kernels import Instruments
from greenfast.device.session import Executable, RunResult, same_bits
from greenfast.device.virtual_memory import Access, Mapping, PhysicalMemory, has_read_only, is_supported
from greenfast.spec.errors import MachineError, UnsupportedError
from greenfast.spec.problem import Array, Case, to_dtype

#: By run: whether buffers are flush with the end of their pages, and the byte of uninitialized memory. The bytes are
#: NaN and -1, 0, and numbers that are neither (0.75 in float32).
RUNS = ((True, 0xFF), (False, 0x00), (True, 0x3F))
#: Alignment of each buffer: wider than any vector access of one thread.
ALIGNMENT = 32
#: The note if the driver has no read-only mappings.
NOT_READ_ONLY = "the driver has no read-only memory, so an undone write to an input is not detected"
#: Largest checked case in bytes, so that its pages fit next to the kernels' own memory.
MAX_BYTES = 1 << 30


def check_memory(gpu: Gpu, instruments: Instruments, executable: Executable, case: Case) -> RunResult:
    """Run a case once per entry of RUNS and compare the results.

    Raises MachineError for an illegal access (the device is then lost), and UnsupportedError for a device without
    virtual memory management or enough memory.
    """
    ordinal = int(gpu.device.device_id)
    if not is_supported(ordinal):
        raise UnsupportedError("this device has no virtual memory management for the memory check")
    violations: list[str] = []
    outputs: list[dict[str, Array]] = []
    for at_end, fill in RUNS:
        with _GuardedCase(gpu, executable, case, ordinal, at_end, fill) as guarded:
            outputs.append(guarded.run(instruments))
            violations += guarded.violations()
    same = all(same_bits(outputs[0], other) for other in outputs[1:])
    if not same:
        violations.append(
            "the outputs depend on the content of uninitialized memory, or on the addresses of the buffers"
        )
    notes = [] if has_read_only(ordinal) else [NOT_READ_ONLY]
    return RunResult(outputs[0], list(dict.fromkeys(violations)), same, notes=notes)


@dataclass
class _GuardedMemory:
    """A buffer on separate pages.

    image: content of the pages before the program runs. pointer, nbytes: of the buffer. changes: whether the program
    may write it.
    """

    memory: PhysicalMemory
    own: Mapping
    kernels: Mapping
    image: NDArray[np.uint8]
    pointer: int
    nbytes: int
    changes: bool

    @property
    def offset(self) -> int:
        return self.pointer - self.kernels.pointer

    def upload(self) -> None:
        check(driver.cuMemcpyHtoD(self.own.pointer, self.image.ctypes.data, self.image.nbytes))

    def download(self) -> NDArray[np.uint8]:
        data = np.empty(self.image.nbytes, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, self.own.pointer, data.nbytes))
        return data

    def free(self) -> None:
        self.kernels.free()
        if self.own is not self.kernels:
            self.own.free()
        self.memory.release()


class _GuardedCase:
    """A program bound to one case, each buffer between unmapped pages. Use as a context manager: it frees the pages."""

    def __init__(self, gpu: Gpu, executable: Executable, case: Case, ordinal: int, at_end: bool, fill: int) -> None:
        self._gpu, self._executable, self._case = gpu, executable, case
        self._ordinal, self._at_end, self._fill = ordinal, at_end, fill
        self._pages: dict[str, _GuardedMemory] = {}
        self._left: dict[str, NDArray[np.uint8]] = {}

    def __enter__(self) -> _GuardedCase:
        try:
            for name, content in self._contents().items():
                self._pages[name] = self._map(name, content)
            pointers = {name: pages.pointer for name, pages in self._pages.items()}
            self._launches: Sequence[BoundLaunch] = self._gpu.prepare(self._executable, pointers)
            self._variables = self._gpu.variables(self._executable)
        except BaseException:
            self.free()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an illegal access the driver refuses, and the process ends
            self.free()

    def _contents(self) -> dict[str, NDArray[np.uint8]]:
        """Return the content of each buffer before the program runs."""
        contents = {}
        for name, spec in self._case.outputs.items():
            contents[name] = np.full(spec.nbytes, 0 if spec.zeros else self._fill, np.uint8)
        for name, space in self._executable.workspaces.items():
            contents[name] = np.full(space.nbytes, 0 if space.zeros else self._fill, np.uint8)
            if space.data:
                contents[name] = np.frombuffer(space.data, np.uint8)
        for name, array in self._case.inputs.items():
            contents[name] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return contents

    def _map(self, name: str, content: NDArray[np.uint8]) -> _GuardedMemory:
        changes = name not in self._case.inputs or name in self._case.outputs
        try:
            memory = PhysicalMemory(content.nbytes, self._ordinal)
        except MachineError as e:
            raise UnsupportedError(f"there is no room for the memory check: {e}") from e
        own = memory.map()
        kernels = own
        if not changes:
            try:
                kernels = memory.map(Access.READ)
            except MachineError:  # some drivers have no read-only mappings; the content is compared in any case
                kernels = own
        room = memory.nbytes - content.nbytes
        offset = room - room % ALIGNMENT if self._at_end else 0
        image = np.full(memory.nbytes, self._fill, np.uint8)
        image[offset : offset + content.nbytes] = content
        return _GuardedMemory(memory, own, kernels, image, kernels.pointer + offset, content.nbytes, changes)

    def run(self, instruments: Instruments) -> dict[str, Array]:
        """Fill all memory, launch once, wait, and return the outputs."""
        for pages in self._pages.values():
            pages.upload()
        check(driver.cuCtxSynchronize())
        instruments.fill_local(self._fill)
        instruments.clobber_smem(random.getrandbits(64))
        for n, launch in enumerate(self._launches):
            self._poison_allocations(n)
            launch()
        self._gpu.stream.sync()
        self._left = {name: pages.download() for name, pages in self._pages.items()}
        outputs = {}
        for name, spec in self._case.outputs.items():
            pages = self._pages[name]
            data = self._left[name][pages.offset : pages.offset + pages.nbytes]
            outputs[name] = data.copy().view(to_dtype(spec.dtype)).reshape(spec.shape)
        return outputs

    def _poison_allocations(self, step: int) -> None:
        """Queue the fill of the allocations before a step: an allocator guarantees no content."""
        for allocation in self._executable.allocations:
            pages = self._pages.get(allocation.buffer)
            if allocation.step != step or pages is None or not pages.changes:
                continue
            nbytes = min(allocation.nbytes, pages.nbytes - allocation.offset)
            if nbytes > 0:
                stream = self._gpu.stream.handle
                check(driver.cuMemsetD8Async(pages.pointer + allocation.offset, self._fill, nbytes, stream))

    def violations(self) -> list[str]:
        """Describe changes of memory that the program must not write."""
        changes = []
        for name, pages in self._pages.items():
            changed = self._left[name] != pages.image
            content = changed[pages.offset : pages.offset + pages.nbytes]
            if content.any() and not pages.changes:
                changes.append(f"input {name!r} was changed")
            content[:] = False
            if changed.any():
                changes.append(f"memory around {name!r} was written")
        return changes + describe_changed_variables(self._variables, self._gpu.variables(self._executable))

    def free(self) -> None:
        """Free the pages."""
        for pages in self._pages.values():
            pages.free()
        self._pages.clear()
