"""On a GPU the emulator runs a small case too, and sees what the GPU does not show."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenfast.device.session import RunResult
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.check_plan import add_check_plan
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.gates.faults import EmulatedRuns
from greenfast.judge.implementation import build_side, build_solution_implementation
from greenfast.judge.record_schema import Record
from greenfast.judge.request import CasePlan, Request
from greenfast.judge.solution.schema import find_solution
from greenfast.judge.task import Shape
from greenfast.judge.validate import validate
from greenfast.spec.arch import Target
from greenfast.spec.errors import UnsupportedError
from tests.cheats.cheats import doubling
from tests.cheats.kernels import KERNELS
from tests.fakes import EmulatorHere, FakeDevice, Script, Watcher, install, request, rungs


class Refusing(EmulatorSession):
    """An emulator that lacks an instruction of every kernel."""

    def run(self, *_: object) -> object:  # type: ignore[override]
        raise UnsupportedError("no such instruction")


def run(monkeypatch: pytest.MonkeyPatch, out: Path, candidate: str, session: type[EmulatorSession]) -> Record:
    """A candidate that is right on a fake GPU, and whose machine code the emulator runs."""
    asked = request(out, task=doubling(), shapes=("tail",), fmt="fp32", timed_iters=60, warmup_iters=5)
    install(monkeypatch, FakeDevice(asked, {"good": Script(us=20.0), candidate: Script(us=10.0)}))
    make = lambda: EmulatorHere(session)  # noqa: E731
    monkeypatch.setattr(Request, "make_emulator", property(lambda self: make))
    return validate(asked, *rungs(asked, "good", candidate), Watcher(), profile=False).record


def test_a_short_limit_for_the_gpu_is_not_the_emulators(tmp_path: Path) -> None:
    """Late, it would say nothing of the kernel, whose fault it takes the emulator to see."""
    asked = request(tmp_path, task=doubling(), shapes=("tail",), fmt="fp32")
    asked = replace(
        asked,
        timeout_s=0.001,
        ordinal=0,
        check_plan=asked.check_plan or add_check_plan(asked, None, chosen=True).check_plan,
    )
    config, family = asked.task.config, asked.task.family
    side = build_side("candidate", family, config.variant("reads_behind"), "fp32", asked.shapes, asked.target)
    case = asked.task.problem.make_case(config.shape("tail").dims, 0, "fp32")
    assert asked.make_emulator is not None
    with asked.make_emulator() as worker, pytest.raises(WorkerError, match="past the end of 'x'"):
        worker.run(side.executable("tail"), case, 2)


def test_a_fault_that_the_gpu_did_not_show_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = run(monkeypatch, tmp_path, "reads_behind", EmulatorSession)
    assert all(row.passed for row in record.candidate.correctness), "on the GPU it was right"
    assert record.gate_status("CORRECTNESS") == "FAIL"
    assert record.decision == "DEFER"
    (reason,) = [r for r in record.reasons if r.startswith("CORRECTNESS")]
    assert "reads_behind tail seed 0 on the emulator: ran (run: " in reason


@pytest.mark.parametrize(("session", "said"), [(EmulatorSession, "PASS"), (Refusing, "PENDING")])
def test_what_it_finds_right_or_cannot_run_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, session: type[EmulatorSession], said: str
) -> None:
    record = run(monkeypatch, tmp_path, "no_async_copy", session)
    (gate,) = [g for g in record.gates if g.gate == "CORRECTNESS"]
    assert gate.status == "PASS"
    (row,) = [check for check in gate.checks if check[0] == "no_async_copy tail seed 0 on the emulator"]
    assert row[3] == said


class Late(EmulatorHere):
    """A worker that takes too long for a whole case."""

    def call(self, method: str, *args: Any) -> RunResult:
        if method == "run":
            raise UnsupportedByDeviceError("hang: run did not end within 60 s", ended=True)
        return super().call(method, *args)


def test_of_a_slow_case_some_blocks_run() -> None:
    """A fault in the last of many blocks is found; without one it says what ran, and that it was not all."""
    task, target = doubling(), Target("sm_90a")
    case_plan = CasePlan(Shape(name="large", dims={"N": 300_001}), 0)
    sides = []
    solutions = {
        "baseline": ("honest", "plain"),
        "candidate": ("memory", "wide_tail"),
        "several": ("honest", "two_launches"),
    }
    for role, (kind, name) in solutions.items():
        found = find_solution(KERNELS[kind][name].path)
        implementation = build_solution_implementation(task, found, target)
        sides.append(build_side(role, implementation.family, implementation.variant, "fp32", [case_plan.shape], target))
    with EmulatedRuns(sides, [case_plan], Late) as runs:
        runs.start(case_plan, task.problem.make_case(case_plan.shape.dims, 0, "fp32"))
        results = runs.results()
    assert "read out of bounds" in str(results["candidate", 0])
    assert not isinstance(results["candidate", 0], UnsupportedByDeviceError)
    assert isinstance(results["baseline", 0], UnsupportedByDeviceError)
    assert "only blocks of a single, not cooperative launch" in str(results["several", 0])
    said = str(results["baseline", 0])
    assert re.search(r"did not end within 60 s; 4 of \d+ blocks ran by themselves, without a fault", said)


def test_a_drawn_case_shows_what_the_tasks_own_hides() -> None:
    """Reads whole units of 16 bytes: of 4,000 bytes all is right. Each case has a result of its own."""
    task, target = doubling(), Target("sm_90a")
    found = find_solution(KERNELS["memory"]["bulk_copy_rounded_up"].path)
    implementation = build_solution_implementation(task, found, target)
    case_plans = [CasePlan(task.config.shape("tail"), 0)]
    case_plans += [CasePlan(Shape(name=f"drawn_n{n}", dims={"N": n}), 7, randomized=True) for n in (1, 2)]
    shapes = [case_plan.shape for case_plan in case_plans]
    side = build_side("candidate", implementation.family, implementation.variant, "fp32", shapes, target)
    with EmulatedRuns([side], case_plans, lambda: Worker(timeout_s=60, make_session=EmulatorSession)) as runs:
        for case_plan in case_plans:
            runs.start(case_plan, task.problem.make_case(case_plan.shape.dims, case_plan.seed, "fp32"))
        results = runs.results()
    assert isinstance(results["candidate", 0], RunResult)
    assert "bulk read out of bounds" in str(results["candidate", 1])
    assert "bulk read out of bounds" in str(results["candidate", 2])
