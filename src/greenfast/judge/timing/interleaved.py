"""Time several kernels in interleaved blocks of random order, each in a separate process, over fresh processes.

See docs/measurement.md for why. Sequential windows mostly find identical kernels different; blocks that
alternate in random order see the same drift, and fresh processes show what one process's memory layout hides.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from greenfast.device.gpu import Executable
from greenfast.device.session import RunResult
from greenfast.device.worker import Worker
from greenfast.judge.task import Timing
from greenfast.spec.problem import Case

#: What lies in the L2 cache when a timed launch starts: the previous launch's data, or nothing of it.
WARM, COLD = "warm", "cold"
METHOD = "event pair per launch, queue kept full"

#: A block measured below this share of the SM clock that the run started with is discarded.
MIN_CLOCK_SHARE = 0.75
#: Untimed launches before each block: the device has just switched to this process.
_BLOCK_WARMUP = 5


#: Shape name -> what is launched for it.
Programs: TypeAlias = Mapping[str, Executable]


@dataclass(frozen=True)
class Cell:
    """One (shape, seed) to be timed."""

    shape: str
    seed: int
    case: Case


@dataclass
class Timed:
    """One label's samples on one (cell, cache): microseconds as [process][block][launch]."""

    blocks: list[list[list[float]]] = field(default_factory=list)
    discarded: int = 0

    @property
    def samples(self) -> list[float]:
        """All kept launches in order."""
        return [t for process in self.blocks for block in process for t in block]

    @property
    def medians(self) -> list[list[float]]:
        """Block medians, [process][block]."""
        return [[float(np.median(block)) for block in process] for process in self.blocks]


@dataclass
class Measurement:
    """All samples by (label, shape, seed, cache), what the last launches left, and the clocks seen."""

    timed: dict[tuple[str, str, int, str], Timed] = field(default_factory=dict)
    finals: dict[tuple[str, str, int], list[RunResult]] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)


def measure(
    programs: Mapping[str, Programs],
    cells: Sequence[Cell],
    timing: Timing,
    make_worker: Callable[[], Worker],
    progress: Callable[[float, str], None],
    *,
    caches: Sequence[str] = (WARM, COLD),
    order_seed: int = 0,
) -> Measurement:
    """Time every label's kernel on every cell.

    programs: label -> shape name -> program. Two labels may hold the same program (an A/A comparison).
    timing: how many processes, blocks and launches; block b of one label is paired with block b of the others.
    Raises WorkerError where a kernel crashes, hangs or fails.
    """
    result = Measurement()
    shuffler = random.Random(order_seed)
    launches = iter(_spread(timing.timed_iters, timing.blocks))
    blocks = [[max(1, next(launches)) for _ in range(n)] for n in _spread(timing.blocks, timing.processes)]
    steps, step = timing.processes * len(cells), 0
    for process in range(timing.processes):
        with contextlib.ExitStack() as stack:
            workers = {label: stack.enter_context(make_worker()) for label in programs}
            for cell in cells:
                progress(step / steps, f"process {process + 1}/{timing.processes}: {cell.shape} seed {cell.seed}")
                step += 1
                _time_cell(result, workers, programs, cell, timing, caches, blocks[process], shuffler)
    return result


def _spread(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` whole numbers that differ by at most one."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _time_cell(
    result: Measurement,
    workers: Mapping[str, Worker],
    programs: Mapping[str, Programs],
    cell: Cell,
    timing: Timing,
    caches: Sequence[str],
    blocks: Sequence[int],
    shuffler: random.Random,
) -> None:
    """One cell in one set of processes: prepare every label, time the blocks, keep what the last launches left.

    blocks: the launches of each block.
    """
    key = f"{cell.shape}/{cell.seed}"
    labels = list(workers)
    for label in labels:
        workers[label].prepare(key, programs[label][cell.shape], cell.case, timing.warmup_iters)
    for cache in caches:
        kept = {label: result.timed.setdefault((label, cell.shape, cell.seed, cache), Timed()) for label in labels}
        for timed in kept.values():
            timed.blocks.append([])
        for iters in blocks:
            order = shuffler.sample(labels, len(labels))
            measured = {label: workers[label].time(key, _BLOCK_WARMUP, iters, cache == COLD) for label in order}
            slow = any(_too_slow(result.clocks, block.clocks) for block in measured.values())
            for label, block in measured.items():
                if slow:  # the pair is lost as a whole, or the sides would no longer be paired
                    kept[label].discarded += len(block.samples_us)
                else:
                    kept[label].blocks[-1].append(block.samples_us)
    for label in labels:
        result.finals.setdefault((label, cell.shape, cell.seed), []).append(workers[label].finish(key))


def _too_slow(seen: dict[str, float], now: Mapping[str, float]) -> bool:
    """Whether the SM clock has fallen too far; ``seen`` keeps the first, lowest and highest clock and temperature."""
    for name, value in now.items():
        seen.setdefault(f"{name}_first", value)
        seen[f"{name}_min"] = min(seen.get(f"{name}_min", value), value)
        seen[f"{name}_max"] = max(seen.get(f"{name}_max", value), value)
    return "sm_mhz" in now and now["sm_mhz"] < MIN_CLOCK_SHARE * seen["sm_mhz_first"]
