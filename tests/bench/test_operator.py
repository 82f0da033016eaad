"""``greenfast bench --operator``, with measurements made up here: the record, the report, and what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenfast.bench import operator as operator_bench
from greenfast.bench import operator_calls as measure
from greenfast.bench.operator import freshness, read_operator_record, timed_kernels
from greenfast.bench.operator_record import SpeedRow
from greenfast.bench.operator_report import report
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.freshness import Freshness
from tests.bench.test_operator_report import operator_record
from tests.cli.command_line import run_here


class Board:
    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def info(self) -> Any:
        return operator_record().device

    def clocks(self) -> dict[str, float]:
        return {"sm_mhz": 1700.0, "temperature_c": 60.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = operator_record()

    def speed(dims: dict[str, int]) -> list[SpeedRow]:
        return [row for row in made.speed if row.dims == dims]

    shapes = [dict(pairs) for pairs in dict.fromkeys(tuple(row.dims.items()) for row in made.speed)]
    monkeypatch.setattr(operator_bench, "Gpu", Board)
    for name, value in (
        ("require_gpu", lambda: None), ("shapes", lambda: iter(shapes)), ("speed", speed), ("host", lambda: made.host),
        ("errors", lambda kind: made.errors), ("library_versions", lambda: {"torch": "2"}),
    ):  # fmt: skip
        monkeypatch.setattr(measure, name, value)


@pytest.mark.usefixtures("measured")
def test_a_run_leaves_its_record_and_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_here(capsys, "bench", "--operator", "--out", tmp_path)
    assert ran.code == 0, ran.err
    folder = Path(ran.out.splitlines()[-1])
    record = read_operator_record(folder / "record.json")
    assert record.command.startswith("greenfast bench --operator")
    assert record.kernels == timed_kernels()
    assert freshness(record) == Freshness()
    assert record.speed[0].clocks == {"sm_mhz": 1700.0, "temperature_c": 60.0}
    assert (folder / "VALIDATION_REPORT.md").read_text(encoding="utf-8") == report(record)
    assert "1.50x at S=4096" in ran.out
    assert "B=1 H=16 S=4096 D=128: sdpa fp8 100.0" in ran.out


@pytest.mark.usefixtures("measured")
def test_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run_here(capsys, "bench", "--operator", "--json", "--out", tmp_path)
    assert ran.out.startswith("{")
    assert '"call": "sdpa fp8"' in ran.out


@pytest.mark.usefixtures("measured")
def test_nothing_is_left_of_a_run_that_breaks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise MachineError("the board fell off")

    monkeypatch.setattr(measure, "host", broken)
    ran = run_here(capsys, "bench", "--operator", "--out", tmp_path)
    assert ran.code == 3
    assert "the board fell off" in ran.err
    assert list(tmp_path.glob("**/record.json")) == []


def test_another_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"kind": "peers"}')
    with pytest.raises(UsageError, match="record of the operator"):
        read_operator_record(tmp_path / "record.json")
