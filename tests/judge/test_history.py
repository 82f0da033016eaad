"""Records are found below a folder and in its git history; what is none is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from greenfast.judge.record_io import load_records, load_required_records, records_below
from greenfast.judge.record_schema import Record
from greenfast.judge.store import to_json
from greenfast.spec.errors import MachineError, UsageError
from tests.judge.report.records import record

pytestmark = pytest.mark.usefixtures("made_up_records")


def write(folder: Path, content: Record | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "record.json"
    path.write_text(content if isinstance(content, str) else to_json(content))
    return path


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_every_record_below_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a/b", record())
    write(tmp_path / "c", record(created="2031-01-01T00:00:00Z"))
    write(tmp_path / "broken", "{}")
    found, skipped = records_below(tmp_path)
    assert sorted(name for name, _ in found) == ["a/b/record.json", "c/record.json"]
    assert len(skipped) == 1
    assert skipped[0].startswith("broken/record.json: not a record")


def test_what_is_no_file_is_no_record(tmp_path: Path) -> None:
    """A pipe of its name would be waited for, a device read without end."""
    for name in ("pipe", "device", "folder"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "record.json")
    (tmp_path / "device" / "record.json").symlink_to("/dev/zero")
    (tmp_path / "folder" / "record.json").mkdir()
    assert records_below(tmp_path) == ([], [])
    assert load_records(tmp_path) == []
    with pytest.raises(UsageError, match=r"no record\.json there holds a comparison"):
        load_required_records(tmp_path)


def test_the_versions_that_git_holds(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    git(tmp_path, "init", "-q")
    for content in (
        "{}",  # of a version that cannot be read any more
        record(created="2030-01-01T00:00:00Z"),
        record(created="2030-01-02T00:00:00Z"),
        record(created="2030-01-02T00:00:00Z", package_version="renewed"),
    ):
        write(evidence / "kernel", content)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "-m", "a run")
    assert [one.created[:10] for _, one in records_below(evidence)[0]] == ["2030-01-02"]
    found, skipped = records_below(evidence, git=True)
    assert [one.created[:10] for _, one in found] == ["2030-01-02", "2030-01-01"]
    assert found[0][1].package_version == "renewed"  # of a run that is there twice, the newest
    assert "evidence/kernel/record.json at " in found[1][0]
    assert len(skipped) == 1


def test_what_cannot_be_searched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        records_below(tmp_path / "nothing")
    with pytest.raises(MachineError, match="git log"):
        records_below(tmp_path, git=True)
