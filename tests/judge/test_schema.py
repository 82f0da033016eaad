"""The published schema of records is today's, and names every field that records have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import record_schema as all_schemas
from greenfast.judge.record_io import read_content, record_schema

ROOT = Path(__file__).parents[2]
PUBLISHED: dict[str, Any] = json.loads((ROOT / "docs" / "record.schema.json").read_text(encoding="utf-8"))
#: The records of the judge and of benchmarks.
SCHEMA = all_schemas()
FILES = sorted((ROOT / "evidence").glob("*/*/record.json"))


def test_the_published_schema_is_todays() -> None:
    assert record_schema() == PUBLISHED, "run greenfast report --schema > docs/record.schema.json"


def test_every_kind_of_record_has_a_version_and_a_digest() -> None:
    assert set(PUBLISHED["discriminator"]["mapping"]) == {"comparison", "bench", "phases"}
    assert set(SCHEMA["discriminator"]["mapping"]) == {"comparison", "bench", "phases", "benchmark"}
    for kind in ("Record", "BenchRecord", "PhaseRecord", "Benchmark"):
        one = SCHEMA["$defs"][kind]
        assert {"schema_version", "digest", "kind", "gates", "created"} <= set(one["required"])
        assert one["properties"]["schema_version"] == {"enum": [2, 3]}


def undescribed(value: Any, schema: Any, where: str) -> list[str]:
    """Fields of ``value`` that its schema does not name, and required ones that it lacks."""
    if not isinstance(value, dict | list):
        return []
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        (schema,) = [one for one in schema["anyOf"] if one.get("type") != "null"]
        return undescribed(value, schema, where)
    if isinstance(value, list):
        items = schema.get("prefixItems") or [schema["items"]] * len(value)
        pairs = zip(value, items, strict=True)
        return [text for i, (item, one) in enumerate(pairs) for text in undescribed(item, one, f"{where}[{i}]")]
    if "properties" not in schema:
        inner = schema["additionalProperties"]
        return [text for key, item in value.items() for text in undescribed(item, inner, f"{where}.{key}")]
    found = [f"{where} lacks {name}" for name in schema.get("required", []) if name not in value]
    for key, item in value.items():
        one = schema["properties"].get(key)
        found += [f"{where}.{key} is not named"] if one is None else undescribed(item, one, f"{where}.{key}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_the_schema_describes_the_kept_records(path: Path) -> None:
    content = read_content(path)
    kind = SCHEMA["discriminator"]["mapping"][content["kind"]]
    assert undescribed(content, {"$ref": kind}, "record") == []
    assert undescribed(content | {"remark": 1}, {"$ref": kind}, "record") == ["record.remark is not named"]
