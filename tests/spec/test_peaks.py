"""Peaks against the vendor's data sheets (dense, at the boost clock that each sheet assumes)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greenfast.spec.facts import DeviceInfo
from greenfast.spec.limits import Peaks, get_peaks, least_times_us

H200 = DeviceInfo(
    kind="gpu",
    name="NVIDIA H200",
    compute_capability="9.0",
    cuda_version="13.0",
    driver="580",
    sm_count=132,
    sm_clock_mhz=1830,
)


@pytest.mark.parametrize(
    ("name", "capability", "sms", "mhz", "fmt", "teraflops", "terabytes"),
    [
        ("NVIDIA H200", "9.0", 132, 1830, "e4m3", 1979, 4.8),
        ("NVIDIA H100 80GB HBM3", "9.0", 132, 1830, "fp16", 989, 3.35),
        ("NVIDIA GH200 480GB", "9.0", 132, 1830, "int8", 1979, 4.9),
        ("NVIDIA L4", "8.9", 58, 2040, "int8", 242, 0.3),
        ("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410, "bf16", 312, 2.039),
        ("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410, "e4m3", 624, 2.039),  # has no FP8: its fastest products
        ("NVIDIA A10", "8.6", 72, 1695, "fp16", 125, 0.6),
        ("NVIDIA H200 of tomorrow", "9.0", 132, 1830, "fp3", 1979, 4.8),  # a format that is not known
        ("some GPU", "9.0", 132, 1830, "e4m3", 1979, 0),
    ],
)
def test_data_sheets(
    name: str, capability: str, sms: int, mhz: int, fmt: str, teraflops: float, terabytes: float
) -> None:
    device = replace(H200, name=name, compute_capability=capability, sm_count=sms, sm_clock_mhz=mhz)
    found = get_peaks(device, fmt)
    assert found is not None
    assert found.matrix_flops / 1e12 == pytest.approx(teraflops, rel=0.01)
    assert found.memory_bytes / 1e12 == terabytes


@pytest.mark.parametrize(
    "device", [None, replace(H200, kind="emulated"), replace(H200, sm_count=0), replace(H200, compute_capability="7.0")]
)
def test_no_peaks_of_what_is_not_known(device: DeviceInfo | None) -> None:
    assert get_peaks(device, "e4m3") is None


def test_least_times_by_hand() -> None:
    peaks = Peaks(matrix_flops=1e12, exponentials=1e9, memory_bytes=1e9)
    least = {"matrix_flops": 3_000_000, "exponentials": 5000}
    assert least_times_us(least, 7000, peaks) == pytest.approx({"matrix": 3.0, "exponentials": 5.0, "memory": 7.0})
    assert least_times_us({}, 0, peaks) == {}
    assert least_times_us(least, 7000, replace(peaks, memory_bytes=0.0)).keys() == {"matrix", "exponentials"}
