"""Every cheat and accident that a gate must catch, as a real kernel on a real GPU.

Each is a kernel of the doubling task (``doubling/family.py``; its first lines name its fault) that goes
through the pipeline as any candidate does. It is compared with naive.py's evaluator, without poison, guard bands,
repeats and second looks: what it takes for right is what these checks are there for.

Some cheats of the list cannot be tried, because a candidate here is machine code and never a launcher:

- it cannot return the reference's output, an alias of it, or a tensor of an earlier call: the runtime allocates the
  outputs, poisons them, and reads them back itself; no reference is ever on the device;
- it cannot move its work to another stream or thread, or put it off: the runtime launches it, on its own stream between
  its own events, and waits for that stream; a kernel cannot launch another one (test_kernels.py);
- it cannot keep anything on the host between calls: what it keeps on the device is in reach of ``remembers``,
  ``cached_by_shape``, ``later_*`` and ``memoizes``;
- it cannot choose its grid, block or shared memory by looking at the data: the family sees dimensions only.

An access beyond the guard bands (4096 bytes on each side) that hits other valid memory is not caught here; that is what
a sanitizer is for.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from benchmarks.kernel import bench
from greenfast.cli.main import main
from greenfast.device.gpu import Gpu
from greenfast.judge.implementation import build_side
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import BenchRecord, Record
from greenfast.judge.request import NullListener, Request, make_request
from greenfast.judge.timing.interleaved import WARM
from greenfast.judge.validate import validate
from tests.cheats.cheats import CHEATS, FAILURES, TASK, Cheat, doubling
from tests.cheats.naive import says_right
from tests.fakes import rungs

pytestmark = pytest.mark.gpu

CONFIG = doubling().config
#: Seconds; a kernel of this task takes microseconds, the start of its process a second or two.
HANG_TIMEOUT = 5


MakeRequest: TypeAlias = Callable[[Sequence[str], Sequence[int]], Request]


@pytest.fixture(scope="module")
def request_for(tmp_path_factory: pytest.TempPathFactory) -> MakeRequest:
    """Requests for some shapes and seeds; the device is asked what it is only once."""
    base = make_request(
        doubling(),
        shapes=None,
        seeds=None,
        fmt=None,
        arch=None,
        device="auto",
        warmup=None,
        iters=None,
        processes=1,  # no claim is made on a speedup
        timeout_s=60.0,
        out=tmp_path_factory.mktemp("results"),
        command="the tests of the cheats",
    )

    def chosen(shapes: Sequence[str], seeds: Sequence[int]) -> Request:
        return dataclasses.replace(base, shapes=[CONFIG.shape(name) for name in shapes], seeds=list(seeds))

    return chosen


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """A device in this process: for kernels that leave it whole."""
    return Gpu()


def run(name: str, request: Request) -> BenchRecord:
    return bench(request, CONFIG.variant(name), NullListener()).record


def reasons(record: BenchRecord | Record, gate: str) -> list[str]:
    """Why a gate failed; it must have."""
    (result,) = [g for g in record.gates if g.gate == gate]
    assert result.status == "FAIL", f"{gate}: {result.status}, {result.summary}"
    return result.reasons


def p50(record: BenchRecord) -> float:
    (row,) = [row for row in record.side.timing if row.cache == WARM]
    return row.p50_us


def test_the_good_kernel_passes(request_for: MakeRequest) -> None:
    record = run("good", request_for(["even", "tail", "many"], [0, 1]))
    assert [(g.gate, g.status) for g in record.gates] == [
        ("BUILD", "PASS"),
        ("RESOURCES", "PASS"),
        ("CORRECTNESS", "PASS"),
        ("PERFORMANCE", "PASS"),
    ], [reason for g in record.gates for reason in g.reasons]
    assert len(record.side.timing) == 12  # shapes, seeds, cache states


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_a_gate_catches_it(cheat: Cheat, request_for: MakeRequest) -> None:
    record = run(cheat.name, request_for(cheat.shapes, cheat.seeds))
    said = reasons(record, cheat.gate)
    assert any(re.search(cheat.says, reason) for reason in said), said
    assert [g.gate for g in record.gates if g.status == "FAIL"] == [cheat.gate]
    assert record.side.timing == []


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_an_evaluator_without_the_gates_would_be_fooled(cheat: Cheat, request_for: MakeRequest, gpu: Gpu) -> None:
    request = request_for(cheat.shapes[:1], cheat.seeds[:1])
    (shape,) = request.shapes
    family, problem = doubling().family, doubling().problem
    side = build_side("naive", family, CONFIG.variant(cheat.name), "fp32", [shape], request.target)
    case = problem.make_case(shape.dims, cheat.seeds[0], "fp32")
    tolerance = CONFIG.gates("fp32").error.max_abs_err
    assert says_right(gpu, *side.executable(shape.name).steps[0], case, tolerance) is cheat.fools


@pytest.mark.parametrize(("name", "says"), FAILURES.items(), ids=list(FAILURES))
def test_a_kernel_that_cannot_run_is_a_failed_gate(name: str, says: str, request_for: MakeRequest) -> None:
    record = run(name, request_for(["even"], [0]))
    said = reasons(record, "CORRECTNESS")
    assert len(said) == 1
    assert said[0].endswith("; 2 more of 3 cases were not run")  # the seeds that take part in timing
    assert re.search(says, said[0]), said
    assert record.side.timing == []


def test_a_crash_leaves_the_other_side_running(request_for: MakeRequest) -> None:
    request = request_for(["even"], [0, 1])
    record = validate(request, *rungs(request, "good", "wild_pointer"), NullListener(), profile=False).record
    assert [row.passed for row in record.baseline.correctness] == [True] * 3  # a third seed takes part in timing
    (reason,) = reasons(record, "CORRECTNESS")
    assert re.search(FAILURES["wild_pointer"], reason), reason
    assert reason.endswith("; 2 more of 3 cases were not run")
    assert [row.is_skipped for row in record.candidate.correctness] == [False, True, True]
    assert record.gate_status("PERFORMANCE") == "PENDING"
    assert record.decision == "DEFER"


def test_a_hang_is_one_failed_gate_and_the_run_is_whole(tmp_path: Path) -> None:
    argv = ["judge", str(TASK), "--baseline", "good", "--candidate", "hang", "--shapes", "even", "--seeds", "0,1"]
    argv += ["--iters", "40", "--processes", "3", "--timeout", str(HANG_TIMEOUT), "--no-profile"]
    assert main([*argv, "--out", str(tmp_path)]) == 13

    (folder,) = (tmp_path / CONFIG.defaults.results).iterdir()  # and nothing unfinished next to it
    record = read_record(folder)
    assert isinstance(record, Record)
    assert [(g.gate, g.status) for g in record.gates] == [
        ("BUILD", "PASS"),
        ("RESOURCES", "PASS"),
        ("CORRECTNESS", "FAIL"),
        ("PERFORMANCE", "PENDING"),
        ("EVIDENCE", "PASS"),
    ]
    assert [row.passed for row in record.baseline.correctness] == [True] * 3
    hang = f"hang: run did not end within {HANG_TIMEOUT} s; its process was killed"
    assert [row.notes for row in record.candidate.correctness] == [[hang], *[[f"not run: {hang}"]] * 2]
    for path in folder.rglob("*.json"):
        assert json.loads(path.read_text()), path
    assert hang in (folder / "VALIDATION_REPORT.md").read_text()


@pytest.fixture(scope="module")
def honest_us(request_for: MakeRequest) -> float:
    """The time of the kernel that works on every launch."""
    return p50(run("slow", request_for(["even"], [0])))


@pytest.mark.parametrize("name", ["skips_written", "memoizes", "stale_shared"])
def test_work_left_out_of_the_timed_launches_gains_nothing(
    name: str, request_for: MakeRequest, honest_us: float
) -> None:
    record = run(name, request_for(["even"], [0]))
    failed = any(g.status == "FAIL" for g in record.gates)
    assert failed or p50(record) > 0.8 * honest_us
