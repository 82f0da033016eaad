"""Atomic writes of results, and strict reading of JSON files: a duplicate name in an object is an error.

Most readers of JSON silently take one of the two, not always the same. A person and the judge could then see different
things in one file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.files import read_file


def decode(text: bytes, kind: Any = Any) -> Any:
    """Decode a JSON text to this type. Raises msgspec.DecodeError, or its subclass ValidationError for another type."""
    try:
        value = msgspec.json.decode(text)
        json.loads(text, object_pairs_hook=once, parse_int=str, parse_float=str)  # of any length
        return value if kind is Any else msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        raise
    except (ValueError, RecursionError) as e:
        raise msgspec.DecodeError(str(e)) from e


def once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Convert an object's pairs to a dict. Raises msgspec.DecodeError with the duplicate name."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[Any] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise msgspec.DecodeError(f"{twice!r} is twice in one object; give each name once")
    return result


def to_json(value: object, *, dense: bool = False) -> str:
    """Return the JSON of a record or of plain data with one row per line: a list element or a mapping of plain values.

    dense: without spaces.
    """
    separators = (",", ":") if dense else (", ", ": ")
    return "".join(_lines(msgspec.json.decode(msgspec.json.encode(value)), separators, "")) + "\n"


def _lines(value: Any, separators: tuple[str, str], indent: str, rows: bool = False) -> Iterator[str]:
    """Yield the pieces of a value's text. rows: the values of this mapping are rows of a table."""
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(items, list) or not any(isinstance(item, dict | list) for item in items):
        yield _line(value, separators)
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    names = [f"{_line(name, separators)}: " for name in value] if isinstance(value, dict) else [""] * len(items)
    yield opening
    for n, (name, item) in enumerate(zip(names, items, strict=True)):
        yield f"{',' if n else ''}\n{indent} {name}"
        if rows or isinstance(value, list):
            yield _line(item, separators)
        else:
            yield from _lines(item, separators, f"{indent} ", is_table(value) and item is value["rows"])
    yield f"\n{indent}{closing}"


def _line(value: Any, separators: tuple[str, str]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=separators)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files by their path below a folder; return the folder. Raises as ``write_whole``."""
    for name, content in files.items():
        write_whole(folder / name, content)
    return folder


def check_writable(folder: Path, option: str = "--out") -> None:
    """Create ``folder`` if it is missing. Raise MachineError, with the option's name, if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise MachineError(
            f"results folder {folder} cannot be written ({e.strerror}); choose another with {option}"
        ) from e


def check_output_file(file: Path | None, option: str) -> None:
    """Raise UsageError or MachineError if an option's file cannot be written. None is allowed."""
    if file is None:
        return
    if file.exists() and not file.is_file():
        kind = "a folder" if file.is_dir() else "no regular file"
        raise UsageError(f"{option} {file}: {kind}; give the name of a file")
    check_writable(file.parent, option)


def make_stamped(parent: Path, stamp: str, make: Callable[[Path], object]) -> Path:
    """Make ``parent/<stamp>`` by calling ``make``, or ``<stamp>-2`` and so on if it exists. Return the folder.

    Raises the OSError of ``make`` for a folder that does not exist.
    """
    for attempt in range(1, 1000):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            make(folder)
        except OSError:
            if not folder.exists():
                raise
            continue
        return folder
    raise MachineError(f"{parent}: a thousand runs of the second {stamp}")


@contextlib.contextmanager
def new_run_folder(parent: Path, stamp: str) -> Iterator[tuple[Path, Callable[[], Path]]]:
    """Yield a temporary folder, and a function that renames it to ``parent/<stamp>`` in one step.

    A second run in the same second gets the suffix -2, and so on. A folder that is not published, because of an error
    or an interrupt, is removed. Raises MachineError if the folder or a file in it cannot be written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
    except OSError as e:
        raise MachineError(f"results folder {parent} cannot be written ({e.strerror})") from e

    try:
        work.chmod(0o755)
        # A rename fails if the folder exists, because published folders are not empty.
        yield work, lambda: make_stamped(parent, stamp, lambda folder: os.rename(work, folder))
    except OSError as e:
        raise MachineError(f"the run could not be saved in {parent}: {e}") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the content of a file in one step. Raises MachineError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as e:
        raise MachineError(f"{path} cannot be written ({e.strerror})") from e


def read_json(path: Path, kind: Any, name: str) -> Any:
    """Read a file of this kind of data. Raises UsageError with the file and its fault."""
    try:
        content = unpack(decode(read_file(path)))
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror})") from e
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:  # no JSON, or a damaged table
        raise _other(path, name, e) from e
    return convert_json(content, kind, path, name)


def convert_json(content: Any, kind: Any, path: Path, name: str) -> Any:
    """Convert decoded JSON to this type. Raises as ``read_json`` does."""
    try:
        return msgspec.convert(content, kind)
    except (ValueError, RecursionError) as e:  # msgspec's ValidationError is one
        raise _other(path, name, e) from e


def _other(path: Path, name: str, why: Exception) -> UsageError:
    return UsageError(f"{path}: not a {name} as greenfast writes it: {why}")


#: Tables in kept records: the cell of a field that a row lacks, and the name of the first element of a list.
ABSENT, FIRST = "-", "[0]"
_KEYS = {"table", "rows"}
_ALL_KEYS = {*_KEYS, "shared", "texts"}


class _Fields(dict[str, Any]):
    """The fields of a row's field, or by place the elements of its list; not the content of a cell."""


def unpack(value: Any) -> Any:
    """Return the data of tables as ``scripts/kept_records.py`` makes them. Raises an exception of Python for damage."""
    if isinstance(value, list):
        return [unpack(item) for item in value] if any(isinstance(item, dict | list) for item in value) else value
    if not isinstance(value, dict):
        return value
    if not is_table(value):
        return {name: unpack(item) for name, item in value.items()}
    columns, shared, texts = value["table"], value.get("shared", {}), value.get("texts", {})
    paths = [column.split(".") for column in columns]
    unshared = [column for column in columns if column not in shared]

    def build(cells: Sequence[Any]) -> dict[str, Any]:
        values = {**shared, **dict(zip(unshared, cells, strict=True))}
        for column, words in texts.items():
            values[column] = words[values[column]]
        return _build_row(paths, [values[column] for column in columns])

    rows = value["rows"]
    return {name: build(row) for name, row in rows.items()} if isinstance(rows, dict) else [build(r) for r in rows]


def is_table(value: dict[str, Any]) -> bool:
    """Return whether a mapping is a table."""
    return _KEYS <= value.keys() <= _ALL_KEYS


def _build_row(paths: Sequence[Sequence[str]], cells: Sequence[Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for (*outer, name), cell in zip(paths, cells, strict=True):
        if cell != ABSENT:
            fields = row
            for part in outer:
                fields = fields.setdefault(part, _Fields())
            fields[name] = unpack(cell)
    return {name: _restore_lists(value) for name, value in row.items()}


def _restore_lists(fields: Any) -> Any:
    """Turn nested fields named by a list's places into lists again."""
    if not isinstance(fields, _Fields):
        return fields
    items = {name: _restore_lists(value) for name, value in fields.items()}
    return [items[f"[{n}]"] for n in range(len(items))] if FIRST in items else items
