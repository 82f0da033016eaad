"""The build cache on disk: kernels compiled or disassembled once are read back in milliseconds.

It is in ``$GREENFAST_CACHE_DIR``, else ``$XDG_CACHE_HOME/greenfast``, else ``~/.cache/greenfast``. An unusable folder
is not an error: everything is then built again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from cuda.core.utils import FileStreamProgramCache

# About 10,000 kernels; beyond it the least recently read entries are evicted.
_MAX_BYTES = 1 << 30


def cache_dir() -> Path:
    """The cache folder that the environment selects; it may not exist. Raises RuntimeError without a home folder."""
    if own := os.environ.get("GREENFAST_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "greenfast"


def usage() -> tuple[int, int]:
    """Number of files in the folder, and their bytes. Raises as ``cache_dir`` does, and OSError."""
    sizes = []
    for file in cache_dir().rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it since
            if file.is_file():
                sizes.append(file.stat().st_size)
    return len(sizes), sum(sizes)


def load(key: bytes) -> list[bytes] | None:
    """The parts stored under ``key``, or None if there is no complete entry."""
    cache = _open_cache()
    try:
        entry: bytes | None = cache.get(key) if cache else None
        if entry is None:
            return None
        header, _, body = entry.partition(b"\n")
        lengths: list[int] = json.loads(header)
    except (OSError, ValueError):
        return None
    parts = []
    for length in lengths:
        parts.append(body[:length])
        body = body[length:]
    return parts if [len(part) for part in parts] == lengths and not body else None


def store(key: bytes, parts: Sequence[bytes]) -> None:
    """Store ``parts`` under ``key`` if the folder is writable.

    They form one entry, so a log is never read back with another build's machine code.
    """
    cache = _open_cache()
    if cache is None:
        return
    header = json.dumps([len(part) for part in parts]).encode()
    # With a read-only or full disk this build still succeeds; the next one compiles again.
    with contextlib.suppress(OSError):
        cache[key] = header + b"\n" + b"".join(parts)


def _open_cache() -> FileStreamProgramCache | None:
    try:
        return _open_at(cache_dir())
    except (OSError, RuntimeError):
        return None


@functools.cache
def _open_at(folder: Path) -> FileStreamProgramCache:
    # Writes go to a temporary file and are renamed, so several processes may share the folder.
    return FileStreamProgramCache(folder, max_size_bytes=_MAX_BYTES)
