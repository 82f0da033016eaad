"""Records in the order of time: grouped by kernel, with what each run measured, and as a page."""

from __future__ import annotations

import msgspec

from greenfast.judge.report.history import HEADER, _hash_code, histories, history_page
from tests.judge.report.records import pending_record, quoting_record, record, speedup_row
from tests.judge.report.webpage.reading import read


def later(day: int, **changes: object) -> tuple[str, object]:
    return f"run-{day}", record(created=f"2030-01-{day:02}T00:00:00Z", **changes)


def test_the_runs_of_a_kernel_in_the_order_of_time() -> None:
    slow = [speedup_row(speedup=1.5, ci_low=1.4, ci_high=1.6)]
    found = histories([later(9), later(2, speedups=slow), ("other", record(task="fp8_quantize"))])  # type: ignore[list-item]
    assert [one.title for one in found] == [
        "fp8_quantize: stage1 → stage2, int8, sm_90a on NVIDIA H100",
        "fp8_sdpa: stage1 → stage2, int8, sm_90a on NVIDIA H100",
    ]
    rows = [dict(zip(HEADER, row, strict=True)) for row in found[1].rows()]
    assert [(row["record"], row["speedup"], row["interval"]) for row in rows] == [
        ("run-2", "1.500x", "[1.400, 1.600]"),
        ("run-9", "1.829x", "[1.810, 1.851]"),
    ]
    assert rows[0] | {"date": "2030-01-02 00:00", "commit": "0123456789 (dirty)", "decision": "MERGE"} == rows[0]
    assert rows[0]["p50 µs"] == "1201.8 → 657.4"
    assert (rows[0]["required"], rows[0]["verdict"], rows[0]["machine code"]) == ("1.15x", "FAST", "code-sdpa_stage2")


def test_the_shape_that_decided_most_or_the_one_asked_for() -> None:
    gated = [speedup_row(gated=False), speedup_row("long", gated=True)]
    runs = [later(1, speedups=gated), later(2, speedups=gated), later(3)]
    assert histories(runs)[0].shape == "long"  # type: ignore[arg-type]
    (asked,) = histories(runs, "mission")  # type: ignore[arg-type]
    assert (asked.shape, asked.cache) == ("mission", "warm")
    (unknown,) = histories(runs, "small")  # type: ignore[arg-type]
    assert all(point.candidate_us is None for point in unknown.points)


def test_what_was_not_measured_has_no_numbers() -> None:
    (one, two) = histories([("pending", pending_record()), ("quoted", quoting_record())])
    for history in (one, two):
        (row,) = history.rows()
        assert row[HEADER.index("speedup")] == row[HEADER.index("p50 µs")] == "-"


def test_the_page_draws_what_was_timed_twice() -> None:
    first = record()
    builds = [msgspec.structs.replace(build, code_hash="new") for build in first.candidate.builds]
    changed = msgspec.structs.replace(first.candidate, builds=builds)
    runs = histories([later(1), later(2, candidate=changed), ("alone", record(task="x")), ("p", pending_record())])  # type: ignore[list-item]
    html = history_page("Runs below <b>here</b>", runs, ["a <file>: broken"])
    page = read(html)
    assert page.tags.count("svg") == 1
    assert "Runs below <b>here</b>" in page.text
    assert "a <file>: broken" in page.text
    assert "4 runs of 3 kernels." in page.text
    assert "No run was timed." in page.text
    assert "2030-01-02" in html.partition("<svg")[2]


def test_kernels_of_several_launches_have_a_hash_over_all() -> None:
    build = record().candidate.builds[0]
    builds = [msgspec.structs.replace(build, code_hash=code) for code in ("aaaa", "bbbb", "aaaa")]
    both = _hash_code(builds)
    assert len(both) == 4
    assert both not in ("aaaa", "bbbb")
    assert _hash_code(builds[:1]) == "aaaa"
    assert _hash_code([builds[0], msgspec.structs.replace(build, code_hash="cccc")]) != both
    assert _hash_code([]) == "-"
