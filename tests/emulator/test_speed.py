"""The benchmark of the emulator's speed: its three tables match their headings."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from benchmarks.emulator_speed import FUNCTIONS, KINDS, SPEED, measure_functions, measure_kinds, measure_speed

JOB = ("stage2", "small")


def share(cell: str) -> float:
    return float(cell.removesuffix(" %"))


def test_speed_and_memory_of_a_rung() -> None:
    # The peak is of a whole process, and other tests need memory in this one.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        row = dict(zip(SPEED, pool.submit(measure_speed, JOB).result(), strict=True))
    assert (row["variant"], row["shape"]) == JOB
    per_second = float(row["thread instructions/s"]) / float(row["warp instructions/s"])
    assert 25 < per_second <= 32.5  # nearly all warps are whole
    assert 0.05 < float(row["peak GiB"]) < 4


def test_time_by_kind_adds_up() -> None:
    rows = [dict(zip(KINDS, row, strict=True)) for row in measure_kinds(JOB)]
    by_kind = {row["kind"]: row for row in rows}
    assert int(by_kind["wmma.mma.sync"]["warp instructions"]) == 32
    assert float(by_kind["wmma.mma.sync"]["warp instructions/s"]) > 0
    assert 80 < sum(share(row["share"]) for row in rows) <= 100.5  # rare kinds are left out


def test_time_by_function_is_largest_first() -> None:
    rows = [dict(zip(FUNCTIONS, row, strict=True)) for row in measure_functions(JOB)]
    shares = [share(row["share"]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert any("_run_fragment" in row["function"] for row in rows)
