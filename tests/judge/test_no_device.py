"""Where kernels cannot run: what needs no GPU is judged, the rest is PENDING with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernel import bench
from greenfast.cli import judge
from greenfast.cli.main import main
from greenfast.judge.record_schema import Record
from greenfast.judge.validate import validate
from greenfast.spec.facts import DeviceInfo
from tests.fakes import L4, FakeDevice, Script, Watcher, install, request, rungs

H100 = DeviceInfo(kind="gpu", name="NVIDIA H100", compute_capability="9.0", cuda_version="13.0", driver="580.95")


def run(out: Path, device: DeviceInfo | None, arch: str) -> Record:
    asked = request(out, device=device, arch=arch)
    return validate(asked, *rungs(asked, "stage1", "stage2"), Watcher()).record


@pytest.mark.parametrize(
    ("device", "arch", "reason"),
    [
        (None, "sm_89", "no GPU: nothing can run the kernel here"),
        (L4, "sm_90a", "sm_90a code does not run on NVIDIA L4 (8.9)"),
        (H100, "sm_89", "sm_89 code does not run on NVIDIA H100 (9.0)"),
    ],
)
def test_what_cannot_run_is_pending_with_its_reason(
    tmp_path: Path, device: DeviceInfo | None, arch: str, reason: str
) -> None:
    record = run(tmp_path, device, arch)
    assert {g.gate: g.status for g in record.gates} == {
        "BUILD": "PASS",
        "RESOURCES": "PASS",
        "CORRECTNESS": "PENDING",
        "PERFORMANCE": "PENDING",
        "EVIDENCE": "PASS",
    }
    assert record.decision == "PENDING"
    assert record.reasons == [f"CORRECTNESS: {reason}", f"PERFORMANCE: {reason}"]
    assert [record.candidate.correctness, record.candidate.timing, record.speedups] == [[], [], []]
    assert record.device == device
    (profile_row,) = [row for row in record.gates[-1].checks if row[0] == "Nsight Compute profile"]
    assert profile_row[2:] == (reason, "PENDING")
    assert judge.exit_code(record, {"BUILD", "RESOURCES", "EVIDENCE"}, partial=False) == 0
    assert judge.exit_code(record, {"PERFORMANCE"}, partial=False) == judge.UNDECIDED


def test_what_is_emulated_is_judged_but_never_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated = replace(L4, kind="emulated", name="an emulator")
    asked = request(tmp_path, device=emulated)
    device = install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=10.0)}))
    record = validate(asked, *rungs(asked, "stage1", "stage2"), Watcher()).record
    assert record.gate_status("CORRECTNESS") == "PASS"
    assert record.gate_status("PERFORMANCE") == "PENDING"
    assert record.decision == "PENDING"
    assert [reason for reason in record.reasons if "an emulator cannot measure time" in reason] == record.reasons
    assert (device.timed, record.candidate.timing, record.speedups) == ([], [], [])


def test_a_bench_of_what_cannot_run_is_pending(tmp_path: Path) -> None:
    asked = request(tmp_path, device=None)
    outcome = bench(asked, asked.task.config.variant("stage2"), Watcher())
    statuses = {g.gate: g.status for g in outcome.record.gates}
    assert statuses == {"BUILD": "PASS", "RESOURCES": "PASS", "CORRECTNESS": "PENDING", "PERFORMANCE": "PENDING"}
    assert outcome.record.side.timing == []


def test_an_older_comparison_is_removed_by_a_run_that_was_not_timed(tmp_path: Path) -> None:
    (tmp_path / "COMPARE.md").write_text("of an older run")
    argv = ["judge", "fp8_sdpa", "--shapes", "small", "--device", "none", "--no-quote", "--out", str(tmp_path)]
    assert main(argv) == 4
    assert not (tmp_path / "COMPARE.md").exists()
