"""Interleaved timing on a fake device: which kernel is timed when, how often, and what a low clock costs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from greenfast.device.session import output_digest
from greenfast.device.worker import WorkerError
from greenfast.judge.implementation import build_side
from greenfast.judge.request import timed_seeds
from greenfast.judge.task import Timing
from greenfast.judge.timing import interleaved
from greenfast.judge.timing.interleaved import COLD, MIN_CLOCK_SHARE, WARM, Cell, Measurement, measure
from tests.fakes import CLOCK_MHZ, Call, CrashError, FakeDevice, Script, TimedBlock, install, request

#: As it is without the fake device, which sets a smaller one.
BLOCK_WARMUP = interleaved._BLOCK_WARMUP

LABELS = {"baseline": "stage1", "candidate": "stage2"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    asked = request(tmp_path, warmup_iters=5, timed_iters=60)
    return install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=10.0)}))


def run(device: FakeDevice, timing: Timing | None = None, *, order_seed: int = 0) -> Measurement:
    r = device.request
    kernels = {}
    for label, name in LABELS.items():
        side = build_side(label, r.task.family, r.task.config.variant(name), r.format, r.shapes, r.target)
        kernels[label] = {shape.name: side.executable(shape.name) for shape in r.shapes}
    cells = [
        Cell(
            shape.name,
            {seed: r.task.problem.make_case(shape.dims, seed, r.format) for seed in timed_seeds(r.seeds)},
            r.seeds,
        )
        for shape in r.shapes
    ]
    return measure(
        kernels, cells, timing or r.timing, device.make_worker, lambda share, text: None, order_seed=order_seed
    )


def rounds(timed: list[TimedBlock]) -> list[tuple[str, ...]]:
    """The order of the two variants in each block."""
    names = [t.variant for t in timed]
    return [tuple(names[i : i + 2]) for i in range(0, len(names), 2)]


def test_each_block_times_both_sides_in_balanced_random_order(device: FakeDevice) -> None:
    run(device)
    orders = rounds(device.timed)
    assert {tuple(sorted(order)) for order in orders} == {("stage1", "stage2")}
    first = Counter(order[0] for order in orders)
    assert len(orders) == 20 * 2 * 2  # blocks, seeds, caches
    assert first["stage1"] == first["stage2"]
    assert max(len(list(group)) for _, group in groupby(orders)) > 1  # random, not alternating


def test_all_draws_are_the_seeds(device: FakeDevice) -> None:
    seen = []
    for order_seed in (0, 0, 1):
        assert run(device, order_seed=order_seed).order_seed == order_seed
        seen.append([dataclasses.replace(t, process=0) for t in device.timed])
        device.timed.clear()
    assert seen[0] == seen[1] != seen[2]
    assert rounds(seen[0]) != rounds(seen[2])
    assert [t.iters for t in seen[0]] != [t.iters for t in seen[2]]


def test_both_sides_get_the_same_blocks(device: FakeDevice) -> None:
    run(device)
    per_side = [
        [(t.key, t.cold, t.iters, t.warmup) for t in device.timed if t.variant == name] for name in ("stage1", "stage2")
    ]
    assert per_side[0] == per_side[1]
    assert {cold for _, cold, _, _ in per_side[0]} == {False, True}
    assert len({iters for _, _, iters, _ in per_side[0]}) > 1  # which no kernel can know
    assert len({warmup for *_, warmup in per_side[0]}) > 1


def test_processes_are_fresh_and_never_shared(device: FakeDevice) -> None:
    run(device)
    assert len(device.workers) == 5 * 2
    variants = {(t.process, t.variant) for t in device.timed}
    assert len(variants) == len({process for process, _ in variants}) == 10
    assert all(worker.closed for worker in device.workers)


@pytest.mark.parametrize(
    ("timing", "blocks"),
    [
        (Timing(), [4] * 5),
        (Timing(timed_iters=30), [4] * 5),
        (Timing(timed_iters=50, processes=3), [7, 7, 6]),
        (Timing(timed_iters=80, processes=10, blocks=40), [4] * 10),
        (Timing(timed_iters=7, processes=1, blocks=2), [2]),
    ],
)
def test_as_many_launches_are_timed_as_asked(device: FakeDevice, timing: Timing, blocks: list[int]) -> None:
    result = run(device, timing)
    assert set(result.timed) == {
        (label, "b1_h1_s32_d64", seed, cache) for label in LABELS for seed in (0, 1) for cache in (WARM, COLD)
    }
    for timed in result.timed.values():
        assert len(timed.samples) == timing.timed_iters
        assert [len(process) for process in timed.blocks] == blocks
        sizes = [len(block) for process in timed.blocks for block in process]
        assert min(sizes) >= timing.timed_iters // timing.blocks * 2 // 3
        assert timed.discarded == 0


def test_every_process_is_warmed_up_before_it_is_timed(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "_BLOCK_WARMUP", BLOCK_WARMUP)
    run(device, Timing(warmup_iters=37, timed_iters=20, processes=2, blocks=2))
    prepared = device.launches - sum(t.warmup + t.iters for t in device.timed)
    processes = 2 * 2  # labels
    first = 3  # launches, one of each case
    assert processes * (first + 37) <= prepared <= processes * (first + 37 + 18)
    assert all(5 <= t.warmup <= 7 for t in device.timed)


def test_what_the_first_launches_left_is_kept(device: FakeDevice) -> None:
    result = run(device)
    dims = tuple(device.request.shapes[0].dims.items())
    assert result.digests == {
        (label, "b1_h1_s32_d64", seed): [output_digest(device.case(dims, seed)[1])] * 5
        for label in LABELS
        for seed in (0, 1, 2)
    }


def test_clocks_are_kept_for_each_block(device: FakeDevice) -> None:
    device.clock = lambda block: CLOCK_MHZ * (0.8 if block == 7 else 1.0)
    result = run(device)
    for timed in result.timed.values():
        for name in ("sm_mhz", "power_w"):
            assert [len(process) for process in timed.read(name)] == [len(process) for process in timed.blocks]
    slow = [mhz for t in result.timed.values() for process in t.read("sm_mhz") for mhz in process if mhz < CLOCK_MHZ]
    assert slow == [0.8 * CLOCK_MHZ]


def test_nothing_that_was_bound_stays_on_the_device(device: FakeDevice) -> None:
    run(device)
    assert device.memory.allocations == len(device.workers)  # what a process writes over the L2 cache with


def low_at(*blocks: int, share: float = 0.5) -> Callable[[int], float]:
    """A clock that is low at these calls of Worker.time."""
    return lambda block: CLOCK_MHZ * (share if block in blocks else 1.0)


def test_a_block_at_a_low_clock_costs_the_pair(device: FakeDevice) -> None:
    """Both sides of the block go, and both are counted, or the others would be paired wrongly."""
    device.clock = low_at(7, 81)  # the second one of its pair; the first one of another's
    result = run(device)
    lost = {key: timed.discarded for key, timed in result.timed.items() if timed.discarded}
    assert len(lost) == 4
    assert sorted(lost.values()) == sorted([device.timed[i].iters for i in (7, 81)] * 2)
    for timed in result.timed.values():
        assert len(timed.samples) + timed.discarded == 60
    for (_, shape, seed, cache), timed in result.timed.items():
        twin = result.timed["baseline", shape, seed, cache]
        assert [len(p) for p in timed.blocks] == [len(p) for p in twin.blocks]


@pytest.mark.parametrize(("share", "discards"), [(MIN_CLOCK_SHARE + 0.01, False), (MIN_CLOCK_SHARE - 0.01, True)])
def test_a_clock_is_low_below_three_quarters_of_the_first(device: FakeDevice, share: float, discards: bool) -> None:
    device.clock = low_at(3, share=share)
    result = run(device)
    assert any(timed.discarded for timed in result.timed.values()) is discards
    assert result.clocks["sm_mhz_first"] == result.clocks["sm_mhz_max"] == CLOCK_MHZ
    assert result.clocks["sm_mhz_min"] == pytest.approx(share * CLOCK_MHZ)


def test_a_machine_that_hides_its_clock_loses_nothing(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.FakeGpu.clocks", lambda self: {})
    result = run(device)
    assert result.clocks == {}
    assert all(timed.read("sm_mhz") == [] for timed in result.timed.values())
    assert sum(timed.discarded for timed in result.timed.values()) == 0


def test_a_crash_ends_the_measurement_and_every_process(device: FakeDevice) -> None:
    def crash(call: Call) -> None:
        raise CrashError

    device.scripts["stage2"] = Script(behave=crash)
    with pytest.raises(WorkerError, match="crash: the process ended during prepare"):
        run(device)
    assert len(device.workers) == 2
    assert all(worker.closed for worker in device.workers)
