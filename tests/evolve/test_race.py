"""The race: who is slower leaves, who fails is named and costs nobody else."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from greenfast.device.session import Block, Started, WrongLaunch
from greenfast.device.worker import WorkerError
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.race import race
from greenfast.evolve.stages import Found
from greenfast.spec.problem import Case

BASELINE_US = 100.0


class FakeWorker:
    """Times by label; the label's programs are their names."""

    def __init__(self, stages: FakeStages) -> None:
        self._stages, self._rng = stages, random.Random(0)
        self._drift = 1.0

    def __enter__(self) -> FakeWorker:
        self._stages.starts += 1
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, key: str, executable: Any, cases: Any, warmup: int, seed: int) -> Started:
        label = key.split("/")[0]
        if self._stages.faults.get(label) == "crash":
            raise WorkerError("crash: the process ended")
        other = self._stages.faults.get(label) == "bits"
        return Started(["other" if other else "bits"] * len(cases))

    def time(self, key: str, warmup: int, iters: int, cold: bool, seed: int) -> Block:
        label = key.split("/")[0]
        self._stages.launches[label] = self._stages.launches.get(label, 0) + iters
        wrong = WrongLaunch(3, iters, 0, "left other bits") if self._stages.faults.get(label) == "late" else None
        self._drift *= 1.002  # the clock falls all the time; pairs see the same
        us = self._stages.times[label] * self._drift * self._rng.uniform(0.99, 1.01)
        return Block([us] * iters, {"sm_mhz": 1700.0}, wrong)


class FakeStages:
    """Stages whose candidates have given times, and faults by label."""

    def __init__(self, times: list[float], faults: dict[str, str] | None = None) -> None:
        self.times = {str(n): us for n, us in enumerate(times)} | {"baseline": BASELINE_US}
        self.faults, self.launches, self.starts = faults or {}, dict[str, int](), 0
        shape = SimpleNamespace(name="s", dims={"R": 8})
        self.raced = SimpleNamespace(
            make_worker=lambda: FakeWorker(self), shapes=[shape], seeds=[0], format="f", device=None
        )
        problem = SimpleNamespace(make_case=lambda dims, seed, fmt: Case({}, {}))
        self.task = SimpleNamespace(problem=problem)

    def on_gpu(self, candidate: Candidate | None) -> tuple[Found, Any, dict[tuple[str, int], str]]:
        label = "baseline" if candidate is None else str(candidate.parameters["N"])
        if self.faults.get(label) == "wrong":
            return Found(stage="CORRECTNESS", valid=False, feedback="kernel_bound"), None, {}
        side = SimpleNamespace(executable=lambda name: label)
        return Found(stage="CORRECTNESS", valid=True), side, {("s", seed): "bits" for seed in range(3)}


def run(times: list[float], faults: dict[str, str] | None = None) -> tuple[Any, FakeStages]:
    stages = FakeStages(times, faults)
    candidates = [Candidate(parameters={"N": n}) for n in range(len(times))]
    return race(stages, candidates, seed=1), stages  # type: ignore[arg-type]


def test_the_fastest_runs_longest_and_its_speedup_is_right() -> None:
    found, stages = run([100, 50, 200, 80, 120, 90, 150, 300])
    assert max(range(8), key=lambda n: found.raced[n].speedup) == 1
    for raced, us in zip(found.raced, [100, 50, 200, 80, 120, 90, 150, 300], strict=True):
        assert raced.speedup == pytest.approx(BASELINE_US / us, rel=0.02)
    rounds = [raced.rounds for raced in found.raced]
    assert rounds[1] == max(rounds) > rounds[7] == 1
    assert stages.launches["7"] < stages.launches["1"] / 4  # the slow ones cost little
    assert stages.starts == 1


@pytest.mark.parametrize(
    ("fault", "stage", "says"),
    [
        ("wrong", "CORRECTNESS", "kernel_bound"),
        ("crash", "race", "crash"),
        ("bits", "race", "other bits than the checked"),
        ("late", "race", "left other bits"),
    ],
)
def test_who_fails_is_named_and_costs_only_itself(fault: str, stage: str, says: str) -> None:
    found, _ = run([50, 80, 120], {"1": fault})
    assert (found.raced[1].stage, found.raced[1].speedup) == (stage, 0)
    assert says in found.raced[1].why
    assert found.raced[0].speedup == pytest.approx(2, rel=0.02)
    assert found.raced[2].speedup == pytest.approx(BASELINE_US / 120, rel=0.02)


def test_nobody_is_left() -> None:
    found, stages = run([50, 80], {"0": "wrong", "1": "wrong"})
    assert [r.stage for r in found.raced] == ["CORRECTNESS"] * 2
    assert stages.starts == 0


def test_a_baseline_that_fails_is_an_error() -> None:
    with pytest.raises(WorkerError, match="the baseline does not run"):
        run([50], {"baseline": "crash"})
    with pytest.raises(WorkerError, match="the baseline does not run"):
        run([50], {"baseline": "wrong"})
