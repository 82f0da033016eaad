"""Parse a model's answer into candidates of the space, and reasons for each refused part. Never raises."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from greenfast.evolve.proposal import Candidate, Edit
from greenfast.evolve.space import Space, Value
from greenfast.judge.strict_json import once
from greenfast.spec.errors import UsageError

#: Limits of an answer: its characters, positions tried as the start of JSON, candidates, and characters of an edit.
MAX_TEXT, _MAX_STARTS, _MAX_CANDIDATES, MAX_EDIT = 1_000_000, 2_000, 64, 200_000
_MAX_SHOWN = 120
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")


class Parsed(msgspec.Struct, frozen=True):
    """The result of parsing. candidates: without duplicates. faults: one line per refused part."""

    candidates: tuple[Candidate, ...]
    faults: tuple[str, ...]


def parse_answer(text: str, space: Space) -> Parsed:
    """Parse the last object in an answer that lists candidates.

    The form: {"candidates": [{"parameters": {...}, "edits": [{"region", "text"}], "rationale", "prediction"}]}. It may
    be in a fence and surrounded by other text.
    """
    if len(text) > MAX_TEXT:
        return Parsed((), (f"{len(text)} characters; at most {MAX_TEXT} are read",))
    listed = _find_candidates(text)
    if listed is None:
        shown = " ".join(text.split())[:_MAX_SHOWN]
        return Parsed((), (f"no JSON object with `candidates` in {shown!r}" if shown else "the answer is empty",))
    candidates: dict[str, Candidate] = {}
    faults = []
    if len(listed) > _MAX_CANDIDATES:
        faults.append(f"{len(listed)} candidates; the first {_MAX_CANDIDATES} are read")
    for number, row in enumerate(listed[:_MAX_CANDIDATES], 1):
        try:
            candidate = _parse_candidate(row, space)
        except (UsageError, RecursionError) as e:
            faults.append(f"candidate {number}: {str(e)[: 4 * _MAX_SHOWN]}")
            continue
        if candidate.key in candidates:
            faults.append(f"candidate {number}: the same as another")
        candidates.setdefault(candidate.key, candidate)
    if not listed:
        faults.append("the list of candidates is empty")
    return Parsed(tuple(candidates.values()), tuple(map(_replace_surrogates, faults)))


def _find_candidates(text: str) -> list[Any] | None:
    """Return the last list of candidates in the text. Fenced blocks are tried first, then every opening bracket."""
    for part in [*reversed(_FENCE.findall(text)), text]:
        lists = [rows for value in _find_json_values(part) if (rows := _candidate_rows(value)) is not None]
        if lists:
            return lists[-1]
    return None


def _find_json_values(text: str) -> list[Any]:
    """Return the JSON objects and lists in a text, in order."""
    decoder, values, position = json.JSONDecoder(object_pairs_hook=_parse_object), [], 0
    for _ in range(_MAX_STARTS):
        start = _START.search(text, position)
        if start is None:
            break
        try:
            value, position = decoder.raw_decode(text, start.start())
            values.append(value)
        except (ValueError, RecursionError):
            position = start.end()
    return values


def _parse_object(pairs: list[tuple[str, Any]]) -> Any:
    """Return an object, or its error as a text, so that the other parts of the answer are still parsed."""
    try:
        return once(pairs)
    except msgspec.DecodeError as e:
        return str(e)


def _candidate_rows(value: Any) -> list[Any] | None:
    if isinstance(value, dict) and isinstance(value.get("candidates"), list):
        rows: list[Any] = value["candidates"]
        return rows
    listed = value if isinstance(value, list) else [value]
    known = [row for row in listed if isinstance(row, dict) and ("parameters" in row or "edits" in row)]
    return listed if known else None


def _parse_candidate(row: Any, space: Space) -> Candidate:
    if not isinstance(row, dict):
        raise UsageError(f"{_shorten(row)} is no object")
    parameters, edits = row.get("parameters", {}), row.get("edits", [])
    if not isinstance(parameters, dict) or not isinstance(edits, list):
        raise UsageError("`parameters` is an object and `edits` a list")
    point = space.decode({name: _match_value(name, value, space) for name, value in parameters.items()})
    parsed_edits = tuple(_parse_edit(edit, space) for edit in edits)
    if len({edit.region for edit in parsed_edits}) < len(parsed_edits):
        raise UsageError("a region is edited twice")
    return Candidate(
        parameters=point,
        edits=parsed_edits,
        rationale=_parse_text(row.get("rationale")),
        prediction=_parse_text(row.get("prediction")),
    )


def _match_value(name: str, value: Any, space: Space) -> Value:
    """Return the allowed value that equals a value: 128 for "128" or 128.0, 1 for true."""
    parameter = space.parameters.get(name)
    for allowed in parameter.values if parameter else ():
        if value == allowed or (isinstance(value, str) and value.strip() == str(allowed)):
            return allowed
    return value if isinstance(value, (int, float, str)) else _shorten(value)


def _parse_edit(edit: Any, space: Space) -> Edit:
    if not isinstance(edit, dict) or not isinstance(edit.get("text"), str):
        raise UsageError(f'an edit has the form {{"region": NAME, "text": TEXT}}; got {_shorten(edit)}')
    region, text = edit.get("region"), edit["text"]
    if not isinstance(region, str) or region not in space.regions:
        raise UsageError(f"region {_shorten(region)}; allowed: {', '.join(sorted(space.regions)) or 'none'}")
    if len(text) > MAX_EDIT:
        raise UsageError(f"an edit of {len(text)} characters; at most {MAX_EDIT} are allowed")
    return Edit(region=region, text=_replace_surrogates(text))


def _parse_text(value: Any) -> str:
    return _replace_surrogates(value[:MAX_EDIT]) if isinstance(value, str) else "" if value is None else _shorten(value)


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates: JSON can spell them, but a UTF-8 file cannot store them."""
    return text.encode("utf-8", "replace").decode()


def _shorten(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]
