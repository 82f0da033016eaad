"""The page of a run: what it says, and that nothing in a record gets out of its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from greenfast.judge.error_metrics import bound_histogram, error_histogram, error_stats
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import BenchRecord, ErrorMap, PhaseRecord, Record, SolutionSource
from greenfast.judge.report.webpage.listing import HotCode, ListedInstruction, Window
from greenfast.judge.report.webpage.roofline import Work
from greenfast.judge.report.webpage.run import run_page
from greenfast.spec.facts import KernelCounts
from tests.judge.report.records import pending_record, quoting_record, record, speedup_row, timing_row
from tests.judge.report.webpage.reading import read

ROOT = Path(__file__).parents[4]
HOSTILE = (
    "<script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)> </style></svg></pre> {{ 7 * 7 }} "
    "![x](http://evil.example/y.png) [z](javascript:alert(1)) <http://evil.example> \" ' onload=alert(1) "
    "$\\frac{1}$ | # *"
)
#: Fields whose values a record's schema limits to words of its own.
WORDS = {"status", "verdict", "decision", "kind", "gate"}
SECTIONS = [
    *("Gates", "Speedups", "Roofline", "Counts", "Machine code", "Block medians", "Errors"),
    *("Repeat it", "Limits", "The whole record"),
]


def with_clocks(one: Record) -> Record:
    """The record with clocks and power of each block, and distributions of errors."""
    rng = np.random.default_rng(0)
    exact, bound = np.zeros(1000), np.full(1000, 0.1)

    def more(old: Any, watts: float) -> Any:
        blocks = old.timing[0].block_medians_us
        timing = [
            msgspec.structs.replace(
                row, block_mhz=[[1980.0] * len(b) for b in blocks], block_watts=[[watts] * len(b) for b in blocks]
            )
            for row in old.timing
        ]
        actual = 0.01 * rng.standard_normal(1000)
        histograms = {
            "error_histogram": error_histogram(actual, exact),
            "bound_histogram": bound_histogram(actual, exact, bound),
        }
        error = error_stats(actual, exact, bad_abs_err=1.0)
        rows = [msgspec.structs.replace(row, kernel_error=error, **histograms) for row in old.correctness]
        return msgspec.structs.replace(old, timing=timing, correctness=rows)

    return msgspec.structs.replace(one, baseline=more(one.baseline, 512.0), candidate=more(one.candidate, 634.0))


def counts(instructions: int) -> KernelCounts:
    numbers = {name: instructions for name, kind in KernelCounts.__annotations__.items() if kind == "int"}
    return KernelCounts(instructions={"add": instructions}, shared_bytes={}, bank_conflicts={}, **numbers)


def sections(page: str) -> dict[str, str]:
    """The text of each section by its title."""
    found = {}
    for part in page.split("<section ")[1:]:
        title, _, rest = part.partition("<h2>")[2].partition("</h2>")
        found[title] = rest
    return found


def test_the_claim_stands_first() -> None:
    text = read(run_page(record(), sha256="ab" * 32)).text
    header = text.partition("Gates Speedups")[0]
    for said in (
        *("fp8_sdpa: stage1 → stage2", "MERGE", "stage2 is 1.829 times as fast as stage1, [1.810, 1.851] at 95 %"),
        *("on mission with warm L2: FAST (1.15x required).", "NVIDIA H100, driver 580.95, CUDA 13.0"),
        *("2030-01-02T03:04:05Z", "0123456789 (dirty)", "hash-sdpa_stage2 / code-sdpa_stage2", "ab" * 32),
    ):
        assert said in header, said


def test_every_section_is_there_and_linked() -> None:
    page = read(run_page(record()))
    assert list(sections(run_page(record()))) == SECTIONS
    links = [value[1:] for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    anchors = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert links == anchors
    assert len(anchors) == len(SECTIONS)


def test_gates_with_their_reasons_and_checks() -> None:
    gates = [msgspec.structs.replace(g, reasons=[f"why {g.gate}"]) for g in record().gates]
    found = sections(run_page(record(gates=gates, decision="DEFER")))["Gates"]
    for gate in gates:
        assert f"why {gate.gate}" in found
        assert gate.summary in found
    assert "all 5 checks" in found
    assert "37.1 KB" in found


def test_the_reasons_of_a_decision_are_said_at_once() -> None:
    header = run_page(record(decision="DEFER", reasons=["PERFORMANCE: too slow"])).partition("<main>")[0]
    assert "PERFORMANCE: too slow" in header
    assert 'class="decision bad">DEFER' in header


def test_an_untimed_run_says_why_in_each_section() -> None:
    page = run_page(pending_record())
    found = sections(page)
    assert "no GPU on this machine" in read(page).text
    assert "no GPU on this machine" in found["Speedups"]
    assert "Nothing was timed" in found["Roofline"]
    assert "No blocks were timed" in found["Block medians"]
    assert "makes no claim about speed" in found["Limits"]
    assert "<svg" not in page


def test_a_quoted_speedup_is_said_to_be_another_runs() -> None:
    page = run_page(quoting_record())
    assert "Not measured in this run, quoted from NVIDIA H100, 2030-01-02" in read(page).text
    assert "evidence/h100/stage2/record.json" in sections(page)["Speedups"]
    assert "No time was measured in this run" in sections(page)["Limits"]


def test_clocks_and_power_of_blocks_are_drawn_where_a_record_has_them() -> None:
    plain, clocked = (sections(run_page(one))["Block medians"] for one in (record(), with_clocks(record())))
    assert "median, µs" in plain
    assert "SM clock, MHz" not in plain
    assert "SM clock, MHz" in clocked
    assert "power, W" in clocked
    assert "baseline power 512 to 512 W, median 512; candidate power 634 to 634 W" in clocked


def test_clocks_of_the_whole_run_where_there_are_no_others() -> None:
    one = record(clocks={"sm_mhz_first": 1980.0, "sm_mhz_min": 1695.0, "sm_mhz_max": 1980.0})
    assert "Over the whole run: SM clock 1695 to 1980 MHz" in sections(run_page(one))["Block medians"]


def test_errors_as_distributions_or_their_worst() -> None:
    plain, full = (sections(run_page(one))["Errors"] for one in (record(), with_clocks(record())))
    assert "no distributions" in plain
    assert "worst element / what rounding explains" in plain
    assert "% of elements" not in plain
    assert full.count("% of elements") == 2
    # The candidate's worst bound ratio: 0.31 * 1.1.
    assert "0.341" in sections(run_page(record()))["The whole record"]


def test_counts_of_both_sides_with_their_ratio() -> None:
    first = record()
    one = msgspec.structs.replace(
        first,
        baseline=msgspec.structs.replace(first.baseline, counts={"mission": counts(4000)}),
        candidate=msgspec.structs.replace(first.candidate, counts={"mission": counts(1000)}),
        least_work={"mission": {"matrix_flops": 500}},
    )
    found = sections(run_page(one))["Counts"]
    assert "4000" in found
    assert "0.25x" in found
    assert "2.00x" in found  # the candidate's over the least


def test_roofline_of_the_work() -> None:
    work = {"mission": Work({"matrix_flops": 2_000_000_000, "exponentials": 2_000_000}, 1_048_576)}
    found = sections(run_page(record(), work=work))["Roofline"]
    assert "TFLOP/s of matrix instructions" in found
    assert "3.35 TB/s of memory" in found
    assert "3.04" in found  # TFLOP/s of the candidate: 2e9 operations in 657.4 µs
    assert "0.14 %" in found  # of 132 * 8192 * 1980 MHz


def test_machine_code_side_by_side_or_why_not() -> None:
    def one(text: str, kind: str = "") -> ListedInstruction:
        return ListedInstruction("0010", text, text.split()[0], kind)

    windows = (
        Window("baseline", "stage1", "2 of 9 instructions", (one("HMMA.16816 R0, <R1>", "matrix"), one("IADD3 R1"))),
        Window("candidate", "stage2", "1 of 9 instructions", (one("HMMA.1688 R2", "matrix"),)),
    )
    page = run_page(record(), code=HotCode("mission", windows))
    read(page)
    found = sections(page)["Machine code"]
    assert "HMMA.16816 R0, &lt;R1&gt;</span></td><td>0010 <span" in found
    assert '<td class="left">0010 IADD3 R1</td><td></td>' in found
    assert "Not shown: no compiler." in run_page(record(), code=HotCode(missing="no compiler"))


def test_repeat_and_limits() -> None:
    found = sections(run_page(record()))
    assert "<pre>greenfast judge fp8_sdpa --candidate stage2</pre>" in found["Repeat it"]
    assert "Seeds of the inputs: 0, 1, 2." in found["Repeat it"]
    assert "had changes that are not in commit" in found["Limits"]
    assert "equal bits on 1 of 2 inputs" in found["Limits"]
    assert "42 launches were discarded" in found["Limits"]


def hostile(value: Any, field: str = "", text: str = HOSTILE) -> Any:
    """The data with every text replaced by ``text``, and every key that is no field's name."""
    if isinstance(value, dict):
        free = field in ("dims", "toggles", "gates", "environment", "machine_code", "clocks", "counts")
        return {text if free else key: hostile(item, key, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if field == "checks":
            return [[*[text] * 3, row[3]] for row in value]
        return [hostile(item, f"an item of {field}", text) for item in value]
    return text if isinstance(value, str) and field not in WORDS else value


@pytest.mark.parametrize("make", [record, quoting_record, pending_record, lambda: with_clocks(record())])
def test_a_hostile_record_is_text(make: Any) -> None:
    one = msgspec.convert(hostile(msgspec.to_builtins(make())), Record)
    instruction = ListedInstruction(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    text = run_page(
        one,
        work={HOSTILE: Work({"matrix_flops": 10, "exponentials": 3}, 5)},
        code=HotCode(HOSTILE, (Window(HOSTILE, HOSTILE, HOSTILE, (instruction,)),) * 2),
        sha256=HOSTILE,
    )
    page = read(text)  # allows no element or attribute that the page itself does not have
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "49" not in page.text.replace("0.00049", "")


def test_numbers_that_cannot_be_drawn() -> None:
    strange = [timing_row("mission", seed, 0.0) for seed in range(3)]
    one = record()
    one = msgspec.structs.replace(
        one,
        candidate=msgspec.structs.replace(one.candidate, timing=strange, counts={"mission": counts(0)}),
        speedups=[speedup_row(shape="a very long name of a shape, " * 9, speedup=1e3, ci_low=1e-9, ci_high=1e4)],
    )
    read(run_page(one, work={"mission": Work({"matrix_flops": 10}, 0)}))


@pytest.mark.parametrize("name", ["h200/fp8_attention-e4m3-hopper", "h100/fp8_sdpa-e4m3-stage2-phases"])
def test_kept_records(name: str) -> None:
    one = read_record(ROOT / "evidence" / name)
    page = run_page(one)
    read(page)
    titles = list(sections(page))
    if isinstance(one, Record):
        assert titles == SECTIONS
    elif isinstance(one, PhaseRecord):
        assert titles == ["Repeat it", "Limits", "The whole record"]
        assert "cycles per block" in page
    else:
        assert isinstance(one, BenchRecord)
        assert titles == [t for t in SECTIONS if t not in ("Speedups", "Counts", "Block medians")]


def test_a_wrong_output_is_shown_as_a_map_with_the_values_around_the_worst_element() -> None:
    """The task's own shapes come before drawn ones; the two sides' commits are shown."""
    found = ErrorMap(
        output="y", rows=64, columns=32, cells=[[0.1, None], [2.0, 30.0]], top=3, left=7,
        got=[[1.0, None], [2.0, 2.5]], expected=[[1.0, 4.0], [2.0, 2.0]],
    )  # fmt: skip
    one = record()
    row = msgspec.structs.replace(one.candidate.correctness[0], error_map=found)
    drawn = msgspec.structs.replace(row, drawn=True, shape="drawn_1")
    source = SolutionSource(language="cuda", sha256="0" * 64, files={}, commit=f"{'abc' * 10} (dirty)")
    side = msgspec.structs.replace(one.candidate, correctness=[drawn, row], solution=source)
    page = read(run_page(msgspec.structs.replace(one, candidate=side)))
    assert f"candidate, {row.shape}, seed {row.seed}: y as 64 rows and 32 columns." in page.text
    assert "drawn_1, seed" not in page.text
    assert "not finite (4)" in page.text
    assert "2.5 (2)" in page.text
    assert "candidate: commit abcabcabca (dirty)" in page.text
