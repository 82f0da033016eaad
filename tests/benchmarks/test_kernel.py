"""``python -m benchmarks kernel``, on a fake device and without one."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import BenchRecord
from tests.benchmarks.command_line import run_benchmark
from tests.cli.command_line import Ran, assert_said, files_below, run_here
from tests.fakes import FakeDevice, Script
from tests.judge import behaviours
from tests.judge.report.webpage.reading import read
from tests.judge.small_task import PROBLEM, write_task

pytestmark = pytest.mark.usefixtures("machine")

KERNEL = ("kernel", "fp8_sdpa")
SMALL = ("--shapes", "small", "--seeds", "0", "--processes", "3", "--iters", "60", "--warmup", "5")


def last_line(ran: Ran) -> Path:
    return Path(ran.out.splitlines()[-1])


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("kernel",), 2, "the following arguments are required: task"),
        ((*KERNEL, "--variant", "stage9"), 2, "unknown variant of task fp8_sdpa 'stage9'; allowed: "),
        ((*KERNEL, "--require", "evidence"), 2, "--require evidence: no benchmark reads the machine code"),
        ((*KERNEL, "--variant", "USE_X=1"), 2, "unknown toggle of task fp8_sdpa 'USE_X'; allowed: DEBUG_PRINT, "),
        ((*KERNEL, "--variant", "USE_KV_LUT=2"), 2, "USE_KV_LUT=2: allowed values are [0, 1]"),
        ((*KERNEL, "--variant", "USE_KV_LUT=yes"), 2, "'USE_KV_LUT=yes' is not TOGGLE=INTEGER"),
        ((*KERNEL, "--variant", "USE_KV_LUT=--1"), 2, "'USE_KV_LUT=--1' is not TOGGLE=INTEGER"),
        ((*KERNEL, "--variant", "stage1", "--from-env"), 2, "not allowed with argument"),
        ((*KERNEL, "--device", "99"), 3, "device 99: the driver shows 0 GPU(s); use --device none to run without one"),
        ((*KERNEL, "--timeout", "0"), 2, "--timeout 0: give a number of seconds above 0"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    assert_said(run_benchmark(capsys, *args, "--out", tmp_path), code, said)
    assert files_below(tmp_path) == []


def test_an_invalid_task_and_an_unwritable_folder_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_task(tmp_path / "mine", problem=PROBLEM.replace("def decode", "def undecode"))
    ran = run_benchmark(capsys, "kernel", folder, "--out", tmp_path / "out")
    assert_said(ran, 2, "problem 'problem.py' has no function decode")
    (tmp_path / "file").write_text("")
    ran = run_benchmark(capsys, *KERNEL, "--out", tmp_path / "file" / "results")
    assert_said(ran, 3, "file/results/fp8_wmma_baseline cannot be written (Not a directory); choose another with --out")


@pytest.mark.parametrize(
    ("required", "code"), [((), 0), (("--require", "build,resources"), 0), (("--require", "performance"), 1)]
)
def test_without_a_gpu_what_is_required_decides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, required: tuple[str, ...], code: int
) -> None:
    ran = run_benchmark(capsys, *KERNEL, *SMALL, *required, "--device", "none", "--out", tmp_path)
    assert (ran.code, ran.err) == (code, "")
    lines = [line for line in ran.out.splitlines() if line.startswith(("CORRECTNESS", "PERFORMANCE"))]
    assert [line.split(maxsplit=2)[1:] for line in lines] == [
        ["PENDING", "no GPU: nothing can run the kernel here"]
    ] * 2
    assert last_line(ran).is_dir()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"USE_CP_ASYNC": "2"}, "USE_CP_ASYNC=2: allowed values are [0, 1]"),
        ({"USE_CP_ASYNC": "on"}, "USE_CP_ASYNC='on': allowed values are [0, 1]"),
        ({"USE_CP_ASYNC": ""}, "USE_CP_ASYNC='': allowed values are [0, 1]"),
        ({"USE_FUSED_SOFTMAX_PV": "1", "USE_WMMA_PV": "0"}, "USE_FUSED_SOFTMAX_PV=1 needs USE_WMMA_PV=1"),
    ],
)
def test_a_wrong_toggle_in_the_environment_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    said: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_said(run_benchmark(capsys, *KERNEL, "--from-env", "--out", tmp_path), 2, said)
    assert files_below(tmp_path) == []


def test_the_page_is_written_too(capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    ran = run_benchmark(capsys, *KERNEL, "--variant", "stage2", *SMALL, "--out", tmp_path, "--html", file)
    assert (ran.code, ran.err) == (0, "")
    assert "fp8_sdpa: stage2 Speed: PASS: timed" in read(file.read_text()).text


def test_it_prints_the_timings(capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path) -> None:
    ran = run_benchmark(capsys, *KERNEL, "--variant", "stage1", *SMALL, "--out", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    rows = [line.split() for line in ran.out.splitlines() if line.startswith("b1_h1_s32_d64")]
    assert [row[:3] for row in rows] == [["b1_h1_s32_d64", "0", "warm"], ["b1_h1_s32_d64", "0", "cold"]]
    assert all(float(row[3]) == pytest.approx(20.0, rel=0.01) for row in rows)
    assert isinstance(read_record(last_line(ran)), BenchRecord)


def test_a_wrong_kernel_is_1(capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path) -> None:
    device.scripts["stage2"] = Script(behave=behaviours.races)
    ran = run_benchmark(capsys, *KERNEL, *SMALL, "--out", tmp_path)
    assert ran.code == 1
    assert "a race?" in ran.out
    assert "p50" not in ran.out


def test_toggles_of_the_environment_make_the_variant(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("USE_CP_ASYNC", "0")
    monkeypatch.setenv("USE_KV_LUT", " 1 ")
    ran = run_benchmark(capsys, *KERNEL, "--from-env", *SMALL, "--out", tmp_path)
    assert ran.code == 0
    meta = json.loads((last_line(ran) / "build_meta.json").read_text())
    on = {name for name in meta["build"] if name.isupper() and meta["build"][name]}
    assert on == {"USE_WMMA_QK", "USE_WMMA_PV", "USE_KV_LUT"}  # the defaults with those two changed
    record = read_record(last_line(ran))
    assert record.command.startswith("USE_CP_ASYNC=0 USE_KV_LUT=")  # or the command would not repeat the run
    assert "python -m benchmarks kernel fp8_sdpa --from-env --shapes small" in record.command


def test_without_from_env_the_environment_changes_nothing(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("USE_CP_ASYNC", "0")
    ran = run_benchmark(capsys, *KERNEL, *SMALL, "--out", tmp_path)
    assert json.loads((last_line(ran) / "build_meta.json").read_text())["build"]["USE_CP_ASYNC"] == 1


def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path) -> None:
    folders = [
        last_line(run_benchmark(capsys, *KERNEL, "--variant", name, *SMALL, "--out", tmp_path))
        for name in ("stage1", "stage2")
    ]
    ran = run_here(capsys, "report", "--compare", *folders, "--speedup", "1.15", "--out", tmp_path / "COMPARE.md")
    assert (ran.code, ran.err) == (0, "")
    assert "required 1.15x: PASS" in ran.out
    assert (tmp_path / "COMPARE.md").read_text() == ran.out


def test_json_is_all_that_is_on_standard_output(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    ran = run_benchmark(capsys, *KERNEL, *SMALL, "--json", "--out", tmp_path)
    assert msgspec.json.decode(ran.out, type=BenchRecord).side.variant == "stage2"
    assert "PERFORMANCE PASS" in ran.err


def test_a_table_or_plot_needs_a_comparisons_record(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    folder = last_line(run_benchmark(capsys, *KERNEL, *SMALL, "--out", tmp_path))
    for option in (("--table",), ("--plot", str(tmp_path / "p.svg"))):
        ran = run_here(capsys, "report", folder, *option)
        assert ran.code == 2
        assert "a run of one variant; a table or plot needs a comparison's record" in ran.err
