"""PERFORMANCE of a machine without a GPU: the speedups of a kept record of the very same kernels, quoted.

A record is quoted only where nothing that decides a time differs: both sides' machine code and launches, compiler,
target, format, shapes with their dimensions and inputs, the timing protocol; and where its own gates passed (its
PERFORMANCE may have failed: then that is quoted). Its age does not matter; its date is shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from greenfast.judge.artifacts import RECORD, record_files
from greenfast.judge.decision import build_cached_performance
from greenfast.judge.freshness import of_build, of_launch
from greenfast.judge.gates.performance import gated_shapes
from greenfast.judge.gates.sides import BASELINE, CANDIDATE
from greenfast.judge.pipeline import GateRun, pending
from greenfast.judge.record_io import check_freshness, read_record
from greenfast.judge.record_schema import (
    FIRST_GATES,
    Build,
    CachedTiming,
    GateResult,
    Record,
    Side,
    SpeedupRow,
    TimingRow,
)
from greenfast.judge.request import Request
from greenfast.judge.store import read_json
from greenfast.judge.task import Timing
from greenfast.judge.timing.estimators import Interval, verdict
from greenfast.judge.timing.interleaved import METHOD, WARM
from greenfast.spec.errors import UsageError
from greenfast.spec.freshness import CURRENT, STALE, worst
from greenfast.spec.problem import NORMAL, case_of

EVIDENCE = "evidence"
_TASKS = "tasks"


class _Kind(msgspec.Struct):
    kind: str = ""


@dataclass(frozen=True)
class StoredRecord:
    """A comparison that a GPU measured, with its file's path and SHA-256."""

    path: str
    sha256: str
    record: Record


def find_evidence_folders(task_folder: Path) -> list[Path]:
    """Where the records of a task are kept: its evidence folder, and the one next to the folder of tasks it lies in."""
    folder = task_folder.resolve()
    found = [folder / EVIDENCE]
    if folder.parent.name == _TASKS:
        found.append(folder.parent.parent / EVIDENCE)
    return [path for path in found if path.is_dir()]


def load_records(folder: Path, skipped: Callable[[str], None] = lambda why: None) -> list[StoredRecord]:
    """The measured comparisons below an evidence folder; what cannot be read there, or was edited, is skipped.

    skipped: is told why.
    """
    found = []
    for file in record_files(folder):
        try:
            found += _kept(file, (Path(folder.name) / file.relative_to(folder)).as_posix())
        except UsageError as e:  # of another version, edited or damaged: it is not quoted
            skipped(f"not quoted: {e}")
    return found


def load_required_records(path: Path) -> list[StoredRecord]:
    """The measured comparisons of a file, of a run's folder, or of all runs below a folder.

    Raises UsageError where there is none, or one cannot be read.
    """
    files = record_files(path) if path.is_dir() else [path]
    found = [kept for file in files for kept in _kept(file, str(file))]
    if not found:
        raise UsageError(f"--quote {path}: no {RECORD} there holds a comparison measured on a GPU")
    return found


def _kept(file: Path, shown: str) -> list[StoredRecord]:
    if read_json(file, _Kind, "record").kind not in ("", "comparison"):  # of one variant, or a benchmark
        return []
    record = read_record(file)
    if not isinstance(record, Record) or record.device is None or record.device.kind != "gpu" or not record.speedups:
        return []
    return [StoredRecord(shown, hashlib.sha256(file.read_bytes()).hexdigest(), record)]


def find_target(kept: Sequence[StoredRecord], task: str, fmt: str, baseline: str, candidate: str) -> str | None:
    """The target of the newest record that compares these two variants, or None where no record does."""
    found = [
        k.record
        for k in kept
        if (k.record.task, k.record.format) == (task, fmt)
        and (k.record.baseline.variant, k.record.candidate.variant) == (baseline, candidate)
    ]
    return max(found, key=lambda record: record.created).arch if found else None


def reuse_cached_timing(
    run: GateRun, kept: Sequence[StoredRecord], required: float | None, reason: str
) -> tuple[GateResult, CachedTiming | None]:
    """PERFORMANCE from the newest record that fits, else PENDING: why nothing was timed, and what the nearest lacks.

    run: has passed CORRECTNESS. required: the speedup that is asked for. reason: why nothing can be timed here.
    """
    request = run.request
    same = [k for k in kept if (k.record.task, k.record.format) == (request.task.config.name, request.format)]
    found = [(k, find_mismatches(k.record, run, required)) for k in same]
    fresh = [k for k, differs in found if not differs]
    if fresh:
        return _quoted(max(fresh, key=lambda k: k.record.created), run, required)
    wanted = [run.variants[role].name for role in (BASELINE, CANDIDATE)]
    near = [(k, d) for k, d in found if [k.record.baseline.variant, k.record.candidate.variant] == wanted]
    if near:
        newest_first = sorted(near, key=lambda pair: pair[0].record.created, reverse=True)
        nearest, (first, *others) = min(newest_first, key=lambda pair: len(pair[1]))
        more = f" (and {len(others)} more)" if others else ""
        where = nearest.path.removesuffix(f"/{RECORD}")
        reason += f"; the record of {nearest.record.created[:10]} ({where}) {first}{more}"
    elif kept:
        reason += f"; none of {len(kept)} kept records compares {wanted[0]} with {wanted[1]}"
    return pending("PERFORMANCE", reason), None


def covers_missing_cases(quoted: CachedTiming, kept: Sequence[StoredRecord], request: Request) -> bool:
    """Whether the quoted record stands for the rest of this run's exam.

    It had the whole exam with every check, all shapes and as many seeds as today's, and all its kernels are today's,
    launched as they are today. Of a solution, which could hold answers, its timed inputs were secret too.
    """
    record, exam = next(k.record for k in kept if k.sha256 == quoted.sha256), request.check_plan
    if record.exam is None or not record.exam.complete or exam is None or not exam.secret:
        return False
    if any(gate.unchecked for gate in record.gates):
        return False
    config = request.task.config
    timed = {row.seed for row in record.candidate.timing}
    if record.candidate.solution is not None and record.exam.seed not in timed:
        return False
    held: dict[str, set[int]] = {}
    for row in record.candidate.correctness:
        if row.variant == NORMAL:
            held.setdefault(str(sorted(row.dims.items())), set()).add(row.seed)
    seeds = len(config.seeds)
    whole = all(len(held.get(str(sorted(shape.dims.items())), ())) >= seeds for shape in exam.required_shapes)
    return whole and check_freshness(record).status == CURRENT


def _quoted(kept: StoredRecord, run: GateRun, required: float | None) -> tuple[GateResult, CachedTiming]:
    record, request = kept.record, run.request
    assert record.device is not None
    gated = gated_shapes(request.shapes, request.timing)
    names = {shape.name for shape in request.shapes}
    rows = [_rejudged(row, required, gated) for row in record.speedups if row.shape in names]
    quoted = CachedTiming(
        path=kept.path,
        sha256=kept.sha256,
        created=record.created,
        git=record.git,
        device=record.device,
        command=record.command,
        speedups=rows,
    )
    return build_cached_performance(quoted, required), quoted


def _rejudged(row: SpeedupRow, required: float | None, gated: Sequence[str]) -> SpeedupRow:
    """The row as this run's requirement sees it, by today's definition of the verdicts."""
    asked = required or 0.0
    said = verdict(Interval(row.speedup, row.ci_low, row.ci_high), noise_floor=row.noise_floor, required=asked)
    return msgspec.structs.replace(row, required=asked, verdict=said, gated=row.shape in gated and row.cache == WARM)


def find_mismatches(record: Record, run: GateRun, required: float | None) -> list[str]:
    """Why a record cannot stand for this run, in words that follow its name; empty where it can."""
    request = run.request
    found = []
    if record.arch != request.target.name:
        found.append(f"is of {record.arch}, not {request.target.name}")
    for role, side in ((BASELINE, record.baseline), (CANDIDATE, record.candidate)):
        found += [text for text in _of_kernels(role, side, run) if text not in found]
    # The gates that it lists: one that was added since does not make it useless.
    listed = dict.fromkeys([*FIRST_GATES, *(gate.gate for gate in record.gates)])
    failed = [gate for gate in listed if gate != "PERFORMANCE" and record.gate_status(gate) != "PASS"]
    if failed:
        found.append(f"did not pass {', '.join(failed)}")
    if not found:  # which is the slowest to find out
        found += _of_inputs(record, run)
    if not found:
        found += _of_timing(record, run)
        found += _of_verdicts(record, run, required)
    return found


def _of_kernels(role: str, side: Side, run: GateRun) -> list[str]:
    built = run.built(role)
    assert built is not None
    dims = {shape.name: shape.dims for shape in run.request.shapes}
    timed = {row.shape for row in side.timing}
    found = []
    launches = {
        name: launched
        for shape, program in built.programs.items()
        if shape in timed  # the rows of the inputs say so where it is not
        for name, launched in program.facts(shape, dims[shape]).items()
    }
    for name, (kernel, facts) in launches.items():
        then = _build_of(side, name)
        if then is None:
            found.append(f"does not say which of its {role} kernels {name} ran")
        elif then.arch == kernel.target.name:
            what = f"the {role} kernel at {name}"
            answer = worst(
                (of_build(what, then, kernel.source, kernel), of_launch(what, then.launches.get(name), facts))
            )
            if answer.status != CURRENT:
                found.append(f"{'is stale' if answer.status == STALE else 'cannot be compared'}: {answer.reasons[0]}")
    return list(dict.fromkeys(found))


def _build_of(side: Side, launch: str) -> Build | None:
    """The kernel of a launch by its name; None where an older record does not say."""
    if len(side.builds) == 1:
        return side.builds[0]
    of_several = " launch " in launch
    return next((b for b in side.builds if launch in (b.launches if of_several else b.shapes)), None)


def _of_inputs(record: Record, run: GateRun) -> list[str]:
    """Compare what was timed with this run's shapes. The inputs of the record's seeds are made again and compared."""
    found: dict[str, None] = {}
    request = run.request
    asked: dict[tuple[str, int], str] = {}
    for side in (record.baseline, record.candidate):
        then = {(row.shape, row.seed): row for row in side.correctness if row.variant == NORMAL}
        for shape in request.shapes:
            seeds = sorted({row.seed for row in side.timing if row.shape == shape.name})
            rows = [then.get((shape.name, seed)) for seed in seeds]
            if not rows or None in rows:
                found[f"did not time {shape.name}"] = None
            for row in rows:
                if row is None:
                    continue
                key = shape.name, row.seed
                if key not in asked and row.dims == shape.dims and not found:
                    asked[key] = case_of(request.task.problem, shape.dims, row.seed, request.format).digest
                if row.dims != shape.dims or asked.get(key, row.inputs_digest) != row.inputs_digest:
                    found[f"had other inputs at {shape.name} seed {row.seed}"] = None
    return list(found)


def _of_timing(record: Record, run: GateRun) -> list[str]:
    timing = run.request.timing
    names = {shape.name for shape in run.request.shapes}
    rows = [row for side in (record.baseline, record.candidate) for row in side.timing if row.shape in names]
    speedups = [row for row in record.speedups if row.shape in names]
    as_asked: Callable[[TimingRow], bool] = lambda row: any(_timed_as(row, timing, times) for times in (1, 2))  # noqa: E731
    if not all(map(as_asked, rows)) or any(row.confidence != timing.confidence for row in speedups):
        return ["was timed otherwise (method, launches, processes, blocks or confidence)"]
    return []


def _timed_as(row: TimingRow, timing: Timing, times: int) -> bool:
    """Whether the protocol is this one; ``times``: 2 for what was measured once more because it was inconclusive."""
    blocks = sum(len(process) for process in row.block_medians_us)
    return (
        (row.method, row.warmup_iters) == (METHOD, timing.warmup_iters)
        and row.timed_iters + row.discarded_iters == times * timing.timed_iters
        and len(row.block_medians_us) == times * timing.processes
        and (blocks == times * timing.blocks or (row.discarded_iters > 0 and blocks < times * timing.blocks))
    )


def _of_verdicts(record: Record, run: GateRun, required: float | None) -> list[str]:
    """Only what was gated there can decide here: any other verdict is one of many. Nor can an open one."""
    found = []
    for shape in gated_shapes(run.request.shapes, run.request.timing):
        row = next((r for r in record.speedups if (r.shape, r.cache) == (shape, WARM)), None)
        if row is None or not row.gated:
            found.append(f"did not gate {shape}")
        elif row.required != (required or 0.0) and _rejudged(row, required, [shape]).verdict == "INCONCLUSIVE":
            found.append(f"cannot tell whether {shape} reaches {required or 1:g}x")
    return found
