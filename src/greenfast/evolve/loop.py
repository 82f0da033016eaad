"""The loop: propose, tell duplicates, judge in stages, race, observe; then validate the best.

Every step that costs, or that could come out otherwise when it is repeated, goes through the log (``log.once``): a run
that is resumed walks the same way, finds what was logged, and goes on where it ended.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from greenfast.evolve.event_log import Log
from greenfast.evolve.finals import Verdict, judged
from greenfast.evolve.gpu_workers import GpuName, GpuWorkers
from greenfast.evolve.halving import HalvingResult, race
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.multi_gpu import CandidateResult, MultiGpuHalving, describe_timing
from greenfast.evolve.outcomes import duplicate, insight_of, joined, repeated, without_costs
from greenfast.evolve.proposal import (
    Candidate,
    Context,
    Evaluation,
    Insight,
    Proposer,
    ProposerError,
    select_best,
)
from greenfast.evolve.stages import StageResult, Stages
from greenfast.evolve.workers import Workers, job
from greenfast.judge.request import ProgressListener
from greenfast.spec.errors import UsageError

#: Of the GPU's budget, what the search may use; the rest is for the whole validation of the finalists.
SEARCH_SHARE = 0.6
#: After so many batches in a row without a new kernel the search ends.
STALE_BATCHES = 8
#: Of what the screen cuts, the share that goes on as a control.
CONTROL = 0.1


class SearchListener(ProgressListener, Protocol):
    """Whoever watches a search."""

    def batch(self, number: int, evaluations: Sequence[Evaluation], state: State) -> None:
        """A batch has ended."""

    def say(self, text: str) -> None:
        """What goes on now."""


@dataclass
class State:
    """What a run knows so far. ended: why it does not go on; empty before. gpus: that races spread over, if several."""

    gpus: list[GpuName] = field(default_factory=list)
    baseline: Evaluation | None = None
    baseline_us: float = 0.0
    history: list[Evaluation] = field(default_factory=list)
    verdicts: list[tuple[Evaluation, Verdict]] = field(default_factory=list)
    insights: list[Insight] = field(default_factory=list)
    ended: str = ""
    gpu_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def baseline_hash(self) -> str:
        """Of its machine code and launches."""
        return self.baseline.hash if self.baseline else ""

    @property
    def evaluations(self) -> int:
        """Kernels that were built and are no duplicates."""
        return sum(e.stage not in ("space", "duplicate") for e in self.history)

    @property
    def winner(self) -> tuple[Evaluation, Verdict] | None:
        """The finalist that passed with the largest lower end of its interval."""
        passed = [pair for pair in self.verdicts if pair[1].decision == "MERGE"]
        return max(passed, key=lambda pair: pair[1].low, default=None)


def build_archive(history: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """The best of each cell of behaviour, best first: busiest pipe, shared memory by doublings, registers by 32."""
    cells: dict[tuple[str, int, int], list[Evaluation]] = {}
    for e in history:
        if e.valid and e.fitness is not None and e.behaviour is not None:
            b = e.behaviour
            cells.setdefault((b.pipe, b.smem_bytes.bit_length(), b.registers // 32), []).append(e)
    best = [found for members in cells.values() if (found := select_best(members)) is not None]
    return tuple(sorted(best, key=lambda e: (e.fitness_kind != "seconds", e.fitness or math.inf)))


class Search:
    """One run in its folder."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        proposer: Proposer,
        stages: Stages,
        workers: Workers,
        watcher: SearchListener,
        insights: Sequence[Insight] = (),
        racers: GpuWorkers | None = None,
    ) -> None:
        """insights: measured ones of before, which proposers are told. racers: where there are several GPUs."""
        self._racers = racers
        self.folder, self.manifest, self.state = folder, manifest, State(insights=list(insights))
        self._proposer, self._stages, self._workers, self._watcher = proposer, stages, workers, watcher
        self._space = msgspec.structs.replace(manifest.space, regions=stages.sources.texts())

    def run(self) -> State:
        """Search until the budget is used, nothing is left to propose, or an error; then validate.

        Raises UsageError where the baseline does not pass, ProposerError, and MachineError; what was found before is in
        the log.
        """
        log = Log(self.folder)
        try:
            self._run(log)
        finally:
            log.close()
        return self.state

    def _run(self, log: Log) -> None:
        state, manifest = self.state, self.manifest
        if log.once("start", (), lambda: manifest.digest) != manifest.digest:
            raise UsageError(
                f"{self.folder}: its manifest differs from the one that its events were made with; "
                f"restore it, or begin a new run (it was begun by greenfast {manifest.package_version})"
            )
        gpus = [] if self._racers is None or log.replaying else list(self._racers.gpus)
        if gpus or log.next_is("gpus", ()):
            state.gpus = msgspec.convert(log.once("gpus", (), lambda: gpus), list[GpuName])
        exam_seed = random.Random(f"{manifest.seed} exam").randrange(10**7, 10**8)
        state.baseline = self._baseline(log, exam_seed)
        stale = 0
        for number in itertools.count():
            self._count(log)
            state.ended = self._over(stale)
            if state.ended:
                break
            evaluations = self._batch(log, number, exam_seed)
            if not evaluations:
                state.ended = "the proposer has nothing left to propose"
                break
            state.history += evaluations
            self._proposer.observe(evaluations)
            new = any(e.stage not in ("space", "duplicate") for e in evaluations)
            stale = 0 if new else stale + 1
            self._count(log)
            self._watcher.batch(number, evaluations, state)
        self._finals(log)
        self._count(log)
        log.once("ended", (), lambda: {"why": state.ended, "winner": state.winner[0].hash if state.winner else ""})

    def _count(self, log: Log) -> None:
        self.state.gpu_seconds, self.state.seconds = log.gpu_seconds, log.seconds

    def _over(self, stale: int) -> str:
        """Why the search ends here, or empty."""
        state, budget = self.state, self.manifest.budget
        if state.evaluations >= budget.evaluations:
            return f"all {budget.evaluations} evaluations are used"
        if budget.gpu_seconds is not None and state.gpu_seconds >= SEARCH_SHARE * budget.gpu_seconds:
            return f"{state.gpu_seconds:.0f} s of the GPU are used; the rest is for the finalists"
        if budget.seconds is not None and state.seconds >= budget.seconds:
            return f"{state.seconds:.0f} s are used"
        if stale >= STALE_BATCHES:
            return f"{stale} batches in a row brought no new kernel"
        return ""

    def _baseline(self, log: Log, exam_seed: int) -> Evaluation:
        built = self._found(log, "baseline built", (), None, "built")
        if built.valid:
            emulated = self._found(log, "baseline emulated", (), None, "emulated", exam_seed)
            built = joined(built, emulated)
        if not built.valid:
            raise UsageError(f"the baseline does not pass {built.stage}: {built.feedback}")
        name = self.manifest.baseline or self._stages.task.config.defaults.baseline
        return Evaluation(
            candidate=Candidate(parameters={}, origin=name),
            hash=built.hash,
            stage=built.stage,
            valid=True,
            fitness=built.estimate,
            fitness_kind="estimate" if built.estimate else "",
            behaviour=built.behaviour,
        )

    def _found(self, log: Log, what: str, at: tuple[int, ...], candidate: Candidate | None, *call: Any) -> StageResult:
        method, *more = call
        data = log.once(what, at, lambda: next(iter(self._workers.results([job(method, candidate, *more)]))))
        return msgspec.convert(data, StageResult)

    def _batch(self, log: Log, number: int, exam_seed: int) -> list[Evaluation]:
        state, manifest = self.state, self.manifest
        left = manifest.budget.evaluations - state.evaluations
        context = self._context(number, min(manifest.batch, left), left)
        proposed = log.once("proposed", (number,), lambda: self._proposed(context))
        candidates = msgspec.convert(proposed, list[Candidate])
        keys = [candidate.key for candidate in candidates]
        earlier = {e.candidate.key: e for e in reversed(state.history)}
        fresh = [n for n, key in enumerate(keys) if key not in earlier and keys.index(key) == n]
        found = self._all(log, "built", number, candidates, fresh)
        known = {e.hash: e for e in state.history if e.hash and e.stage != "duplicate"}
        first: dict[str, int] = {}
        for n, f in found.items():
            if f.valid and f.hash not in known and f.hash != state.baseline_hash:
                first.setdefault(f.hash, n)
        new = sorted(first.values())
        emulated = self._all(log, "emulated", number, candidates, new, exam_seed)
        for n, f in emulated.items():
            found[n] = joined(found[n], f)
        right = [n for n in new if found[n].valid]
        results, cut = self._race(log, number, candidates, found, right)
        of_batch = {
            n: self._evaluation(log, number, n, candidates[n], f, results.get(n), n in cut) for n, f in found.items()
        }
        of_hash = known | {of_batch[n].hash: of_batch[n] for n in new}
        for n, f in found.items():
            if f.valid and n not in new:
                of_batch[n] = duplicate(of_batch[n], of_hash.get(f.hash) or state.baseline)
        for n, (key, candidate) in enumerate(zip(keys, candidates, strict=True)):
            if n not in found:
                of_batch[n] = repeated(candidate, earlier.get(key) or of_batch[keys.index(key)])
        evaluations = [of_batch[n] for n in range(len(candidates))]
        log.once("evaluated", (number,), lambda: [without_costs(e) for e in evaluations])
        for n, e in enumerate(evaluations):
            if e.stage == "race":
                what, at, _ = results[n].events[-1]
                state.insights.append(insight_of(manifest.space, e, log.digest_of(what, at)))
        return evaluations

    def _context(self, number: int, wanted: int, left: int) -> Context:
        state, budget = self.state, self.manifest.budget
        return Context(
            space=self._space,
            task=self._stages.described(),
            wanted=wanted,
            seed=random.Random(f"{self.manifest.seed} {number}").getrandbits(53),
            baseline=state.baseline,
            history=tuple(state.history),
            archive=build_archive(state.history),
            insights=tuple(i for i in state.insights if i.record),
            evaluations_left=left,
            gpu_seconds_left=None if budget.gpu_seconds is None else max(0.0, budget.gpu_seconds - state.gpu_seconds),
        )

    def _proposed(self, context: Context) -> list[Candidate]:
        """What the proposer answers, cut off where it does not end."""
        self._watcher.say(f"{self.manifest.proposer} proposes")
        answer = self._proposer.propose(context)
        try:
            found = list(itertools.islice(answer, context.wanted))
            for candidate in found:
                if not isinstance(candidate, Candidate):
                    raise TypeError(f"a {type(candidate).__name__}")
            if msgspec.json.decode(msgspec.json.encode(found), type=list[Candidate]) != found:
                raise ValueError("JSON cannot hold them")
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            raise ProposerError(f"the proposer {self.manifest.proposer} answered with no candidates: {e}") from e
        return found

    def _all(
        self, log: Log, what: str, number: int, candidates: Sequence[Candidate], which: Iterable[int], *more: Any
    ) -> dict[int, StageResult]:
        """A stage for several candidates, of which the first ones may be in the log."""
        which = list(which)
        places = [(number, n) for n in which]
        jobs = [job(what, candidates[n], *more) for n in which[log.pending(what, places) :]]
        results = iter(self._workers.results(jobs))
        found: dict[int, StageResult] = {}
        for n, at in zip(which, places, strict=True):
            self._watcher.say(f"batch {number + 1}: {what} {len(found) + 1} of {len(which)}")
            found[n] = msgspec.convert(log.once(what, at, lambda: next(results)), StageResult)
        return found

    def _race(
        self, log: Log, number: int, candidates: Sequence[Candidate], found: dict[int, StageResult], right: list[int]
    ) -> tuple[dict[int, CandidateResult], set[int]]:
        """What the race found, and who was cut by the screen before it."""
        kept = right
        if self.manifest.screen < 1 and len(right) > 1:
            order = sorted(right, key=lambda n: found[n].estimate or math.inf)
            count = math.ceil(self.manifest.screen * len(order))
            rest = order[count:]
            rng = random.Random(f"{self.manifest.seed} screen {number}")
            kept = sorted([*order[:count], *rng.sample(rest, math.ceil(CONTROL * len(rest)))])
        cut = set(right) - set(kept)
        if not kept:
            return {}, cut
        if self.state.gpus:
            heats = MultiGpuHalving(log, self.state.gpus, self._racers, self.manifest.seed, self._watcher.say)
            results, baseline_us = heats.run(number, candidates, kept)
            self.state.baseline_us = self.state.baseline_us or sum(baseline_us.values())
            return results, cut
        event = ("raced", (number,), len(kept))
        if self._stages.gpu is None and not log.next_is(*event[:2]):
            return {}, cut
        seed = random.Random(f"{self.manifest.seed} race {number}").getrandbits(53)
        run: Callable[[], HalvingResult] = lambda: race(  # noqa: E731
            self._stages, [candidates[n] for n in kept], seed, self._watcher.say
        )
        found_race = msgspec.convert(log.once("raced", (number,), run, on_gpu=True), HalvingResult)
        self.state.baseline_us = self.state.baseline_us or sum(found_race.baseline_us.values())
        return {n: describe_timing(raced, event) for n, raced in zip(kept, found_race.raced, strict=True)}, cut

    def _evaluation(
        self,
        log: Log,
        batch: int,
        n: int,
        candidate: Candidate,
        f: StageResult,
        raced: CandidateResult | None,
        cut: bool,
    ) -> Evaluation:
        """All that was found out about one candidate."""
        costs = [log.cost_of(what, (batch, n)) for what in ("built", "emulated")]
        gpu = sum(log.cost_of(what, at).gpu_seconds / sharing for what, at, sharing in raced.events) if raced else 0.0
        evaluation = Evaluation(
            candidate=candidate,
            hash=f.hash,
            stage="screen" if cut else f.stage,
            valid=f.valid,
            fitness=f.estimate if f.valid else None,
            fitness_kind="estimate" if f.valid and f.estimate else "",
            behaviour=f.behaviour,
            feedback="the counts let others through" if cut else f.feedback,
            cost_seconds=round(sum(cost.seconds for cost in costs) + gpu, 3),
            gpu_seconds=round(gpu, 3),
        )
        if raced is None:
            return evaluation
        changes: dict[str, Any] = {"stage": raced.stage, "fitness": None, "fitness_kind": "", "feedback": raced.said}
        if raced.speedup:
            seconds = self.state.baseline_us / raced.speedup * 1e-6
            changes |= {"fitness": round(seconds, 12), "fitness_kind": "seconds"}
        else:
            changes["valid"] = False
        return msgspec.structs.replace(evaluation, **changes)

    def _finals(self, log: Log) -> None:
        """The whole validation of the best, as far as the GPU's budget goes."""
        state, manifest = self.state, self.manifest
        if self._stages.gpu is None and not log.next_is("validated", (0,)):
            return
        timed = sorted((e for e in state.history if _faster(e, state)), key=lambda e: e.fitness or math.inf)
        finalists = timed[: manifest.finalists]
        for n, e in enumerate(finalists):
            self._count(log)
            if manifest.budget.gpu_seconds is not None and state.gpu_seconds >= manifest.budget.gpu_seconds:
                state.ended += f"; the GPU's budget did not reach finalist {n + 1} of {len(finalists)}"
                break
            self._watcher.say(f"finalist {n + 1} of {len(finalists)}: the whole validation")
            run = functools.partial(judged, self._stages, e.candidate, len(finalists), self.folder, self._watcher)
            data = log.once("validated", (n,), run, on_gpu=True)
            state.verdicts.append((e, msgspec.convert(data, Verdict)))


def _faster(e: Evaluation, state: State) -> bool:
    """Whether a race found it faster than the baseline at all."""
    measured = e.valid and e.stage == "race" and e.fitness_kind == "seconds" and e.fitness is not None
    return bool(measured and e.fitness is not None and e.fitness * 1e6 < state.baseline_us)
