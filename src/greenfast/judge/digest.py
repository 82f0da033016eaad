"""The digest of a record's file, which shows that it was damaged or edited by hand.

It is no signature: whoever changes a record can make its digest anew. What a record concludes is therefore drawn again
from what it measured whenever it is read (``judge.consistency``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from greenfast.judge.record_schema import Run
from greenfast.judge.store import to_json

FIELD = "digest"


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of a record's content without its digest, as 64 hexadecimal digits.

    Canonical: UTF-8, keys sorted, no spaces, numbers as Python's ``json`` writes them (the shortest that reads back).
    """
    rest = {name: value for name, value in content.items() if name != FIELD}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed_json(record: Run) -> str:
    """A record as its file holds it, with its digest as the last field."""
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return to_json(content | {FIELD: digest_of(content)})
