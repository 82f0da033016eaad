"""Targets, cases, errors and the rule for records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from greenfast.judge.record_schema import CorrectnessRow, GateResult, Status
from greenfast.spec.arch import TARGETS, Target
from greenfast.spec.errors import CompileError, GreenfastError, MachineError, UsageError, WrongResultError
from greenfast.spec.problem import Case, OutputSpec, least_work
from tests.judge.report.records import correctness_row, gates, record, side


@pytest.mark.parametrize(
    ("text", "name"), [("sm_89", "sm_89"), ("8.9", "sm_89"), (" 9.0a ", "sm_90a"), ("10.0", "sm_100"), ("8.0", "sm_80")]
)
def test_a_target_is_read_in_both_forms(text: str, name: str) -> None:
    assert Target.parse(text).name == name


@pytest.mark.parametrize("text", ["", "sm_75", "7.5", "sm_89a", "89", "8.9+PTX", "8.0;8.9", "compute_89"])
def test_an_unknown_target_is_answered_with_the_known_ones(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"unknown target .*; allowed: sm_100, sm_120, sm_80, sm_86, sm_89, sm_90, sm_9"
    ):
        Target.parse(text)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((8, 7), "sm_86"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_device_gets_the_best_target_that_runs_on_it(capability: tuple[int, int], name: str) -> None:
    target = Target.of_device(capability)
    assert target.name == name
    assert target.runs_on(capability)


@pytest.mark.parametrize("capability", [(7, 5), (11, 0)])
def test_a_device_without_a_target_is_refused(capability: tuple[int, int]) -> None:
    assert not any(Target(name).runs_on(capability) for name in TARGETS)
    with pytest.raises(UsageError, match=rf"{capability[0]}\.{capability[1]} is not supported"):
        Target.of_device(capability)


def test_machine_code_runs_within_its_generation_only() -> None:
    assert Target("sm_80").runs_on((8, 9))
    assert not Target("sm_89").runs_on((8, 0))
    assert not Target("sm_89").runs_on((9, 0))
    assert not Target("sm_90a").runs_on((9, 1))


def test_every_error_has_its_exit_code() -> None:
    codes = {
        error: error("x").exit_code
        for error in (UsageError, MachineError, CompileError, WrongResultError, GreenfastError)
    }
    assert list(codes.values()) == [2, 3, 1, 1, 3]


def test_equal_digests_mean_equal_inputs() -> None:
    x = np.arange(6, dtype=np.float32)
    outputs = {"y": OutputSpec((1,), "float32")}
    digest = Case({"x": x, "z": x[:1]}, outputs).digest
    assert Case({"z": x[:1].copy(), "x": x.copy()}, outputs).digest == digest
    others: list[dict[str, Any]] = [
        {"x": x, "z": x[1:2]},
        {"x": x.reshape(2, 3), "z": x[:1]},
        {"x": x.view(np.int32), "z": x[:1]},
        {"y": x, "z": x[:1]},
        {"x": x},
        {"x": -x * 0 + x, "z": -x[:1]},
    ]
    assert digest not in {Case(inputs, outputs).digest for inputs in others}
    assert Case({"x": x[::2]}, outputs).digest == Case({"x": x[::2].copy()}, outputs).digest


def test_a_row_passes_where_every_gate_held_and_there_was_one() -> None:
    def row(**held: bool) -> CorrectnessRow:
        return correctness_row("small", 0, gates=held)

    assert row(a=True, b=True).passed
    assert not row(a=True, b=False).passed
    assert not row().passed


@pytest.mark.parametrize("status", ["FAIL", "PENDING", None])
def test_no_record_is_wrong_but_fast(status: Status | None) -> None:
    correctness = [] if status is None else [GateResult(gate="CORRECTNESS", status=status, summary="")]
    found = [g for g in gates() if g.gate != "CORRECTNESS"] + correctness
    untimed = side("stage1", p50_us=1, registers=1, smem=1, scale=1, hmma=1, timing=[])
    timed = side("stage1", p50_us=1, registers=1, smem=1, scale=1, hmma=1)
    assert record(gates=found, baseline=untimed, candidate=untimed, speedups=[]).speedups == []
    for changes in ({"baseline": timed}, {"candidate": timed}, {"speedups": record().speedups}):
        fields = {"baseline": untimed, "candidate": untimed, "speedups": []} | changes
        with pytest.raises(ValueError, match="unless its CORRECTNESS gate passed"):
            record(gates=found, **fields)


def test_a_problem_may_give_least_work_for_known_counts_only() -> None:
    def problem(found: dict[str, int] | None) -> Any:
        return SimpleNamespace(least_work=lambda dims: found) if found is not None else SimpleNamespace()

    assert least_work(problem(None), {}) == {}
    assert least_work(problem({"matrix_flops": 8}), {}) == {"matrix_flops": 8}
    with pytest.raises(UsageError, match=r"unknown count of least_work 'flops'; allowed: .*exponentials.*matrix_flops"):
        least_work(problem({"flops": 8}), {})
