"""The registry of gates: its order, and a gate that is added while the program runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenfast.cli.judge import exit_code, required_gates
from greenfast.judge import validate as validation
from greenfast.judge.gates.registry import GATES, order_gates
from greenfast.judge.pipeline import Gate, GateRun
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import FIRST_GATES, GateResult, Record, Status
from greenfast.judge.report.formatting import Section
from greenfast.judge.report.junit import junit
from greenfast.judge.report.markdown import report
from tests.fakes import L4, FakeDevice, Script, Watcher, install, request, rungs


def make_gate(status: Status) -> Gate:
    """A gate after CORRECTNESS that compares the number of cases of the two sides."""

    def check(run: GateRun) -> GateResult:
        baseline, candidate = (str(len(run.correctness.rows[side.role])) for side in run.sides)
        reasons = ["the counts differ"] if status == "FAIL" else []
        checks = [("cases", baseline, candidate, status)]
        return GateResult(gate="CASES", status=status, summary="cases", reasons=reasons, checks=checks)

    return Gate(
        "CASES", 16, after="CORRECTNESS", check=check, sections=lambda record, plot: [Section("Cases", ["Counted."])]
    )


def test_gates_run_in_order_and_their_codes_differ() -> None:
    assert [name for name in GATES if name in FIRST_GATES] == list(FIRST_GATES)
    assert [GATES[name].exit_code for name in FIRST_GATES] == [11, 12, 13, 14, 15]
    assert len({gate.exit_code for gate in GATES.values()}) == len(GATES)
    names = list(order_gates([make_gate("PASS"), *(GATES[name] for name in FIRST_GATES)]))
    assert names == ["BUILD", "RESOURCES", "CORRECTNESS", "CASES", "PERFORMANCE", "EVIDENCE"]
    with pytest.raises(ValueError, match="'CORRECTNESS' is not in list"):
        order_gates([make_gate("PASS")])


@pytest.mark.parametrize(("status", "decision", "code"), [("PASS", "MERGE", 0), ("FAIL", "DEFER", 16)])
def test_a_gate_is_added_by_its_entry_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: Status, decision: str, code: int
) -> None:
    with changed_gates(order_gates([make_gate(status), *GATES.values()])):
        check_added_gate(monkeypatch, tmp_path, decision, code)


@contextlib.contextmanager
def changed_gates(gates: dict[str, Gate]) -> Iterator[None]:
    """Replace the gates of the registry."""
    before = dict(GATES)
    try:
        GATES.clear()
        GATES.update(gates)
        yield
    finally:
        GATES.clear()
        GATES.update(before)


def check_added_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decision: str, code: int) -> None:
    """Judge with the registry's gates; check the order, the record, the reports and the exit code."""
    asked = request(tmp_path, device=L4)
    install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=10.0)}))
    outcome = validation.validate(asked, *rungs(asked, "stage1", "stage2"), Watcher(), profile=False)
    record = read_record(outcome.folder)
    assert isinstance(record, Record)
    assert record == outcome.record
    assert [result.gate for result in record.gates] == list(GATES)
    assert (record.decision, exit_code(record, required_gates(["cases"]), partial=False)) == (decision, code)
    assert "## Cases\n\nCounted." in report(record)
    assert "| CASES | cases |" in report(record)
    assert 'name="CASES"' in junit(record, code)
    assert record.gates[3].checks[0][1] == record.gates[3].checks[0][2]
