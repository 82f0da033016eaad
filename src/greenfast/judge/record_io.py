"""The files of records: their contents, their conclusions when they are read, and changes of their kernels since.

A record's file has measurements and a digest of them. The digest detects damage and manual edits. It is not a
signature: anyone who edits a record can compute a new one. Therefore all conclusions are computed whenever a file is
read:

- Block medians give each speedup with its interval, noise floor and verdict.
- The numbers and limits of each correctness row give its gates.
- Rows, speedups and builds give the results of the gates (``Gate.conclude``).
- The gates and the check plan give the decision with its reasons.

A file of version 2, and the record that ``greenfast judge --json`` prints, have conclusions too. They must be equal to
the computed ones.

A kept record names its index by a relative path, ``"index": "../../index.json"``. The index has an entry for each
record below its folder, with the compiler, hashes and launches of every kernel. A change of the kernels' text that
keeps their machine code edits the index and no record.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec

from greenfast.device.compiler import CompiledKernel, compile_kernel, compile_options, compiler_version, kernel_hash
from greenfast.device.identity import code_hash, launch_differences, list_launches
from greenfast.judge.check_plan import NOTHING_DRAWN
from greenfast.judge.gates.correctness import judge_row
from greenfast.judge.gates.performance import compute_speedups, judge_again
from greenfast.judge.gates.registry import GATES
from greenfast.judge.pipeline import conclude_checks, pending
from greenfast.judge.record_schema import (
    FIRST_GATES,
    OBSERVED_GATES,
    OLDEST_VERSION,
    SCHEMA_VERSION,
    AnyRecord,
    BenchRecord,
    Build,
    CachedTiming,
    CorrectnessRow,
    Decision,
    GateResult,
    Limits,
    PhaseRecord,
    PlanCoverage,
    Record,
    Run,
    Side,
    TimedKernel,
    TimingRow,
)
from greenfast.judge.report.facts import describe_source, side_status
from greenfast.judge.request import Request
from greenfast.judge.store import convert_json, read_json, to_json
from greenfast.judge.task import TaskConfig, find_task, load_family
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, MachineError, UsageError
from greenfast.spec.facts import LaunchFacts, Resources
from greenfast.spec.freshness import CANNOT_TELL, CURRENT, STALE, Freshness, worst
from greenfast.spec.kernel import Family, KernelSource, render_program

DIGEST = "digest"


def compute_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a record's content without its digest, as 64 hexadecimal digits.

    Canonical: UTF-8, keys sorted, no spaces, numbers as Python's ``json`` writes them (the shortest that reads back).
    """
    undigested = {name: value for name, value in content.items() if name != DIGEST}
    text = json.dumps(undigested, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_measurements(record: Run) -> dict[str, Any]:
    """Return the content of a record's file: plain data without the conclusions and without the digest."""
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    for name in ("decision", "reasons", "speedups"):
        content.pop(name, None)
    quoted = content.get("quoted")
    for row in quoted["speedups"] if quoted else ():
        del row["verdict"]
    sides = [content[role] for role in ("baseline", "candidate", "side") if content.get(role)]
    for row in (row for side in sides for row in side["correctness"]):
        row["gates"] = {name: held for name, held in row["gates"].items() if name in OBSERVED_GATES}
    if quoted or content.get("claim"):
        content["gates"] = [
            {"gate": gate["gate"]} if gate["gate"] == "PERFORMANCE" else gate for gate in content["gates"]
        ]
    return content


def sealed_json(record: Run, *, conclusions: bool = False) -> str:
    """Return the JSON text of a record's file, with the digest as the last field. conclusions: include them too."""
    content = msgspec.json.decode(msgspec.json.encode(record)) if conclusions else read_measurements(record)
    return to_json(content | {DIGEST: compute_digest(content)})


INDEX = "index.json"
FIELD = "index"
#: The field that every kernel has, and the fields that identify a kernel.
KERNEL = "kernel_hash"
IDENTITY = ("arch", "options", "compiler", KERNEL, "code_hash", "launch", "launches")
_POINTER = re.compile(rf"(\.\./)*{re.escape(INDEX)}")


def read_content(path: Path) -> dict[str, Any]:
    """Read a record's file as plain data; of a kept record with its entry in the index.

    Raises UsageError for any other file, and for a kept record that was edited or has no entry.
    """
    content: dict[str, Any] = read_json(path, dict[str, Any], "record")
    return with_identities(content, path) if FIELD in content else content


def with_identities(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a kept record's content with its identities from the index. Raises UsageError as ``read_content``."""
    index, name = find_index(content, path)
    if content.get(DIGEST) != (digest := compute_digest(content)):
        raise UsageError(f"{path}: its digest is {content.get(DIGEST)}, but its content's is {digest}; it was edited")
    entry = read_index(index).get(name)
    if entry is None:
        raise UsageError(f"{path}: {index} has no entry {name}; a kept record needs one")
    whole = copy.deepcopy({field: value for field, value in content.items() if field not in (FIELD, DIGEST)})
    try:
        for pointer, identity in entry["identities"].items():
            _resolve(whole, pointer).update(identity)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(f"{index}: the entry {name} does not fit its record ({e!r})") from e
    return whole | {DIGEST: entry[DIGEST]} if DIGEST in entry else whole


def find_index(content: Mapping[str, Any], path: Path) -> tuple[Path, str]:
    """Return the index that a kept record names, and the record's name in it. Raises UsageError for any other file."""
    pointer = content.get(FIELD)
    if not isinstance(pointer, str) or not _POINTER.fullmatch(pointer):
        raise UsageError(f"{path}: index is {pointer!r}, not {INDEX} of a folder above it")
    index = path.resolve().parent.joinpath(pointer).resolve()
    return index, path.resolve().relative_to(index.parent).as_posix()


def read_index(path: Path) -> Mapping[str, dict[str, Any]]:
    """Read the entries of an index by their record's path from its folder. Raises UsageError if there is none."""
    try:
        return _read_index(path, path.stat().st_mtime_ns)
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); a kept record needs its index") from e


@lru_cache(maxsize=8)
def _read_index(path: Path, _modified: int) -> Mapping[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = read_json(path, dict[str, dict[str, Any]], "index of records")
    return entries


def _resolve(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


RECORD = "record.json"
REPORT = "VALIDATION_REPORT.md"
PLOT = "performance.png"
BUILD_META = "build_meta.json"
CORRECTNESS = "correctness_summary.json"
PERFORMANCE = "perf_baseline.json"

#: Gates in every row of correctness_summary.json: false if there was no output to measure, null if not judged.
_ERROR_GATES = ("max_abs_err_pass", "mean_abs_err_pass", "pct_bad_pass")

_RESOURCES = (
    *("registers", "shared_memory_bytes", "static_smem_bytes", "dynamic_smem_bytes", "stack_bytes"),
    *("spill_store_bytes", "spill_load_bytes"),
)


def record_files(folder: Path) -> list[Path]:
    """Return the record files below a folder, sorted by path. Pipes and devices are excluded: reads may block."""
    return sorted(path for path in folder.rglob(RECORD) if path.is_file())


class PerformanceFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of perf_baseline.json. If ``results`` is empty, ``pending`` is the reason."""

    results: list[TimingRow]
    task: str = ""
    variant: str = ""
    format: str = ""
    pending: str | None = None

    def require_results(self, where: str) -> list[TimingRow]:
        """Return the rows. Raises UsageError if there are none."""
        if not self.results:
            raise UsageError(f"{where}: holds no timings ({self.pending or 'none were taken'})")
        return self.results


def build_meta(run: Run, side: Side) -> dict[str, Any]:
    """Build the content of build_meta.json: toggles, compiler, resources, source tree and device."""
    builds = [
        {
            "dims": b.dims,
            "entry": b.entry,
            "kernel_hash": b.kernel_hash,
            "code_hash": b.code_hash,
            **_resources(b.resources),
            "machine_code": b.machine_code,
        }
        for b in side.builds
    ]
    first = side.builds[0] if side.builds else None
    return {
        "timestamp": run.created,
        "task": run.task,
        "variant": side.variant,
        "format": run.format,
        "build": {
            **side.toggles,
            "arch": run.arch,
            "flags": first.options if first else [],
            "compiler": first.compiler if first else "",
            "kernels": builds,
        },
        "git": run.git,
        "device": run.device,
        "environment": run.environment,
    }


def _resources(r: Resources | None) -> dict[str, int | None]:
    """Return the resources by name; None for each if the kernel's PTX was not assembled."""
    resources = {} if r is None else {**asdict(r), "shared_memory_bytes": r.smem_bytes}
    return {name: resources.get(name) for name in _RESOURCES}


def correctness_summary(run: Run, side: Side) -> dict[str, Any]:
    """Build the content of correctness_summary.json: errors and gates per (shape, seed).

    Values are None for cases that did not run. ``all_pass`` is None if such cases are the only obstacle.
    """
    results = []
    for row in side.correctness:
        error = row.error
        results.append(
            {
                "shape": row.shape,
                **row.dims,
                "seed": row.seed,
                "max_abs_err": error.max_abs_err if error else None,
                "mean_abs_err": error.mean_abs_err if error else None,
                "max_rel_err": error.max_rel_err if error else None,
                "pct_bad": error.pct_bad if error else None,
                "format_error": row.format_error,
                "kernel_error": row.kernel_error,
                "bound_ratio": row.bound_ratio,
                "inputs_digest": row.inputs_digest,
                "variant": row.variant,
                "drawn": row.drawn,
                "gates": dict.fromkeys(_ERROR_GATES, False if row.gates and row.format_is_judged else None) | row.gates,
                "pass": row.passed if row.gates else None,
                "notes": row.notes,
            }
        )
    return {
        "task": run.task,
        "variant": side.variant,
        "format": run.format,
        "results": results,
        "all_pass": {"PASS": True, "FAIL": False}.get(side_status(side)),
        "pending": _pending(run, "CORRECTNESS"),
    }


def performance(run: Run, side: Side) -> dict[str, Any]:
    """Build the content of perf_baseline.json: timings per (shape, seed) and cache state, with dimensions."""
    return {
        "task": run.task,
        "variant": side.variant,
        "format": run.format,
        "results": [{**msgspec.structs.asdict(row), **row.dims} for row in side.timing],
        "pending": _explain_missing_timings(run),
    }


def side_files(run: Run, side: Side) -> dict[str, Any]:
    """Return the contents of an implementation's three files by name."""
    return {
        BUILD_META: build_meta(run, side),
        CORRECTNESS: correctness_summary(run, side),
        PERFORMANCE: performance(run, side),
    }


def _explain_missing_timings(run: Run) -> str | None:
    if isinstance(run, Record) and run.quoted is not None:
        return f"nothing was timed here; PERFORMANCE was {describe_source(run.quoted)}"
    return _pending(run, "PERFORMANCE")


def _pending(run: Run, gate: str) -> str | None:
    for result in run.gates:
        if result.gate == gate and result.status == "PENDING":
            return result.summary
    return None


#: Tolerance between a stored and a computed figure: the last digit may differ between processors.
_LAST_DIGIT = 1.1e-4
_Run = TypeVar("_Run", bound=Run)


class Mismatch(NamedTuple):
    """A field of a record's file, its stored value, and the value that follows from the measurements."""

    field: str
    stored: Any
    computed: Any


def conclude(record: _Run) -> _Run:
    """Return a record with the conclusions that follow from its measurements.

    Raises ValueError if timings are not paired, or belong to an implementation that is not correct.
    """
    replace = msgspec.structs.replace
    sides = {name: getattr(record, name, None) for name in ("baseline", "candidate", "side")}
    record = replace(record, **{name: _judge_rows(side) for name, side in sides.items() if side is not None})
    if isinstance(record, Record):
        record = replace(record, **_conclude_speedups(record), gates=_list_results(record))
    gates = [
        GATES[result.gate].conclude(record, result) if result.gate in GATES else conclude_checks(result)
        for result in record.gates
    ]
    record = replace(record, gates=gates)
    if isinstance(record, Record):
        exam = _conclude_coverage(record)
        decision, reasons = decide(gates, record.quoted, exam)
        record = replace(record, exam=exam, decision=decision, reasons=reasons)
    return record


def _conclude_speedups(record: Record) -> dict[str, Any]:
    """Return the speedups, and the cached ones with the verdicts that follow from their figures."""
    speedups, quoted = compute_speedups(record), record.quoted
    if find_mismatch(msgspec.to_builtins(record.speedups), msgspec.to_builtins(speedups)) is None:
        speedups = record.speedups  # They differ in the last digit at most.
    if quoted is not None:
        rows = [judge_again(row, row.required, row.gated) for row in quoted.speedups]
        quoted = msgspec.structs.replace(quoted, speedups=rows)
    return {"speedups": speedups, "quoted": quoted}


def _list_results(record: Record) -> list[GateResult]:
    """Return the first result of each gate. A gate that every record must list is PENDING if it has none."""
    results: dict[str, GateResult] = {}
    for result in record.gates:
        results.setdefault(result.gate, result)
    for name in FIRST_GATES:
        results.setdefault(name, pending(name, "the record has no result of it"))
    return list(results.values())


def _judge_rows(side: Side) -> Side:
    def judge(row: CorrectnessRow, limits: Limits | None) -> CorrectnessRow:
        return row if limits is None else msgspec.structs.replace(row, gates=judge_row(row, limits))

    rows = [judge(row, side.limits.get(row.shape)) for row in side.correctness]
    return msgspec.structs.replace(side, correctness=rows)


def _conclude_coverage(record: Record) -> PlanCoverage:
    """Return the coverage of the check plan, without the parts that no row of the candidate has.

    The task's shapes at the time of the run are unknown.
    """
    exam = record.exam or PlanCoverage(seed=None, complete=False, missing=["a check plan"])
    missing, rows = list(exam.missing), record.candidate.correctness
    if record.gate_status("CORRECTNESS") == "PASS":
        if exam.seed is not None and not any(row.drawn and row.seed == exam.seed for row in rows):
            missing.append(f"the cases of seed {exam.seed}")
        dims = {row.shape: row.dims for row in rows if row.drawn and row.seed == (exam.seed or 0)}
        missing += [name for name, sizes in exam.drawn.items() if dims.get(name) != sizes]
    if exam.seed is None and not missing and record.quoted is None:
        missing.append(NOTHING_DRAWN)
    complete = not missing or (exam.complete and record.quoted is not None)
    return msgspec.structs.replace(exam, complete=complete, missing=missing)


def find_mismatch(stored: Any, computed: Any, field: str = "") -> Mismatch | None:
    """Return the first value of plain data that differs from the computed one. Fields that one lacks are left out."""
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        prefix = f"{field}." if field else ""
        pairs = [(stored[key], computed[key], prefix + key) for key in stored if key in computed]
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        names = [f"[{i}]" + (f" ({name})" if (name := _name_row(row)) else "") for i, row in enumerate(computed)]
        pairs = [(one, other, field + name) for one, other, name in zip(stored, computed, names, strict=True)]
    elif isinstance(stored, float) and isinstance(computed, float):
        return None if abs(stored - computed) <= _LAST_DIGIT else Mismatch(field, stored, computed)
    elif stored == computed:
        return None
    else:
        shown = [[_name_row(row) or row for row in one] if isinstance(one, list) else one for one in (stored, computed)]
        return Mismatch(field, *shown)
    return next(filter(None, (find_mismatch(*pair) for pair in pairs)), None)


def _name_row(row: Any) -> str:
    return str(row.get("gate") or row.get("shape") or "") if isinstance(row, Mapping) else ""


def decide(
    gates: Sequence[GateResult], quoted: CachedTiming | None = None, exam: PlanCoverage | None = None
) -> tuple[Decision, list[str]]:
    """Decide from the gates and the check plan, and return the decision with its reasons.

    DEFER: a gate failed. PENDING: a gate is pending. UNCHECKED: all gates passed, but a check was skipped.
    INCOMPLETE: all gates passed on a part of the plan. MERGE: all gates passed on the full plan with every check.
    """
    missing = exam.missing if exam is not None else []
    is_completed = quoted is not None and exam is not None and exam.complete and bool(missing)
    decision, reasons = _decide(gates, [] if is_completed else missing)
    if exam is not None and exam.seed is not None and not exam.drawn and NOTHING_DRAWN not in missing:
        reasons.append("no shapes were drawn: the task declares no ranges of them")
    if quoted is not None and is_completed:
        reasons.append(f"the rest of the exam held in the record {describe_source(quoted)}")
    if quoted is not None:
        reasons.append(f"PERFORMANCE {describe_source(quoted)}: not measured in this run")
    return decision, reasons


def _decide(gates: Sequence[GateResult], missing: Sequence[str]) -> tuple[Decision, list[str]]:
    failed = [r for r in gates if r.status == "FAIL"]
    if failed:
        return "DEFER", [f"{r.gate}: {reason}" for r in failed for reason in (r.reasons or [r.summary])]
    waiting = [r for r in gates if r.status == "PENDING"]
    if waiting:
        return "PENDING", [f"{r.gate}: {reason}" for r in waiting for reason in (r.reasons or [r.summary])]
    unchecked = [f"{r.gate}: {check}" for r in gates for check in r.unchecked]
    if unchecked:
        return "UNCHECKED", [*unchecked, *(f"incomplete: {part}" for part in missing)]
    if missing:
        return "INCOMPLETE", [f"incomplete: {', '.join(missing)}; {_describe_all(gates)} hold on those"]
    return "MERGE", [f"{_describe_all(gates)} hold"]


def _describe_all(gates: Sequence[GateResult]) -> str:
    return f"all {'five' if len(gates) == 5 else len(gates)} gates"


#: Names of fields that are mappings by shape.
_BY_SHAPE = {"counts", "launches", "limits", "least_work", "phase_cycles", "phase_counts"}
_SHOWN = 200
_Named = TypeVar("_Named", bound=msgspec.Struct)


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
            f"{path}: schema_version {version} is newer than this greenfast; it reads records up to "
            f"{SCHEMA_VERSION}; pip install -U greenfast"
        )
    kind = content.get("kind")
    if kind == "benchmark" and kind not in (known.__struct_config__.tag for known in get_args(kinds)):
        raise UsageError(f"{path}: a record of a benchmark; python -m benchmarks report {path} reads it")
    record = convert_json(content, kinds, path, "record")
    return resolve_aliases(conclude_content(record, content, path), record.task)


EVIDENCE = "evidence"
_TASKS = "tasks"


class _Kind(msgspec.Struct):
    kind: str = ""
    task: str = ""


@dataclass(frozen=True)
class StoredRecord:
    """The record of a comparison on a GPU, with the path and the SHA-256 of its file."""

    path: str
    sha256: str
    record: Record


def load_records(
    folder: Path, skipped: Callable[[str], None] = lambda reason: None, *, task: str = ""
) -> list[StoredRecord]:
    """Load the comparisons on a GPU below an evidence folder. Skip files that are unreadable or were edited.

    skipped: receives the reason for each skipped file. task: only of this task.
    """
    records = []
    for file in record_files(folder):
        try:
            records += _load_comparison(file, (Path(folder.name) / file.relative_to(folder)).as_posix(), task)
        except UsageError as e:  # Another version, or an edited or damaged file.
            skipped(f"not quoted: {e}")
    return records


def load_required_records(path: Path) -> list[StoredRecord]:
    """Load the comparisons on a GPU from a file, a run's folder, or all runs below a folder.

    Raises UsageError if there are none, or if a file cannot be read.
    """
    files = record_files(path) if path.is_dir() else [path]
    records = [record for file in files for record in _load_comparison(file, str(file))]
    if not records:
        raise UsageError(f"--quote {path}: no {RECORD} there holds a comparison measured on a GPU")
    return records


def _load_comparison(file: Path, shown: str, task: str = "") -> list[StoredRecord]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # read_record reports the error
        head = msgspec.json.decode(file.read_bytes(), type=_Kind)
        # Others are of one implementation alone, or a benchmark.
        if head.kind not in ("", "comparison") or (task and head.task != task):
            return []
    record = read_record(file)
    if not isinstance(record, Record) or record.device is None or record.device.kind != "gpu" or not record.speedups:
        return []
    return [StoredRecord(shown, hashlib.sha256(file.read_bytes()).hexdigest(), record)]


def load_kept_records(
    request: Request, path: Path | None, skipped: Callable[[str], None] = lambda reason: None
) -> list[StoredRecord]:
    """Load the records that PERFORMANCE may be quoted from: in ``path``, else in the task's evidence folders.

    Without a path, none are loaded if this machine can time. The folder of a solution is not searched, as its author
    could write a record there.
    """
    if path is not None:
        return load_required_records(path)
    if request.cannot_time() is None:
        return []
    task = request.task
    folders = find_evidence_folders(task.folder)
    return [record for folder in folders for record in load_records(folder, skipped, task=task.config.name)]


def find_evidence_folders(task_folder: Path) -> list[Path]:
    """Return the folders with stored records of a task.

    These are ``evidence`` in the task's folder, and ``evidence`` next to the folder ``tasks`` with the task.
    """
    folder = task_folder.resolve()
    folders = [folder / EVIDENCE]
    if folder.parent.name == _TASKS:
        folders.append(folder.parent.parent / EVIDENCE)
    return [path for path in folders if path.is_dir()]


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
    edited = "the record was edited or damaged"
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
    """Compare the required speedup and the limits on errors with the task's."""
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
            then, now = side.limits.get(row.shape), gates.select(row.dims, own).limits
            for name in then.__struct_fields__ if then is not None else ():
                today = getattr(now, name)
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


def _check_build(record: Run, side: Side, build: Build, label: str) -> Iterator[Freshness]:
    """Yield the freshness of a kernel, and of its launch for each shape. Shapes that the task dropped are left out."""
    if side.solution is not None:
        yield Freshness(CANNOT_TELL, (f"the {label} is a solution's; judge the solution again",))
        return
    if not build.launches:
        yield Freshness(CANNOT_TELL, (f"the record does not state how {label} was launched",))
    try:
        config, family, toggles = load_record_family(record, side)
        sources: dict[KernelSource, list[str]] = {}
        for name, then in build.launches.items():
            if is_dropped(config, then.dims):
                continue
            instrumented = isinstance(record, PhaseRecord)
            program = render_program(family, toggles, record.format, then.dims, instrumented=instrumented)
            launches = list_launches(program, name.partition(" launch ")[0], then.dims)
            if name not in launches:
                yield Freshness(STALE, (f"the {label} of {name} is launched no more",))
                continue
            source, now = launches[name]
            sources.setdefault(source, []).append(name)
            yield compare_launch(f"{label} at {name}", then, now)
        for source, names in sources.items():
            yield compare_build(f"{label} at {', '.join(names)}", build, source)
    except UsageError as e:
        yield Freshness(STALE, (f"{label} is no more: {e}",))


def is_dropped(config: TaskConfig, dims: Mapping[str, int]) -> bool:
    """Return whether a task no longer has one of a shape's dimensions."""
    return not dims.keys() <= {name for shape in config.shapes for name in shape.dims} | config.drawing.ranges.keys()


def load_record_family(record: Run, side: Side) -> tuple[TaskConfig, Family, dict[str, int]]:
    """Return the task, the kernel family and the toggles of a record's side. Raises UsageError if one is no more."""
    task = find_task(record.task)
    return task.config, load_family(task), task.config.toggle_values(side.toggles)


def compare_build(
    label: str, then: Build | TimedKernel, now: KernelSource, compiled: CompiledKernel | None = None
) -> Freshness:
    """Compare a recorded kernel's machine code with the code of today's source.

    Equal text under the same compiler and options makes equal code; other text is compiled and its code compared.
    label: the kernel in words, such as "the candidate kernel at b1_h8_s512_d64". compiled: ``now``, if compiled.
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
                (f"the source of {label} or the options differ, and the record has no hash of machine code",),
            )
        today = code_hash(compiled) if compiled else _code_of_today(kernel_hash(now), now, target)
    except (CompileError, UsageError) as e:
        return Freshness(STALE, (f"{label} cannot be built any more: {str(e).splitlines()[0].rstrip(':')}",))
    return Freshness() if today == then.code_hash else Freshness(STALE, (f"the machine code of {label} differs",))


@lru_cache(maxsize=1024)  # records share kernels, and shapes of a record do
def _code_of_today(text: str, now: KernelSource, target: Target) -> str:
    """Compile a kernel. text: hash of its source with all headers, as a cache key, because headers may change."""
    return code_hash(compile_kernel(now, target, isolated=True))


def compare_launch(label: str, then: LaunchFacts, now: LaunchFacts) -> Freshness:
    """Compare the launch of a kernel with the recorded one."""
    differences = tuple(f"{difference} of {label} differs" for difference in launch_differences(then, now))
    return Freshness(STALE, differences) if differences else Freshness()


_TIMEOUT_S = 60


def records_below(folder: Path, *, git: bool = False) -> tuple[list[tuple[str, Record | BenchRecord]], list[str]]:
    """Return the path and record of each run below a folder, and the reasons for skipped records.

    git: also the versions in the git history of the folder. A run that is there twice, because its hashes were
    renewed, counts once. Raises UsageError unless it is a folder, MachineError if git fails.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder")
    records: dict[tuple[str, ...], tuple[str, Record | BenchRecord]] = {}
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
                records.setdefault((record.created, record.command, record.format, *variants), (name, record))
    return list(records.values()), skipped


def _versions(folder: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of each committed version of a record, the newest first."""
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
