"""Fixtures of the pipeline's tests."""

from __future__ import annotations

import pytest

from tests.cli.conftest import families_here as families_here
from tests.fakes import no_gpu


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU (a test may install a fake one), no profiler, no toggles in the environment."""
    monkeypatch.delenv("GREENFAST_TASKS", raising=False)
    monkeypatch.setattr("greenfast.judge.profiling.ncu", lambda: None)
    monkeypatch.setattr("greenfast.judge.validate.save_plot", lambda record, path: path.touch())  # slow to draw
    no_gpu(monkeypatch)
