"""A batch's race on several GPUs: a heat on each, then a final between their winners on the first.

A heat is a whole race with its own baseline, and only speedups leave it: GPUs of one kind differ by some per cent in
time, and less in the ratio of two kernels' times. The final puts the heats on one scale: a winner has the speedup that
it had there, and the others of its heat keep their ratio to it. A GPU that is lost costs its candidates one more try on
another one.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from greenfast.device.worker import WorkerError
from greenfast.evolve.event_log import Log
from greenfast.evolve.gpu_workers import GpuName, GpuWorkers
from greenfast.evolve.halving import CandidateTiming, HalvingResult
from greenfast.evolve.proposal import Candidate
from greenfast.spec.errors import MachineError

_TRIES = 2
Place = tuple[int, ...]


class GpuRound(msgspec.Struct, frozen=True, kw_only=True):
    """A race on one of several GPUs.

    gpu: its name. candidates: their places in the batch. race: what it found of them; None where the GPU was lost, and
    ``lost`` says how.
    """

    gpu: str
    candidates: list[int]
    race: HalvingResult | None = None
    lost: str = ""


@dataclass(frozen=True)
class CandidateResult:
    """What a batch's race found of one candidate.

    speedup: by which candidates are ranked; 0 where something was wrong. said: the same in words, or what was wrong.
    events: those of the log that it is from, each with the number of candidates in it; the last one decided.
    """

    speedup: float
    said: str
    stage: str
    events: tuple[tuple[str, Place, int], ...]


def describe_timing(raced: CandidateTiming, event: tuple[str, Place, int]) -> CandidateResult:
    """Of a race that is the only one."""
    said = f"{raced.speedup:.3f}x the baseline's speed in a race of {raced.rounds} round(s)"
    return CandidateResult(raced.speedup, raced.why or said, raced.stage, (event,))


class MultiGpuHalving:
    """The races of one run."""

    def __init__(
        self, log: Log, gpus: Sequence[GpuName], racers: GpuWorkers | None, seed: int, say: Callable[[str], None]
    ) -> None:
        """gpus: of the log. racers: None where there are none here, so that what is in the log can be read only."""
        self._log, self._gpus, self._racers, self._seed, self._say = log, gpus, racers, seed, say

    def run(
        self, number: int, candidates: Sequence[Candidate], kept: Sequence[int]
    ) -> tuple[dict[int, CandidateResult], dict[str, float]]:
        """Results by place in the batch, and the baseline's times by shape on the GPU that had the last word.

        kept: the places of those who race. Raises MachineError where the GPUs of the log are not here, and WorkerError
        where all of them are lost.
        """
        # drawn: with parameters in a proposer's order, one GPU would have all that share a value
        waiting = random.Random(f"{self._seed} deal {number}").sample(kept, len(kept))
        usable = list(range(len(self._gpus)))
        ran: dict[Place, GpuRound] = {}
        lost: dict[int, CandidateResult] = {}
        for attempt in range(_TRIES):
            fields = {p: sorted(waiting[n :: len(usable)]) for n, p in enumerate(usable[: len(waiting)])}
            at: dict[int, Place] = {p: (number, attempt, p) for p in fields}
            spare = bool(ran) or len(usable) > len(fields)
            heats = self._heats("raced", at, fields, candidates, spare)
            ran |= {at[p]: heat for p, heat in heats.items() if heat.race is not None}
            usable = [p for p in usable if p not in heats or heats[p].race is not None]
            failed = {at[p]: heat for p, heat in heats.items() if heat.race is None}
            waiting = [n for heat in failed.values() for n in heat.candidates]
            for place, heat in failed.items():
                said = f"the GPU that it raced on was lost, {_TRIES} times: {heat.lost}"
                event = ("raced", place, len(heat.candidates))
                lost |= {n: CandidateResult(0.0, said, "race", (event,)) for n in heat.candidates}
            if not waiting:
                break
        results = {n: lost[n] for n in waiting}
        winners = {place: winner for place, heat in ran.items() if (winner := _winner(heat)) is not None}
        final = None
        if len(winners) > 1:
            first = min(place[-1] for place in ran)
            final = self._heats("final", {first: (number,)}, {first: sorted(winners.values())}, candidates, True)[first]
        for place, heat in ran.items():
            results |= _results(place, heat, winners.get(place), number, final)
        deciding = [heat.race for heat in (final, *ran.values()) if heat is not None and heat.race is not None]
        return results, dict(deciding[0].baseline_us) if deciding else {}

    def _heats(
        self,
        what: str,
        at: Mapping[int, Place],
        fields: Mapping[int, list[int]],
        candidates: Sequence[Candidate],
        spare: bool,
    ) -> dict[int, GpuRound]:
        """Heats at once, by the place of their GPU; the first ones may be in the log.

        spare: whether another GPU is known to work; else it is an error, and no event, that all of these are lost.
        """
        asked = list(fields)[self._log.pending(what, list(at.values())) :]
        run = functools.cache(self._started(asked, at, fields, candidates))
        heats: dict[int, GpuRound] = {}

        def make(place: int) -> GpuRound:
            heat, _ = run(place)
            others = [*heats.values(), *(run(p)[0] for p in asked if heat.race is None)]
            if not spare and all(other.race is None for other in (heat, *others)):
                raise WorkerError(f"no GPU is left to race on: {heat.lost}")
            return heat

        def seconds(place: int) -> float:
            return run(place)[1]

        for place, event in at.items():
            of_heat = functools.partial(make, place)
            data = self._log.once(what, event, of_heat, on_gpu=functools.partial(seconds, place))
            heats[place] = msgspec.convert(data, GpuRound)
        return heats

    def _started(
        self,
        asked: Sequence[int],
        at: Mapping[int, Place],
        fields: Mapping[int, list[int]],
        candidates: Sequence[Candidate],
    ) -> Callable[[int], tuple[GpuRound, float]]:
        """Begin the heats that are asked for; gives what waits for one of them, and its seconds."""
        racers = self._racers
        if asked and (racers is None or [gpu.kind for gpu in racers.gpus] != [gpu.kind for gpu in self._gpus]):
            names = ", ".join(f"{gpu.name}: {gpu.kind}" for gpu in self._gpus)
            raise MachineError(f"this search races on the GPUs that it began with ({names}), and they are not here")
        waits: dict[int, Callable[[], tuple[HalvingResult, float]]] = {}
        for place in asked:
            seed = random.Random(f"{self._seed} race {at[place]}").getrandbits(53)
            assert racers is not None
            waits[place] = racers.start(place, [candidates[n] for n in fields[place]], seed)
            self._say(f"races on GPU {', '.join(self._gpus[p].name for p in waits)}")
        start = time.perf_counter()

        def run(place: int) -> tuple[GpuRound, float]:
            gpu, which = self._gpus[place].name, fields[place]
            try:
                found, seconds = waits[place]()
            except WorkerError as e:
                return GpuRound(gpu=gpu, candidates=which, lost=str(e)), time.perf_counter() - start
            return GpuRound(gpu=gpu, candidates=which, race=found), seconds

        return run


def _winner(heat: GpuRound) -> int | None:
    """Who was fastest; None where nobody was right."""
    right = _right(heat)
    return max(right, key=lambda n: right[n].speedup, default=None)


def _right(heat: GpuRound | None) -> dict[int, CandidateTiming]:
    if heat is None or heat.race is None:
        return {}
    return {n: raced for n, raced in zip(heat.candidates, heat.race.raced, strict=True) if not raced.why}


def _results(
    place: Place, heat: GpuRound, winner: int | None, number: int, final: GpuRound | None
) -> dict[int, CandidateResult]:
    """Of all who were in a heat that ran."""
    assert heat.race is not None
    event = ("raced", place, len(heat.candidates))
    decided = _right(final).get(-1 if winner is None else winner)
    scale = decided.speedup / _right(heat)[winner].speedup if decided is not None and winner is not None else 1.0
    found = {}
    for n, raced in zip(heat.candidates, heat.race.raced, strict=True):
        plain = describe_timing(raced, event)
        if raced.why:
            found[n] = plain
            continue
        said = f"{plain.said} on GPU {heat.gpu}"
        if n == winner and final is not None and final.race is not None:
            last = final.race.raced[final.candidates.index(n)]
            of_final = describe_timing(last, ("final", (number,), len(final.candidates)))
            said = f"{of_final.said} in the final on GPU {final.gpu}; before it, {said}"
            found[n] = CandidateResult(last.speedup, said, last.stage, (event, *of_final.events))
            continue
        if decided is not None and final is not None:
            said += f", {raced.speedup * scale:.3f}x on the scale of the final on GPU {final.gpu}"
        found[n] = CandidateResult(raced.speedup * scale, said, plain.stage, plain.events)
    return found
