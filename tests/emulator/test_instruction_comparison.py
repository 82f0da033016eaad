"""The comparison with a GPU (benchmarks/emulator_instructions.py), with a device that is made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import emulator_instructions as benchmark
from greenfast.device.session import KernelImage
from greenfast.device.worker import WorkerError
from greenfast.spec.arch import Target
from tests.emulator.instructions.case import Case, Words
from tests.emulator.instructions.catalog import CASES

TARGET = Target("sm_90a")
BY_NAME = {case.name: case for case in CASES}
UNIT = [BY_NAME[name] for name in ("add.s32", "ex2.approx.f32", "div.u32")]


class FakeDevice(benchmark.Device):
    """A device with the definitions' results, bits of some rows flipped."""

    def __init__(self, flipped: dict[int, int]) -> None:
        super().__init__(0)
        self._flipped = flipped

    def run(self, image: KernelImage, case: Case, x: Words) -> Words:
        y = case.expected([column.astype(np.uint64) for column in x.T])[0].astype(np.uint32).reshape(-1, 1)
        for row, bits in self._flipped.items():
            y[row] ^= np.uint32(bits)
        return y


def rows_of(device: Any, unit: list[Case] = UNIT) -> dict[str, dict[str, Any]]:
    result = (benchmark.try_case(case, image, device, 256) for case, image in benchmark.build_images(unit, TARGET))
    return {row["instruction"]: row for row in result}


def test_a_wrong_bit_is_shown_with_its_operands_and_both_results() -> None:
    rows = rows_of(FakeDevice({2: 1, 3: 1 << 31, 4: 1}))
    assert rows["add.s32"]["wrong"] == 3
    assert rows["add.s32"]["identical"] == 253
    operands, results = rows["add.s32"]["examples_wrong"][0].split(" -> ")
    emulated, device = (int(word, 16) for word in results.split(" | "))
    assert emulated == sum(int(word, 16) for word in operands.split()) % 2**32
    assert device == emulated ^ 1
    assert rows["ex2.approx.f32"]["wrong"] < 3  # one unit in the last place is within its bound
    assert rows["ex2.approx.f32"]["max_ulp"] >= 1


def test_what_the_isa_leaves_open_is_counted_apart() -> None:
    operands = BY_NAME["div.u32"].operands(256)
    zero = int(np.flatnonzero(operands[1] == 0)[0])
    row = rows_of(FakeDevice({zero: 0xFF}))["div.u32"]
    assert (row["wrong"], row["undefined_and_different"]) == (0, 1)
    assert len(row["examples_undefined"]) == 1


def test_one_instruction_that_fails_does_not_stop_the_others() -> None:
    class Broken(FakeDevice):
        def run(self, image: KernelImage, case: Case, x: Words) -> Words:
            if case.name == "ex2.approx.f32":
                raise WorkerError("run: CUDA: illegal instruction")
            return super().run(image, case, x)

    refused = replace(UNIT[0], name="none.s32", body='asm volatile("none.s32 %0, %1;" : "=r"(d0) : "r"(a0));')
    unknown = replace(
        UNIT[0], name="stacksave", body='long long r; asm volatile("stacksave.u64 %0;" : "=l"(r)); d0 = r;'
    )
    rows = rows_of(Broken({}), [*UNIT, refused, unknown])
    assert "does not compile" in rows["none.s32"]["error"]
    assert "illegal instruction" in rows["ex2.approx.f32"]["error"]
    assert "stacksave.u64 is not known to the emulator" in rows["stacksave"]["error"]
    assert rows["add.s32"]["identical"] == rows["div.u32"]["identical"] == 256


def test_a_device_that_always_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoWorker:
        started = 0

        def __init__(self, *_: object, **__: object) -> None:
            NoWorker.started += 1

        def run(self, *_: object) -> None:
            raise WorkerError("crash")

    monkeypatch.setattr(benchmark, "Worker", NoWorker)
    device = benchmark.Device(0)
    (case, image), *_ = benchmark.build_images(UNIT, TARGET)
    assert isinstance(image, KernelImage)
    for n in range(benchmark.MAX_FAILURES + 5):
        with pytest.raises(WorkerError, match="crash" if n < benchmark.MAX_FAILURES else "failed one after the other"):
            device.run(image, case, np.zeros((128, 2), np.uint32))
    assert NoWorker.started == benchmark.MAX_FAILURES


def test_the_script_writes_a_record_and_needs_a_gpu_for_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.json"
    argv = ["--json", str(record), "--rows", "128", "--only", "prmt"]
    assert benchmark.main([*argv, "--device", "emulator"]) == 0
    assert "7 instructions" in capsys.readouterr().out
    result = json.loads(record.read_text())
    assert (result["reference"], len(result["rows"])) == ("definitions", 7)
    monkeypatch.setattr("greenfast.judge.request.device_count", lambda: 0)
    assert benchmark.main(argv) == 3
    assert "no comparison without a GPU" in capsys.readouterr().out
