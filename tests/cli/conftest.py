"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest

from tests.cli.command_line import MACHINE_VARIABLES
from tests.fakes import emulate_here, import_families_here, no_gpu, shipped


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
