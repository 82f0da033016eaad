"""Problems that state a tolerance around a run of their reference, which rounds otherwise on a GPU than on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from greenfast.device.session import Executable, RunResult
from greenfast.judge.gates.correctness import check_cases
from greenfast.judge.request import CasePlan
from greenfast.judge.subject import find_baseline
from greenfast.judge.task import ErrorGate, FormatGates, KernelErrorGate, Shape
from greenfast.spec.problem import Case, OutputSpec, References
from tests.fakes import case_run

N = 1000
OPEN = ErrorGate(max_abs_err=1e300, mean_abs_err=1e300, pct_bad=100.0, bad_abs_err=1e300)
GATES = FormatGates(error=OPEN, kernel_error=KernelErrorGate(relative_error=1e300, bound_factor=1.0))


class Problem:
    """y = x, within 0.01."""

    def __init__(self, is_run: bool = True) -> None:
        self.is_run = is_run

    def make_case(self, dims: Mapping[str, int], seed: int, fmt: str) -> Case:
        x = np.random.default_rng(seed).standard_normal(N)
        return Case({"x": x}, {"y": OutputSpec((N,), "float64")})

    def references(self, dims: Mapping[str, int], seed: int, fmt: str) -> References:
        exact = self.make_case(dims, seed, fmt).inputs["x"]
        return References(full=exact, exact=exact, bound=np.full(N, 0.01), is_run=self.is_run)

    def decode(self, outputs: Mapping[str, Any], fmt: str) -> Any:
        return outputs["y"]


def passed(problem: Problem, own: str | None, *, baseline: Sequence[int], candidate: Sequence[int]) -> list[bool]:
    """Of baseline and candidate, where these elements are off by 0.5."""
    sides: Any = [
        SimpleNamespace(
            role=role,
            variant=SimpleNamespace(name=role),
            programs={"one": None},
            distinct=[],
            executable=lambda shape, off=off: Executable((), cast("Any", {"off": off})),
        )
        for role, off in (("baseline", baseline), ("candidate", candidate))
    ]

    class Runs:
        def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
            y, off = case.inputs["x"].copy(), list(cast("Sequence[int]", executable.workspaces["off"]))
            y[off] += 0.5
            return RunResult({"y": y})

        def close(self) -> None:
            """There is no process."""

    case_plan = CasePlan(Shape(name="one", dims={"N": N}), 0)
    run = case_run(sides, problem, [case_plan], "float", GATES, Runs, own=own)
    check_cases(run)
    return [run.correctness.rows[role][0].passed for role in ("baseline", "candidate")]


def test_what_the_reference_gives_on_the_gpu_is_as_right() -> None:
    off = range(3)  # of 1,000
    assert passed(Problem(), "baseline", baseline=off, candidate=off) == [True, True]
    assert passed(Problem(), "baseline", baseline=off, candidate=()) == [True, True]
    assert passed(Problem(), "baseline", baseline=off, candidate=(0, 500)) == [True, False]
    assert passed(Problem(), "baseline", baseline=(), candidate=off) == [True, False]


def test_a_reference_that_gives_something_else_on_the_gpu_is_wrong() -> None:
    off = range(11)
    assert passed(Problem(), "baseline", baseline=off, candidate=off) == [False, False]
    assert passed(Problem(), "baseline", baseline=off, candidate=()) == [False, True]


@pytest.mark.parametrize(("is_run", "own"), [(True, None), (False, "baseline")])
def test_nothing_else_moves_what_is_right(is_run: bool, own: str | None) -> None:
    """Neither another solution that is the baseline, nor the reference of a problem that has a bound."""
    assert passed(Problem(is_run), own, baseline=range(3), candidate=range(3)) == [False, False]


def test_the_tasks_own_reference_is_not_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "here" / "reference", tmp_path / "task" / "reference"):
        folder.mkdir(parents=True)
        (folder / "solution.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    seen: list[Path] = []

    def found(path: Path, *_: Any) -> Path:
        seen.append(path)
        raise LookupError

    monkeypatch.setattr("greenfast.judge.subject.read_solution", found)
    config = SimpleNamespace(rungs=[], defaults=SimpleNamespace(baseline="reference"))
    task: Any = SimpleNamespace(config=config, folder=tmp_path / "task")
    with pytest.raises(LookupError):
        find_baseline(task, "reference", tmp_path)
    assert seen == [tmp_path / "task" / "reference"]
