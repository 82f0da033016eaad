"""What the tasks' insights say was measured is in the records that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from greenfast.evolve.language import prompt
from greenfast.evolve.proposal import Context, Insight, read_lines
from greenfast.evolve.space import Space
from greenfast.judge.record_io import compute_digest, read_record
from greenfast.judge.report.markdown import report
from greenfast.judge.store import read_json

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("tasks/*/insights.jsonl"))
ROWS = [json.loads(line) for file in FILES for line in file.read_text(encoding="utf-8").splitlines()]


def test_each_task_has_insights() -> None:
    assert [file.parent.name for file in FILES] == ["fp8_attention", "fp8_quantize", "fp8_sdpa_stage_c_wmma"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["change"])[:40])
def test_an_insight_is_measured_if_and_only_if_its_record_is_there(row: dict[str, str]) -> None:
    source = ROOT / row["source"]
    if not row["source"].startswith("evidence/"):
        assert row["record"] == ""
        assert source.is_file()
        return
    assert row["record"] == compute_digest(read_json(source, dict[str, Any], "record")), (
        "check that the outcome still holds"
    )
    if source.name == "record.json":
        text = report(read_record(source))
        assert [i for i in re.findall(r"\[[\d.]+, [\d.]+\]", row["outcome"]) if i not in text] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.name))
def test_only_what_was_measured_is_told(file: Path) -> None:
    insights = read_lines(file, Insight, "insight")
    text = prompt(Context(space=Space(name="s"), task="t", wanted=1, seed=0, insights=insights), "insight")
    assert [i.change in text for i in insights] == [bool(i.record) for i in insights]
