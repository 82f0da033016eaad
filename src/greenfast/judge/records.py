"""Saved records: read them, and tell which measured kernels are no longer today's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from greenfast.device.compiler import kernel_hash
from greenfast.judge.artifacts import RECORD
from greenfast.judge.record import AnyRecord, BenchRecord, PeersRecord, PhaseRecord, Record, Side
from greenfast.judge.store import read_json
from greenfast.judge.tasks import find_task, load_family
from greenfast.spec.errors import UsageError


def read_record(run: Path) -> AnyRecord:
    """The record of a run: its folder, or its record's file. Raises UsageError for anything else."""
    path = run / RECORD if run.is_dir() else run
    record: AnyRecord = read_json(path, Record | BenchRecord | PhaseRecord | PeersRecord, "record")
    return record


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
