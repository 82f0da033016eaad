"""The figure: what is drawn is what the record says, and it is written where it is wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from greenfast.judge.record_schema import Record
from greenfast.judge.report.plots import save_plot
from greenfast.spec.errors import UsageError
from tests.judge.report.figures import drawn_by
from tests.judge.report.records import pending_record, record, speedup_row


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Figure:
    """The figure of a record with a gated and an ungated speedup."""
    speedups = [speedup_row(), speedup_row(cache="cold", gated=False, required=0.0, verdict="INCONCLUSIVE")]
    return figure_of(record(speedups=speedups), monkeypatch, tmp_path)


def figure_of(one: Record, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Figure:
    return drawn_by(lambda: save_plot(one, folder / "plot.png"), monkeypatch)


def test_left_every_block_median_of_both_sides(drawn: Figure) -> None:
    panel, forest = drawn.axes
    assert panel.get_title(loc="left") == "mission, warm, timed by graph slope"
    assert panel.get_ylabel() == "block median (µs)"
    one = record()
    for line, timed in zip(panel.lines[:2], (one.baseline, one.candidate), strict=True):
        expected = [us for row in timed.timing for block in row.block_medians_us for us in block]
        assert np.array_equal(np.asarray(line.get_ydata()), expected)
    assert panel.lines[0].get_color() != panel.lines[1].get_color()
    assert panel.lines[0].get_marker() != panel.lines[1].get_marker()
    assert [t.get_text() for t in panel.texts] == ["seed 0", "seed 1", "seed 2"]
    assert forest is not panel


def test_right_every_speedup_with_interval_requirement_and_floor(drawn: Figure) -> None:
    forest = drawn.axes[1]
    assert [t.get_text() for t in forest.get_yticklabels()] == ["mission\nwarm, gated", "mission\ncold"]
    assert [t.get_text() for t in forest.texts] == [
        "1.829x [1.810, 1.851]\nFAST, required 1.15x",
        "1.829x [1.810, 1.851]\nINCONCLUSIVE",
    ]
    assert any(np.array_equal(np.asarray(line.get_xdata()), [1.15, 1.15]) for line in forest.lines)
    segments = forest.containers[0].lines[2][0].get_segments()  # type: ignore[attr-defined]
    assert segments[0][:, 0] == pytest.approx([1.8104, 1.8507])
    band = forest.patches[0].get_extents().transformed(forest.transData.inverted())
    assert (band.x0, band.x1) == pytest.approx((1 / 1.0061, 1.0061))


def test_the_title_says_the_decision(drawn: Figure) -> None:
    title = drawn.get_suptitle()
    assert title.splitlines()[0] == "stage1 -> stage2: MERGE"
    assert "NVIDIA H100" in title


def test_an_untimed_record_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = figure_of(pending_record(), monkeypatch, tmp_path)
    assert not found.axes
    assert "not timed; PENDING: no GPU on this machine" in [t.get_text() for t in found.texts]


def test_files(tmp_path: Path) -> None:
    save_plot(record(), tmp_path / "a.png")
    save_plot(record(), tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        save_plot(record(), tmp_path / "a.pdf")
