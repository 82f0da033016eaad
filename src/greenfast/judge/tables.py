"""Lists of like rows as tables: each field's name is written once, and a value that all rows share is written once.

``[{"a": 1, "b": 2}, {"a": 1, "b": 3}]`` becomes ``{"table": ["a", "b"], "shared": {"a": 1}, "rows": [[2], [3]]}``:
``table`` names the fields in their order, ``shared`` has the values that all rows share, and a row has the others. A
mapping of like rows has a mapping as ``rows``. ``"x.y"`` is the field y of a row's field x, ``"x.[0].y"`` the field y
of the first element of a row's list x, and the cell ``"-"`` means that the row lacks the field. Long texts that recur
in a column are listed in ``texts``, and its cells are positions in that list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_ABSENT = "-"
_FIRST = "[0]"
_KEYS = {"table", "rows"}
_ALL_KEYS = {*_KEYS, "shared", "texts"}
#: Characters from which a text that recurs is long.
_LONG = 24
#: The share of cells that have to be present in a table.
_LEAST_PRESENT = 0.75


class _Fields(dict[str, Any]):
    """The fields of a row's field, or by place the elements of its list; not the content of a cell."""


def pack(value: Any) -> Any:
    """Return plain JSON data with its lists and mappings of like rows as tables."""
    if isinstance(value, dict):
        table = _build_table(list(value.values()))
        if table is None:
            return {name: pack(item) for name, item in value.items()}
        return table | {"rows": dict(zip(value, table["rows"], strict=True))}
    if isinstance(value, list):
        return _build_table(value) or [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    """Return the data that ``pack`` was given. Raises an exception of Python for a damaged table."""
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
    """Return whether a mapping is a table of ``pack``."""
    return _KEYS <= value.keys() <= _ALL_KEYS


def _build_row(paths: Sequence[Sequence[str]], cells: Sequence[Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for (*outer, name), cell in zip(paths, cells, strict=True):
        if cell != _ABSENT:
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
    return [items[f"[{n}]"] for n in range(len(items))] if _FIRST in items else items


def _build_table(rows: Sequence[Any]) -> dict[str, Any] | None:
    if len(rows) < 2 or not _are_alike(rows):
        return None
    columns = _collect_columns(rows)
    shared = {name: cells[0] for name, cells in columns.items() if len({json.dumps(cell) for cell in cells}) == 1}
    unshared = {name: cells for name, cells in columns.items() if name not in shared}
    texts = {name: list(dict.fromkeys(cells)) for name, cells in unshared.items() if _recur(cells)}
    unshared |= {name: [words.index(cell) for cell in columns[name]] for name, words in texts.items()}
    return {
        "table": list(columns),
        **({"shared": shared} if shared else {}),
        **({"texts": texts} if texts else {}),
        "rows": [[cells[n] for cells in unshared.values()] for n in range(len(rows))],
    }


def _recur(cells: Sequence[Any]) -> bool:
    """Return whether the cells are long texts, each at least twice on average."""
    return all(isinstance(cell, str) and len(cell) >= _LONG for cell in cells) and 2 * len(set(cells)) <= len(cells)


def _are_alike(rows: Sequence[Any]) -> bool:
    """Return whether the rows are mappings with about the same fields in the same order, which a table can hold."""
    if not all(isinstance(row, dict) and row for row in rows):
        return False
    names = _collect_names(rows)
    return (
        _are_mostly_present(rows, len(names))
        and all(list(row) == [name for name in names if name in row] for row in rows)
        and not any("." in name or name == _FIRST for name in names)
        and not any(cell == _ABSENT for row in rows for cell in row.values())
    )


def _collect_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of all rows' fields, in the order of the longest row."""
    return list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))


def _are_mostly_present(rows: Sequence[Any], width: int) -> bool:
    return sum(len(row) for row in rows) >= _LEAST_PRESENT * len(rows) * width


def _collect_columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the cells of each field. Mappings and lists of mappings are replaced by their fields."""
    columns: dict[str, list[Any]] = {}
    for name in _collect_names(rows):
        cells = [row.get(name, _ABSENT) for row in rows]
        nested = _flatten_cells([cell for cell in cells if cell != _ABSENT])
        if nested is None:
            columns[name] = [pack(cell) for cell in cells]
        else:
            fields = iter(nested)
            inner = _collect_columns([{} if cell == _ABSENT else next(fields) for cell in cells])
            columns |= {f"{name}.{field}": column for field, column in inner.items()}
    return columns


def _flatten_cells(cells: Sequence[Any]) -> Sequence[dict[str, Any]] | None:
    """Return like cells as mappings, lists by place: ``"[0]"``, ``"[1]"``. None if they are not alike."""
    if _are_alike(cells):
        return cells
    if not all(isinstance(cell, list) and cell for cell in cells):
        return None
    if not (_are_alike([item for cell in cells for item in cell]) and _are_mostly_present(cells, max(map(len, cells)))):
        return None
    return [{f"[{n}]": item for n, item in enumerate(cell)} for cell in cells]
