"""The ladder's table: a row per record with its numbers, and none from a stale one."""

from __future__ import annotations

from greenfast.report.ladder import ladder_table
from greenfast.spec.record import Record, Side
from tests.report.records import gates, pending_record, record, side, speedup_row, timing_row


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]


def row(one: Record, **options: object) -> list[str]:
    return rows(ladder_table([("a.json", one)], **options))[2]  # type: ignore[arg-type]


def test_a_row_holds_the_records_numbers() -> None:
    assert row(record()) == [
        "stage2",
        "int8",
        "1201.8 -> 657.4 (warm)",
        "1.829x [1.810, 1.851]",
        "1.15x",
        "84 / 37.1 KB",
        "6/6 PASS",
        "FAST",
        "MERGE",
        "[0123456789 (dirty), NVIDIA H100](a.json)",
    ]


def test_rows_stand_in_the_order_given() -> None:
    records = [("z.json", record(format="e4m3")), ("a.json", record())]
    found = rows(ladder_table(records))
    assert [r[1] for r in found[2:]] == ["e4m3", "int8"]
    assert len(found[0]) == len(found[2]) == 10


def test_a_stale_record_shows_no_number() -> None:
    found = rows(ladder_table([("a.json", record()), ("b.json", record())], stale={"a.json"}))
    assert found[2] == ["stage2", "int8", *["-"] * 5, "stale", "stale", "[0123456789 (dirty), NVIDIA H100](a.json)"]
    assert found[3][7] == "FAST"


def test_a_pending_record() -> None:
    found = row(pending_record())
    assert found[2:] == [*["PENDING"] * 3, "84 / 37.1 KB", *["PENDING"] * 3, "[0123456789 (dirty), no device](a.json)"]
    assert row(pending_record(candidate=Side(variant="stage2", toggles={})))[5] == "PENDING"


def test_unequal_correctness_names_both_counts() -> None:
    short = side("stage2", p50_us=1, registers=84, smem=9, scale=1, hmma=1, timing=[])
    short = Side(variant="stage2", toggles={}, builds=short.builds, correctness=short.correctness[:5])
    assert row(record(candidate=short, gates=gates("FAIL"), speedups=[], baseline=_untimed()))[6] == (
        "5/5 (baseline 6/6) FAIL"
    )


def _untimed() -> Side:
    return side("stage1", p50_us=1, registers=88, smem=9, scale=1, hmma=1, timing=[])


def test_the_shape_asked_for_with_its_own_cache_state() -> None:
    def timed(name: str, warm: float, cold: float) -> Side:
        timing = [
            timing_row("mission", 0, 1.0),
            timing_row("long", 0, warm),
            timing_row("long", 0, cold, cache="cold"),
        ]
        return side(name, p50_us=1, registers=84, smem=9, scale=1, hmma=1, timing=timing)

    speedups = [
        speedup_row("mission"),
        speedup_row("long", speedup=1.5, gated=False),
        speedup_row("long", speedup=1.25, cache="cold", verdict="SHORT"),
    ]
    one = record(baseline=timed("stage1", 300, 1000), candidate=timed("stage2", 200, 800), speedups=speedups)
    found = row(one, shape="long")
    assert found[2] == "1000.0 -> 800.0 (cold)"
    assert found[3].startswith("1.250x")
    assert found[7] == "SHORT"
    assert row(one, shape="small")[2] == "PENDING"
