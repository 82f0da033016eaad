"""Take the corpus of cheats and honest kernels through the gates, and write docs/cheats.md.

python -m scripts.corpus            on the emulator: evidence/cheats-emulator.json
python -m scripts.corpus --gpu      on the GPU: evidence/cheats-gpu.json
python -m scripts.corpus --page     the page from these files alone

``--only A,B`` judges these again and keeps the other rows; a row that was judged again says when, and of which commit.

Ends with 1 where a cheat was accepted that this device can tell, or an honest kernel was not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from scipy.special import betaincinv  # scipy.stats takes a second more to import

from greenfast import __version__
from greenfast.judge.report.formatting import without_folders
from greenfast.judge.request import git_state
from greenfast.judge.store import read_json, write_whole
from scripts.kept_records import render_record
from tests.cheats.corpus import Entry, entries
from tests.cheats.judging import SEED, request_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cheats.md"
RESULTS = {"emulator": ROOT / "evidence" / "cheats-emulator.json", "gpu": ROOT / "evidence" / "cheats-gpu.json"}
BEGIN, END = "<!-- corpus:begin -->", "<!-- corpus:end -->"
CONFIDENCE = 0.95
_MESSAGE = 100
#: More processes than this on one GPU bring nothing.
_MOST = 12

Row: TypeAlias = "dict[str, Any]"


def upper_bound(errors: int, trials: int) -> float:
    """The largest rate with which ``errors`` or fewer in ``trials`` are not rarer than 5 % (Clopper and Pearson)."""
    return 1.0 if errors >= trials else float(betaincinv(errors + 1, trials - errors, CONFIDENCE))


def judge(number: int, gpu: bool) -> Row:
    """What the gates say of an entry, as a row of the results."""
    entry = entries()[number]
    start = time.perf_counter()
    found = entry.judge(gpu)
    row = {"kind": entry.kind, "name": entry.name, "outcome": found.outcome, "gate": found.gate}
    return row | {
        "message": _short(found.message.removeprefix(f"{entry.name} ")),
        "seconds": round(time.perf_counter() - start, 2),
    }


def _short(message: str) -> str:
    line = " ".join(without_folders(message).split())
    return line if len(line) <= _MESSAGE else line[: _MESSAGE - 3] + "..."


def run(gpu: bool, jobs: int, only: Collection[str] = ()) -> dict[str, Any]:
    """Judge every entry, or the named ones, a device's slow ones first."""
    device = request_of("doubling", gpu).device
    if gpu and (device is None or device.kind != "gpu"):
        raise SystemExit("--gpu: no GPU here")
    asked = [n for n, entry in enumerate(entries()) if not only or entry.name in only]
    order = sorted(asked, key=lambda n: entries()[n].name not in ("slow", "hang", "hangs"))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(judge, order, [gpu] * len(order)))
    return {
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "package_version": __version__,
        "git": msgspec.to_builtins(git_state()),
        "device": msgspec.to_builtins(device),
        "exam_seed": SEED,
        "rows": [row for _, row in sorted(zip(order, rows, strict=True))],
    }


def with_rows_of(kept: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Kept results with the rows of a later run, of the same device and seed, in place of theirs or in addition."""
    for fact in ("device", "exam_seed"):
        if kept[fact] != again[fact]:
            raise SystemExit(f"--only: the kept results have another {fact}: run the whole corpus")
    when = {"again": {"created": again["created"], "git": again["git"]}}
    rows = {(row["kind"], row["name"]): row for row in kept["rows"]}
    rows |= {(row["kind"], row["name"]): row | when for row in again["rows"]}
    order = [(entry.kind, entry.name) for entry in entries()]
    return kept | {"rows": [rows[key] for key in sorted(rows, key=lambda key: order.index(key))]}


def wrong(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The cheats that were accepted, and the honest kernels that were not."""
    cheats = [row for row in rows if row["kind"] != "honest"]
    return [row for row in cheats if row["outcome"] != "rejected"], [
        row for row in rows if row["kind"] == "honest" and row["outcome"] != "accepted"
    ]


def _totals(name: str, result: dict[str, Any]) -> str:
    accepted, refused = wrong(result["rows"])
    honest = sum(row["kind"] == "honest" for row in result["rows"])
    cheats = len(result["rows"]) - honest
    listed = f": {', '.join(row['name'] for row in accepted)}" if accepted else ""
    later = sorted({row["again"]["created"][:16].replace("T", " ") for row in result["rows"] if "again" in row})
    twice = f"; {sum('again' in row for row in result['rows'])} again at {', '.join(later)}" if later else ""
    also = f": {', '.join(row['name'] for row in refused)}" if refused else ""
    return (
        f"| {name} | {result['created'][:10]}{twice} | {len(accepted)} of {cheats}{listed} "
        f"| {upper_bound(len(accepted), cheats):.1%} | {len(refused)} of {honest}{also} "
        f"| {upper_bound(len(refused), honest):.1%} |"
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    if row["outcome"] == "accepted":
        return "passes"
    said = row["message"].replace("|", "\\|").replace("<", "&lt;")
    return f"{row['gate']}{' is open' if row['outcome'] == 'open' else ''}: `{said}`"


def page(results: dict[str, dict[str, Any]]) -> str:
    """The totals, and a row for each entry."""
    lines = [
        "| judged on | on | cheats accepted | rate at most | honest kernels refused | rate at most |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, result in results.items():
        lines.append(_totals("the emulator" if name == "emulator" else result["device"]["name"], result))
    found = {(name, row["kind"], row["name"]): row for name, result in results.items() for row in result["rows"]}
    for kind in dict.fromkeys(entry.kind for entry in entries()):
        lines += ["", f"### {kind.capitalize()}", "", "| name | what it does | without a GPU | on a GPU |"]
        lines.append("| --- | --- | --- | --- |")
        for e in entries():
            if e.kind == kind:
                cells = (_cell(found.get((device, e.kind, e.name))) for device in RESULTS)
                lines.append(f"| {_link(e)} | {e.about} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _link(entry: Entry) -> str:
    if entry.kind in ("host", "records"):
        return entry.name
    file = "doubling/family.py" if entry.kernel is None else f"kernels/{entry.kind}.py"
    return f"[{entry.name}](../tests/cheats/{file})"


def main() -> int:
    """Run, write, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="judge on the GPU")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page from the kept results")
    parser.add_argument("--jobs", type=int, default=min(_MOST, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--only", default="", metavar="A,B", help="judge these again; the other rows stay")
    args = parser.parse_args()
    device = "gpu" if args.gpu else "emulator"
    if not args.page:
        only = [name for name in args.only.split(",") if name]
        if unknown := set(only) - {entry.name for entry in entries()}:
            parser.error(f"--only: not in the corpus: {', '.join(sorted(unknown))}")
        found = run(args.gpu, args.jobs, only)
        if only:
            found = with_rows_of(read_json(RESULTS[device], dict[str, Any], "corpus"), found)
        write_whole(RESULTS[device], render_record(found))
    results = {name: read_json(path, dict[str, Any], "corpus") for name, path in RESULTS.items() if path.exists()}
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n\n{page(results)}\n\n{after}")
    accepted, refused = wrong(results[device]["rows"])
    beyond = {entry.name for entry in entries() if entry.gpu_only and device == "emulator"}
    for row in [*accepted, *refused]:
        print(f"{row['kind']}/{row['name']}: {row['outcome']} {row['gate']} {row['message']}")
    print(f"{len(results[device]['rows'])} judged, {len(accepted)} accepted, {len(refused)} refused; {PAGE}")
    return int(bool(refused) or any(row["name"] not in beyond for row in accepted))


if __name__ == "__main__":
    sys.exit(main())
