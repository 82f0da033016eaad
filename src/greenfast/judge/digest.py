"""The digest of a record's file. It detects damage and manual edits.

It is not a signature: anyone who edits a record can compute a new digest. Therefore a file has measurements only, and
all conclusions are computed whenever it is read (``judge.conclusions``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from greenfast.judge.record_schema import OBSERVED_GATES, Run
from greenfast.judge.store import to_json

FIELD = "digest"


def compute_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a record's content without its digest, as 64 hexadecimal digits.

    Canonical: UTF-8, keys sorted, no spaces, numbers as Python's ``json`` writes them (the shortest that reads back).
    """
    undigested = {name: value for name, value in content.items() if name != FIELD}
    text = json.dumps(undigested, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_measurements(record: Run) -> dict[str, Any]:
    """Return the content of a record's file: plain data without the conclusions and without the digest."""
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    for name in ("decision", "reasons", "speedups"):
        content.pop(name, None)
    quoted = content.get("quoted")
    for row in quoted["speedups"] if quoted else ():
        del row["verdict"]
    sides = [content[role] for role in ("baseline", "candidate", "side") if content.get(role)]
    for row in (row for side in sides for row in side["correctness"]):
        row["gates"] = {name: held for name, held in row["gates"].items() if name in OBSERVED_GATES}
    if quoted or content.get("claim"):
        content["gates"] = [
            {"gate": gate["gate"]} if gate["gate"] == "PERFORMANCE" else gate for gate in content["gates"]
        ]
    return content


def sealed_json(record: Run, *, conclusions: bool = False) -> str:
    """Return the JSON text of a record's file, with the digest as the last field. conclusions: include them too."""
    content = msgspec.json.decode(msgspec.json.encode(record)) if conclusions else read_measurements(record)
    return to_json(content | {FIELD: compute_digest(content)})
