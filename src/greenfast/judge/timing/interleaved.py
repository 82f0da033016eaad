"""Time several kernels in interleaved blocks of balanced order, each in a separate process, over fresh processes.

docs/measurement.md gives the reasons. Sequential windows find differences between identical kernels, because clocks
drift. Blocks in random order have the same drift. Fresh processes average over the memory layouts of processes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np

from greenfast.device.session import Executable, WrongLaunch
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.task import Timing
from greenfast.spec.problem import Case

Label = TypeVar("Label")


def williams(n: int) -> list[tuple[int, ...]]:
    """Return orders of n things: each is equally often at each place and right after each other one (Williams 1949).

    n orders if n is even, else 2 n; the first n alone have each thing at each place once.
    """
    # 0, n-1, 1, n-2, ...: the differences of neighbours are all different
    first = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    square = [tuple((place + row) % n for place in first) for row in range(n)]
    return square if n % 2 == 0 or n == 1 else square + [order[::-1] for order in square]


def balanced(labels: Sequence[Label], rng: random.Random) -> Iterator[tuple[Label, ...]]:
    """Yield random orders without end; over any number of them, places and neighbours are as even as they can be.

    One Williams design follows another, each with the labels in another order and its rows shuffled.
    """
    n = len(labels)
    while True:
        named = rng.sample(list(labels), n)
        design = williams(n)
        for square in (design[:n], design[n:]):
            for order in rng.sample(square, len(square)):
                yield tuple(named[i] for i in order)


def drawn_sizes(total: int, blocks: int, rng: random.Random) -> list[int]:
    """Draw the launches of each block: ``total`` in all, each block within a third of the others' mean, at least 1."""
    sizes = [max(1, total // blocks + (i < total % blocks)) for i in range(blocks)]
    order = rng.sample(range(blocks), blocks)
    for i, j in zip(order[::2], order[1::2], strict=False):
        shift = min(sizes[i], sizes[j]) // 3
        change = rng.randint(-shift, shift)
        sizes[i], sizes[j] = sizes[i] + change, sizes[j] - change
    return sizes


def drawn_warmup(least: int, rng: random.Random) -> int:
    """Draw the number of warm-up launches: at least ``least``, at most half as many more."""
    return least + rng.randint(0, max(1, least // 2))


#: State of the L2 cache at the start of a timed launch: it holds the inputs, or nothing of them.
WARM, COLD = "warm", "cold"
METHOD = "event pair per launch, queue kept full, inputs and addresses drawn, every launch checked"

#: A block measured below this share of the SM clock that the run started with is discarded.
MIN_CLOCK_SHARE = 0.75
#: Untimed launches before each block: the device has just switched to this process.
_BLOCK_WARMUP = 5


#: Shape name -> program.
Programs: TypeAlias = Mapping[str, Executable]


@dataclass(frozen=True)
class Cell:
    """One shape to be timed. cases: by seed; each launch draws one. seeds: the seeds that get blocks of launches."""

    shape: str
    cases: Mapping[int, Case]
    seeds: Sequence[int]


@dataclass
class Timed:
    """One label's samples for one (shape, seed, cache), in microseconds: [process][block][launch].

    clocks: readings of each block, [process][block]. discarded: number of launches in blocks at a low clock.
    """

    blocks: list[list[list[float]]] = field(default_factory=list)
    clocks: list[list[dict[str, float]]] = field(default_factory=list)
    discarded: int = 0

    @property
    def samples(self) -> list[float]:
        """All launches in order, without discarded blocks."""
        return [t for process in self.blocks for block in process for t in block]

    @property
    def medians(self) -> list[list[float]]:
        """Block medians, [process][block]."""
        return [[float(np.median(block)) for block in process] for process in self.blocks]

    def read(self, name: str) -> list[list[float]]:
        """Return the readings of a clock, [process][block]; empty if a block has none."""
        if not all(name in clocks for process in self.clocks for clocks in process):
            return []
        return [[clocks[name] for clocks in process] for process in self.clocks]


@dataclass
class Measurement:
    """All samples by (label, shape, seed, cache).

    order_seed: seed of all random draws. digests: digests of the first outputs in each process, by (label, shape,
    seed). clocks: first, lowest and highest readings.
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
    order_seed: seed of all draws: the order of labels, the sizes of blocks and warm-ups, and the launches' cases and
    addresses.
    Raises WorkerError if a kernel crashes, hangs or fails, or if a launch writes other bits than the first launch of
    its case.
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
    """The random draws of one (shape, seed, cache): over all processes, so that the orders are balanced."""

    def __init__(self, labels: Sequence[str], timing: Timing, rng: random.Random) -> None:
        self._rng = rng
        self._orders = balanced(labels, rng)
        sizes = drawn_sizes(timing.timed_iters, timing.blocks, rng)
        self._sizes = [sizes[process :: timing.processes] for process in range(timing.processes)]

    def blocks(self, process: int) -> Iterator[tuple[tuple[str, ...], int, int]]:
        """Yield the order of the labels, the warm-up launches and the timed launches of each block of a process."""
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
            timed_by_label = {label: result.timed.setdefault((label, shape, seed, cache), Timed()) for label in workers}
            for timed in timed_by_label.values():
                timed.blocks.append([])
                timed.clocks.append([])
            for order, warmup, iters in plans[shape, seed, cache].blocks(process):
                measured = {}
                for label in order:
                    block = workers[label].time(shape, warmup, iters, cache == COLD, rng.getrandbits(63))
                    require_right(label, block.wrong)
                    measured[label] = block
                slow = any([_update_clocks(result.clocks, block.clocks) for block in measured.values()])
                for label, block in measured.items():
                    if slow:  # for all labels, so that blocks stay paired
                        timed_by_label[label].discarded += len(block.samples_us)
                    else:
                        timed_by_label[label].blocks[-1].append(block.samples_us)
                        timed_by_label[label].clocks[-1].append(block.clocks)
    for worker in workers.values():
        worker.finish(shape)


def _update_clocks(seen: dict[str, float], now: Mapping[str, float]) -> bool:
    """Update the first, lowest and highest readings. Return whether the SM clock is too low for a valid block."""
    for name, value in now.items():
        seen.setdefault(f"{name}_first", value)
        seen[f"{name}_min"] = min(seen.get(f"{name}_min", value), value)
        seen[f"{name}_max"] = max(seen.get(f"{name}_max", value), value)
    return "sm_mhz" in now and now["sm_mhz"] < MIN_CLOCK_SHARE * seen["sm_mhz_first"]
