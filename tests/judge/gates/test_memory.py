"""The memory check on the GPU, and the verdict where a check of the exam was not done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenfast.device import memory_check
from greenfast.judge.check_plan import add_check_plan
from greenfast.judge.implementation import build_side
from greenfast.judge.record_io import decide
from greenfast.judge.record_schema import PlanCoverage, Record
from greenfast.judge.validate import validate
from tests.cheats.cheats import doubling
from tests.fakes import Behaviour, Call, FakeDevice, Script, Watcher, install, request, right, rungs


def judge(monkeypatch: pytest.MonkeyPatch, out: Path, behave: Behaviour = right) -> Record:
    """The verdict on a candidate of the doubling task that does this on a fake GPU, where no emulator runs."""
    asked = request(out, task=doubling(), shapes=("even", "tail"), seeds=(0,), fmt="fp32", timed_iters=60)
    asked = replace(asked, check_plan=add_check_plan(asked, None, chosen=True, seed=7).check_plan)
    install(monkeypatch, FakeDevice(asked, {"good": Script(us=20.0), "slow": Script(us=10.0, behave=behave)}))
    return validate(asked, *rungs(asked, "good", "slow"), Watcher(), profile=False).record


def reads_at(offset: int, nbytes: int = 4) -> Behaviour:
    """Writes the right result; reads bytes that it does not use, at an offset from the input's start or end."""

    def behave(call: Call) -> None:
        size = call.right["y"].nbytes
        call.read("x", nbytes, offset if offset < 0 else size + offset)
        right(call)

    return behave


def depends_on_output(call: Call) -> None:
    """Right, if the output holds neither 0 nor numbers before."""
    held = np.frombuffer(call.read("y", 4), np.float32)[0]
    outputs = {name: array.copy() for name, array in call.right.items()}
    if 0 < held < 1:
        outputs["y"][0] += 1
    call.write_all(outputs)


def writes_in_slack(call: Call) -> None:
    """Writes where an ordinary buffer's guard band is, and restores it; a read-only page it cannot."""
    right(call)
    call.write("x", call.read("x", 4))


@pytest.mark.parametrize(
    ("behave", "says"),
    [
        (reads_at(-4), "an access outside of its buffers"),
        (reads_at(-4096 + 64), "an access outside of its buffers"),
        (reads_at(0, 96), "an access outside of its buffers"),
        (reads_at(2048), "an access outside of its buffers"),
        (depends_on_output, "the outputs depend on the content of uninitialized memory"),
        (writes_in_slack, "a write to an input"),
    ],
)
def test_what_guard_bands_and_one_fill_do_not_show(
    behave: Behaviour, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = judge(monkeypatch, tmp_path, behave)
    assert all(row.passed for row in record.candidate.correctness), "an ordinary run was right"
    assert record.decision == "DEFER"
    (reason,) = [reason for reason in record.reasons if "memory check on the GPU" in reason]
    assert says in reason


def test_a_right_kernel_passes_and_the_check_is_in_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = judge(monkeypatch, tmp_path)
    (gate,) = [gate for gate in record.gates if gate.gate == "CORRECTNESS"]
    checks = {name: (actual, status) for name, _, actual, status in gate.checks}
    actual, status = checks["slow memory check on the GPU"]
    assert status == "PASS"
    assert "no fault on" in actual
    assert "not covered: races" in actual, "no emulator ran here"
    assert (gate.status, gate.unchecked) == ("PASS", [])
    assert record.decision in ("MERGE", "INCOMPLETE")


def test_every_page_is_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = request(tmp_path, task=doubling(), shapes=("tail",), fmt="fp32")
    device = install(monkeypatch, FakeDevice(asked))
    config = asked.task.config
    before = device.memory.allocations
    worker = device.make_worker()
    side = build_side("candidate", asked.task.family, config.variant("good"), "fp32", asked.shapes, asked.target)
    case = device.case(tuple(asked.shapes[0].dims.items()), 0)[0]
    first = worker.run(side.executable("tail"), case, 1)
    worker.check_memory(side.executable("tail"), case)
    instruments = device.memory.allocations - before
    result = worker.check_memory(side.executable("tail"), case)
    assert device.memory.allocations - before == instruments
    assert result.outputs["y"].tobytes() == first.outputs["y"].tobytes()
    assert (result.violations, result.repeatable) == ([], True)


def test_a_check_that_was_not_done_is_not_a_merge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_check, "is_supported", lambda ordinal: False)
    record = judge(monkeypatch, tmp_path)
    (gate,) = [gate for gate in record.gates if gate.gate == "CORRECTNESS"]
    assert gate.status == "PASS"
    assert [line.partition(":")[0] for line in gate.unchecked] == ["good", "slow"]
    assert "this device has no virtual memory management" in gate.unchecked[1]
    whole = PlanCoverage(seed=1, drawn={"a": {}}, complete=True, missing=[])
    decision, reasons = decide(record.gates, None, whole)
    assert decision == "UNCHECKED"
    assert any("slow: neither the check on the emulator" in reason for reason in reasons)
