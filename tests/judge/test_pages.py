"""What a page adds to a record: from its task, as far as the record may say what is computed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from greenfast.judge.pages import digest, find_work, record_page
from greenfast.judge.record_schema import Record
from greenfast.judge.task import load
from tests.judge.report.records import correctness_row, record, side, timing_row
from tests.judge.report.webpage.reading import read

TASK = load("fp8_sdpa")
DIMS = {"B": 1, "H": 8, "S": 512, "D": 64}
#: 4 S^2 D per head; three inputs of a byte, an output of two and six scales of four bytes for each head.
FLOPS, NBYTES = 4 * 8 * 512**2 * 64, 8 * 512 * 64 * (3 + 2)


def timed(shape: str, dims: dict[str, int]) -> Record:
    sides = [
        side(name, p50_us=1, registers=1, smem=1, scale=1, hmma=1, timing=[timing_row(p50_us=9.0, shape="mission")])
        for name in ("stage1", "stage2")
    ]
    renamed = [
        msgspec.structs.replace(s, timing=[msgspec.structs.replace(s.timing[0], shape=shape, dims=dims)]) for s in sides
    ]
    return record(baseline=renamed[0], candidate=renamed[1])


def test_work_of_a_shape_of_the_task() -> None:
    name = TASK.config.shape("mission").name
    (found,) = find_work(timed(name, DIMS), TASK).values()
    assert found.least["matrix_flops"] == FLOPS
    assert NBYTES <= found.moved_bytes <= NBYTES + 8 * 32


def test_a_record_does_not_choose_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("computed for dimensions that the task does not have")

    monkeypatch.setattr("greenfast.judge.pages.least_work", never)
    monkeypatch.setattr(TASK.problem, "make_case", never)
    name = TASK.config.shape("mission").name
    for shape, dims in ((name, {**DIMS, "S": 2**40}), ("no such shape", DIMS)):
        (found,) = find_work(timed(shape, dims), TASK).values()
        assert (dict(found.least), found.moved_bytes) == ({}, 0)


def test_what_the_record_holds_comes_first() -> None:
    one = timed("mine", DIMS)
    rows = [correctness_row("mission", 0)]
    rows = [msgspec.structs.replace(row, shape="mine", case_bytes=77) for row in rows]
    candidate = msgspec.structs.replace(one.candidate, correctness=rows)
    one = msgspec.structs.replace(one, least_work={"mine": {"matrix_flops": 5}}, candidate=candidate)
    (found,) = find_work(one, None).values()
    assert (dict(found.least), found.moved_bytes) == ({"matrix_flops": 5}, 77)


@pytest.mark.parametrize("task", ["unknown_task", "folder/of/a/record", "..", "."])
def test_a_record_does_not_choose_what_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str) -> None:
    for folder in (tmp_path, tmp_path / "folder/of/a/record"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config_forward.json").write_text((TASK.folder / "config_forward.json").read_text())
    monkeypatch.chdir(tmp_path)
    loaded: list[object] = []
    for name in ("_import_module", "load_family"):
        monkeypatch.setattr(f"greenfast.judge.task.{name}", lambda *args: loaded.append(args))
    page = read(record_page(record(task=task)))
    assert loaded == []
    assert "Machine code Not shown: " in page.text


def test_the_digest_is_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(b"{}")
    expected = hashlib.sha256(b"{}").hexdigest()
    assert digest(tmp_path) == digest(tmp_path / "record.json") == expected
