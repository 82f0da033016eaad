"""The files of a solution. They are read once; what is hashed and kept is then all that is judged, from a copy."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from greenfast.device.includes import includes, includes_by_a_macro
from greenfast.judge.solution.schema import ResolvedSolution, read_bytes
from greenfast.spec.errors import UsageError

_MOST_FILES, _MOST_BYTES = 1024, 256 << 20


def solution_files(found: ResolvedSolution, results: Path | None = None) -> dict[str, bytes]:
    """What a solution consists of, by name in its folder.

    That is the file that describes it, and of CUDA, PTX and cubins its source with the headers of the folder that it
    includes: all of the folder where a name is not written out. Of Python it is the whole folder, as code reads what it
    likes; a single file is alone. Left out of a folder: what begins with a dot, __pycache__, and ``results``, where
    runs are written; and everywhere links that lead elsewhere.
    Raises UsageError for a file that cannot be read or named, and for more than can be kept.
    """
    kept = {found.path.name: found.content}

    def keep(path: Path) -> bytes | None:
        """Read a file that is not kept yet; None for any other, and for what is no file of the folder."""
        name = os.path.relpath(path, found.folder)
        if name in kept or not _is_inside(path, found.folder):
            return None
        if not name.isprintable():
            raise UsageError(f"{found.path}: {name!r} in its folder is no name that can be shown; rename the file")
        kept[name] = data = read_bytes(path, _MOST_BYTES)
        if len(kept) > _MOST_FILES or sum(map(len, kept.values())) > _MOST_BYTES:
            raise UsageError(
                f"{found.path}: more than {_MOST_FILES} files or {_MOST_BYTES >> 20} MiB; keep a solution's folder to "
                "its sources"
            )
        return data

    source = os.path.relpath(found.file, found.folder)
    keep(found.file)
    if source not in kept:
        raise UsageError(f"{found.path}: file: {found.file} does not exist")
    if found.is_code:
        if found.path.suffix == ".json":
            for path in _all_of(found.folder, results):
                keep(path)
        return dict(sorted(kept.items()))
    wanted = []
    if found.solution.language == "cuda":
        wanted.append((found.file.parent, kept[source]))
    while wanted:
        folder, text = wanted.pop()
        names = [name.decode(errors="replace") for _, name in includes(text)]
        paths = [place / name for name in names for place in (folder, found.file.parent, found.folder)]
        if includes_by_a_macro(text):
            paths += _all_of(found.folder, results)
        for path in paths:
            data = keep(path)
            if data is not None:
                wanted.append((path.parent, data))
    return dict(sorted(kept.items()))


def private_copy(found: ResolvedSolution, files: dict[str, bytes]) -> ResolvedSolution:
    """The solution in a new folder that holds these files alone, and is removed with what is returned.

    No other program knows of it, and no code of a solution may write there.
    """
    folder = Path(tempfile.mkdtemp(prefix="greenfast-judged-")).resolve()
    made = replace(found, folder=folder)
    weakref.finalize(made, shutil.rmtree, folder, ignore_errors=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return made


def _all_of(folder: Path, results: Path | None) -> Iterator[Path]:
    """The files below a folder, but hidden ones, Python's caches and results."""
    for place, folders, names in os.walk(folder):
        seen = (name for name in folders if not name.startswith((".", "__pycache__")))
        folders[:] = sorted(name for name in seen if results is None or not _is_same(Path(place) / name, results))
        yield from (Path(place) / name for name in sorted(names) if not name.startswith("."))


def _is_same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether it is a file, no pipe, that lies in the folder, also where it is a link."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # no path at all, or links in a circle
        return False
