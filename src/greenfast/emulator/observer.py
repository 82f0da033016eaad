"""Collect the observations of a run: executed lines, accesses by line, values at watched lines, the trace of a warp.

Nothing here runs without an ``Observe``. With one, the reference interpreter runs (no compiled stretches), and calls
``Observer.record`` after each instruction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.operands import TYPES, cast, list_items
from greenfast.emulator.machine.blocks import WARP, ThreadSet, lane_indices, unflatten
from greenfast.emulator.machine.counts import SECTOR, Counts
from greenfast.emulator.machine.observed import (
    MAX_STEPS,
    BranchSide,
    Extent,
    Line,
    LineAccesses,
    LineCounts,
    Observe,
    Observed,
    Recorder,
    WarpStep,
)
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.program import Program
from greenfast.emulator.ptx.names import demangle
from greenfast.emulator.ptx.syntax import Address, Frame, Instruction, Register, SourceLine
from greenfast.emulator.scheduler import Scheduler
from greenfast.emulator.watches import MARKER, MARKERS, Watch, parse_watch

#: Different inline stacks of a line that are listed.
_MAX_STACKS = 4


@dataclass
class _LineState:
    """A source line during a run. seen: the resident threads that executed it; None before the first one."""

    function: str
    threads: int = 0
    seen: NDArray[np.bool_] | None = None
    accesses: dict[tuple[str, bool], LineAccesses] = field(default_factory=dict)
    stacks: dict[tuple[Frame, ...], None] = field(default_factory=dict)


@dataclass
class _Site:
    """An instruction of the kernel: its line first, then the lines that it was inlined from.

    counted: False for the marker of a watch. warps, threads, taken: how many executed it, and took its branch.
    values: readers of its registers by name.
    """

    instruction: Instruction
    lines: list[_LineState]
    watch: tuple[int, int, Any] | None
    values: list[tuple[str, Callable[[ResidentBlocks, NDArray[np.intp]], list[Any]]]]
    warps: int = 0
    threads: int = 0
    taken: int = 0


class Observer:
    """Collects the observations of a run."""

    def __init__(self, observe: Observe) -> None:
        """Raise UsageError for a watch that cannot be read."""
        self.observe = observe
        self.watches: list[Watch] = [parse_watch(text) for text in observe.watch]
        self._lines: dict[tuple[str, int], _LineState] = {}
        self._sites: dict[int, _Site] = {}
        self._programs: dict[int, Program] = {}
        self._watched: list[WarpStep] = []
        self._open: dict[tuple[int, Extent, int], WarpStep] = {}  # steps of watches, by watch, block and warp
        self._trace: list[WarpStep] = []
        self._omitted = 0
        self._traced = slice(0, 0)

    def begin_blocks(self, m: ResidentBlocks, program: Program) -> None:
        """Observe the blocks that run next. Their predecessors have ended."""
        self.end_blocks()
        if id(program) not in self._programs:
            self._programs[id(program)] = program
            for i in program.function.code:
                self._sites.setdefault(id(i), self._make_site(i, program))
        self._traced = slice(0, 0)
        if self.observe.trace is not None:
            (x, y, z), warp = self.observe.trace
            grid = m.geometry.grid
            position = np.flatnonzero(m.blocks == x + grid[0] * (y + grid[1] * z))
            if len(position) and warp < m.warps and x < grid[0] and y < grid[1]:
                start = warp * m.threads_per_warp_slot + int(position[0]) * WARP
                self._traced = slice(start, start + WARP)

    def end_blocks(self) -> None:
        """Add up the threads of the blocks that have run."""
        for line in self._lines.values():
            if line.seen is not None:
                line.threads += int(np.count_nonzero(line.seen))
                line.seen = None

    def add(self, other: Observer) -> None:
        """Add the observations of another run, such as a program's next launch."""
        other.end_blocks()
        for number, program in other._programs.items():
            if number not in self._programs:
                self._programs[number] = program
                for i in program.function.code:
                    self._sites.setdefault(id(i), self._make_site(i, program))
        for number, site in other._sites.items():
            own = self._sites[number]
            own.warps += site.warps
            own.threads += site.threads
            own.taken += site.taken
        for key, line in other._lines.items():
            mine = self._lines.setdefault(key, _LineState(line.function))
            mine.threads += line.threads
            for kind, access in line.accesses.items():
                total = mine.accesses.setdefault(kind, LineAccesses())
                total.requests += access.requests
                total.transactions += access.transactions
                total.ideal += access.ideal
        self._omitted += other._omitted
        for steps, more in ((self._watched, other._watched), (self._trace, other._trace)):
            space = MAX_STEPS - len(steps)
            steps += more[:space]
            self._omitted += len(more[space:])

    def make_counts(self) -> Counts:
        """Return the counters of the run."""
        return _CountsByLine(self) if self.observe.lines else Counts()

    def record(self, m: ResidentBlocks, i: Instruction, lanes: ThreadSet, size: tuple[int, int]) -> None:
        """Record an instruction after its threads executed it; a branch before they leave it."""
        site = self._sites[id(i)]
        if site.watch is not None:
            self._record_watch(m, site, lanes)
            return
        if self.observe.lines:
            site.warps += size[0]
            site.threads += size[1]
            for line in site.lines:
                if line.seen is None:
                    line.seen = np.zeros(m.lanes, np.bool_)
                line.seen[lanes] = True
            if i.name == "bra" and i.guard is not None:
                site.taken += int(np.count_nonzero(m.register(i.guard[0])[lanes] ^ i.guard[1]))
        if self._traced.stop:
            indices = lane_indices(lanes)
            mine = indices[(indices >= self._traced.start) & (indices < self._traced.stop)]
            if len(mine) and self._has_space(self._trace):
                values = {name: read(m, mine) for name, read in site.values}
                self._trace.append(self._make_step(m, mine, i, i.text, values))

    def get_line(self, source: SourceLine | None) -> _LineState:
        """Return the state of a source line."""
        key = (source.file, source.line) if source else ("unknown", 0)
        return self._lines.setdefault(key, _LineState(""))

    def observed(self) -> Observed:
        """Return the observations."""
        self.end_blocks()
        return Observed(
            lines=self._count_lines() if self.observe.lines else [],
            watched=self._watched,
            trace=self._trace,
            omitted=self._omitted,
        )

    def _make_site(self, i: Instruction, program: Program) -> _Site:
        target = i.operands[0] if i.operands else None
        marker = MARKER.match(target.name) if i.name == "mov" and isinstance(target, Register) else None
        watch = (int(marker[1]), int(marker[2]), marker[3]) if marker else None
        frames = i.source.stack or (Frame(i.source.file, i.source.line),) if i.source else ()
        lines = []
        for n, frame in enumerate(frames if watch is None else ()):
            line = self._lines.setdefault((frame.file, frame.line), _LineState(""))
            line.function = line.function or demangle(frame.function)
            if n == 0 and len(frames) > 1:
                line.stacks.setdefault(frames[1:])
            if line not in lines:
                lines.append(line)
        traced = self.observe.trace is not None
        return _Site(i, lines, watch, _register_readers(i, program) if traced else [])

    def _has_space(self, steps: list[WarpStep]) -> bool:
        self._omitted += len(steps) >= MAX_STEPS
        return len(steps) < MAX_STEPS

    def _make_step(
        self, m: ResidentBlocks, lanes: NDArray[np.intp], i: Instruction, text: str, values: dict[str, list[Any]]
    ) -> WarpStep:
        frame = i.source.shown if i.source else Frame("unknown", 0)
        block, warp = _locate(m, int(lanes[0]))
        return WarpStep(
            file=frame.file,
            line=frame.line,
            function=demangle(frame.function),
            block=block,
            warp=warp,
            mask=sum(1 << n for n in (lanes % WARP).tolist()),
            instruction=text,
            values=values,
        )

    def _record_watch(self, m: ResidentBlocks, site: _Site, lanes: ThreadSet) -> None:
        """Add the values of a watched expression to one step per warp, shared by the line's other expressions."""
        assert site.watch is not None
        number, index, kind = site.watch
        watch = self.watches[number]
        target = site.instruction.operands[0]
        assert isinstance(target, Register)
        indices = lane_indices(lanes)
        for group in np.split(indices, np.flatnonzero(np.diff(indices // WARP)) + 1):
            values = _decode(m.register(target.name)[group], kind)
            key = (number, *_locate(m, int(group[0])))
            step = self._open.get(key)
            if index and step is not None:
                step.values[watch.expressions[index]] = values
            elif not index and self._has_space(self._watched):
                step = self._make_step(m, group, site.instruction, "", {watch.expressions[index]: values})
                step = msgspec.structs.replace(step, line=watch.line)
                self._open[key] = step
                self._watched.append(step)
            elif not index:
                self._open.pop(key, None)

    def _count_lines(self) -> list[LineCounts]:
        sites: dict[int, list[_Site]] = {}
        sides: dict[int, Counter[int]] = {}
        for program in self._programs.values():
            for pc, i in enumerate(program.function.code):
                site = self._sites[id(i)]
                if not site.lines:
                    continue
                own = id(site.lines[0])
                sites.setdefault(own, []).append(site)
                if i.name == "bra" and i.guard is not None and site.threads:
                    for to, count in ((program.targets[pc], site.taken), (pc + 1, site.threads - site.taken)):
                        sides.setdefault(own, Counter())[_line_at(program, to)] += count
        result = []
        for (file, number), line in sorted(self._lines.items()):
            if not number or file == MARKERS:
                continue
            own_sites = sites.get(id(line), [])
            spaces = [(space, store) for space in ("global", "shared") for store in (False, True)]
            accesses = [line.accesses.get(key, LineAccesses()) for key in spaces]
            result.append(
                LineCounts(
                    file=file,
                    line=number,
                    function=line.function,
                    threads=line.threads,
                    instructions=sum(site.warps for site in own_sites),
                    thread_instructions=sum(site.threads for site in own_sites),
                    code=len(own_sites),
                    executed_code=sum(site.threads > 0 for site in own_sites),
                    global_loads=accesses[0],
                    global_stores=accesses[1],
                    shared_loads=accesses[2],
                    shared_stores=accesses[3],
                    sides=[BranchSide(to_line=to, threads=n) for to, n in sorted(sides.get(id(line), {}).items())],
                    stacks=[
                        [Line(file=f.file, line=f.line, function=demangle(f.function)) for f in stack]
                        for stack in list(line.stacks)[:_MAX_STACKS]
                    ],
                )
            )
        return result


class ObservedScheduler(Scheduler):
    """A scheduler that records each executed instruction."""

    def __init__(self, machine: ResidentBlocks, program: Program, seed: int, order: int, observer: Observer) -> None:
        super().__init__(machine, program, seed, order)
        self._observer = observer
        observer.begin_blocks(machine, program)

    def _count(self, i: Instruction, key: str, lanes: ThreadSet, size: tuple[int, int]) -> None:
        super()._count(i, key, lanes, size)
        self._observer.record(self.m, i, lanes, size)


class _CountsByLine(Counts):
    """Counts that also add accesses to the source lines of an observer."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def access(
        self,
        space: str,
        store: bool,
        offsets: NDArray[np.int64],
        threads: ThreadSet,
        size: int,
        source: SourceLine | None,
    ) -> None:
        """Count one access, in total and for its line."""
        sectors, passes = self.global_load_sectors + self.global_store_sectors, self.shared_passes
        conflicts = self.shared_load_conflicts + self.shared_store_conflicts
        super().access(space, store, offsets, threads, size, source)
        if not len(offsets) or space not in ("global", "shared"):
            return
        line = self._observer.get_line(source)
        access = line.accesses.setdefault((space, store), LineAccesses())
        warps = lane_indices(threads) // WARP
        access.requests += len(np.unique(warps))
        if space == "global":
            access.transactions += self.global_load_sectors + self.global_store_sectors - sectors
            distinct = np.unique(np.stack([warps, offsets]), axis=1)[0]
            counts = np.unique(distinct, return_counts=True)[1]
            access.ideal += int((-(-counts * size // SECTOR)).sum())
        else:
            passes = self.shared_passes - passes
            access.transactions += passes
            access.ideal += passes - (self.shared_load_conflicts + self.shared_store_conflicts - conflicts)


def add_launch(total: Observer | None, launch: Recorder | None) -> None:
    """Add a launch's observations to the observations of all launches. Do nothing if one of them is missing."""
    if total is not None and isinstance(launch, Observer):
        total.add(launch)


def _line_at(program: Program, pc: int) -> int:
    """Return the source line that runs next from an instruction, 0 for the end of the kernel.

    Jumps and instructions that the compiler attributes to no line are skipped.
    """
    code = program.function.code
    for _ in range(len(code)):
        if pc >= len(code) or code[pc].name == "ret":
            break
        i = code[pc]
        if i.name == "bra" and i.guard is None:
            pc = program.targets[pc]
        elif i.source is not None and i.source.line:
            return i.source.shown.line if i.source.file == MARKERS else i.source.line
        else:
            pc += 1
    return 0


def _locate(m: ResidentBlocks, lane: int) -> tuple[Extent, int]:
    """Return the block and the warp of a thread."""
    block = unflatten(int(m.blocks[m.block_of[lane]]), m.geometry.grid)
    return (int(block[0]), int(block[1]), int(block[2])), int(m.thread_of[lane]) // WARP


def _register_readers(
    i: Instruction, program: Program
) -> list[tuple[str, Callable[[ResidentBlocks, NDArray[np.intp]], list[Any]]]]:
    """Return a reader for each register of an instruction: the results first, then the guard and the sources."""
    types = [part for part in i.parts if part in TYPES]
    kinds: dict[str, str] = {}
    for n, operand in enumerate(i.operands):
        for item in list_items(operand):
            address = isinstance(item, Address)
            register = item.base if isinstance(item, Address) else item
            if isinstance(register, Register) and register.name != "_":
                own = "" if address or not types else types[0] if n == 0 else types[-1]
                kinds.setdefault(register.name, own)
    if i.guard is not None:
        kinds.setdefault(i.guard[0], "")

    def build(name: str, kind: str) -> Callable[[ResidentBlocks, NDArray[np.intp]], list[Any]]:
        declared = program.function.register_kind(name) or ""

        def read(m: ResidentBlocks, lanes: NDArray[np.intp]) -> list[Any]:
            values = m.register(name)[lanes]
            bits = 8 * values.dtype.itemsize
            for candidate in (kind, declared):
                if candidate in TYPES and 8 * np.dtype(TYPES[candidate]).itemsize == bits and candidate[0] != "b":
                    return _decode(values, candidate)
            return _decode(values, f"{kind[:1] if kind[:1] == 's' else 'u'}{bits}")

        return read

    return [(re.sub(r"[@~].*", "", name), build(name, kind)) for name, kind in kinds.items()]


def _decode(values: NDArray[Any], kind: str) -> list[Any]:
    """Return register values as Python's numbers of a PTX type, or of bool."""
    if values.dtype == np.bool_ or kind == "bool":
        return [bool(value) for value in values]
    if kind == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32).tolist()  # type: ignore[no-any-return]
    if kind in TYPES:
        return cast(values, np.dtype(TYPES[kind])).tolist()  # type: ignore[no-any-return]
    return values.tolist()  # type: ignore[no-any-return]
