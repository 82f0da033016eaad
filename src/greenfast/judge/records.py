"""Saved records: read them, and tell which measured kernels are no longer today's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from greenfast.device.compiler import kernel_hash
from greenfast.judge.artifacts import RECORD
from greenfast.judge.record import AnyRecord, BenchRecord, PeersRecord, PhaseRecord, Record, Side
from greenfast.judge.store import read_json
from greenfast.judge.tasks import find_task, load_family
from greenfast.spec.errors import UsageError

#: Fields that hold a mapping whose keys are shapes.
_BY_SHAPE = {"counts", "least_work", "phase_cycles", "phase_counts"}
_Named = TypeVar("_Named", bound=msgspec.Struct)


def read_record(run: Path) -> AnyRecord:
    """The record of a run: its folder, or its record's file; shapes under the names that the task gives them today.

    Raises UsageError for anything else.
    """
    path = run / RECORD if run.is_dir() else run
    record: AnyRecord = read_json(path, Record | BenchRecord | PhaseRecord | PeersRecord, "record")
    return with_shape_names(record, record.task)


def with_shape_names(data: _Named, task: str) -> _Named:
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
        return [_renamed(item, field, names, in_text) for item in value]
    if isinstance(value, str):
        if field in ("shape", "shapes"):
            return names.get(value, value)
        if field in ("summary", "reasons", "checks"):
            return in_text.sub(lambda found: names[found[1]], value)
    return value


def stale_records(records: Sequence[tuple[str, Record]]) -> set[str]:
    """The names of those records that measured a kernel which today's sources no longer render."""
    return {name for name, record in records if is_stale(record)}


def is_stale(record: AnyRecord) -> bool:
    """Whether any kernel of the record has another hash today, or can no longer be rendered."""
    sides = [record.baseline, record.candidate] if isinstance(record, Record) else [record.side]
    return any(_side_is_stale(record, side) for side in sides)


def _side_is_stale(record: AnyRecord, side: Side) -> bool:
    try:
        task = find_task(record.task)
        family = load_family(task)
        toggles = task.config.toggle_values(side.toggles)
        instrumented = isinstance(record, PhaseRecord)
        hashes = {
            b.kernel_hash: kernel_hash(family.kernel(toggles, record.format, b.dims, instrumented=instrumented))
            for b in side.builds
        }
    except UsageError:  # the task, a toggle or the format is no more
        return True
    return not hashes or any(then != today for then, today in hashes.items())
