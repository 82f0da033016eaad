"""One variant: checked, then timed; what is wrong is not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.kernel import BenchOutcome, bench
from greenfast.judge.record_io import read_record
from greenfast.judge.record_schema import BenchRecord
from greenfast.judge.report.markdown import report
from tests.fakes import Behaviour, FakeDevice, Script, Watcher, install, request
from tests.judge import behaviours

Bench = Callable[..., BenchOutcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    def run(script: Script = Script(us=12.0), **options: Any) -> BenchOutcome:  # noqa: B008
        asked = request(tmp_path / "results", **options)
        device = install(monkeypatch, FakeDevice(asked, {"stage2": script}))
        outcome = bench(asked, asked.task.config.variant("stage2"), Watcher())
        assert all(worker.closed for worker in device.workers)
        return outcome

    return run


def test_a_right_variant_is_timed(run: Bench) -> None:
    outcome = run(shapes=("small", "mission"), seeds=(0,), processes=1, timed_iters=100, warmup_iters=10)
    record = outcome.record
    assert {g.gate: g.status for g in record.gates} == dict.fromkeys(
        ("BUILD", "RESOURCES", "CORRECTNESS", "PERFORMANCE"), "PASS"
    )
    assert [(t.shape, t.cache, t.warmup_iters, t.timed_iters) for t in record.side.timing] == [
        (shape, cache, 10, 100) for shape in ("b1_h1_s32_d64", "b1_h8_s512_d64") for cache in ("warm", "cold")
    ]
    assert all(t.p50_us == pytest.approx(12.0, rel=0.005) for t in record.side.timing)
    assert record.clocks["sm_mhz_min"] == 2040.0


def test_its_files(run: Bench) -> None:
    outcome = run()
    assert {p.name for p in outcome.folder.iterdir()} == {
        "build_meta.json",
        "correctness_summary.json",
        "perf_baseline.json",
        "record.json",
        "VALIDATION_REPORT.md",
    }
    again = read_record(outcome.folder)
    assert again == outcome.record
    assert (outcome.folder / "VALIDATION_REPORT.md").read_text() == report(again)
    performance = json.loads((outcome.folder / "perf_baseline.json").read_text())
    assert performance["variant"] == "stage2"
    assert len(performance["results"]) == 4


@pytest.mark.parametrize(
    ("behave", "gate"),
    [
        (behaviours.one_nan, "CORRECTNESS"),
        (behaviours.races, "CORRECTNESS"),
        (behaviours.crashes, "CORRECTNESS"),
        (behaviours.other_bits_later, "PERFORMANCE"),
        (behaviours.crashes_later, "PERFORMANCE"),
    ],
)
def test_a_wrong_variant_has_no_timings(run: Bench, behave: Behaviour, gate: str) -> None:
    outcome = run(Script(behave=behave))
    record = outcome.record
    assert [g.gate for g in record.gates if g.status == "FAIL"] == [gate]
    assert record.side.timing == []
    assert json.loads((outcome.folder / "perf_baseline.json").read_text())["results"] == []


def test_a_record_of_wrong_but_fast_cannot_be_made(run: Bench, tmp_path: Path) -> None:
    timed = run().record
    failed = run(Script(behave=behaviours.all_zeros)).record
    with pytest.raises(ValueError, match="unless its CORRECTNESS gate passed"):
        msgspec.structs.replace(failed, side=msgspec.structs.replace(failed.side, timing=timed.side.timing))
    forged = json.loads(msgspec.json.encode(failed))
    forged["side"]["timing"] = json.loads(msgspec.json.encode(timed.side.timing))
    with pytest.raises(msgspec.ValidationError, match="unless its CORRECTNESS gate passed"):
        msgspec.json.decode(json.dumps(forged), type=BenchRecord)


def test_two_benches_of_one_second_are_kept_apart(run: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run()
    when = first.record.created
    monkeypatch.setattr("greenfast.judge.pipeline.GateRun.stamp", first.folder.name)
    second = run()
    assert second.folder.name == f"{first.folder.name}-2"
    assert json.loads((first.folder / "record.json").read_text())["created"] == when
