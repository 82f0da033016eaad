"""The report of a run of the operator, from a record made up here."""

from __future__ import annotations

from greenfast.bench.operator_record import ErrorRow, HostRow, OperatorRecord, SpeedRow
from greenfast.bench.operator_report import headline, report, tables
from greenfast.judge.record import GitState
from greenfast.spec.facts import DeviceInfo
from greenfast.spec.freshness import Freshness

DIMS = {"B": 1, "H": 16, "S": 4096, "D": 128}
TIMES = {
    "sdpa fp8": 100.0, "sdpa int8": 125.0, "quantize fp8": 20.0, "copy": 15.0, "attention fp8": 80.0,
    "torch flash": 300.0, "torch cudnn": 150.0,
}  # fmt: skip


def operator_record(**clocks: float) -> OperatorRecord:
    speed = [
        SpeedRow(
            call=call, dims=dims, median_us=us, p25_us=us, p75_us=us, rounds=9, calls=1, clocks=clocks
        )
        for dims in (DIMS, {**DIMS, "CAUSAL": 1})
        for call, us in TIMES.items()
    ]  # fmt: skip
    return OperatorRecord(
        created="2026-01-02T03:04:05", command="greenfast bench --operator", package_version="0",
        git=GitState(sha="0123456789abcdef", branch="main", dirty=False),
        device=DeviceInfo(kind="gpu", name="GPU", compute_capability="9.0", cuda_version="13.0", driver="580"),
        environment={"torch": "2"}, kernels={},
        speed=speed,
        host=[HostRow(call="torch", dims=DIMS, median_us=16.0, least_us=15.0, batches=2, calls=3)],
        errors=[
            ErrorRow(call="sdpa fp8", inputs="normal", dims=DIMS, error=0.05),
            ErrorRow(call="FA3 FP8", inputs="normal", dims=DIMS, reason="not installed"),
        ],
    )  # fmt: skip


def test_speed_is_beside_the_faster_backend() -> None:
    text = report(operator_record())
    assert "| 1, 16, 4096, 128 | full | 100 | 125 | 20 | 80 | 150 | 1.50x | 1.20x |" in text
    assert "| 1, 16, 4096, 128 | causal | 100 |" in text
    assert "1.50x at S=4096" in headline(operator_record())


def test_quantization_counts_three_bytes_an_element_beside_a_copy() -> None:
    rate = 3 * 3 * 16 * 4096 * 128 / 20 / 1e6
    text = report(operator_record())
    assert f"| 1, 16, 4096, 128 | 20 | {rate:.2f} | 75 % |" in text
    assert text.count("| 75 % |") == 1, "once a shape, whatever the mask"


def test_host_times_errors_and_what_is_missing() -> None:
    text = report(operator_record())
    assert "| torch | 16.0 | 15.0 |" in text
    assert "| inputs | D | sdpa fp8 | FA3 FP8 |" in text
    assert "| normal | 128 | 0.0500 | - |" in text


def test_a_stale_record_says_so() -> None:
    assert tables(operator_record(), Freshness("stale", ("the grid differs",))).startswith(
        "Stale: the grid differs. Measured"
    )
    assert tables(operator_record()).startswith("Measured")


def test_clocks_are_told_where_they_are_known() -> None:
    assert "SM clock" not in report(operator_record())
    hot = report(operator_record(sm_mhz=900.0, temperature_c=88.0))
    assert "SM clock 900 to 900 MHz at 88 to 88 °C." in hot
