"""Timed launches over rotating buffer sets. Every launch must write the bits that were checked.

A kernel could compute only in some launches: the first with an input, every second one, or the ones that it expects to
be checked. So each launch draws a case, one of three buffer sets, and an offset that no earlier launch had in that set.
Its outputs are poisoned before it. After it, a digest of its memory is taken with a key that is drawn for this launch.
No buffer holds a result of an earlier launch: the sets are overwritten, and the expected bytes are stored under an XOR
mask.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from greenfast.device.bound_launch import BoundLaunch, MovableMap, check
from greenfast.device.gpu import GUARD_BYTES, POISON, Gpu, whole_pages
from greenfast.device.helper_kernels import DigestRange, Instruments
from greenfast.device.session import Executable, WrongLaunch
from greenfast.device.virtual_memory import Access, PhysicalMemory, is_supported
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import Workspace
from greenfast.spec.problem import Array, Case, to_dtype

NUM_BUFFER_SETS = 3
_ALIGNMENT = 512  # bytes; the driver's allocations have it too
#: Offsets of the buffers in a set, in units of _ALIGNMENT. Launches draw them without replacement until all are used.
SHIFTS = 2048
_SUMS = 4  # digests per launch: actual outputs, actual remainder, expected outputs, expected remainder

WRONG_BITS = "left other bits than the checked ones"
WRONG_MEMORY = "changed an input, or memory around a buffer"
WRONG_VARIABLES = "or an earlier one changed a variable of its module"
WRONG_FAR = "or an earlier one wrote to memory that launches are checked with"


@dataclass(frozen=True)
class Layout:
    """Offsets of a program's buffers in one allocation. Guard bands of GUARD_BYTES separate them.

    The inputs come first. The buffers that a launch may change begin at ``changed``, its workspaces at ``scratch``.
    sizes, offsets: in bytes, by name. A buffer has the size of its largest case; unused bytes are poisoned.
    """

    sizes: dict[str, int]
    offsets: dict[str, int]
    changed: int
    scratch: int
    end: int

    @classmethod
    def for_cases(cls, cases: Sequence[Case], workspaces: Mapping[str, Workspace]) -> Layout:
        """Return the layout that can hold each case."""
        sizes: dict[str, int] = {}
        inputs = [(name, array.nbytes) for case in cases for name, array in case.inputs.items()]
        outputs = [(name, spec.nbytes) for case in cases for name, spec in case.outputs.items()]
        for name, nbytes in (*inputs, *outputs, *((name, space.nbytes) for name, space in workspaces.items())):
            sizes[name] = max(nbytes, sizes.get(name, 0))
        changing = dict.fromkeys(name for name, _ in outputs)
        offsets, ends, position = {}, [], _up(GUARD_BYTES)
        for names in ([name for name, _ in inputs if name not in changing], changing, workspaces):
            for name in dict.fromkeys(names):
                offsets[name] = position
                position = _up(position + sizes[name] + GUARD_BYTES)
            ends.append(position)
        return cls(sizes, offsets, *ends)

    def initial_bytes(self, case: Case) -> NDArray[np.uint8]:
        """Return the bytes up to ``scratch`` before a launch."""
        image = np.full(self.scratch, POISON, np.uint8)
        for name, spec in case.outputs.items():
            if spec.zeros:
                self.slice_buffer(image, name, spec.nbytes)[:] = 0
        for name, array in case.inputs.items():
            self.slice_buffer(image, name, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return image

    def slice_buffer(self, image: NDArray[np.uint8], name: str, nbytes: int) -> NDArray[np.uint8]:
        """Return a view of the first bytes of a buffer."""
        return image[self.offsets[name] : self.offsets[name] + nbytes]

    def bands(self) -> list[tuple[int, int]]:
        """Return start and end of the guard band after each workspace, and of the unused end of the last page."""
        names = [name for name, offset in self.offsets.items() if offset >= self.scratch]
        starts = [self.offsets[name] + self.sizes[name] for name in names]
        bands = [(start + -start % 16, _up(start + GUARD_BYTES)) for start in starts]
        return [*bands, (self.end, whole_pages(self.end))]


def _up(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


class Memory:
    """One allocation on the device, of whole pages. Copies are complete when a method returns.

    The unused end of a page is mapped too, so that it can be overwritten: a kernel could keep a result there.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = whole_pages(nbytes)
        self.pointer = int(check(driver.cuMemAlloc(self.nbytes)))

    def upload(self, data: NDArray[np.uint8]) -> None:
        """Copy host bytes to the beginning of the memory."""
        if not data.nbytes:
            return
        check(driver.cuMemcpyHtoD(self.pointer, data.ctypes.data, data.nbytes))
        check(driver.cuCtxSynchronize())

    def download(self, start: int, end: int) -> NDArray[np.uint8]:
        """Return a range of bytes."""
        data = np.empty(end - start, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, self.pointer + start, data.nbytes))
        return data

    def free(self) -> None:
        """Free it."""
        check(driver.cuMemFree(self.pointer))


class _ReadOnlyMemory:
    """Memory with a writable mapping for the judge and a read-only one for programs. A program's write is a crash."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        memory = PhysicalMemory(nbytes, ordinal)
        try:
            self._own = memory.map()
            try:
                self._programs = memory.map(Access.READ)
            except MachineError:
                self._own.free()
                raise
        finally:
            memory.release()  # the mappings keep the memory alive
        self.nbytes, self.pointer, self.programs = memory.nbytes, self._own.pointer, self._programs.pointer

    def free(self) -> None:
        """Free it."""
        self._programs.free()
        self._own.free()


@dataclass(frozen=True)
class _BufferSet:
    """Memory for the buffers of one launch, and the program's launches with it.

    base: address of the layout at shift 0. ``memory`` begins there; if the inputs have their own memory, ``inputs``, it
    begins at the guard band before the first buffer that a launch may change. slots: the addresses among the arguments
    of the launches, each with its value at shift 0. unused: the shifts that no launch had, in units of _ALIGNMENT.
    """

    memory: Memory
    base: int
    inputs: _ReadOnlyMemory | None
    launches: list[BoundLaunch]
    slots: list[tuple[Any, int]]
    unused: list[int]

    def draw(self, rng: random.Random) -> _Position:
        """Draw a shift that no launch had. After all shifts were drawn, start again."""
        if not self.unused:
            self.unused.extend(range(SHIFTS))
        return _Position(self, self.unused.pop(rng.randrange(len(self.unused))) * _ALIGNMENT)


@dataclass(frozen=True)
class _Position:
    """The addresses of one launch: a buffer set, moved by ``shift`` bytes."""

    buffers: _BufferSet
    shift: int

    @property
    def base(self) -> int:
        """The address of the layout."""
        return self.buffers.base + self.shift

    @property
    def written_inputs(self) -> int:
        """The address at which the judge writes the inputs."""
        return self.buffers.inputs.pointer + self.shift if self.buffers.inputs else self.base

    @property
    def program_inputs(self) -> int:
        """The address at which the program reads the inputs."""
        return self.buffers.inputs.programs + self.shift if self.buffers.inputs else self.base

    def write_addresses(self) -> None:
        """Write the addresses to the arguments of the launches. Launches that are queued keep their arguments."""
        for slot, address in self.buffers.slots:
            slot.value = address + self.shift

    def queue_launches(self) -> None:
        """Queue the program's launches with these addresses."""
        for launch in self.buffers.launches:
            launch()


class Rotation:
    """A program with several cases in device memory, ready to be timed.

    outputs: results of the first launch of each case, for the caller to check. Later launches must give the same bits.
    wrong: the first of them that wrote outside of its outputs; None if all were correct.

    If the driver supports it, a program's inputs are mapped read-only. A write to them, even one that is undone, ends
    the process with an illegal address.
    """

    def __init__(self, gpu: Gpu, instruments: Instruments, executable: Executable, cases: Sequence[Case]) -> None:
        self._gpu, self._instruments, self._workspaces = gpu, instruments, executable.workspaces
        self._executable = executable
        self._variables = gpu.variables(executable)
        self._layout = layout = Layout.for_cases(cases, executable.workspaces)
        self._allocated: list[Memory | _ReadOnlyMemory] = []
        self._mask, self._judge_key = (random.SystemRandom().randrange(1, 2**64) for _ in range(2))
        self._before = [self._allocate(layout.scratch) for _ in cases]
        self._after = [self._allocate(layout.scratch - layout.changed) for _ in cases]
        self._data = {name: self._allocate(space.nbytes) for name, space in self._workspaces.items() if space.data}
        for name, memory in self._data.items():
            memory.upload(np.frombuffer(self._workspaces[name].data, np.uint8))
        self._buffer_sets = [self._allocate_buffers(executable) for _ in range(NUM_BUFFER_SETS)]
        self._poison = self._allocate(SHIFTS * _ALIGNMENT + whole_pages(1))  # the longest guard band
        self._poison.upload(np.full(self._poison.nbytes, POISON, np.uint8))
        self._sums = self._allocate(0)
        self.outputs: list[dict[str, Array]] = []
        self.wrong: WrongLaunch | None = None
        for n, case in enumerate(cases):
            self._launch_first(n, case)
        self._judge_digests = self._digest_judge_memory()

    def _allocate(self, nbytes: int) -> Memory:
        memory = Memory(max(nbytes, 1))
        self._allocated.append(memory)
        return memory

    def _allocate_inputs(self) -> _ReadOnlyMemory | None:
        """Allocate memory for the inputs that programs can only read. Return None without inputs or driver support."""
        ordinal = getattr(self._gpu.device, "device_id", None)
        if ordinal is None or self._layout.changed <= _up(GUARD_BYTES) or not is_supported(int(ordinal)):
            return None
        try:
            memory = _ReadOnlyMemory(self._layout.changed + SHIFTS * _ALIGNMENT, int(ordinal))
        except MachineError:  # some drivers have no read-only mappings
            return None
        self._allocated.append(memory)
        return memory

    def _allocate_buffers(self, executable: Executable) -> _BufferSet:
        layout, inputs = self._layout, self._allocate_inputs()
        start = layout.changed - _up(GUARD_BYTES) if inputs else 0  # of ``memory`` in the layout
        memory = self._allocate(layout.end - start + SHIFTS * _ALIGNMENT)
        buffers = _BufferSet(memory, memory.pointer - start, inputs, [], [], list(range(SHIFTS)))
        self._queue_poison(buffers)
        position = _Position(buffers, 0)
        pointers = {
            name: (position.program_inputs if offset < layout.changed else position.base) + offset
            for name, offset in layout.offsets.items()
        }
        buffers.launches.extend(self._gpu.prepare(executable, pointers))
        for name, slot in (pair for launch in buffers.launches for pair in launch.address_slots()):
            if name in pointers:  # an argument may hold an address inside a buffer
                buffers.slots.append((slot, pointers[name] if isinstance(slot, MovableMap) else int(slot.value)))
        return buffers

    def _launch_first(self, number: int, case: Case) -> None:
        """Launch a case for the first time and store its results."""
        image = self._layout.initial_bytes(case)
        self._before[number].upload(image)
        position = self._buffer_sets[number % NUM_BUFFER_SETS].draw(random.SystemRandom())
        position.write_addresses()
        self._queue_restore(number, position)
        position.queue_launches()
        self._gpu.stream.sync()
        result = self._download(position)
        self._queue_poison(position.buffers)
        self._after[number].upload(result[self._layout.changed :])
        self._instruments.apply_mask(self._after[number].pointer, self._after[number].nbytes, self._mask)
        outputs = {}
        for name, spec in case.outputs.items():
            data = self._layout.slice_buffer(result, name, spec.nbytes)
            outputs[name] = data.copy().view(to_dtype(spec.dtype)).reshape(spec.shape)
            data[:] = self._layout.slice_buffer(image, name, spec.nbytes)
        self.outputs.append(outputs)
        if self.wrong is None and not np.array_equal(result, image):
            self.wrong = WrongLaunch(1, 1, number, WRONG_MEMORY)

    def _download(self, position: _Position) -> NDArray[np.uint8]:
        """Return the inputs and outputs after a launch."""
        changed, scratch, buffers, shift = self._layout.changed, self._layout.scratch, position.buffers, position.shift
        if not buffers.inputs:
            return buffers.memory.download(shift, shift + scratch)
        result = np.empty(scratch, np.uint8)
        check(driver.cuMemcpyDtoH(result.ctypes.data, position.written_inputs, changed))
        start = buffers.memory.pointer - buffers.base
        result[start:] = buffers.memory.download(shift, shift + scratch - start)
        return result

    def _queue_restore(self, case: int, position: _Position) -> None:
        """Queue the copies of a case's inputs and of the initial outputs and workspaces to a position."""
        before, stream, changed = self._before[case], self._gpu.stream.handle, self._layout.changed
        parts = [(position.base, 0, self._layout.scratch)]
        if position.buffers.inputs:
            parts = [(position.written_inputs, 0, changed), (position.base, changed, self._layout.scratch)]
        for base, start, end in parts:
            if end > start:
                check(driver.cuMemcpyDtoDAsync(base + start, before.pointer + start, end - start, stream))
        for name, space in self._workspaces.items():
            target = position.base + self._layout.offsets[name]
            if space.data:
                check(driver.cuMemcpyDtoDAsync(target, self._data[name].pointer, space.nbytes, stream))
            elif space.zeros and space.nbytes:
                check(driver.cuMemsetD8Async(target, 0, space.nbytes, stream))

    def _queue_poison(self, buffers: _BufferSet) -> None:
        """Queue the poisoning of a buffer set."""
        memories: list[Memory | _ReadOnlyMemory] = [buffers.memory, *([buffers.inputs] if buffers.inputs else [])]
        for memory in memories:
            check(driver.cuMemsetD8Async(memory.pointer, POISON, memory.nbytes, self._gpu.stream.handle))

    def _bands(self, position: _Position) -> list[tuple[int, int]]:
        """Return start and end in the layout of the workspaces' guard bands and of the memory around the layout."""
        *bands, (start, _) = self._layout.bands()
        memory = position.buffers.memory
        first = memory.pointer - position.base  # negative if the memory begins before the layout
        before_layout = (first, self._layout.changed if position.buffers.inputs else 0)
        return [before_layout, *bands, (start, first + memory.nbytes)]

    def time(
        self, warmup: int, iters: int, *, cold: bool, seed: int
    ) -> tuple[list[float], dict[str, float], WrongLaunch | None]:
        """Return the device time in microseconds of each of ``iters`` launches, between two events around it.

        Before each launch its memory is restored and read once, so that a warm L2 cache holds the same for every
        program, and the shared memory of the device is overwritten. Then the device gets other work: a kernel that only
        spins (warm), or a write over twice the L2 cache (cold). Meanwhile the host queues events and launch, so that no
        host time is measured. After the second event a digest is taken.

        seed: of the draws of cases, addresses and keys. Also returns the clocks halfway, and the first launch with
        wrong bits, among the untimed launches too.
        """
        rng = random.Random(seed)
        count = warmup + iters
        launches = [
            (rng.randrange(len(self._before)), rng.choice(self._buffer_sets).draw(rng), rng.getrandbits(64))
            for _ in range(count)
        ]
        self._reserve(count + 1)
        pairs: list[tuple[Any, Any]] = []
        clocks: dict[str, float] = {}
        for n, (case, position, key) in enumerate(launches):
            pair = self._queue(n, case, position, key, cold, spare=count)
            if n >= warmup:
                pairs.append(pair)
            if n == warmup + iters // 2:
                clocks = self._gpu.clocks()
        for n, (case, position, key) in enumerate(launches):
            self._queue_expected(n, case, position, key)
        wrong = self._first_wrong([case for case, _, _ in launches])
        return [(end - start) * 1e3 for start, end in pairs], clocks, wrong

    def _queue(self, number: int, case: int, position: _Position, key: int, cold: bool, spare: int) -> tuple[Any, Any]:
        """Queue one launch with its preparation and digest. Return its events. spare: an unused launch number."""
        layout, instruments, base = self._layout, self._instruments, position.base
        position.write_addresses()
        self._queue_restore(case, position)
        if not cold:  # at the program's own addresses, so that the TLBs are warm too
            read = [DigestRange(position.program_inputs, layout.changed, 0, self._sum(spare, 0))]
            read.append(DigestRange(base + layout.changed, layout.scratch - layout.changed, 0, self._sum(spare, 0)))
            whole = [DigestRange(base, layout.scratch, 0, self._sum(spare, 0))]
            instruments.digest(read if position.buffers.inputs else whole, key)
        instruments.clobber_smem(key)
        if cold:
            instruments.flush_l2()
        else:
            instruments.spin()
        start = self._gpu.mark()
        position.queue_launches()
        end = self._gpu.mark()
        bands = [(base + first, first, last) for first, last in self._bands(position)]
        instruments.digest(
            self._ranges(position.written_inputs, base + layout.changed, bands, self._sum(number, 0)), key
        )
        self._queue_poison(position.buffers)
        return start, end

    def _queue_expected(self, number: int, case: int, position: _Position, key: int) -> None:
        """Queue the digest of the expected bytes after a launch of this case."""
        bands = [(self._poison.pointer, first, last) for first, last in self._bands(position)]
        before, after = self._before[case].pointer, self._after[case].pointer
        self._instruments.digest(self._ranges(before, after, bands, self._sum(number, 2), self._mask), key)

    def _ranges(
        self, inputs: int, outputs: int, bands: list[tuple[int, int, int]], sums: int, mask: int = 0
    ) -> list[DigestRange]:
        """Return the ranges for a launch's two digests: of its outputs, and of all memory that it must not change.

        bands: the address of each guard band, and its start and end in the layout (negative before the layout). mask:
        the XOR mask of the outputs.
        """
        changed, scratch = self._layout.changed, self._layout.scratch
        guards = [DigestRange(address, last - first, (first // 8) % 2**64, sums + 8) for address, first, last in bands]
        return [
            DigestRange(outputs, scratch - changed, changed // 8, sums, mask),
            DigestRange(inputs, changed, 0, sums + 8),
            *guards,
        ]

    def _reserve(self, launches: int) -> None:
        """Allocate the digests of ``launches`` launches, and queue setting them to zero."""
        nbytes = launches * _SUMS * 8
        if self._sums.nbytes < nbytes:
            self._allocated.remove(self._sums)
            self._sums.free()
            self._sums = self._allocate(nbytes)
        check(driver.cuMemsetD8Async(self._sums.pointer, 0, nbytes, self._gpu.stream.handle))

    def _sum(self, launch: int, number: int) -> int:
        return self._sums.pointer + 8 * (launch * _SUMS + number)

    def _read_sums(self, launches: int) -> NDArray[np.uint64]:
        """Wait for the device, and return the digests of the first launches: (launches, _SUMS)."""
        self._gpu.stream.sync()
        return self._sums.download(0, launches * _SUMS * 8).view(np.uint64).reshape(launches, _SUMS)

    def _first_wrong(self, cases: Sequence[int]) -> WrongLaunch | None:
        """Return the first launch with wrong bits. cases: the case of each launch, in order."""
        count = len(cases)
        sums = self._read_sums(count)
        same = sums[:, :2] == sums[:, 2:]
        if not same.all():
            n = int(np.flatnonzero(~same.all(axis=1))[0])
            return WrongLaunch(n + 1, count, cases[n], WRONG_MEMORY if same[n, 0] else WRONG_BITS)
        if self._digest_judge_memory() != self._judge_digests:
            return WrongLaunch(count, count, cases[-1], WRONG_FAR)
        if self._gpu.variables(self._executable) != self._variables:
            return WrongLaunch(count, count, cases[-1], WRONG_VARIABLES)
        return None

    def _digest_judge_memory(self) -> bytes:
        """Return digests of the memory that only the judge's kernels write."""
        memories = [*self._before, *self._after, *self._data.values(), self._poison]
        ranges = [(memory.pointer, memory.nbytes) for memory in memories]
        ranges.append((self._instruments.flushed.pointer, self._instruments.flushed.nbytes))
        self._reserve(len(ranges))
        for n, (pointer, nbytes) in enumerate(ranges):
            self._instruments.digest([DigestRange(pointer, nbytes, 0, self._sum(n, 0))], self._judge_key)
        return self._read_sums(len(ranges)).tobytes()

    def free(self) -> None:
        """Free the device memory."""
        for memory in self._allocated:
            memory.free()
        self._allocated.clear()
