"""The least time of a launch: what no device can undercut, and nothing where that is not known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from greenfast.judge.record_io import read_content
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.limits import compute_floor
from tasks.fp8_attention.problem import least_work

EVIDENCE = Path(__file__).parents[2] / "evidence"
H100 = DeviceInfo(
    kind="gpu", name="H100", compute_capability="9.0", cuda_version="13.0", driver="580", sm_count=132,
    sm_clock_mhz=1980, memory_gb_s=3352.3,
)  # fmt: skip


def test_products_take_their_share_of_the_peak() -> None:
    floor = compute_floor(H100, {"matrix_flops": 4 * 10**12}, 0, cold=False)
    assert floor.us == pytest.approx(4e12 / (132 * 1.98e9 * 8192) / 1.25 * 1e6)
    assert str(floor) == "1.49e+03 µs (4 TFLOP at 2.14 PFLOP/s)"


def test_what_is_loaded_comes_from_memory_where_the_cache_is_cold() -> None:
    work = {"global_load_bytes": 10**9}
    cold, warm = (compute_floor(H100, work, 0, cold=cold) for cold in (True, False))
    assert cold.us == pytest.approx(1e9 / 3352.3e9 / 1.25 * 1e6)
    assert cold.why == "1 GB loaded at 3.35 TB/s"
    assert warm.us == pytest.approx(1e9 / (132 * 1.98e9 * 128) / 1.25 * 1e6)
    hidden = compute_floor(dataclasses.replace(H100, memory_gb_s=0.0), work, 0, cold=True)
    assert hidden == warm


def test_outputs_count_without_being_asked_for() -> None:
    assert compute_floor(H100, {}, 10**9, cold=True).why == "1 GB stored at 33.5 TB/s"
    assert compute_floor(H100, {"global_store_bytes": 2 * 10**9}, 10**9, cold=True).why.startswith("2 GB stored")


def test_the_slowest_of_them_is_the_floor() -> None:
    work = {"matrix_flops": 10**9, "global_load_bytes": 10**9, "exponentials": 10**12}
    assert "loaded" in compute_floor(H100, work, 0, cold=True).why
    assert "FLOP" in compute_floor(H100, {**work, "matrix_flops": 10**12}, 0, cold=True).why


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (None, "multiprocessors and clock are not known"),
        (dataclasses.replace(H100, sm_clock_mhz=0), "multiprocessors and clock are not known"),
        (dataclasses.replace(H100, compute_capability="13.1"), "no peak of compute capability 13.1"),
    ],
)
def test_an_unknown_device_has_no_floor(device: DeviceInfo | None, why: str) -> None:
    floor = compute_floor(device, {"matrix_flops": 10**12}, 0, cold=True)
    assert floor.us == 0
    assert str(floor).startswith("no floor: ")
    assert why in str(floor)


@pytest.mark.parametrize("file", sorted(EVIDENCE.glob("h?00/fp8_attention-*/record.json")), ids=lambda f: f.parent.name)
def test_kernels_that_were_measured_are_above_it(file: Path) -> None:
    record = read_content(file)
    device = dataclasses.replace(
        H100, sm_count=record["device"]["sm_count"], sm_clock_mhz=record["device"]["sm_clock_mhz"]
    )
    for side in ("baseline", "candidate", "side"):
        for row in record.get(side, {}).get("timing", []):
            floor = compute_floor(device, least_work(row["dims"]), 0, cold=row["cache"] == "cold")
            assert 0 < floor.us < min(us for process in row["block_medians_us"] for us in process)
