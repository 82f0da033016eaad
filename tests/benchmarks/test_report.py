"""A comparison as ratios, tables and the section of a page."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from benchmarks.records import AccuracyRow, BackendFacts, Benchmark
from benchmarks.registry import KERNEL
from benchmarks.report import benchmark_report, geometric_mean, headline, ratios, reasons, section, summary
from greenfast.judge.record_schema import GateResult
from greenfast.spec.freshness import Freshness
from tests.benchmarks.benchmarks import OPERATOR_DIMS, VERSUS, operator_record, peers_record, row, rows


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the Markdown table whose header begins so, without its rule."""
    (lines,) = [part.splitlines() for part in text.split("\n\n") if part.startswith(f"| {first} |")]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(cells) == len(found[0]) for cells in found)
    return [found[0], *found[2:]]


def test_a_ratio_is_the_better_fp8_peers_time_over_greenfasts() -> None:
    found = ratios(rows(), VERSUS)
    assert found == {"d64_s1024": 1.25, "d64_s1024_causal": 0.8, "mission": 2.0}  # bf16 counts nowhere
    with_cudnn = [*rows(), row("d64_s1024", "cudnn", 110.0)]
    assert ratios(with_cudnn, VERSUS)["d64_s1024"] == pytest.approx(1.1)
    assert ratios([r for r in rows() if r.backend != "fa3"], VERSUS) == {}
    assert ratios([r for r in rows() if r.backend != KERNEL], VERSUS) == {}


def test_the_mean_is_geometric() -> None:
    assert geometric_mean([1.25, 0.8]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 4.0, 8.0]) == pytest.approx(4.0)


def test_the_headline_is_of_the_grid_and_names_the_worst() -> None:
    assert headline(rows(), [VERSUS]) == (
        "speed of greenfast / better FP8 peer: 1.000x, geometric mean over 2 shapes of the grid; "
        "worst d64_s1024_causal 0.800x"
    )
    small = [r for r in rows() if not r.grid]
    assert "over 1 shapes outside of the grid; worst mission 2.000x" in headline(small, [VERSUS])
    lacking = [r for r in rows() if (r.shape, r.backend) != ("d64_s1024", "fa3")]
    assert "over 1 of 2 shapes of the grid; worst d64_s1024_causal 0.800x" in headline(lacking, [VERSUS])
    alone = [r for r in rows() if r.backend == KERNEL]
    assert headline(alone, [VERSUS]) == "speed of greenfast / better FP8 peer: not timed"
    both = operator_record()
    assert [part[:24] for part in headline(both.rows, both.versus).split("; speed of ")] == [
        "speed of sdpa fp8 / best", "sdpa int8 / best bf16: 1"
    ]  # fmt: skip


def test_the_tables_hold_the_records_numbers() -> None:
    text = summary(peers_record())
    assert table(text, "B, H, S, D")[1:] == [
        ["16, 32, 1024, 64", "full", "1000", "800", "-", "1250", "1.250x"],
        ["16, 32, 1024, 64", "causal", "500", "625", "-", "-", "0.800x"],
    ]
    assert table(text, "shape (B, H, S, D)")[1:] == [
        ["mission (1, 8, 512, 64)", "warm", "5.500", "11.00", "-", "9.900", "2.000x"]
    ]
    assert table(text, "S | greenfast / better FP8 peer, full") == [
        ["S", "greenfast / better FP8 peer, full", "greenfast / better FP8 peer, causal"], ["1024", "1.250x", "0.800x"]
    ]  # fmt: skip
    assert table(text, "inputs") == [
        ["inputs", "B, H, S, D", "greenfast FP8", "FA3 FP8"],
        ["normal", "1, 8, 2048, 128", "0.051", "0.0513"],
        ["outliers", "1, 8, 2048, 128", "0.052", "0.0523"],
    ]
    assert table(text, "S | greenfast FP8") == [
        ["S", "greenfast FP8", "FA3 FP8"], ["2048", "0.021", "0.031"], ["131072", "0.024", "0.034"]
    ]  # fmt: skip


def test_the_operator_has_host_times_and_bandwidths_too() -> None:
    text = summary(operator_record())
    (grid, quantized) = (
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines()]
        for part in text.split("\n\n")
        if part.startswith("| B, H, S, D |")
    )
    assert grid[0] == [
        "B, H, S, D", "mask", "sdpa fp8", "sdpa int8", "attention fp8", "torch flash", "torch cudnn",
        "sdpa fp8 / best bf16", "sdpa int8 / best bf16",
    ]  # fmt: skip
    assert grid[2] == ["1, 16, 4096, 128", "full", "1000", "800", "1250", "333", "667", "1.500x", "1.200x"]
    assert [line[1] for line in grid[2:]] == ["full", "causal"]
    rate = 3 * 3 * 16 * 4096 * 128 / 20 / 1e6
    assert quantized[2:] == [["1, 16, 4096, 128", "20.00", f"{rate:.2f}", "75 %"]], "once a shape, whatever the mask"
    assert table(text, "contender")[1:] == [["torch flash", "16.0", "15.0"]]
    assert table(text, "inputs")[1:] == [
        ["normal", "1, 16, 4096, 128", "0.05"], ["tiny", "1, 16, 4096, 128", "0.06"]
    ]  # fmt: skip
    assert "Inputs are N(0, 1), or *tiny* K and V times 1e-20." in text
    assert "Compiler resources" not in benchmark_report(operator_record())


def test_errors_are_compared_with_those_of_others_in_fp8_and_in_int8() -> None:
    record = operator_record()
    peers = [
        BackendFacts(name=name, label=name.upper(), precision=precision, version="1", missing="")  # type: ignore[arg-type]
        for name, precision in (("fa3", "fp8"), ("cudnn", "fp8"), ("sage", "int8"))
    ]
    own = [c for c in record.backends if c.name in record.own]
    record = msgspec.structs.replace(record, backends=[*own, *peers])

    def of(kind: str, backend: str, error: float | None) -> AccuracyRow:
        return AccuracyRow(series="inputs", inputs=kind, dims=OPERATOR_DIMS, backend=backend, sampled=1, error=error)

    names = ("sdpa_fp8", "sdpa_int8", "fa3", "cudnn", "sage")
    errors = {
        "normal": (0.05, 0.04, 0.05, 0.06, 0.02),
        "tiny": (0.09, 0.06, 0.07, 0.05, 0.06),
        "loud": (0.2, 0.1, None, None, 0.5),
        "lost": (None, 0.1, 0.2, None, None),
    }
    found = [of(kind, *each) for kind, each_of in errors.items() for each in zip(names, each_of, strict=True)]
    text = summary(msgspec.structs.replace(record, accuracy=found))
    shape = "1, 16, 4096, 128"
    assert [line for line in text.splitlines() if "errs no more" in line] == [
        f"- sdpa fp8 errs no more than FA3 and CUDNN on 1 of 2 rows; at most 1.80x, on tiny at {shape}.",
        f"- sdpa fp8 errs no more than SAGE on 1 of 3 rows; at most 2.50x, on normal at {shape}.",
        f"- sdpa int8 errs no more than FA3 and CUDNN on 2 of 3 rows; at most 1.20x, on tiny at {shape}.",
        f"- sdpa int8 errs no more than SAGE on 2 of 3 rows; at most 2.00x, on normal at {shape}.",
    ]
    assert "errs no more" not in summary(record), "no other library has errors"


def test_clocks_are_told_where_they_are_known() -> None:
    assert "SM clock" not in summary(operator_record())
    hot = operator_record(sm_mhz_min=900.0, sm_mhz_max=1980.0, temperature_c_min=60.0, temperature_c_max=88.0)
    assert "SM clock 900 to 1980 MHz, temperature 60 to 88 °C." in summary(hot)


def test_what_has_no_number_is_said_with_the_reason() -> None:
    said = ["cuDNN FP8: no module cudnn", "torch flash bf16 on d64_s1024_causal: RuntimeError: out of luck"]
    assert reasons(peers_record()) == said
    assert all(f"- {line}" in benchmark_report(peers_record()) for line in said)


def test_a_partial_record_has_the_tables_it_can_have() -> None:
    text = summary(peers_record(rows=[r for r in rows() if not r.grid], accuracy=[]))
    assert "TFLOP/s" not in text
    assert "Relative error" not in text
    assert table(text, "shape (B, H, S, D)")


def test_the_report_shows_spread_and_what_is_needed_to_repeat_it() -> None:
    text = benchmark_report(peers_record())
    assert text.startswith("# fp8_attention: hopper, compared with other libraries\n")
    line = next(line for line in text.splitlines() if line.startswith("| d64_s1024 | FA3"))
    assert line == (
        "| d64_s1024 | FA3 FP8 | 125.0 | 122.5 | 128.8 | 800.0 | 0.0531 | - | 31 x 13 | beyond L2 | sm_mhz 1755 |  |"
    )
    assert "python -m benchmarks peers" in text
    assert "hash-fp8_attention" in text


def test_a_page_quotes_a_record_or_says_that_it_is_stale() -> None:
    path = "evidence/h100/peers"
    text = section(peers_record(), path)
    assert text.startswith("Measured: fp8_attention: hopper, compared with other libraries")
    assert f"]({path})" in text
    assert "NVIDIA H100; 2030-01-02; commit 0123456789 (dirty); fa3-fwd 0.0.3, torch 2.11.0; " in text
    assert summary(peers_record()) in text
    stale = section(peers_record(), path, Freshness("stale", ("the grid differs",)))
    assert stale == f"The measurement in [{path}]({path}) is stale: the grid differs."


def test_a_record_is_read_as_it_was_written() -> None:
    for one in (peers_record(), operator_record()):
        assert msgspec.json.decode(msgspec.json.encode(one), type=Benchmark) == one


def test_no_record_is_wrong_but_fast() -> None:
    failed: Any = [GateResult(gate="CORRECTNESS", status="FAIL", summary="")]
    with pytest.raises(ValueError, match="unless its CORRECTNESS gate passed"):
        peers_record(gates=failed)
    assert peers_record(gates=failed, rows=[row("mission", KERNEL, None)]).rows
    with pytest.raises(ValueError, match="mission: a time of greenfast without its error"):
        peers_record(rows=[row("mission", KERNEL, 5.0, kernel_error=None)])
    assert math.isclose(ratios(peers_record().rows, VERSUS)["mission"], 2)
