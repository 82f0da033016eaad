"""The serving comparison as tables, as a figure, and as a run's record and report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import freshness as freshness_module
from benchmarks.comparison import CheckResult
from benchmarks.freshness import current_part, freshness
from benchmarks.pictures import save_benchmark_plot
from benchmarks.records import read_record
from benchmarks.report import headline, read_rate, summary, tables
from benchmarks.runner import compare
from benchmarks.serving import serving
from benchmarks.serving_backends import BACKENDS
from greenfast.spec.errors import WrongResultError
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.freshness import STALE, Freshness
from tests.benchmarks.benchmarks import serving_record
from tests.benchmarks.scripted import ComparisonWatcher, Session, install
from tests.fakes import request, shipped
from tests.judge.report.figures import drawn_by

H200 = DeviceInfo(
    kind="gpu", name="NVIDIA H200", compute_capability="9.0", cuda_version="13.0", driver="580.95", l2_bytes=60 * 2**20
)


def test_bandwidth_is_of_the_bytes_that_are_attended_to() -> None:
    record = serving_record()
    assert read_rate(record) == pytest.approx(2**30 / 250e-6 / 1e12)
    decode, prefill, append = tables(record)
    assert decode.header == (
        "heads q:kv, head dim", "sequences x keys", "greenfast FP8", "FA3 FP8 (vLLM)", "FA3 bf16 (vLLM)",
        "of the read bandwidth", "greenfast / FA3 FP8", "plan, µs",
    )  # fmt: skip
    rows = {row[:2]: row[2:] for row in decode.rows}
    # 2 * 8 * 32768 * 8 * 128 bytes in FP8 in 100 us are 5.37 TB/s; in bfloat16, twice as many in 180 us, 5.97
    assert rows["32:8, 128", "8x32768"] == (
        "100.0 (5.37)", "150.0 (3.58)", "180.0 (5.97)", "125 %", "1.500x", "3.000"
    )  # fmt: skip
    assert rows["32:8, 128", "skewed"][0] == "100.0 (4.01)"
    assert len(rows) == len(decode.rows) == 14
    # half of 4 * 4096^2 * 4 * 32 * 128 operations in 100 us
    assert prefill.rows[0] == ("32:8, 128", "4x4096", "5498", "3665", "3054", "1.500x")
    # of a token (32 + 16) * 128 numbers of 16 bits in, 32 * 128 out, 16 * 128 codes and 16 scales: 22,592 bytes
    assert append.rows[0] == ("32:8, 128", "16384", "RoPE", "10.00", "37.01", "8.000", "80 %")
    assert append.rows[1][2] == "QK-norm and RoPE"


def test_each_group_has_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    record = serving_record()
    slow = [r for r in record.rows if not (r.backend == "vllm_fa3" and r.shape.startswith("prefill"))]
    assert headline(slow, record.versus) == (
        "speed of decode: greenfast / FA3 FP8: 1.500x, geometric mean over 14 shapes of the grid; worst "
        "decode_32x8_d128_1x8192 1.500x; speed of prefill: greenfast / FA3 FP8: not timed"
    )
    text = summary(record)
    assert "Decode, one query token for each sequence" in text
    assert "| kvcache | 14.5 | 13.0 |" in text
    assert text.endswith("- FA3 FP8: no fa3-fwd")


def test_a_panel_for_each_kind_of_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = drawn_by(lambda: save_benchmark_plot(serving_record(), tmp_path / "plot.png"), monkeypatch)
    titles = [axes.get_title(loc="left") for axes in found.axes]
    assert titles[0] == "decode, heads 32:8, 128: TB/s of K and V"
    assert titles[-1] == "prefill, heads 16:8, 256: TFLOP/s"
    assert len(titles) == 5 + 3
    first = found.axes[0]
    assert [t.get_text() for t in first.get_xticklabels()] == ["1x8192", "8x32768", "256x1024", "skewed"]
    assert [c.get_label() for c in first.containers] == ["greenfast FP8", "FA3 FP8 (vLLM)", "FA3 bf16 (vLLM)"]
    assert first.containers[0][1].get_height() == pytest.approx(5.37, abs=0.01)
    assert [t.get_text() for t in first.texts] == ["1.500x"] * 4
    assert [t.get_text() for t in found.axes[-1].texts] == ["1.500x"] * 2


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Session:
    """Backends take 100 us, FlashAttention-3's of vLLM 150; the package is missing."""
    monkeypatch.setattr("benchmarks.serving.timed_launches", lambda cases: {})  # compiling them takes a minute
    us = {name: 150.0 if name.startswith("vllm") else 100.0 for name in BACKENDS}
    return install(monkeypatch, Session(BACKENDS, absent=("fa3", "fa3_bf16"), us=us))


def run(tmp_path: Path, *groups: str) -> Any:
    asked = replace(request(tmp_path, task=shipped("fp8_attention"), arch="sm_90a", device=H200), command="x")
    return compare(serving(groups, quick=True), asked, None, ComparisonWatcher())


def test_a_run_leaves_a_record_a_report_and_a_figure(scripted: Session, tmp_path: Path) -> None:
    outcome = run(tmp_path, "decode", "prefill", "append", "host")
    assert {path.name for path in outcome.folder.iterdir()} == {
        "record.json",
        "VALIDATION_REPORT.md",
        "performance.png",
    }
    record: Any = read_record(outcome.folder)
    assert record == outcome.record
    assert freshness(record) == Freshness()
    rows = {(row.shape, row.backend): row for row in record.rows}
    assert rows["decode_8x1_d128_1x8192", "greenfast"].cache == "beyond L2"
    assert rows["append_64", "append"].cache == "warm"
    assert rows["decode_8x1_d128_1x8192", "fa3"].reason == "fa3 is not installed"
    names = [row.backend for row in record.host]
    assert names[:3] == ["kvcache", "kvcache_unplanned", "kvcache_appending"]
    assert names[-1] == "vllm_fa3"  # the package is missing
    assert "# attention over a paged FP8 cache, compared with other libraries" in (
        outcome.folder / "VALIDATION_REPORT.md"
    ).read_text(encoding="utf-8")


def test_a_record_of_some_cases_is_stale_by_their_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def now(*names: str) -> Freshness:
        monkeypatch.setattr("benchmarks.serving.timed_launches", lambda cases: dict.fromkeys(names))
        return freshness(serving_record(kernels={}))

    assert now("attention, decode_32x8_d128_32x4096") == Freshness()  # not in a quick run
    stale = now("attention, a scale per token, decode_32x8_d128_8x32768")
    assert stale.status == "stale"
    assert "decode_32x8_d128_8x32768 is not in the record" in str(stale)


def test_host_times_alone_need_no_shapes(scripted: Session, tmp_path: Path) -> None:
    outcome = run(tmp_path, "host")
    assert outcome.record.rows == []
    assert len(outcome.record.host) == 7


def test_greenfast_that_is_wrong_ends_the_run(scripted: Session, tmp_path: Path) -> None:
    scripted.checked["greenfast"] = CheckResult(error=0.11, finite=True)
    with pytest.raises(WrongResultError, match=r"greenfast on decode_32x8_d128_1x8192 .*error 0\.11, at most 0\.1"):
        run(tmp_path, "decode")


def test_times_of_changed_kernels_are_left_out_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    record = serving_record()
    shape, kept = next((r.shape, r.backend) for r in record.rows if r.backend == "greenfast")
    answers = {f"attention, {shape}": Freshness(), f"append, {shape}": Freshness(STALE, ("its code differs",))}
    monkeypatch.setattr(freshness_module, "_check_kernels", lambda _: answers)
    current, gone = current_part(record)
    assert gone == ["append"]
    assert kept in {row.backend for row in current.rows}
    assert "append" in {row.backend for row in record.rows} - {row.backend for row in current.rows}
    assert not current.host
    monkeypatch.setattr(freshness_module, "_check_kernels", lambda _: {f"attention, {shape}": Freshness()})
    assert current_part(record) == (record, [])
