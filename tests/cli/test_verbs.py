"""The verbs on a fake device and without one: exit codes, output, and files."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from greenfast.cli.console import show, table
from greenfast.cli.evolve import SearchConsole
from greenfast.judge.check_plan import add_check_plan
from greenfast.judge.gates.registry import GATES
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import PhaseRecord, Record
from greenfast.judge.request import CasePlan
from tests.cli.command_line import ROOT, Ran, run_here
from tests.fakes import L4, Behaviour, FakeDevice, Script, install, request, right
from tests.judge import behaviours
from tests.judge.small_task import loaded, write_task

pytestmark = pytest.mark.usefixtures("emulator_here", "families_here")

SMALL = ("--shapes", "small", "--seeds", "0", "--processes", "3", "--iters", "12", "--warmup", "2")


def last_line(ran: Ran) -> Path:
    return Path(ran.out.splitlines()[-1])


def test_a_run_says_what_holds_and_where_its_files_are(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    out = tmp_path / "a [folder] of results"  # not markup
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--out", out)
    assert (ran.code, ran.err) == (4, "")
    gates = [line.split()[:2] for line in ran.out.splitlines()[:5]]
    assert gates == [[gate, "PASS"] for gate in ("BUILD", "RESOURCES", "CORRECTNESS", "PERFORMANCE", "EVIDENCE")]
    missing = "1 of 7 shapes, inputs that nobody knew before the run (a seed was given), nothing drawn"
    assert (
        f"INCOMPLETE  stage2 against stage1, e4m3\n  - incomplete: {missing}; all five gates hold on those\n" in ran.out
    )
    record = read_record(last_line(ran))
    assert isinstance(record, Record)
    assert last_line(ran).parent == out / "fp8_wmma_baseline"
    assert record.device == L4
    assert record.arch == "sm_89"  # the device's
    assert record.command == f"greenfast judge fp8_sdpa {' '.join(SMALL)} --out '{out}'"
    assert {t.timed_iters for t in record.candidate.timing} == {12}
    assert {t.warmup_iters for t in record.candidate.timing} == {2}
    assert {row.processes for row in record.speedups} == {3}


def test_the_whole_exam_is_0_and_less_of_it_is_4(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = loaded(tmp_path / "twice")
    plain = request(tmp_path, task=task, shapes=("tiny",), fmt="float", whole=False)
    asked = add_check_plan(plain, task.config.rung("fast"), chosen=False, seed=77)
    assert asked.check_plan is not None
    public = tuple(CasePlan(shape, seed) for shape in asked.shapes for seed in (0, 1, 2))
    asked = replace(asked, check_plan=replace(asked.check_plan, case_plans=(*asked.check_plan.case_plans, *public)))
    monkeypatch.setattr("greenfast.judge.check_plan.draw_seed", lambda: 77)
    install(monkeypatch, FakeDevice(asked, {"plain": Script(us=20.0), "fast": Script(us=10.0)}))

    def ran(*options: str) -> tuple[int, str]:
        options = ("--processes", "3", "--iters", "12", "--warmup", "2", "--out", str(tmp_path / "out"), *options)
        found = run_here(capsys, "judge", tmp_path / "twice", *options)
        return found.code, next(line.split()[0] for line in found.out.splitlines() if " against " in line)

    assert ran() == (0, "MERGE")
    assert ran("--shapes", "tiny,page") == (0, "MERGE")
    assert ran("--shapes", "tiny") == (4, "INCOMPLETE")
    assert ran("--exam-seed", "77") == (4, "INCOMPLETE"), "a repeated exam: its inputs were known"
    assert ran("--seeds", "0", "--require", "build") == (4, "INCOMPLETE")


@pytest.mark.parametrize(
    ("behave", "us", "said"),
    [(right, 20.0, "NO EFFECT"), (right, 40.0, "SLOWER"), (behaviours.one_nan, 10.0, "finite"),
     (behaviours.crashes, 10.0, "crash")],
)  # fmt: skip
def test_a_defer_has_the_code_of_its_gate_and_says_why(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path, behave: Behaviour, us: float, said: str
) -> None:
    device.scripts["stage2"] = Script(us=us, behave=behave)
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--out", tmp_path)
    assert ran.code == (14 if behave is right else 13)
    assert "\nDEFER  stage2 against stage1, e4m3\n" in ran.out
    assert said in ran.out.partition("DEFER")[2]
    assert read_record(last_line(ran)).gates


def test_a_required_speedup_takes_the_place_of_the_rungs(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    device.scripts["stage2"] = Script(us=20 / 1.1)
    for required, code in (("1.05", 4), ("1.12", 14)):
        ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--speedup", required, "--out", tmp_path)
        assert ran.code == code
        assert f"required {required}x" in (last_line(ran) / "VALIDATION_REPORT.md").read_text()


@pytest.mark.slow
def test_a_candidate_named_alone_is_compared_with_the_rung_before_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def sides(*options: str) -> tuple[str, str]:
        ran = run_here(capsys, "judge", "fp8_sdpa", "--shapes", "small", *options, "--json", "--out", tmp_path)
        record = msgspec.json.decode(ran.out, type=Record)
        return record.baseline.variant, record.candidate.variant

    assert sides() == ("stage1", "stage2")
    assert sides("--candidate", "stage1") == ("wmma_qk", "stage1")
    assert sides("--candidate", "stage2", "--baseline", "scalar") == ("scalar", "stage2")


def test_without_a_gpu_what_is_required_decides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = write_task(tmp_path / "mine")
    for required, code in (((), 4), (("--require", "build,resources,evidence"), 0), (("--require", "correctness"), 4)):
        ran = run_here(capsys, "judge", task, *required, "--device", "none", "--out", tmp_path / "out")
        assert (ran.code, ran.err) == (code, "")
        lines = [line for line in ran.out.splitlines() if line.startswith(("CORRECTNESS", "PERFORMANCE"))]
        assert [line.split(maxsplit=2)[1:] for line in lines] == [
            ["PENDING", "no GPU: nothing can run the kernel here"]
        ] * 2
        assert last_line(ran).is_dir()


def test_without_a_gpu_the_emulator_decides_correctness(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = write_task(tmp_path / "mine")
    ran = run_here(capsys, "judge", task, "--require", "correctness", "--out", tmp_path / "out")
    assert (ran.code, ran.err) == (0, "")
    lines = [line for line in ran.out.splitlines() if line.startswith(("CORRECTNESS", "PERFORMANCE"))]
    assert [line.split()[1] for line in lines] == ["PASS", "PENDING"]
    assert "emulated" in lines[1]


def timed_today_as(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quote records of this one's method: what is tested here does not depend on when the evidence was measured."""
    monkeypatch.setattr("greenfast.judge.cached_timing.METHOD", record.candidate.timing[0].method)


def kept_exam_is_whole(record: Record) -> bool:
    """Whether what a run without a GPU leaves out held in the record that it quotes."""
    return record.exam is not None and record.exam.complete


def test_without_a_gpu_performance_is_quoted_if_it_is_of_this_kernel(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quick = ("judge", "fp8_quantize", *SMALL, "--out", tmp_path)
    ran = run_here(capsys, *quick, "--no-quote")
    assert (ran.code, "quoted" in ran.out) == (4, False)
    ran = run_here(
        capsys, *quick, "--arch", "sm_89", "--quote", ROOT / "evidence/h100/fp8_quantize-e4m3-quantize_vector"
    )
    assert (ran.code, "is of sm_90a, not sm_89" in ran.out.replace("\n", "")) == (4, True)


@pytest.mark.parametrize(
    ("task", "sides", "options"),
    [
        ("fp8_quantize", ("quantize_scalar", "quantize_vector"), ("--shapes", "mission")),
        pytest.param("fp8_sdpa", ("stage1", "stage2"), (), marks=pytest.mark.slow),
    ],
)
def test_the_first_command_is_decided_without_a_gpu(
    task: str,
    sides: tuple[str, str],
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``make judge``: without a requested target the kept record's is taken and its PERFORMANCE quoted."""
    before, after = sides
    kept = read_record(ROOT / f"evidence/h100/{task}-e4m3-{after}")
    assert isinstance(kept, Record)
    timed_today_as(kept, monkeypatch)
    ran = run_here(capsys, "judge", task, *options, "--require", "all", "--out", tmp_path)
    if f"{kept.candidate.builds[0].compiler} for" not in ran.out:
        pytest.skip("another compiler than the record's, which then cannot be quoted")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert [line.split()[:2] for line in lines[:5]] == [[gate, "PASS"] for gate in GATES]
    assert f"quoted from NVIDIA H100 80GB HBM3, {kept.created[:10]}, commit " in lines[3]
    assert "  - target sm_90a, from the kept record, as there is no GPU; --arch selects another" in lines
    decision = "MERGE" if kept_exam_is_whole(kept) else "INCOMPLETE"
    assert f"{decision}  {after} against {before}, e4m3" in lines
    record = read_record(last_line(ran))
    assert isinstance(record, Record)
    assert (record.decision, record.arch) == (decision, "sm_90a")


def test_a_requested_target_is_not_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nor without quoting: the task's target stays."""
    for options in (("--arch", "sm_89"), ("--no-quote",)):
        ran = run_here(capsys, "judge", "fp8_quantize", *SMALL, *options, "--json", "--out", tmp_path)
        assert msgspec.json.decode(ran.out, type=Record).arch == "sm_89"


def test_a_target_that_the_gpu_does_not_run_is_pending(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--no-quote", "--arch", "9.0a", "--out", tmp_path)
    assert ran.code == 4
    assert "PENDING  stage2 against stage1" in ran.out
    assert "CORRECTNESS: sm_90a code does not run on NVIDIA L4 (8.9)" in ran.out
    assert device.launches == 0


def test_an_unwanted_gpu_is_not_used(capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path) -> None:
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--no-quote", "--device", "none", "--out", tmp_path)
    assert ran.code == 4
    assert device.workers == []


def test_profile_shows_the_share_of_each_phase(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    ran = run_here(capsys, "profile", "fp8_sdpa", "--phases", "--shapes", "small", "--out", tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert "stage2, b1_h1_s32_d64" in ran.out
    shares = {line.rsplit(maxsplit=3)[0]: line.rsplit(maxsplit=3)[1:] for line in ran.out.splitlines()[2:-1]}
    assert shares["Q load"] == ["1", "3.6", "%"]
    assert shares["store"] == ["7", "25.0", "%"]
    assert len(shares) == 7
    assert isinstance(read_record(last_line(ran)), PhaseRecord)


def test_profile_without_ncu_is_a_machine_error(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    ran = run_here(capsys, "profile", "fp8_sdpa", "--ncu", "--shapes", "small", "--out", tmp_path)
    assert ran.code == 3
    assert "ncu is not on the PATH: install NVIDIA Nsight Compute" in ran.err


def test_report_prints_it_again(capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path) -> None:
    folder = last_line(run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--out", tmp_path))
    whole = run_here(capsys, "report", folder)
    assert whole.code == 0
    assert whole.out.startswith("# fp8_sdpa: stage1 -> stage2, INCOMPLETE\n")
    short = run_here(capsys, "report", "--short", folder / "record.json")
    assert short.out.startswith("**INCOMPLETE**: fp8_sdpa, `stage1` -> `stage2`, e4m3, sm_89\n")
    plot = run_here(capsys, "report", folder, "--plot", tmp_path / "p.svg")
    assert (plot.code, (tmp_path / "p.svg").read_text()[:5]) == (0, "<?xml")
    assert (whole.err, short.err) == ("", "")


def test_report_says_where_a_record_asked_for_less_than_its_task(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    options = ("--speedup", "1.0", "--out", tmp_path)
    folder = last_line(run_here(capsys, "judge", "fp8_sdpa", *SMALL, *options))
    ran = run_here(capsys, "report", folder)
    assert ran.code == 0
    assert "it required 1x, the task requires 1.15x; its decision follows from its options" in ran.err


def test_a_plot_that_cannot_be_drawn_says_why(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    folder = last_line(run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--out", tmp_path))
    for path, code, said in (
        (tmp_path / "p.gif", 2, "p.gif: the name must end in .png or .svg"),
        (tmp_path / "none" / "p.svg", 3, "p.svg cannot be written (No such file or directory)"),
    ):
        ran = run_here(capsys, "report", folder, "--plot", path)
        assert (ran.code, ran.out) == (code, "")
        assert said in ran.err
        assert "Traceback" not in ran.err


def test_json_is_all_that_is_on_standard_output(
    capsys: pytest.CaptureFixture[str], device: FakeDevice, tmp_path: Path
) -> None:
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--json", "--out", tmp_path)
    record = msgspec.json.decode(ran.out, type=Record)
    assert record.decision == "INCOMPLETE"
    assert "CORRECTNESS PASS" in ran.err
    ran = run_here(capsys, "profile", "fp8_sdpa", "--phases", "--json", "--shapes", "small", "--out", tmp_path)
    assert list(json.loads(ran.out)["phases"]["phase_cycles"]) == ["b1_h1_s32_d64"]


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (("build", "fp8_sdpa", "--variants", "scalar", "--shapes", "small"), "registers"),
        (("list", "fp8_sdpa"), "variants"),
        (("list", "examples/matmul"), "variants"),
        (("list",), "description"),
        (("list", "--schema"), "$defs"),
        (("report", "--schema"), "$defs"),
    ],
)
def test_lists_are_json_too(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], key: str) -> None:
    ran = run_here(capsys, *args, *([] if "--schema" in args else ["--json"]))
    content = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert key in (content[0] if isinstance(content, list) else content)


def test_build_is_a_table_of_every_variant_and_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_here(
        capsys, *("build", "fp8_sdpa", "--variants", "stage1", "stage2", "--arch", "sm_89,9.0a", "--shapes", "small"),
        *("--sass", tmp_path),
    )  # fmt: skip
    assert (ran.code, ran.err) == (0, "")
    rows = [line.split()[:4] for line in ran.out.splitlines()[1:]]
    assert sorted(rows) == sorted(
        [variant, "e4m3", target, "b1_h1_s32_d64"] for target in ("sm_89", "sm_90a") for variant in ("stage1", "stage2")
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{variant}-e4m3-b1_h1_s32_d64-{target}.sass"
        for target in ("sm_89", "sm_90a")
        for variant in ("stage1", "stage2")
    )
    assert "LDGSTS" in (tmp_path / "stage2-e4m3-b1_h1_s32_d64-sm_89.sass").read_text()


def test_a_pipe_gets_the_current_step_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((100.0, 101.0, 140.0, 140.0, 141.0, 180.0, 180.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    console = SearchConsole(to_stderr=False)
    for step in ("soon", "one", "soon after", "two"):
        console.say(step)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["40", "s", "one"], ["80", "s", "two"]]


def test_a_table_splits_no_word_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    header = ("shape", "registers", "spills", "bar_sync")
    show(table(header, [("b1_h8_s512_d64", "153", "0", "6")]))
    names, row = (line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines())
    assert names == list(header)
    assert row == ["b1_h8_s512_d64", "153", "0", "6"]
