"""The tests of this folder compile into the cache of the pipeline's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("GREENFAST_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernel-cache"))
