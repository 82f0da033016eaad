"""Results are written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenfast.judge.record_io import PerformanceFile
from greenfast.judge.store import check_writable, new_run_folder, read_json, to_json, write_whole
from greenfast.spec.errors import MachineError, UsageError

STAMP = "20300102-030405"


def save(parent: Path, text: str = "x") -> Path:
    """A run folder with one file."""
    with new_run_folder(parent, STAMP) as (work, publish):
        (work / "a.json").write_text(text)
        return publish()


def failing(number: int) -> Callable[..., Any]:
    """A system call that fails with this error."""

    def call(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def below_a_file(tmp_path: Path) -> Path:
    """A folder that not even root can make."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "results"


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [save(tmp_path, text) for text in "abc"]
    assert [f.name for f in folders] == [STAMP, f"{STAMP}-2", f"{STAMP}-3"]
    assert [(f / "a.json").read_text() for f in folders] == ["a", "b", "c"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / STAMP).write_text("a file")
    assert save(tmp_path).name == f"{STAMP}-2"
    assert (tmp_path / STAMP).read_text() == "a file"


def test_a_run_is_not_seen_before_it_is_published(tmp_path: Path) -> None:
    with new_run_folder(tmp_path, STAMP) as (work, publish):
        (work / "a.json").write_text("x")
        assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".unfinished-")] == []
        folder = publish()
        assert (folder / "a.json").read_text() == "x"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in tmp_path.iterdir()] == [STAMP]


def save_and_fail(parent: Path, error: BaseException, *, published: bool = False) -> None:
    """Begin a run folder, and fail with that error."""
    with new_run_folder(parent, STAMP) as (work, publish):
        (work / "sub").mkdir()
        (work / "sub" / "half.json").write_text("{")
        if published:
            publish()
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, MachineError])
def test_nothing_is_left_of_a_run_that_ends_early(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        save_and_fail(tmp_path, error())
    assert list(tmp_path.iterdir()) == []


def test_what_was_published_before_an_error_stays(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        save_and_fail(tmp_path, RuntimeError(), published=True)
    assert [p.name for p in tmp_path.iterdir()] == [STAMP]


def test_a_folder_that_cannot_be_made_is_the_machines_error(tmp_path: Path) -> None:
    folder = below_a_file(tmp_path)
    with pytest.raises(MachineError, match=r"file/results cannot be written .*--out"):
        check_writable(folder)
    with pytest.raises(MachineError, match="cannot be written"):
        save(folder)
    with pytest.raises(MachineError, match="cannot be written"):
        write_whole(folder / "COMPARE.md", "text")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_the_machines_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    monkeypatch.setattr(os, "open", failing(number))
    monkeypatch.setattr(os, "mkdir", failing(number))
    for attempt in (lambda: check_writable(tmp_path), lambda: save(tmp_path), lambda: write_whole(tmp_path / "f", "x")):
        with pytest.raises(MachineError, match=os.strerror(number)):
            attempt()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["rename", "mkdir"])
def test_a_run_that_cannot_be_published_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    monkeypatch.setattr(os, call, failing(errno.EIO))
    with pytest.raises(MachineError, match=os.strerror(errno.EIO)):
        save(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"the run could not be saved in .*: .*No space left on device"):
        save_and_fail(tmp_path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "half.json"))
    assert list(tmp_path.iterdir()) == []


def test_write_whole_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "COMPARE.md"
    write_whole(path, "old")
    write_whole(path, "neu: µ")
    assert path.read_text(encoding="utf-8") == "neu: µ"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("call", ["replace", "chmod", "fdopen"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_old_content_survives_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, error: BaseException
) -> None:
    path = tmp_path / "COMPARE.md"
    write_whole(path, "old")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(MachineError if isinstance(error, OSError) else KeyboardInterrupt):
        write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `results`"),
        (b'{"results": [{"shape": 1}]}', r"\$\.results\[0\]"),
    ],
)
def test_what_is_no_result_is_a_usage_error_that_names_the_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "perf_baseline.json"
    path.write_bytes(content)
    with pytest.raises(
        UsageError, match=f"perf_baseline.json: not a perf_baseline.json as greenfast writes it: .*{said}"
    ):
        read_json(path, PerformanceFile, "perf_baseline.json")


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.json: cannot be read .No such file"):
        read_json(tmp_path / "none.json", PerformanceFile, "perf_baseline.json")


@pytest.mark.parametrize(
    "value",
    [
        {"b": [1.5, None], "µ": "x"},
        {"samples": [[1.0, 2e-9, -3], [4]], "none": []},
        {"text": "between [ 1,   2 ] and [3 ,4]", "path": "a\n[\n1,\n2]"},
        ["[ 1 ]", "[1,  2]"],
    ],
)
def test_json_comes_back_as_it_was(value: object) -> None:
    for text in (to_json(value), to_json(value, dense=True)):
        assert json.loads(text) == value
        assert text.endswith(("}\n", "]\n"))


def test_a_row_takes_a_line() -> None:
    value = {"name": "µ", "limits": {"low": 1.5, "high": None}, "rows": [{"of": {"x": 1}}, [2, [3]]], "none": []}
    assert to_json(value).splitlines() == [
        "{",
        ' "name": "µ",',
        ' "limits": {"low": 1.5, "high": null},',
        ' "rows": [',
        '  {"of": {"x": 1}},',
        "  [2, [3]]",
        " ],",
        ' "none": []',
        "}",
    ]
    table = {"table": ["a"], "rows": {"one": [[1]], "two": [[2]]}}
    assert to_json(table, dense=True).splitlines()[2:6] == [' "rows": {', '  "one": [[1]],', '  "two": [[2]]', " }"]
