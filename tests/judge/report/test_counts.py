"""The emulator's counts in a report: each in its column, absent where nothing was counted."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec

from greenfast.judge.record_schema import BenchRecord, Record, Side
from greenfast.judge.report.facts import SHOWN, counts_section
from greenfast.judge.report.markdown import report as render
from greenfast.spec.facts import KernelCounts
from tests.judge.report.records import record


def counts(first: int, **changes: Any) -> KernelCounts:
    """Counts that all differ, from ``first`` on."""
    names = [f.name for f in fields(KernelCounts) if f.name not in ("instructions", *LINES)]
    numbers = {name: first + n for n, name in enumerate(names)}
    lines = {"shared_bytes": {"a.cuh:9": 10 * first, "a.cuh:10": 20 * first}, "bank_conflicts": {"a.cuh:10": first}}
    return replace(
        KernelCounts(**numbers, **lines, instructions={"add": first, "mul": 1}),  # type: ignore[arg-type]
        **changes,
    )


LINES = ("shared_bytes", "bank_conflicts")


def counted(baseline: KernelCounts, candidate: KernelCounts, **changes: object) -> Record:
    made = record()
    return msgspec.structs.replace(
        made,
        baseline=msgspec.structs.replace(made.baseline, counts={"mission": baseline}),
        candidate=msgspec.structs.replace(made.candidate, counts={"mission": candidate}),
        **changes,
    )


def row(text: str, *start: str) -> list[str]:
    """The cells of the row that begins with these."""
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {' | '.join(start)} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][len(start) :]


def test_each_side_is_compared_with_the_other_and_the_least() -> None:
    made = counted(counts(1000), counts(3000, exponentials=2360), least_work={"mission": {"exponentials": 2000}})
    text = render(made)
    assert "`emulated`" in text
    assert row(text, "shape", "count") == ["baseline", "candidate", "ratio", "least", "candidate / least"]
    before, after = made.baseline.counts["mission"], made.candidate.counts["mission"]
    for name, title in SHOWN.items():
        cells = row(text, "mission", title)
        assert cells[:2] == [str(getattr(before, name)), str(getattr(after, name))]
        assert cells[3:] == (["2000", "1.18x"] if name == "exponentials" else ["-", "-"])
    assert row(text, "mission", SHOWN["warp_instructions"])[2] == "3.00x"


def test_every_line_of_shared_memory_shows_its_conflicts_or_that_it_has_none() -> None:
    text = render(counted(counts(1000), counts(3000, shared_bytes={"a.cuh:9": 7}, bank_conflicts={})))
    assert row(text, "a.cuh:9") == ["10000", "0", "7", "0"]
    assert row(text, "a.cuh:10") == ["20000", "1000", "-", "-"]
    assert text.index("| a.cuh:9 ") < text.index("| a.cuh:10 ")


def test_what_no_side_uses_has_no_row_and_no_table() -> None:
    unused = {"exponentials": 0, "shared_bytes": {}, "bank_conflicts": {}}
    text = render(counted(counts(1000, **unused), counts(3000, **unused)))
    assert f"| {SHOWN['exponentials']} |" not in text
    assert "Shared memory by source line" not in text
    assert row(text, "mission", SHOWN["warp_instructions"])[2] == "3.00x"


def test_kinds_beyond_the_most_frequent_stand_in_one_row() -> None:
    many = {f"kind{n}": 100 - n for n in range(20)}
    text = counts_section(
        [("candidate", Side(variant="x", toggles={}, counts={"s": counts(1, instructions=many)}))], {}
    )
    assert row(text, "kind0") == ["100"]
    assert row(text, "8 others") == [str(sum(100 - n for n in range(12, 20)))]


def test_without_counts_nothing_is_said_of_them() -> None:
    assert "emulated" not in render(record())


def test_one_variant_alone_has_no_ratio() -> None:
    made = counted(counts(1000), counts(3000))
    shared = {name: getattr(made, name) for name in ("created", "task", "format", "arch", "command", "package_version")}
    bench = BenchRecord(**shared, gates=made.gates, git=made.git, side=made.candidate)
    text = render(bench)
    assert row(text, "shape", "count") == ["stage2", "least", "stage2 / least"]
    assert row(text, "mission", "exponentials") == [str(made.candidate.counts["mission"].exponentials), "-", "-"]


def test_counts_survive_the_record() -> None:
    made = counted(counts(1000), counts(3000), least_work={"mission": {"exponentials": 1}})
    assert msgspec.json.decode(msgspec.json.encode(made), type=Record) == made
