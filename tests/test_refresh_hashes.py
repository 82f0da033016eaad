"""scripts/refresh_hashes.py writes identities alone: a record stays as it was measured, with its conclusions."""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec
import pytest

from benchmarks.records import read_record
from greenfast.judge.record_io import INDEX, RECORD, read_content, read_index
from greenfast.judge.record_schema import PhaseRecord, Record
from greenfast.spec.errors import UsageError
from scripts import refresh_hashes
from scripts.kept_records import render_index

EVIDENCE = Path(__file__).parents[1] / "evidence"


def copy_record(name: str, folder: Path) -> Path:
    """A copy of a kept record, with an index of two entries."""
    path = folder / name / RECORD
    path.parent.mkdir(parents=True)
    path.write_bytes((EVIDENCE / name / RECORD).read_bytes())
    entries = read_index(EVIDENCE / INDEX)
    (folder / INDEX).write_text(render_index({one: entries[one] for one in (f"{name}/{RECORD}", "operator-h200.json")}))
    return path


@pytest.mark.parametrize("name", ["h100/fp8_sdpa-e4m3-stage2", "h200/fp8_sdpa-e4m3-stage2"])
def test_a_new_hash_is_all_that_changes(name: str, tmp_path: Path) -> None:
    path = copy_record(name, tmp_path)
    before = read_record(path)
    assert isinstance(before, Record)
    first, *rest = before.candidate.builds
    launches = dict(list(first.launches.items())[1:])
    forgotten = msgspec.structs.replace(first, launches=launches)
    changed = msgspec.structs.replace(first, kernel_hash="0123456789abcdef")

    def with_build(build: object) -> Record:
        side = msgspec.structs.replace(before.candidate, builds=[build, *rest])
        return msgspec.structs.replace(before, candidate=side)

    record, index = path.read_bytes(), (tmp_path / INDEX).read_text()
    refresh_hashes.write_identities(path, before, before)
    assert (tmp_path / INDEX).read_text() == index
    refresh_hashes.write_identities(path, before, with_build(changed))
    now = (tmp_path / INDEX).read_text().splitlines()
    lines = list(difflib.unified_diff(index.splitlines(), now, lineterm="", n=0))[2:]
    kinds = sorted(line[1:].split(":")[0].strip() for line in lines if line[0] in "+-")
    assert kinds == ['"/candidate/builds/0"'] * 2 + ['"digest"'] * 2
    assert read_record(path) == with_build(changed)
    (tmp_path / INDEX).write_text(index)
    refresh_hashes.write_identities(path, with_build(forgotten), before)  # fields that an older record lacks
    assert read_record(path) == before
    assert path.read_bytes() == record


def test_phases_too(tmp_path: Path) -> None:
    path = copy_record("h100/fp8_sdpa-e4m3-stage2-phases", tmp_path)
    before = read_record(path)
    assert isinstance(before, PhaseRecord)
    (build,) = before.side.builds
    side = msgspec.structs.replace(before.side, builds=[msgspec.structs.replace(build, code_hash="0" * 16)])
    refresh_hashes.write_identities(path, before, msgspec.structs.replace(before, side=side))
    found = read_record(path)
    assert isinstance(found, PhaseRecord)
    assert found.side == side


def test_a_record_that_is_in_no_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / RECORD
    path.write_text("{}")
    record = read_record(EVIDENCE / "h100/fp8_sdpa-e4m3-stage2-phases")
    with pytest.raises(UsageError, match=r"not a kept record; run python -m scripts\.update_results"):
        refresh_hashes.write_identities(path, record, msgspec.structs.replace(record, created="now"))


def test_a_row_of_the_emulators_comparison_has_a_new_hash_for_the_same_machine_code_alone() -> None:
    row = read_content(refresh_hashes.ROOT / refresh_hashes.EMULATED)["rows"][0]
    other = row | {"kernel_hash": "0123456789abcdef"}
    assert refresh_hashes.renew_emulated([other]).status == "current"
    assert other == row
    other = row | {"kernel_hash": "0123456789abcdef", "code_hash": "0123456789abcdef"}
    assert refresh_hashes.renew_emulated([other]).status == "stale"
    assert other["kernel_hash"] == "0123456789abcdef"
