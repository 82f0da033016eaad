"""A comparison as a figure: what is drawn, how high, and what stands above the bars."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks.pictures import save_benchmark_plot
from benchmarks.records import Benchmark
from tests.benchmarks.benchmarks import operator_record, peers_record, rows
from tests.judge.report.figures import drawn_by


def figure_of(record: Benchmark, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Figure:
    return drawn_by(lambda: save_benchmark_plot(record, folder / "plot.png"), monkeypatch)


def test_a_panel_per_head_dim_and_one_of_small_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = figure_of(peers_record(), monkeypatch, tmp_path)
    assert [axes.get_title(loc="left") for axes in found.axes] == ["head dim 64: TFLOP/s", "small shapes: µs per call"]
    grid, small = found.axes
    assert [t.get_text() for t in grid.get_xticklabels()] == ["S 1024", "S 1024, causal"]
    bars = {c.get_label(): [bar.get_height() for bar in c] for c in grid.containers}
    assert bars == {"greenfast FP8": [1000.0, 500.0], "FA3 FP8": [800.0, 625.0], "torch flash bf16": [1250.0]}
    assert [t.get_text() for t in grid.texts] == ["1.250x", "0.800x"]
    assert [bar.get_height() for c in small.containers for bar in c] == [5.5, 11.0, 9.9]


def test_parts_of_an_attention_are_not_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (axes,) = figure_of(operator_record(), monkeypatch, tmp_path).axes
    assert [c.get_label() for c in axes.containers] == [
        "sdpa fp8", "sdpa int8", "attention fp8", "torch flash", "torch cudnn"
    ]  # fmt: skip
    assert [t.get_text() for t in axes.texts] == ["1.500x", "1.500x"]


def test_nothing_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    untimed = [r for r in rows() if r.median_us is None]
    found = figure_of(peers_record(rows=untimed, accuracy=[]), monkeypatch, tmp_path)
    assert not found.axes
    assert "nothing was timed" in [t.get_text() for t in found.texts]


def test_files(tmp_path: Path) -> None:
    save_benchmark_plot(peers_record(), tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        save_benchmark_plot(peers_record(), tmp_path / "a.pdf")
