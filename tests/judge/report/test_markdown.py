"""The validation report says every number of its record, and says PENDING with a reason where there is none."""

from __future__ import annotations

import pytest

from greenfast.judge.record_schema import SCHEMA_VERSION, GateResult, ParityRow, Side
from greenfast.judge.report.markdown import report as render
from greenfast.judge.report.markdown import short_form
from tests.judge.report.records import correctness_row, gates, pending_record, quoting_record, record, side, speedup_row

SECTIONS = [
    "Gates",
    "Correctness",
    "Parity of the two sides",
    "Performance",
    "Compiler resources",
    "Evidence",
    "Decision",
    "How to reproduce",
    "Build metadata",
]


def section(report: str, name: str) -> str:
    return report.split(f"## {name}\n")[1].split("\n## ")[0]


def cells(text: str, *starts: str) -> list[str]:
    """The cells of the only table row that starts with these."""
    found = [[c.strip() for c in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in found if row[: len(starts)] == list(starts)]
    assert len(rows) == 1, rows
    return rows[0]


def headline(report: str) -> list[str]:
    return [line for line in report.splitlines() if line.startswith("- **")][:3]


def test_headline_of_a_passing_record() -> None:
    report = render(record())
    assert report.startswith("# fp8_sdpa: stage1 -> stage2, MERGE\n\n- **Correctness**")
    assert headline(report) == [
        "- **Correctness**: 6/6 PASS both sides",
        "- **Performance**: mission (warm) 1.829x [1.810, 1.851], required 1.15x: FAST",
        "- **Resources**: 84 registers, 37.1 KB SMEM, 12 bytes spilled "
        "(baseline: 88 registers, 30.2 KB SMEM, 12 bytes spilled)",
    ]


def test_sections_stand_in_order() -> None:
    report = render(record())
    assert [line[3:] for line in report.splitlines() if line.startswith("## ")] == SECTIONS


def test_gates_show_target_actual_and_status() -> None:
    failing = GateResult(
        gate="RESOURCES",
        status="FAIL",
        summary="over budget",
        reasons=["sdpa_stage2: 140 registers"],
        checks=[("registers", "<= 128", "140", "FAIL")],
    )
    bare = GateResult(gate="BUILD", status="PASS", summary="2 kernels | 0 warnings")
    text = section(render(record(gates=[bare, failing, *gates()[1:]])), "Gates")
    assert cells(text, "RESOURCES", "registers") == ["RESOURCES", "registers", "<= 128", "140", "FAIL"]
    assert "| BUILD | 2 kernels \\| 0 warnings | - | - | PASS |" in text
    assert "- **RESOURCES** FAIL: over budget; sdpa_stage2: 140 registers" in text
    assert cells(text, "PERFORMANCE", "mission")[2:] == [">= 1.15x", "1.829x", "PASS"]


def test_correctness_matrix_of_both_sides() -> None:
    text = section(render(record()), "Correctness")
    numbers = ["0.05", "0.003", "0.25", "0.04", "0.0024", "0.000355", "0.31"]
    assert cells(text, "baseline", "small", "2")[3:] == [*numbers, "PASS", ""]
    numbers = ["0.055", "0.0033", "0.275", "0.044", "0.00264", "0.000391", "0.341"]
    assert cells(text, "candidate", "mission", "1")[3:] == [*numbers, "PASS", ""]
    assert sum(line.startswith(("| baseline", "| candidate")) for line in text.splitlines()) == 12


def failing_record_rows() -> Side:
    rows = [
        correctness_row("small", 0),
        correctness_row(
            "small", 1, error=None, kernel_error=None, bound_ratio=None, gates={"finite": False}, notes=["NaN"]
        ),
    ]
    return side("stage2", p50_us=1, registers=84, smem=100, scale=1, hmma=1, correctness=rows, timing=[])


def test_a_failing_side_is_told_apart() -> None:
    baseline = side("stage1", p50_us=1, registers=88, smem=100, scale=1, hmma=1, timing=[])
    failed = gates("FAIL", "PENDING")
    report = render(
        record(baseline=baseline, candidate=failing_record_rows(), gates=failed, speedups=[], decision="DEFER")
    )
    assert headline(report)[0] == (
        "- **Correctness**: baseline 6/6 PASS, candidate 1/2 FAIL; gate FAIL: 6 of 6 rows hold"
    )
    row = cells(section(report, "Correctness"), "candidate", "small", "1")
    assert row[3:6] == ["-", "-", "-"]
    assert row[8:] == ["-", "-", "FAIL", "finite; NaN"]


def test_a_gate_that_fails_beyond_the_rows_shows_in_the_headline() -> None:
    sides = {
        name: side(name, p50_us=1, registers=8, smem=9, scale=1, hmma=1, timing=[])
        for name in ("baseline", "candidate")
    }
    line = headline(render(record(**sides, gates=gates("FAIL"), speedups=[])))[0]
    assert line == "- **Correctness**: 6/6 PASS both sides; gate FAIL: 6 of 6 rows hold"


def test_an_ungated_row_is_pending_not_passed() -> None:
    rows = [correctness_row("small", 0, gates={}), correctness_row("small", 1)]
    sides = {
        name: side(name, p50_us=1, registers=8, smem=9, scale=1, hmma=1, correctness=rows, timing=[])
        for name in ("baseline", "candidate")
    }
    report = render(record(**sides, gates=gates("PENDING"), speedups=[]))
    assert "1/2 PENDING both sides" in headline(report)[0]
    assert cells(section(report, "Correctness"), "baseline", "small", "0")[10] == "PENDING"


def test_parity() -> None:
    text = section(render(record()), "Parity of the two sides")
    assert "Bit-exact on 1/2; largest difference 0.00049." in text
    assert cells(text, "mission", "0")[2:] == ["no", "321", "0.00049"]
    same = [ParityRow(shape="small", seed=0, identical=True, different_elements=0, max_abs_diff=0.0)]
    assert "Bit-exact on 1/1.\n" in section(render(record(parity=same)), "Parity of the two sides")


def test_performance_tables() -> None:
    text = section(render(record(), plot="plots/a.png"), "Performance")
    assert "![block medians and speedups](plots/a.png)" in text
    speedup = ["1.829x", "[1.810, 1.851] at 95 %", "0.61 %", "1.15x", "FAST", "yes", "21 in 3"]
    assert cells(text, "mission", "warm")[2:] == speedup
    candidate = cells(text, "candidate", "mission", "2")
    assert candidate[3:5] == ["graph slope", "warm"]
    assert candidate[5:] == ["658.4", "671.6", "665.0", "13.30", "2.00 %", "1504", "500 after 100, 7 discarded"]
    assert cells(text, "baseline", "mission", "0")[5] == "1200.8"


def test_only_deciding_speedups_stand_in_the_headline() -> None:
    rows = [speedup_row(), speedup_row(cache="cold", gated=False, required=0.0, verdict="SLOWER", speedup=0.9)]
    report = render(record(speedups=rows))
    assert "cold" not in headline(report)[1]
    assert cells(section(report, "Performance"), "mission", "cold")[5:8] == ["none", "SLOWER", "no"]


def test_resources_and_machine_code_of_both_sides() -> None:
    report = render(record())
    resources = section(report, "Compiler resources")
    dims = "B=1 H=8 S=512 D=64"
    assert cells(resources, "baseline")[1:] == ["stage1", dims, "88", "30.2 KB", "512 + 30413", "16", "4 / 8"]
    assert cells(resources, "candidate")[1:] == ["stage2", dims, "84", "37.1 KB", "512 + 37478", "16", "4 / 8"]
    evidence = section(report, "Evidence")
    assert "PASS: hmma rose" in evidence
    assert cells(evidence, "side") == ["side", "dims", "cp_async", "hmma"]
    assert cells(evidence, "baseline")[2:] == ["12", "32"]
    assert cells(evidence, "candidate")[2:] == ["12", "64"]


def test_decision_with_all_its_reasons() -> None:
    text = section(render(record()), "Decision")
    assert "**MERGE**" in text
    for reason in record().reasons:
        assert f"- {reason}" in text


def test_reproduction_names_command_and_inputs() -> None:
    text = section(render(record()), "How to reproduce")
    assert "```\ngreenfast judge fp8_sdpa --candidate stage2\n```" in text
    assert cells(text, "small", "B=1 H=1 S=32 D=64", "2")[3] == "digest-small-2"
    other = [correctness_row("small", 0, inputs_digest="else")]
    candidate = side("stage2", p50_us=1, registers=8, smem=9, scale=1, hmma=1, correctness=other)
    text = section(render(record(candidate=candidate)), "How to reproduce")
    assert "DIFFERENT INPUTS: baseline digest-small-0, candidate else" in text


def test_build_metadata() -> None:
    text = section(render(record()), "Build metadata")
    assert cells(text, "baseline toggles")[1] == "USE_CP_ASYNC=1 USE_WMMA_PV=0"
    assert cells(text, "candidate toggles")[1] == "USE_CP_ASYNC=1 USE_WMMA_PV=1"
    kernel = "candidate kernel, B=1 H=8 S=512 D=64"
    assert cells(text, kernel)[1] == "sdpa_stage2 in sdpa_stage2.cu, NVRTC 13.0.88, sm_90a, 812 ms"
    assert cells(text, f"{kernel}: options")[1] == "-std=c++17 --use_fast_math"
    assert cells(text, f"{kernel}: hash of the source")[1] == "hash-sdpa_stage2"
    assert cells(text, f"{kernel}: hash of the machine code")[1] == "code-sdpa_stage2"
    assert cells(text, "git")[1] == "0123456789abcdef0123 on main, dirty"
    assert cells(text, "device")[1] == "NVIDIA H100, compute capability 9.0"
    assert cells(text, "CUDA, driver")[1] == "13.0, 580.95"
    assert cells(text, "device size")[1] == "132 SMs at 1980 MHz, memory 80.0 GiB, L2 50.0 MiB"
    assert cells(text, "clock: sm_mhz_start")[1] == "1755"
    assert cells(text, "python")[1] == "3.11.9"
    assert cells(text, "greenfast")[1] == f"0.1.0, record schema {SCHEMA_VERSION}"


def test_what_did_not_run_is_pending_with_its_reason() -> None:
    report = render(pending_record())
    assert headline(report)[:2] == [
        "- **Correctness**: PENDING: no GPU on this machine",
        "- **Performance**: PENDING: no GPU on this machine",
    ]
    for name in ("Correctness", "Performance", "Parity of the two sides"):
        assert section(report, name).strip().startswith("PENDING: ")
    assert cells(section(report, "Gates"), "PERFORMANCE")[1:] == ["no GPU on this machine", "-", "-", "PENDING"]
    assert cells(section(report, "Build metadata"), "device")[1] == "no device"


def test_an_empty_record_is_still_a_report() -> None:
    sides = {name: Side(variant=name, toggles={}) for name in ("baseline", "candidate")}
    report = render(pending_record(**sides, gates=[], reasons=[]))
    assert headline(report)[2] == "- **Resources**: PENDING: the BUILD gate did not run"
    assert section(report, "Evidence").strip() == "PENDING: the EVIDENCE gate did not run"
    assert section(report, "Gates").strip() == "PENDING: no gate ran"


def test_one_side_without_builds_is_pending() -> None:
    report = render(pending_record(candidate=Side(variant="stage2", toggles={})))
    assert headline(report)[2].startswith(
        "- **Resources**: PENDING: the BUILD gate did not run (baseline: 88 registers"
    )


@pytest.mark.parametrize("reasons", [[], ["one"], ["a\nb", "second", "third"] * 9])
def test_short_form_is_short_and_complete(reasons: list[str]) -> None:
    text = short_form(record(reasons=reasons))
    assert len(text.splitlines()) <= 15
    assert text.startswith("**MERGE**: fp8_sdpa, `stage1` -> `stage2`, int8, sm_90a\n")
    for line in headline(render(record())):
        assert line in text
    assert "RESOURCES PASS, CORRECTNESS PASS, PERFORMANCE PASS, EVIDENCE PASS" in text
    assert "NVIDIA H100; commit 0123456789 (dirty)" in text
    assert "`greenfast judge fp8_sdpa --candidate stage2`" in text
    if len(reasons) > 2:
        assert "a b; second; and 25 more" in text


def test_a_quoted_performance_says_so_wherever_it_stands() -> None:
    one = quoting_record()
    report = render(one, plot=None)
    source = "quoted from NVIDIA H100, 2030-01-02, commit 0123456789 (dirty)"
    assert headline(report)[1] == (
        f"- **Performance**: not measured here, {source}: mission (warm) 1.829x [1.810, 1.851], required 1.15x: FAST"
    )
    text = section(report, "Performance")
    assert f"### Not measured in this run: {source}\n\nNothing was timed here." in text
    assert cells(text, "mission", "warm")[2:4] == ["1.829x", "[1.810, 1.851] at 95 %"]
    assert cells(text, "record")[1] == "evidence/h100/stage2/record.json"
    assert cells(text, "SHA-256 of the record")[1] == "ab" * 32
    assert cells(text, "device")[1] == "NVIDIA H100, driver 580.95, CUDA 13.0"
    assert cells(text, "command")[1] == "greenfast judge fp8_sdpa --candidate stage2"
    assert "p50" not in text
    assert f"**Performance**: not measured here, {source}" in short_form(one)
    assert "PTX emulator (emulated)" in short_form(one)
