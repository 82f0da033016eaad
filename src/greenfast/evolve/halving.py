"""The race: candidates that are correct, timed in rounds against the baseline, all interleaved in one process.

Successive halving (Jamieson & Talwalkar 2016): all run a few blocks, the slower half leaves, the rest run twice as
many. What a race finds orders candidates, and is no claim: the process is one, the inputs are the search's, and the
best of many looks better than it is. The whole validation judges the finalists.
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
_MOST_ROUNDS = 4
_BASELINE = "baseline"


class CandidateTiming(msgspec.Struct, frozen=True, kw_only=True):
    """What a race found of one candidate.

    speedup: the baseline's time over its own, of paired blocks, the geometric mean over shapes. rounds: that it ran.
    us: the median of its blocks by shape. why: what was wrong with it; empty where nothing was.
    """

    speedup: float = 0.0
    rounds: int = 0
    us: dict[str, float] = {}
    why: str = ""
    stage: str = "race"


class HalvingResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a race found: of the candidates in the order in which they were given, and of the baseline by shape."""

    raced: list[CandidateTiming]
    baseline_us: dict[str, float] = {}
    clocks: dict[str, float] = {}


@dataclass
class _Runner:
    """One who takes part, and by shape its block medians: [block], None where it did not run."""

    side: BuiltSide
    digests: Mapping[tuple[str, int], str]
    blocks: dict[str, list[float | None]] = field(default_factory=dict)
    rounds: int = 0


def race(
    stages: Stages, candidates: Sequence[Candidate], seed: int, progress: Callable[[str], None] = lambda text: None
) -> HalvingResult:
    """Check each candidate on the GPU, and time those that are right. seed: of the orders.

    Raises MachineError where the baseline does not run.
    """
    runners: dict[str, _Runner] = {}
    wrong: dict[str, CandidateTiming] = {}
    for n, candidate in enumerate((None, *candidates)):
        label = str(n - 1) if n else _BASELINE
        progress(f"CORRECTNESS on the GPU: {n} of {len(candidates)}")
        found, side, digests = stages.on_gpu(candidate)
        if side is None:
            if not n:
                raise WorkerError(f"the baseline does not run on the GPU: {found.feedback}")
            wrong[label] = _wrong(found)
        else:
            runners[label] = _Runner(side, digests)
    clocks: dict[str, float] = {}
    while len(runners) > 1:
        for runner in runners.values():
            runner.blocks, runner.rounds = {}, 0
        try:
            _rounds(stages, runners, random.Random(seed), progress, clocks)
            break
        except _LostError as e:
            if e.label == _BASELINE:
                raise WorkerError(f"the baseline does not run on the GPU: {e}") from e
            wrong[e.label] = CandidateTiming(why=str(e))
            del runners[e.label]
    timed = {label: _timed(runner, runners[_BASELINE]) for label, runner in runners.items() if label != _BASELINE}
    return HalvingResult(
        raced=[timed.get(str(n)) or wrong[str(n)] for n in range(len(candidates))],
        baseline_us=_medians(runners[_BASELINE]),
        clocks=clocks,
    )


class _LostError(Exception):
    """One who takes part did not run, or did not leave what it should."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(why)
        self.label = label


def _wrong(found: StageResult) -> CandidateTiming:
    return CandidateTiming(why=found.feedback, stage=found.stage)


def _rounds(
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
                    raise _LostError(label, str(started.wrong))
                for seed, digest in zip(seeds, started.digests, strict=True):
                    if runner.digests.get((shape.name, seed), digest) != digest:
                        raise _LostError(label, "its first launch left other bits than the checked ones")
        for number in range(_MOST_ROUNDS):
            progress(f"round {number + 1}: {len(alive) - 1} candidates")
            for shape in request.shapes:
                floor = floor_of(request.device, least_work(problem, shape.dims), 0, cold=False)
                orders = balanced(alive, rng)
                for _ in range(_BLOCKS << number):
                    medians = {label: _block(worker, label, shape.name, rng, clocks) for label in next(orders)}
                    for label, us in medians.items():
                        if us < floor.us:
                            raise _LostError(label, f"{us:.3g} µs, but the device cannot do it under {floor}")
                    for label, runner in runners.items():
                        runner.blocks.setdefault(shape.name, []).append(medians.get(label))
            for label in alive:
                runners[label].rounds = number + 1
            if len(alive) <= 2:
                break
            contenders = [label for label in alive if label != _BASELINE]
            contenders.sort(key=lambda label: -_speedup(runners[label], runners[_BASELINE]))
            alive = [_BASELINE, *contenders[: -(-len(contenders) // 2)]]


def _block(worker: Worker, label: str, shape: str, rng: random.Random, clocks: dict[str, float]) -> float:
    """The median of one block in microseconds."""
    with attribute_crash_to(label):
        block = worker.time(
            f"{label}/{shape}", drawn_warmup(3, rng), _LAUNCHES + rng.randint(-3, 3), False, rng.getrandbits(63)
        )
    if block.wrong is not None:
        raise _LostError(label, str(block.wrong))
    for name, value in block.clocks.items():
        clocks[f"{name}_min"] = min(value, clocks.get(f"{name}_min", value))
        clocks[f"{name}_max"] = max(value, clocks.get(f"{name}_max", value))
    return statistics.median(block.samples_us)


class attribute_crash_to:  # noqa: N801
    """Names the one whose launch ended the process."""

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, WorkerError):
            raise _LostError(self._label, str(error)) from error


def _speedup(runner: _Runner, baseline: _Runner) -> float:
    """The geometric mean over shapes of the median ratio of paired blocks."""
    logs = []
    for shape, blocks in runner.blocks.items():
        pairs = zip(baseline.blocks[shape], blocks, strict=True)
        logs.append(float(np.median([np.log(a / b) for a, b in pairs if a is not None and b is not None])))
    return float(np.exp(np.mean(logs)))


def _medians(runner: _Runner) -> dict[str, float]:
    return {
        shape: round(statistics.median(us for us in blocks if us is not None), 3)
        for shape, blocks in runner.blocks.items()
    }


def _timed(runner: _Runner, baseline: _Runner) -> CandidateTiming:
    return CandidateTiming(speedup=round(_speedup(runner, baseline), 5), rounds=runner.rounds, us=_medians(runner))
