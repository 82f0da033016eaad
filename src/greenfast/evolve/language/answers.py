"""What a model's answer holds: candidates that fit the space, and why the rest was refused. It never raises."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from greenfast.evolve.proposal import Candidate, Edit
from greenfast.evolve.space import Space, Value
from greenfast.judge.strict_json import once
from greenfast.spec.errors import UsageError

#: Of an answer: characters that are read, places at which JSON is looked for, candidates; and characters of an edit.
MOST_TEXT, _MOST_STARTS, _MOST_CANDIDATES, MOST_EDIT = 1_000_000, 2_000, 64, 200_000
_SHOWN = 120
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")


class Parsed(msgspec.Struct, frozen=True):
    """candidates: those that fit, none twice. faults: a line for each thing that was refused."""

    candidates: tuple[Candidate, ...]
    faults: tuple[str, ...]


def parse_answer(text: str, space: Space) -> Parsed:
    """Read the last object in an answer that lists candidates.

    The form: {"candidates": [{"parameters": {...}, "edits": [{"region", "text"}], "rationale", "prediction"}]}, in a
    fence, alone or within other words.
    """
    if len(text) > MOST_TEXT:
        return Parsed((), (f"{len(text)} characters; at most {MOST_TEXT} are read",))
    listed = _listed(text)
    if listed is None:
        shown = " ".join(text.split())[:_SHOWN]
        return Parsed((), (f"no JSON object with `candidates` in {shown!r}" if shown else "the answer is empty",))
    found: dict[str, Candidate] = {}
    faults = []
    if len(listed) > _MOST_CANDIDATES:
        faults.append(f"{len(listed)} candidates; the first {_MOST_CANDIDATES} are read")
    for number, row in enumerate(listed[:_MOST_CANDIDATES], 1):
        try:
            candidate = _candidate(row, space)
        except (UsageError, RecursionError) as e:
            faults.append(f"candidate {number}: {str(e)[: 4 * _SHOWN]}")
            continue
        if candidate.key in found:
            faults.append(f"candidate {number}: the same as another")
        found.setdefault(candidate.key, candidate)
    if not listed:
        faults.append("the list of candidates is empty")
    return Parsed(tuple(found.values()), tuple(map(_writable, faults)))


def _listed(text: str) -> list[Any] | None:
    """The last list of candidates in the text; fences are looked at first, then every bracket that opens."""
    for part in [*reversed(_FENCE.findall(text)), text]:
        found = [rows for value in _values(part) if (rows := _rows(value)) is not None]
        if found:
            return found[-1]
    return None


def _values(text: str) -> list[Any]:
    """The JSON values in a text that begin with a bracket, one after the other."""
    decoder, found, at = json.JSONDecoder(object_pairs_hook=_object), [], 0
    for _ in range(_MOST_STARTS):
        start = _START.search(text, at)
        if start is None:
            break
        try:
            value, at = decoder.raw_decode(text, start.start())
            found.append(value)
        except (ValueError, RecursionError):
            at = start.end()
    return found


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """An object, or why it is none, in place of it: the rest of the answer is read."""
    try:
        return once(pairs)
    except msgspec.DecodeError as e:
        return str(e)


def _rows(value: Any) -> list[Any] | None:
    if isinstance(value, dict) and isinstance(value.get("candidates"), list):
        rows: list[Any] = value["candidates"]
        return rows
    listed = value if isinstance(value, list) else [value]
    known = [row for row in listed if isinstance(row, dict) and ("parameters" in row or "edits" in row)]
    return listed if known else None


def _candidate(row: Any, space: Space) -> Candidate:
    if not isinstance(row, dict):
        raise UsageError(f"{_shown(row)} is no object")
    parameters, edits = row.get("parameters", {}), row.get("edits", [])
    if not isinstance(parameters, dict) or not isinstance(edits, list):
        raise UsageError("`parameters` is an object and `edits` a list")
    point = space.decode({name: _value(name, value, space) for name, value in parameters.items()})
    made = tuple(_edit(edit, space) for edit in edits)
    if len({edit.region for edit in made}) < len(made):
        raise UsageError("a region is edited twice")
    return Candidate(
        parameters=point, edits=made, rationale=_text(row.get("rationale")), prediction=_text(row.get("prediction"))
    )


def _value(name: str, value: Any, space: Space) -> Value:
    """The allowed value that is meant: 128 for "128" or 128.0, 1 for true."""
    parameter = space.parameters.get(name)
    for allowed in parameter.values if parameter else ():
        if value == allowed or (isinstance(value, str) and value.strip() == str(allowed)):
            return allowed
    return value if isinstance(value, (int, float, str)) else _shown(value)


def _edit(edit: Any, space: Space) -> Edit:
    if not isinstance(edit, dict) or not isinstance(edit.get("text"), str):
        raise UsageError(f'an edit has the form {{"region": NAME, "text": TEXT}}; got {_shown(edit)}')
    region, text = edit.get("region"), edit["text"]
    if not isinstance(region, str) or region not in space.regions:
        raise UsageError(f"region {_shown(region)}; allowed: {', '.join(sorted(space.regions)) or 'none'}")
    if len(text) > MOST_EDIT:
        raise UsageError(f"an edit of {len(text)} characters; at most {MOST_EDIT} are allowed")
    return Edit(region=region, text=_writable(text))


def _text(value: Any) -> str:
    return _writable(value[:MOST_EDIT]) if isinstance(value, str) else "" if value is None else _shown(value)


def _writable(text: str) -> str:
    """The text without lone halves of surrogate pairs, which JSON can spell and no file can hold."""
    return text.encode("utf-8", "replace").decode()


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]
