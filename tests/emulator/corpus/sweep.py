"""Run the corpus and print what came of it: ``python -m tests.emulator.corpus.sweep [PATTERN ...]``."""

from __future__ import annotations

import re
import sys
from collections import Counter

from tests.emulator.corpus import everything
from tests.emulator.corpus.runner import GOOD, classify


def main(patterns: list[str]) -> int:
    """Run the entries whose kind and name match any of the patterns; print those that are not good, and counts."""
    counts: Counter[tuple[str, str]] = Counter()
    for entry in everything.ENTRIES:
        if patterns and not any(re.search(p, f"{entry.kind}:{entry.name}") for p in patterns):
            continue
        try:
            outcome = classify(entry)
        except Exception as e:
            print(f"{entry.kind:6} {entry.name}: NOT RUN: {type(e).__name__}: {e}", flush=True)
            counts[entry.kind, "not run"] += 1
            continue
        counts[entry.kind, outcome.status] += 1
        if outcome.status not in GOOD or patterns:
            print(f"{entry.kind:6} {outcome}", flush=True)
    for (kind, status), count in sorted(counts.items()):
        print(f"{kind:6} {status:8} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
