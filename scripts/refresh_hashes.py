"""Reports for every record under evidence/ whether it describes today's kernels, and updates the hashes in its index.

python -m scripts.refresh_hashes [--check]    (--check changes nothing; exit 1 where a record is not current)

A record of an older version whose kernels have the same text and compiler today gets the hash of their machine code
and their launches. One whose kernels have the same machine code but different text gets the hash of that text, so that
seeing that it is current needs no compile. The index alone is written, and a stale record's entry is left unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.freshness import find_comparison, freshness, timed_kernels
from benchmarks.records import AnyRecord, Benchmark, read_record
from benchmarks.sdpa import peers
from greenfast.device.compiler import compile_kernel, compiler_version, kernel_hash
from greenfast.device.identity import code_hash, list_launches
from greenfast.judge.record_io import (
    FIELD,
    RECORD,
    find_index,
    is_dropped,
    load_record_family,
    read_content,
    read_index,
)
from greenfast.judge.record_schema import Build, PhaseRecord, Record, Side
from greenfast.judge.store import read_json, write_whole
from greenfast.judge.task import find_task, load_family
from greenfast.ops.warmup import warm
from greenfast.spec.arch import Target
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.freshness import CANNOT_TELL, CURRENT, STALE, Freshness, worst
from greenfast.spec.kernel import KernelSource, render_program
from scripts.kept_records import render_index, split

ROOT = Path(__file__).parents[1]
COMPARED = ("evidence/operator-h200.json", "evidence/serving-h200.json")
EMULATED = "evidence/emulator-h200.json"


def refreshed(record: AnyRecord) -> AnyRecord:
    """The record with the hashes and launches of today's kernels, if it measured the same kernels."""
    if isinstance(record, Benchmark) and record.side is None:
        return _compared(record)
    sides = ("baseline", "candidate") if isinstance(record, Record) else ("side",)
    changed = {name: _side(record, getattr(record, name)) for name in sides}
    found: AnyRecord = msgspec.structs.replace(record, **changed)
    return found


def _side(record: AnyRecord, side: Side) -> Side:
    return msgspec.structs.replace(side, builds=[_build(record, side, build) for build in side.builds])


def _build(record: AnyRecord, side: Side, build: Build) -> Build:
    if build.compiler != compiler_version():
        return build
    today = _launches(record, side, build)
    first = next((name for name in build.launches or today if name in today), None)
    if first is None:
        return build  # stale
    source, _ = today[first]
    text, code = kernel_hash(source), build.code_hash
    if code != (now := code_hash(compile_kernel(source, Target(build.arch)))):
        if code or text != build.kernel_hash:
            return build  # stale, or cannot tell
        code = now
    launches = {name: facts for name, (kernel, facts) in today.items() if kernel == source} | dict(build.launches)
    return msgspec.structs.replace(build, kernel_hash=text, code_hash=code, launches=launches)


def _launches(record: AnyRecord, side: Side, build: Build) -> dict[str, tuple[KernelSource, LaunchFacts]]:
    """Return today's launches of a build, by their names in records."""
    config, family, toggles = load_record_family(record, side)
    instrumented = isinstance(record, PhaseRecord)
    dims: dict[str, Mapping[str, int]] = {
        name.partition(" launch ")[0]: then.dims for name, then in build.launches.items()
    }
    of_task = _dims(record)
    dims |= {shape: of_task[shape] for shape in build.shapes or _shapes(record) if shape not in dims}
    today: dict[str, tuple[KernelSource, LaunchFacts]] = {}
    for shape, of_shape in dims.items():
        if is_dropped(config, of_shape):
            continue
        program = render_program(family, toggles, record.format, of_shape, instrumented=instrumented)
        today |= list_launches(program, shape, of_shape)
    return today


def recorded_kernels(record: AnyRecord) -> Iterator[tuple[KernelSource, str]]:
    """Yield today's kernels of a record, with the names of its targets; a kernel may come several times."""
    if isinstance(record, Benchmark) and record.side is None:
        comparison = find_comparison(record)
        yield from ((source, comparison.arch) for source, _ in (comparison.kernels or dict)().values())
        return
    for name in ("baseline", "candidate") if isinstance(record, Record) else ("side",):
        side: Side = getattr(record, name)
        for build in side.builds:
            yield from ((source, build.arch) for source, _ in _launches(record, side, build).values())


def _shapes(record: AnyRecord) -> list[str]:
    """The shapes of an older record, which has one kernel for all of them."""
    if isinstance(record, PhaseRecord):
        return list(record.phase_cycles or record.phase_counts)
    (_, side) = record.sides()[-1]
    return list(dict.fromkeys(row.shape for row in side.correctness))


def _dims(record: AnyRecord) -> Mapping[str, Mapping[str, int]]:
    """The dimensions of every shape of the record's task."""
    found = {shape.name: shape.dims for shape in find_task(record.task).config.shapes}
    if isinstance(record, Benchmark):
        comparison = peers()
        found |= {cell.shape.name: cell.shape.dims for cell in (*comparison.timed, *comparison.accuracy)}
    return found


def _compared(record: Benchmark) -> Benchmark:
    """The same for the operator's record and serving's: different text with the same machine code."""
    today = timed_kernels(find_comparison(record))
    kernels = {
        name: msgspec.structs.replace(then, kernel_hash=today[name].kernel_hash)
        if name in today and (today[name].code_hash, today[name].compiler) == (then.code_hash, then.compiler)
        else then
        for name, then in record.kernels.items()
    }
    return msgspec.structs.replace(record, kernels=kernels)


def renew_emulated(rows: Sequence[dict[str, Any]]) -> Freshness:
    """Give rows of the comparison of the emulator with a GPU the hashes of today's text; return their freshness.

    A row keeps its hash unless today's kernel has the same machine code.
    """
    task = find_task("fp8_sdpa")
    family, answers = load_family(task), [Freshness()]
    for row in rows:
        toggles = task.config.variant(row["variant"]).values
        source = family.kernel(toggles, row["format"], task.config.shape(row["shape"]).dims)
        if kernel_hash(source) == row["kernel_hash"]:
            continue
        kernel = compile_kernel(source, Target("sm_90a"))
        if kernel.compiler != row["compiler"]:
            reason = f"it was compiled by {row['compiler']}, and this is {kernel.compiler}"
            answers.append(Freshness(CANNOT_TELL, (reason,), True))
        elif code_hash(kernel) != row["code_hash"]:
            answers.append(Freshness(STALE, (f"the machine code of {row['variant']} differs",)))
        else:
            row["kernel_hash"] = kernel.kernel_hash
    return worst(answers)


def main() -> int:
    """Check every record; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a record is not current")
    args = parser.parse_args()
    answers: list[Freshness] = []
    try:
        compared = [ROOT / path for path in COMPARED if (ROOT / path).is_file()]
        records = {path: read_record(path) for path in [*sorted((ROOT / "evidence").glob(f"*/*/{RECORD}")), *compared]}
        compile_ahead(records.values(), changed_only=args.check)
        for path, record in records.items():
            if not args.check:
                write_identities(path, record, record := refreshed(record))
            answers.append(_tell(path.parent if path.name == RECORD else path, freshness(record)))
        content = read_content(ROOT / EMULATED)
        answers.append(_tell(ROOT / EMULATED, renew_emulated(content["rows"])))
        if not args.check:
            _write_entry(ROOT / EMULATED, content)
    except GreenfastError as e:
        print(f"refresh_hashes: {e}", file=sys.stderr)
        return e.exit_code
    return int(any(answer.status != CURRENT for answer in answers))


def compile_ahead(records: Iterable[AnyRecord], changed_only: bool) -> None:
    """Compile the kernels of records into the build cache, in threads.

    changed_only: leave out kernels with the recorded text. A check that they are current needs no compiler.
    """
    kernels: dict[str, dict[str, KernelSource]] = {}
    for record in records:
        recorded = _recorded_hashes(record) if changed_only else set()
        for source, arch in recorded_kernels(record):
            if (text := kernel_hash(source)) not in recorded:
                kernels.setdefault(arch, {})[text] = source
    for arch, sources in kernels.items():
        warm(sources.values(), Target(arch))


def _recorded_hashes(record: AnyRecord) -> set[str]:
    if isinstance(record, Benchmark) and record.side is None:
        return {kernel.kernel_hash for kernel in record.kernels.values()}
    return {build.kernel_hash for side in ("baseline", "candidate", "side") for build in _builds(record, side)}


def write_identities(path: Path, before: AnyRecord, after: AnyRecord) -> None:
    """Change in the index entry of a kept record the hashes and launches that differ, and the whole record's digest.

    Raises UsageError for a record that is not in an index.
    """
    if after == before:
        return
    stored = read_json(path, dict[str, Any], "record")
    if FIELD not in stored:
        raise UsageError(f"{path}: not a kept record; run python -m scripts.update_results")
    content = read_content(path)
    if isinstance(after, Benchmark) and after.side is None:
        for name, kernel in after.kernels.items():
            content["kernels"][name]["kernel_hash"] = kernel.kernel_hash
    for side in ("baseline", "candidate", "side"):
        builds = (content.get(side) or {}).get("builds", [])
        for held, then, now in zip(builds, _builds(before, side), _builds(after, side), strict=True):
            held |= {"kernel_hash": now.kernel_hash, "code_hash": now.code_hash}
            new = {shape: facts for shape, facts in now.launches.items() if shape not in then.launches}
            if new:
                held["launches"] = held.get("launches", {}) | msgspec.to_builtins(new)
    _write_entry(path, content)


def _write_entry(path: Path, content: dict[str, Any]) -> None:
    """Write the index entry of a kept record. content: the whole record."""
    index, name = find_index(read_json(path, dict[str, Any], "record"), path)
    _, entry = split(content, name)
    assert entry is not None
    write_whole(index, render_index({**read_index(index), name: entry}))


def _builds(record: AnyRecord, side: str) -> list[Build]:
    found: Side | None = getattr(record, side, None)
    return [] if found is None else found.builds


def _tell(path: Path, answer: Freshness) -> Freshness:
    print(f"{path.relative_to(ROOT)}: {answer}", flush=True)
    return answer


if __name__ == "__main__":
    sys.exit(main())
