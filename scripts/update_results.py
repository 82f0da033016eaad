"""Writes all that is generated from records: README.md's table and picture, docs/, rules of routing and tiles.

python -m scripts.update_results [--check]    (--check changes nothing; exit 1 where something differs)

Records are at evidence/DEVICE/NAME/record.json, as `greenfast judge` or `python -m benchmarks` wrote them. They and
every other JSON file there get the form of kept records (``scripts.kept_records``): rows as tables, and the identities
of kernels in evidence/index.json.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import block, parallel_page, quality, varlen
from benchmarks.emulator_against_gpu import counts_table
from benchmarks.freshness import current_part, freshness
from benchmarks.pictures import DESCRIPTION, digest_numbers, draw_speed, format_gains
from benchmarks.records import AnyRecord, Benchmark, read_benchmark, read_record
from benchmarks.report import batching_table, models_table, section
from benchmarks.routing import rules, rules_table
from benchmarks.tiling_rules import derive_tiling_rules
from greenfast.cli.main import find_moved_command
from greenfast.judge.gates.registry import GATES
from greenfast.judge.record_io import FIELD, INDEX, RECORD, read_index, with_identities
from greenfast.judge.record_schema import Record
from greenfast.judge.report import formatting
from greenfast.judge.report.ladder import ladder_table
from greenfast.judge.store import read_json, to_json, write_whole
from greenfast.judge.task import find_task
from greenfast.ops.routing_rules import FA3, TORCH
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.freshness import CURRENT, STALE, Freshness, worst
from scripts.kept_records import render_index, render_record, split

ROOT = Path(__file__).parents[1]
MAIN_TASK = "fp8_sdpa"
README, PICTURE, RESULTS_PAGE = "README.md", "docs/images/speed.svg", "docs/results.md"
REFERENCE = "docs/reference.md"
EMULATOR_PAGE, EMULATOR_RECORD = "docs/emulator-details.md", "evidence/emulator-h200.json"
#: Pages with the tables of a comparison: page, name of the block, record.
COMPARED = (
    ("docs/operator-times.md", "operator", "evidence/operator-h200.json"),
    ("docs/serving-times.md", "serving", "evidence/serving-h200.json"),
)
OPERATOR_RECORD = COMPARED[0][2]
ROUTING_RULES, ROUTING_RECORDS = "src/greenfast/ops/routing_rules.json", ("evidence/routing-h200.json", OPERATOR_RECORD)
ROUTING_PAGE = "docs/operator-times.md"
TILING_RULES, TILING_RECORDS = "src/greenfast/kernels/attention/tilings.json", "evidence/hopper-tilings-h200"
MODELS_PAGE, MODELS_RECORDS = "docs/operator-times.md", "evidence/models*-h200.json"
QUALITY_PAGE, QUALITY_RECORD, QUALITY_PICTURE = "docs/models.md", "evidence/quality.json", "docs/images/quality.svg"
BLOCK_PAGE, BLOCK_RECORD, BLOCK_PICTURE = "docs/models.md", "evidence/block*-h200.json", "docs/images/block.svg"
BLOCK_MODELS_RECORD = "evidence/block-models-h100.json"
PARALLEL_PAGE, PARALLEL_PICTURE = "docs/parallel-times.md", "docs/images/parallel.svg"
BATCHING_PAGE, BATCHING_RECORDS = "docs/serving-times.md", "evidence/continuous-batching*-h100.json"

Evidence = Sequence[tuple[str, AnyRecord]]


def console_form(record: Record) -> str:
    """Return the command of a run and its console output, without colours and without the last line (the folder)."""
    lines = [f"$ {record.command}"]
    for gate in record.gates:
        lines.append(f"{gate.gate:12}{gate.status:8}{gate.summary}")
        lines += [f"{'':12}- {reason}" for reason in gate.reasons]
    lines += ["", f"{record.decision}  {record.candidate.variant} against {record.baseline.variant}, {record.format}"]
    return "\n".join([*lines, *(f"  - {reason}" for reason in record.reasons)])


def evidence(root: Path) -> list[tuple[str, AnyRecord]]:
    """(folder relative to ``root``, record) of every record: by task, format and device, then in the order of rungs."""
    files = sorted((root / "evidence").glob(f"*/*/{RECORD}"))
    found = [(file.parent.relative_to(root).as_posix(), read_record(file)) for file in files]
    return sorted(found, key=lambda pair: _order(*pair))


def _order(folder: str, record: AnyRecord) -> tuple[object, ...]:
    variant = record.sides()[-1][1].variant if record.sides() else ""
    against = record.baseline.variant if isinstance(record, Record) else None
    task = (record.task != MAIN_TASK, record.task)
    device = folder.split("/")[1]
    try:
        config = find_task(record.task).config
    except UsageError:  # the task no longer exists: its records are stale and come last
        return (*task, 1, 0, record.format, device, 1, 0, True, folder)
    formats, rungs = list(config.formats), [rung.name for rung in config.rungs]
    fmt = formats.index(record.format) if record.format in formats else len(formats)
    rung = rungs.index(variant) if variant in rungs else len(rungs)
    before = config.rungs[rung].after if rung < len(rungs) else None
    return (*task, 0, fmt, record.format, device, 0, rung, against != before, folder)


def blocks(records: Evidence) -> dict[str, str]:
    """Name of a marked block in docs/results.md -> its content; empty if there is no record for it."""
    records = [(f"../{folder}", record) for folder, record in records]  # links from docs/
    comparisons = [(folder, record) for folder, record in records if isinstance(record, Record)]
    aged = {folder: answer for folder, record in comparisons if (answer := shown(freshness(record))).status != CURRENT}
    example = next((r for folder, r in comparisons if folder not in aged and _is_default(r)), None)
    peers = _peers(records)
    return {
        "verdicts": ladder_table(comparisons, aged=aged),
        "peers": f"## Compared with other libraries\n\n{_section(*peers)}" if peers else "",
        "example": f"```text\n{console_form(_with_current_command(example))}\n```" if example else "",
    }


def shown(answer: Freshness) -> Freshness:
    """The freshness that a page shows: current also if only another compiler makes it impossible to tell."""
    return Freshness() if answer.other_compiler else answer


def _peers(records: Evidence) -> tuple[str, Benchmark] | None:
    """The first comparison of a kernel with other libraries."""
    return next(((folder, r) for folder, r in records if isinstance(r, Benchmark) and r.comparison == "peers"), None)


def _section(path: str, record: Benchmark) -> str:
    answer = shown(freshness(record))
    if answer.status != STALE or record.comparison != "serving":
        return section(record, path, answer)
    current, left_out = current_part(record)
    gone = f"Left out, as kernels have changed since: {', '.join(left_out)}; and what the host takes."
    return f"{section(current, path)}\n\n{gone}"


def _with_current_command(record: Record) -> Record:
    """Return the record with the command that repeats it today."""
    moved = find_moved_command(shlex.split(record.command)[1:])
    return msgspec.structs.replace(record, command=moved[1]) if moved else record


def _is_default(record: Record) -> bool:
    """Whether this is a run of ``greenfast judge fp8_sdpa`` without options."""
    if record.task != MAIN_TASK:
        return False
    defaults = find_task(MAIN_TASK).config.defaults
    sides = (record.baseline.variant, record.candidate.variant, record.format)
    return sides == (defaults.baseline, defaults.candidate, defaults.format)


def fill(text: str, name: str, content: str, page: str) -> str:
    """The page's text with the block ``name`` replaced. Raises UsageError unless its markers occur exactly once."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UsageError(f"{page}: {begin} and then {end} must each occur once")
    head, rest = text.split(begin)
    body = f"\n\n{content}\n\n" if content else "\n"
    return f"{head}{begin}{body}{end}{rest.split(end)[1]}"


def generated(root: Path) -> dict[Path, str]:
    """Path -> content of every file that is generated from kept records."""
    records = evidence(root)
    text = (root / RESULTS_PAGE).read_text(encoding="utf-8")
    for name, content in blocks(records).items():
        text = fill(text, name, content, RESULTS_PAGE)
    return {
        root / RESULTS_PAGE: text,
        **_readme(root, records),
        **_exit_codes(root),
        **_emulator_page(root),
        **_benchmark_pages(root, _routing(root, _compared_pages(root))),
        **_tilings(root),
        **_parallel_page(root),
    }


def _exit_codes(root: Path) -> dict[Path, str]:
    """docs/reference.md with the exit codes of the gates."""
    page = root / REFERENCE
    if not page.is_file():
        return {}
    rows = [(str(gate.exit_code), gate.name) for gate in sorted(GATES.values(), key=lambda gate: gate.exit_code)]
    table = formatting.table(("exit code", "gate"), rows)
    return {page: fill(page.read_text(encoding="utf-8"), "gates", table, REFERENCE)}


def kept_files(root: Path) -> dict[Path, str]:
    """Path -> content of every JSON file of the evidence, with the index; a new record's identities go to the index."""
    folder, files, entries = root / "evidence", {}, {}
    for file in sorted(folder.rglob("*.json")):
        if file == folder / INDEX:
            continue
        name, content = file.relative_to(folder).as_posix(), read_json(file, dict[str, Any], "record")
        if FIELD in content:
            with_identities(content, file)  # raises if it has no entry, or another
            entries[name] = read_index(folder / INDEX)[name]
        else:
            content, entry = split(content, name)
            if entry is not None:
                entries[name] = entry
        files[file] = render_record(content)
    return {**files, folder / INDEX: render_index(entries)} if files else {}


def _readme(root: Path, records: Evidence) -> dict[Path, str]:
    """README.md with its table and picture, if there are records for both.

    The picture is compared by the numbers that it shows: its bytes differ between versions of matplotlib.
    """
    operator = root / OPERATOR_RECORD
    found = _peers(records)
    if found is None or not operator.is_file():
        return {}
    (_, peers), measured = found, read_benchmark(operator)
    page, picture = root / README, root / PICTURE
    drawn = picture.read_text(encoding="utf-8") if picture.is_file() else ""
    if f"{DESCRIPTION}{digest_numbers(measured, peers)}" not in drawn:
        drawn = draw_speed(measured, peers)
    table, aged = format_gains(measured), worst([shown(freshness(measured)), shown(freshness(peers))])
    if aged.status != CURRENT:
        table += "\n\nKernels have changed since these numbers, or the ones in the picture, were measured."
    return {page: fill(page.read_text(encoding="utf-8"), "speed", table, README), picture: drawn}


def _emulator_page(root: Path) -> dict[Path, str]:
    """docs/emulator.md with its table, if there is a record for it."""
    page, record = root / EMULATOR_PAGE, root / EMULATOR_RECORD
    if not record.is_file():
        return {}
    counted = read_json(record, dict[str, Any], "comparison of emulator and GPU")
    names = find_task(MAIN_TASK).config.shape_names
    for row in counted["rows"]:
        row["shape"] = names.get(row["shape"], row["shape"])
    content = counts_table(counted)
    return {page: fill(page.read_text(encoding="utf-8"), "counts", content, EMULATOR_PAGE)}


def _compared_pages(root: Path) -> dict[Path, str]:
    """The pages with tables of a comparison, those for which there is a record."""
    found = {}
    for page, part, record in COMPARED:
        if (root / record).is_file():
            content = _section(f"../{record}", read_benchmark(root / record))
            found[root / page] = fill((root / page).read_text(encoding="utf-8"), part, content, page)
    return found


def _routing(root: Path, pages: dict[Path, str]) -> dict[Path, str]:
    """These pages, the rules of ``greenfast.use`` from the records of times, and the page with their tables."""
    if not (root / ROUTING_RECORDS[0]).is_file():
        return pages
    found = rules([(path, read_benchmark(root / path)) for path in ROUTING_RECORDS if (root / path).is_file()])
    page = root / ROUTING_PAGE
    text = pages.get(page) or page.read_text(encoding="utf-8")
    for part, against in (("routing", TORCH), ("routing-fa3", FA3)):
        text = fill(text, part, rules_table(found, against), ROUTING_PAGE)
    return {**pages, page: text, root / ROUTING_RULES: to_json({"rules": found})}


def _tilings(root: Path) -> dict[Path, str]:
    """The rules of ``kernels.attention.tiling`` from the times of tilings."""
    records = root / TILING_RECORDS
    return {root / TILING_RULES: to_json(derive_tiling_rules(records, root))} if records.is_dir() else {}


def _parallel_page(root: Path) -> dict[Path, str]:
    """The page of several GPUs with its tables and picture, if there are records for them."""
    rows = parallel_page.read_rows(root)
    if not rows:
        return {}
    page = root / PARALLEL_PAGE
    text = page.read_text(encoding="utf-8")
    for name, content in (
        ("measured", parallel_page.measured_table(rows)),
        ("aims", parallel_page.aims_table(rows)),
        ("model", parallel_page.model_table()),
    ):
        text = fill(text, name, content, PARALLEL_PAGE)
    return {page: text, root / PARALLEL_PICTURE: parallel_page.picture(rows)}


def _benchmark_pages(root: Path, pages: dict[Path, str]) -> dict[Path, str]:
    """These pages, and those with tables of benchmarks/ for which there are records."""
    found = dict(pages)
    pictures: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
        QUALITY_RECORD: (QUALITY_PICTURE, lambda records: quality.picture(records[0])),
        BLOCK_RECORD: (BLOCK_PICTURE, block.picture),
    }
    for name, part, pattern, table in (
        (MODELS_PAGE, "models", MODELS_RECORDS, models_table),
        (BATCHING_PAGE, "batching", BATCHING_RECORDS, batching_table),
        (QUALITY_PAGE, "quality", QUALITY_RECORD, quality.render_page),
        (BLOCK_PAGE, "block", BLOCK_RECORD, block.render_page),
        (MODELS_PAGE, "block-h100", "evidence/block-h100.json", block.render_page),
        (BLOCK_PAGE, "block-models", BLOCK_MODELS_RECORD, models_table),
        ("docs/masks.md", "fixed-tiles", "evidence/fixed-tiles-h100.json", varlen.render_fixed_tiles),
    ):
        records = [read_json(file, dict[str, Any], "record") for file in sorted(root.glob(pattern))]
        if records:
            page = root / name
            found[page] = fill(found.get(page) or page.read_text(encoding="utf-8"), part, table(records), name)
            if pattern in pictures:
                picture, draw = pictures[pattern]
                found[root / picture] = draw(records)
    return found


def main() -> int:
    """Write, or with --check compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something differs")
    args = parser.parse_args()
    try:
        different = []
        for made in (kept_files, generated):  # rules name their records by the SHA-256 of the kept files
            files = made(ROOT)
            different += [p for p, text in files.items() if not p.is_file() or p.read_text(encoding="utf-8") != text]
            for path in files.keys() & set(different):
                if not args.check:
                    write_whole(path, files[path])
        for path in different:
            print(f"{path.relative_to(ROOT)}: {'differs from its records' if args.check else 'written'}")
    except GreenfastError as e:
        print(f"update_results: {e}", file=sys.stderr)
        return e.exit_code
    return int(args.check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
