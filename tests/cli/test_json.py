"""``--json`` of every verb: one document on standard output."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from greenfast.cli.main import main, parser
from greenfast.cli.options import VERBS
from greenfast.judge.record_io import read_content
from tests.cli.command_line import ROOT, run_here
from tests.judge.report.records import timing_row

RUNS = ROOT / "evidence" / "h200"
RUN, OTHER = RUNS / "fp8_sdpa-e4m3-stage2", RUNS / "fp8_sdpa-e4m3-stage1"


def test_every_verb_has_the_option() -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
    verbs = next(action.choices for action in parser()._actions if isinstance(action.choices, dict))
    assert [name for name, options in verbs.items() if "--json" not in options._option_string_actions] == []


def test_the_record_of_a_run_with_its_conclusions(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_here(capsys, "report", RUN, "--json")
    assert (ran.code, ran.err) == (0, "")
    record = json.loads(ran.out)
    assert record["decision"] == "MERGE"
    assert record["candidate"]["variant"] == read_content(RUN / "record.json")["candidate"]["variant"]
    two = json.loads(run_here(capsys, "report", RUN, OTHER, "--json").out)
    assert [one["candidate"]["variant"] for one in two] == ["stage2", "stage1"]
    assert run_here(capsys, "report", RUN, "--json", "--short").code == 2


def test_a_table_and_a_history(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = json.loads(run_here(capsys, "report", "--table", RUN, "--json").out)
    assert (row["decision"], row["candidate"]) == ("MERGE", "stage2")
    assert row["speedups"][0]["speedup"] > 1
    history = json.loads(run_here(capsys, "report", RUNS, "--json").out)
    assert "fp8_sdpa" in history["kernels"][0]["title"] + history["kernels"][-1]["title"]
    assert all(kernel["points"] for kernel in history["kernels"])


def test_a_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = []
    for name, us in (("a", 3.0), ("b", 2.0)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_bytes(msgspec.json.encode({"results": [timing_row("small", 0, us)]}))
    ran = run_here(capsys, "report", "--compare", *files, "--json", "--out", tmp_path / "compare.md")
    assert ran.code == 0, ran.err
    (one,) = json.loads(ran.out)
    assert one["average_speedup"] == pytest.approx(1.5)
    assert [(pair["baseline_us"], pair["candidate_us"], pair["speedup"]) for pair in one["pairs"]] == [(3.0, 2.0, 1.5)]
    assert "1.500x" in (tmp_path / "compare.md").read_text()


def test_kernels_of_the_library(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenfast.ops.warmup.kernels_for", lambda *_, **__: [])
    ran = run_here(capsys, "build", "--library", "--arch", "sm_90a", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["targets"][0] | {"seconds": 0.0} == {
        "target": "sm_90a", "left_out": [], "compiled": 0, "cached": 0, "seconds": 0.0
    }  # fmt: skip
    assert "0 kernels compiled" in ran.err
