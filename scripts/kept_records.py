"""Make kept records: like rows as tables, without raw samples, and the identities of kernels in an index.

Tables: each field's name is written once, and a value that all rows share is written once.

``[{"a": 1, "b": 2}, {"a": 1, "b": 3}]`` becomes ``{"table": ["a", "b"], "shared": {"a": 1}, "rows": [[2], [3]]}``:
``table`` names the fields in their order, ``shared`` has the values that all rows share, and a row has the others. A
mapping of like rows has a mapping as ``rows``. ``"x.y"`` is the field y of a row's field x, ``"x.[0].y"`` the field y
of the first element of a row's list x, and the cell ``"-"`` means that the row lacks the field. Long texts that recur
in a column are listed in ``texts``, and its cells are positions in that list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from greenfast.judge.record_io import DIGEST, FIELD, IDENTITY, INDEX, KERNEL, compute_digest
from greenfast.judge.store import ABSENT, FIRST, to_json

#: Fields that no page quotes and no conclusion needs: the clock and the power of single blocks, the distributions of
#: errors (the worst element stays), the single times of a tiling (their median stays), and examples of operands.
_RAW = (
    *("block_mhz", "block_watts", "error_histogram", "bound_histogram", "error_map", "runtimes"),
    *("examples_wrong", "examples_other_nan", "examples_undefined"),
)
#: Digits of the errors of a case. Times and all other numbers stay as they are.
_ERRORS, _DIGITS = "correctness", 6
#: Characters from which a text that recurs is long.
_LONG = 24
#: The share of cells that have to be present in a table.
_LEAST_PRESENT = 0.75


def split(content: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return a record without raw samples and identities, and its index entry (None if it holds no identity).

    content: plain data. name: its path from the index's folder.
    """
    measured = _drop_raw_samples(content)
    sealed = {DIGEST: compute_digest(measured)} if DIGEST in content else {}
    found = dict(_find_kernels(measured))
    if not found:
        return measured | sealed, None
    identities = {pointer: {f: k.pop(f) for f in IDENTITY if f in k} for pointer, k in found.items()}
    measured.pop(DIGEST, None)
    measured = {FIELD: "../" * name.count("/") + INDEX} | measured
    device, git = measured.get("device"), measured.get("git")
    entry = {
        "created": measured.get("created", ""),
        "device": device.get("name", "") if isinstance(device, dict) else device,
        "commit": git.get("sha", "") if isinstance(git, dict) else git,
        **sealed,
        "identities": identities,
    }
    return measured | {DIGEST: compute_digest(measured)}, entry


def render_record(content: Any) -> str:
    """Return the text of a kept file, a row per line."""
    return to_json(pack(content), dense=True)


def render_index(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of an index, a kernel per line."""
    tables = {name: {**entry, "identities": pack(entry["identities"])} for name, entry in sorted(entries.items())}
    return to_json(tables, dense=True)


def _drop_raw_samples(value: Any, rounded: bool = False) -> Any:
    """Return plain data without raw samples. rounded: round numbers, as errors are kept."""
    if isinstance(value, dict):
        return {
            name: _drop_raw_samples(item, rounded or name == _ERRORS)
            for name, item in value.items()
            if name not in _RAW
        }
    if isinstance(value, list):
        return [_drop_raw_samples(item, rounded) for item in value]
    return float(f"{value:.{_DIGITS}g}") if rounded and isinstance(value, float) else value


def _find_kernels(value: Any, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON pointer (RFC 6901) of every mapping that identifies a kernel, and the mapping."""
    if isinstance(value, dict) and KERNEL in value:
        yield pointer, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _find_kernels(item, f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}")


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
        and not any("." in name or name == FIRST for name in names)
        and not any(cell == ABSENT for row in rows for cell in row.values())
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
        cells = [row.get(name, ABSENT) for row in rows]
        nested = _flatten_cells([cell for cell in cells if cell != ABSENT])
        if nested is None:
            columns[name] = [pack(cell) for cell in cells]
        else:
            fields = iter(nested)
            inner = _collect_columns([{} if cell == ABSENT else next(fields) for cell in cells])
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
