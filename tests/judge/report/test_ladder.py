"""The ladder's tables: a row per record with its numbers, none from a stale one, and where they were measured above."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from greenfast.judge.record_schema import GitState, Record, Side
from greenfast.judge.report.ladder import ladder_table
from greenfast.spec.freshness import Freshness
from scripts.update_results import console_form
from tests.judge.report.records import gates, pending_record, quoting_record, record, side, speedup_row, timing_row

CAPTION = (
    "**fp8_sdpa, int8**, sm_90a on NVIDIA H100 (driver 580.95, CUDA 13.0); 2030-01-02; commit 0123456789 (dirty). "
    "Times and speedups are for shape mission (B=1 H=8 S=512 D=64)."
)


def tables(text: str) -> list[tuple[str, list[list[str]]]]:
    """(caption, rows without header and rule) of each table."""
    parts = text.split("\n\n")
    found = []
    for caption, table in zip(parts[::2], parts[1::2], strict=True):
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
        assert all(len(row) == len(cells[0]) for row in cells)
        found.append((caption, cells[2:]))
    return found


def row(one: Record, **options: object) -> list[str]:
    ((_, rows),) = tables(ladder_table([("runs/a", one)], **options))  # type: ignore[arg-type]
    return rows[0]


def test_a_row_holds_the_records_numbers() -> None:
    assert row(record()) == [
        "stage2",
        "stage1",
        "1201.8 -> 657.4 (warm)",
        "1.829x [1.810, 1.851]",
        "1.15x",
        "84 / 37.1 KB",
        "6/6 PASS",
        "FAST",
        "MERGE",
        "[a](runs/a)",
    ]


def test_device_day_commit_and_shape_stand_above_the_table() -> None:
    ((caption, _),) = tables(ladder_table([("a", record())]))
    assert caption == CAPTION


def test_days_and_commits_of_several_records() -> None:
    clean = GitState(sha="fedcba9876543210", branch="main", dirty=False)
    later = record(created="2030-02-03T00:00:00Z", git=clean)
    ((caption, _),) = tables(ladder_table([("b", later), ("a", record()), ("c", later)]))
    assert "; 2030-01-02 to 2030-02-03; commits fedcba9876, 0123456789 (dirty). " in caption


def test_rows_stand_in_the_order_given_and_formats_and_devices_apart() -> None:
    h100 = record().device
    assert h100 is not None
    other = record(device=replace(h100, name="NVIDIA L4"), arch="sm_89")
    e4m3 = record(format="e4m3")
    found = tables(ladder_table([("z", e4m3), ("b", record()), ("l4", other), ("a", record())]))
    assert [[cells[-1] for cells in rows] for _, rows in found] == [["[z](z)"], ["[b](b)", "[a](a)"], ["[l4](l4)"]]
    assert [caption.split(" (driver")[0] for caption, _ in found] == [
        "**fp8_sdpa, e4m3**, sm_90a on NVIDIA H100",
        "**fp8_sdpa, int8**, sm_90a on NVIDIA H100",
        "**fp8_sdpa, int8**, sm_89 on NVIDIA L4",
    ]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("evidence/h100/stage2-e4m3", "stage2-e4m3"),
        ("results/20300102-030405/record.json", "20300102-030405"),
        ("a.json", "a.json"),
    ],
)
def test_the_link_bears_the_name_of_the_run(path: str, name: str) -> None:
    assert ladder_table([(path, record())]).endswith(f"| [{name}]({path}) |")


def test_no_records_make_no_table() -> None:
    assert ladder_table([]) == ""


def test_a_stale_record_shows_no_number() -> None:
    aged = {"x/a": Freshness("stale", ("the grid differs",))}
    table, notes = ladder_table([("x/a", record()), ("b", record())], aged=aged).rsplit("\n\n", 1)
    assert notes == "- a is stale: the grid differs"
    ((_, rows),) = tables(table)
    assert rows[0] == ["stage2", "stage1", *["-"] * 5, "stale", "stale", "[a](x/a)"]
    assert rows[1][7] == "FAST"


def test_a_record_of_another_compiler_is_shown_with_a_note() -> None:
    answer = Freshness("cannot tell", ("this is NVRTC 2",), True)
    plain = ladder_table([("x/a", record())])
    assert ladder_table([("x/a", record())], aged={"x/a": answer}) == (
        f"{plain}\n\n- cannot tell whether the kernels of a are today's: this is NVRTC 2"
    )


def test_a_pending_record() -> None:
    found = row(pending_record())
    assert found[2:9] == [*["PENDING"] * 3, "84 / 37.1 KB", *["PENDING"] * 3]
    assert row(pending_record(candidate=Side(variant="stage2", toggles={})))[5] == "PENDING"
    caption = ladder_table([("a", pending_record())]).splitlines()[0]
    assert "sm_90a on no device; 2030-01-02;" in caption
    assert caption.endswith("commit 0123456789 (dirty).")


def test_the_shape_shown_is_the_one_at_which_most_records_were_gated() -> None:
    only_long = record(speedups=[speedup_row("mission", gated=False), speedup_row("long")])
    captions = [
        ladder_table(pairs).splitlines()[0]
        for pairs in ([("a", only_long)], [("a", only_long), ("b", record()), ("c", record())])
    ]
    assert ["shape long" in caption for caption in captions] == [True, False]


def test_a_quoted_speedup_is_told_from_a_measured_one() -> None:
    ((caption, (cells,)),) = tables(ladder_table([("a", quoting_record())]))
    assert "sm_90a on PTX emulator (emulated); 2031-01-01; " in caption
    assert cells[2:5] == ["- -> - (warm)", "1.829x [1.810, 1.851]", "1.15x"]
    assert cells[7:9] == ["FAST, quoted from NVIDIA H100, 2030-01-02, commit 0123456789 (dirty)", "MERGE"]


def test_the_console_form_is_the_command_the_gates_and_the_decision() -> None:
    failed = gates(performance="FAIL")[1:3]
    failed[1] = msgspec.structs.replace(failed[1], reasons=["mission: 1.01x", "long: 1.02x"])
    assert console_form(
        record(gates=failed, decision="DEFER", reasons=["PERFORMANCE: mission: 1.01x"])
    ).splitlines() == [
        "$ greenfast judge fp8_sdpa --candidate stage2",
        "CORRECTNESS PASS    6 of 6 rows hold",
        "PERFORMANCE FAIL    mission is fast enough",
        "            - mission: 1.01x",
        "            - long: 1.02x",
        "",
        "DEFER  stage2 against stage1, int8",
        "  - PERFORMANCE: mission: 1.01x",
    ]


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
        timing = [timing_row("mission", 0, 1.0), timing_row("long", 0, warm), timing_row("long", 0, cold, cache="cold")]
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


def test_rungs_for_other_shapes_have_a_table_of_their_own() -> None:
    other = record(speedups=[speedup_row(shape="decode")])
    found = tables(ladder_table([("a", record()), ("other", other), ("b", record())]))
    assert [[cells[-1] for cells in rows] for _, rows in found] == [["[a](a)", "[b](b)"], ["[other](other)"]]
    assert "shape decode" in found[1][0]
