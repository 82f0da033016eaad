"""Files that are no JSON, or too deep for any reader: an error that names the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenfast.evolve.log import EVENTS, read_events
from greenfast.judge.formats.schema import read_definition, read_foreign_solution, read_workloads
from greenfast.judge.record import Record
from greenfast.judge.store import read_json
from greenfast.judge.task import CONFIG_NAME, load_task
from greenfast.spec.errors import UsageError

#: By the name of the file that each reads.
READERS: dict[str, Callable[[Path], Any]] = {
    "record.json": lambda path: read_json(path, Record, "record"),
    CONFIG_NAME: lambda path: load_task(path.parent),
    EVENTS: lambda path: read_events(path.parent),
    "definition.json": read_definition,
    "workload.jsonl": read_workloads,
    "foreign.json": read_foreign_solution,
}


@pytest.mark.parametrize("content", ["[" * 100_000, '{"workload": ', '"workload"', "\x00"], ids=lambda x: x[:12])
@pytest.mark.parametrize("name", READERS)
def test_the_file_is_named(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content + "\n")
    with pytest.raises(UsageError, match=re.escape(name)):
        READERS[name](path)
