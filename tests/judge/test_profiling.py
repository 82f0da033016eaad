"""Profiles: Nsight Compute through a stand-in for ncu, and the phases of an instrumented build."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from greenfast.judge.profiling import count_phases, take_profile
from greenfast.judge.record_io import check_freshness, read_record
from greenfast.judge.record_schema import GateResult
from greenfast.judge.validate import validate
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.freshness import Freshness
from tests.fakes import FakeDevice, Script, Watcher, install, request, rungs, shipped

STAMP = "20300102-030405"
WRITES = """#!/bin/sh
while [ $# -gt 0 ]; do
  [ "$1" = --export ] && file=$2
  [ "$1" = --launch-skip ] && skip=$2
  last=$1
  shift
done
echo "$skip $last" > "$file"
"""
REFUSES = """#!/bin/sh
echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission" >&2
exit 1
"""


def use_ncu(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, *, mode: int = 0o755) -> None:
    path = folder / "ncu"
    path.write_text(script)
    path.chmod(mode)
    monkeypatch.setattr("greenfast.judge.profiling.ncu", lambda: str(path))


def files(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() or p.name.startswith(".")]


def evidence(monkeypatch: pytest.MonkeyPatch, out: Path, *shapes: str) -> GateResult:
    asked = request(out, shapes=("small", *shapes), seeds=(0,), processes=3, blocks=6, timed_iters=6, warmup_iters=1)
    install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=10.0)}))
    record = validate(asked, *rungs(asked, "stage1", "stage2"), Watcher()).record
    assert record.decision == "MERGE"
    return record.gates[-1]


def test_a_profile_of_the_gated_shape_is_part_of_the_evidence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_ncu(monkeypatch, tmp_path, WRITES)
    gate = evidence(monkeypatch, tmp_path / "out", "mission")
    *_, (what, _, path, status) = gate.checks
    assert (what, status) == ("Nsight Compute profile", "PASS")
    assert path.endswith("-b1_h8_s512_d64-ncu/profile.ncu-rep")
    skip, job = (tmp_path / "out" / path).read_text().split(" ", 1)
    assert skip == "2"  # the last of three launches
    assert json.loads(job) == {
        "task": str(shipped("fp8_sdpa").folder),
        "toggles": shipped("fp8_sdpa").config.variant("stage2").values,
        "shape": "b1_h8_s512_d64",
        "seed": 0,
        "format": "e4m3",
        "arch": "sm_89",
        "ordinal": 0,
        "launches": 3,
        "solution": "",
    }


def test_a_profile_that_cannot_be_taken_is_pending_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_ncu(monkeypatch, tmp_path, REFUSES)
    gate = evidence(monkeypatch, tmp_path / "out")
    assert gate.status == "PASS"
    assert gate.checks[-1][2:] == (
        "ncu could not profile: ==ERROR== ERR_NVGPUCTRPERM - The user does not have permission",
        "PENDING",
    )
    assert not [name for name in files(tmp_path / "out") if "ncu" in name or ".unfinished" in name]


def test_without_ncu_the_evidence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate = evidence(monkeypatch, tmp_path)
    assert gate.status == "PASS"
    assert gate.checks[-1][3] == "PENDING"
    assert gate.checks[-1][2].startswith("ncu is not on the PATH: install NVIDIA Nsight Compute")


@pytest.mark.parametrize(
    ("script", "mode", "said"),
    [(REFUSES, 0o755, "ERR_NVGPUCTRPERM"), ("#!/bin/sh\nexit 0\n", 0o755, "could not profile"), ("", 0o644, "ncu")],
)
def test_a_failed_profile_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, mode: int, said: str
) -> None:
    use_ncu(monkeypatch, tmp_path, script, mode=mode)
    asked = request(tmp_path / "out")
    with pytest.raises(MachineError, match=said):
        take_profile(asked, rungs(asked, "stage1", "stage2")[1], asked.shapes[0], 0, STAMP)
    assert files(tmp_path / "out") == []


def test_phases_are_counted_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = request(tmp_path, shapes=("small", "mission"), seeds=(0,))
    device = install(monkeypatch, FakeDevice(asked))
    record, folder = count_phases(asked, asked.task.config.variant("stage2"), repeats=2)
    phases = ("Q load", "K/V prefetch", "dequantization", "QK^T", "softmax", "P*V", "store")
    expected = dict(zip(phases, map(float, range(1, 8)), strict=True))
    assert record.phase_cycles == {"b1_h1_s32_d64": expected, "b1_h8_s512_d64": expected}
    assert folder.name.endswith("-phases")
    assert read_record(folder) == record
    assert check_freshness(record) == Freshness()
    builds = [msgspec.structs.replace(b, kernel_hash="0" * 16, code_hash="0" * 16) for b in record.side.builds]
    changed = msgspec.structs.replace(record, side=msgspec.structs.replace(record.side, builds=builds))
    assert check_freshness(changed).status == "stale"
    assert device.launches == 2 * (1 + 2)
    assert device.memory.allocations == 0
    assert all(worker.closed for worker in device.workers)


def test_a_family_without_an_instrumented_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task = shipped("fp8_quantize")
    asked = request(tmp_path, task=task)
    with pytest.raises(UsageError, match="no instrumented build"):
        count_phases(asked, task.config.variant("quantize_vector"))


def test_phases_need_a_gpu(tmp_path: Path) -> None:
    asked = request(tmp_path, device=None)
    with pytest.raises(MachineError, match="no GPU"):
        count_phases(asked, asked.task.config.variant("stage2"))
