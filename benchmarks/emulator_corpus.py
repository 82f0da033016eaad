"""Run the corpus of kernels on the emulator: ``python -m benchmarks emulator_corpus [PATTERN ...]``.

Prints every entry that fails (for a kernel with a bug: an undetected bug), then the counts. A PATTERN is a regular
expression searched in an entry's ``kind:name``. ``--page FILE`` updates the table between the markers of a page; it
needs all entries, so no PATTERN, and the package ``triton``.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from benchmarks.options import make_parser
from tests.emulator.corpus.entry import Entry
from tests.emulator.corpus.everything import ENTRIES
from tests.emulator.corpus.runner import GOOD, Outcome, classify

KINDS = {"cuda": "CUDA C++, compiled by NVRTC", "ptx": "PTX by hand", "triton": "Triton", "bug": "kernels with a bug"}
_COLUMNS = ("right", "found", "refused", "wrong", "accused", "missed", "crashed", "slow")
_BEGIN, _END = "<!-- corpus:begin -->", "<!-- corpus:end -->"


def select_entries(patterns: Sequence[str]) -> Iterator[Entry]:
    """Yield the entries that match a pattern; those of Triton only if it is installed."""

    def fits(kind: str, name: str) -> bool:
        return not patterns or any(re.search(p, f"{kind}:{name}") for p in patterns)

    yield from (e for e in ENTRIES if fits(e.kind, e.name))
    if importlib.util.find_spec("triton") is None:
        return
    compiler = importlib.import_module("tests.emulator.corpus.triton_entry")
    for file in ("triton_kernels", "triton_products"):
        importlib.import_module(f"tests.emulator.corpus.{file}")
    for name, kernel in compiler.KERNELS.items():
        if fits("triton", name):
            yield compiler.compiled(kernel)


def format_table(outcomes: Sequence[Outcome], version: str) -> str:
    """Format the counts by kind, and the refused entries, as Markdown."""
    lines = [f"{date.today()}, commit {version}:", "", f"| entries | number | {' | '.join(_COLUMNS)} |"]
    lines.append("|" + " --- |" + " ---: |" * (len(_COLUMNS) + 1))
    for kind, words in KINDS.items():
        mine = [o.status for o in outcomes if o.entry.kind == kind]
        lines.append(f"| {words} | {len(mine)} | {' | '.join(str(mine.count(c)) for c in _COLUMNS)} |")
    refused = sorted((o.entry.name, o.entry.refused) for o in outcomes if o.status == "refused")
    if refused:
        lines += ["", "Refused by name: " + "; ".join(f"`{what}` ({name})" for name, what in refused) + "."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected entries; return 1 if one fails."""
    parser = make_parser("emulator_corpus", __doc__)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--page", type=Path, metavar="FILE")
    asked = parser.parse_args(argv)
    if asked.page and (asked.patterns or importlib.util.find_spec("triton") is None):
        parser.error("--page needs all entries: give no PATTERN, and install triton")
    outcomes = []
    for entry in select_entries(asked.patterns):
        outcome = classify(entry)
        outcomes.append(outcome)
        if outcome.status not in GOOD or asked.patterns:
            print(f"{entry.kind:6} {outcome}", flush=True)
    version = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    counts = format_table(outcomes, version)
    print(counts)
    if asked.page:
        text = asked.page.read_text(encoding="utf-8")
        before, after = text.split(_BEGIN)[0], text.split(_END)[1]
        asked.page.write_text(f"{before}{_BEGIN}\n\n{counts}\n\n{_END}{after}", encoding="utf-8")
    return int(any(o.status not in (*GOOD, "refused") for o in outcomes))
