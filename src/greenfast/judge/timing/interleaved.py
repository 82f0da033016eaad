"""Time several kernels in interleaved blocks of balanced order, each in a separate process, over fresh processes.

See docs/measurement.md for why. Sequential windows mostly find identical kernels different; blocks that
alternate in random order see the same drift, and fresh processes show what one process's memory layout hides.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from greenfast.device.executable import Executable
from greenfast.device.session import WrongLaunch
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.task import Timing
from greenfast.judge.timing.orders import balanced, drawn_sizes, drawn_warmup
from greenfast.spec.problem import Case

#: What lies in the L2 cache when a timed launch starts: its inputs, which were just read, or nothing of them.
WARM, COLD = "warm", "cold"
METHOD = "event pair per launch, queue kept full, inputs and addresses drawn, every launch checked"

#: A block measured below this share of the SM clock that the run started with is discarded.
MIN_CLOCK_SHARE = 0.75
#: Untimed launches before each block: the device has just switched to this process.
_BLOCK_WARMUP = 5


#: Shape name -> what is launched for it.
Programs: TypeAlias = Mapping[str, Executable]


@dataclass(frozen=True)
class Cell:
    """One shape to be timed. cases: by seed; each launch draws one of them. seeds: whose blocks are wanted."""

    shape: str
    cases: Mapping[int, Case]
    seeds: Sequence[int]


@dataclass
class Timed:
    """One label's samples on one (shape, seed, cache): microseconds as [process][block][launch].

    clocks: what was read in each block, [process][block].
    """

    blocks: list[list[list[float]]] = field(default_factory=list)
    clocks: list[list[dict[str, float]]] = field(default_factory=list)
    discarded: int = 0

    @property
    def samples(self) -> list[float]:
        """All kept launches in order."""
        return [t for process in self.blocks for block in process for t in block]

    @property
    def medians(self) -> list[list[float]]:
        """Block medians, [process][block]."""
        return [[float(np.median(block)) for block in process] for process in self.blocks]

    def read(self, name: str) -> list[list[float]]:
        """A clock by its name, [process][block]; empty where a block has none."""
        if not all(name in clocks for process in self.clocks for clocks in process):
            return []
        return [[clocks[name] for clocks in process] for process in self.clocks]


@dataclass
class Measurement:
    """All samples by (label, shape, seed, cache), and the clocks seen.

    digests: of the first outputs in each process, by (label, shape, seed). order_seed: of all that was drawn.
    """

    order_seed: int
    timed: dict[tuple[str, str, int, str], Timed] = field(default_factory=dict)
    digests: dict[tuple[str, str, int], list[str]] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)


def measure(
    programs: Mapping[str, Programs],
    cells: Sequence[Cell],
    timing: Timing,
    make_worker: Callable[[], Worker],
    progress: Callable[[float, str], None],
    *,
    caches: Sequence[str] = (WARM, COLD),
    order_seed: int,
) -> Measurement:
    """Time every label's kernel on every cell.

    programs: label -> shape name -> program. Two labels may hold the same program (an A/A comparison).
    timing: how many processes, blocks and launches; block b of one label is paired with block b of the others.
    order_seed: of all draws: the order of labels, how many launches a block has and warms up with, and what each
    launch of it draws.
    Raises WorkerError where a kernel crashes, hangs or fails, or a launch leaves other bits than its case did at first.
    """
    result = Measurement(order_seed)
    drawn = [(cell.shape, seed, cache) for cell in cells for seed in cell.seeds for cache in caches]
    plans = {key: _Plan(list(programs), timing, random.Random(f"{order_seed} {key}")) for key in drawn}
    steps, step = timing.processes * len(cells), 0
    for process in range(timing.processes):
        with contextlib.ExitStack() as stack:
            workers = {label: stack.enter_context(make_worker()) for label in programs}
            for cell in cells:
                progress(step / steps, f"process {process + 1}/{timing.processes}: {cell.shape}")
                step += 1
                rng = random.Random(f"{order_seed} {cell.shape} {process}")
                _time_cell(result, workers, programs, cell, timing, caches, process, plans, rng)
    return result


class _Plan:
    """What is drawn for one (shape, seed, cache): over all processes, so that the orders are balanced over all."""

    def __init__(self, labels: Sequence[str], timing: Timing, rng: random.Random) -> None:
        self._rng = rng
        self._orders = balanced(labels, rng)
        sizes = drawn_sizes(timing.timed_iters, timing.blocks, rng)
        self._sizes = [sizes[process :: timing.processes] for process in range(timing.processes)]

    def blocks(self, process: int) -> Iterator[tuple[tuple[str, ...], int, int]]:
        """The order of the labels, and how many launches warm up and are timed, for each block of a process."""
        for iters in self._sizes[process]:
            yield next(self._orders), drawn_warmup(_BLOCK_WARMUP, self._rng), iters


def _time_cell(
    result: Measurement,
    workers: Mapping[str, Worker],
    programs: Mapping[str, Programs],
    cell: Cell,
    timing: Timing,
    caches: Sequence[str],
    process: int,
    plans: Mapping[tuple[str, int, str], _Plan],
    rng: random.Random,
) -> None:
    """One cell in one set of processes: prepare every label, time the blocks of every seed and cache state."""
    shape = cell.shape
    cases = list(cell.cases.values())

    def require_right(label: str, wrong: WrongLaunch | None) -> None:
        if wrong is not None:
            raise WorkerError(f"{label} {shape} seed {list(cell.cases)[wrong.case]}: {wrong}")

    for label, worker in workers.items():
        warmup = drawn_warmup(timing.warmup_iters, rng)
        started = worker.prepare(shape, programs[label][shape], cases, warmup, rng.getrandbits(63))
        for seed, digest in zip(cell.cases, started.digests, strict=True):
            result.digests.setdefault((label, shape, seed), []).append(digest)
        require_right(label, started.wrong)
    for seed in cell.seeds:
        for cache in caches:
            kept = {label: result.timed.setdefault((label, shape, seed, cache), Timed()) for label in workers}
            for timed in kept.values():
                timed.blocks.append([])
                timed.clocks.append([])
            for order, warmup, iters in plans[shape, seed, cache].blocks(process):
                measured = {}
                for label in order:
                    block = workers[label].time(shape, warmup, iters, cache == COLD, rng.getrandbits(63))
                    require_right(label, block.wrong)
                    measured[label] = block
                slow = any([_too_slow(result.clocks, block.clocks) for block in measured.values()])
                for label, block in measured.items():
                    if slow:  # the pair is lost as a whole, or the sides would no longer be paired
                        kept[label].discarded += len(block.samples_us)
                    else:
                        kept[label].blocks[-1].append(block.samples_us)
                        kept[label].clocks[-1].append(block.clocks)
    for worker in workers.values():
        worker.finish(shape)


def _too_slow(seen: dict[str, float], now: Mapping[str, float]) -> bool:
    """Whether the SM clock has fallen too far; ``seen`` keeps the first, lowest and highest clock and temperature."""
    for name, value in now.items():
        seen.setdefault(f"{name}_first", value)
        seen[f"{name}_min"] = min(seen.get(f"{name}_min", value), value)
        seen[f"{name}_max"] = max(seen.get(f"{name}_max", value), value)
    return "sm_mhz" in now and now["sm_mhz"] < MIN_CLOCK_SHARE * seen["sm_mhz_first"]
