"""scripts/refresh_hashes.py writes hashes alone: a record stays of its version, with what it concluded."""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec
import pytest

from greenfast.bench.record_io import read_record
from greenfast.judge.artifacts import RECORD
from greenfast.judge.record_schema import PhaseRecord, Record
from scripts import refresh_hashes

EVIDENCE = Path(__file__).parents[1] / "evidence"


@pytest.mark.parametrize("name", ["h100/fp8_sdpa-e4m3-stage2", "h200/fp8_sdpa-e4m3-stage2"])
def test_a_new_hash_is_all_that_changes(name: str, tmp_path: Path) -> None:
    path = tmp_path / RECORD
    path.write_bytes((EVIDENCE / name / RECORD).read_bytes())
    before = read_record(path)
    assert isinstance(before, Record)
    first, *rest = before.candidate.builds
    launches = dict(list(first.launches.items())[1:])
    forgotten = msgspec.structs.replace(first, launches=launches)
    changed = msgspec.structs.replace(first, kernel_hash="0123456789abcdef")

    def with_build(build: object) -> Record:
        side = msgspec.structs.replace(before.candidate, builds=[build, *rest])
        return msgspec.structs.replace(before, candidate=side)

    text = path.read_text()
    refresh_hashes._write(path, before, before)
    assert path.read_text() == text
    refresh_hashes._write(path, before, with_build(changed))
    lines = list(difflib.unified_diff(text.splitlines(), path.read_text().splitlines(), lineterm="", n=0))[2:]
    kinds = sorted(line[1:].split(":")[0].strip() for line in lines if line[0] in "+-")
    assert kinds == ['"digest"'] * 2 + ['"kernel_hash"'] * 2
    assert read_record(path) == with_build(changed)
    path.write_text(text)
    refresh_hashes._write(path, with_build(forgotten), before)  # what an older record lacks
    assert read_record(path) == before


def test_phases_too(tmp_path: Path) -> None:
    path = tmp_path / RECORD
    path.write_bytes((EVIDENCE / "h100/fp8_sdpa-e4m3-stage2-phases" / RECORD).read_bytes())
    before = read_record(path)
    assert isinstance(before, PhaseRecord)
    (build,) = before.side.builds
    side = msgspec.structs.replace(before.side, builds=[msgspec.structs.replace(build, code_hash="0" * 16)])
    refresh_hashes._write(path, before, msgspec.structs.replace(before, side=side))
    found = read_record(path)
    assert isinstance(found, PhaseRecord)
    assert found.side == side


def test_insights_follow_their_records(tmp_path: Path) -> None:
    file = tmp_path / "insights.jsonl"
    file.write_text('{"record": "aa"}\n{"record": ""}\n{"record": "bb"}\n')
    refresh_hashes.restamp(file, {"aa": "cc", "dd": "ee"})
    assert file.read_text() == '{"record": "cc"}\n{"record": ""}\n{"record": "bb"}\n'
