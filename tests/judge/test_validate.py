"""The main job end to end on a fake device: what makes a MERGE, and each thing that makes a DEFER."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.judge.gates.performance import draw_order_seed
from greenfast.judge.gates.registry import GATES
from greenfast.judge.record_io import conclude, read_record
from greenfast.judge.record_schema import Claim, GateResult, Record, Status
from greenfast.judge.task import LoadedTask, load, load_task
from greenfast.judge.timing.estimators import speedup_row
from greenfast.judge.validate import Outcome, validate
from greenfast.spec.kernel import Program, render_program
from tests.fakes import FEW, L4, Behaviour, FakeDevice, Script, Watcher, install, request, right, rungs
from tests.judge import behaviours
from tests.judge.report.records import timing_row

SDPA = Path(__file__).parents[2] / "tasks" / "fp8_sdpa_stage_c_wmma"
FAST, SLOW = Script(us=10.0), Script(us=20.0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """Validate stage1 -> stage2 with these scripts; other options are as in ``request``."""

    def run(baseline: Script = SLOW, candidate: Script = FAST, **options: Any) -> Outcome:
        asked = request(tmp_path / "results", **options)
        device = install(monkeypatch, FakeDevice(asked, {"stage1": baseline, "stage2": candidate}))
        watcher = Watcher()
        outcome = validate(asked, *rungs(asked, "stage1", "stage2"), watcher, profile=False)
        assert watcher.gates == outcome.record.gates
        assert all(worker.closed for worker in device.workers)
        return outcome

    return run


def statuses(record: Record) -> dict[str, Status]:
    return {g.gate: g.status for g in record.gates}


def test_on_a_gpu_counts_are_absent_and_not_zero(run: Callable[..., Outcome]) -> None:
    record = run().record
    assert (record.baseline.counts, record.candidate.counts, record.least_work) == ({}, {}, {})
    assert "emulated" not in gate(record, "EVIDENCE").summary


def gate(record: Record, name: str) -> GateResult:
    return next(g for g in record.gates if g.gate == name)


def assert_deferred(outcome: Outcome, failed: str, reason: str) -> None:
    """DEFER because of this one gate, for this reason; saved; and nothing timed unless it was correct."""
    record = outcome.record
    assert record.decision == "DEFER"
    assert [name for name, status in statuses(record).items() if status == "FAIL"] == [failed]
    assert any(r.startswith(f"{failed}: ") and reason in r for r in record.reasons), record.reasons
    assert [g.gate for g in record.gates] == list(GATES)
    assert read_record(outcome.folder) == record
    if record.gate_status("CORRECTNESS") != "PASS":
        assert (record.baseline.timing, record.candidate.timing, record.speedups) == ([], [], [])
        assert record.gate_status("PERFORMANCE") == "PENDING"
        assert not (outcome.folder.parents[1] / "COMPARE.md").exists()
        timed = msgspec.structs.replace(record.candidate, timing=[timing_row()])
        with pytest.raises(ValueError, match="unless its CORRECTNESS gate passed"):
            msgspec.structs.replace(record, candidate=timed)


@pytest.mark.parametrize(
    "shapes", [("b1_h1_s32_d64",), pytest.param(("b1_h1_s32_d64", "b1_h8_s512_d64"), marks=pytest.mark.slow)]
)
def test_a_faster_candidate_merges(run: Callable[..., Outcome], shapes: tuple[str, ...]) -> None:
    record = run(shapes=shapes, warmup_iters=10, timed_iters=100).record
    assert record.decision == "MERGE"
    assert record.reasons == ["all five gates hold"]
    assert statuses(record) == dict.fromkeys(GATES, "PASS")
    # a third seed takes part, because launches draw from three cases at least
    assert sorted((row.shape, row.seed) for row in record.candidate.correctness) == [
        (s, n) for s in shapes for n in range(3)
    ]
    assert len(record.baseline.correctness) == len(shapes) * 3
    assert {row.seed for row in record.candidate.timing} == {0, 1}
    assert all(row.identical for row in record.parity)
    assert len(record.parity) == len(shapes) * 3
    gated = [row for row in record.speedups if row.gated]
    assert [(row.shape, row.cache, row.verdict) for row in gated] == [(shapes[-1], "warm", "FAST")]
    assert gated[0].ci_low < 2.0 < gated[0].ci_high
    assert gated[0].required == 1.15


def test_timings_are_as_asked_and_as_scripted(run: Callable[..., Outcome]) -> None:
    asked = {"warmup_iters": 20, "timed_iters": 250}
    record = run(Script(us=20.0, cold_us=30.0), Script(us=10.0, cold_us=12.0), **asked).record
    expected = {"stage1": {"warm": 20.0, "cold": 30.0}, "stage2": {"warm": 10.0, "cold": 12.0}}
    for side in (record.baseline, record.candidate):
        assert [(t.shape, t.seed, t.cache) for t in side.timing] == [
            ("b1_h1_s32_d64", seed, cache) for seed in (0, 1) for cache in ("warm", "cold")
        ]
        for timing in side.timing:
            us = expected[side.variant][timing.cache]
            assert (timing.warmup_iters, timing.timed_iters, timing.discarded_iters) == (20, 250, 0)
            assert timing.p50_us == pytest.approx(us, rel=0.002)
            assert timing.p90_us == pytest.approx(us * 1.00385, rel=0.001)
            assert timing.std_us == pytest.approx(us * 0.003, rel=0.2)
            assert timing.iters_per_sec == pytest.approx(1e6 / timing.mean_us, rel=1e-4)
            assert [len(blocks) for blocks in timing.block_medians_us] == [4] * 5
    assert {row.cache: round(row.speedup, 1) for row in record.speedups} == {"warm": 2.0, "cold": 2.5}


def test_the_noise_floor_is_that_of_the_baseline_against_itself(run: Callable[..., Outcome]) -> None:
    """A machine on which equal kernels differ by some percent from process to process claims less."""
    quiet = run(Script(us=20.0), Script(us=19.5)).record
    assert {row.noise_floor for row in quiet.speedups} == {0.005}
    assert [row.verdict for row in quiet.speedups if row.gated] == ["SHORT"]
    loud = run(Script(us=20.0, process_sigma=0.05), Script(us=19.5)).record
    assert all(row.noise_floor > 0.01 for row in loud.speedups)
    assert {row.verdict for row in loud.speedups if row.gated} <= {"NO EFFECT", "INCONCLUSIVE"}


@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [
        (Script(us=40.0), "SLOWER"),
        (Script(us=20.0), "NO EFFECT"),
        (Script(us=20.0 / 1.10), "SHORT"),
        (Script(us=20.0 / 1.15, process_sigma=0.1), "INCONCLUSIVE"),
    ],
)
def test_what_is_not_fast_enough_is_deferred(run: Callable[..., Outcome], candidate: Script, verdict: str) -> None:
    outcome = run(candidate=candidate)
    assert_deferred(outcome, "PERFORMANCE", verdict)
    record = outcome.record
    assert {row.verdict for row in record.speedups if row.gated} == {verdict}
    again = 2 if verdict == "INCONCLUSIVE" else 1  # measured once more, with twice the processes
    assert [row.processes for row in record.speedups] == [5 * again] * 2
    assert {t.timed_iters for t in record.candidate.timing} == {FEW["timed_iters"] * again}


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (behaviours.one_nan, "finite (1 of 2048 output elements are not finite"),
        (behaviours.one_infinity, "finite (1 of 2048 output elements are not finite"),
        (behaviours.one_wrong_element, "kernel_bound"),
        (behaviours.all_zeros, "kernel_relative_error"),
        (behaviours.nothing_written, "finite (2048 of 2048 output elements"),
        (behaviours.last_row_unwritten, "finite (64 of 2048 output elements"),
        (behaviours.changes_an_input, "memory (input 'k' was changed)"),
        (behaviours.writes_behind, "memory (memory around 'out' was written)"),
        (behaviours.writes_in_front, "memory (memory around 'q_scale' was written)"),
        (
            behaviours.races,
            "repeat (2 runs on the same input gave different bits (a race? float atomics have no fixed order))",
        ),
        (behaviours.right_for_one_seed, "b1_h1_s32_d64 seed 1: max_abs_err"),
        (behaviours.crashes, "ran (crash: the process ended during run (exit -11))"),
        (behaviours.hangs, "ran (hang: run did not end within 30 s"),
    ],
)
def test_what_is_not_correct_is_deferred_and_not_timed(
    run: Callable[..., Outcome], behave: Behaviour, reason: str
) -> None:
    outcome = run(candidate=Script(us=1.0, behave=behave))
    assert_deferred(outcome, "CORRECTNESS", reason)
    record = outcome.record
    assert all(row.passed for row in record.baseline.correctness)  # its own process goes on
    right_rows = {row.seed for row in record.candidate.correctness if row.passed}
    assert right_rows == ({0} if behave is behaviours.right_for_one_seed else set())


def test_a_wrong_baseline_is_no_baseline(run: Callable[..., Outcome]) -> None:
    outcome = run(baseline=Script(us=20.0, behave=behaviours.all_zeros))
    assert_deferred(outcome, "CORRECTNESS", "stage1 b1_h1_s32_d64 seed 0")
    assert all(row.passed for row in outcome.record.candidate.correctness)


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (behaviours.other_bits_later, "left other bits than the checked ones"),
        (behaviours.changes_an_input_later, "an access outside of its buffers, or a write to an input"),
        (behaviours.crashes_later, "crash: the process ended during prepare"),
        (behaviours.hangs_later, "hang: prepare did not end within 30 s"),
        (behaviours.writes_at_the_ends, "left other bits than the checked ones"),
        (behaviours.works_on_every_second_launch, "left other bits than the checked ones"),
        (behaviours.works_for_the_first_binding, "left other bits than the checked ones"),
        (behaviours.writes_the_previous_output, "left other bits than the checked ones"),
        (behaviours.keeps_results_by_address, "left other bits than the checked ones"),
        (behaviours.changes_an_input_in_between, "an access outside of its buffers, or a write to an input"),
        (behaviours.writes_behind_in_between, "left other bits than the checked ones"),
    ],
)
def test_what_goes_wrong_only_when_timed_leaves_no_timings(
    run: Callable[..., Outcome], behave: Behaviour, reason: str
) -> None:
    outcome = run(candidate=Script(us=1.0, behave=behave), warmup_iters=50)
    assert_deferred(outcome, "PERFORMANCE", reason)
    record = outcome.record
    if not reason.startswith(("crash", "hang", "an access")):
        (said,) = gate(record, "PERFORMANCE").reasons
        assert re.match(r"candidate b1_h1_s32_d64 seed [012]: launch \d+ of \d+ (left|changed) ", said), said
    assert record.gate_status("CORRECTNESS") == "PASS"
    assert (record.baseline.timing, record.candidate.timing, record.speedups) == ([], [], [])


def test_a_baseline_with_a_slow_replay_is_not_merged_against(
    run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured(family: Any, values: Mapping[str, int], *rest: Any, **names: Any) -> Program:
        return dataclasses.replace(render_program(family, values, *rest, **names), function_us=7.0)

    monkeypatch.setattr("greenfast.judge.implementation.render_program", captured)
    record = run(baseline=Script(us=10.0, sigma=0.0), candidate=Script(us=5.0, sigma=0.0)).record
    assert record.decision == "UNCHECKED"
    slow = "the replayed baseline is slower than the function: 10 µs, 7 µs"
    assert record.reasons == [f"PERFORMANCE: b1_h1_s32_d64: {slow}"]
    assert {row.function_us for side in (record.baseline, record.candidate) for row in side.timing} == {7.0}
    assert conclude(record) == record

    def slow_replay(function_us: float, gated: bool = True) -> str:
        rows = [msgspec.structs.replace(row, function_us=function_us) for row in record.baseline.timing]
        sides = rows, record.candidate.timing, record.baseline_again
        shape = "b1_h1_s32_d64"
        claim = Claim(confidence=0.95, required=0.0, gated=[shape] if gated else [])
        return speedup_row(*sides, shape, "warm", claim).slow_replay

    assert (slow_replay(7.0), slow_replay(7.6), slow_replay(7.7)) == (slow, slow.replace("7 µs", "7.6 µs"), "")
    assert (slow_replay(0.0), slow_replay(7.0, gated=False)) == ("", "")


BIG = dataclasses.replace(L4, sm_count=58, sm_clock_mhz=2040, memory_gb_s=300.0)


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_what_is_too_fast_to_be_true_is_no_record(run: Callable[..., Outcome], side: str) -> None:
    """The products and the output take an L4 0.4 ns at the least, whatever else a kernel does."""
    honest = run(device=BIG).record
    assert honest.decision == "MERGE"
    (floor,) = {row.floor for row in honest.candidate.timing}
    assert floor.startswith("0.00043")
    outcome = run(**{side: Script(us=0.0001)}, device=BIG)
    assert_deferred(outcome, "PERFORMANCE", f" µs, but the device cannot do it under {floor}: the measurement or the")
    (said,) = gate(outcome.record, "PERFORMANCE").reasons
    assert said.startswith(f"{side} b1_h1_s32_d64 seed 0, warm L2: ")


def test_an_unknown_device_has_no_floor_and_says_so(run: Callable[..., Outcome]) -> None:
    record = run(candidate=Script(us=0.01)).record
    assert record.decision == "MERGE"
    assert {row.floor for row in record.candidate.timing} == {
        "no floor: the device's multiprocessors and clock are not known"
    }


def test_what_was_drawn_and_the_clocks_are_recorded(run: Callable[..., Outcome]) -> None:
    record = run().record
    assert record.order_seed == 0  # the fake's first; drawn by the system otherwise
    for row in (*record.baseline.timing, *record.candidate.timing):
        shape = [len(process) for process in row.block_medians_us]
        assert [len(process) for process in row.block_mhz] == [len(process) for process in row.block_watts] == shape
        assert {mhz for process in row.block_mhz for mhz in process} == {2040.0}
        assert {watts for process in row.block_watts for watts in process} == {300.0}
    assert draw_order_seed() != draw_order_seed()
    assert 0 <= draw_order_seed() < 2**53


def edited_task(folder: Path, edit: Callable[[dict[str, Any]], None]) -> LoadedTask:
    """The attention task with its config changed, in a separate folder."""
    from_config = load_task(SDPA)
    config = json.loads(msgspec.json.encode(from_config.config))
    config |= {key: str(from_config.folder / config[key]) for key in ("family", "problem")}
    edit(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config_forward.json").write_text(json.dumps(config))
    return load(folder)


def rung(config: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in config["rungs"] if r["name"] == name)
    return found


@pytest.mark.parametrize(
    ("budget", "reason"),
    [({"registers": 8}, "registers is "), ({"smem_bytes": 100}, "the budget of stage2 allows 100")],
)
def test_a_budget_that_does_not_hold_defers(
    run: Callable[..., Outcome], tmp_path: Path, budget: dict[str, int], reason: str
) -> None:
    task = edited_task(tmp_path / "tiny", lambda c: rung(c, "stage2")["budget"].update(budget))
    outcome = run(task=task)
    assert_deferred(outcome, "RESOURCES", reason)
    assert outcome.record.gate_status("PERFORMANCE") == "PASS"  # what is correct is timed all the same


def test_a_promise_that_does_not_hold_defers(run: Callable[..., Outcome], tmp_path: Path) -> None:
    task = edited_task(tmp_path / "bold", lambda c: rung(c, "stage2").update(promises={"at_least": {"hmma": 1000}}))
    assert_deferred(run(task=task), "EVIDENCE", "promised >= 1000")


def test_a_promise_against_the_predecessor_that_does_not_hold_defers(
    run: Callable[..., Outcome], tmp_path: Path
) -> None:
    promises = {"more_than_predecessor": ["cp_async"]}
    task = edited_task(tmp_path / "bold", lambda c: rung(c, "stage2").update(promises=promises))
    assert_deferred(run(task=task), "EVIDENCE", "(stage1)")


BROKEN_FAMILY = """
from dataclasses import replace

render = kernel

def kernel(toggles, fmt, dims, *, instrumented=False):
    source = render(toggles, fmt, dims, instrumented=instrumented)
    if toggles["USE_WMMA_PV"]:
        source = replace(source, source=source.source + "\\nint broken() { return no_such_name; }\\n", name="mine.cu")
    return source
"""


def broken_task(folder: Path) -> LoadedTask:
    """The attention task, whose Stage 2 does not compile."""
    shutil.copytree(SDPA / "kernels", folder)
    with (folder / "family.py").open("a") as family:
        family.write(BROKEN_FAMILY)
    return edited_task(folder, lambda c: c.update(family="family.py"))


def test_a_variant_that_does_not_compile_defers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = request(tmp_path / "results", task=broken_task(tmp_path / "broken"))
    install(monkeypatch, FakeDevice(asked))
    outcome = validate(asked, *rungs(asked, "stage1", "stage2"), Watcher(), profile=False)
    record = outcome.record
    assert record.decision == "DEFER"
    assert statuses(record) == {"BUILD": "FAIL"} | dict.fromkeys(list(GATES)[1:], "PENDING")
    (reason,) = gate(record, "BUILD").reasons
    assert "mine.cu(" in reason
    assert "no_such_name" in reason
    assert [len(side.builds) for side in (record.baseline, record.candidate)] == [1, 0]
    assert record.candidate.timing == record.baseline.timing == []


def test_too_few_processes_support_no_claim(run: Callable[..., Outcome]) -> None:
    assert_deferred(run(processes=2), "PERFORMANCE", "2 process(es): a claim needs at least 3")


def test_too_few_blocks_for_the_processes_support_no_claim(run: Callable[..., Outcome]) -> None:
    """Two blocks cannot be spread over five processes."""
    assert_deferred(run(timed_iters=2, blocks=2), "PERFORMANCE", "only 2 of 5 processes have timings; a claim needs")


def test_a_device_at_a_low_clock_supports_no_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = request(tmp_path)
    clock = lambda block: 2040.0 if block == 0 else 1000.0  # noqa: E731
    device = FakeDevice(asked, {"stage1": SLOW, "stage2": FAST}, clock=clock)
    install(monkeypatch, device)
    outcome = validate(asked, *rungs(asked, "stage1", "stage2"), Watcher(), profile=False)
    assert outcome.record.gate_status("PERFORMANCE") == "FAIL"
    assert outcome.record.speedups == []


def test_every_toggle_of_a_variant_that_is_no_rung_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = request(tmp_path)
    config = asked.task.config
    toggles = "USE_WMMA_PV=1,USE_KV_LUT=1,USE_FUSED_SOFTMAX_PV=1"
    install(monkeypatch, FakeDevice(asked, {"stage1": SLOW}, default=Script(us=10.0, behave=right)))
    record = validate(asked, *rungs(asked, "stage1", toggles), Watcher(), profile=False).record
    assert record.decision == "MERGE"
    on = {name for name, value in record.candidate.toggles.items() if value}
    assert on == {"USE_CP_ASYNC", "USE_WMMA_QK", "USE_WMMA_PV", "USE_FUSED_SOFTMAX_PV", "USE_KV_LUT"}
    assert set(record.candidate.toggles) == set(config.toggles)
    assert "no rung, so nothing is promised" in gate(record, "EVIDENCE").summary
