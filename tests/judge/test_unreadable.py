"""Files that are no JSON, too deep for any reader, or in which a name stands twice: an error that names the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenfast.evolve.event_log import COSTS, EVENTS, Log, read_events
from greenfast.evolve.language import parse_answer
from greenfast.evolve.proposal import Candidate, read_lines
from greenfast.evolve.space import Space, read_space
from greenfast.judge.formats.flashinfer_trace import read_definition, read_foreign_solution, read_workloads
from greenfast.judge.record_schema import Record
from greenfast.judge.solution.schema import find_solution
from greenfast.judge.store import once, read_json
from greenfast.judge.task import CONFIG_NAME, load_task
from greenfast.spec.errors import MachineError, UsageError

#: By the name of the file that each reads.
READERS: dict[str, Callable[[Path], Any]] = {
    "record.json": lambda path: read_json(path, Record, "record"),
    CONFIG_NAME: lambda path: load_task(path.parent),
    EVENTS: lambda path: read_events(path.parent),
    "definition.json": read_definition,
    "workload.jsonl": read_workloads,
    "foreign.json": read_foreign_solution,
    "solution.json": find_solution,
    "space.json": read_space,
    "candidates.jsonl": lambda path: read_lines(path, Candidate, "candidate"),
}


@pytest.mark.parametrize("content", ["[" * 100_000, '{"workload": ', '"workload"', "\x00"], ids=lambda x: x[:12])
@pytest.mark.parametrize("name", READERS)
def test_the_file_is_named(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content + "\n")
    with pytest.raises(UsageError, match=re.escape(name)):
        READERS[name](path)


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for_and_a_device_not_read_to_its_end(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises((UsageError, MachineError), match=rf"{re.escape(name)}:? cannot be read \(no regular file\)"):
        READERS[name](path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises((UsageError, MachineError), match=rf"{re.escape(name)}:? cannot be read \(no regular file\)"):
        READERS[name](path)


#: Of each file that another may have written, what its reader took until a name stood twice.
TWICE = {
    "record.json": '{"task": "a", "task": "b"}',
    CONFIG_NAME: '{"seeds": [0], "seeds": [1]}',
    EVENTS: '{"n": 0, "n": 0, "what": "w", "at": [], "data": 1}',
    COSTS: '{"n": 0, "n": 0, "seconds": 0, "gpu_seconds": 0, "written": 0}',
    "definition.json": '{"axes": {"N": {"type": "var"}, "N": {"type": "var"}}}',
    "workload.jsonl": '{"uuid": "a", "axes": {"N": 1, "N": 2}, "inputs": {}}',
    "foreign.json": '{"name": "a", "name": "b"}',
    "solution.json": '{"name": "a", "na\\u006de": "b"}',
    "space.json": '{"name": "a", "name": "b"}',
    "candidates.jsonl": '{"parameters": {"A": 1, "A": 2}}',
    "k.cu": '/* greenfast: {"name": "a", "constants": {"A": 1, "A": 2}} */',
    "k.ptx": '// greenfast: {"name": "a", "name": "b"}',
    "k.py": 'GREENFAST = {"name": "a", "constants": {"A": 1, "A": 2}}',
}


@pytest.mark.parametrize("name", TWICE)
def test_a_name_that_stands_twice_in_an_object_is_named(name: str, tmp_path: Path) -> None:
    """Another reader may take the first, and a person sees both."""
    path = tmp_path / name
    path.write_text(TWICE[name] + "\n")
    readers = {**READERS, COSTS: lambda path: Log(path.parent), "k.cu": find_solution, "k.ptx": find_solution}
    with pytest.raises(UsageError) as found:
        readers.get(name, find_solution)(path)
    assert name in str(found.value)
    key = re.findall(r'"(\w+)"', TWICE[name].replace("\\u006d", "m"))
    twice = next(word for word in key if key.count(word) > 1)
    assert f"{twice!r} is twice in one object; give each name once" in str(found.value)
    assert "\n" not in str(found.value)


def test_a_python_file_has_one_header(tmp_path: Path) -> None:
    """The file's own code would see the last."""
    path = tmp_path / "k.py"
    path.write_text('GREENFAST = {"name": "a", "language": "family"}\nGREENFAST = {"name": "b"}\n')
    with pytest.raises(UsageError, match=r"k\.py: line 2: GREENFAST is assigned twice; assign it once"):
        find_solution(path)


def test_a_model_that_gives_a_name_twice_is_told_of() -> None:
    space = Space(name="s")
    text = '{"candidates": [{"rationale": "a", "rationale": "b", "parameters": {}}, {"parameters": {}}]}'
    found = parse_answer(text, space)
    assert len(found.candidates) == 1
    assert "'rationale' is twice in one object" in found.faults[0]


def test_no_file_of_the_project_has_a_name_twice() -> None:
    """Scripts, and the package of its own data, read these without ``decode``."""
    root = Path(__file__).parents[2]
    files = [
        path for room in ("evidence", "examples", "src", "tasks", "tests") for path in (root / room).rglob("*.json")
    ]
    assert len(files) > 100
    for path in files:
        json.loads(path.read_bytes(), object_pairs_hook=once)
