"""Search for records in a folder and in its git history."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from greenfast.judge.artifacts import RECORD, record_files
from greenfast.judge.record_index import INDEX
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import BenchRecord, Record
from greenfast.spec.errors import MachineError, UsageError

_TIMEOUT_S = 60


def records_below(folder: Path, *, git: bool = False) -> tuple[list[tuple[str, Record | BenchRecord]], list[str]]:
    """Path and record of each run below a folder, and why other records were left out.

    git: also of the versions that the git history of the folder holds; a run that is there twice, as its hashes were
    renewed, counts once. Raises UsageError for what is no folder, MachineError where git fails.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder")
    found: dict[tuple[str, ...], tuple[str, Record | BenchRecord]] = {}
    skipped: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        files = [(str(path.relative_to(folder)), path) for path in record_files(folder)]
        for name, path in (*files, *(_versions(folder, Path(scratch)) if git else ())):
            try:
                record = read_record(path)
            except UsageError as e:
                skipped.append(f"{name}: {str(e).removeprefix(f'{path}: ')}")
                continue
            if isinstance(record, Record | BenchRecord):
                variants = [side.variant for _, side in record.sides()]
                found.setdefault((record.created, record.command, record.format, *variants), (name, record))
    return list(found.values()), skipped


def _versions(folder: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of each version of a record that was committed, the newest first."""
    log = _git(folder, "log", "--format=%H", "--raw", "--no-abbrev", "--no-renames", "--diff-filter=AM", "--", ".")
    commit, seen = "", set()
    for line in log.decode(errors="replace").splitlines():
        if line and not line.startswith(":"):
            commit = line[:10]
        facts, _, path = line.partition("\t")
        if not path.endswith(f"/{RECORD}"):
            continue
        blob = facts.split()[3]
        if blob not in seen:
            seen.add(blob)
            file = _write_version(folder, scratch / commit, commit, path)
            yield f"{path} at {commit}", file


def _write_version(folder: Path, scratch: Path, commit: str, path: str) -> Path:
    """Write a record as it was in a commit, with the index that it names if it is a kept one."""
    file = scratch / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_git(folder, "show", f"{commit}:{path}"))
    for parent in PurePosixPath(path).parents:
        index = scratch / parent / INDEX
        if not index.exists() and _git(folder, "ls-tree", "--full-tree", commit, (parent / INDEX).as_posix()):
            index.write_bytes(_git(folder, "show", f"{commit}:{(parent / INDEX).as_posix()}"))
    return file


def _git(folder: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise MachineError(f"git {words[0]}: {e}") from e
    if done.returncode:
        raise MachineError(f"git {words[0]} in {folder}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
