"""``--html`` and the history of a folder of runs: files, messages and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from greenfast.judge.record_io import read_content
from tests.cli.command_line import ROOT, run_here
from tests.fakes import FakeDevice, Script, install, request
from tests.judge.report.webpage.reading import read

pytestmark = pytest.mark.usefixtures("machine")

SMALL = ("--shapes", "small", "--seeds", "0", "--processes", "3", "--iters", "12", "--warmup", "2")
EVIDENCE = ROOT / "evidence"
#: What the kept record of the Hopper kernel says.
HOPPER = next(
    row["speedup"]
    for row in read_content(EVIDENCE / "h200/fp8_attention-e4m3-hopper/record.json")["speedups"]
    if (row["shape"], row["cache"]) == ("b1_h8_s512_d64", "warm")
)


@pytest.fixture
def device(machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    """An L4 on which Stage 2 takes half the time of Stage 1."""
    asked = request(tmp_path, seeds=(0,))
    return install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=10.0)}))


@pytest.mark.usefixtures("device")
def test_validate_writes_the_page_of_its_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "pages/run.html"
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--out", tmp_path, "--html", file)
    assert (ran.code, ran.err) == (4, "")
    text = read(file.read_text()).text
    assert re.search(r"fp8_sdpa: stage1 → stage2 INCOMPLETE stage2 is (2\.00|1\.99)\d times as fast as stage1", text)
    assert "HMMA" in text  # the machine code of both sides
    assert "of matrix peak" in text or "The peaks of NVIDIA L4 are not known" in text
    assert "% of elements" in text  # errors as distributions


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "h100/fp8_quantize-e4m3-quantize_vector",
            "fp8_quantize: quantize_scalar → quantize_vector MERGE quantize_vector is ",
        ),
        ("h100/fp8_sdpa-e4m3-stage1-phases", "fp8_sdpa: phases of stage1"),
    ],
)
def test_report_writes_the_page_of_a_kept_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, says: str
) -> None:
    file = tmp_path / "run.html"
    ran = run_here(capsys, "report", EVIDENCE / name, "--html", file)
    assert (ran.code, ran.out, ran.err) == (0, f"{file}\n", "")
    assert says in read(file.read_text()).text


def test_a_page_that_cannot_be_written_is_said_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--out", tmp_path / "out", "--html", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "a folder; give the name of a file" in ran.err
    ran = run_here(capsys, "judge", "fp8_sdpa", *SMALL, "--out", tmp_path / "out", "--html", tmp_path / "file/x.html")
    assert (ran.code, ran.out) == (3, "")
    assert "--html" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_page_is_of_one_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = [EVIDENCE / "h100/fp8_sdpa-e4m3-stage1", EVIDENCE / "h100/fp8_sdpa-e4m3-stage2"]
    ran = run_here(capsys, "report", *runs, "--html", tmp_path / "x.html")
    assert ran.code == 2
    assert "--html is of one run" in ran.err


def test_history_is_a_table_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "history.html"
    ran = run_here(capsys, "report", EVIDENCE / "h200", "--html", file)
    assert ran.code == 0
    assert "fp8_attention: stage2 → hopper, e4m3, sm_90a on NVIDIA H200; b1_h8_s512_d64, warm L2" in ran.out
    assert f"{HOPPER:.3f}x" in ran.out
    assert "left out: peers/record.json" in ran.out
    assert f"{HOPPER:.3f}x" in read(file.read_text()).text


def test_history_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_here(capsys, "report", tmp_path)
    assert ran.code == 2
    assert "no record of a run is below it" in ran.err
    assert run_here(capsys, "report", tmp_path / "nothing").code == 2
