"""Time a batch: successive halving on each GPU, and a final between the GPUs' winners.

Halving interleaves the correct candidates with the baseline in one process. All candidates run a few blocks; the slower
half is dropped; the others run twice as many blocks (Jamieson & Talwalkar 2016). The result ranks candidates and is not
a claim: there is one process, its inputs are the search's, and the best of many candidates looks better than it
is. The finalists are validated separately.

On several GPUs, each halves its share with its own baseline, so no comparison mixes devices. Only speedups are used:
GPUs of one model differ by some per cent in time, and less in the ratio of two kernels' times. The final rescales the
shares: a winner gets its speedup from the final, and the other candidates of its share keep their ratio to it. If a GPU
is lost, its candidates are timed once more on another one.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from greenfast.device.worker import Worker, WorkerError
from greenfast.evolve.event_log import EventKey, Log
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.stages import Stages
from greenfast.evolve.workers import GpuName, GpuWorkers
from greenfast.judge.implementation import BuiltSide
from greenfast.judge.request import timed_seeds
from greenfast.judge.timing.interleaved import balanced, drawn_warmup
from greenfast.spec.errors import MachineError
from greenfast.spec.limits import compute_floor
from greenfast.spec.problem import least_work

_BLOCKS, _LAUNCHES, _WARMUP = 6, 12, 20
_MAX_ROUNDS = 4
_BASELINE = "baseline"
#: On how many GPUs a candidate is tried.
_TRIES = 2


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


def run_halving(stages: Stages, candidates: Sequence[Candidate], seed: int) -> tuple[HalvingResult, float]:
    """Check each candidate on the GPU, and time the correct ones; return the seconds that this took too.

    seed: of the order of launches.
    Raises WorkerError if the baseline does not run.
    """
    start = time.perf_counter()
    runners: dict[str, _Runner] = {}
    wrong: dict[str, CandidateTiming] = {}
    for n, candidate in enumerate((None, *candidates)):
        label = str(n - 1) if n else _BASELINE
        stages.progress(f"CORRECTNESS on the GPU: {n} of {len(candidates)}")
        result, side, digests = stages.on_gpu(candidate)
        if side is None:
            if not n:
                raise WorkerError(f"the baseline does not run on the GPU: {result.feedback}")
            wrong[label] = CandidateTiming(why=result.feedback, stage=result.stage)
        else:
            runners[label] = _Runner(side, digests)
    clocks: dict[str, float] = {}
    while len(runners) > 1:
        for runner in runners.values():
            runner.blocks, runner.rounds = {}, 0
        try:
            _run_rounds(stages, runners, random.Random(seed), clocks)
            break
        except _DroppedError as e:
            if e.label == _BASELINE:
                raise WorkerError(f"the baseline does not run on the GPU: {e}") from e
            wrong[e.label] = CandidateTiming(why=str(e))
            del runners[e.label]
    timed = {label: _make_timing(runner, runners[_BASELINE]) for label, runner in runners.items() if label != _BASELINE}
    halving = HalvingResult(
        raced=[timed.get(str(n)) or wrong[str(n)] for n in range(len(candidates))],
        baseline_us=_median_us(runners[_BASELINE]),
        clocks=clocks,
    )
    return halving, time.perf_counter() - start


class _DroppedError(Exception):
    """A kernel failed during the rounds, or its output differs from the checked one."""

    def __init__(self, label: str, why: str) -> None:
        super().__init__(why)
        self.label = label


def _run_rounds(stages: Stages, runners: Mapping[str, _Runner], rng: random.Random, clocks: dict[str, float]) -> None:
    request = stages.raced
    problem, fmt = stages.task.problem, request.format
    with request.make_worker() as worker:
        alive = list(runners)
        for shape in request.shapes:
            seeds = timed_seeds(request.seeds)
            cases = [problem.make_case(shape.dims, seed, fmt) for seed in seeds]
            for label, runner in runners.items():
                with _attribute_crash_to(label):
                    started = worker.prepare(
                        f"{label}/{shape.name}", runner.side.executable(shape.name), cases, _WARMUP, rng.getrandbits(63)
                    )
                if started.wrong is not None:
                    raise _DroppedError(label, str(started.wrong))
                for seed, digest in zip(seeds, started.digests, strict=True):
                    if runner.digests.get((shape.name, seed), digest) != digest:
                        raise _DroppedError(label, "its first launch wrote other bits than the checked run")
        for number in range(_MAX_ROUNDS):
            stages.progress(f"round {number + 1}: {len(alive) - 1} candidates")
            for shape in request.shapes:
                floor = compute_floor(request.device, least_work(problem, shape.dims), 0, cold=False)
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
    with _attribute_crash_to(label):
        block = worker.time(
            f"{label}/{shape}", drawn_warmup(3, rng), _LAUNCHES + rng.randint(-3, 3), False, rng.getrandbits(63)
        )
    if block.wrong is not None:
        raise _DroppedError(label, str(block.wrong))
    for name, value in block.clocks.items():
        clocks[f"{name}_min"] = min(value, clocks.get(f"{name}_min", value))
        clocks[f"{name}_max"] = max(value, clocks.get(f"{name}_max", value))
    return statistics.median(block.samples_us)


@contextlib.contextmanager
def _attribute_crash_to(label: str) -> Iterator[None]:
    """Convert a WorkerError into the _DroppedError of the kernel that ran."""
    try:
        yield
    except WorkerError as e:
        raise _DroppedError(label, str(e)) from e


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


class GpuRound(msgspec.Struct, frozen=True, kw_only=True):
    """A halving on one GPU.

    gpu: name of the GPU. candidates: indices in the batch. race: the timings; None if the GPU was lost. lost: the
    error.
    """

    gpu: str
    candidates: list[int]
    race: HalvingResult | None = None
    lost: str = ""


@dataclass(frozen=True)
class CandidateResult:
    """The result of timing one candidate of a batch.

    speedup: the rank among candidates; 0 after a failure. text: the speedup in words, or the failure. events: the log
    events it was computed from, each with its number of candidates; the last event decides.
    """

    speedup: float
    text: str
    stage: str
    events: tuple[tuple[str, EventKey, int], ...]


def _describe_timing(timing: CandidateTiming, event: tuple[str, EventKey, int]) -> CandidateResult:
    """Make the result of a candidate that was timed in one round."""
    text = f"{timing.speedup:.3f}x the baseline's speed in a race of {timing.rounds} round(s)"
    return CandidateResult(timing.speedup, timing.why or text, timing.stage, (event,))


class GpuRounds:
    """Times the batches of one run."""

    def __init__(
        self, log: Log, gpus: Sequence[GpuName], workers: GpuWorkers | None, seed: int, report: Callable[[str], None]
    ) -> None:
        """gpus: as in the log. workers: None without GPUs; then only rounds in the log can be read."""
        self._log, self._gpus, self._workers, self._seed, self._report = log, gpus, workers, seed, report

    def run(
        self, number: int, candidates: Sequence[Candidate], selected: Sequence[int]
    ) -> tuple[dict[int, CandidateResult], dict[str, float]]:
        """Return results by index in the batch, and the baseline's times by shape on the GPU of the deciding round.

        selected: indices of the candidates to time. Raises MachineError if this machine lacks the GPUs of the log, and
        WorkerError if all GPUs are lost.
        """
        # Shuffled: in a proposer's order one GPU could get all candidates that share a value.
        waiting = random.Random(f"{self._seed} deal {number}").sample(selected, len(selected))
        usable = list(range(len(self._gpus)))
        finished: dict[EventKey, GpuRound] = {}
        lost: dict[int, CandidateResult] = {}
        for attempt in range(_TRIES):
            shares = {slot: sorted(waiting[n :: len(usable)]) for n, slot in enumerate(usable[: len(waiting)])}
            keys: dict[int, EventKey] = {slot: (number, attempt, slot) for slot in shares}
            other_gpu_works = bool(finished) or len(usable) > len(shares)
            rounds = self._run_rounds("raced", keys, shares, candidates, other_gpu_works)
            finished |= {keys[slot]: r for slot, r in rounds.items() if r.race is not None}
            usable = [slot for slot in usable if slot not in rounds or rounds[slot].race is not None]
            failed = {keys[slot]: r for slot, r in rounds.items() if r.race is None}
            waiting = [n for r in failed.values() for n in r.candidates]
            for key, r in failed.items():
                text = f"the GPU that it raced on was lost, {_TRIES} times: {r.lost}"
                event = ("raced", key, len(r.candidates))
                lost |= {n: CandidateResult(0.0, text, "race", (event,)) for n in r.candidates}
            if not waiting:
                break
        results = {n: lost[n] for n in waiting}
        correct = {key: timings for key, r in finished.items() if (timings := _correct_timings(r))}
        winners = {key: max(timings, key=lambda n: timings[n].speedup) for key, timings in correct.items()}
        final = None
        if len(winners) > 1:
            first = min(key[-1] for key in finished)
            shares = {first: sorted(winners.values())}
            final = self._run_rounds("final", {first: (number,)}, shares, candidates, True)[first]
        for key, r in finished.items():
            results |= _rescale(key, r, winners.get(key), number, final)
        deciding = [r.race for r in (final, *finished.values()) if r is not None and r.race is not None]
        return results, dict(deciding[0].baseline_us) if deciding else {}

    def _run_rounds(
        self,
        kind: str,
        keys: Mapping[int, EventKey],
        shares: Mapping[int, list[int]],
        candidates: Sequence[Candidate],
        other_gpu_works: bool,
    ) -> dict[int, GpuRound]:
        """Run rounds at the same time; return them by GPU slot. The first ones may be in the log.

        kind: of their events. shares: indices of each GPU's candidates. other_gpu_works: if False, the loss of all
        these GPUs raises WorkerError and is not logged.
        """
        workers, start = self._workers, time.perf_counter()
        slots = list(shares)[self._log.count_pending(kind, list(keys.values())) :]
        if slots and (workers is None or [gpu.kind for gpu in workers.gpus] != [gpu.kind for gpu in self._gpus]):
            names = ", ".join(f"{gpu.name}: {gpu.kind}" for gpu in self._gpus)
            raise MachineError(f"this search races on the GPUs that it began with ({names}), and they are not here")
        waits: dict[int, Callable[[], tuple[HalvingResult, float]]] = {}
        for slot in slots:
            assert workers is not None
            seed = random.Random(f"{self._seed} race {keys[slot]}").getrandbits(53)
            job = functools.partial(run_halving, candidates=[candidates[n] for n in shares[slot]], seed=seed)
            waits[slot] = workers.workers.start(slot, job)
            self._report(f"races on GPU {', '.join(self._gpus[s].name for s in waits)}")

        @functools.cache
        def wait(slot: int) -> tuple[GpuRound, float]:
            gpu, share = self._gpus[slot].name, shares[slot]
            try:
                race, seconds = waits[slot]()
            except WorkerError as e:
                return GpuRound(gpu=gpu, candidates=share, lost=str(e)), time.perf_counter() - start
            return GpuRound(gpu=gpu, candidates=share, race=race), seconds

        def make(slot: int) -> GpuRound:
            gpu_round, _ = wait(slot)
            others = [*rounds.values(), *(wait(s)[0] for s in slots if gpu_round.race is None)]
            if not other_gpu_works and all(other.race is None for other in (gpu_round, *others)):
                raise WorkerError(f"no GPU is left to race on: {gpu_round.lost}")
            return gpu_round

        rounds: dict[int, GpuRound] = {}
        for slot, key in keys.items():
            run, seconds = functools.partial(make, slot), functools.partial(lambda s: wait(s)[1], slot)
            rounds[slot] = msgspec.convert(self._log.replay_or_run(kind, key, run, on_gpu=seconds), GpuRound)
        return rounds


def _correct_timings(gpu_round: GpuRound | None) -> dict[int, CandidateTiming]:
    if gpu_round is None or gpu_round.race is None:
        return {}
    return {n: t for n, t in zip(gpu_round.candidates, gpu_round.race.raced, strict=True) if not t.why}


def _rescale(
    key: EventKey, gpu_round: GpuRound, winner: int | None, number: int, final: GpuRound | None
) -> dict[int, CandidateResult]:
    """Return the results of a finished round, with speedups on the scale of the final."""
    assert gpu_round.race is not None
    event = ("raced", key, len(gpu_round.candidates))
    final_timing = _correct_timings(final).get(-1 if winner is None else winner)
    scale = 1.0
    if final_timing is not None and winner is not None:
        scale = final_timing.speedup / _correct_timings(gpu_round)[winner].speedup
    results = {}
    for n, timing in zip(gpu_round.candidates, gpu_round.race.raced, strict=True):
        result = _describe_timing(timing, event)
        if timing.why:
            results[n] = result
            continue
        text = f"{result.text} on GPU {gpu_round.gpu}"
        if n == winner and final is not None and final.race is not None:
            last = final.race.raced[final.candidates.index(n)]
            final_result = _describe_timing(last, ("final", (number,), len(final.candidates)))
            text = f"{final_result.text} in the final on GPU {final.gpu}; before it, {text}"
            results[n] = CandidateResult(last.speedup, text, last.stage, (event, *final_result.events))
            continue
        if final_timing is not None and final is not None:
            text += f", {timing.speedup * scale:.3f}x on the scale of the final on GPU {final.gpu}"
        results[n] = CandidateResult(timing.speedup * scale, text, result.stage, result.events)
    return results
