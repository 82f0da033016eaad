"""Strict decoding of JSON files: a duplicate name in an object is an error.

Readers of JSON differ in which of the two they take, most without a word, so that a person and the judge could see
different things in one file.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


def decode(text: bytes, kind: Any = Any) -> Any:
    """Decode a JSON text to this type. Raises msgspec.DecodeError (or its subclass ValidationError), RecursionError."""
    found = msgspec.json.decode(text)
    json.loads(text, object_pairs_hook=once, parse_int=str, parse_float=str)  # of any length
    return found if kind is Any else msgspec.json.decode(text, type=kind)


def once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Convert an object's pairs to a dict. Raises msgspec.DecodeError with the duplicate name."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[Any] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise msgspec.DecodeError(f"{twice!r} stands twice in one object; give each name once")
    return made
