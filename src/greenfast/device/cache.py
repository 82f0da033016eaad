"""The build cache on disk: compiled or disassembled kernels are read back in milliseconds.

Its folder is ``$GREENFAST_CACHE_DIR``, else ``$XDG_CACHE_HOME/greenfast``, else ``~/.cache/greenfast``. An unusable
folder is not an error: everything is then built again. Each entry has a SHA-256 over its content, checked on each read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cuda.core.utils import FileStreamProgramCache

# About 10,000 kernels; beyond it the least recently read entries are evicted.
_MAX_BYTES = 1 << 30
#: Part of every key, so that entries of older formats without SHA-256 are never read.
_FORMAT = b"entry with SHA-256;"
#: Keys of damaged entries that this process has reported and not yet replaced.
_told: set[bytes] = set()


def cache_dir() -> Path:
    """Return the cache folder; it may not exist. Raises RuntimeError without a home folder."""
    if own := os.environ.get("GREENFAST_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "greenfast"


def usage() -> tuple[int, int]:
    """Return the number of files in the folder, and their bytes. Raises as ``cache_dir``, and OSError."""
    sizes = []
    for file in cache_dir().rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it since
            if file.is_file():
                sizes.append(file.stat().st_size)
    return len(sizes), sum(sizes)


def load(key: bytes) -> list[bytes] | None:
    """Read the parts stored under ``key``; None if there is no entry or it is damaged.

    A damaged entry is reported in one line on stderr; the caller builds again and replaces it.
    """
    cache = _open_cache()
    try:
        # a cache's truth is its length, for which it walks its folder
        entry: bytes | None = cache.get(_FORMAT + key) if cache is not None else None
    except OSError:
        return None
    if entry is None:
        return None
    digest, _, content = entry.partition(b"\n")
    if digest.decode(errors="replace") != _digest(key, content):
        if key not in _told:
            _told.add(key)
            print(
                f"greenfast: an entry of the build cache in {cache_dir()} is damaged (its SHA-256 differs); "
                f"it is built again",
                file=sys.stderr,
            )
        return None
    header, _, body = content.partition(b"\n")
    parts = []
    for length in json.loads(header):
        parts.append(body[:length])
        body = body[length:]
    return parts


def store(key: bytes, parts: Sequence[bytes]) -> None:
    """Store ``parts`` under ``key`` if the folder is writable.

    They form one entry, so a log is never read back with another build's machine code.
    """
    cache = _open_cache()
    if cache is None:
        return
    content = json.dumps([len(part) for part in parts]).encode() + b"\n" + b"".join(parts)
    # With a read-only or full disk this build still succeeds; the next one compiles again.
    with contextlib.suppress(OSError):
        cache[_FORMAT + key] = _digest(key, content).encode() + b"\n" + content
        _told.discard(key)


def _digest(key: bytes, content: bytes) -> str:
    """Hash the key too, so that an entry under another key counts as damaged."""
    return hashlib.sha256(b"%d:%s" % (len(key), key) + content).hexdigest()


def _open_cache() -> FileStreamProgramCache | None:
    try:
        return _open_at(cache_dir())
    except (OSError, RuntimeError):
        return None


@functools.cache
def _open_at(folder: Path) -> FileStreamProgramCache:
    # Writes go to a temporary file and are renamed, so several processes may share the folder.
    return FileStreamProgramCache(folder, max_size_bytes=_MAX_BYTES)
