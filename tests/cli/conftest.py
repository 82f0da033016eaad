"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command_line import MACHINE_VARIABLES
from tests.fakes import FakeDevice, Script, emulate_here, import_families_here, install, no_gpu, request, shipped


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU (a test may install a fake one) or a profiler, with nothing set in the environment."""
    for name in (*MACHINE_VARIABLES, *shipped("fp8_sdpa").config.toggles):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("greenfast.judge.profiling.ncu", lambda: None)
    monkeypatch.setattr("greenfast.judge.validate.save_plot", lambda record, path: path.touch())  # slow to draw
    no_gpu(monkeypatch)


@pytest.fixture
def emulator_here(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator runs in the process of the test."""
    emulate_here(monkeypatch)


@pytest.fixture
def families_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of families runs in the process of the test, for tests of anything else."""
    import_families_here(monkeypatch)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDevice:
    """An L4 on which Stage 2 takes half the time of Stage 1."""
    asked = request(tmp_path, seeds=(0,))
    return install(monkeypatch, FakeDevice(asked, {"stage1": Script(us=20.0), "stage2": Script(us=10.0)}))
