"""All tests of this folder compile into one cache of this session, never into the user's."""

from __future__ import annotations

import pytest

from tests.fakes import no_gpu


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A machine without a GPU (a test may install a fake one), no profiler, no toggles in the environment."""
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernel-cache"))
    monkeypatch.delenv("GREENFAST_TASKS", raising=False)
    monkeypatch.setattr("greenfast.judge.profile.ncu", lambda: None)
    monkeypatch.setattr("greenfast.judge.validate.save_plot", lambda record, path: path.touch())  # slow to draw
    no_gpu(monkeypatch)
