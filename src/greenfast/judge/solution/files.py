"""The files of a solution. They are read once and hashed, and the judge uses a private copy of exactly these files."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from greenfast.device.compiler import includes, includes_by_a_macro
from greenfast.judge.solution.schema import ResolvedSolution, read_bytes
from greenfast.spec.errors import UsageError

_MAX_FILES, _MAX_BYTES = 1024, 256 << 20


def collect_files(solution: ResolvedSolution, results: Path | None = None) -> dict[str, bytes]:
    """Read the files of a solution. Return their contents by name, relative to the solution's folder.

    The files are the one with the JSON and the source. CUDA adds the headers of the folder that the source includes, or
    the whole folder if an include is a macro. Python in a folder adds the whole folder, because code can read any file.
    Hidden files, __pycache__, ``results`` (the folder of runs) and links to other folders are excluded.
    Raises UsageError for a file that cannot be read or printed, and for too many files or bytes.
    """
    contents = {solution.path.name: solution.content}

    def add(path: Path) -> bytes | None:
        """Read a new file of the folder. Return None if it was read before or is outside of the folder."""
        name = os.path.relpath(path, solution.folder)
        if name in contents or not _is_inside(path, solution.folder):
            return None
        if not name.isprintable():
            raise UsageError(f"{solution.path}: {name!r} in its folder is no name that can be shown; rename the file")
        contents[name] = data = read_bytes(path, _MAX_BYTES)
        if len(contents) > _MAX_FILES or sum(map(len, contents.values())) > _MAX_BYTES:
            raise UsageError(
                f"{solution.path}: more than {_MAX_FILES} files or {_MAX_BYTES >> 20} MiB; keep a solution's folder to "
                "its sources"
            )
        return data

    source = os.path.relpath(solution.file, solution.folder)
    add(solution.file)
    if source not in contents:
        raise UsageError(f"{solution.path}: file: {solution.file} does not exist")
    if solution.is_code:
        if solution.path.suffix == ".json":
            for path in _list_files(solution.folder, results):
                add(path)
        return dict(sorted(contents.items()))
    unscanned = []
    if solution.config.language == "cuda":
        unscanned.append((solution.file.parent, contents[source]))
    while unscanned:
        folder, text = unscanned.pop()
        names = [name.decode(errors="replace") for _, name in includes(text)]
        paths = [parent / name for name in names for parent in (folder, solution.file.parent, solution.folder)]
        if includes_by_a_macro(text):
            paths += _list_files(solution.folder, results)
        for path in paths:
            data = add(path)
            if data is not None:
                unscanned.append((path.parent, data))
    return dict(sorted(contents.items()))


def digest_files(files: dict[str, bytes]) -> str:
    """Return the SHA-256 over the names and contents of files."""
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(b"%d:%s;%d:" % (len(name.encode()), name.encode(), len(data)) + data)
    return digest.hexdigest()


def make_private_copy(solution: ResolvedSolution, files: dict[str, bytes]) -> ResolvedSolution:
    """Write the files to a new private folder and return the solution there. The folder is removed with the result.

    The sandbox does not let a solution's code write there.
    """
    folder = Path(tempfile.mkdtemp(prefix="greenfast-judged-")).resolve()
    copy = replace(solution, folder=folder)
    weakref.finalize(copy, shutil.rmtree, folder, ignore_errors=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return copy


def _list_files(folder: Path, results: Path | None) -> Iterator[Path]:
    """Yield the files below a folder, without hidden files, Python's caches and results."""
    for parent, folders, names in os.walk(folder):
        visible = (name for name in folders if not name.startswith((".", "__pycache__")))
        folders[:] = sorted(name for name in visible if results is None or not _is_same(Path(parent) / name, results))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith("."))


def _is_same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)


def _is_inside(path: Path, folder: Path) -> bool:
    """Return True if the path, with links resolved, is a regular file in the folder."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # An invalid path, or a circle of links.
        return False
