"""Kept records: a file of measurements and an index of identities give the record that was split."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from greenfast.judge.record_io import INDEX, RECORD, load_records, read_content, read_record, records_below
from greenfast.judge.store import read_json, unpack
from greenfast.spec.errors import UsageError
from scripts.kept_records import pack, render_index, render_record, split

EVIDENCE = Path(__file__).parents[2] / "evidence"
NAME = "h100/fp8_sdpa-e4m3-stage2"

_NAMES = ("a", "b", "table", "a.b", "[0]", "shared")
_CELLS: tuple[Any, ...] = (None, True, 1, 1.0, "-", "x", "a text that is long and that recurs", [], {})


def drawn(random: random.Random, depth: int) -> Any:
    """Nested data with mappings that are often alike."""
    kind = random.choice("clmr") if depth else "c"
    if kind == "c":
        return random.choice(_CELLS)
    if kind == "r":
        names = random.sample(_NAMES, random.randrange(1, 4))
        return [{name: drawn(random, depth - 1) for name in names} for _ in range(random.randrange(5))]
    items = [drawn(random, depth - 1) for _ in range(random.randrange(5))]
    return items if kind == "l" else dict(zip(random.sample(_NAMES, len(items)), items, strict=True))


def whole(folder: Path) -> dict[str, Any]:
    """The kept record as one plain record, in a folder of its own."""
    content = read_content(EVIDENCE / NAME / RECORD)
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps(content))
    return content


def keep(content: dict[str, Any], evidence: Path) -> Path:
    """Write a record and its index as scripts/update_results.py does."""
    measured, entry = split(content, f"{NAME}/{RECORD}")
    assert entry is not None
    path = evidence / NAME / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_record(measured))
    (evidence / INDEX).write_text(render_index({f"{NAME}/{RECORD}": entry}))
    return path


def test_a_table_holds_its_rows() -> None:
    source, tables = random.Random(0), 0
    for _ in range(500):
        value = drawn(source, 4)
        text = json.dumps(pack(value))
        tables += '"rows"' in text
        assert json.dumps(unpack(json.loads(text))) == json.dumps(value), value
    assert tables > 50


def test_a_table_names_its_fields_once() -> None:
    rows = [{"x": {"y": n}, "z": [{"w": 1}], **({"v": 2} if n else {})} for n in range(5)]
    packed = {
        "table": ["x.y", "z.[0].w", "v"],
        "shared": {"z.[0].w": 1},
        "rows": [[0, "-"], [1, 2], [2, 2], [3, 2], [4, 2]],
    }
    assert pack(rows) == packed
    assert unpack(packed) == rows
    text = "a text that is long enough"
    assert pack([{"t": text + s} for s in "abab"])["texts"] == {"t": [text + "a", text + "b"]}


@pytest.mark.parametrize(
    "damage", [{"rows": [[1]]}, {"rows": 3}, {"table": 3}, {"texts": {"a": []}}, {"texts": {"c": []}}, {"shared": []}]
)
def test_a_damaged_table_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"of": {"table": ["a", "b"], "rows": [[1, 2], [3, 4]]} | damage}))
    with pytest.raises(UsageError, match=r"a\.json: not a record as greenfast writes it"):
        read_json(path, dict[str, Any], "record")


def test_a_record_and_its_kept_form_are_one(tmp_path: Path) -> None:
    content = whole(tmp_path / "run")
    path = keep(content, tmp_path / "evidence")
    assert read_content(path) == content
    assert read_record(path) == read_record(tmp_path / "run") == read_record(EVIDENCE / NAME)
    (one,) = load_records(tmp_path / "evidence")
    assert one.record == read_record(tmp_path / "run")


def test_an_edited_record_or_index_is_refused(tmp_path: Path) -> None:
    path = keep(whole(tmp_path / "run"), tmp_path / "evidence")
    text, index = path.read_text(), tmp_path / "evidence" / INDEX
    path.write_text(text.replace('"order_seed": ', '"order_seed": 1'))
    with pytest.raises(UsageError, match=r"its digest is .* it was edited"):
        read_record(path)
    path.write_text(text.replace("../../index.json", "/etc/index.json"))
    with pytest.raises(UsageError, match=r"index is '/etc/index\.json', not index\.json of a folder above it"):
        read_record(path)
    path.write_text(text)
    entry = index.read_text()
    index.write_text(entry.replace("/baseline/builds/0", "/baseline/builds/9"))
    with pytest.raises(UsageError, match=r"the entry .*record\.json does not fit its record"):
        read_record(path)
    index.write_text(entry.replace('"compiler": "NVRTC', '"compiler": "another'))
    with pytest.raises(UsageError, match="recomputed it is"):
        read_record(path)
    index.write_text("{}")
    with pytest.raises(UsageError, match=r"has no entry h100/fp8_sdpa-e4m3-stage2/record\.json"):
        read_record(path)
    index.unlink()
    with pytest.raises(UsageError, match=r"index\.json: cannot be read .*; a kept record needs its index"):
        read_record(path)


def test_the_history_of_a_kept_record_is_read_with_its_index(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    content = whole(tmp_path / "run")
    for created in ("2030-01-01T00:00:00Z", "2030-01-02T00:00:00Z"):
        keep(content | {"created": created}, evidence)
        subprocess.run(["git", "-C", tmp_path, "add", "evidence"], check=True)
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *author, "commit", "-q", "-m", "a run"], check=True)
    found, skipped = records_below(evidence, git=True)
    assert skipped == []
    assert [record.created[:10] for _, record in found] == ["2030-01-02", "2030-01-01"]
