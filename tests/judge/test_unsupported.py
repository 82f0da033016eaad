"""What the emulator cannot run is PENDING with its reason; a kernel is to blame only for what it did wrong itself."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernel import bench
from greenfast.cli.main import main
from greenfast.device.worker import Worker
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import Record, read_status
from greenfast.spec.errors import UnsupportedError
from tests.fakes import Watcher, emulate_here, request
from tests.judge.small_task import FAMILY, loaded, write_task

UNKNOWN = 'unsigned long long r; asm volatile("stacksave.u64 %0;" : "=l"(r)); if (r == 1) y[0] = r;'
LACKS = "PTX instruction stacksave.u64 is not known to the emulator at twice.cu:2"
RACE = "__shared__ float s; s = 0; __syncthreads(); if (threadIdx.x % 32 == 0) s += x[0]; __syncthreads(); y[0] = s;"
ENDLESS = "while (true) __nanosleep(n);"


def family(**statements: str) -> str:
    """The candidate begins with a statement on the shapes that are named; ``tiny`` has 5 elements, ``page`` 1024."""
    by_size = {{"tiny": 5, "page": 1024}[shape]: text for shape, text in statements.items()}
    begin = '"""extern "C" __global__ void twice(const float* x, float* y, int n) {\n'
    chosen = f'{by_size}.get(dims["N"], "") if toggles["FAST"] else ""'
    begun = FAMILY.replace(begin, f"{begin}STATEMENT\n")
    return begun.replace('.replace("FACTOR"', f'.replace("STATEMENT", {chosen}).replace("FACTOR"')


@pytest.fixture(autouse=True)
def emulator(machine: None, families_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_here(monkeypatch)


def judged(tmp_path: Path, *options: str, **statements: str) -> tuple[Record, Path]:
    """The record of a validation on the emulator, on both shapes, and its folder."""
    folder = write_task(tmp_path / "task", family=family(**statements))
    argv = ["judge", str(folder), "--shapes", "tiny,page", "--seeds", "0", "--device", "emulator", "--out", tmp_path]
    main([*map(str, argv), *options])
    (run,) = (tmp_path / "twice").iterdir()
    record = read_record(run)
    assert isinstance(record, Record)
    return record, run


def test_what_the_emulator_cannot_run_is_pending_with_instruction_line_and_reason(tmp_path: Path) -> None:
    record, folder = judged(tmp_path, page=UNKNOWN)
    assert {g.gate: g.status for g in record.gates} == {
        "BUILD": "PASS", "RESOURCES": "PASS", "CORRECTNESS": "PENDING", "PERFORMANCE": "PENDING", "EVIDENCE": "PASS",
    }  # fmt: skip
    assert record.decision == "PENDING"
    assert record.gates[2].summary == "plain 2/2, fast 1/2; outputs identical on 1/1; 1 could not be run here"
    assert record.reasons[0].startswith(f"CORRECTNESS: fast page seed 0: could not be run here: run: {LACKS}")
    assert [row.passed for row in record.candidate.correctness] == [True, False]
    assert record.candidate.correctness[1].gates == {}
    summary = json.loads((folder / "correctness_summary.json").read_text())
    assert [summary["all_pass"], *(row["pass"] for row in summary["results"])] == [None, True, None]
    assert LACKS in (folder / "VALIDATION_REPORT.md").read_text()


def test_a_kernel_that_is_wrong_where_it_ran_has_failed(tmp_path: Path) -> None:
    record, _ = judged(tmp_path, tiny=UNKNOWN, page="if (n) return;")
    assert (record.gate_status("CORRECTNESS"), record.decision) == ("FAIL", "DEFER")
    (correctness,) = [g for g in record.gates if g.gate == "CORRECTNESS"]
    wrong, lacking = correctness.reasons
    assert wrong.startswith("fast page seed 0: ")
    assert "never written" in wrong
    assert lacking.startswith(f"fast tiny seed 0: could not be run here: run: {LACKS}")


@pytest.mark.parametrize(
    ("statement", "says"),
    [(ENDLESS, "endless loop"), (RACE, "data race on byte 0 of shared memory"), ("__trap();", "trap was executed")],
)
def test_faults_of_the_kernel_fail(tmp_path: Path, statement: str, says: str) -> None:
    record, _ = judged(tmp_path, tiny=statement)
    assert record.decision == "DEFER"
    assert any(says in reason and "fast tiny seed 0: " in reason for reason in record.reasons), record.reasons


class Broken(EmulatorSession):
    """An emulator with a bug."""

    def run(self, *_: Any) -> Any:
        raise UnsupportedError("k: a bug in the emulator: KeyError: 3")


class Dying(EmulatorSession):
    """An emulator whose process ends."""

    def run(self, *_: Any) -> Any:
        raise SystemExit(9)


@pytest.mark.parametrize(
    ("session", "says", "others"),
    [
        (Broken, "run: k: a bug in the emulator: KeyError: 3", "alike"),
        (Dying, "crash: the process ended during run (exit 9)", "were not run"),
    ],
)
def test_a_failure_of_the_emulator_is_not_the_kernels(
    session: type[EmulatorSession], says: str, others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path, task=loaded(tmp_path / "task"), shapes=["tiny"], fmt="float")
    asked = dataclasses.replace(asked, ordinal="emulator")
    start = partial(Worker, timeout_s=60, make_session=session)
    monkeypatch.setattr(type(asked), "make_worker", property(lambda _: start))
    record = bench(asked, asked.task.config.variant("fast"), Watcher()).record
    correctness = record.gates[2]
    assert correctness.status == read_status(record.gates, "PERFORMANCE") == "PENDING"
    assert correctness.reasons == [f"fast tiny seed 0: could not be run here: {says}; 2 more of 3 cases {others}"]
    assert "3 could not be run here" in correctness.summary
