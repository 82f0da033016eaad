"""The files of records: sealed with a digest, and kept ones with an index of their kernels' identities.

The digest detects damage and manual edits. It is not a signature: anyone who edits a record can compute a new one.
Therefore a file has measurements only, and all conclusions are computed whenever it is read (``judge.conclusions``).

A kept record names its index by a relative path, ``"index": "../../index.json"``. The index has an entry for each
record below its folder, with the compiler, hashes and launches of every kernel. A change of the kernels' text that
keeps their machine code edits the index and no record.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from greenfast.judge.record_schema import OBSERVED_GATES, Run
from greenfast.judge.store import read_json, to_json
from greenfast.judge.tables import pack
from greenfast.spec.errors import UsageError

DIGEST = "digest"


def compute_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a record's content without its digest, as 64 hexadecimal digits.

    Canonical: UTF-8, keys sorted, no spaces, numbers as Python's ``json`` writes them (the shortest that reads back).
    """
    undigested = {name: value for name, value in content.items() if name != DIGEST}
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
    return to_json(content | {DIGEST: compute_digest(content)})


INDEX = "index.json"
FIELD = "index"
#: The field that every kernel has, and the ones that tell which kernel it is.
_KERNEL = "kernel_hash"
IDENTITY = ("arch", "options", "compiler", _KERNEL, "code_hash", "launch", "launches")
#: Fields that no page quotes and no conclusion needs: the clock and the power of single blocks, the distributions of
#: errors (the worst element stays), the single times of a tiling (their median stays), and examples of operands.
_RAW = (
    *("block_mhz", "block_watts", "error_histogram", "bound_histogram", "runtimes"),
    *("examples_wrong", "examples_other_nan", "examples_undefined"),
)
#: Digits of the errors of a case. Times and all other numbers stay as they are.
_ERRORS, _DIGITS = "correctness", 6
_POINTER = re.compile(rf"(\.\./)*{re.escape(INDEX)}")


def read_content(path: Path) -> dict[str, Any]:
    """Read a record's file as plain data; of a kept record with its entry in the index.

    Raises UsageError for what is no record, and for a kept one that was edited or has no entry.
    """
    content: dict[str, Any] = read_json(path, dict[str, Any], "record")
    return with_identities(content, path) if FIELD in content else content


def with_identities(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a kept record's content with its identities from the index. Raises UsageError as ``read_content``."""
    index, name = find_index(content, path)
    if content.get(DIGEST) != (digest := compute_digest(content)):
        raise UsageError(f"{path}: its digest is {content.get(DIGEST)}, but its content's is {digest}; it was edited")
    entry = read_index(index).get(name)
    if entry is None:
        raise UsageError(f"{path}: {index} has no entry {name}; it is a kept record, which needs one")
    whole = copy.deepcopy({field: value for field, value in content.items() if field not in (FIELD, DIGEST)})
    try:
        for pointer, identity in entry["identities"].items():
            _resolve(whole, pointer).update(identity)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(f"{index}: the entry {name} does not fit its record ({e!r})") from e
    return whole | {DIGEST: entry[DIGEST]} if DIGEST in entry else whole


def find_index(content: Mapping[str, Any], path: Path) -> tuple[Path, str]:
    """Return the index that a kept record names, and the record's name in it. Raises UsageError for any other file."""
    pointer = content.get(FIELD)
    if not isinstance(pointer, str) or not _POINTER.fullmatch(pointer):
        raise UsageError(f"{path}: index is {pointer!r}, not {INDEX} of a folder above it")
    index = path.resolve().parent.joinpath(pointer).resolve()
    return index, path.resolve().relative_to(index.parent).as_posix()


def read_index(path: Path) -> Mapping[str, dict[str, Any]]:
    """Read the entries of an index by their record's path from its folder. Raises UsageError if there is none."""
    try:
        return _read_index(path, path.stat().st_mtime_ns)
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); a kept record needs its index") from e


@lru_cache(maxsize=8)
def _read_index(path: Path, _modified: int) -> Mapping[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = read_json(path, dict[str, dict[str, Any]], "index of records")
    return entries


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
    if isinstance(value, dict) and _KERNEL in value:
        yield pointer, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _find_kernels(item, f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}")


def _resolve(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value
