"""The comparison with peers as ratios, tables and the README's section."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from greenfast.judge.peers import OWN
from greenfast.judge.record import GateResult, PeersRecord
from greenfast.judge.report.markdown import report
from greenfast.judge.report.peers import (
    console_table,
    geometric_mean,
    headline,
    ratios,
    readme_section,
    reasons,
    summary,
)
from greenfast.spec.freshness import Freshness
from tests.judge.report.peer_records import CONTENDERS, peers_record, row, rows


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the Markdown table whose header begins so, without header and rule."""
    (lines,) = [part.splitlines() for part in text.split("\n\n") if part.startswith(f"| {first} |")]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(cells) == len(found[0]) for cells in found)
    return found[2:]


def test_a_ratio_is_the_better_fp8_peers_time_over_greenfasts() -> None:
    found = ratios(rows(), CONTENDERS)
    assert found == {"d64_s1024": 1.25, "d64_s1024_causal": 0.8, "mission": 2.0}  # bf16 counts nowhere
    with_cudnn = [*rows(), row("d64_s1024", "cudnn", 110.0)]
    assert ratios(with_cudnn, CONTENDERS)["d64_s1024"] == pytest.approx(1.1)
    assert ratios([r for r in rows() if r.contender != "fa3"], CONTENDERS) == {}
    assert ratios([r for r in rows() if r.contender != OWN], CONTENDERS) == {}


def test_the_mean_is_geometric() -> None:
    assert geometric_mean([1.25, 0.8]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 4.0, 8.0]) == pytest.approx(4.0)


def test_the_headline_is_of_the_grid_and_names_the_worst() -> None:
    assert headline(rows(), CONTENDERS) == (
        "1.000x the speed of the better FP8 peer, geometric mean over 2 shapes of the grid; "
        "worst d64_s1024_causal 0.800x"
    )
    small = [r for r in rows() if not r.grid]
    assert "over 1 shapes outside of the grid; worst mission 2.000x" in headline(small, CONTENDERS)
    lacking = [r for r in rows() if (r.shape, r.contender) != ("d64_s1024", "fa3")]
    assert "over 1 of 2 shapes of the grid; worst d64_s1024_causal 0.800x" in headline(lacking, CONTENDERS)
    assert headline([r for r in rows() if r.contender == OWN], CONTENDERS) == ("no FP8 peer was timed beside greenfast")


def test_the_tables_hold_the_records_numbers() -> None:
    text = summary(peers_record())
    assert table(text, "B, H, S, D") == [
        ["16, 32, 1024, 64", "full", "1000", "800", "-", "1250", "1.250x"],
        ["16, 32, 1024, 64", "causal", "500", "625", "-", "-", "0.800x"],
    ]
    assert table(text, "shape (B, H, S, D)") == [
        ["mission (1, 8, 512, 64)", "warm", "5.500", "11.00", "-", "9.900", "2.000x"]
    ]
    inputs, length = (
        [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines()]
        for part in text.split("\n\n")
        if part.startswith("| contender |")
    )
    assert inputs[0] == ["contender", "1, 8, 2048, 128, normal", "1, 8, 2048, 128, outliers"]
    assert inputs[2:4] == [["greenfast FP8", "0.051", "0.052"], ["FA3 FP8", "0.0513", "0.0523"]]
    assert inputs[4:] == [["cuDNN FP8", "-", "-"], ["torch flash bf16", "-", "-"]]
    assert length[0] == ["contender", "S=2048", "S=131072"]
    assert length[2:] == [["greenfast FP8", "0.021", "0.024"], ["FA3 FP8", "0.031", "0.034"]]


def test_who_has_no_number_is_said_with_the_reason() -> None:
    said = ["cuDNN FP8: no module cudnn", "torch flash bf16 on d64_s1024_causal: RuntimeError: out of luck"]
    assert reasons(peers_record()) == said
    assert all(f"- {line}" in report(peers_record()) for line in said)


def test_the_console_shows_both_units() -> None:
    header, lines = console_table(rows(), CONTENDERS)
    assert header == ["shape", *(c.label for c in CONTENDERS), "ratio"]
    assert lines[0] == ["d64_s1024", "100.0 µs 1000", "125.0 µs 800", "-", "80.00 µs 1250", "1.250x"]


def test_a_partial_record_has_the_tables_it_can_have() -> None:
    text = summary(peers_record(rows=[r for r in rows() if not r.grid], accuracy=[]))
    assert "TFLOP/s" not in text
    assert "Relative error" not in text
    assert table(text, "shape (B, H, S, D)")


def test_the_report_shows_spread_and_what_is_needed_to_repeat_it() -> None:
    text = report(peers_record())
    assert text.startswith("# fp8_attention: hopper beside its peers\n")
    line = next(line for line in text.splitlines() if line.startswith("| d64_s1024 | FA3"))
    assert line == (
        "| d64_s1024 | FA3 FP8 | 125.0 | 122.5 | 128.8 | 800.0 | 0.0531 | - | 31 x 13 | beyond L2 | sm_mhz 1755 |  |"
    )
    assert "greenfast bench fp8_attention --peers" in text
    assert "hash-fp8_attention" in text


def test_the_readmes_section_is_quoted_or_stale() -> None:
    path = "evidence/h100/peers"
    text = readme_section(path, peers_record())
    assert text.startswith("## Beside its peers\n\nThe Hopper kernel of `fp8_attention`")
    assert f"]({path})" in text
    assert "NVIDIA H100; 2030-01-02; commit 0123456789 (dirty); fa3-fwd 0.0.3; " in text
    assert summary(peers_record()) in text
    stale = readme_section(path, peers_record(), Freshness("stale", ("the grid differs",)))
    assert "stale" in stale.splitlines()[-1]
    assert not any(character.isdigit() for character in stale.replace("h100", ""))


def test_a_record_is_read_as_it_was_written() -> None:
    one = peers_record()
    assert msgspec.json.decode(msgspec.json.encode(one), type=PeersRecord) == one


def test_no_record_is_wrong_but_fast() -> None:
    failed: Any = [GateResult(gate="CORRECTNESS", status="FAIL", summary="")]
    with pytest.raises(ValueError, match="unless its CORRECTNESS gate passed"):
        peers_record(gates=failed)
    assert peers_record(gates=failed, rows=[row("mission", OWN, None)]).rows
    with pytest.raises(ValueError, match="mission: a time of greenfast without its error"):
        peers_record(rows=[row("mission", OWN, 5.0, kernel_error=None)])
    assert math.isclose(ratios(peers_record().rows, CONTENDERS)["mission"], 2)
