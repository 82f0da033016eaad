"""Successive halving: time correct candidates in rounds against the baseline, interleaved in one process.

All candidates run a few blocks; the slower half is dropped; the others run twice as many blocks (Jamieson & Talwalkar
2016). The result ranks candidates and is not a claim: there is one process, its inputs are those of the search, and the
best of many candidates looks better than it is. The finalists are validated separately.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from greenfast.device.worker import Worker, WorkerError
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.stages import StageResult, Stages
from greenfast.judge.gates.performance import timed_seeds
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.timing.floor import floor_of
from greenfast.judge.timing.orders import balanced, drawn_warmup
from greenfast.spec.problem import least_work

_BLOCKS, _LAUNCHES, _WARMUP = 6, 12, 20
_MAX_ROUNDS = 4
_BASELINE = "baseline"


class CandidateTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The timing of one candidate.

    speedup: baseline time / candidate time of paired blocks, geometric mean over shapes. rounds: rounds that it ran.
    us: median of its blocks, by shape. why: the reason of its failure; empty for a valid timing.
    """

    speedup: float = 0.0
    rounds: int = 0
    us: dict[str, float] = {}
    why: str = ""
    stage: str = "race"


class HalvingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The timings of a batch.

    raced: per candidate, in the batch's order. baseline_us: the baseline's median by shape.
    """

    raced: list[CandidateTiming]
    baseline_us: dict[str, float] = {}
    clocks: dict[str, float] = {}


@dataclass
class _Runner:
    """A kernel in the rounds. blocks: its block medians by shape; None for a block in which it did not run."""

    side: BuiltSide
    digests: Mapping[tuple[str, int], str]
    blocks: dict[str, list[float | None]] = field(default_factory=dict)
    rounds: int = 0


def run_halving(
    stages: Stages, candidates: Sequence[Candidate], seed: int, progress: Callable[[str], None] = lambda text: None
) -> HalvingResult:
    """Check each candidate on the GPU, and time the correct ones. seed: of the order of launches.

    Raises WorkerError if the baseline does not run.
    """
    runners: dict[str, _Runner] = {}
    wrong: dict[str, CandidateTiming] = {}
    for n, candidate in enumerate((None, *candidates)):
        label = str(n - 1) if n else _BASELINE
        progress(f"CORRECTNESS on the GPU: {n} of {len(candidates)}")
        result, side, digests = stages.on_gpu(candidate)
        if side is None:
            if not n:
                raise WorkerError(f"the baseline does not run on the GPU: {result.feedback}")
            wrong[label] = _failed(result)
        else:
            runners[label] = _Runner(side, digests)
    clocks: dict[str, float] = {}
    while len(runners) > 1:
        for runner in runners.values():
            runner.blocks, runner.rounds = {}, 0
        try:
            _run_rounds(stages, runners, random.Random(seed), progress, clocks)
            break
        except _DroppedError as e:
            if e.label == _BASELINE:
                raise WorkerError(f"the baseline does not run on the GPU: {e}") from e
            wrong[e.label] = CandidateTiming(why=str(e))
            del runners[e.label]
    timed = {label: _make_timing(runner, runners[_BASELINE]) for label, runner in runners.items() if label != _BASELINE}
    return HalvingResult(
        raced=[timed.get(str(n)) or wrong[str(n)] for n in range(len(candidates))],
        baseline_us=_median_us(runners[_BASELINE]),
        clocks=clocks,
    )


class _DroppedError(Exception):
    """A kernel failed during the rounds, or its output differs from the checked one."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(why)
        self.label = label


def _failed(result: StageResult) -> CandidateTiming:
    return CandidateTiming(why=result.feedback, stage=result.stage)


def _run_rounds(
    stages: Stages,
    runners: Mapping[str, _Runner],
    rng: random.Random,
    progress: Callable[[str], None],
    clocks: dict[str, float],
) -> None:
    request = stages.raced
    problem, fmt = stages.task.problem, request.format
    with request.make_worker() as worker:
        alive = list(runners)
        for shape in request.shapes:
            seeds = timed_seeds(request.seeds)
            cases = [problem.make_case(shape.dims, seed, fmt) for seed in seeds]
            for label, runner in runners.items():
                with attribute_crash_to(label):
                    started = worker.prepare(
                        f"{label}/{shape.name}", runner.side.executable(shape.name), cases, _WARMUP, rng.getrandbits(63)
                    )
                if started.wrong is not None:
                    raise _DroppedError(label, str(started.wrong))
                for seed, digest in zip(seeds, started.digests, strict=True):
                    if runner.digests.get((shape.name, seed), digest) != digest:
                        raise _DroppedError(label, "its first launch wrote other bits than the checked run")
        for number in range(_MAX_ROUNDS):
            progress(f"round {number + 1}: {len(alive) - 1} candidates")
            for shape in request.shapes:
                floor = floor_of(request.device, least_work(problem, shape.dims), 0, cold=False)
                orders = balanced(alive, rng)
                for _ in range(_BLOCKS << number):
                    medians = {label: _time_block(worker, label, shape.name, rng, clocks) for label in next(orders)}
                    for label, us in medians.items():
                        if us < floor.us:
                            raise _DroppedError(label, f"{us:.3g} µs, but the device cannot do it under {floor}")
                    for label, runner in runners.items():
                        runner.blocks.setdefault(shape.name, []).append(medians.get(label))
            for label in alive:
                runners[label].rounds = number + 1
            if len(alive) <= 2:
                break
            ranked = [label for label in alive if label != _BASELINE]
            ranked.sort(key=lambda label: -_mean_speedup(runners[label], runners[_BASELINE]))
            alive = [_BASELINE, *ranked[: -(-len(ranked) // 2)]]


def _time_block(worker: Worker, label: str, shape: str, rng: random.Random, clocks: dict[str, float]) -> float:
    """Time one block; return its median in microseconds."""
    with attribute_crash_to(label):
        block = worker.time(
            f"{label}/{shape}", drawn_warmup(3, rng), _LAUNCHES + rng.randint(-3, 3), False, rng.getrandbits(63)
        )
    if block.wrong is not None:
        raise _DroppedError(label, str(block.wrong))
    for name, value in block.clocks.items():
        clocks[f"{name}_min"] = min(value, clocks.get(f"{name}_min", value))
        clocks[f"{name}_max"] = max(value, clocks.get(f"{name}_max", value))
    return statistics.median(block.samples_us)


class attribute_crash_to:  # noqa: N801
    """Convert a WorkerError into the _DroppedError of the kernel that ran."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, WorkerError):
            raise _DroppedError(self._label, str(error)) from error


def _mean_speedup(runner: _Runner, baseline: _Runner) -> float:
    """Return the geometric mean over shapes of the median ratio of paired blocks."""
    logs = []
    for shape, blocks in runner.blocks.items():
        pairs = zip(baseline.blocks[shape], blocks, strict=True)
        logs.append(float(np.median([np.log(a / b) for a, b in pairs if a is not None and b is not None])))
    return float(np.exp(np.mean(logs)))


def _median_us(runner: _Runner) -> dict[str, float]:
    return {
        shape: round(statistics.median(us for us in blocks if us is not None), 3)
        for shape, blocks in runner.blocks.items()
    }


def _make_timing(runner: _Runner, baseline: _Runner) -> CandidateTiming:
    return CandidateTiming(
        speedup=round(_mean_speedup(runner, baseline), 5), rounds=runner.rounds, us=_median_us(runner)
    )
