"""The search loop: propose, remove duplicates, check in stages, time, observe; then validate the finalists.

Every costly or non-deterministic step goes through ``log.replay_or_run``. A resumed run repeats the loop, reads logged
steps from the log, and continues after the last one.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from greenfast.evolve.event_log import Log
from greenfast.evolve.halving import CandidateResult, GpuRounds
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.proposal import (
    Candidate,
    Context,
    Evaluation,
    Insight,
    Proposer,
    ProposerError,
    build_archive,
    describe,
)
from greenfast.evolve.space import Space
from greenfast.evolve.stages import StageResult, Stages, Verdict, validate_finalist
from greenfast.evolve.workers import GpuName, GpuWorkers, Workers
from greenfast.judge.request import ProgressListener
from greenfast.spec.errors import UsageError

#: The search's share of the GPU budget; the rest is for the validation of the finalists.
SEARCH_SHARE = 0.6
#: The search ends after this many consecutive batches without a new kernel.
STALE_BATCHES = 8
#: Share of the candidates below the screen that is timed anyway, as a control.
CONTROL = 0.1


class SearchListener(ProgressListener, Protocol):
    """Callbacks for the progress of a search."""

    def batch(self, number: int, evaluations: Sequence[Evaluation], state: State) -> None:
        """Report a finished batch."""

    def say(self, text: str) -> None:
        """Report the current step."""


@dataclass
class State:
    """The state of a run.

    ended: the reason of its end, empty before. gpus: the GPUs that time candidates.
    """

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
    def evaluations(self) -> int:
        """Number of built kernels without duplicates."""
        return sum(e.stage not in ("space", "duplicate") for e in self.history)

    @property
    def winner(self) -> tuple[Evaluation, Verdict] | None:
        """The passed finalist with the largest lower bound of its interval."""
        passed = [pair for pair in self.verdicts if pair[1].decision == "MERGE"]
        return max(passed, key=lambda pair: pair[1].low, default=None)


class Search:
    """One run in its folder."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        proposer: Proposer,
        stages: Stages,
        workers: Workers,
        listener: SearchListener,
        insights: Sequence[Insight] = (),
        gpu_workers: GpuWorkers | None = None,
    ) -> None:
        """insights: of earlier runs, for the proposer. gpu_workers: None without a GPU."""
        self._gpu_workers = gpu_workers
        self.folder, self.manifest, self.state = folder, manifest, State(insights=list(insights))
        self._proposer, self._stages, self._workers, self._listener = proposer, stages, workers, listener
        self._space = msgspec.structs.replace(manifest.space, regions=stages.sources.texts())

    def run(self) -> State:
        """Search until the budget is used or nothing is left to propose; then validate the finalists.

        Raises UsageError if the baseline does not pass, ProposerError, and MachineError. Earlier results are in the
        log.
        """
        log = Log(self.folder)
        try:
            self._run(log)
        finally:
            log.close()
        return self.state

    def _run(self, log: Log) -> None:
        state, manifest = self.state, self.manifest
        if log.replay_or_run("start", (), lambda: manifest.digest) != manifest.digest:
            raise UsageError(
                f"{self.folder}: its manifest differs from the one that its events were made with; "
                f"restore it, or begin a new run (it was begun by greenfast {manifest.package_version})"
            )
        gpus = [] if self._gpu_workers is None or log.replaying else list(self._gpu_workers.gpus)
        if gpus or log.is_next("gpus", ()):
            state.gpus = msgspec.convert(log.replay_or_run("gpus", (), lambda: gpus), list[GpuName])
        exam_seed = random.Random(f"{manifest.seed} exam").randrange(10**7, 10**8)
        state.baseline = self._baseline(log, exam_seed)
        stale = 0
        for number in itertools.count():
            self._count(log)
            state.ended = self._reason_to_end(stale)
            if state.ended:
                break
            evaluations = self._run_batch(log, number, exam_seed)
            if not evaluations:
                state.ended = "the proposer has nothing left to propose"
                break
            state.history += evaluations
            self._proposer.observe(evaluations)
            new = any(e.stage not in ("space", "duplicate") for e in evaluations)
            stale = 0 if new else stale + 1
            self._count(log)
            self._listener.batch(number, evaluations, state)
        self._validate_finalists(log)
        self._count(log)
        log.replay_or_run(
            "ended", (), lambda: {"why": state.ended, "winner": state.winner[0].hash if state.winner else ""}
        )

    def _count(self, log: Log) -> None:
        self.state.gpu_seconds, self.state.seconds = log.gpu_seconds, log.seconds

    def _reason_to_end(self, stale: int) -> str:
        """Return the reason to end the search, or an empty text."""
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
        built = self._run_stage(log, "built")
        if built.valid:
            emulated = self._run_stage(log, "emulated", exam_seed)
            built = merge_results(built, emulated)
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

    def _run_stage(self, log: Log, stage: str, *arguments: Any) -> StageResult:
        """Run one stage of the baseline, or read its result from the log."""
        jobs = [operator.methodcaller(stage, None, *arguments)]
        data = log.replay_or_run(f"baseline {stage}", (), lambda: next(iter(self._workers.results(jobs))))
        return msgspec.convert(data, StageResult)

    def _run_batch(self, log: Log, number: int, exam_seed: int) -> list[Evaluation]:
        state, manifest = self.state, self.manifest
        left = manifest.budget.evaluations - state.evaluations
        context = self._context(number, min(manifest.batch, left))
        proposal = log.replay_or_run("proposed", (number,), lambda: self._propose(context))
        candidates = msgspec.convert(proposal, list[Candidate])
        keys = [candidate.key for candidate in candidates]
        earlier = {e.candidate.key: e for e in reversed(state.history)}
        fresh = [n for n, key in enumerate(keys) if key not in earlier and keys.index(key) == n]
        stage_results = self._run_stages(log, "built", number, candidates, fresh)
        evaluated_hashes = {e.hash: e for e in state.history if e.hash and e.stage != "duplicate"}
        if state.baseline is not None:
            evaluated_hashes.setdefault(state.baseline.hash, state.baseline)
        first_by_hash: dict[str, int] = {}
        for n, result in stage_results.items():
            if result.valid and result.hash not in evaluated_hashes:
                first_by_hash.setdefault(result.hash, n)
        new = sorted(first_by_hash.values())
        for n, result in self._run_stages(log, "emulated", number, candidates, new, exam_seed).items():
            stage_results[n] = merge_results(stage_results[n], result)
        correct = [n for n in new if stage_results[n].valid]
        timings, cut = self._time(log, number, candidates, stage_results, correct)
        by_index = {
            n: self._evaluation(log, number, n, candidates[n], result, timings.get(n), n in cut)
            for n, result in stage_results.items()
        }
        by_hash = evaluated_hashes | {by_index[n].hash: by_index[n] for n in new}
        for n, result in stage_results.items():
            if result.valid and n not in new:
                first = by_hash[result.hash]
                same = first.candidate.key if first.candidate.parameters or first.candidate.edits else "the baseline"
                by_index[n] = mark_duplicate(by_index[n], first, f"the same machine code and launches as {same}")
        for n, (key, candidate) in enumerate(zip(keys, candidates, strict=True)):
            if n not in stage_results:
                first = earlier.get(key) or by_index[keys.index(key)]
                e = Evaluation(candidate=candidate, stage="duplicate", valid=first.valid)
                by_index[n] = mark_duplicate(e, first, "proposed before")
        evaluations = [by_index[n] for n in range(len(candidates))]
        # Without costs: times differ between repeated runs.
        costless = [msgspec.structs.replace(e, cost_seconds=0.0, gpu_seconds=0.0) for e in evaluations]
        log.replay_or_run("evaluated", (number,), lambda: costless)
        for n, e in enumerate(evaluations):
            if e.stage == "race":
                kind, event_key, _ = timings[n].events[-1]
                state.insights.append(make_insight(manifest.space, e, log.get_digest(kind, event_key)))
        return evaluations

    def _context(self, number: int, wanted: int) -> Context:
        state = self.state
        return Context(
            space=self._space,
            task=self._stages.described(),
            wanted=wanted,
            seed=random.Random(f"{self.manifest.seed} {number}").getrandbits(53),
            baseline=state.baseline,
            history=tuple(state.history),
            archive=build_archive(state.history),
            insights=tuple(i for i in state.insights if i.record),
        )

    def _propose(self, context: Context) -> list[Candidate]:
        """Return the proposer's candidates, at most ``context.wanted``."""
        self._listener.say(f"{self.manifest.proposer} proposes")
        proposal = self._proposer.propose(context)
        try:
            candidates = list(itertools.islice(proposal, context.wanted))
            for candidate in candidates:
                if not isinstance(candidate, Candidate):
                    raise TypeError(f"a {type(candidate).__name__}")
            if msgspec.json.decode(msgspec.json.encode(candidates), type=list[Candidate]) != candidates:
                raise ValueError("JSON cannot hold them")
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            raise ProposerError(f"the proposer {self.manifest.proposer} answered with no candidates: {e}") from e
        return candidates

    def _run_stages(
        self, log: Log, stage: str, number: int, candidates: Sequence[Candidate], indices: Iterable[int], *more: Any
    ) -> dict[int, StageResult]:
        """Run a stage for several candidates; return results by index. The first ones may be in the log."""
        indices = list(indices)
        event_keys = [(number, n) for n in indices]
        jobs = [
            operator.methodcaller(stage, candidates[n], *more) for n in indices[log.count_pending(stage, event_keys) :]
        ]
        worker_results = iter(self._workers.results(jobs))
        results: dict[int, StageResult] = {}
        for n, event_key in zip(indices, event_keys, strict=True):
            self._listener.say(f"batch {number + 1}: {stage} {len(results) + 1} of {len(indices)}")
            data = log.replay_or_run(stage, event_key, lambda: next(worker_results))
            results[n] = msgspec.convert(data, StageResult)
        return results

    def _time(
        self,
        log: Log,
        number: int,
        candidates: Sequence[Candidate],
        stage_results: Mapping[int, StageResult],
        correct: list[int],
    ) -> tuple[dict[int, CandidateResult], set[int]]:
        """Screen the correct candidates by their estimates, and time the others on the GPUs.

        Return timings by index, and the indices that the screen cut.
        """
        selected = correct
        if self.manifest.screen < 1 and len(correct) > 1:
            ranked = sorted(correct, key=lambda n: stage_results[n].estimate or math.inf)
            count = math.ceil(self.manifest.screen * len(ranked))
            below = ranked[count:]
            rng = random.Random(f"{self.manifest.seed} screen {number}")
            selected = sorted([*ranked[:count], *rng.sample(below, math.ceil(CONTROL * len(below)))])
        cut = set(correct) - set(selected)
        if not selected or not self.state.gpus:
            return {}, cut
        rounds = GpuRounds(log, self.state.gpus, self._gpu_workers, self.manifest.seed, self._listener.say)
        results, baseline_us = rounds.run(number, candidates, selected)
        self.state.baseline_us = self.state.baseline_us or sum(baseline_us.values())
        return results, cut

    def _evaluation(
        self,
        log: Log,
        batch: int,
        n: int,
        candidate: Candidate,
        result: StageResult,
        timing: CandidateResult | None,
        cut: bool,
    ) -> Evaluation:
        """Combine the stage results, the timing and the costs of one candidate. cut: by the screen."""
        costs = [log.get_cost(kind, (batch, n)) for kind in ("built", "emulated")]
        gpu = (
            sum(log.get_cost(kind, key).gpu_seconds / shared for kind, key, shared in timing.events) if timing else 0.0
        )
        evaluation = Evaluation(
            candidate=candidate,
            hash=result.hash,
            stage="screen" if cut else result.stage,
            valid=result.valid,
            fitness=result.estimate if result.valid else None,
            fitness_kind="estimate" if result.valid and result.estimate else "",
            behaviour=result.behaviour,
            feedback="the counts let others through" if cut else result.feedback,
            cost_seconds=round(sum(cost.seconds for cost in costs) + gpu, 3),
            gpu_seconds=round(gpu, 3),
        )
        if timing is None:
            return evaluation
        changes: dict[str, Any] = {"stage": timing.stage, "fitness": None, "fitness_kind": "", "feedback": timing.text}
        if timing.speedup:
            seconds = self.state.baseline_us / timing.speedup * 1e-6
            changes |= {"fitness": round(seconds, 12), "fitness_kind": "seconds"}
        else:
            changes["valid"] = False
        return msgspec.structs.replace(evaluation, **changes)

    def _validate_finalists(self, log: Log) -> None:
        """Validate the fastest candidates, within the budget of GPU seconds."""
        state, manifest = self.state, self.manifest
        if self._stages.gpu is None and not log.is_next("validated", (0,)):
            return
        faster = sorted((e for e in state.history if _is_faster(e, state)), key=lambda e: e.fitness or math.inf)
        finalists = faster[: manifest.finalists]
        for n, e in enumerate(finalists):
            self._count(log)
            if manifest.budget.gpu_seconds is not None and state.gpu_seconds >= manifest.budget.gpu_seconds:
                state.ended += f"; the GPU's budget did not reach finalist {n + 1} of {len(finalists)}"
                break
            self._listener.say(f"finalist {n + 1} of {len(finalists)}: the whole validation")
            run = functools.partial(
                validate_finalist, self._stages, e.candidate, len(finalists), self.folder, self._listener
            )
            data = log.replay_or_run("validated", (n,), run, on_gpu=True)
            state.verdicts.append((e, msgspec.convert(data, Verdict)))


def _is_faster(e: Evaluation, state: State) -> bool:
    """Return whether an evaluation was timed and is faster than the baseline."""
    measured = e.valid and e.stage == "race" and e.fitness_kind == "seconds" and e.fitness is not None
    return bool(measured and e.fitness is not None and e.fitness * 1e6 < state.baseline_us)


def merge_results(built: StageResult, later: StageResult) -> StageResult:
    """Merge the results of two stages of one kernel."""
    behaviour = built.behaviour
    if behaviour is not None and later.behaviour is not None:
        behaviour = msgspec.structs.replace(behaviour, pipe=later.behaviour.pipe)
    return msgspec.structs.replace(later, hash=built.hash, behaviour=behaviour)


def mark_duplicate(e: Evaluation, first: Evaluation, why: str) -> Evaluation:
    """Return an evaluation with the result of another one that has the same kernel."""
    return msgspec.structs.replace(
        e,
        hash=first.hash,
        stage="duplicate",
        valid=first.valid,
        fitness=first.fitness,
        fitness_kind=first.fitness_kind,
        behaviour=first.behaviour,
        feedback=why,
    )


def make_insight(space: Space, e: Evaluation, record: str) -> Insight:
    """Make the insight of a timed candidate. record: digest of the log event with the timing."""
    change = "; ".join(filter(None, (e.candidate.rationale, describe(space, e.candidate))))
    return Insight(change=change, prediction=e.candidate.prediction, outcome=e.feedback, record=record)
