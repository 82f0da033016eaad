"""The race: who is slower leaves, who fails is named and costs nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from greenfast.device.worker import WorkerError
from greenfast.evolve.halving import run_halving
from greenfast.evolve.proposal import Candidate
from tests.evolve.racing import BASELINE_US, FakeStages


def run(times: list[float], faults: dict[str, str] | None = None) -> tuple[Any, FakeStages]:
    stages = FakeStages(times, faults)
    candidates = [Candidate(parameters={"N": n}) for n in range(len(times))]
    return run_halving(stages, candidates, seed=1)[0], stages  # type: ignore[arg-type]


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
