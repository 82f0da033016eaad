"""A comparison: what is timed, what stops it, and what a contender that fails leaves; on a scripted session."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import sdpa
from benchmarks.comparison import CheckResult
from benchmarks.freshness import freshness, timed_kernels
from benchmarks.records import read_record
from benchmarks.registry import KERNEL
from benchmarks.report import benchmark_report
from benchmarks.runner import BenchResult, compare
from benchmarks.sdpa_inputs import INPUTS
from greenfast.device.worker import WorkerError
from greenfast.judge.record_io import resolve_aliases
from greenfast.spec.errors import MachineError, UsageError, WrongResultError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.freshness import Freshness
from tests.benchmarks.scripted import ABSENT, RIGHT, ComparisonWatcher, Session, install
from tests.fakes import request, shipped

H100 = DeviceInfo(
    kind="gpu", name="NVIDIA H100", compute_capability="9.0", cuda_version="13.0", driver="580.95", l2_bytes=50 * 2**20
)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    return install(monkeypatch, Session())


Run = Callable[..., BenchResult]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(
        shapes: Sequence[str] | None = ("mission",), *, grid: bool = False, rounds: int | None = None,
        operator: bool = False, **options: Any,
    ) -> BenchResult:  # fmt: skip
        task = shipped(options.pop("task", "fp8_attention"))
        settings: dict[str, Any] = {"task": task, "arch": "sm_90a", "device": H100}
        asked = replace(request(tmp_path, **(settings | options)), command="python -m benchmarks")
        comparison = sdpa.operator() if operator else sdpa.peers()
        variant = None if operator else task.config.variant(task.config.defaults.candidate)
        watcher = ComparisonWatcher()
        outcome = compare(comparison, asked, variant, watcher, shapes=shapes, grid=grid, rounds=rounds)
        assert [row for cell in watcher.cells for row in cell] == outcome.record.rows
        built = [] if operator else ["BUILD"]
        assert [g.gate for g in watcher.gates] == [*built, "CORRECTNESS", "PERFORMANCE"]
        return outcome

    return run


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_a_row_holds_median_quartiles_and_tflops(session: Session, run: Run) -> None:
    record = run(rounds=5).record
    by_name = {row.backend: row for row in record.rows}
    names = [KERNEL, "fa3", ABSENT, "torch_flash", "torch_cudnn", "fa3_bf16"]
    assert list(by_name) == [c.name for c in record.backends] == names
    fa3 = by_name["fa3"]
    assert (fa3.p25_us, fa3.median_us, fa3.p75_us) == pytest.approx((12.12, 12.24, 12.36))
    assert fa3.tflops == pytest.approx(4 * 8 * 512**2 * 64 / 12.24 / 1e6)
    assert (fa3.rounds, fa3.calls, fa3.method, fa3.cache, fa3.grid) == (5, 7, "graph", "warm", False)
    assert (fa3.error, fa3.kernel_error, fa3.clocks) == (0.05, 0.02, {"sm_mhz": 1979.0})
    assert session.rounds == [5]
    absent = by_name[ABSENT]
    assert (absent.median_us, absent.tflops, absent.reason) == (None, None, "cudnn is not installed")
    assert session.closed == session.starts == 1


def test_the_record_and_its_report_are_kept(session: Session, run: Run) -> None:
    outcome = run(["small", "d64_s1024_causal"])
    record = outcome.record
    assert kept(outcome.folder) == ["VALIDATION_REPORT.md", "performance.png", "record.json"]
    assert read_record(outcome.folder) == resolve_aliases(record, record.task)
    assert (outcome.folder / "VALIDATION_REPORT.md").read_text() == benchmark_report(record, plot="performance.png")
    assert {row.shape: (row.grid, row.cache) for row in record.rows} == {
        "small": (False, "warm"), "d64_s1024_causal": (True, "beyond L2")
    }  # fmt: skip
    assert record.environment["fa3"] == "fa3 1.0"
    assert record.environment["cuDNN"] == "91900"
    assert record.clocks == {"sm_mhz_min": 1978.0, "sm_mhz_max": 1979.0}
    assert record.device == H100
    assert record.accuracy == []
    assert record.side is not None
    assert len(record.side.builds) == 2
    assert record.inputs == {"normal": "N(0, 1)"}
    assert freshness(record) == Freshness()


@pytest.mark.slow
def test_without_shapes_all_are_timed_and_errors_compared(session: Session, run: Run) -> None:
    record = run(None).record
    assert len({row.shape for row in record.rows}) == 22
    assert len(record.rows) == 22 * 6
    assert sum(row.grid for row in record.rows) == 18 * 6
    inputs = [row for row in record.accuracy if row.series == "inputs"]
    assert {(row.dims["D"], row.inputs) for row in inputs} == {
        (d, kind) for d in (64, 128) for kind in ("normal", "outliers")
    }
    assert {row.backend for row in inputs} == {c.name for c in record.backends}
    length = [row for row in record.accuracy if row.series == "length"]
    assert [(row.dims["S"], row.backend) for row in length] == [
        (s, name) for s in (2048, 8192, 32768, 131072) for name in (KERNEL, "fa3")
    ]
    assert len(session.rounds) == 22  # errors alone are not timed
    assert {cell.seed for cell in session.opened[:22]} == {0}
    assert {cell.seed for cell in session.opened[22:]} == {1}
    assert list(record.inputs) == ["normal", "outliers"]
    assert "geometric mean over 18 shapes" in record.gates[-1].summary


@pytest.mark.slow
def test_the_grid_alone(session: Session, run: Run) -> None:
    record = run(None, grid=True).record
    assert {row.shape.split("_")[0] for row in record.rows} == {"d64", "d128", "d256"}
    assert record.accuracy == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (replace(RIGHT, finite=False), "not every element of the output was written"),
        (replace(RIGHT, kernel_error=0.04), "kernel error 0.04, at most 0.03 is right; nothing was timed"),
        (replace(RIGHT, kernel_error=float("nan")), "kernel error nan"),
        (replace(RIGHT, kernel_error=None), "kernel error None"),
        (replace(RIGHT, bound_ratio=1.2), "the worst element over what rounding explains 1.2, at most 1"),
    ],
)
def test_a_wrong_kernel_stops_the_run_untimed(
    session: Session, run: Run, tmp_path: Path, found: CheckResult, said: str
) -> None:
    session.checked[KERNEL] = found
    with pytest.raises(WrongResultError, match=rf"greenfast on mission \(B=1, H=8, S=512, D=64\): .*{said}"):
        run()
    assert session.rounds == []
    assert session.closed == session.starts == 1
    assert kept(tmp_path) == []


def test_a_kernel_that_is_wrong_while_timed_stops_the_run(session: Session, run: Run, tmp_path: Path) -> None:
    session.changed = [KERNEL]
    with pytest.raises(WrongResultError, match="the timed launches wrote other bits"):
        run()
    assert kept(tmp_path) == []


def test_a_kernel_that_cannot_be_launched_stops_the_run(session: Session, run: Run) -> None:
    session.checked[KERNEL] = CheckResult(reason="RuntimeError: out of memory")
    with pytest.raises(MachineError, match=r"greenfast on mission .*: RuntimeError: out of memory"):
        run()


def test_a_library_that_fails_on_a_shape_is_a_row_with_the_reason(session: Session, run: Run) -> None:
    session.checked["fa3"] = CheckResult(error=0.4, reason="its output is wrong: relative error 0.4")
    rows = {row.backend: row for row in run().record.rows}
    assert (rows["fa3"].median_us, rows["fa3"].error) == (None, 0.4)
    assert rows["fa3"].reason == "its output is wrong: relative error 0.4"
    assert rows[KERNEL].median_us
    assert rows["torch_flash"].median_us


def test_a_library_whose_timed_launches_differ_has_no_time(session: Session, run: Run) -> None:
    session.changed = ["fa3"]
    rows = {row.backend: row for row in run().record.rows}
    assert rows["fa3"].median_us is None
    assert "timed launches wrote another output" in rows["fa3"].reason
    assert rows["torch_flash"].median_us


def test_a_library_that_breaks_its_process_costs_that_shape_alone(session: Session, run: Run) -> None:
    session.crashes = {(512, "fa3")}
    rows = {(row.shape, row.backend): row for row in run(["small", "mission", "long"]).record.rows}
    assert rows["mission", "fa3"].reason == "crash: the process ended during add of fa3"
    assert all(rows[shape, "fa3"].median_us for shape in ("small", "long"))
    for shape in ("small", "mission", "long"):
        assert all(rows[shape, name].median_us for name in (KERNEL, "torch_flash"))
    assert session.closed == session.starts == 2


def test_a_library_that_keeps_breaking_is_left_out(session: Session, run: Run) -> None:
    session.crashes = {(32, "fa3"), (512, "fa3"), (2048, "fa3")}
    rows = {(row.shape, row.backend): row for row in run(["small", "mission", "long"]).record.rows}
    assert rows["long", "fa3"].reason.startswith("left out after 2 crashes: crash: ")
    assert session.starts == 3
    assert rows["long", KERNEL].median_us


def test_a_crash_of_the_kernel_itself_stops_the_run(session: Session, run: Run) -> None:
    session.crashes = {(512, KERNEL)}
    with pytest.raises(WorkerError, match="crash"):
        run()
    assert session.closed == session.starts == 1


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (["mission", "big"], "unknown shape of benchmarks peers 'big'; allowed: d128_s1024, "),
        (["mission", "mission"], "one is named twice"),
    ],
)
def test_unknown_shapes_are_refused(session: Session, run: Run, shapes: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(shapes)
    assert session.starts == 0


def test_without_a_gpu_nothing_starts(session: Session, run: Run, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="this needs a GPU; no GPU"):
        run(device=None)
    assert session.starts == 0
    assert kept(tmp_path) == []


# The operator, whose kernels the task does not build.


@pytest.mark.parametrize("all_kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_operators_record_has_hashes_host_times_and_every_kind_of_inputs(
    all_kernels: bool, session: Session, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel of each kind is compiled: all of them take long."""
    kernels = sdpa.operator_kernels()
    assert len(kernels) == 270
    if not all_kernels:
        kernels = {name: kernel for name, kernel in kernels.items() if name.endswith("fp8, B=32, H=32, S=512, D=64")}
        assert len(kernels) == 3
    monkeypatch.setattr(sdpa, "operator_kernels", lambda: kernels)
    session.checked["fp8_plain"] = CheckResult(error=0.3, finite=True)  # on hard inputs an error stops nothing
    outcome = run(None, operator=True)
    record = outcome.record
    assert read_record(outcome.folder) == record
    assert outcome.folder.parent.name == "operator"
    assert (record.side, record.sides()) == (None, [])
    assert len(record.kernels) == len(kernels)
    assert record.kernels == timed_kernels(sdpa.operator())
    assert freshness(record) == Freshness()
    (first, kernel), *others = record.kernels.items()
    changed_to, launch = msgspec.structs.replace, replace(kernel.launch, early=not kernel.launch.early)
    for changed, said in (
        (dict(others), f"{first} is not in the record"),
        ({**record.kernels, "another": kernel}, "another is timed no more"),
        ({**record.kernels, first: changed_to(kernel, launch=launch)}, f"the early launch .* of {first} differs"),
        (
            {**record.kernels, first: changed_to(kernel, kernel_hash="of another text", code_hash="of another code")},
            f"the machine code of {first} differs",
        ),
    ):
        answer = freshness(changed_to(record, kernels=changed))
        assert answer.status == "stale"
        assert re.fullmatch(said, answer.reasons[0])
    assert len({row.shape for row in record.rows}) == 30
    by_name = {row.backend: row for row in record.rows if row.shape == "d128_s1024"}
    assert set(by_name) == {
        *("sdpa_fp8", "sdpa_int8", "sdpa_int8_fine", "attention_fp8", "quantize_fp8", "copy"),
        *("torch_flash", "torch_cudnn", "fa3_bf16"),
    }  # fmt: skip
    assert by_name["copy"].tflops is None
    assert by_name["sdpa_fp8"].tflops == pytest.approx(4 * 16 * 16 * 1024**2 * 128 / 20.4 / 1e6)
    assert {row.inputs for row in record.accuracy} == set(record.inputs) == set(INPUTS)
    assert [row.error for row in record.accuracy if row.backend == "fp8_plain"] == [0.3] * 33
    assert [row.backend for row in record.host] == ["sdpa_fp8", "attention_fp8", "torch"]
    assert record.gate_status("CORRECTNESS") == "PASS"
    assert "error at most 0.05 on 30 shapes, 0.2 allowed" in record.gates[0].summary
    assert "sdpa fp8 / best bf16: 1.000x" in record.gates[1].summary


@pytest.mark.parametrize("found", [CheckResult(error=0.3, finite=True), CheckResult(error=float("nan"), finite=True)])
def test_an_operator_that_is_wrong_stops_the_run_untimed(session: Session, run: Run, found: CheckResult) -> None:
    session.checked["sdpa_int8"] = found
    with pytest.raises(WrongResultError, match=r"sdpa_int8 on d64_s512 .*: error .*, at most 0.2 is right"):
        run(["d64_s512"], operator=True)
    assert session.rounds == []


def test_the_operator_is_timed_on_hopper_alone(session: Session, run: Run) -> None:
    with pytest.raises(MachineError, match="benchmarks operator times kernels for sm_90a, not sm_90"):
        run(None, operator=True, arch="sm_90")
    assert session.starts == 0
