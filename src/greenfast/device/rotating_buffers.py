"""A program in rotation over several inputs and addresses, where every timed launch must leave the checked bits.

A kernel could do its work on some launches only: on the first of an input, on every second one, on those after which it
expects to be looked at. So each launch draws one of the cases, one of three places in memory, and a shift in that place
that no launch had. It finds its outputs poisoned. Afterwards a digest is taken of all that it left, under a key that is
drawn for this launch. It finds no result of an earlier launch in any buffer: places are overwritten, and what launches
are compared with is veiled.
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
from greenfast.device.executable import Executable
from greenfast.device.gpu import GUARD_BYTES, POISON, Gpu, whole_pages
from greenfast.device.helper_kernels import DigestRange, Instruments
from greenfast.device.session import WrongLaunch
from greenfast.device.virtual_memory import Access, PhysicalMemory, is_supported
from greenfast.spec.errors import MachineError
from greenfast.spec.kernel import Workspace
from greenfast.spec.problem import Array, Case, dtype_of

#: Memories that launches draw from.
PLACES = 3
_ALIGNMENT = 512  # of each buffer, as an allocation by the driver has it
#: Each launch has its buffers at one of this many multiples of _ALIGNMENT after the beginning of a place. Of these, no
#: launch has one that an earlier launch had, until all were drawn.
SHIFTS = 2048
_SUMS = 4  # per launch: of its outputs and of the rest, as they were left and as they should be

WRONG_BITS = "left other bits than the checked ones"
WRONG_MEMORY = "changed an input, or memory around a buffer"
WRONG_VARIABLES = "or an earlier one changed a variable of its module"
WRONG_FAR = "or an earlier one wrote to memory that launches are checked with"


@dataclass(frozen=True)
class Layout:
    """Where the buffers of a program lie in one allocation, each between guard bands of GUARD_BYTES.

    First the inputs, from ``changed`` on what a launch may change, from ``scratch`` on its workspaces. sizes, offsets:
    in bytes, by name. A buffer has the size of its largest case; what a case does not use is poison.
    """

    sizes: dict[str, int]
    offsets: dict[str, int]
    changed: int
    scratch: int
    end: int

    @classmethod
    def of(cls, cases: Sequence[Case], workspaces: Mapping[str, Workspace]) -> Layout:
        """The layout that holds each of these cases."""
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

    def image(self, case: Case) -> NDArray[np.uint8]:
        """The bytes before ``scratch`` as a launch finds them."""
        image = np.full(self.scratch, POISON, np.uint8)
        for name, spec in case.outputs.items():
            if spec.zeros:
                self.within(image, name, spec.nbytes)[:] = 0
        for name, array in case.inputs.items():
            self.within(image, name, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return image

    def within(self, image: NDArray[np.uint8], name: str, nbytes: int) -> NDArray[np.uint8]:
        """The first bytes of a buffer in an image."""
        return image[self.offsets[name] : self.offsets[name] + nbytes]

    def bands(self) -> list[tuple[int, int]]:
        """Start and end of the guard bands behind each workspace, and of what is left of the last page behind all."""
        names = [name for name, offset in self.offsets.items() if offset >= self.scratch]
        starts = [self.offsets[name] + self.sizes[name] for name in names]
        bands = [(start + -start % 16, _up(start + GUARD_BYTES)) for start in starts]
        return [*bands, (self.end, whole_pages(self.end))]


def _up(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def _slack() -> int:
    """Return how many bytes of a place are for its shifts."""
    return SHIFTS * _ALIGNMENT


class Memory:
    """One allocation on the device, of whole pages. Copies have arrived when a method returns.

    What is left of a page is mapped too: a kernel could keep something there.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = whole_pages(nbytes)
        self.pointer = int(check(driver.cuMemAlloc(self.nbytes)))

    def upload(self, data: NDArray[np.uint8]) -> None:
        """Copy host bytes to its beginning."""
        if not data.nbytes:
            return
        check(driver.cuMemcpyHtoD(self.pointer, data.ctypes.data, data.nbytes))
        check(driver.cuCtxSynchronize())

    def download(self, start: int, end: int) -> NDArray[np.uint8]:
        """A range of it."""
        data = np.empty(end - start, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, self.pointer + start, data.nbytes))
        return data

    def free(self) -> None:
        """Free it."""
        check(driver.cuMemFree(self.pointer))


class _ReadOnly:
    """Memory with one mapping that the judge writes, and one that a program can only read: a write ends its process."""

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
            memory.release()  # its mappings keep it
        self.nbytes, self.pointer, self.programs = memory.nbytes, self._own.pointer, self._programs.pointer

    def free(self) -> None:
        """Free it."""
        self._programs.free()
        self._own.free()


@dataclass(frozen=True)
class _Place:
    """Memory for the buffers of one launch, and the program's launches with it.

    base: where the layout begins without a shift; ``memory`` begins there, or a guard band before what a launch may
    change if the inputs have their own memory, ``inputs``. slots: where the arguments of the launches hold addresses,
    each with its value without a shift. unused: the shifts that no launch had, in units of _ALIGNMENT.
    """

    memory: Memory
    base: int
    inputs: _ReadOnly | None
    launches: list[BoundLaunch]
    slots: list[tuple[Any, int]]
    unused: list[int]

    def draw(self, rng: random.Random) -> _Position:
        """Draw a shift that no launch had; once all were drawn, all may be drawn again."""
        if not self.unused:
            self.unused.extend(range(SHIFTS))
        return _Position(self, self.unused.pop(rng.randrange(len(self.unused))) * _ALIGNMENT)


@dataclass(frozen=True)
class _Position:
    """The addresses of one launch: a place, ``shift`` bytes further."""

    place: _Place
    shift: int

    @property
    def base(self) -> int:
        """Where the layout begins."""
        return self.place.base + self.shift

    @property
    def of_inputs(self) -> int:
        """Where the judge writes the inputs."""
        return self.place.inputs.pointer + self.shift if self.place.inputs else self.base

    @property
    def for_programs(self) -> int:
        """Where the program reads the inputs."""
        return self.place.inputs.programs + self.shift if self.place.inputs else self.base

    def write_addresses(self) -> None:
        """Write the addresses to the arguments of the launches; launches that are queued keep what they had."""
        for slot, address in self.place.slots:
            slot.value = address + self.shift

    def queue_launches(self) -> None:
        """Queue the program's launches with these addresses."""
        for launch in self.place.launches:
            launch()


class Rotation:
    """A program with several cases in device memory, ready to be timed.

    outputs: what the first launch of each case left, for the caller to check; every later one must leave the same.
    wrong: the first of these launches that wrote elsewhere, None if all were well.

    A program has its inputs at addresses that it can only read, if the driver has such: a write, even one that is
    undone, ends the process with an illegal address.
    """

    def __init__(self, gpu: Gpu, instruments: Instruments, executable: Executable, cases: Sequence[Case]) -> None:
        self._gpu, self._instruments, self._workspaces = gpu, instruments, executable.workspaces
        self._executable = executable
        self._variables = gpu.variables(executable)
        self._layout = layout = Layout.of(cases, executable.workspaces)
        self._allocated: list[Memory | _ReadOnly] = []
        self._veil, self._own_key = (random.SystemRandom().randrange(1, 2**64) for _ in range(2))
        self._before = [self._allocate(layout.scratch) for _ in cases]
        self._after = [self._allocate(layout.scratch - layout.changed) for _ in cases]
        self._data = {name: self._allocate(space.nbytes) for name, space in self._workspaces.items() if space.data}
        for name, memory in self._data.items():
            memory.upload(np.frombuffer(self._workspaces[name].data, np.uint8))
        self._places = [self._place(executable) for _ in range(PLACES)]
        self._poison = self._allocate(_slack() + whole_pages(1))  # no band is longer
        self._poison.upload(np.full(self._poison.nbytes, POISON, np.uint8))
        self._sums = self._allocate(0)
        self.outputs: list[dict[str, Array]] = []
        self.wrong: WrongLaunch | None = None
        for n, case in enumerate(cases):
            self._first(n, case)
        self._own = self._digests_of_own()

    def _allocate(self, nbytes: int) -> Memory:
        memory = Memory(max(nbytes, 1))
        self._allocated.append(memory)
        return memory

    def _allocate_inputs(self) -> _ReadOnly | None:
        """Memory for the inputs that programs can only read; None without inputs, or if the driver has none."""
        ordinal = getattr(self._gpu.device, "device_id", None)
        if ordinal is None or self._layout.changed <= _up(GUARD_BYTES) or not is_supported(int(ordinal)):
            return None
        try:
            memory = _ReadOnly(self._layout.changed + _slack(), int(ordinal))
        except MachineError:  # some drivers have no read-only mappings
            return None
        self._allocated.append(memory)
        return memory

    def _place(self, executable: Executable) -> _Place:
        layout, inputs = self._layout, self._allocate_inputs()
        elsewhere = layout.changed - _up(GUARD_BYTES) if inputs else 0  # with a guard band in front
        memory = self._allocate(layout.end - elsewhere + _slack())
        place = _Place(memory, memory.pointer - elsewhere, inputs, [], [], list(range(SHIFTS)))
        self._queue_wipe(place)
        start = _Position(place, 0)
        pointers = {
            name: (start.for_programs if offset < layout.changed else start.base) + offset
            for name, offset in layout.offsets.items()
        }
        place.launches.extend(self._gpu.prepare(executable, pointers))
        for name, slot in (pair for launch in place.launches for pair in launch.places()):
            if name in pointers:  # an argument may hold an address inside a buffer
                place.slots.append((slot, pointers[name] if isinstance(slot, MovableMap) else int(slot.value)))
        return place

    def _first(self, number: int, case: Case) -> None:
        """Launch a case for the first time and keep what it leaves."""
        image = self._layout.image(case)
        self._before[number].upload(image)
        position = self._places[number % PLACES].draw(random.SystemRandom())
        position.write_addresses()
        self._queue_restore(number, position)
        position.queue_launches()
        self._gpu.stream.sync()
        left = self._left(position)
        self._queue_wipe(position.place)
        self._after[number].upload(left[self._layout.changed :])
        self._instruments.veil(self._after[number].pointer, self._after[number].nbytes, self._veil)
        outputs = {}
        for name, spec in case.outputs.items():
            data = self._layout.within(left, name, spec.nbytes)
            outputs[name] = data.copy().view(dtype_of(spec.dtype)).reshape(spec.shape)
            data[:] = self._layout.within(image, name, spec.nbytes)
        self.outputs.append(outputs)
        if self.wrong is None and not np.array_equal(left, image):
            self.wrong = WrongLaunch(1, 1, number, WRONG_MEMORY)

    def _left(self, position: _Position) -> NDArray[np.uint8]:
        """The inputs and outputs as a launch left them."""
        changed, scratch, place, shift = self._layout.changed, self._layout.scratch, position.place, position.shift
        if not place.inputs:
            return place.memory.download(shift, shift + scratch)
        left = np.empty(scratch, np.uint8)
        check(driver.cuMemcpyDtoH(left.ctypes.data, position.of_inputs, changed))
        start = place.memory.pointer - place.base
        left[start:] = place.memory.download(shift, shift + scratch - start)
        return left

    def _queue_restore(self, case: int, position: _Position) -> None:
        """Queue a case's inputs, its outputs before a launch, and what workspaces begin with, at a position."""
        before, stream, changed = self._before[case], self._gpu.stream.handle, self._layout.changed
        parts = [(position.base, 0, self._layout.scratch)]
        if position.place.inputs:
            parts = [(position.of_inputs, 0, changed), (position.base, changed, self._layout.scratch)]
        for base, start, end in parts:
            if end > start:
                check(driver.cuMemcpyDtoDAsync(base + start, before.pointer + start, end - start, stream))
        for name, space in self._workspaces.items():
            to = position.base + self._layout.offsets[name]
            if space.data:
                check(driver.cuMemcpyDtoDAsync(to, self._data[name].pointer, space.nbytes, stream))
            elif space.zeros and space.nbytes:
                check(driver.cuMemsetD8Async(to, 0, space.nbytes, stream))

    def _queue_wipe(self, place: _Place) -> None:
        """Queue poisoning a place."""
        memories: list[Memory | _ReadOnly] = [place.memory, *([place.inputs] if place.inputs else [])]
        for memory in memories:
            check(driver.cuMemsetD8Async(memory.pointer, POISON, memory.nbytes, self._gpu.stream.handle))

    def _bands(self, position: _Position) -> list[tuple[int, int]]:
        """Return start and end in the layout of the workspaces' guard bands and of the memory around the layout."""
        *bands, (start, _) = self._layout.bands()
        place = position.place
        first = place.memory.pointer - position.base  # negative if the place begins before the layout
        in_front = (first, self._layout.changed if place.inputs else 0)
        return [in_front, *bands, (start, first + place.memory.nbytes)]

    def time(
        self, warmup: int, iters: int, *, cold: bool, seed: int
    ) -> tuple[list[float], dict[str, float], WrongLaunch | None]:
        """Device time in microseconds of each of ``iters`` launches, between two events around it.

        Before each launch its memory is restored, and read once, so that a warm L2 cache holds the same for every
        program; the shared memory of the device is overwritten. Then follows other work - warm: a kernel that only
        spins; cold: a write over twice the L2 cache - so that events and launch are all queued before the device
        reaches them and no host time is measured. After the second event a digest is taken.

        seed: of the draws of cases, addresses and keys. Returns the times, the clocks halfway, and the first launch
        that did not leave what it should, of those before the timed ones too.
        """
        drawn = random.Random(seed)
        count = warmup + iters
        launches = [
            (drawn.randrange(len(self._before)), drawn.choice(self._places).draw(drawn), drawn.getrandbits(64))
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
        """Queue one launch with all that belongs to it; gives its time stamps. spare: a number that no launch has."""
        layout, instruments, base = self._layout, self._instruments, position.base
        position.write_addresses()
        self._queue_restore(case, position)
        if not cold:  # at the program's own addresses, which the caches of addresses then hold too
            read = [DigestRange(position.for_programs, layout.changed, 0, self._sum(spare, 0))]
            read.append(DigestRange(base + layout.changed, layout.scratch - layout.changed, 0, self._sum(spare, 0)))
            whole = [DigestRange(base, layout.scratch, 0, self._sum(spare, 0))]
            instruments.digest(read if position.place.inputs else whole, key)
        instruments.scrub(key)
        if cold:
            instruments.flush_l2()
        else:
            instruments.spin()
        start = self._gpu.mark()
        position.queue_launches()
        end = self._gpu.mark()
        bands = [(base + first, first, last) for first, last in self._bands(position)]
        instruments.digest(self._ranges(position.of_inputs, base + layout.changed, bands, self._sum(number, 0)), key)
        self._queue_wipe(position.place)
        return start, end

    def _queue_expected(self, number: int, case: int, position: _Position, key: int) -> None:
        """Queue the digest of what a launch of this case should have left."""
        bands = [(self._poison.pointer, first, last) for first, last in self._bands(position)]
        before, after = self._before[case].pointer, self._after[case].pointer
        self._instruments.digest(self._ranges(before, after, bands, self._sum(number, 2), self._veil), key)

    def _ranges(
        self, inputs: int, outputs: int, bands: list[tuple[int, int, int]], sums: int, veil: int = 0
    ) -> list[DigestRange]:
        """What is digested of a launch, into two sums: its outputs, and all else that it must leave as it was.

        bands: where each guard band is read, and its start and end in the layout, negative in front of it. veil: of
        the outputs.
        """
        changed, scratch = self._layout.changed, self._layout.scratch
        rest = [DigestRange(at, last - first, (first // 8) % 2**64, sums + 8) for at, first, last in bands]
        return [
            DigestRange(outputs, scratch - changed, changed // 8, sums, veil),
            DigestRange(inputs, changed, 0, sums + 8),
            *rest,
        ]

    def _reserve(self, launches: int) -> None:
        """Make room for the sums of ``launches`` launches, and queue setting them to zero."""
        nbytes = launches * _SUMS * 8
        if self._sums.nbytes < nbytes:
            self._allocated.remove(self._sums)
            self._sums.free()
            self._sums = self._allocate(nbytes)
        check(driver.cuMemsetD8Async(self._sums.pointer, 0, nbytes, self._gpu.stream.handle))

    def _sum(self, launch: int, which: int) -> int:
        return self._sums.pointer + 8 * (launch * _SUMS + which)

    def _read_sums(self, launches: int) -> NDArray[np.uint64]:
        """The sums of the first launches, (launches, _SUMS), once the device has computed them."""
        self._gpu.stream.sync()
        return self._sums.download(0, launches * _SUMS * 8).view(np.uint64).reshape(launches, _SUMS)

    def _first_wrong(self, cases: Sequence[int]) -> WrongLaunch | None:
        """Return the first launch that left what it must not. cases: of the launches, in order."""
        count = len(cases)
        sums = self._read_sums(count)
        same = sums[:, :2] == sums[:, 2:]
        if not same.all():
            n = int(np.flatnonzero(~same.all(axis=1))[0])
            return WrongLaunch(n + 1, count, cases[n], WRONG_MEMORY if same[n, 0] else WRONG_BITS)
        if self._digests_of_own() != self._own:
            return WrongLaunch(count, count, cases[-1], WRONG_FAR)
        if self._gpu.variables(self._executable) != self._variables:
            return WrongLaunch(count, count, cases[-1], WRONG_VARIABLES)
        return None

    def _read_only(self) -> list[Memory]:
        return [*self._before, *self._after, *self._data.values(), self._poison]

    def _digests_of_own(self) -> bytes:
        """Digests of the memory that only the judge's kernels write."""
        own = [(memory.pointer, memory.nbytes) for memory in self._read_only()]
        own.append((self._instruments.flushed.pointer, self._instruments.flushed.nbytes))
        self._reserve(len(own))
        for n, (pointer, nbytes) in enumerate(own):
            self._instruments.digest([DigestRange(pointer, nbytes, 0, self._sum(n, 0))], self._own_key)
        return self._read_sums(len(own)).tobytes()

    def free(self) -> None:
        """Free the device memory."""
        for memory in self._allocated:
            memory.free()
        self._allocated.clear()
