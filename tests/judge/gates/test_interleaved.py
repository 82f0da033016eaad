"""Interleaved timing on a fake device: which kernel is timed when, how often, and what a low clock costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from greenfast.device.worker import WorkerError
from greenfast.judge.gates.sides import build_side
from greenfast.judge.task import Timing
from greenfast.judge.timing.interleaved import COLD, MIN_CLOCK_SHARE, WARM, Cell, Measurement, measure
from tests.fakes import CLOCK_MHZ, Call, CrashError, FakeDevice, Script, TimedBlock, install, request

LABELS = {"baseline": "stage1", "candidate": "stage2"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    asked = request(tmp_path)
    return install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=10.0)}))


def run(device: FakeDevice, timing: Timing | None = None, *, order_seed: int = 0) -> Measurement:
    r = device.request
    kernels = {}
    for label, name in LABELS.items():
        side = build_side(label, r.task.family, r.task.config.variant(name), r.format, r.shapes, r.target)
        kernels[label] = {shape.name: side.executable(shape.name) for shape in r.shapes}
    cells = [
        Cell(shape.name, seed, r.task.problem.make_case(shape.dims, seed, r.format))
        for shape in r.shapes
        for seed in r.seeds
    ]
    return measure(
        kernels, cells, timing or r.timing, device.make_worker, lambda share, text: None, order_seed=order_seed
    )


def rounds(timed: list[TimedBlock]) -> list[tuple[str, ...]]:
    """The order of the two variants in each block."""
    names = [t.variant for t in timed]
    return [tuple(names[i : i + 2]) for i in range(0, len(names), 2)]


def test_each_block_times_both_sides_in_random_order(device: FakeDevice) -> None:
    run(device)
    orders = rounds(device.timed)
    assert {tuple(sorted(order)) for order in orders} == {("stage1", "stage2")}
    first = Counter(order[0] for order in orders)
    assert len(orders) == 20 * 2 * 2  # blocks, seeds, caches
    assert min(first.values()) > 20
    assert max(len(list(group)) for _, group in groupby(orders)) > 1  # random, not alternating


def test_the_order_is_the_seeds(device: FakeDevice) -> None:
    seen = []
    for order_seed in (0, 0, 1):
        run(device, order_seed=order_seed)
        seen.append(rounds(device.timed))
        device.timed.clear()
    assert seen[0] == seen[1] != seen[2]


def test_both_sides_get_the_same_blocks_of_the_same_inputs(device: FakeDevice) -> None:
    run(device)
    per_side = [
        Counter((t.digest, t.cold, t.iters, t.warmup) for t in device.timed if t.variant == name)
        for name in ("stage1", "stage2")
    ]
    assert per_side[0] == per_side[1]
    assert {cold for _, cold, _, _ in per_side[0]} == {False, True}
    assert len({digest for digest, *_ in per_side[0]}) == 2  # two seeds


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
        (Timing(timed_iters=100), [4] * 5),
        (Timing(timed_iters=30), [4] * 5),
        (Timing(timed_iters=50, processes=3), [7, 7, 6]),
        (Timing(timed_iters=1000, processes=10, blocks=40), [4] * 10),
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
        sizes = {len(block) for process in timed.blocks for block in process}
        assert max(sizes) - min(sizes) <= 1
        assert timed.discarded == 0


def test_the_default_is_500_launches(device: FakeDevice) -> None:
    assert {len(timed.samples) for timed in run(device).timed.values()} == {500}


def test_every_case_is_warmed_up_before_it_is_timed(device: FakeDevice) -> None:
    run(device, Timing(warmup_iters=37, timed_iters=20, processes=2, blocks=2))
    launches_per_binding = 1 + 37 + 2 * 1 * (5 + 10)  # its first run; two caches, one block, five untimed
    assert device.launches == launches_per_binding * 2 * 2 * 2  # labels, seeds, processes


def test_what_the_last_launches_left_is_kept(device: FakeDevice) -> None:
    result = run(device)
    assert {key: len(finals) for key, finals in result.finals.items()} == {
        (label, "b1_h1_s32_d64", seed): 5 for label in LABELS for seed in (0, 1)
    }
    case = device.request.task.problem.make_case(device.request.shapes[0].dims, 1, "e4m3")
    expected = device.right(case.digest)["out"]
    for label in LABELS:
        for final in result.finals[label, "b1_h1_s32_d64", 1]:
            assert final.violations == []
            assert final.outputs["out"].tobytes() == expected.tobytes()


def test_nothing_stays_on_the_device(device: FakeDevice) -> None:
    run(device)
    assert device.memory.allocations == 0


def low_at(*blocks: int, share: float = 0.5) -> Callable[[int], float]:
    """A clock that is low at these calls of Worker.time."""
    return lambda block: CLOCK_MHZ * (share if block in blocks else 1.0)


def test_a_block_at_a_low_clock_costs_the_pair(device: FakeDevice) -> None:
    """Both sides of the block go, and both are counted, or the others would be paired wrongly."""
    device.clock = low_at(7, 81)  # the second one of its pair; the first one of another's
    result = run(device)
    lost = {key: timed.discarded for key, timed in result.timed.items() if timed.discarded}
    hit = {(device.timed[i].digest, device.timed[i].cold) for i in (7, 81)}
    assert len(hit) == 2
    assert len(lost) == 4
    assert set(lost.values()) == {25}
    for timed in result.timed.values():
        assert len(timed.samples) + timed.discarded == 500
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
    assert sum(timed.discarded for timed in result.timed.values()) == 0


def test_a_crash_ends_the_measurement_and_every_process(device: FakeDevice) -> None:
    def crash(call: Call) -> None:
        raise CrashError

    device.scripts["stage2"] = Script(behave=crash)
    with pytest.raises(WorkerError, match="crash: the process ended during prepare"):
        run(device)
    assert len(device.workers) == 2
    assert all(worker.closed for worker in device.workers)
