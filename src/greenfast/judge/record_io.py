"""Saved records: read them, and tell which measured kernels are no longer today's."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from greenfast.device.identity import launches_of
from greenfast.judge.artifacts import RECORD
from greenfast.judge.digest import FIELD as DIGEST
from greenfast.judge.digest import compute_digest
from greenfast.judge.freshness import of_build, of_launch
from greenfast.judge.record_schema import SCHEMA_VERSION, AnyRecord, BenchRecord, Build, PhaseRecord, Record, Run, Side
from greenfast.judge.record_verification import Mismatch, verify_record
from greenfast.judge.store import convert_json, read_json
from greenfast.judge.tasks import find_task, load_family
from greenfast.spec.errors import UsageError
from greenfast.spec.freshness import CANNOT_TELL, CURRENT, STALE, Freshness, worst
from greenfast.spec.kernel import Family, KernelSource, program_of

#: Fields that hold a mapping whose keys are shapes.
_BY_SHAPE = {"counts", "launches", "limits", "least_work", "phase_cycles", "phase_counts"}
_SHOWN = 200
_Named = TypeVar("_Named", bound=msgspec.Struct)


def read_record(run: Path) -> AnyRecord:
    """The record of a run: its folder, or its record's file; shapes under the names that the task gives them today.

    Raises UsageError for anything else, for a record of another version, and for one that was edited or damaged.
    """
    record: AnyRecord = read_run(run, Record | BenchRecord | PhaseRecord)
    return record


def read_run(run: Path, kinds: Any) -> Any:
    """The same of ``kinds``, a union of records; raises the same."""
    path = run / RECORD if run.is_dir() else run
    content = read_json(path, Any, "record")
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UsageError(
            f"{path}: schema_version {version} is newer than this greenfast, which reads records up to "
            f"{SCHEMA_VERSION}; pip install -U greenfast"
        )
    record = convert_json(content, kinds, path, "record")
    check_record(record, content, path)
    return resolve_aliases(record, record.task)


def check_record(record: Run, content: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError unless the file's digest is right and the record's conclusions follow from what it measured."""
    if record.schema_version < SCHEMA_VERSION:
        raise UsageError(
            f"{path}: a record of version {record.schema_version} has too little to check what it says by; measure "
            f"again: {record.command}"
        )
    then, now = content.get(DIGEST, "missing"), compute_digest(content)
    found = [Mismatch(DIGEST, then, now)] if then != now else []
    # A conclusion says more than the digest, which any edit changes.
    for field, stored, recomputed in [*itertools.islice(verify_record(record), 1), *found][:1]:
        raise UsageError(
            f"{path}: {field} says {_short(stored)}, but recomputed it is {_short(recomputed)}; the record was edited "
            f"or damaged, so it says nothing"
        )


def _short(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def resolve_aliases(data: _Named, task: str) -> _Named:
    """``data``, read from a file of that task, with the names of shapes in place of aliases of them.

    The command stays as it was typed, and so does everything where the task is not known here.
    """
    try:
        names = find_task(task).config.shape_names
    except UsageError:
        return data
    if not names:
        return data
    quoted = "|".join(re.escape(alias) for alias in sorted(names, key=len, reverse=True))
    # as gates write them: "long 1.5x", "long: 6 hmma", "stage2 (long) 96 registers", "long seed 0", "long, warm L2"
    in_text = re.compile(rf"(?:^|(?<=\()|(?<=[;:,] )|(?<=emulated ))({quoted})(?=\)|: |, | \d| seed )")
    return msgspec.convert(_renamed(msgspec.to_builtins(data), "", names, in_text), type(data))


def _renamed(value: object, field: str, names: Mapping[str, str], in_text: re.Pattern[str]) -> object:
    if isinstance(value, dict):
        keys = names if field in _BY_SHAPE else {}
        return {keys.get(key, key): _renamed(item, key, names, in_text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], float):  # most of a record: times
            return value
        return [_renamed(item, field, names, in_text) for item in value]
    if isinstance(value, str):
        if field in ("shape", "shapes"):
            return names.get(value, value)
        if field in ("summary", "reasons", "checks"):
            return in_text.sub(lambda found: names[found[1]], value)
    return value


def find_outdated(records: Sequence[tuple[str, Run]]) -> dict[str, Freshness]:
    """By name, the answer for each record that is not current."""
    found = {name: check_freshness(record) for name, record in records}
    return {name: answer for name, answer in found.items() if answer.status != CURRENT}


def check_freshness(record: Run) -> Freshness:
    """Whether a record is of today's kernels and launches, as far as this machine's compiler can tell.

    One that asked for less than its task asks today is stale: what it says of itself follows from what it asked.
    """
    sides = record.sides()
    kernels = (
        answer for name, side in sides for answer in _of_side(record, side, f"{name} kernel" if sides[1:] else "kernel")
    )
    return worst(itertools.chain(kernels, _of_demands(record)))


def check_demands(record: Run) -> Freshness:
    """Whether a record asked for what its task asks today, or more. It takes no compiler."""
    return worst(_of_demands(record))


def _of_demands(record: Run) -> Iterator[Freshness]:
    """The speedup, and of each side the limits on errors, against those of the task."""
    try:
        config = find_task(record.task).config
        gates = config.gates(record.format)
    except UsageError:  # its kernels are stale for that
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
        asks = config.solutions if solution else rungs.get(record.candidate.variant)
        today = (asks and asks.required_speedup) or 0.0
        for asked in dict.fromkeys(row.required for row in record.speedups):
            if asked < today:
                yield Freshness(STALE, (f"it asked for {asked or 1:g}x, the task asks for {today:g}x",))


def _of_side(record: Run, side: Side, what: str) -> Iterator[Freshness]:
    if not side.builds:
        yield Freshness(STALE, (f"the record has no {what}",))
    for build in side.builds:
        yield from _of_build(record, side, build, f"the {what}")


def _of_build(record: Run, side: Side, build: Build, what: str) -> Iterator[Freshness]:
    """Of the kernel, and of its launch for each shape."""
    if side.solution is not None:
        yield Freshness(CANNOT_TELL, (f"the {what} is a solution's; judge the solution again",))
        return
    if not build.launches:
        yield of_launch(what, None)
    launches = {name: then.dims for name, then in build.launches.items()} or {str(build.dims): build.dims}
    try:
        family, toggles = load_record_family(record, side)
        sources: dict[KernelSource, list[str]] = {}
        for name, dims in launches.items():
            shape = name.partition(" launch ")[0]
            program = program_of(family, toggles, record.format, dims, instrumented=isinstance(record, PhaseRecord))
            source, now = launches_of(program, shape, dims).get(name, (None, None))
            if source is None:
                yield Freshness(STALE, (f"the {what} of {name} is launched no more",))
                continue
            sources.setdefault(source, []).append(name)
            if then := build.launches.get(name):
                yield of_launch(f"{what} at {name}", then, now)
        for source, names in sources.items():
            yield of_build(f"{what} at {', '.join(names)}", build, source)
    except UsageError as e:
        yield Freshness(STALE, (f"{what} is no more: {e}",))


def load_record_family(record: Run, side: Side) -> tuple[Family, dict[str, int]]:
    """The kernel family of a record and a side's toggles. Raises UsageError where one of them is no more."""
    task = find_task(record.task)
    return load_family(task), task.config.toggle_values(side.toggles)
