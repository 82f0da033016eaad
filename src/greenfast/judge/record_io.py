"""Read saved records, one or all of a folder and its git history, and detect changes of their kernels since."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_args

import msgspec

from greenfast.device.compiler import CompiledKernel, compile_kernel, compile_options, compiler_version, kernel_hash
from greenfast.device.identity import code_hash, launch_differences, list_launches
from greenfast.judge.artifacts import RECORD, record_files
from greenfast.judge.conclusions import Mismatch, conclude, find_mismatch
from greenfast.judge.record_index import DIGEST, INDEX, compute_digest, read_content
from greenfast.judge.record_schema import (
    OLDEST_VERSION,
    SCHEMA_VERSION,
    AnyRecord,
    BenchRecord,
    Build,
    PhaseRecord,
    Record,
    Run,
    Side,
    TimedKernel,
)
from greenfast.judge.store import convert_json
from greenfast.judge.tasks import find_task, load_family
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UsageError
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.freshness import CANNOT_TELL, CURRENT, STALE, Freshness, worst
from greenfast.spec.kernel import Family, KernelSource, program_of

#: Names of fields that are mappings by shape.
_BY_SHAPE = {"counts", "launches", "limits", "least_work", "phase_cycles", "phase_counts"}
_SHOWN = 200
_Named = TypeVar("_Named", bound=msgspec.Struct)
_Run = TypeVar("_Run", bound=Run)


def read_record(run: Path) -> AnyRecord:
    """Read the record of a run from its folder or file. Shapes get the names that the task has today.

    Raises UsageError for any other file, for another schema version, and for an edited or damaged record.
    """
    record: AnyRecord = read_run(run, Record | BenchRecord | PhaseRecord)
    return record


def read_run(run: Path, kinds: Any) -> Any:
    """Read a record of one of the types in the union ``kinds``. Raises as ``read_record`` does."""
    path = run / RECORD if run.is_dir() else run
    content = read_content(path)
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UsageError(
            f"{path}: schema_version {version} is newer than this greenfast, which reads records up to "
            f"{SCHEMA_VERSION}; pip install -U greenfast"
        )
    kind = content.get("kind")
    if kind == "benchmark" and kind not in (known.__struct_config__.tag for known in get_args(kinds)):
        raise UsageError(f"{path}: a record of a benchmark; python -m benchmarks report {path} reads it")
    record = convert_json(content, kinds, path, "record")
    return resolve_aliases(conclude_content(record, content, path), record.task)


def record_schema(kinds: Any = Record | BenchRecord | PhaseRecord) -> dict[str, Any]:
    """Return the JSON Schema of record files. kinds: the union of their types."""
    schema: dict[str, Any] = msgspec.json.schema(kinds)
    for kind in get_args(kinds):
        definition = schema["$defs"][kind.__name__]
        definition["properties"] |= {
            "schema_version": {"enum": list(range(OLDEST_VERSION, SCHEMA_VERSION + 1))},
            DIGEST: {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "SHA-256 of all other fields"},
        }
        definition["required"] = sorted({*definition["required"], "schema_version", DIGEST})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A record of greenfast", **schema}


def conclude_content(record: _Run, content: Mapping[str, Any], path: Path) -> _Run:
    """Return a record with the conclusions that follow from its measurements.

    Raises UsageError unless its digest matches, and the conclusions in the file, if there are any, follow too.
    """
    if record.schema_version < OLDEST_VERSION:
        raise UsageError(
            f"{path}: a record of version {record.schema_version} has too few fields to verify it; measure again: "
            f"{record.command}"
        )
    edited = "the record was edited or damaged, so it says nothing"
    try:
        concluded = conclude(record)
    except ValueError as e:
        raise UsageError(f"{path}: {e}; {edited}") from e
    stored_digest, digest = content.get(DIGEST, "missing"), compute_digest(content)
    digest_mismatch = None if stored_digest == digest else Mismatch(DIGEST, stored_digest, digest)
    # Report a wrong conclusion first. Any edit changes the digest.
    mismatch = find_mismatch(content, msgspec.json.decode(msgspec.json.encode(concluded))) or digest_mismatch
    if mismatch:
        field, stored, computed = mismatch
        raise UsageError(
            f"{path}: {field} says {_shorten(stored)}, but recomputed it is {_shorten(computed)}; {edited}"
        )
    return concluded


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def resolve_aliases(data: _Named, task: str) -> _Named:
    """Replace aliases of shapes in ``data`` by the names of the shapes.

    The command is unchanged. All data are unchanged if the task is unknown on this machine.
    """
    try:
        names = find_task(task).config.shape_names
    except UsageError:
        return data
    if not names:
        return data
    quoted = "|".join(re.escape(alias) for alias in sorted(names, key=len, reverse=True))
    # Forms in gates' texts: "long 1.5x", "long: 6 hmma", "stage2 (long) 96 registers", "long seed 0", "long, warm L2".
    in_text = re.compile(rf"(?:^|(?<=\()|(?<=[;:,] )|(?<=emulated ))({quoted})(?=\)|: |, | \d| seed )")
    return msgspec.convert(_rename_shapes(msgspec.to_builtins(data), "", names, in_text), type(data))


def _rename_shapes(value: object, field: str, names: Mapping[str, str], in_text: re.Pattern[str]) -> object:
    if isinstance(value, dict):
        keys = names if field in _BY_SHAPE else {}
        return {keys.get(key, key): _rename_shapes(item, key, names, in_text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], float):  # Times, the largest part of a record.
            return value
        return [_rename_shapes(item, field, names, in_text) for item in value]
    if isinstance(value, str):
        if field in ("shape", "shapes"):
            return names.get(value, value)
        if field in ("summary", "reasons", "checks"):
            return in_text.sub(lambda match: names[match[1]], value)
    return value


def find_outdated(records: Sequence[tuple[str, Run]]) -> dict[str, Freshness]:
    """Return, by name, the freshness of each record that is not current."""
    results = {name: check_freshness(record) for name, record in records}
    return {name: result for name, result in results.items() if result.status != CURRENT}


def check_freshness(record: Run) -> Freshness:
    """Check that a record has today's kernels and launches, as far as this machine's compiler allows.

    A record with weaker requirements than its task has today is stale, because its conclusions depend on them.
    """
    sides = record.sides()
    kernels = (
        result
        for name, side in sides
        for result in _check_side(record, side, f"{name} kernel" if sides[1:] else "kernel")
    )
    return worst(itertools.chain(kernels, _compare_demands(record)))


def check_demands(record: Run) -> Freshness:
    """Check that a record's requirements are at least as strict as its task's today. This needs no compiler."""
    return worst(_compare_demands(record))


def _compare_demands(record: Run) -> Iterator[Freshness]:
    """Compare the required speedup and the limits on errors with those of the task."""
    try:
        config = find_task(record.task).config
        gates = config.gates(record.format)
    except UsageError:  # The check of the kernels reports a missing task.
        return
    rungs = {rung.name: rung for rung in config.rungs}
    for role, side in record.sides():
        rung = rungs.get(side.variant) if side.solution is None else None
        own = config.solutions.kernel_error if side.solution else rung.kernel_error if rung else None
        for row in side.correctness:
            then, error, kernel = side.limits.get(row.shape), gates.error_for(row.dims), own or gates.kernel_error
            for name in then.__struct_fields__ if then is not None else ():
                today = getattr(kernel if hasattr(kernel, name) else error, name)
                if getattr(then, name) > today:
                    yield Freshness(
                        STALE, (f"it allowed the {role} {name} {getattr(then, name):g}, the task allows {today:g}",)
                    )
    if isinstance(record, Record):
        solution = record.candidate.solution is not None
        demands = config.solutions if solution else rungs.get(record.candidate.variant)
        today = (demands and demands.required_speedup) or 0.0
        for required in dict.fromkeys(row.required for row in record.speedups):
            if required < today:
                yield Freshness(STALE, (f"it required {required or 1:g}x, the task requires {today:g}x",))


def _check_side(record: Run, side: Side, label: str) -> Iterator[Freshness]:
    if not side.builds:
        yield Freshness(STALE, (f"the record has no {label}",))
        return
    answers = [answer for build in side.builds for answer in _check_build(record, side, build, f"the {label}")]
    yield from answers or [Freshness(STALE, (f"the task no longer has any shape of the {label}",))]


def _check_build(record: Run, side: Side, build: Build, what: str) -> Iterator[Freshness]:
    """Yield the freshness of a kernel, and of its launch for each shape. Shapes that the task dropped are left out."""
    if side.solution is not None:
        yield Freshness(CANNOT_TELL, (f"the {what} is a solution's; judge the solution again",))
        return
    if not build.launches:
        yield compare_launch(what, None)
    launches = {name: then.dims for name, then in build.launches.items()} or {str(build.dims): build.dims}
    try:
        family, toggles = load_record_family(record, side)
        sources: dict[KernelSource, list[str]] = {}
        for name, dims in launches.items():
            shape = name.partition(" launch ")[0]
            if is_dropped(record.task, dims):
                continue
            program = program_of(family, toggles, record.format, dims, instrumented=isinstance(record, PhaseRecord))
            source, now = list_launches(program, shape, dims).get(name, (None, None))
            if source is None:
                yield Freshness(STALE, (f"the {what} of {name} is launched no more",))
                continue
            sources.setdefault(source, []).append(name)
            if then := build.launches.get(name):
                yield compare_launch(f"{what} at {name}", then, now)
        for source, names in sources.items():
            yield compare_build(f"{what} at {', '.join(names)}", build, source)
    except UsageError as e:
        yield Freshness(STALE, (f"{what} is no more: {e}",))


def is_dropped(task: str, dims: Mapping[str, int]) -> bool:
    """Return whether a task no longer has one of a shape's dimensions. Raises UsageError if there is no such task."""
    config = find_task(task).config
    return not dims.keys() <= {name for shape in config.shapes for name in shape.dims} | config.drawing.ranges.keys()


def load_record_family(record: Run, side: Side) -> tuple[Family, dict[str, int]]:
    """Return a record's kernel family and an implementation's toggles. Raises UsageError if one no longer exists."""
    task = find_task(record.task)
    return load_family(task), task.config.toggle_values(side.toggles)


def compare_build(
    what: str, then: Build | TimedKernel, now: KernelSource, compiled: CompiledKernel | None = None
) -> Freshness:
    """Whether a kernel of a record has the machine code that its source of today makes.

    Equal text under the same compiler and options makes equal code; other text is compiled and its code compared.
    what: the kernel in words, such as "the candidate kernel at b1_h8_s512_d64". compiled: ``now``, where it is at hand.
    """
    compiler = compiled.compiler if compiled else compiler_version()
    if then.compiler != compiler:
        return Freshness(CANNOT_TELL, (f"it was compiled by {then.compiler}, and this is {compiler}",), True)
    try:
        target = Target.parse(then.arch)
        if then.kernel_hash == kernel_hash(now) and tuple(then.options) == compile_options(now, target):
            return Freshness()
        if not then.code_hash:
            return Freshness(
                CANNOT_TELL,
                (f"the source of {what} or the compiler's options differ, and the record has no hash of machine code",),
            )
        today = code_hash(compiled) if compiled else _code_of_today(kernel_hash(now), now, target)
    except (CompileError, UsageError) as e:
        return Freshness(STALE, (f"{what} cannot be built any more: {str(e).splitlines()[0].rstrip(':')}",))
    return Freshness() if today == then.code_hash else Freshness(STALE, (f"the machine code of {what} differs",))


@lru_cache(maxsize=1024)  # records share kernels, and shapes of a record do
def _code_of_today(text: str, now: KernelSource, target: Target) -> str:
    """Compile a kernel. text: hash of its source with all headers, as a cache key, because headers may change."""
    return code_hash(compile_kernel(now, target, isolated=True))


def compare_launch(what: str, then: LaunchFacts | None, now: LaunchFacts | None = None) -> Freshness:
    """Whether a kernel is launched as it was. then: None for a record that does not say."""
    if then is None or now is None:
        return Freshness(CANNOT_TELL, (f"the record does not say how {what} was launched",))
    found = launch_differences(then, now)
    return Freshness(STALE, tuple(f"{difference} of {what} differs" for difference in found)) if found else Freshness()


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
