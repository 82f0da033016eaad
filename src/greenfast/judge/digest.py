"""The digest of a record's file. It detects damage and manual edits.

It is not a signature: anyone who edits a record can compute a new digest. Therefore all conclusions of a record are
recomputed from its measurements whenever it is read (``judge.record_verification``).
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


def compute_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a record's content without its digest, as 64 hexadecimal digits.

    Canonical: UTF-8, keys sorted, no spaces, numbers as Python's ``json`` writes them (the shortest that reads back).
    """
    undigested = {name: value for name, value in content.items() if name != FIELD}
    text = json.dumps(undigested, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed_json(record: Run) -> str:
    """Return the JSON text of a record's file, with the digest as the last field."""
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return to_json(content | {FIELD: compute_digest(content)})
