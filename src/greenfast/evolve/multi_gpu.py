"""Time a batch on several GPUs: a round on each GPU, then a final round between the winners on the first GPU.

A round is a whole successive halving with its own baseline. Only its speedups are used: GPUs of one model differ by
some per cent in time, and less in the ratio of two kernels' times. The final rescales the rounds: a winner gets its
speedup from the final, and the other candidates of its round keep their ratio to it. If a GPU is lost, its candidates
are timed once more on another GPU.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from greenfast.device.worker import WorkerError
from greenfast.evolve.event_log import EventKey, Log
from greenfast.evolve.gpu_workers import GpuName, GpuWorkers, TimedHalving
from greenfast.evolve.halving import CandidateTiming, HalvingResult
from greenfast.evolve.proposal import Candidate
from greenfast.spec.errors import MachineError

_TRIES = 2


class GpuRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round on one of several GPUs.

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


def describe_timing(timing: CandidateTiming, event: tuple[str, EventKey, int]) -> CandidateResult:
    """Make the result of a candidate that was timed in one round."""
    text = f"{timing.speedup:.3f}x the baseline's speed in a race of {timing.rounds} round(s)"
    return CandidateResult(timing.speedup, timing.why or text, timing.stage, (event,))


class MultiGpuHalving:
    """Times the batches of one run on several GPUs."""

    def __init__(
        self,
        log: Log,
        gpus: Sequence[GpuName],
        workers: GpuWorkers | None,
        seed: int,
        report: Callable[[str], None],
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
        winners = {key: winner for key, r in finished.items() if (winner := _find_winner(r)) is not None}
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
        slots = list(shares)[self._log.count_pending(kind, list(keys.values())) :]
        wait = functools.cache(self._start_rounds(slots, keys, shares, candidates))
        rounds: dict[int, GpuRound] = {}

        def make(slot: int) -> GpuRound:
            gpu_round, _ = wait(slot)
            others = [*rounds.values(), *(wait(s)[0] for s in slots if gpu_round.race is None)]
            if not other_gpu_works and all(other.race is None for other in (gpu_round, *others)):
                raise WorkerError(f"no GPU is left to race on: {gpu_round.lost}")
            return gpu_round

        def seconds(slot: int) -> float:
            return wait(slot)[1]

        for slot, key in keys.items():
            data = self._log.replay_or_run(
                kind, key, functools.partial(make, slot), on_gpu=functools.partial(seconds, slot)
            )
            rounds[slot] = msgspec.convert(data, GpuRound)
        return rounds

    def _start_rounds(
        self,
        slots: Sequence[int],
        keys: Mapping[int, EventKey],
        shares: Mapping[int, list[int]],
        candidates: Sequence[Candidate],
    ) -> Callable[[int], tuple[GpuRound, float]]:
        """Start the rounds of these GPUs; return a function that waits for one of them and returns its seconds too."""
        workers = self._workers
        if slots and (workers is None or [gpu.kind for gpu in workers.gpus] != [gpu.kind for gpu in self._gpus]):
            names = ", ".join(f"{gpu.name}: {gpu.kind}" for gpu in self._gpus)
            raise MachineError(f"this search races on the GPUs that it began with ({names}), and they are not here")
        waits: dict[int, Callable[[], TimedHalving]] = {}
        for slot in slots:
            seed = random.Random(f"{self._seed} race {keys[slot]}").getrandbits(53)
            assert workers is not None
            waits[slot] = workers.start(slot, [candidates[n] for n in shares[slot]], seed)
            self._report(f"races on GPU {', '.join(self._gpus[s].name for s in waits)}")
        start = time.perf_counter()

        def wait(slot: int) -> tuple[GpuRound, float]:
            gpu, share = self._gpus[slot].name, shares[slot]
            try:
                result, seconds = waits[slot]()
            except WorkerError as e:
                return GpuRound(gpu=gpu, candidates=share, lost=str(e)), time.perf_counter() - start
            return GpuRound(gpu=gpu, candidates=share, race=result), seconds

        return wait


def _find_winner(gpu_round: GpuRound) -> int | None:
    """Return the index of the fastest candidate; None if none is correct."""
    timings = _correct_timings(gpu_round)
    return max(timings, key=lambda n: timings[n].speedup, default=None)


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
        result = describe_timing(timing, event)
        if timing.why:
            results[n] = result
            continue
        text = f"{result.text} on GPU {gpu_round.gpu}"
        if n == winner and final is not None and final.race is not None:
            last = final.race.raced[final.candidates.index(n)]
            final_result = describe_timing(last, ("final", (number,), len(final.candidates)))
            text = f"{final_result.text} in the final on GPU {final.gpu}; before it, {text}"
            results[n] = CandidateResult(last.speedup, text, last.stage, (event, *final_result.events))
            continue
        if final_timing is not None and final is not None:
            text += f", {timing.speedup * scale:.3f}x on the scale of the final on GPU {final.gpu}"
        results[n] = CandidateResult(timing.speedup * scale, text, result.stage, result.events)
    return results
